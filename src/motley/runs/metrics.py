"""A line of metrics.jsonl, and the file: what a run says of itself. docs/metrics.md has every key.

Fields stand in the order of the keys; a field that is None is no key. Knows nobody who writes a
line and nobody who shows one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from motley.files import append
from motley.learning.senders import SenderMetrics
from motley.tasks import Measure
from motley.trust.standing import Suspicion

ByKind = dict[str, float]  # kind of problem -> accuracy, or mean reward: what the task measures
Counts = dict[str, dict[str, int]]  # sender -> reason -> how many


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a round took. A sampler has no part in learning."""

    sample_s: float
    learn_s: float | None = None
    sampled_tokens_per_s: float | None = None
    learned_tokens_per_s: float | None = None
    overlap_s: float | None = None  # in which both went on
    reward_s: float | None = None  # of `sample_s`, only waiting for rewards
    translate_s: float | None = None  # of `learn_s`, reading other vocabularies
    device: str | None = None  # that it ran on


class MetProblems(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of the problems that all peers answer: how many a step met, and what was learned there."""

    problems: int | None = None
    failed: int | None = None
    rescued: int | None = None
    rescued_tokens: int | None = None
    branched: int | None = None
    branched_tokens: int | None = None
    unfit: int | None = None
    branches: int | None = None
    branch_tokens: int | None = None
    branch_reward: float | None = None


class KeptSuccesses(msgspec.Struct, frozen=True, kw_only=True):
    """Of own successes of earlier steps: how many a step was reminded of, and what is lost."""

    sequences: int
    tokens: int
    fallen: float


class Sign(msgspec.Struct, frozen=True, omit_defaults=True):
    """That something is wrong with a peer's training, said once: what, why it may be, what to do.

    `runs/signs.py` says when.
    """

    sign: str  # its name, such as "all wrong"
    words: str
    senders: list[str] = []  # whom it is about; nobody: the peer itself


class SampleAnswer(msgspec.Struct, frozen=True):
    """A greedy answer to a held-out problem, so that people see what a peer says."""

    kind: str
    prompt: str
    answer: str
    reward: float


class LearnerLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A round of who learns.

    >>> LearnerLine(round=20, peer="small", version=20, reward=0.61, loss=-0.031, grad_norm=0.84)
    """

    round: int
    peer: str
    version: int | None = None
    reward: float | None = None
    # of the step
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    inner_steps: int | None = None
    inner_clipped: float | None = None
    inner_kl: float | None = None
    reference_kl: float | None = None
    num_sequences: int | None = None
    num_scored: int | None = None
    num_tokens: int | None = None
    ages: dict[int, int] | None = None
    senders: dict[str, SenderMetrics] | None = None
    blamed: list[str] | None = None
    met: MetProblems | None = None
    kept: KeptSuccesses | None = None
    # of the exchange
    waiting: int | None = None
    refused: Counts | None = None
    dropped: Counts | None = None
    missing: dict[str, int] | None = None
    unheard: int | None = None
    # of what it can
    heldout: ByKind | None = None
    ood: ByKind | None = None
    measure: Measure | None = None  # what both are; None: accuracies
    timing: Timing | None = None
    time_s: float | None = None
    without: list[str] | None = None
    suspects: dict[str, Suspicion] | None = None
    warnings: list[Sign] | None = None
    samples: list[SampleAnswer] | None = None


class FirstLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a peer can before it is trained. Only written: it is read as a LearnerLine."""

    round: int
    peer: str
    time_s: float | None = None
    heldout: ByKind
    ood: ByKind | None = None
    measure: Measure | None = None


class SamplerLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch of a sampler."""

    round: int
    peer: str
    version: int
    reward: float | None
    sampled_tokens: int
    behind: int | None = None
    failed_transfers: int | None = None
    timing: Timing | None = None
    time_s: float | None = None


MetricsLine = LearnerLine | SamplerLine


class _Mark(msgspec.Struct):
    """What tells a sampler's line."""

    sampled_tokens: int | None = None


_mark_decoder = msgspec.json.Decoder(_Mark)
_learner_decoder = msgspec.json.Decoder(LearnerLine)
_sampler_decoder = msgspec.json.Decoder(SamplerLine)


def mean(by_kind: ByKind) -> float:
    """Over the kinds, each counting once."""
    return sum(by_kind.values()) / len(by_kind)


def encoded(lines: Sequence[msgspec.Struct]) -> bytes:
    """A JSON object a line."""
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def append_lines(path: Path, lines: Sequence[MetricsLine | FirstLine]) -> None:
    append(path, encoded(lines))


def decode_lines(content: bytes, source: str = "metrics.jsonl") -> list[MetricsLine]:
    return [
        _decoded(line, f"line {number} of {source}")
        for number, line in enumerate(content.splitlines(), 1)
    ]


def read_metrics(folder: Path) -> list[MetricsLine]:
    """The lines of a run folder; not one that is just being written."""
    path = folder / "metrics.jsonl"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); give the folder of a run"
        ) from None
    return decode_lines(content[: content.rfind(b"\n") + 1], str(path))


def learner_lines(lines: Iterable[MetricsLine]) -> list[LearnerLine]:
    """Those of who learns."""
    return [line for line in lines if isinstance(line, LearnerLine)]


def measure_of(lines: Iterable[MetricsLine]) -> Measure:
    """What the lines of a run measure.

    Those of old runs do not say: there, what is outside 0..1 cannot be an accuracy.
    """
    for line in learner_lines(lines):
        values = [*(line.heldout or {}).values(), *(line.ood or {}).values()]
        if line.measure == "reward" or not all(0 <= value <= 1 for value in values):
            return "reward"
    return "accuracy"


def _decoded(line: bytes, place: str) -> MetricsLine:
    try:
        if _mark_decoder.decode(line).sampled_tokens is None:
            return _learner_decoder.decode(line)
        return _sampler_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{place} is no line of metrics ({error}); delete that line: what a report says of its "
            "round goes with it"
        ) from None
