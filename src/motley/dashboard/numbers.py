"""Numbers of a metrics line by their dotted key, with nothing else of the line decoded.

`loss`, `timing.sample_s`, `heldout` (the mean over kinds), `heldout.KIND`, and `senders.KEY`, which
has a number for every sender. Knows no file and no run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from motley.dashboard.lines import end_of_senders
from motley.runs.history import finite

SCORES = ("heldout", "ood")  # by kind; only lines of an evaluation have them
# Counts by sender or age: what they add up to is shown elsewhere.
_TABLES = {"round", "ages", "refused", "dropped", "missing", "suspects"}
MOST_CHARACTERS, MOST_PARTS = 200, 6  # of a key
BySender = dict[str, float]  # "" is nobody: the number is of the peer itself


def is_score(key: str) -> bool:
    return key.partition(".")[0] in SCORES


def check_key(key: str) -> None:
    if not key or len(key) > MOST_CHARACTERS or key.count(".") >= MOST_PARTS:
        raise ValueError(
            f"key={key[:80]!r} names no number of a metrics line; write one that docs/metrics.md "
            "has, such as reward, heldout.sort or senders.kl_k3"
        )


def read_numbers(line: bytes, keys: Sequence[str]) -> dict[str, BySender]:
    """What a line has under each key; nothing where it has no such number.

    >>> read_numbers(b'{"reward": 0.5, "senders": {"a": {"ess": 1}}}', ["reward", "senders.ess"])
    {'reward': {'': 0.5}, 'senders.ess': {'a': 1.0}}
    """
    try:
        wanted = line if any(key.startswith("senders") for key in keys) else without_senders(line)
        decoded = _decoder(tuple(sorted(keys))).decode(wanted)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if len(keys) == 1:
            return {keys[0]: {}}
        # one that is no number must not cost the others
        return {key: read_numbers(line, [key])[key] for key in keys}
    return {key: _values(decoded, key) for key in keys}


def number_keys(line: bytes) -> list[str]:
    """Keys of the numbers that a line has, as `read_numbers` takes them.

    Without what is counted by age or by reason, which would be a key for each.
    """
    try:
        decoded = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    if not isinstance(decoded, dict):
        return []
    keys = dict.fromkeys(_keys_of({k: v for k, v in decoded.items() if k not in _TABLES}))
    return [key for key in keys if len(key) <= MOST_CHARACTERS]


def without_senders(line: bytes) -> bytes:
    """A line as Motley writes it, without the part that most of it is; else all of it."""
    first, behind = line.find(b',"senders":{'), end_of_senders(line, 0, len(line))
    return line[:first] + line[behind:] if 0 < first < behind else line


def _keys_of(line: Mapping[str, Any]) -> Iterator[str]:
    for key, value in line.items():
        if key == "senders" and isinstance(value, dict):
            merged = {k: v for one in value.values() for k, v in one.items() if v is not None}
            yield from (f"senders.{inner}" for inner in _leaves(merged))
        elif key in SCORES:
            yield key
            yield from (f"{key}.{inner}" for inner in _leaves(value))
        else:
            yield from (key + (f".{inner}" if inner else "") for inner in _leaves(value))


def _leaves(value: object) -> Iterator[str]:
    """Paths of the numbers inside of a value; of what is a number itself, ""."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (key + (f".{rest}" if rest else "") for rest in _leaves(inner))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield ""


def _values(decoded: object, key: str) -> BySender:
    first, _, rest = key.partition(".")
    top = getattr(decoded, _field(first))
    if top is None:
        return {}
    if first in SCORES:
        return _score(top, rest)
    path = [_field(part) for part in rest.split(".")] if rest else []
    numbers = top if first == "senders" else {"": top}
    return {
        name: value
        for name, one in numbers.items()
        if (value := finite(_at(one, path))) is not None
    }


def _score(by_kind: dict[str, float | None], kind: str) -> BySender:
    if kind:
        by_kind = {kind: by_kind.get(kind)}
    values = [value for one in by_kind.values() if (value := finite(one)) is not None]
    return {"": sum(values) / len(values)} if values else {}


def _at(value: Any, path: Sequence[str]) -> float | None:
    for part in path:
        if value is None:
            return None
        value = getattr(value, part)
    return value if isinstance(value, float) else None


Tree = dict[str, "Tree"]


@lru_cache(maxsize=256)
def _decoder(keys: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    tree: Tree = {}
    for key in keys:
        branch = tree
        first, _, rest = key.partition(".")
        for part in [first] if first in SCORES else [first, *(rest.split(".") if rest else ())]:
            branch = branch.setdefault(part, {})
    return msgspec.json.Decoder(_struct(tree, is_top=True))


def _struct(tree: Tree, is_top: bool = False) -> Any:
    """A struct that decodes what a tree of keys names, and skips the rest."""
    fields: list[tuple[str, Any, None]] = []
    for key, branch in tree.items():
        kind: Any = _struct(branch) if branch else float
        if is_top and key in SCORES:
            kind = dict[str, float | None]
        elif is_top and key == "senders":
            kind = dict[str, _struct(branch)]  # type: ignore[misc]
        fields.append((_field(key), kind | None, None))
    return msgspec.defstruct("Numbers", fields, rename={_field(key): key for key in tree})


@lru_cache(maxsize=4096)
def _field(key: str) -> str:
    """A name that a field can have, for a key that can be any text."""
    return f"f{key.encode().hex()}"
