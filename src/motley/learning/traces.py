"""What a step made of every token that it scored: a small file per step, for a page that shows a
token's formula with its values (docs/metrics.md has the formulas).

Training never reads it. Owns the files and how many of them are kept. Imports without torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from motley.files import writing

NEWEST = 20  # steps of which none is dropped for an older one
MOST_FILES = 2000  # of a peer
MOST_BYTES = 2**30  # that a file may hold, decompressed
LEVEL = 1  # of zstd: higher ones take longer and save next to nothing

Floats = NDArray[np.floating[Any]]  # float32 as read

_HALVES = ("log_ratio", "weight", "free", "entropy")  # kept as float16
_MOST, _LEAST = float(np.finfo(np.float16).max), float(np.finfo(np.float16).smallest_subnormal)


class RolloutTrace(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a step made of one rollout, token by token of the learner's own cut.

    >>> RolloutTrace(position=38, number=3, sender="deep", advantage=-0.9, kept=True, ...)
    """

    position: int  # of its group in the log
    number: int  # in its group as it was sent
    sender: str
    advantage: float  # of a lesson the weight of [teach]
    kept: bool  # by the objective's filter
    filter_kl: float
    tokens: tuple[int, ...] | None  # the learner's own cut, where it is not the sender's
    spans: tuple[int, ...] | None  # first token of each span; None: every token is one
    log_ratio: Floats  # learner's minus sampler's log-prob; of a span on each of its tokens
    weight: Floats  # the factor on A·grad log p, had the filter kept the rollout
    free: Floats  # the same without truncation and clip
    entropy: Floats
    push: Floats  # -dloss/dlogp as it was used, times `scale`
    scale: float = 1.0  # what grad_share of [trust] left of its sender's part
    is_lesson: bool = False  # a rescue: made likelier beside the objective

    @property
    def used_weight(self) -> Floats:
        return self.weight if self.kept else np.zeros_like(self.weight)


class StepTrace(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One step of one learner. Rollouts that were not scored are not in it; lessons come last."""

    round: int  # as in groups/fates.jsonl
    peer: str
    version: int  # that the step made
    rollouts: tuple[RolloutTrace, ...]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A rollout in a file, but for its columns."""

    position: int
    number: int
    sender: str
    advantage: float
    kept: bool
    filter_kl: float
    tokens: tuple[int, ...] | None
    spans: tuple[int, ...] | None
    scale: float
    is_lesson: bool
    length: int


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """Columns have the values of all rollouts end to end."""

    round: int
    peer: str
    version: int
    entries: tuple[_Entry, ...]
    log_ratio: bytes
    weight: bytes
    free: bytes
    entropy: bytes
    push: bytes


class TraceFiles:
    """RUN/groups/traces/PEER/NNNNNN.zst, the steps of all peers of a run folder.

    Where a peer's files would be more than `most_bytes`, older steps go: first every odd round, the
    oldest before others, then of the rest every one that 4 does not divide, and so on. So they stay
    spread over the whole run. Of the newest steps one goes only where nothing older is left. A step
    that is larger than all that may be there is not written.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._sizes: dict[str, dict[int, int]] = {}  # by peer, by round; listed once

    def write(self, trace: StepTrace) -> None:
        """Not synced: a file that a crash spoilt reads as one that is not there."""
        if not trace.rollouts or not self._most_bytes:
            return
        content = _encoded(trace)
        if len(content) > self._most_bytes:
            return
        sizes = self._sizes_of(trace.peer)
        sizes.pop(trace.round, None)
        self._make_room(trace.peer, len(content))
        path = _path(self._folder, trace.peer, trace.round)
        partial = path.with_suffix(".partial")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            partial.replace(path)
        sizes[trace.round] = len(content)

    def cut(self, peer: str, round: int) -> None:
        """Take back what a peer wrote after a checkpoint of this round: it is written again."""
        for later in [number for number in self._sizes_of(peer) if number > round]:
            self._drop(peer, later)

    def _make_room(self, peer: str, num_bytes: int) -> None:
        sizes = self._sizes_of(peer)
        total = sum(sizes.values()) + num_bytes
        while sizes and (total > self._most_bytes or len(sizes) >= MOST_FILES):
            total -= sizes[leaving := _next_to_go(sizes)]
            self._drop(peer, leaving)

    def _drop(self, peer: str, round: int) -> None:
        path = _path(self._folder, peer, round)
        with writing(path):
            path.unlink(missing_ok=True)
        del self._sizes[peer][round]

    def _sizes_of(self, peer: str) -> dict[int, int]:
        if peer not in self._sizes:
            self._sizes[peer] = _listed(self._folder / peer)
        return self._sizes[peer]


def _next_to_go(rounds: Iterable[int]) -> int:
    """Of the older rounds the first of those that the smallest power of two divides."""
    ordered = sorted(rounds)
    older = ordered[: 1 - NEWEST]  # the newest of all is still to come
    return min(older, key=lambda number: (number & -number, number)) if older else ordered[0]


def read_trace(folder: Path, peer: str, round: int) -> StepTrace | None:
    """What a step of a peer made of its tokens, from a run folder; None where that is not there, or
    cannot be read.
    """
    for place in _places(folder, peer):
        try:
            trace = _decoded(_path(place, peer, round).read_bytes())
        except (OSError, ValueError, zstandard.ZstdError):
            continue
        if (trace.peer, trace.round) == (peer, round):
            return trace
    return None


def traced_rounds(folder: Path, peer: str) -> list[int]:
    """The rounds of which `read_trace` may find something, in order."""
    return sorted({number for place in _places(folder, peer) for number in _listed(place / peer)})


def _places(folder: Path, peer: str) -> list[Path]:
    """Of a crew in one process, and of one of several; none where this is no name of a peer."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", peer):
        return []
    return [own / "groups" / "traces" for own in (folder, folder / "peers" / peer)]


def _path(folder: Path, peer: str, round: int) -> Path:
    return folder / peer / f"{round:06d}.zst"


def _listed(folder: Path) -> dict[int, int]:
    """The bytes of each round's file."""
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as files:
        found = [(file.name, file) for file in files if re.fullmatch(r"\d{6,}\.zst", file.name)]
        return {int(name.removesuffix(".zst")): file.stat().st_size for name, file in found}


def _encoded(trace: StepTrace) -> bytes:
    columns: dict[str, Any] = {name: _halves(_column(trace, name)) for name in _HALVES}
    content = _File(
        round=trace.round,
        peer=trace.peer,
        version=trace.version,
        entries=tuple(map(_entry, trace.rollouts)),
        push=_column(trace, "push").astype("<f4").tobytes(),
        **columns,
    )
    # with its size and a checksum: what is not all there is not taken for a trace
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    return compressor.compress(msgspec.msgpack.encode(content))


def _entry(rollout: RolloutTrace) -> _Entry:
    return _Entry(
        position=rollout.position,
        number=rollout.number,
        sender=rollout.sender,
        advantage=rollout.advantage,
        kept=rollout.kept,
        filter_kl=rollout.filter_kl,
        tokens=rollout.tokens,
        spans=rollout.spans,
        scale=rollout.scale,
        is_lesson=rollout.is_lesson,
        length=len(rollout.push),
    )


def _column(trace: StepTrace, name: str) -> Floats:
    return np.concatenate([getattr(rollout, name) for rollout in trace.rollouts])


def _halves(value_N: Floats) -> bytes:
    """As float16. What is too large for it is its largest number, and what is too small its
    smallest: a weight that was not 0 must not look like one that was.
    """
    half_N = np.clip(value_N, -_MOST, _MOST).astype("<f2")
    vanished_N = (half_N == 0) & (value_N != 0)
    half_N[vanished_N] = np.copysign(_LEAST, value_N[vanished_N])
    return half_N.tobytes()


def _decoded(content: bytes) -> StepTrace:
    if not 0 <= zstandard.get_frame_parameters(content).content_size <= MOST_BYTES:
        raise ValueError("the file says that it holds more than a trace can")
    file = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(content), type=_File)
    ends = np.cumsum([0, *(entry.length for entry in file.entries)])
    dtypes = dict.fromkeys(_HALVES, "<f2") | {"push": "<f4"}
    columns = {
        name: np.frombuffer(getattr(file, name), dtype).astype(np.float32)
        for name, dtype in dtypes.items()
    }
    if any(len(column) != ends[-1] for column in columns.values()):
        raise ValueError("columns and rollouts of the file differ in length")
    parts = {name: np.split(column, ends[1:-1]) for name, column in columns.items()}
    return StepTrace(
        round=file.round,
        peer=file.peer,
        version=file.version,
        rollouts=tuple(
            _rollout(entry, {name: part[place] for name, part in parts.items()})
            for place, entry in enumerate(file.entries)
        ),
    )


def _rollout(entry: _Entry, columns: dict[str, Any]) -> RolloutTrace:
    said: dict[str, Any] = {
        name: getattr(entry, name) for name in _Entry.__struct_fields__ if name != "length"
    }
    return RolloutTrace(**said, **columns)
