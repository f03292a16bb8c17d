from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from motley.records import Problem
from motley.tasks import Task, check_task, load_task

Rows = list[dict[str, Any]]


def gsm8k(count: int, start: int = 0) -> Rows:
    return [
        {
            "question": f"Ann has {n} pens and buys 1000. How many?",
            "answer": f"{n}+1000 = <<{n}+1000={n + 1000}>>{n + 1000} pens\n#### {n + 1000:,}",
        }
        for n in range(start, start + count)
    ]


def math500(count: int) -> Rows:
    return [
        {
            "problem": f"Halve ${n}$.",
            "solution": f"It is $\\boxed{{\\frac{{{n}}}{{2}}}}$.",
            "answer": f"\\frac{{{n}}}{{2}}",
            "level": 2,
        }
        for n in range(1, 2 * count, 2)
    ]


def svamp(count: int) -> Rows:
    return [
        {
            "Body": f"Tom had {n} nuts and ate 2.",
            "Question": "How many are left?",
            "Answer": float(n - 2),
        }
        for n in range(3, count + 3)
    ]


def write(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def first(task: Task, split: str = "train") -> Problem:
    return task.draw(random.Random(0), split, task.kinds_of(split)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"), [("gsm8k", gsm8k(60)), ("math500", math500(60)), ("svamp", svamp(60))]
)
@pytest.mark.parametrize("form", ["tags", "boxed", "line"])
def test_every_dataset_knows_its_own_answers(
    name: str, rows: Rows, form: str, tmp_path: Path
) -> None:
    task = load_task(name, {"file": write(tmp_path / "p.jsonl", rows), "form": form})
    assert task.kinds == (name,)
    assert task.splits == ("train", "heldout")
    assert check_task(task) == []


def test_gsm8k_is_its_question_its_last_number_and_its_working(tmp_path: Path) -> None:
    task = load_task("gsm8k", {"file": write(tmp_path / "p.jsonl", gsm8k(60))})
    problem = first(task)
    n = int(problem.answer) - 1000
    assert problem.prompt == f"Ann has {n} pens and buys 1000. How many?"
    assert problem.columns == {"solution": f"{n}+1000 = {n + 1000} pens"}
    assert (
        task.target(problem)
        == f"<think>{n}+1000 = {n + 1000} pens</think><answer>{n + 1000}</answer>"
    )
    assert (task.template, "<think>" in task.instruction) == (
        "Question: {prompt}\nAnswer: {answer}",
        True,
    )


def test_svamp_puts_its_question_after_its_story(tmp_path: Path) -> None:
    problem = first(load_task("svamp", {"file": write(tmp_path / "p.jsonl", svamp(60))}))
    assert problem.prompt == f"Tom had {int(problem.answer) + 2} nuts and ate 2. How many are left?"
    assert problem.columns == {}


def test_answers_count_in_their_form_and_as_mathematics(tmp_path: Path) -> None:
    task = load_task("math500", {"file": write(tmp_path / "p.jsonl", math500(60))})
    problem = Problem(kind="math500", prompt="Halve $1$.", answer="\\frac{1}{2}")
    texts = [
        "<think>?</think><answer>0.5</answer>",
        "<think>?</think><answer>$1/2$</answer>",
        "0.5",
        "<think></think><answer>2</answer>",
    ]
    assert task.score([problem] * 4, texts) == [1.0, 1.0, 0.0, 0.0]


def test_another_dataset_can_be_out_of_distribution(tmp_path: Path) -> None:
    files = {
        "file": write(tmp_path / "g.jsonl", gsm8k(60)),
        "ood": write(tmp_path / "m.jsonl", math500(20)),
    }
    task = load_task("gsm8k", {**files, "ood_task": "math500"})
    assert (task.kinds, task.kinds_of("heldout"), task.kinds_of("ood")) == (
        ("gsm8k",),
        ("gsm8k",),
        ("math500",),
    )
    assert first(task, "ood").prompt.startswith("Halve")
    assert check_task(task) == []


def test_several_datasets_can_be_out_of_distribution_each_a_kind(tmp_path: Path) -> None:
    files = {
        "file": write(tmp_path / "g.jsonl", gsm8k(60)),
        "ood": [write(tmp_path / "s.jsonl", svamp(20)), write(tmp_path / "m.jsonl", math500(20))],
        "ood_task": ["svamp", "math500"],
    }
    task = load_task("gsm8k", files)
    assert (task.kinds, task.kinds_of("ood")) == (("gsm8k",), ("math500", "svamp"))
    assert check_task(task) == []
    with pytest.raises(ValueError, match="ood has 1 files for 2 datasets of ood_task"):
        load_task("gsm8k", {**files, "ood": files["ood"][:1]})


def test_a_heldout_file_is_used_as_it_is(tmp_path: Path) -> None:
    files = {
        "file": write(tmp_path / "t.jsonl", gsm8k(20)),
        "heldout": write(tmp_path / "h.jsonl", gsm8k(5, start=500)),
    }
    task = load_task("gsm8k", files)
    assert {int(task.draw(random.Random(i), "heldout", "gsm8k").answer) for i in range(100)} == set(
        range(1500, 1505)
    )
    assert check_task(task) == []


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        (
            "gsm8k",
            {"prompt": "p", "answer": "#### 3"},
            'p.jsonl:2: no "question" text; expected the fields .* this one has prompt, answer',
        ),
        ("gsm8k", {"question": "q", "answer": "3"}, 'p.jsonl:2: "answer" has no final "#### N"'),
        ("math500", {"problem": "p"}, 'p.jsonl:2: no "answer" text'),
        (
            "svamp",
            {"Body": "b", "Question": "q", "Answer": "many"},
            "p.jsonl:2: \"Answer\" is 'many'; expected a number",
        ),
        ("svamp", {"Question": "q", "Answer": 3}, 'p.jsonl:2: no "Body" text'),
    ],
)
def test_a_row_without_the_published_fields_is_refused(
    name: str, row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    good = {"gsm8k": gsm8k, "math500": math500, "svamp": svamp}[name](1)
    with pytest.raises(ValueError, match=words):
        load_task(name, {"file": write(tmp_path / "p.jsonl", [*good, row])})


def test_unknown_keys_and_datasets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"unknown field `fiel`.*known: file, heldout, ood, ood_task, form"
    ):
        load_task("gsm8k", {"fiel": "x"})
    with pytest.raises(
        ValueError, match="ood_task='aime' is not known; use one of gsm8k, math500, svamp"
    ):
        load_task("gsm8k", {"file": write(tmp_path / "p.jsonl", gsm8k(60)), "ood_task": "aime"})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str]]:
    """A hub with these three datasets; notes what was asked of it."""
    asked: list[tuple[str, str | None, str]] = []
    rows = {"openai/gsm8k": gsm8k, "HuggingFaceH4/MATH-500": math500, "ChilleD/SVAMP": svamp}

    def load_dataset(path: str, part: str | None, split: str) -> Rows:
        asked.append((path, part, split))
        return [
            row | {"Answer": str(row["Answer"])} if "Answer" in row else row
            for row in rows[path](40 if split == "train" else 30)
        ]

    package = ModuleType("datasets")
    package.load_dataset = load_dataset
    package.__spec__ = object()
    monkeypatch.setitem(sys.modules, "datasets", package)
    return asked


def test_without_a_file_problems_come_from_the_hub_and_its_test_split_is_held_out(
    hub: list[tuple[str, str | None, str]],
) -> None:
    assert load_task("gsm8k", {}).splits == ("train", "heldout")
    assert load_task("svamp", {}).kinds == ("svamp",)
    assert hub == [("openai/gsm8k", "main", s) for s in ("train", "test")] + [
        ("ChilleD/SVAMP", None, s) for s in ("train", "test")
    ]


def test_math500_has_only_a_test_split_and_some_of_it_is_held_out(
    hub: list[tuple[str, str | None, str]],
) -> None:
    assert check_task(load_task("math500", {})) == []
    assert hub == [("HuggingFaceH4/MATH-500", None, "test")]


def test_out_of_distribution_comes_from_the_hub_too(
    hub: list[tuple[str, str | None, str]], tmp_path: Path
) -> None:
    task = load_task(
        "gsm8k", {"file": write(tmp_path / "p.jsonl", gsm8k(60)), "ood_task": "math500"}
    )
    assert task.kinds_of("ood") == ("math500",)
    assert hub == [("HuggingFaceH4/MATH-500", None, "test")]


def test_a_hub_that_cannot_be_reached_is_said_to_be(
    hub: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*arguments: object, **more: object) -> Rows:
        raise ConnectionError("no route")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", load_dataset)
    with pytest.raises(
        ValueError,
        match=(
            r"cannot get openai/gsm8k \(train\) from the Hugging Face hub: no route; .*set "
            r'task\.file = "problems.jsonl"'
        ),
    ):
        load_task("gsm8k", {})
