"""What a study keeps of a run: how good each peer was on the way, and what that took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from motley.config import CrewConfig
from motley.learning.senders import SenderMetrics
from motley.runs.metrics import LearnerLine, MetricsLine, SamplerLine, learner_lines
from motley.tasks import Measure


class StudyRun(NamedTuple):
    """A run of a study, and where it is.

    >>> StudyRun("specialists", "ftis", 0, Path("runs/study/runs/ftis-0/specialists"))
    """

    crew: str
    arm: str  # its label
    seed: int
    folder: Path


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer's training took. Tokens are those of completions, evaluations apart."""

    sampled: int  # by the peer, or by the samplers that follow it
    own: int  # learned from: of the groups that steps took, those it sampled
    foreign: int  # and those that others sampled
    seconds: float  # of sampling and learning

    @property
    def learned(self) -> int:
        return self.own + self.foreign


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One peer of one run: held-out score per kind before, after, and the lowest on the way."""

    arm: str  # its label
    seed: int
    peer: str
    start: dict[str, float]
    end: dict[str, float]
    lowest: dict[str, float]
    ood: dict[str, float]
    curve: dict[int, dict[str, float]] = {}  # round -> per kind
    spent: Spent | None = None  # None: kept before this was counted
    made: str = ""  # what an arm with a name stands for
    key: str = ""  # of its run (study/keys.py); none: kept before runs had one


class CrewOutcome(Outcome, frozen=True, kw_only=True):
    """An outcome that says whose it is, for files with outcomes of several crews."""

    crew: str = ""  # the file says whose it is
    measure: Measure = "accuracy"  # what scores are; files without it are read as this


Line = TypeVar("Line", bound=msgspec.Struct)


def read_outcomes(path: Path) -> list[Outcome]:
    """All of a file, or none if it is not there."""
    return _decoded(path, Outcome) if path.exists() else []


def read_whole_outcomes(path: Path) -> list[Outcome]:
    """The same, without a last line that a kill cut short."""
    return read_whole_lines(path, Outcome)


def read_whole_lines(path: Path, kind: type[Line]) -> list[Line]:
    """All of a file but a last line that a kill cut short; none if it is not there."""
    return _decoded(path, kind, may_be_torn=True) if path.exists() else []


def read_crew_outcomes(path: Path) -> list[CrewOutcome]:
    """Those of results.jsonl, and of files that do not say whose they are."""
    return _decoded(path, CrewOutcome)


def _decoded(path: Path, kind: type[Line], may_be_torn: bool = False) -> list[Line]:
    found, lines = [], path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if may_be_torn and number == len(lines) and not line.endswith(b"\n"):
                break
            raise ValueError(
                f"{path}, line {number} cannot be read ({error}); delete this line, and give the "
                "command that made it again: it makes what is missing"
            ) from None
    return found


def outcome_of(
    config: CrewConfig, arm: str, peer: str, lines: Sequence[MetricsLine], made: str = ""
) -> Outcome:
    """What a run of `config` came to for one of its peers."""
    own = [line for line in learner_lines(lines) if line.peer == peer and line.heldout]
    heldout = [line.heldout or {} for line in own]
    return Outcome(
        arm=arm,
        seed=config.crew.seed,
        peer=peer,
        start=heldout[0],
        end=heldout[-1],
        lowest={kind: min(measured[kind] for measured in heldout) for kind in heldout[0]},
        ood=own[-1].ood or {},
        curve={line.round: line.heldout or {} for line in own},
        spent=spent_of(config, peer, lines),
        made=made,
    )


def lines_lacking(config: CrewConfig, lines: Sequence[MetricsLine]) -> str:
    """What is not there of a run that was trained to its end; "" if nothing is."""
    for peer in config.students:
        own = {line.round: line for line in learner_lines(lines) if line.peer == peer.name}
        last = max(own, default=0) if config.evaluate.may_stop else config.crew.rounds
        if absent := [str(number) for number in range(last + 1) if number not in own]:
            return f"{peer.name}'s round{'s' * (len(absent) > 1)} {', '.join(absent)}"
        due = {*range(0, last, config.evaluate.every), last}
        if absent := [str(number) for number in sorted(due) if not own[number].heldout]:
            return f"{peer.name}'s evaluation after round {', '.join(absent)}"
    return ""


def spent_of(config: CrewConfig, peer: str, lines: Sequence[MetricsLine]) -> Spent:
    mine = [line for line in lines if config.student_of(line.peer) == peer]
    steps = [line for line in mine if isinstance(line, LearnerLine)]
    own = [_learned(config, line, True) for line in steps]
    sampled = sum(
        line.sampled_tokens if isinstance(line, SamplerLine) else _sampled(config, line)
        for line in mine
    )
    met = [line.met for line in steps if line.met]
    return Spent(
        sampled=sampled,
        own=sum(own)
        + sum(one.branched_tokens or 0 for one in met)
        + sum(line.kept.tokens for line in steps if line.kept),
        foreign=sum(_learned(config, line, False) for line in steps)
        + sum(one.rescued_tokens or 0 for one in met),
        seconds=sum(_seconds(line) for line in steps),
    )


def _sampled(config: CrewConfig, line: LearnerLine) -> int:
    """Tokens that a peer sampled in a round.

    A round that was sampled before a crash, and found again, has no rate. What the step took of
    its own stands for it.
    """
    timing = line.timing
    if timing and timing.sampled_tokens_per_s:
        return round(timing.sampled_tokens_per_s * timing.sample_s)
    branches = (line.met.branch_tokens or 0) if line.met else 0
    return 0 if line.reward is None else _learned(config, line, True) + branches


def _learned(config: CrewConfig, line: LearnerLine, own: bool) -> int:
    """Tokens of the groups that a step took: the peer's own, or those of others."""
    return sum(
        round((sender.tokens or 0.0) * _num_sequences(config, sender))
        for name, sender in (line.senders or {}).items()
        if (config.student_of(name) == line.peer) == own
    )


def _num_sequences(config: CrewConfig, sender: SenderMetrics) -> int:
    if isinstance(sender.sequences, int):
        return sender.sequences
    return sender.groups * config.rollouts_per_group


def _seconds(line: LearnerLine) -> float:
    timing = line.timing
    if timing is None:
        return 0.0
    return timing.sample_s + (timing.learn_s or 0.0) - (timing.overlap_s or 0.0)
