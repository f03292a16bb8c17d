"""gsm8k, math500, svamp: word problems in their published fields, from files or from the Hugging
Face hub. Owns what those fields are called; answers are found and compared in answers.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from motley.records import Problem
from motley.tasks.answers import INSTRUCTIONS, Form, find_answer, math_reward, wrap
from motley.tasks.collection import Collection, split_sets
from motley.tasks.extras import load, need
from motley.tasks.rows import Fields, placed_rows
from motley.tasks.task import QUESTION, Measure, Scoring


class DatasetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: str = ""  # in the dataset's own fields; without it: from the hub
    heldout: str = ""  # without it: the hub's test split, or one problem in ten by its hash
    ood: str | tuple[str, ...] = ""  # or several files, one for each of `ood_task`
    ood_task: str | tuple[str, ...] = ""  # the dataset `ood` is of; without it: the same one
    form: Form = "tags"


class PublishedDataset(msgspec.Struct, frozen=True, kw_only=True):
    """A published dataset: where it is, and how a problem is made of one of its rows."""

    hub: str
    part: str | None = None
    train: str = "train"
    heldout: str = ""  # the hub's split for it, where there is one
    make: Callable[[Fields, str], Problem]


class DatasetTask(Collection):
    measure: Measure = "accuracy"
    template = QUESTION
    scoring: Scoring = "each"

    def __init__(self, name: str, config: DatasetConfig) -> None:
        need("math_verify", f"task {name!r}")
        source = DATASETS[name]
        self._form = config.form
        self.instruction = INSTRUCTIONS[config.form]
        if config.file:
            problems, heldout = _of_file(config.file, source), []
        else:
            problems = _from_hub(source, source.train)
            heldout = (
                _from_hub(source, source.heldout) if source.heldout and not config.heldout else []
            )
        if config.heldout:
            heldout = _of_file(config.heldout, source)
        ood = _ood(name, config)
        super().__init__(
            split_sets(problems, heldout, ood, config.file or source.hub),
            config.file or source.hub,
            config.form,
        )

    def target(self, problem: Problem) -> str:
        return wrap(problem.answer, self._form, problem.columns.get("solution", ""))

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        answers = [find_answer(completion, self._form) for completion in completions]
        return [
            0.0 if answer is None else math_reward(answer, p.answer)
            for p, answer in zip(problems, answers, strict=True)
        ]


def _of_file(name: str, source: PublishedDataset) -> list[Problem]:
    rows = placed_rows(Path(name))
    if len(rows) < 2:
        raise ValueError(
            f"{name} has {len(rows)} problems; at least 2 are needed, one to learn from and one "
            "held out"
        )
    return [source.make(row.fields, row.place) for row in rows]


def _ood(name: str, config: DatasetConfig) -> list[Problem]:
    """Of all datasets that are named for it, each a kind of its own."""
    files, names = _several(config.ood), _several(config.ood_task)
    if not names:
        names = (name,) * len(files)
    if files and len(files) != len(names):
        raise ValueError(
            f"ood has {len(files)} files for {len(names)} datasets of ood_task "
            f"({', '.join(names)}); name one file for each, or none to take all from the hub"
        )
    if not files:
        sources = map(_source, names)
        return [p for one in sources for p in _from_hub(one, one.heldout or one.train)]
    pairs = zip(files, names, strict=True)
    return [p for file, dataset in pairs for p in _of_file(file, _source(dataset))]


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return ((value,) if value else ()) if isinstance(value, str) else value


def _source(name: str) -> PublishedDataset:
    if name not in DATASETS:
        raise ValueError(f"ood_task={name!r} is not known; use one of {', '.join(DATASETS)}")
    return DATASETS[name]


def _from_hub(source: PublishedDataset, split: str) -> list[Problem]:
    package = load("datasets", f"reading {source.hub} from the hub")
    try:
        rows: Iterable[Fields] = package.load_dataset(source.hub, source.part, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot get {source.hub} ({split}) from the Hugging Face hub: {error}; without a "
            "connection, "
            'download it elsewhere and set task.file = "problems.jsonl"'
        ) from None
    return [
        source.make(dict(row), f"{source.hub} {split} row {number}")
        for number, row in enumerate(rows, 1)
    ]


def _text(fields: Fields, name: str, place: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f'{place}: no "{name}" text; expected the fields of the published dataset, this one '
            f"has {', '.join(fields) or 'none'}"
        )
    return value.strip()


_CALCULATOR = re.compile(r"<<[^<>]*>>")


def _gsm8k(fields: Fields, place: str) -> Problem:
    worked, mark, final = _text(fields, "answer", place).rpartition("####")
    if not mark or not final.strip():
        raise ValueError(
            f'{place}: "answer" has no final "#### N"; expected it as in the published dataset'
        )
    columns = {"solution": _CALCULATOR.sub("", worked).strip()}
    return Problem(
        kind="gsm8k",
        prompt=_text(fields, "question", place),
        answer=final.strip().replace(",", ""),
        columns=columns,
    )


def _math500(fields: Fields, place: str) -> Problem:
    solution = fields.get("solution")
    columns: dict[str, Any] = {"solution": solution.strip()} if isinstance(solution, str) else {}
    return Problem(
        kind="math500",
        prompt=_text(fields, "problem", place),
        answer=_text(fields, "answer", place),
        columns=columns,
    )


def _svamp(fields: Fields, place: str) -> Problem:
    answer = fields.get("Answer")
    try:
        number = float(answer)  # type: ignore[arg-type]  # the hub has text, some files numbers
    except (TypeError, ValueError):
        raise ValueError(f'{place}: "Answer" is {answer!r}; expected a number') from None
    prompt = f"{_text(fields, 'Body', place)} {_text(fields, 'Question', place)}"
    return Problem(
        kind="svamp", prompt=prompt, answer=str(int(number) if number.is_integer() else number)
    )


DATASETS: dict[str, PublishedDataset] = {
    "gsm8k": PublishedDataset(hub="openai/gsm8k", part="main", heldout="test", make=_gsm8k),
    "math500": PublishedDataset(hub="HuggingFaceH4/MATH-500", train="test", make=_math500),
    "svamp": PublishedDataset(hub="ChilleD/SVAMP", heldout="test", make=_svamp),
}
