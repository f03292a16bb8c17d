"""mixture: several tasks as one, each table under [task] a kind of its own.

Knows the parts only as tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from motley.records import Problem
from motley.tasks.task import Measure, Scoring, Split, Task, ready_problems

Loader = Callable[[str, dict[str, Any]], Task]


class Mixture:
    """A part with one kind lends it its key; one with several has them as "key/kind"."""

    def __init__(self, tables: dict[str, Any], load: Loader) -> None:
        self._parts = {key: _part(key, table, load) for key, table in tables.items()}
        if not self._parts:
            raise ValueError(
                "a mixture needs its parts: add tables such as [task.sums] with task = "
                '"reasoning_gym:chain_sum"'
            )
        self._homes = {
            name: (key, kind)
            for key, part in self._parts.items()
            for name, kind in _names(key, part).items()
        }
        if len(self._homes) < sum(len(_names(key, part)) for key, part in self._parts.items()):
            raise ValueError(
                f"two parts of the mixture {', '.join(self._parts)} would have kinds of the same "
                "name; rename one"
            )
        self.splits: tuple[Split, ...] = tuple(
            s for s in _SPLITS if any(s in part.splits for part in self._parts.values())
        )
        measures = {part.measure for part in self._parts.values()}
        self.measure: Measure = "accuracy" if measures == {"accuracy"} else "reward"
        self.template = _agreed([part.template for part in self._parts.values()])
        self.instruction = _agreed([part.instruction for part in self._parts.values()])
        ways = {part.scoring for part in self._parts.values()}
        self.scoring: Scoring = ways.pop() if len(ways) == 1 else "in turn"
        self.fingerprint = "mixture " + " | ".join(
            f"{key}: {part.fingerprint}" for key, part in self._parts.items()
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.kinds_of("train")

    def kinds_of(self, split: Split) -> tuple[str, ...]:
        def has(key: str, kind: str) -> bool:
            part = self._parts[key]
            return split in part.splits and kind in part.kinds_of(split)

        return tuple(name for name, (key, kind) in self._homes.items() if has(key, kind))

    def draw(self, rng: random.Random, split: Split, kind: str) -> Problem:
        key, own = self._homes[kind]
        return msgspec.structs.replace(self._parts[key].draw(rng, split, own), kind=kind)

    def ready(self, split: Split) -> list[Problem]:
        """All of a split, of the parts whose problems lie ready."""
        return [
            msgspec.structs.replace(problem, kind=name)
            for name, (key, kind) in self._homes.items()
            if split in self._parts[key].splits
            for problem in ready_problems(self._parts[key], split)
            if problem.kind == kind
        ]

    def target(self, problem: Problem) -> str:
        key, own = self._homes[problem.kind]
        return self._parts[key].target(msgspec.structs.replace(problem, kind=own))

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        """Each part scores its own problems in one call."""
        rewards = [0.0] * len(problems)
        if len(completions) != len(problems):
            raise ValueError(
                f"{len(completions)} completions for {len(problems)} problems; expected one each"
            )
        for key, part in self._parts.items():
            rows = [row for row, p in enumerate(problems) if self._homes[p.kind][0] == key]
            own = [
                msgspec.structs.replace(problems[row], kind=self._homes[problems[row].kind][1])
                for row in rows
            ]
            for row, reward in zip(
                rows,
                part.score(own, [completions[row] for row in rows]) if rows else [],
                strict=True,
            ):
                rewards[row] = reward
        return rewards


_SPLITS: tuple[Split, ...] = ("train", "heldout", "ood")


def _part(key: str, table: Any, load: Loader) -> Task:
    if not isinstance(table, dict) or not isinstance(table.get("task"), str):
        raise ValueError(
            f"[task] of a mixture: {key} is no part; expected a table [task.{key}] with its own "
            'task, such as "reasoning_gym:chain_sum"'
        )
    try:
        return load(table["task"], {name: value for name, value in table.items() if name != "task"})
    except ValueError as error:
        raise ValueError(f"[task.{key}]: {error}") from error


def _names(key: str, part: Task) -> dict[str, str]:
    """The part's kinds by their names in the mixture."""
    kinds = list(dict.fromkeys(kind for split in part.splits for kind in part.kinds_of(split)))
    return {key: kinds[0]} if len(kinds) == 1 else {f"{key}/{kind}": kind for kind in kinds}


def _agreed(values: list[str | None]) -> str | None:
    return values[0] if len(set(values)) == 1 else None
