"""Problems from a JSONL file, scored by exact match or by a user's reward function.

One JSON object per line: `prompt`, and usually `answer`, `kind`; every other field becomes a column that a reward function may
name. A reward function has the signature `f(prompts, completions, **columns) -> list[float]`.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from motley.records import Problem
from motley.tasks.task import Split

HELDOUT_ONE_IN = 10

Reward = Callable[..., Sequence[float]]


class FileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: str = ""
    heldout: str = ""  # a file of its own; without it one problem in ten is held out by its hash
    ood: str = ""


class FileTask:
    def __init__(self, config: FileConfig, reward: Reward | None = None) -> None:
        if not config.file:
            raise ValueError('this task needs its problems: set file = "problems.jsonl" under [task]')
        self._reward = reward or exact_match
        problems = read_problems(Path(config.file))
        sets: dict[Split, list[Problem]] = {"train": problems}
        if config.heldout:
            sets["heldout"] = read_problems(Path(config.heldout))
        else:
            sets["heldout"] = [p for p in problems if _is_heldout(p)] or problems[:1]
            heldout = {p.prompt for p in sets["heldout"]}
            sets["train"] = [p for p in problems if p.prompt not in heldout]
        if config.ood:
            sets["ood"] = read_problems(Path(config.ood))
        if not sets["train"]:
            raise ValueError(f"{config.file}: every problem is held out, none is left to train on; add some, or name a heldout file")
        self.splits: tuple[Split, ...] = tuple(sets)
        self.fingerprint = hashlib.sha256("".join(p.id for p in sets["train"]).encode()).hexdigest()
        self.kinds: tuple[str, ...] = tuple(sorted({p.kind for p in sets["train"]}))
        self._by_kind = {(split, kind): [p for p in sets[split] if p.kind == kind] for split in sets for kind in self.kinds}
        for (split, kind), found in self._by_kind.items():
            if not found:
                raise ValueError(f"{config.file}: no {split} problem of kind {kind!r}; add some, or name a {split} file that has them")

    def draw(self, rng: random.Random, split: Split, kind: str) -> Problem:
        return rng.choice(self._by_kind[split, kind])

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        names = sorted({name for p in problems for name in p.columns})
        columns: dict[str, list[Any]] = {name: [p.columns.get(name) for p in problems] for name in names}
        columns["answer"] = [p.answer for p in problems]
        try:
            rewards = [float(r) for r in self._reward(prompts=[p.prompt for p in problems], completions=list(completions), **columns)]
        except TypeError as error:
            raise ValueError(f"the reward function failed: {error}; expected f(prompts, completions, **columns) -> list[float]") from error
        if len(rewards) != len(completions):
            raise ValueError(f"the reward function returned {len(rewards)} rewards for {len(completions)} completions; expected one each")
        return rewards


def exact_match(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 where the completion is the answer, spaces around it aside."""
    return [float(completion.strip() == right.strip()) for completion, right in zip(completions, answer, strict=True)]


def read_problems(path: Path) -> list[Problem]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read problems from {path}: {error.strerror}") from None
    problems = [_problem(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if len(problems) < 2:
        raise ValueError(f"{path} has {len(problems)} problems; at least 2 are needed, one to learn from and one held out")
    return problems


def _problem(line: str, place: str) -> Problem:
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f'{place}: {error}; expected one JSON object per line, such as {{"prompt": "2+2=", "answer": "4"}}') from None
    prompt = fields.pop("prompt", None)
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{place}: no "prompt" text; every line needs one')
    answer = fields.pop("answer", None)
    answer = "" if answer is None else answer
    taken = sorted({"prompts", "completions"} & fields.keys())
    if taken:
        raise ValueError(f"{place}: the field {taken[0]!r} is a name the reward function is called with; rename it")
    return Problem(prompt=prompt, answer=str(answer), kind=str(fields.pop("kind", "all")), columns=fields)


def load_reward(spec: str) -> Reward:
    """Import `module:function`."""
    module_name, _, function_name = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a module beside the crew file is what people write
    try:
        reward = getattr(importlib.import_module(module_name), function_name)
    except ImportError as error:
        raise ValueError(f"task {spec!r}: cannot import {module_name}: {error}; is it on PYTHONPATH?") from None
    except AttributeError:
        raise ValueError(f"task {spec!r}: module {module_name} has no {function_name}") from None
    if not callable(reward):
        raise ValueError(
            f"task {spec!r}: {function_name} is {type(reward).__name__}; expected f(prompts, completions, **columns) -> list[float]"
        )
    return reward


def _is_heldout(problem: Problem) -> bool:
    return hashlib.sha256(problem.prompt.encode()).digest()[0] % HELDOUT_ONE_IN == 0
