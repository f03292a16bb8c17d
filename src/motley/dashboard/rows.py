"""ObjectiveRow: the parts of an objective with their settings, as words. The objectives themselves
take torch, which is half a gigabyte and seconds; so a process that has it not asks a short-lived
one.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import msgspec

from motley.config import CrewConfig

ASK_S = 120.0  # for torch to be there


class RowPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a row."""

    kind: str  # the class, such as "Truncated"
    formula: str  # the first sentences of what it says of itself
    settings: dict[str, float | str] = {}
    ratio: str = ""  # of a surrogate that has one: its kind

    def number(self, name: str) -> float | None:
        value = self.settings.get(name)
        return float(value) if isinstance(value, int | float) else None


NO_PART = RowPart(kind="", formula="")


class ObjectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # with its variant
    about: str
    advantage: RowPart = NO_PART
    adjust: list[RowPart] = []
    weight: RowPart = NO_PART
    filter: RowPart = NO_PART
    surrogate: RowPart = NO_PART
    reduction: RowPart = NO_PART
    note: str = ""  # why its parts are not known

    @property
    def settings(self) -> dict[str, float | str]:
        parts = (self.weight, self.filter, self.surrogate)
        return {name: value for part in parts for name, value in part.settings.items()}


class _RowName(msgspec.Struct, frozen=True, kw_only=True):
    objective: str
    variant: str
    settings: dict[str, float | str]


def row_of(config: CrewConfig) -> ObjectiveRow:
    """The row that a crew learns by. Takes seconds where torch is not loaded."""
    crew = config.crew
    asked = _RowName(objective=crew.objective, variant=crew.variant, settings=config.objective)
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
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=ObjectiveRow)
    except (ValueError, OSError, LookupError, ImportError, subprocess.SubprocessError) as error:
        why = f"the parts of {crew.row} are not known here: {error}"
        return ObjectiveRow(name=crew.row, about="", note=why)


def _read(asked: _RowName) -> ObjectiveRow:
    from motley.objectives import about, objective

    row = objective(asked.objective, asked.variant, dict(asked.settings))
    return ObjectiveRow(
        name=f"{asked.objective}/{asked.variant}" if asked.variant else asked.objective,
        about=about(asked.objective, asked.variant).line,
        advantage=_part(row.advantage),
        adjust=[_part(one) for one in row.adjust],
        weight=_part(row.weight),
        filter=_part(row.filter),
        surrogate=_part(row.surrogate),
        reduction=_part(row.reduction),
    )


def _part(part: Any) -> RowPart:
    inner = getattr(part, "own", part)  # hacpo has another surrogate inside
    ratio = getattr(inner, "ratio", None)
    settings = _settings(part)
    return RowPart(
        kind=type(part).__name__,
        formula=" ".join((inspect.getdoc(part) or "").partition("\n\n")[0].split()).rstrip("."),
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
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_RowName)
    print(msgspec.json.encode(_read(request)).decode())
