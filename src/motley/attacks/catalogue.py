"""Every attack by its name."""

from __future__ import annotations

from collections.abc import Sequence

from motley.attacks import fuzzing
from motley.attacks.attack import Attack
from motley.attacks.lying import LYING
from motley.attacks.planting import PLANTING
from motley.attacks.traits import Subliminal

ATTACKS: dict[str, Attack] = {attack.name: attack for attack in (*PLANTING, *LYING, Subliminal())}
NAMES = (*ATTACKS, fuzzing.NAME)


def chosen(names: Sequence[str]) -> list[str]:
    """The names as asked for, in the catalogue's order; all of them if none is."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"attack {unknown[0]!r} is not known; there are {', '.join(NAMES)}")
    return [name for name in NAMES if name in names] or list(NAMES)
