from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable

import pytest

from motley.records import Problem
from motley.tasks import best_constant, check_task, load_task

KINDS = ["reverse", "sort", "increment", "sum", "difference", "product", "chain", "compare"]
NEXT_DIGIT = dict(zip("0123456789", "1234567890", strict=True))


def _two(text: str, sign: str, of: Callable[[int, int], int]) -> str:
    first, second = text.split(sign)
    return str(of(int(first), int(second)))


def _compared(text: str) -> str:
    first, second = map(int, text.split(","))
    return {1: ">", 0: "=", -1: "<"}[(first > second) - (first < second)]


# Answers worked out from the prompt alone.
ANSWERS: dict[str, Callable[[str], str]] = {
    "reverse": lambda text: "".join(reversed(text)),
    "sort": lambda text: "".join(digit * text.count(digit) for digit in "0123456789"),
    "increment": lambda text: "".join(NEXT_DIGIT[digit] for digit in text),
    "sum": lambda text: _two(text, "+", operator.add),
    "difference": lambda text: _two(text, "-", operator.sub),
    "product": lambda text: _two(text, "*", operator.mul),
    "chain": lambda text: str(sum(int(term) for term in re.findall(r"[+-]?\d", text))),
    "compare": _compared,
}


def draws(
    kind: str, split: str, count: int, levels: tuple[int, ...] = (2, 4), seed: int = 0
) -> list[Problem]:
    task = load_task("digits", {"kinds": [kind], "levels": list(levels)})
    rng = random.Random(seed)
    return [task.draw(rng, split, kind) for _ in range(count)]


def level(problem: Problem) -> int:
    """The length a prompt was made with: terms of a chain, digits of the first number otherwise."""
    text = problem.prompt.removeprefix(f"{problem.kind} ").removesuffix("=")
    return (
        len(re.findall(r"\d", text)) if problem.kind == "chain" else len(re.match(r"\d+", text)[0])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_right(kind: str) -> None:
    for problem in (
        draws(kind, "train", 300) + draws(kind, "heldout", 100) + draws(kind, "ood", 100)
    ):
        text = problem.prompt.removeprefix(f"{kind} ").removesuffix("=")
        assert problem.answer == ANSWERS[kind](text), problem
        assert problem.kind == kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_heldout_prompt_is_never_drawn_for_training(kind: str) -> None:
    heldout = {p.prompt for p in draws(kind, "heldout", 1500, (2, 3), seed=1)}
    train = {p.prompt for p in draws(kind, "train", 3000, (2, 3), seed=2)}
    assert len(train) > 50
    assert len(heldout) > 8
    assert heldout & train == set()


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_distribution_is_one_level_above_the_highest_trained(kind: str) -> None:
    assert {level(p) for p in draws(kind, "ood", 50)} == {5}
    assert {level(p) for p in draws(kind, "train", 50)} == {2, 4}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_problems(kind: str) -> None:
    assert draws(kind, "train", 20, seed=3) == draws(kind, "train", 20, seed=3)
    assert draws(kind, "train", 20, seed=3) != draws(kind, "train", 20, seed=4)


def test_a_completion_must_be_the_answer_itself() -> None:
    problem = Problem(kind="sum", prompt="sum 10+11=", answer="21")
    assert load_task("digits", {}).score([problem] * 5, ["21", "21 ", "021", "", "2"]) == [
        1,
        0,
        0,
        0,
        0,
    ]


def test_every_kind_passes_the_task_check() -> None:
    assert check_task(load_task("digits", {"kinds": KINDS, "levels": [4]})) == []


@pytest.mark.slow
def test_comparisons_have_no_answer_that_is_nearly_always_right() -> None:
    assert best_constant(draws("compare", "train", 3000, (3,))) < 0.45


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"kinds": ["spell"]}, "'spell'.*known: kinds, levels"),
        ({"kinds": []}, "must name at least one kind"),
        ({"kinds": ["sort", "sort"]}, "none twice"),
        ({"levels": []}, r"lengths from 2 to 8, such as \[3, 4\]"),
        ({"levels": [1]}, "lengths from 2 to 8"),
        ({"levels": [9]}, "lengths from 2 to 8"),
        ({"level": [3]}, "unknown field `level`.*known: kinds, levels"),
    ],
)
def test_bad_parameters_are_refused(parameters: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_task("digits", parameters)


def test_every_split_has_the_trained_kinds_and_prompts_go_as_they_are() -> None:
    task = load_task("digits", {"kinds": ["sum"]})
    assert {task.kinds_of(split) for split in task.splits} == {("sum",)}
    assert (task.template, task.instruction) == ("{prompt}{answer}", "")
    assert task.target(Problem(kind="sum", prompt="sum 10+11=", answer="21")) == "21"


@pytest.mark.parametrize(
    ("form", "rewards"), [("text", [1, 0, 0, 0]), ("first", [1, 1, 0, 0]), ("last", [1, 0, 1, 0])]
)
def test_a_form_says_where_the_answer_stands(form: str, rewards: list[float]) -> None:
    task = load_task("digits", {"form": form})
    problem = Problem(kind="reverse", prompt="reverse 12=", answer="21")
    assert task.score([problem] * 4, ["21", "21,3", "3,21", "3,4"]) == rewards
    assert check_task(task) == []


def test_a_form_other_than_the_usual_is_another_task() -> None:
    usual = load_task("digits", {}).fingerprint
    # what charters, hubs and warm starts were made with
    assert usual == "digits DigitsConfig(kinds=('reverse', 'sort', 'increment'), levels=(4,))"
    assert load_task("digits", {"form": "first"}).fingerprint == f"{usual} first"
