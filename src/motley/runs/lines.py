"""The lines of metrics.jsonl: what a peer, its step and its sampling have to say of a round.

Owns which number of whom stands in which field (`metrics.py` has the fields). Writes nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import msgspec

from motley.learning.fates import StepFates
from motley.learning.learner import StepReport
from motley.learning.traces import StepTrace
from motley.models.devices import device_name
from motley.peers.follower import Sampler
from motley.peers.peer import Peer
from motley.peers.sampling import Sampled
from motley.runs.evaluation import GradedAnswer
from motley.runs.metrics import (
    Counts,
    KeptSuccesses,
    LearnerLine,
    MetProblems,
    SampleAnswer,
    SamplerLine,
    Timing,
)

NUM_SAMPLES, MOST_CHARACTERS = 4, 1000  # of the answers that a line shows


@dataclass(frozen=True, slots=True)
class Accuracies:
    """Of greedy answers, by kind, or mean rewards; `ood` is None for a task without such
    problems.
    """

    heldout: dict[str, float]
    ood: dict[str, float] | None
    samples: list[SampleAnswer]  # a few of the held-out ones


def learner_line(
    peer: Peer,
    number: int,
    sampled: Sampled | None,
    report: StepReport | None,
    timing: Timing | None,
) -> LearnerLine:
    """What a peer has to say of a round, but for how good it is on held-out problems."""
    line = LearnerLine(
        round=number,
        peer=peer.me.name,
        version=peer.learner.policy.version,
        reward=sampled.reward if sampled else None,
        waiting=len(peer.waiting) + len(peer.early),
        refused=by_sender(peer.admission.refused),
        dropped=by_sender(peer.waiting.dropped),
        missing=peer.admission.missing or None,
        unheard=peer.hearing.passed_by if peer.hearing.is_partial else None,
        suspects=peer.scrutiny.suspicions() or None,
        timing=_with_rates(timing, peer, sampled, report) if timing else None,
    )
    if line.timing:
        parts = msgspec.structs.replace(
            line.timing,
            reward_s=peer.half.reward_s if sampled and sampled.fresh else None,
            translate_s=peer.reader.take_seconds() if peer.half.mixed else None,
        )
        line = msgspec.structs.replace(line, timing=parts)
    return _with_met(_with_step(line, report) if report else line, sampled, report)


def sampler_line(sampler: Sampler, sampled: Sampled) -> SamplerLine:
    """What a sampler has to say of a round."""
    return SamplerLine(
        round=sampler.half.sampled_rounds,
        peer=sampler.me.name,
        version=sampled.version,
        reward=sampled.reward,
        sampled_tokens=sampled.num_tokens,
        behind=sampler.newest.version - sampled.version if sampler.newest else None,
        failed_transfers=sampler.failed or None,
    )


def fates_of(peer: Peer, report: StepReport | None) -> StepFates:
    """What became of the groups that a peer read since this was last asked."""
    refused = peer.admission.lately.items()
    let_go = peer.waiting.let_go | {place: f"refused: {reason}" for place, reason in refused}
    peer.waiting.let_go, peer.admission.lately = {}, {}
    unheard, peer.hearing.stretches = peer.hearing.stretches, []
    return StepFates(
        round=peer.learned_rounds,
        peer=peer.me.name,
        cursor=peer.cursor,
        groups=report.fates if report else {},
        let_go=let_go,
        unheard=unheard,
    )


def trace_of(peer: Peer, report: StepReport) -> StepTrace:
    """What a step made of its tokens, by the same round."""
    return StepTrace(
        round=peer.learned_rounds,
        peer=peer.me.name,
        version=peer.learner.policy.version,
        rollouts=report.trace,
    )


def sample_answer(answered: GradedAnswer) -> SampleAnswer:
    problem, text, reward = answered
    return SampleAnswer(
        problem.kind, problem.prompt[:MOST_CHARACTERS], text[:MOST_CHARACTERS], reward
    )


def by_sender(counts: dict[tuple[str, str], int]) -> Counts:
    table: Counts = {}
    for (sender, reason), count in sorted(counts.items()):
        table.setdefault(sender, {})[reason] = count
    return table


def _with_step(line: LearnerLine, report: StepReport) -> LearnerLine:
    return msgspec.structs.replace(
        line,
        loss=report.loss,
        grad_norm=report.grad_norm,
        lr=report.lr,
        num_sequences=report.num_sequences,
        num_scored=report.num_scored,
        num_tokens=report.num_tokens,
        ages=report.ages,
        senders=report.senders,
        blamed=list(report.blamed) or None,
        inner_steps=report.inner.steps if report.inner else None,
        inner_clipped=report.inner.clipped if report.inner else None,
        inner_kl=report.inner.kl if report.inner else None,
        reference_kl=report.reference_kl,
        kept=KeptSuccesses(**asdict(report.kept)) if report.kept else None,
    )


def _with_met(line: LearnerLine, sampled: Sampled | None, report: StepReport | None) -> LearnerLine:
    """With what came of problems that all peers answer, in sampling and in learning."""
    branches, met = sampled.branches if sampled else None, report.met if report else None
    told = MetProblems(
        problems=met.problems if met else None,
        failed=met.failed if met else None,
        rescued=met.rescued if met else None,
        rescued_tokens=met.rescued_tokens if met else None,
        branched=met.branched or None if met else None,
        branched_tokens=met.branched_tokens or None if met else None,
        unfit=met.unfit or None if met else None,
        branches=len(branches.places) if branches else None,
        branch_tokens=branches.num_tokens if branches else None,
        branch_reward=branches.reward if branches else None,
    )
    return msgspec.structs.replace(line, met=told) if branches or met else line


def _with_rates(
    took: Timing, peer: Peer, sampled: Sampled | None, report: StepReport | None
) -> Timing:
    """Tokens per second; 0 of what was not done, or was found in the outbox after a crash."""
    fresh = sampled.num_tokens / took.sample_s if sampled and sampled.fresh else 0.0
    learned = report.num_tokens / took.learn_s if report and took.learn_s else 0.0
    return msgspec.structs.replace(
        took,
        sampled_tokens_per_s=fresh,
        learned_tokens_per_s=learned,
        overlap_s=took.overlap_s or None,
        device=device_name(peer.learner.policy.device),
    )
