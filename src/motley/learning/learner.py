"""Learner: one optimiser step from selected groups. Knows policies and objectives; knows no log and no peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from motley.config import Learning
from motley.learning.batches import MicroBatch, ToScore, micro_batches
from motley.learning.fitting import explained_memory, fitting_budget, halved, too_large
from motley.learning.metrics import Row, ScoredRow, SenderMetrics, sender_metrics
from motley.learning.select import Candidate
from motley.objectives import LossBatch, LossOutput, Objective, Samples, Terms
from motley.policies import Policy
from motley.policies.forward import Scores, score
from motley.policies.hardware import is_out_of_memory


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
                rewards.setdefault(candidate.problem.kind, []).extend(r.reward for r in candidate.group.rollouts)
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


class Learner:
    def __init__(self, policy: Policy, objective: Objective, rules: Learning, lr: float) -> None:
        self.policy = policy
        self.success = Success(rules.success_memory)
        self._objective = objective
        self._rules = rules
        self.token_budget = rules.token_budget or fitting_budget(policy)
        self._halved = False
        self.optimiser = torch.optim.Adam([p for _, p in policy.trained()], lr=lr)

    def step(self, candidates: Sequence[Candidate]) -> StepReport:
        """Learn once from these groups. A step in which every advantage is zero changes nothing but the version."""
        self.success.update(candidates)
        batch = self._batch(candidates)
        terms = self._objective.prepare(batch.samples)
        silent_B = self._objective.silent(terms).tolist()
        todo = [sequence for sequence, silent in zip(batch.sequences, silent_B, strict=True) if not silent]
        rows = _rows(batch, terms, self.policy.version)
        loss = self._backward(batch, terms, todo, rows)
        with explained_memory(self.token_budget):
            grad_norm = self._update() if todo else 0.0
        self.policy.version += 1
        return StepReport(
            loss=loss,
            grad_norm=grad_norm,
            num_sequences=len(rows),
            num_scored=len(todo),
            num_tokens=sum(len(s.tokens) for s in todo),
            ages=dict(sorted(Counter(c.age(self.policy.version - 1) for c in candidates).items())),
            senders=sender_metrics(rows),
        )

    def _backward(self, batch: _Batch, terms: Terms, todo: list[ToScore], rows: list[Row]) -> float:
        """Add up the gradient and return the loss. Where memory does not hold a micro-batch, once more with half of it."""
        try:
            return self._accumulate(batch, terms, todo, rows)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self._halved:
                raise too_large(self.token_budget) from error
        self.token_budget, self._halved = halved(self.token_budget), True
        return self._backward(batch, terms, todo, rows)

    def _accumulate(self, batch: _Batch, terms: Terms, todo: list[ToScore], rows: list[Row]) -> float:
        self.optimiser.zero_grad()
        loss = 0.0
        for micro in micro_batches(todo, self.token_budget, self.policy.device):
            scores = score(self.policy, micro.packed)
            loss_batch = _loss_batch(batch, terms, micro, scores)
            output = self._objective.loss(loss_batch)
            output.loss.backward()
            loss += float(output.loss.detach())
            _note_scores(rows, micro, scores, loss_batch, output)
        return loss

    def _update(self) -> float:
        parameters = [p for _, p in self.policy.trained()]
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._rules.grad_clip))
        if not np.isfinite(grad_norm):
            raise FloatingPointError(
                f"gradient norm is {grad_norm} at version {self.policy.version}; nothing was changed by this step. "
                "Lower lr, or check the rewards for extreme values; a run goes on from its newest checkpoint with --resume"
            )
        self.optimiser.step()
        return grad_norm

    def _batch(self, candidates: Sequence[Candidate]) -> _Batch:
        group_index: dict[str, int] = {}
        entries = []
        for candidate in candidates:
            index = group_index.setdefault(candidate.family, len(group_index))
            entries += [(index, candidate, rollout) for rollout in candidate.group.rollouts]
        entries.sort(key=lambda entry: entry[0])
        prompt_ids = self.policy.prompts.ids
        samples = Samples(
            reward_B=torch.tensor([r.reward for _, _, r in entries]),
            group_B=torch.tensor([g for g, _, _ in entries]),
            own_B=torch.tensor([c.own for _, c, _ in entries]),
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
                ToScore(row=i, prompt=prompt_ids(c.problem), tokens=r.tokens, temperature=c.group.origin.sampling.temperature, group=g)
                for i, (g, c, r) in enumerate(entries)
            ],
            samples=samples,
            ended_B=torch.tensor([r.ending == "stop" for _, _, r in entries]),
        )


def _loss_batch(batch: _Batch, terms: Terms, micro: MicroBatch, scores: Scores) -> LossBatch:
    sampler_M = torch.tensor([logp for row in micro.row_B.tolist() for logp in batch.logp_sampler_B[row]], device=scores.logp_M.device)
    return LossBatch(
        logp_learner_BT=micro.unpack(scores.logp_M),
        logp_sampler_BT=micro.unpack(sampler_M),
        mask_BT=micro.mask_BT,
        ended_B=batch.ended_B[micro.row_B].to(scores.logp_M.device),
        terms=terms.take(micro.row_B, scores.logp_M.device),
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


def _note_scores(rows: list[Row], micro: MicroBatch, scores: Scores, loss_batch: LossBatch, output: LossOutput) -> None:
    """Write what was computed for each sequence of a micro-batch into its row."""
    tables = (loss_batch.log_ratio_BT, output.weight_BT, output.free_BT, loss_batch.logp_sampler_BT, micro.unpack(scores.entropy_M))
    log_ratio, weight, free, logq, entropy = (table.detach().cpu().double().numpy() for table in tables)
    for i, (row, keep, kl) in enumerate(zip(micro.row_B.tolist(), output.keep_B.tolist(), output.kl_B.tolist(), strict=True)):
        own = slice(rows[row].num_tokens)
        rows[row].scored = ScoredRow(
            keep=keep,
            kl=kl,
            log_ratio=log_ratio[i, own],
            weight=weight[i, own],
            free=free[i, own],
            logq=float(logq[i, own].mean()),
            entropy=entropy[i, own],
        )
