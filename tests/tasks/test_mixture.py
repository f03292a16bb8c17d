from __future__ import annotations

import random
from typing import Any

import pytest

from motley.records import Problem
from motley.tasks import Task, check_task, evaluation_set, load_task

SUMS = {"task": "reasoning_gym:chain_sum", "max_terms": 3}
PRODUCTS = {"task": "reasoning_gym:products", "max_terms": 2}


def mixture(**tables: Any) -> Task:
    return load_task("mixture", tables)


def test_every_table_is_a_kind_named_by_its_key() -> None:
    task = mixture(sums=SUMS, products=PRODUCTS)
    assert task.kinds == ("sums", "products")
    problem = task.draw(random.Random(0), "train", "products")
    assert problem.kind == "products"
    assert "*" in problem.prompt
    assert check_task(task) == []


def test_the_order_of_the_file_is_the_order_of_the_kinds() -> None:
    assert mixture(products=PRODUCTS, sums=SUMS).kinds == ("products", "sums")


def test_a_part_of_several_kinds_keeps_them_apart() -> None:
    task = mixture(
        easy={"task": "digits", "kinds": ["sort", "sum"]},
        hard={"task": "digits", "kinds": ["sort"], "levels": [6]},
    )
    assert task.kinds == ("easy/sort", "easy/sum", "hard")
    assert len(task.draw(random.Random(0), "train", "hard").prompt) == len("sort 123456=")
    assert check_task(task) == []


def test_each_problem_is_scored_by_its_own_part_and_place() -> None:
    task = mixture(sums=SUMS, products=PRODUCTS)
    problems = [task.draw(random.Random(i), "train", kind) for i in range(3) for kind in task.kinds]
    completions = [p.answer if i % 3 else "no" for i, p in enumerate(problems)]
    assert task.score(problems, completions) == [float(bool(i % 3)) for i in range(6)]
    assert task.target(problems[0]) == problems[0].answer
    with pytest.raises(ValueError, match="2 completions for 6 problems; expected one each"):
        task.score(problems, ["a", "b"])


def test_out_of_distribution_has_the_parts_that_have_it() -> None:
    task = mixture(sums=SUMS | {"ood": {"min_digits": 6, "max_digits": 6}}, products=PRODUCTS)
    assert task.splits == ("train", "heldout", "ood")
    assert task.kinds_of("ood") == ("sums",)
    assert {p.kind for p in evaluation_set(task, "ood", 3)} == {"sums"}
    assert mixture(sums=SUMS, products=PRODUCTS).splits == ("train", "heldout")


def test_template_and_instruction_are_those_of_the_parts() -> None:
    task = mixture(sums=SUMS | {"form": "boxed"}, products=PRODUCTS | {"form": "boxed"})
    assert task.template == "Question: {prompt}\nAnswer: {answer}"
    assert "\\boxed{}" in task.instruction
    assert task.target(Problem(kind="sums", prompt="p", answer="3")) == "\\boxed{3}"


def test_the_fingerprint_follows_the_parts() -> None:
    assert (
        mixture(sums=SUMS).fingerprint
        == mixture(sums=SUMS).fingerprint
        != mixture(sums=SUMS | {"max_terms": 4}).fingerprint
    )


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({}, r"a mixture needs its parts: add tables such as \[task.sums\]"),
        ({"levels": [3]}, r"levels is no part; expected a table \[task.levels\] with its own task"),
        ({"sums": {"max_terms": 3}}, "sums is no part"),
        ({"sums": SUMS | {"terms": 3}}, r"\[task.sums\]: .*unknown parameter 'terms'"),
        ({"sums": {"task": "sums"}}, r"\[task.sums\]: task 'sums' is not known"),
        (
            {
                "a": {"task": "digits", "kinds": ["sum", "sort"]},
                "a/sum": {"task": "digits", "kinds": ["sum"]},
            },
            "kinds of the same name; rename",
        ),
    ],
)
def test_bad_mixtures_are_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mixture(**tables)


def test_parts_that_put_problems_differently_leave_it_to_the_crew_file() -> None:
    assert (
        load_task("mixture", {"sums": SUMS, "products": PRODUCTS}).template
        == "Question: {prompt}\nAnswer: {answer}"
    )
    differ = load_task("mixture", {"sums": SUMS, "digits": {"task": "digits"}})
    assert (differ.template, differ.instruction) == (None, "")
    forms = load_task("mixture", {"sums": SUMS, "products": PRODUCTS | {"form": "tags"}})
    assert forms.instruction is None
