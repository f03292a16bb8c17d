"""What of a crew may change when a run goes on: how long, where, how fast and how it is watched.
What it learns from, and by which rule, may not: its curve would be that of two runs.
"""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from motley.config.crew import CrewConfig
from motley.config.reading import ConfigError, by_name

# docs/command_line.md has the same list, with reasons
MAY_CHANGE = (
    "crew.rounds",
    "crew.report",
    "crew.check_rewards",
    "crew.deadline_s",
    "crew.quorum",
    "evaluate.*",
    "learning.lr",  # where steps blew up; it is noted from which round on
    "learning.checkpoint_every",
    "learning.token_budget",
    "peer.*.device",
    "peer.*.devices",
    "peer.*.dtype",  # that another machine computes alike: a checkpoint knows its arithmetic
    "peer.*.engine",
    "peer.*.gradient_checkpointing",
    "peer.*.lr",
    "peer.*.offload",
)

# why not, by the first word of a key
_REASONS = {
    "crew": "the crew agreed on it when it began",
    "task": "its problems or rewards would be others",
    "prompt": "its problems would be put differently",
    "objective": "steps before and after would be of two methods",
    "sampling": "rollouts before and after would be of two kinds",
    "learning": "steps before and after would be of two methods",
    "trust": "the crew agreed on it when it began",
    "teach": "steps before and after would be of two methods",
    "weights": "samplers and learners agreed on it when the crew began",
    "network": "the crew agreed on it when it began",
    "peer": "the peer would be another",
}
REMEDY = (
    "begin a new run, with model = RUN/checkpoints/round-N/PEER/model to go on from what was "
    "learned"
)


class Change(msgspec.Struct, frozen=True):
    """A key of a crew file whose value is another one from a round on."""

    key: str  # such as crew.rounds or peer.a.device
    before: Any
    after: Any


def changes(before: CrewConfig, after: CrewConfig) -> list[Change]:
    """Where two crews differ, key by key.

    A file or model that lies elsewhere is the same one moved, if it holds the same or there is none
    any more where it was.
    """
    old, new = values_of(before), values_of(after)
    was, now = _values(before), _values(after)
    return [
        Change(key, was.get(key), now.get(key))
        for key in {**old, **new}
        if old.get(key) != new.get(key) or _is_another(was.get(key), now.get(key))
    ]


def _is_another(was: Any, now: Any) -> bool:
    """Of two values that are alike by name: whether they are places that hold different things."""
    if isinstance(was, dict) and isinstance(now, dict):
        return any(_is_another(was[key], now[key]) for key in was.keys() & now.keys())
    if isinstance(was, list) and isinstance(now, list):
        return any(map(_is_another, was, now))
    if was == now or not (isinstance(was, str) and isinstance(now, str)):
        return False
    one, other = (Path(place.removeprefix("file:")) for place in (was, now))
    return one.exists() and not _hold_the_same(one, other)


def _hold_the_same(one: Path, other: Path) -> bool:
    if not (one.is_dir() and other.is_dir()):
        return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)
    names, others = ({path.name for path in place.iterdir()} for place in (one, other))
    return names == others and all(_hold_the_same(one / name, other / name) for name in names)


def check_changes(found: Sequence[Change], whose: str) -> None:
    """Refuse what may not change while a run goes on."""
    for change in found:
        if not any(fnmatchcase(change.key, pattern) for pattern in MAY_CHANGE):
            raise ConfigError(
                f"{whose}: {change.key} was {_shown(change.before)} and cannot become "
                f"{_shown(change.after)}: {_REASONS[change.key.split('.', 1)[0]]}; {REMEDY}. "
                f"May change: {', '.join(MAY_CHANGE)}"
            )


def values_of(config: CrewConfig) -> dict[str, Any]:
    """Values by TABLE.KEY, and of peers by peer.NAME.KEY, as JSON has them.

    Files and models are there by their last names: a run may go on where they lie elsewhere.
    """
    return _values(by_name(config))


def _values(config: CrewConfig) -> dict[str, Any]:
    plain = msgspec.json.decode(msgspec.json.encode(config))
    peers = {f"peer.{peer['name']}": peer for peer in plain.pop("peer")}
    return {
        f"{table}.{key}": value
        for table, content in (plain | peers).items()
        for key, value in content.items()
    }


def may_become(before: CrewConfig, after: CrewConfig) -> bool:
    """Whether a run that began with the one may go on with the other."""
    try:
        check_changes(changes(before, after), "")
    except ConfigError:
        return False
    return True


def _shown(value: Any) -> str:
    return "not there" if value is None else str(value)
