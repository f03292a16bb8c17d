"""Row: the parts of an objective with their settings, as words. The objectives themselves take
torch, which is half a gigabyte and seconds; so a process that has it not asks a short-lived one.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import msgspec

from motley.config import CrewConfig

ASK_S = 120.0  # for torch to be there


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a row."""

    kind: str  # the class, such as "Truncated"
    formula: str  # the first sentences of what it says of itself
    settings: dict[str, float | str] = {}
    ratio: str = ""  # of a surrogate that has one: its kind

    def number(self, name: str) -> float | None:
        value = self.settings.get(name)
        return float(value) if isinstance(value, int | float) else None


NO_PART = Part(kind="", formula="")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # with its variant
    about: str
    advantage: Part = NO_PART
    adjust: list[Part] = []
    weight: Part = NO_PART
    filter: Part = NO_PART
    surrogate: Part = NO_PART
    reduction: Part = NO_PART
    note: str = ""  # why its parts are not known

    @property
    def settings(self) -> dict[str, float | str]:
        parts = (self.weight, self.filter, self.surrogate)
        return {name: value for part in parts for name, value in part.settings.items()}


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    objective: str
    variant: str
    settings: dict[str, float | str]


def row_of(config: CrewConfig) -> Row:
    """The row that a crew learns by. Takes seconds where torch is not loaded."""
    crew = config.crew
    asked = _Asked(objective=crew.objective, variant=crew.variant, settings=config.objective)
    try:
        if "torch" in sys.modules:
            return _read(asked)
        done = subprocess.run(
            [sys.executable, "-m", "motley.dashboard.rows"],
            input=msgspec.json.encode(asked),
            capture_output=True,
            timeout=ASK_S,
            check=True,
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Row)
    except (ValueError, OSError, LookupError, ImportError, subprocess.SubprocessError) as error:
        why = f"the parts of {crew.row} are not known here: {error}"
        return Row(name=crew.row, about="", note=why)


def _read(asked: _Asked) -> Row:
    from motley.objectives import about, objective

    row = objective(asked.objective, asked.variant, dict(asked.settings))
    return Row(
        name=f"{asked.objective}/{asked.variant}" if asked.variant else asked.objective,
        about=about(asked.objective, asked.variant).line,
        advantage=_part(row.advantage),
        adjust=[_part(one) for one in row.adjust],
        weight=_part(row.weight),
        filter=_part(row.filter),
        surrogate=_part(row.surrogate),
        reduction=_part(row.reduction),
    )


def _part(part: Any) -> Part:
    inner = getattr(part, "own", part)  # hacpo has another surrogate inside
    ratio = getattr(inner, "ratio", None)
    settings = _settings(part)
    return Part(
        kind=type(part).__name__,
        formula=" ".join((inspect.getdoc(part) or "").partition("\n\n")[0].split()),
        settings=settings,
        ratio=type(ratio).__name__ if ratio is not None else "",
    )


def _settings(part: Any) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name in part.__dataclass_fields__:
        value = getattr(part, name)
        if hasattr(value, "__dataclass_fields__"):
            found |= _settings(value)
        elif not isinstance(value, float) or abs(value) != float("inf"):
            found[name] = value
    return found


if __name__ == "__main__":
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Asked)
    print(msgspec.json.encode(_read(request)).decode())
