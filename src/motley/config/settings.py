"""Settings from a command line: `learning.lr=1e-5` on top of what a crew file says.

Knows tables as TOML has them, not what may stand in them: the whole is checked as one file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

Document = dict[str, Any]  # a crew file as TOML has it

_EVERYONE = "*"


def with_settings(document: Document, settings: Sequence[str]) -> Document:
    """The document with every `TABLE.KEY=VALUE`, the last one of a key counting.

    >>> with_settings({"learning": {"lr": 1e-4}}, ["learning.lr=1e-5", "learning.grad_clip=2"])
    {'learning': {'lr': 1e-05, 'grad_clip': 2}}
    """
    document = _copied(document)
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            raise ValueError(
                f"--set {setting} is not KEY=VALUE; write such as --set learning.lr=1e-5"
            )
        value = _value(setting, text.strip())
        for table, rest in _tables(document, keys, setting):
            _put(table, rest, value, setting)
    return document


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _value(setting: str, text: str) -> Any:
    """A TOML value. A bare word is text, since shells take quotes away."""
    if text in ("True", "False", "None"):
        raise ValueError(
            f"--set {setting}: TOML writes true and false, and leaves out what is none"
        )
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if not text or text[0] in "\"'[{":
            raise ValueError(
                f"--set {setting}: {text or 'nothing'} is no TOML value ({error}); quote it for "
                "the shell, such as --set 'task.kinds=[\"sort\"]'"
            ) from None
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _tables(document: Document, keys: list[str], setting: str) -> list[tuple[Document, list[str]]]:
    """Where a path begins: the document, or the peers that it names."""
    if keys[0] != "peer":
        return [(document, keys)]
    found = document.get("peer", [])
    peers = [peer for peer in found if isinstance(peer, dict)] if isinstance(found, list) else []
    names = [str(peer.get("name", "")) for peer in peers]
    known = f"the peers are {', '.join(names) or 'none'}"
    if len(keys) < 3:
        raise ValueError(
            f"--set {setting} names no peer and key; write --set peer.NAME.KEY=VALUE, or "
            f"peer.*.KEY for every peer; {known}"
        )
    chosen = [peer for peer, name in zip(peers, names, strict=True) if keys[1] in (name, _EVERYONE)]
    if not chosen:
        raise ValueError(f"--set {setting}: there is no peer {keys[1]!r}; {known}")
    return [(peer, keys[2:]) for peer in chosen]


def _put(table: Document, keys: list[str], value: Any, setting: str) -> None:
    for number, key in enumerate(keys[:-1], 1):
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ValueError(
                f"--set {setting}: {'.'.join(keys[:number])} is {inner!r} and no table; set the "
                f"whole of it, such as {key}={{{keys[-1]}=…}}"
            )
        table = inner
    table[keys[-1]] = value
