"""A run that goes on, longer or elsewhere. What has changed since it began, and may, is written to
RUN/config.toml, and noted in RUN/changes.jsonl with the round it holds from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from motley.config import (
    CrewConfig,
    changes,
    check_changes,
    parse_config,
    read_config,
    values_of,
    write_config,
)
from motley.exchange import Header, WireError, first_record, unpack
from motley.files import append, drop_unfinished_line
from motley.records import Charter

CHANGES = "changes.jsonl"


class NotedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A line of RUN/changes.jsonl."""

    after_round: int
    key: str
    before: Any
    after: Any


def config_to_resume(folder: Path, settings: Sequence[str] = ()) -> CrewConfig:
    """The crew of a run folder, with `crew.rounds=300` and the like instead of what it says."""
    path = folder / "config.toml"
    for name, words in _OTHER_FOLDERS.items():
        if (folder / name).exists():
            raise ValueError(f"{folder} is {words}")
    if not path.exists():
        raise ValueError(
            f"{folder} is not a run folder: it has no config.toml; give the folder that motley "
            "train printed"
        )
    return read_config(path, settings)


_OTHER_FOLDERS = {
    "member.json": "the folder of a peer at a hub; go on with the line that the hub printed: "
    "motley join ...",
    "hub.json": "the folder of a hub; go on with the same motley hub line",
}


def founded(folder: Path) -> tuple[CrewConfig, Charter] | None:
    """The crew as a run in one process began with it, from its log; None where that is no charter
    that can be read.
    """
    record = first_record(folder / "groups" / "log.bin")
    try:
        content = Header.of(unpack(record).body).content()
    except WireError:
        return None
    if not isinstance(content, Charter):
        return None
    return parse_config(content.config, source=f"the charter of {folder}"), content


def go_on_with(folder: Path, began: CrewConfig, config: CrewConfig, round: int) -> None:
    """Let a run go on with another crew file than it `began` with, if only what may is different.

    `round`: how many are done.
    """
    found = changes(began, config)
    check_changes(found, str(folder))
    if config.crew.rounds < round:
        raise ValueError(
            f"{folder} has {round} rounds already and cannot end after {config.crew.rounds}; give "
            f"--rounds {round} or more"
        )
    drop_unfinished_line(folder / CHANGES)  # what it noted is found anew
    known = values_of(began) | {noted.key: noted.after for noted in read_changes(folder)}
    now = values_of(config)
    lines = [
        NotedChange(after_round=round, key=key, before=before, after=now.get(key))
        for key, before in known.items()
        if before != now.get(key)
    ]
    if lines:
        content = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        append(folder / CHANGES, content, synced=True)
    if read_config(folder / "config.toml") != config:
        write_config(config, folder / "config.toml")


def read_changes(folder: Path) -> list[NotedChange]:
    path = folder / CHANGES
    if not path.exists():
        return []
    return [
        _decoded(line, f"{path}, line {number}")
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
    ]


def _decoded(line: bytes, place: str) -> NotedChange:
    try:
        return msgspec.json.decode(line, type=NotedChange)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{place} cannot be read ({error}); delete that line: what is different from the "
            "beginning is noted anew"
        ) from None
