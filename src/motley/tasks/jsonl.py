"""Problems from a JSONL file, scored by comparing answers or by a user's reward function.

One JSON object per line: `prompt`, and usually `answer`, `kind`; every other field becomes a column
that a reward function may name. A reward function has the signature `f(prompts, completions,
**columns) -> list[float]`.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from motley.records import Problem
from motley.tasks.answers import INSTRUCTIONS, Form, find_answer, math_reward, wrap
from motley.tasks.collection import Collection, split_sets
from motley.tasks.extras import need
from motley.tasks.task import AS_IT_IS, Measure

Reward = Callable[..., Sequence[float]]
Fields = dict[str, Any]


class FileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: str = ""
    heldout: str = ""  # a file of its own; without it one problem in ten is held out by its hash
    ood: str = ""
    form: Form = "text"  # where in a completion its answer is
    equal: Literal["exact", "math"] = "exact"


class FileTask(Collection):
    template = AS_IT_IS

    def __init__(self, config: FileConfig, reward: Reward | None = None) -> None:
        if not config.file:
            raise ValueError(
                'this task needs its problems: set file = "problems.jsonl" under [task]'
            )
        own_scoring = {
            name: value
            for name, value in (("form", config.form), ("equal", config.equal))
            if value not in ("text", "exact")
        }
        if reward and own_scoring:
            raise ValueError(
                f"{', '.join(own_scoring)} under [task] would be ignored: the reward function "
                "scores; remove it, or use file:PATH"
            )
        if config.equal == "math":
            need("math_verify", 'equal = "math"')
        self._reward = reward or (_comparing(config) if own_scoring else exact_match)
        self.measure: Measure = "reward" if reward else "accuracy"
        self._may_be_undecided = reward is None
        self._form = config.form
        self.instruction = INSTRUCTIONS[config.form]
        problems, heldout, ood = (
            read_problems(Path(name), _problem) if name else []
            for name in (config.file, config.heldout, config.ood)
        )
        super().__init__(
            split_sets(problems, heldout, ood, config.file),
            config.file,
            str(own_scoring) if own_scoring else "",
        )

    def target(self, problem: Problem) -> str:
        return wrap(problem.answer, self._form)

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        names = sorted({name for p in problems for name in p.columns})
        columns: dict[str, list[Any]] = {
            name: [p.columns.get(name) for p in problems] for name in names
        }
        columns["answer"] = [p.answer for p in problems]
        try:
            rewards = [
                float(r)
                for r in self._reward(
                    prompts=[p.prompt for p in problems], completions=list(completions), **columns
                )
            ]
        except Exception as error:
            raise ValueError(
                f"the reward function failed: {type(error).__name__}: {error}; expected f(prompts, "
                "completions, **columns) -> list[float], whatever the completions say"
            ) from error
        if len(rewards) != len(completions):
            raise ValueError(
                f"the reward function returned {len(rewards)} rewards for {len(completions)} "
                "completions; expected one each"
            )
        if not self._may_be_undecided and any(map(math.isnan, rewards)):
            raise ValueError("the reward function returned nan; expected numbers")
        return rewards


def exact_match(
    prompts: list[str], completions: list[str], answer: list[str], **columns: object
) -> list[float]:
    """1 where the completion is the answer, spaces around it aside."""
    return [
        float(completion.strip() == right.strip())
        for completion, right in zip(completions, answer, strict=True)
    ]


def _comparing(config: FileConfig) -> Reward:
    """1 where the answer found in the completion is the right one."""

    def right(completion: str, gold: str) -> float:
        answer = find_answer(completion, config.form)
        if answer is None or config.equal == "exact":
            return float(answer == gold.strip())
        return math_reward(answer, gold)

    def reward(
        prompts: list[str], completions: list[str], answer: list[str], **columns: object
    ) -> list[float]:
        return [
            right(completion, gold) for completion, gold in zip(completions, answer, strict=True)
        ]

    return reward


def read_problems(path: Path, make: Callable[[Fields, str], Problem]) -> list[Problem]:
    """One problem per line of JSON.

    `make` gets the line's fields, and its place for what it complains of.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read problems from {path}: {error.strerror}") from None
    places = [(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    problems = [make(_fields(line, place), place) for line, place in places]
    if len(problems) < 2:
        raise ValueError(
            f"{path} has {len(problems)} problems; at least 2 are needed, one to learn from and "
            "one held out"
        )
    return problems


def _fields(line: str, place: str) -> Fields:
    try:
        return msgspec.json.decode(line, type=Fields)
    except msgspec.DecodeError as error:
        raise ValueError(
            f'{place}: {error}; expected one JSON object per line, such as {{"prompt": "2+2=", '
            f'"answer": "4"}}'
        ) from None


def _problem(fields: Fields, place: str) -> Problem:
    prompt = fields.pop("prompt", None)
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{place}: no "prompt" text; every line needs one')
    answer = fields.pop("answer", None)
    answer = "" if answer is None else answer
    taken = sorted({"prompts", "completions"} & fields.keys())
    if taken:
        raise ValueError(
            f"{place}: the field {taken[0]!r} is a name the reward function is called with; "
            "rename it"
        )
    return Problem(
        prompt=prompt, answer=str(answer), kind=str(fields.pop("kind", "all")), columns=fields
    )


def load_reward(spec: str) -> Reward:
    """Import `module:function`."""
    module_name, _, function_name = spec.partition(":")
    if os.getcwd() not in sys.path:
        # as `python -m` does: a module beside the crew file is what people write
        sys.path.insert(0, os.getcwd())
    try:
        reward = getattr(importlib.import_module(module_name), function_name)
    except ImportError as error:
        raise ValueError(
            f"task {spec!r}: cannot import {module_name}: {error}; is it on PYTHONPATH?"
        ) from None
    except AttributeError:
        raise ValueError(f"task {spec!r}: module {module_name} has no {function_name}") from None
    if not callable(reward):
        raise ValueError(
            f"task {spec!r}: {function_name} is {type(reward).__name__}; expected f(prompts, "
            "completions, **columns) -> list[float]"
        )
    return reward
