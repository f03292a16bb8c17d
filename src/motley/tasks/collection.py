"""Problems that lie ready in lists, by split and kind.

Owns how they are held out and drawn; knows no file format and no score.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from motley.records import Problem
from motley.tasks.task import Split, is_heldout

HELDOUT_ONE_IN = 10


class Collection:
    """Draws for a task whose problems are all at hand."""

    def __init__(self, sets: dict[Split, list[Problem]], source: str, scoring: str = "") -> None:
        """`scoring` names in the fingerprint what else decides over rewards."""
        self.splits: tuple[Split, ...] = tuple(sets)
        self.fingerprint = hashlib.sha256(
            ("".join(p.id for p in sets["train"]) + scoring).encode()
        ).hexdigest()
        self._kinds = {
            split: tuple(sorted({p.kind for p in sets["ood" if split == "ood" else "train"]}))
            for split in sets
        }
        self._by_kind = {
            (split, kind): [p for p in sets[split] if p.kind == kind]
            for split in sets
            for kind in self._kinds[split]
        }
        for (split, kind), problems in self._by_kind.items():
            if not problems:
                raise ValueError(
                    f"{source}: no {split} problem of kind {kind!r}; add some, or name a {split} "
                    "file that has them"
                )

    @property
    def kinds(self) -> tuple[str, ...]:
        return self._kinds["train"]

    def kinds_of(self, split: Split) -> tuple[str, ...]:
        return self._kinds[split]

    def ready(self, split: Split) -> list[Problem]:
        """All of a split."""
        return [p for kind in self._kinds[split] for p in self._by_kind[split, kind]]

    def draw(self, rng: random.Random, split: Split, kind: str) -> Problem:
        return rng.choice(self._by_kind[split, kind])


def split_sets(
    problems: list[Problem], heldout: Sequence[Problem], ood: Sequence[Problem], source: str
) -> dict[Split, list[Problem]]:
    """The splits; without problems to hold out, one prompt in ten is held out by its hash."""
    sets: dict[Split, list[Problem]] = {"train": problems, "heldout": list(heldout)}
    if not heldout:
        sets["heldout"] = [p for p in problems if is_heldout(p.prompt, HELDOUT_ONE_IN)] or problems[
            :1
        ]
        prompts = {p.prompt for p in sets["heldout"]}
        sets["train"] = [p for p in problems if p.prompt not in prompts]
    if ood:
        sets["ood"] = list(ood)
    if not sets["train"]:
        raise ValueError(
            f"{source}: every problem is held out, none is left to train on; add some, or name a "
            "heldout file"
        )
    return sets
