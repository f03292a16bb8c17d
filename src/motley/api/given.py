"""What Python gives, as a crew file has it; or refused in one line that says what was expected.

Knows no peer and no crew.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from motley.config import meant

T = TypeVar("T")


def well_called(cls: type[T]) -> type[T]:
    """Have a class say of a keyword that it does not know which one it takes instead."""
    plain = cls.__init__
    takes = list(inspect.signature(plain).parameters.values())[1:]
    names = [one.name for one in takes]
    by_place = [one.name for one in takes if one.kind is one.POSITIONAL_OR_KEYWORD]

    @functools.wraps(plain)
    def init(self: T, *given: Any, **named: Any) -> None:
        check_names(cls.__name__, named, names)
        if len(given) > len(by_place):
            others = names[len(by_place) :]
            hint = f"name the others, such as {others[0]}=…" if others else "leave the others out"
            raise TypeError(
                f"{cls.__name__} takes only {', '.join(by_place)} without a name, and got "
                f"{len(given)} values; {hint}"
            )
        plain(self, *given, **named)

    cls.__init__ = init  # type: ignore[method-assign,assignment]
    return cls


def check_names(whose: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse a keyword that is none of the known ones."""
    for name in given:
        if name not in known:
            close = meant(name, list(known))
            hint = f"did you mean {close}?" if close else f"it takes {', '.join(known)}"
            raise TypeError(f"{whose} has no {name!r}; {hint}")


def as_written(value: Any, place: str) -> Any:
    """A value as a crew file has it: text, a number, true or false, a list or a table.

    >>> as_written({"dtype": torch.float16, "lr": np.float32(0.5)}, "peer")
    {'dtype': 'float16', 'lr': 0.5}
    """
    if type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {_key(key, place): as_written(one, f"{place}.{key}") for key, one in value.items()}
    if isinstance(value, Enum):
        return as_written(value.value, place)
    if isinstance(value, set | frozenset) and all(isinstance(one, str) for one in value):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [as_written(one, f"{place}[{number}]") for number, one in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("device", "dtype"):
        return str(value).removeprefix("torch.")
    if callable(listed := getattr(value, "tolist", None)):  # numpy, torch
        return as_written(listed(), place)
    if isinstance(value, str):  # these are of a kind of their own
        return "".join(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    raise ValueError(
        f"{place} is {_shown(value)}; expected text, a number, a list or a table; leave it out for "
        "what is usual"
    )


def _key(key: object, place: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{place} has the key {key!r}; expected names that are text")
    return key


def as_path(given: object, name: str) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise ValueError(f"{name} is {_shown(given)}; expected the path of one, as text")
    return Path(given).expanduser()


def _shown(value: object) -> str:
    """A short value as it is, and of others the kind."""
    short = value is None or isinstance(value, bool | int | float | str)
    return repr(value)[:80] if short else f"a {type(value).__name__}"
