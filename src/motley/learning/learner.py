"""Learner: one optimiser step from selected groups.

Knows policies and objectives; knows no log and no peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from motley.compute.graphs import scorer
from motley.compute.logprobs import Scores
from motley.config import Learning
from motley.learning.batches import MicroBatch, ToScore, micro_batches
from motley.learning.descent import LossScale, adam, descend
from motley.learning.diagnostics import Row, ScoredRow, sender_metrics
from motley.learning.fitting import explained_memory, fitting_budget, halved, too_large
from motley.learning.select import Candidate
from motley.learning.senders import SenderMetrics
from motley.models.devices import is_out_of_memory
from motley.models.policy import Policy
from motley.objectives import LossBatch, LossOutput, Objective, Samples, Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    loss: float
    grad_norm: float
    num_sequences: int
    num_scored: int  # sequences that could change the gradient, so that they were scored
    num_tokens: int  # completion tokens scored
    ages: dict[int, int]  # age in versions -> groups
    senders: dict[str, SenderMetrics]


@dataclass(slots=True)
class Success:
    """The receiver's running mean reward per kind of problem, from its own rollouts."""

    memory: float
    by_kind: dict[str, float] = field(default_factory=dict)

    def update(self, candidates: Sequence[Candidate]) -> None:
        rewards: dict[str, list[float]] = {}
        for candidate in candidates:
            if candidate.own:
                rewards.setdefault(candidate.problem.kind, []).extend(
                    r.reward for r in candidate.group.rollouts
                )
        for kind, values in rewards.items():
            now = sum(values) / len(values)
            self.by_kind[kind] = self.memory * self.by_kind.get(kind, now) + (1 - self.memory) * now

    def of(self, kind: str) -> float:
        return self.by_kind.get(kind, 0.0)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The sequences of a step, one row each, groups next to each other."""

    candidate_B: list[Candidate]
    group_B: list[int]
    logp_sampler_B: list[tuple[float, ...]]
    sequences: list[ToScore]
    samples: Samples
    ended_B: Tensor


class _Note(NamedTuple):
    """What a micro-batch came out with, on its way to the CPU."""

    arrived: torch.cuda.Event | None
    row_B: list[int]
    table_KBT: Tensor  # log ratio, weight, free weight, sampler's log-prob, entropy
    keep_B: Tensor
    kl_B: Tensor
    loss: Tensor


class _Gradient(NamedTuple):
    """What a backward pass over all micro-batches left behind, beside the gradient itself."""

    norm: Tensor
    notes: list[_Note]

    @property
    def loss(self) -> float:
        return sum((float(note.loss) for note in self.notes), 0.0)


class Learner:
    def __init__(self, policy: Policy, objective: Objective, rules: Learning, lr: float) -> None:
        self.policy = policy
        self.success = Success(rules.success_memory)
        self.scale = LossScale(policy.dtype)
        self._objective = objective
        self._rules = rules
        self.token_budget = rules.token_budget or fitting_budget(policy)
        self._halved = False
        self._parameters = [p for _, p in policy.trained()]
        self._score = scorer(policy)
        self.optimiser = adam(self._parameters, lr)

    def step(self, candidates: Sequence[Candidate]) -> StepReport:
        """Learn once from these groups.

        A step in which every advantage is zero changes nothing but the version.
        """
        self.success.update(candidates)
        batch = self._batch(candidates)
        terms = self._objective.prepare(batch.samples)
        silent_B = self._objective.silent(terms).tolist()
        todo = [
            sequence
            for sequence, silent in zip(batch.sequences, silent_B, strict=True)
            if not silent
        ]
        rows = _rows(batch, terms, self.policy.version)
        made = self._backward(batch, terms, todo)
        if todo:
            # Nobody knows yet whether this gradient is finite, and nobody has to: where its norm is
            # no number, `descend` changes nothing, and on a GPU the optimiser sees that by itself.
            # So nothing waits for the GPU here. `_settle` reads the norm once all else is done; it
            # makes the gradient again or raises, and only after it is there a new version.
            self._descend(made.norm)
        for note in made.notes:
            _note_scores(rows, note)
        senders = sender_metrics(rows)  # while a GPU still computes the gradient
        grad_norm = self._settle(made, partial(self._backward, batch, terms, todo)) if todo else 0.0
        self.policy.version += 1
        return StepReport(
            loss=made.loss,
            grad_norm=grad_norm,
            num_sequences=len(rows),
            num_scored=len(todo),
            num_tokens=sum(len(s.tokens) for s in todo),
            ages=dict(sorted(Counter(c.age(self.policy.version - 1) for c in candidates).items())),
            senders=senders,
        )

    def _descend(self, norm: Tensor) -> None:
        with explained_memory(self.token_budget):
            descend(self.optimiser, norm)

    def _settle(self, made: _Gradient, again: Callable[[], _Gradient]) -> float:
        """The norm of the gradient that was stepped along.

        One that float16 does not hold is made again, at a smaller scale.
        """
        grad_norm = float(made.norm)
        while not np.isfinite(grad_norm) and np.isfinite(made.loss) and self.scale.shrink():
            norm = again().norm
            self._descend(norm)
            grad_norm = float(norm)
        if not np.isfinite(grad_norm):
            raise FloatingPointError(
                f"gradient norm is {grad_norm} at version {self.policy.version}; nothing was "
                "changed by this step. "
                f"Lower lr, or check the rewards for extreme values{self._or_bfloat16()}; "
                "a run goes on from its newest checkpoint with --resume"
            )
        self.scale.grow()
        return grad_norm

    def _or_bfloat16(self) -> str:
        return (
            ", or set dtype = 'bfloat16' for the peer" if self.policy.dtype == torch.float16 else ""
        )

    def _backward(self, batch: _Batch, terms: Terms, todo: list[ToScore]) -> _Gradient:
        """Add up the gradient.

        Where memory does not hold a micro-batch, once more with half of it.
        """
        try:
            return self._accumulate(batch, terms, todo)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self._halved and not self._score.holds:
                raise too_large(self.token_budget) from error
        if self._score.forget():
            return self._backward(batch, terms, todo)
        self.token_budget, self._halved = halved(self.token_budget), True
        return self._backward(batch, terms, todo)

    def _accumulate(self, batch: _Batch, terms: Terms, todo: list[ToScore]) -> _Gradient:
        """On a GPU nothing here waits for it, once all that it needs is there."""
        self.optimiser.zero_grad()
        self._score.begin()
        notes = []
        for micro, unscored in [
            _unscored(batch, terms, micro)
            for micro in micro_batches(todo, self.token_budget, self.policy.device)
        ]:
            scores = self._score(micro.packed)
            loss_batch = unscored(logp_learner_BT=micro.unpack(scores.logp_M))
            output = self._objective.loss(loss_batch)
            notes.append(_note(micro, scores, loss_batch, output))
            self.scale.backward(output.loss)
        return _Gradient(self.scale.clip(self._parameters, self._rules.grad_clip), notes)

    def _batch(self, candidates: Sequence[Candidate]) -> _Batch:
        group_index: dict[str, int] = {}
        entries = []
        for candidate in candidates:
            index = group_index.setdefault(candidate.family, len(group_index))
            entries += [(index, candidate, rollout) for rollout in candidate.group.rollouts]
        entries.sort(key=lambda entry: entry[0])
        peers = dict.fromkeys(c.group.origin.peer for _, c, _ in entries)
        senders = {peer: number for number, peer in enumerate(peers)}
        prompt_ids = self.policy.prompts.ids
        samples = Samples(
            reward_B=torch.tensor([r.reward for _, _, r in entries]),
            group_B=torch.tensor([g for g, _, _ in entries]),
            sender_B=torch.tensor([senders[c.group.origin.peer] for _, c, _ in entries]),
            own_B=torch.tensor([c.own for _, c, _ in entries]),
            stranger_B=torch.tensor([c.stranger for _, c, _ in entries]),
            success_B=torch.tensor([self.success.of(c.problem.kind) for _, c, _ in entries]),
            length_B=torch.tensor([len(r.tokens) for _, _, r in entries]),
            logq_mean_B=torch.tensor([sum(r.logprobs) / len(r.logprobs) for _, _, r in entries]),
            max_length=max(c.group.origin.sampling.max_tokens for c in candidates),
        )
        return _Batch(
            candidate_B=[c for _, c, _ in entries],
            group_B=[g for g, _, _ in entries],
            logp_sampler_B=[r.logprobs for _, _, r in entries],
            sequences=[
                ToScore(
                    row=i,
                    prompt=prompt_ids(c.problem),
                    tokens=r.tokens,
                    temperature=c.group.origin.sampling.temperature,
                    group=g,
                )
                for i, (g, c, r) in enumerate(entries)
            ],
            samples=samples,
            ended_B=torch.tensor([r.ending == "stop" for _, _, r in entries]),
        )


def _unscored(
    batch: _Batch, terms: Terms, micro: MicroBatch
) -> tuple[MicroBatch, Callable[..., LossBatch]]:
    """A micro-batch and all of its LossBatch that is known before it is scored."""
    device = micro.mask_BT.device
    known = chain.from_iterable(batch.logp_sampler_B[row] for row in micro.row_B.tolist())
    sampler_M = torch.from_numpy(np.fromiter(known, np.float32, len(micro.packed.target_M))).to(
        device
    )
    return micro, partial(
        LossBatch,
        logp_sampler_BT=micro.unpack(sampler_M),
        mask_BT=micro.mask_BT,
        ended_B=batch.ended_B[micro.row_B].to(device),
        terms=terms.take(micro.row_B, device),
    )


def _rows(batch: _Batch, terms: Terms, version: int) -> list[Row]:
    return [
        Row(
            sender=candidate.group.origin.peer,
            group=group,
            reward=reward,
            advantage=advantage,
            num_tokens=len(sequence.tokens),
            truncated=not ended,
            age=candidate.age(version),
        )
        for candidate, group, sequence, reward, advantage, ended in zip(
            batch.candidate_B,
            batch.group_B,
            batch.sequences,
            batch.samples.reward_B.tolist(),
            terms.advantage_B.tolist(),
            batch.ended_B.tolist(),
            strict=True,
        )
    ]


def _note(micro: MicroBatch, scores: Scores, loss_batch: LossBatch, output: LossOutput) -> _Note:
    tables = (
        loss_batch.log_ratio_BT,
        output.weight_BT,
        output.free_BT,
        loss_batch.logp_sampler_BT,
        micro.unpack(scores.entropy_M),
    )
    kept = (
        torch.stack([table.detach() for table in tables]),
        output.keep_B,
        output.kl_B,
        output.loss.detach(),
    )
    on_cpu = [one.to("cpu", non_blocking=one.is_cuda) for one in kept]
    device = scores.logp_M.device
    arrived = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    return _Note(arrived, micro.row_B.tolist(), *on_cpu)


def _note_scores(rows: list[Row], note: _Note) -> None:
    """Write what was computed for each sequence of a micro-batch into its row."""
    if note.arrived:
        note.arrived.synchronize()
    log_ratio, weight, free, logq, entropy = note.table_KBT.double().numpy()
    length_B = np.array([rows[row].num_tokens for row in note.row_B])
    is_own_BT = np.arange(weight.shape[1]) < length_B[:, None]
    mean_weight_B, mean_logq_B = (
        np.where(is_own_BT, table, 0.0).sum(1) / length_B for table in (weight, logq)
    )
    for i, (row, keep, kl) in enumerate(
        zip(note.row_B, note.keep_B.tolist(), note.kl_B.tolist(), strict=True)
    ):
        own = slice(rows[row].num_tokens)
        rows[row].scored = ScoredRow(
            keep=keep,
            kl=kl,
            log_ratio=log_ratio[i, own],
            weight=weight[i, own],
            mean_weight=float(mean_weight_B[i]),
            free=free[i, own],
            logq=float(mean_logq_B[i]),
            entropy=entropy[i, own],
        )
