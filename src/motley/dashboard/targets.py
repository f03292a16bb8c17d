"""What a user wants to watch: a run folder, a crew's name, or the folder of a study or sweep."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from motley.archive import find_log
from motley.dashboard.answers import Served

REPORT = "report.html"
RUNS = Path("runs")
# what tells that a folder is a run's, a peer's or a hub's
_MARKS = ("metrics.jsonl", "config.toml", "member.json", "hub.json")


@dataclass(frozen=True, slots=True)
class Target:
    id: str
    name: str
    kind: Literal["run", "report"]
    folder: Path

    @property
    def served(self) -> Served:
        return Served(id=self.id, name=self.name, kind=self.kind, place=str(self.folder))


def find_targets(named: Sequence[str], may_come: bool = False, runs: Path = RUNS) -> list[Target]:
    """All that the page shows, under different ids. `may_come`: a run may not have begun yet."""
    if not named:
        raise ValueError(f"there is nothing to watch; {_remedy(runs)}")
    targets: dict[str, Target] = {}
    for name in named:
        for target in _targets_of(name, may_come, runs):
            id, number = target.id, 2
            while id in targets and targets[id].folder != target.folder:
                id, number = f"{target.id}-{number}", number + 1
            targets[id] = replace(target, id=id)
    return [*targets.values()]


def newest_run(runs: Path = RUNS) -> Path | None:
    """The run folder that was begun last."""
    folders = [folder for folder in runs.glob("*") if is_run(folder)]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def _targets_of(name: str, may_come: bool, runs: Path) -> Iterator[Target]:
    folder = Path(name)
    if (folder / REPORT).is_file():
        label = _label(folder)
        yield Target(f"{_id(label)}-report", label, "report", folder)
    if is_run(folder) or (may_come and not folder.is_file()):
        yield _run(folder)
    elif parts := _runs_of_study(folder):
        yield from map(_run, parts)
    elif not (folder / REPORT).is_file():
        try:
            yield _run(find_log(name, runs))
        except ValueError:
            raise ValueError(f"there is nothing to watch at {name!r}; {_remedy(runs)}") from None


def _run(folder: Path) -> Target:
    label = _label(folder)
    return Target(_id(label), label, "run", folder)


def _label(folder: Path) -> str:
    return folder.resolve().name or str(folder)


def _id(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", label).strip("-") or "run"


def _remedy(runs: Path) -> str:
    newest = newest_run(runs)
    such = f", such as motley watch {newest}" if newest else "; motley demo --watch makes a run"
    return f"give a run folder, the name of a crew, or the folder of a study or sweep{such}"


class _Keyed(msgspec.Struct):
    """What tells whose run an outcome of a study is of."""

    key: str = ""


def _runs_of_study(folder: Path) -> list[Path]:
    """The runs of a study: in its folder, or beside it where studies share theirs."""
    if own := [path for path in sorted(folder.glob("runs/*")) if is_run(path)]:
        return own
    keys = tuple(key for path in folder.glob("*/outcomes.jsonl") for key in _keys(path))
    shared = sorted((folder.resolve().parent / "runs").glob("*")) if keys else []
    # a folder's name ends in the first letters of its run's key
    endings = {path: path.name.rsplit("-", 1)[-1] for path in shared if is_run(path)}
    return [path for path, end in endings.items() if any(key.startswith(end) for key in keys)]


def _keys(path: Path) -> set[str]:
    keys = set()
    for line in path.read_bytes().splitlines():
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            keys.add(msgspec.json.decode(line, type=_Keyed).key)
    return keys - {""}
