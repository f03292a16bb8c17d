"""Export: every sound group of a log as JSON lines or Parquet, with problem and text if known."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from motley.archive.examine import Seen
from motley.archive.reading import Archive
from motley.archive.texts import LogTexts, TokenBytes
from motley.config import CrewConfig, parse_config, read_config
from motley.files import sync
from motley.records import Ending, Group, Problem, Rollout, Sampling
from motley.tasks import assign, load_task
from motley.tasks.extras import install
from motley.trust import nkey_of

BATCH_TOKENS = 2**18  # held in memory at a time; a row group of Parquet

ProblemOf = Callable[[Group], Problem | None]


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]  # None: not a finite number
    reward: float | None  # the same
    ending: Ending
    text: str | None  # None: the vocabulary is not known here
    token_bytes: TokenBytes | None  # the same
    canonical: bool


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of JSON, or a row of Parquet."""

    position: int
    id: str
    crew: str
    peer: str
    key: str  # the peer's, as an nkey
    counter: int  # place in the peer's chain
    round: int
    slot: int
    problem: str
    # with answer and kind: None where the task cannot be loaded, or does not give the peer this
    # problem
    prompt: str | None
    answer: str | None
    kind: str | None
    model: str
    vocabulary: str
    version: int
    sampling: Sampling
    created_s: float
    rollouts: tuple[RolloutRow, ...]

    @staticmethod
    def of(seen: Seen, problem_of: ProblemOf, texts: LogTexts) -> GroupRow:
        group, stamp = seen.group, seen.stamp
        assert group
        assert stamp
        problem, origin = problem_of(group), group.origin
        return GroupRow(
            position=seen.position,
            id=seen.id,
            crew=group.crew,
            peer=origin.peer,
            key=nkey_of(stamp.key),
            counter=stamp.counter,
            round=group.round,
            slot=group.slot,
            problem=group.problem,
            prompt=problem.prompt if problem else None,
            answer=problem.answer if problem else None,
            kind=problem.kind if problem else None,
            model=origin.model,
            vocabulary=origin.vocabulary,
            version=origin.version,
            sampling=origin.sampling,
            created_s=group.created_s,
            rollouts=tuple(_rollout_row(seen, rollout, texts) for rollout in group.rollouts),
        )


def _rollout_row(seen: Seen, rollout: Rollout, texts: LogTexts) -> RolloutRow:
    return RolloutRow(
        tokens=rollout.tokens,
        logprobs=tuple(map(_finite, rollout.logprobs)),
        reward=_finite(rollout.reward),
        ending=rollout.ending,
        text=texts.text(seen, rollout),
        token_bytes=texts.token_bytes(seen, rollout),
        canonical=rollout.canonical,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(slots=True)
class ExportCount:
    """How many groups were written, and what was left out, by fault."""

    num_groups: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def export(
    records: Iterable[Seen], path: Path, problem_of: ProblemOf, texts: LogTexts | None = None
) -> ExportCount:
    """Write every group without a fault to a new file, which is there only when it is whole."""
    if path.suffix not in _WRITERS:
        raise ValueError(
            f"cannot export to {path}: the name ends in {path.suffix or 'nothing'}; expected "
            f"{' or '.join(_WRITERS)}"
        )
    if path.exists():
        raise ValueError(
            f"{path} is there already and is not overwritten; choose another name, or delete it"
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"there is no folder {path.parent} to export {path.name} to; make it, or choose another"
        )
    done = ExportCount()
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            with _WRITERS[path.suffix](file) as write:
                for rows in _batches(records, problem_of, texts or LogTexts(), done):
                    write(rows)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)
    return done


def _batches(
    records: Iterable[Seen], problem_of: ProblemOf, texts: LogTexts, done: ExportCount
) -> Iterator[list[GroupRow]]:
    rows: list[GroupRow] = []
    num_tokens = 0
    for seen in records:
        if seen.fault:
            done.left_out[seen.fault] += 1
        if seen.fault or not seen.group:
            continue
        done.num_groups += 1
        rows.append(GroupRow.of(seen, problem_of, texts))
        num_tokens += seen.num_tokens
        if num_tokens >= BATCH_TOKENS:
            yield rows
            rows, num_tokens = [], 0
    yield rows


# What a group is about


def crew_of(archive: Archive) -> CrewConfig | None:
    """The crew of a log; None where it has no charter.

    The folder's own file names problem files and models as they are called on this machine.
    """
    own, charter = archive.folder / "config.toml", archive.charter()
    if own.is_file():
        return read_config(own)
    return parse_config(charter.config, source="the crew's charter") if charter else None


def problems_of(archive: Archive) -> ProblemOf:
    """The problem each group answers, by the crew's assignment.

    ValueError says why the task cannot be had here.
    """
    charter, config = archive.charter(), crew_of(archive)
    if charter is None or config is None:
        raise ValueError("the log has no charter")
    # A reward module is not needed, and whoever exports a log should not have to run it.
    name = config.crew.task
    task = load_task(name, config.task, scores=False)
    if task.fingerprint != charter.task:
        raise ValueError(f"task {name} asks other problems here than in the crew's charter")

    @lru_cache(maxsize=256)
    def assigned(peer: str, round: int) -> list[Problem]:
        return assign(task, config.crew.seed, peer, round, config.problems_per_peer, config.num_met)

    def problem_of(group: Group) -> Problem | None:
        round, slot = group.place
        problems = assigned(group.origin.peer, round)
        problem = problems[slot] if 0 <= slot < len(problems) else None
        return problem if problem and problem.id == group.problem else None

    return problem_of


# Files

Write = Callable[[list[GroupRow]], None]


@contextmanager
def _json_lines(file: BinaryIO) -> Iterator[Write]:
    yield lambda rows: file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)


@contextmanager
def _parquet(file: BinaryIO) -> Iterator[Write]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"Parquet is written by pyarrow; install it: {install('parquet')}; or export to .jsonl"
        ) from None
    schema = _schema(pyarrow)
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        yield lambda rows: writer.write_batch(
            pyarrow.RecordBatch.from_pylist(msgspec.to_builtins(rows), schema=schema)
        )


_WRITERS: dict[str, Callable[[BinaryIO], AbstractContextManager[Write]]] = {
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}


def _schema(arrow: Any) -> Any:
    """GroupRow in Parquet's types. Rewards are float32 on the wire already."""
    text, whole, real = arrow.string(), arrow.int64(), arrow.float32()
    must = lambda name, kind: arrow.field(name, kind, nullable=False)
    may = lambda name, kind: arrow.field(name, kind)
    sampling = arrow.struct(
        [
            must("temperature", arrow.float64()),
            must("top_k", whole),
            must("top_p", arrow.float64()),
            must("max_tokens", whole),
            must("logprobs", text),
        ]
    )
    rollout = arrow.struct(
        [
            must("tokens", arrow.list_(must("element", whole))),
            must("logprobs", arrow.list_(may("element", arrow.float64()))),
            may("reward", real),
            must("ending", text),
            may("text", text),
            may("token_bytes", arrow.list_(may("element", text))),
            must("canonical", arrow.bool_()),
        ]
    )
    return arrow.schema(
        [
            must("position", whole),
            *(must(name, text) for name in ("id", "crew", "peer", "key")),
            *(must(name, whole) for name in ("counter", "round", "slot")),
            must("problem", text),
            *(may(name, text) for name in ("prompt", "answer", "kind")),
            *(must(name, text) for name in ("model", "vocabulary")),
            must("version", whole),
            must("sampling", sampling),
            must("created_s", arrow.float64()),
            must("rollouts", arrow.list_(must("element", rollout))),
        ]
    )
