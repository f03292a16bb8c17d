"""The sequences of a step: from candidates to rows, and what is known of a micro-batch before it is
scored.

Knows no model and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motley.learning.batches import MicroBatch, ToScore
from motley.learning.diagnostics import Row, ScoredRow
from motley.learning.fates import FILTERED, LEARNED, SILENT, WITHHELD
from motley.learning.meetings import Lesson
from motley.learning.memory import OwnSuccess
from motley.learning.readings import RolloutSpans
from motley.learning.select import Candidate
from motley.learning.traces import RolloutTrace
from motley.models.prompts import Prompts
from motley.objectives import LossBatch, Samples, SpanTable, Terms
from motley.records import Rollout
from motley.spelling import Tokenwise

ANSWERS, LESSONS, KEPT = range(3)  # what has a loss of its own
Mask = NDArray[np.bool_]
# of a rollout of a candidate, by its number: the tokens that must not be made likelier
Withheld = Callable[[Candidate, int], Mask | None]


def nothing_withheld(candidate: Candidate, number: int) -> Mask | None:
    return None


class SuccessOf(Protocol):
    def of(self, kind: str) -> float:
        """The receiver's running mean reward on a kind of problem."""
        ...


class SkillOf(Protocol):
    def of(self, candidate: Candidate) -> float:
        """The mean reward of its sender of late, as a multiple of the receiver's own."""
        ...


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The sequences of a step, one row each, groups next to each other."""

    candidates: list[Candidate]
    # rows: those before are of the candidates, from the first on one for each lesson, from the
    # second on one for each own success that is kept
    first_lesson: int
    first_kept: int
    candidate_B: list[Candidate]
    number_B: list[int]  # of the rollout in its candidate
    group_B: list[int]
    logp_sampler_B: list[tuple[float, ...]]
    spans_B: list[RolloutSpans | None]  # None: each token is compared by itself
    sequences: list[ToScore]
    samples: Samples
    senders: list[str]  # by number; who is no stranger comes first

    @property
    def answering(self) -> list[str]:
        """The senders of answers and lessons."""
        there = {c.group.origin.peer for c in self.candidate_B[: self.first_kept]}
        return [sender for sender in self.senders if sender in there]

    @property
    def strangers(self) -> set[str]:
        return {c.group.origin.peer for c in self.candidate_B if c.stranger}


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step learns from, before anything is scored."""

    batch: StepBatch
    terms: Terms
    todo: list[ToScore]  # what can change the gradient
    heard: list[ToScore] = field(default_factory=list)  # what is scored without any gradient
    withheld: dict[int, Mask] = field(default_factory=dict)  # by row, where A > 0
    audited: frozenset[int] = frozenset()  # positions of candidates
    # by row, the learner's log-probs when the round began; none: this is its first pass
    start: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    # the same of the policy that the peer began with, where a penalty asks for it
    ref: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    num_taken: int = 0  # optimiser steps since the round began

    def by_objective(self) -> tuple[list[ToScore], list[ToScore], list[ToScore]]:
        """What is to be scored: answers, lessons and what is kept. Each has a loss of its own."""
        parts: tuple[list[ToScore], list[ToScore], list[ToScore]] = ([], [], [])
        for sequence in self.todo:
            parts[self._objective_of(sequence.row)].append(sequence)
        return parts

    def objective_of(self, micro: MicroBatch) -> int:
        """ANSWERS, LESSONS or KEPT: a micro-batch is of one of them."""
        return self._objective_of(int(micro.row_B[0]))

    def _objective_of(self, row: int) -> int:
        return (row >= self.batch.first_lesson) + (row >= self.batch.first_kept)

    def sender_of(self, sequence: ToScore) -> str:
        return self.batch.candidate_B[sequence.row].group.origin.peer

    @property
    def speaking(self) -> list[str]:
        """Whose sequences can change the gradient."""
        spoke = {self.sender_of(s) for s in self.todo}
        return [sender for sender in self.batch.senders if sender in spoke]

    def of(self, sender: str) -> StepPlan:
        """The same, with this sender's sequences alone."""
        return replace(self, todo=[s for s in self.todo if self.sender_of(s) == sender])

    def without(self, senders: Set[str]) -> StepPlan:
        return replace(self, todo=[s for s in self.todo if self.sender_of(s) not in senders])


def _answers(candidates: Sequence[Candidate]) -> list[tuple[int, Candidate, int, Rollout]]:
    """Every rollout: the number of its group, its candidate, and its number there."""
    group_index: dict[str, int] = {}
    entries = []
    for candidate in candidates:
        index = group_index.setdefault(candidate.family, len(group_index))
        entries += [
            (index, candidate, number, rollout)
            for number, rollout in enumerate(candidate.group.rollouts)
        ]
    return sorted(entries, key=lambda entry: entry[0])


def step_batch(
    candidates: Sequence[Candidate],
    prompts: Prompts,
    success: SuccessOf,
    skills: SkillOf,
    lessons: Sequence[Lesson] = (),
    kept: Sequence[OwnSuccess] = (),
) -> StepBatch:
    entries = _answers(candidates)
    first_lesson = len(entries)
    first_kept = first_lesson + len(lessons)
    beside = [(c, number) for c, number, _ in lessons] + [(one.candidate, 0) for one in kept]
    num_groups = entries[-1][0] + 1 if entries else 0
    entries += [
        (num_groups + place, c, number, c.group.rollouts[number])
        for place, (c, number) in enumerate(beside)
    ]
    of_stranger = {c.group.origin.peer: c.stranger for _, c, _, _ in entries}
    senders = sorted(of_stranger, key=lambda peer: of_stranger[peer])
    sender_of = {peer: number for number, peer in enumerate(senders)}
    samples = Samples(
        reward_B=torch.tensor([r.reward for _, _, _, r in entries]),
        group_B=torch.tensor([g for g, _, _, _ in entries]),
        sender_B=torch.tensor([sender_of[c.group.origin.peer] for _, c, _, _ in entries]),
        own_B=torch.tensor([c.own for _, c, _, _ in entries]),
        stranger_B=torch.tensor([c.stranger for _, c, _, _ in entries]),
        success_B=torch.tensor([success.of(c.problem.kind) for _, c, _, _ in entries]),
        skill_B=torch.tensor([skills.of(c) for _, c, _, _ in entries]),
        length_B=torch.tensor([len(r.tokens) for _, _, _, r in entries]),
        ended_B=torch.tensor([r.ending == "stop" for _, _, _, r in entries]),
        logq_mean_B=torch.tensor([c.logq_mean(number) for _, c, number, _ in entries]),
        max_length=max(c.group.origin.sampling.max_tokens for _, c, _, _ in entries),
    )
    return StepBatch(
        candidates=list(candidates),
        first_lesson=first_lesson,
        first_kept=first_kept,
        candidate_B=[c for _, c, _, _ in entries],
        number_B=[number for _, _, number, _ in entries],
        group_B=[g for g, _, _, _ in entries],
        logp_sampler_B=[r.logprobs for _, _, _, r in entries],
        spans_B=[c.spans_of(number) for _, c, number, _ in entries],
        sequences=[
            ToScore(
                row=i,
                prompt=prompts.ids(c.problem) + c.group.prefix,
                tokens=r.tokens,
                temperature=c.group.origin.sampling.temperature,
                group=g,
            )
            for i, (g, c, _, r) in enumerate(entries)
        ],
        samples=samples,
        senders=senders,
    )


def step_plan(
    batch: StepBatch,
    terms: Terms,
    silent_B: list[bool],
    withheld: Withheld,
    audited: frozenset[int],
) -> StepPlan:
    """Silent sequences are scored only where their candidate is audited, and not learned from.

    What cannot be compared is not scored at all. No lesson is silent, nor is what is kept.
    """
    compared_B = [
        c.is_compared(number) for c, number in zip(batch.candidate_B, batch.number_B, strict=True)
    ]
    masks = {
        row: mask
        for row, advantage in enumerate(terms.advantage_B.tolist())
        if advantage > 0
        and (mask := withheld(batch.candidate_B[row], batch.number_B[row])) is not None
    }
    return StepPlan(
        batch,
        terms,
        todo=[
            s
            for s in batch.sequences
            if s.row >= batch.first_lesson or (compared_B[s.row] and not silent_B[s.row])
        ],
        heard=[
            s
            for s in batch.sequences[: batch.first_lesson]
            if silent_B[s.row]
            and compared_B[s.row]
            and batch.candidate_B[s.row].position in audited
        ],
        withheld=masks,
        audited=audited,
    )


class Unscored(NamedTuple):
    """A micro-batch, and all that is known of it before it is scored."""

    micro: MicroBatch
    sender_B: Tensor
    known: Callable[..., LossBatch]  # all but the learner's log-probs


def unscored(plan: StepPlan, micro: MicroBatch) -> Unscored:
    device, rows = micro.mask_BT.device, micro.row_B.tolist()
    reported = chain.from_iterable(plan.batch.logp_sampler_B[row] for row in rows)
    sampler_M = torch.from_numpy(np.fromiter(reported, np.float32, len(micro.packed.target_M))).to(
        device
    )
    sender_B = plan.batch.samples.sender_B[micro.row_B].to(device)
    known = partial(
        LossBatch,
        logp_sampler_BT=micro.unpack(sampler_M),
        mask_BT=micro.mask_BT,
        ended_B=plan.batch.samples.ended_B[micro.row_B].to(device),
        terms=plan.terms.take(micro.row_B, device),
        withheld_BT=_withheld(plan, rows, micro.mask_BT),
        logp_start_BT=_table(plan.start, rows, micro),
        logp_ref_BT=_table(plan.ref, rows, micro),
        num_taken=plan.num_taken,
        spans=_span_table(plan, rows, micro.mask_BT),
    )
    return Unscored(micro, sender_B, known)


def _table(
    by_row: dict[int, NDArray[np.float32]], rows: list[int], micro: MicroBatch
) -> Tensor | None:
    if rows[0] not in by_row:  # nor are its others: lessons have micro-batches of their own
        return None
    value_M = torch.from_numpy(np.concatenate([by_row[row] for row in rows]))
    return micro.unpack(value_M.to(micro.mask_BT.device))


def _span_table(plan: StepPlan, rows: list[int], mask_BT: Tensor) -> SpanTable | None:
    """None where each token is compared by itself."""
    if all(plan.batch.spans_B[row] is None for row in rows):
        return None
    spans_B = [plan.batch.spans_B[row] for row in rows]
    length_B = np.array([len(plan.batch.sequences[row].tokens) for row in rows])
    by_spans_B = np.array([spans is not None for spans in spans_B])
    # tokens behind each other, row by row: where spans begin
    begin_B = np.cumsum(length_B) - length_B
    told = [spans.start_S for spans in spans_B if spans is not None]
    begins_N = np.repeat(~by_spans_B, length_B)
    begins_N[np.repeat(begin_B[by_spans_B], list(map(len, told))) + np.concatenate(told)] = True
    start_S = np.flatnonzero(begins_N)
    size_S = np.diff(start_S, append=len(begins_N))
    row_begin_N = np.repeat(begin_B, length_B)
    column_T = np.arange(mask_BT.shape[1])
    is_token_BT = column_T < length_B[:, None]
    place_BT, open_BT = np.zeros(mask_BT.shape, np.int64), np.zeros(mask_BT.shape, np.bool_)
    last_BT = np.tile(column_T, (len(rows), 1))
    place_BT[is_token_BT] = np.arange(len(begins_N)) - np.repeat(start_S, size_S)
    last_BT[is_token_BT] = np.repeat(start_S + size_S - 1, size_S) - row_begin_N
    for place, spans in enumerate(spans_B):
        if spans is not None and spans.is_open:
            open_BT[place, spans.start_S[-1] : length_B[place]] = True
    device = mask_BT.device
    return SpanTable(
        place_BT=torch.from_numpy(place_BT).to(device),
        last_BT=torch.from_numpy(last_BT).to(device),
        open_BT=torch.from_numpy(open_BT).to(device),
        longest=int(size_S.max()),
    )


def _withheld(plan: StepPlan, rows: list[int], mask_BT: Tensor) -> Tensor | None:
    if not any(row in plan.withheld for row in rows):
        return None
    table_BT = np.zeros(mask_BT.shape, np.bool_)
    for place, row in enumerate(rows):
        if row in plan.withheld:
            table_BT[place, : len(plan.withheld[row])] = plan.withheld[row]
    return torch.from_numpy(table_BT).to(mask_BT.device)


def fates_of(batch: StepBatch, rows: Sequence[Row]) -> dict[int, str]:
    """By position of a candidate: a letter for each of its rollouts."""
    fates: dict[int, str] = {}
    taken = zip(batch.candidate_B[: batch.first_lesson], batch.number_B, rows, strict=False)
    for candidate, number, row in taken:
        if row.scored is None or row.advantage == 0:
            letter = candidate.letter_of(number, SILENT)
        elif not row.scored.keep:
            letter = FILTERED
        else:
            letter = WITHHELD if row.num_withheld else LEARNED
        fates[candidate.position] = fates.get(candidate.position, "") + letter
    sent = {c.position: c.sent_letters(fates[c.position]) for c in batch.candidates}
    return {position: sent[position] for position in fates}


def traces_of(
    batch: StepBatch, rows: Sequence[Row], scale_S: Sequence[float]
) -> tuple[RolloutTrace, ...]:
    """What became of the tokens of every sequence that was scored, but for what was kept.

    `scale_S`: what was left of each sender's part of the gradient.
    """
    scale_of = dict(zip(batch.senders, scale_S, strict=False))  # none where nothing was scored
    return tuple(
        _trace(batch, number, row, row.scored, scale_of[row.sender])
        for number, row in enumerate(rows[: batch.first_kept])
        if row.scored
    )


def _trace(
    batch: StepBatch, number: int, row: Row, scored: ScoredRow, scale: float
) -> RolloutTrace:
    candidate, spans = batch.candidate_B[number], row.spans
    log_ratio = scored.log_ratio
    if spans is not None:
        log_ratio = log_ratio.repeat(np.diff(spans.start_S, append=row.num_tokens))
    is_read = not isinstance(candidate.reading, Tokenwise)
    return RolloutTrace(
        position=candidate.position,
        number=candidate.sent_number(batch.number_B[number]),
        sender=row.sender,
        advantage=row.advantage,
        kept=scored.keep,
        filter_kl=scored.kl,
        tokens=batch.sequences[number].tokens if is_read else None,
        spans=None if spans is None else tuple(spans.start_S.tolist()),
        log_ratio=log_ratio,
        weight=scored.weight,
        free=scored.free,
        entropy=scored.entropy,
        push=scored.push if scale == 1 else scale * scored.push,
        scale=scale,
        is_lesson=number >= batch.first_lesson,
    )


def answers(plan: StepPlan, rows: Sequence[Row]) -> list[Row]:
    """Those of a step's rows that are answers to problems: no continuations, no lessons."""
    batch = plan.batch
    taken = zip(rows[: batch.first_lesson], batch.candidate_B, strict=False)
    return [row for row, candidate in taken if not candidate.group.branch]


def step_rows(plan: StepPlan, version: int) -> list[Row]:
    batch = plan.batch
    return [
        Row(
            sender=candidate.group.origin.peer,
            group=group,
            reward=reward,
            advantage=advantage,
            num_tokens=len(sequence.tokens),
            truncated=not ended,
            age=candidate.age(version),
            num_withheld=int(plan.withheld[row].sum()) if row in plan.withheld else 0,
            spans=batch.spans_B[row],
        )
        for row, (candidate, group, sequence, reward, advantage, ended) in enumerate(
            zip(
                batch.candidate_B,
                batch.group_B,
                batch.sequences,
                batch.samples.reward_B.tolist(),
                plan.terms.advantage_B.tolist(),
                batch.samples.ended_B.tolist(),
                strict=True,
            )
        )
    ]
