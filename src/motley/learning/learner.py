"""Learner: a version from selected groups, by one optimiser step or several.

Knows policies and objectives; knows no log and no peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from motley.compute.graphs import Score, scorer
from motley.compute.logprobs import Scores
from motley.config import Learning, Teach, Trust
from motley.learning.batches import MicroBatch, ToScore, micro_batches, waves
from motley.learning.blame import Blame, OwnFault, blame
from motley.learning.descent import (
    LossScale,
    Optimiser,
    OptimiserRules,
    Upkeep,
    descend,
    optimiser_of,
)
from motley.learning.diagnostics import Floats, Row, sender_metrics, with_readings
from motley.learning.fates import BLAMED
from motley.learning.fitting import explained_memory, fitting_budget, halved, too_large
from motley.learning.inner import (
    InnerReport,
    InnerTally,
    Part,
    Walk,
    inner_parts,
    settled,
    with_start,
)
from motley.learning.meetings import Lesson
from motley.learning.memory import Memory
from motley.learning.notes import Note, Overheard, compared, note, note_scores, reference_kl
from motley.learning.planning import Planner
from motley.learning.reference import Reference
from motley.learning.schedule import lr_at
from motley.learning.select import Candidate
from motley.learning.senders import SenderMetrics
from motley.learning.sequences import (
    KEPT,
    StepPlan,
    Unscored,
    Withheld,
    answers,
    fates_of,
    nothing_withheld,
    step_rows,
    traces_of,
    unscored,
)
from motley.learning.shares import Gradient, Pulls, Scored, Settled, scales
from motley.learning.success import Skills, Success
from motley.learning.traces import RolloutTrace
from motley.models.devices import is_out_of_memory
from motley.models.policy import Policy
from motley.objectives import Objective, kept_of, rescue_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    loss: float
    grad_norm: float
    num_sequences: int
    num_scored: int  # sequences that could change the gradient, so that they were scored
    num_tokens: int  # completion tokens scored
    ages: dict[int, int]  # age in versions -> groups
    senders: dict[str, SenderMetrics]
    blamed: tuple[str, ...] = ()  # left out, since theirs would not have been finite
    # of every group, by position: a letter per rollout (learning/fates.py)
    fates: dict[int, str] = field(default_factory=dict, compare=False)
    # of audited candidates, by position: per rollout, learner's minus sampler's log-prob of tokens,
    # or of spans; without rollouts that cannot be compared
    log_ratios: dict[int, list[Floats]] = field(default_factory=dict, compare=False)
    lr: float = 0.0
    inner: InnerReport | None = None  # where there was more than one optimiser step
    reference_kl: float | None = None  # where a penalty pulls toward the reference
    met: MetReport | None = None  # where peers meet
    kept: KeptReport | None = None  # where the row keeps own successes
    # what the step made of each token that it scored (learning/traces.py)
    trace: tuple[RolloutTrace, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetReport:
    """What came of the problems that all peers answer; docs/metrics.md has the formulas."""

    problems: int
    failed: int
    rescued: int
    rescued_tokens: int
    branched: int = 0
    branched_tokens: int = 0
    unfit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptReport:
    """What came of own successes of earlier steps; docs/metrics.md has the formulas."""

    sequences: int
    tokens: int
    fallen: float


class Means(NamedTuple):
    """What a learner computes with."""

    score: Score
    reference: Reference
    scale: LossScale
    optimiser: Optimiser


class Learner:
    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        rules: Learning,
        lr: float,
        trust: Trust = Trust(),
        teach: Teach = Teach(),
        *,
        rounds: int = 1,
        seed: int = 0,
        upkeep: Upkeep = Upkeep(),
    ) -> None:
        """`policy`: as the run began. `rounds`: of the whole run. `seed`: the crew's."""
        self.policy = policy
        self.success, self.skills = Success(rules.success_memory), Skills()
        self.memory = Memory(self.success, seed, all_kinds=objective.keeping.held == "all")
        self.scale = LossScale(policy.dtype)
        self._objective, self._rules, self._trust = objective, rules, trust
        self._planner = Planner(objective, policy.prompts, self.success, self.skills, teach.rescue)
        # of answers, of lessons, and of what is kept
        self._rows = (objective, rescue_of(objective, teach.gamma), kept_of(objective))
        self._full_lr = self._lr = lr
        self._rounds, self._seed = rounds, seed
        self.needs_reference = objective.penalty.needs_reference
        self._reference = Reference(policy, self.needs_reference)
        self.token_budget = rules.token_budget or fitting_budget(policy, upkeep)
        self._halved = False
        self._parameters = [p for _, p in policy.trained()]
        self._score = scorer(policy)
        self.optimiser_rules = OptimiserRules(lr, rules.weight_decay)
        self.optimiser: Optimiser = optimiser_of(self._parameters, *self.optimiser_rules, upkeep)

    def compute_with(self, means: Means) -> None:
        """Have scores, gradients and steps made by other means."""
        self._score, self._reference, self.scale, self.optimiser = means

    def step(
        self,
        candidates: Sequence[Candidate],
        withheld: Withheld = nothing_withheld,
        audited: frozenset[int] = frozenset(),
        lessons: Sequence[Lesson] = (),
    ) -> StepReport:
        """Learn from these groups, and have the next version.

        A step in which every advantage is zero changes nothing but the version. One that is not
        finite is taken again without the strangers whose sequences make it so.

        `withheld`: which tokens of a rollout must not be made likelier. `audited`: positions of
        candidates whose log ratios are reported, also where nothing is learned from them.
        `lessons`: what is made likelier beside the objective, at the weight of [teach].
        """
        self.success.update(candidates)
        self.skills.update(candidates)
        keeps = self._objective.keeping.keep > 0
        kept = self.memory.remind(candidates, self.policy.version) if keeps else []
        fates, blamed = _blamed(candidates), set[str]()
        while candidates or lessons:
            plan = self._plan(candidates, withheld, audited, lessons, kept)
            done = self._step(plan, partial(self._alone, plan, withheld, lessons))
            if isinstance(done, StepReport):
                left_out = tuple(sorted(blamed | {*done.blamed}))
                return replace(done, blamed=left_out, fates=fates | done.fates)
            blamed |= {*done.senders}
            candidates = [c for c in candidates if c.group.origin.peer not in blamed]
            lessons = [one for one in lessons if one.sender not in blamed]
        return self._made(replace(_nothing_left(tuple(sorted(blamed))), fates=fates))

    def _set_lr(self, scale: float) -> None:
        """Once in a round: all its steps have the same."""
        lr = scale * lr_at(self._rules, self._full_lr, self._rounds, self.policy.version)
        if lr != self._lr:
            self._lr = lr
            for group in self.optimiser.param_groups:
                group["lr"] = lr

    def _plan(self, *what: Any, **how: Any) -> StepPlan:
        """As the planner's, with what the row decides from the learner's log-probs of answers."""
        plan = self._planner.plan(*what, **how)
        answers, *_ = plan.by_objective()
        if not (self._objective.looks and answers):
            return plan
        alone = replace(plan, todo=answers)
        looked = settled(alone, self._objective, self._backward(alone, learns=False).scored)
        return replace(looked, todo=plan.todo)

    def _alone(
        self, plan: StepPlan, withheld: Withheld, lessons: Sequence[Lesson], peer: str
    ) -> StepPlan:
        """What one sender's sequences would be by themselves."""
        candidates = [c for c in plan.batch.candidates if c.group.origin.peer == peer]
        theirs = [one for one in lessons if one.sender == peer]
        return self._plan(candidates, withheld, lessons=theirs)

    def _step(self, plan: StepPlan, alone: Callable[[str], StepPlan]) -> StepReport | Blame:
        """`alone`: what one sender's sequences would be by themselves."""
        self._set_lr(plan.terms.lr_scale)
        parts = inner_parts(plan, self._rules, self._seed, self.policy.version)
        if len(parts) > 1:
            return self._several(plan, parts, alone)
        rows, before = step_rows(plan, self.policy.version), self.scale.value
        made = self._backward(plan)
        if plan.todo:
            # Nobody knows yet whether this gradient is finite, and nobody has to: where its norm is
            # no number, `descend` changes nothing, and on a GPU the optimiser sees that by itself.
            # So nothing waits for the GPU here. `_settle` reads the norm once all else is done; it
            # makes the gradient again, blames or raises, and only after it is there a new version.
            self._descend(made.step_norm)
        for one in made.notes:
            note_scores(rows, one)
        # while a GPU still computes the gradient
        senders = sender_metrics(answers(plan, rows))
        outcome = self._settle(plan, made) if plan.todo else Settled(0.0, [])
        if outcome is None:
            found = self._blame(plan, alone)
            self.scale.value = before  # which may do for who is left
            return found
        report = self._made(_report(plan, rows, made, outcome, self.policy.version))
        return replace(report, senders=_with_gradients(senders, plan, outcome))

    def _several(
        self, plan: StepPlan, parts: list[Part], alone: Callable[[str], StepPlan]
    ) -> StepReport | Blame:
        """Several optimiser steps. What the round decides it decides in a pass before the first:
        weights, filter, pulls, and all that is measured.
        """
        rows, before = step_rows(plan, self.policy.version), self.scale.value
        first = self._backward(plan, learns=False)
        for one in first.notes:
            note_scores(rows, one)
        walked: set[str] | None = None
        tally = InnerTally()
        if np.isfinite(first.loss):
            walk = Walk(self._backward, self._descend, self._blame, self.scale, tally)
            begun = with_start(plan, first.scored)
            walked = walk(begun, parts, first.scale_S, self._rules.inner_kl)
        if walked is None:
            found = self._blame(plan, alone)  # nothing has changed: it is all planned again
            self.scale.value = before
            return found
        inner, scale_S = tally.report(), first.scale_S.tolist()
        outcome = Settled(inner.norm, list(zip(first.pull_S.tolist(), scale_S, strict=True)))
        report = self._made(_report(plan, rows, first, outcome, self.policy.version))
        senders = _with_gradients(sender_metrics(answers(plan, rows)), plan, outcome)
        return replace(report, senders=senders, inner=inner, blamed=tuple(sorted(walked)))

    def _made(self, report: StepReport) -> StepReport:
        """There is a new version."""
        self.policy.version += 1
        return replace(report, lr=self._lr)

    def _descend(self, norm: Tensor) -> None:
        with explained_memory(self.token_budget):
            descend(self.optimiser, norm)

    def _settle(self, plan: StepPlan, made: Gradient) -> Settled | None:
        """Have a gradient stepped along; None where it is no number.

        One that float16 does not hold is made again, at a smaller scale; one of which a stranger
        has too much is made again with less of it.
        """
        while not np.isfinite(float(made.norm)) and np.isfinite(made.loss) and self.scale.shrink():
            made = self._backward(plan)
            self._descend(made.step_norm)
        if not np.isfinite(float(made.norm)) or not np.isfinite(made.loss):
            return None
        norm, scale_S = float(made.norm), made.scale_S.tolist()
        if min(scale_S) < 1:
            again = self._backward(plan, made.scale_S)
            self._descend(again.norm)
            norm = float(again.norm)
        self.scale.grow()
        return Settled(norm, list(zip(made.pull_S.tolist(), scale_S, strict=True)))

    def _blame(self, plan: StepPlan, alone: Callable[[str], StepPlan]) -> Blame:
        """Find the strangers whose sequences alone are not finite; raise where there is none."""
        norm_of = {}  # at a scale at which float16 holds all that it can
        senders = plan.speaking if plan.start else plan.batch.answering
        for peer in senders:
            made = self._backward(alone(peer))
            norm_of[peer] = float(made.norm) if np.isfinite(made.loss) else np.nan
        self.policy.fetch()
        fine = all(bool(p.isfinite().all()) for p in self._parameters)
        found = blame(norm_of, plan.batch.strangers & {*senders}, fine)
        if isinstance(found, Blame):
            return found
        raise _not_finite(found, sum(norm_of.values()), self.policy)

    def _backward(
        self, plan: StepPlan, scale_S: Tensor | None = None, learns: bool = True
    ) -> Gradient:
        """Add up the gradient; with `learns` False all but that.

        Where memory does not hold a micro-batch, once more with half of it.
        """
        try:
            return self._accumulate(plan, scale_S, learns)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self._halved and not self._score.holds:
                raise too_large(self.token_budget) from error
        if self._score.forget():
            return self._backward(plan, scale_S, learns)
        self.token_budget, self._halved = halved(self.token_budget), True
        return self._backward(plan, scale_S, learns)

    def _accumulate(self, plan: StepPlan, scale_S: Tensor | None, learns: bool) -> Gradient:
        """`scale_S`: what to leave of each sender's part."""
        self.optimiser.zero_grad()
        self._score.begin()
        micros = map(partial(unscored, plan), self._micro_batches(*plan.by_objective()))
        known = self._reference.known_all(plan, list(micros))
        made = self._launch(plan, known, scale_S, learns)
        if scale_S is not None:
            return made
        return made._replace(heard=_hear(self._score, plan, self._micro_batches(plan.heard)))

    def _launch(
        self,
        plan: StepPlan,
        micros: list[Unscored],
        scale_S: Tensor | None,
        learns: bool = True,
    ) -> Gradient:
        """On a GPU nothing here waits for it."""
        told = _Losses(plan, self._rows, self.policy.device)
        for wave in waves(micros, self._score.width):
            with torch.set_grad_enabled(learns):
                made = self._score.together([one.micro.packed for one in wave])
            dlosses = [told.add(*pair, scale_S) for pair in zip(wave, made, strict=True)]
            if learns:
                self.scale.backward_all([scores.logp_M for scores in made], dlosses)
        pull_S = told.pulls.norm_S
        return Gradient(
            norm=self.scale.clip(self._parameters, self._rules.grad_clip),
            loss_is_finite=torch.stack(told.losses).isfinite().all(),
            pull_S=pull_S,
            scale_S=_scales(plan, pull_S, self._trust.grad_share),
            notes=told.notes,
            heard=[],
            scored=[] if learns else told.scored,
        )

    def _micro_batches(self, *parts: list[ToScore]) -> list[MicroBatch]:
        width = self._score.width
        made = [micro_batches(part, self.token_budget, self.policy.device, width) for part in parts]
        return list(chain.from_iterable(made))


class _Losses:
    """What micro-batches of a pass come out with, and the gradients of their losses."""

    def __init__(self, plan: StepPlan, rows: tuple[Objective, ...], device: torch.device) -> None:
        self.pulls = Pulls(len(plan.batch.senders), device)
        self.notes: list[Note] = []
        self.losses = [torch.zeros((), device=device)]
        self.scored: list[Scored] = []
        self._plan, self._rows = plan, rows

    def add(self, one: Unscored, scores: Scores, scale_S: Tensor | None) -> Tensor:
        """The gradient of the loss with respect to the log-probs of a micro-batch."""
        micro, sender_B, known = one
        logp_BT = micro.unpack(scores.logp_M.detach()).requires_grad_()
        loss_batch = known(logp_learner_BT=logp_BT)
        objective = self._plan.objective_of(micro)
        output = self._rows[objective].loss(loss_batch)
        (dloss_BT,) = torch.autograd.grad(output.loss, logp_BT)
        if objective != KEPT:  # nobody may pull harder for what a peer holds against it
            self.pulls.add(sender_B, dloss_BT, logp_BT.detach(), micro.mask_BT)
        self.notes.append(note(micro, scores, loss_batch, output, dloss_BT))
        self.losses.append(output.loss.detach())
        self.scored.append(Scored(micro, logp_BT.detach(), loss_batch.logp_ref_BT))
        dloss_BT = dloss_BT if scale_S is None else dloss_BT * scale_S[sender_B, None]
        return micro.pack(dloss_BT)


@torch.no_grad()
def _hear(score: Score, plan: StepPlan, micros: Sequence[MicroBatch]) -> list[Overheard]:
    """Score what nothing is learned from."""
    heard = []
    for micro, _, known in map(partial(unscored, plan), micros):
        loss_batch = known(logp_learner_BT=micro.unpack(score(micro.packed).logp_M))
        heard.append(Overheard(micro.row_B.tolist(), loss_batch.shared_log_ratio_BT))
    return heard


def _scales(plan: StepPlan, pull_S: Tensor, most: float) -> Tensor:
    if not most:
        return torch.ones_like(pull_S)
    strangers = plan.batch.strangers
    stranger_S = torch.tensor([peer in strangers for peer in plan.batch.senders])
    return scales(pull_S, stranger_S.to(pull_S.device, non_blocking=True), most)


def _blamed(candidates: Sequence[Candidate]) -> dict[int, str]:
    """What became of the rollouts of a step, had it been left to nobody."""
    return {c.position: c.sent_letters(BLAMED * len(c.group.rollouts)) for c in candidates}


def _not_finite(fault: OwnFault, norm: float, policy: Policy) -> FloatingPointError:
    other = ", or set dtype = 'bfloat16' for the peer" if policy.dtype == torch.float16 else ""
    return FloatingPointError(
        f"gradient norm is {norm} at version {policy.version}; nothing was changed by this step. "
        f"{fault.words}: lower lr{other}; a run goes on from its newest checkpoint with --resume"
    )


def _report(
    plan: StepPlan, rows: list[Row], made: Gradient, settled: Settled, version: int
) -> StepReport:
    """What there is to say of a step from this version, but for the senders."""
    ages = Counter(c.age(version) for c in plan.batch.candidates)
    return StepReport(
        loss=made.loss,
        grad_norm=settled.norm,
        num_sequences=len(rows),
        num_scored=len(plan.todo),
        num_tokens=sum(len(s.tokens) for s in plan.todo),
        ages=dict(sorted(ages.items())),
        senders={},
        fates=fates_of(plan.batch, rows),
        log_ratios=_log_ratios(plan, rows, made.heard),
        reference_kl=reference_kl(made.notes),
        kept=_kept_report(rows[plan.batch.first_kept :]),
        trace=traces_of(plan.batch, rows, [scale for _, scale in settled.senders]),
    )


def _kept_report(rows: Sequence[Row]) -> KeptReport | None:
    if not rows:
        return None
    weight_T = np.concatenate([row.scored.weight for row in rows if row.scored] or [np.zeros(1)])
    return KeptReport(
        sequences=len(rows),
        tokens=sum(row.num_tokens for row in rows),
        fallen=float(weight_T.mean()),
    )


def _nothing_left(blamed: tuple[str, ...]) -> StepReport:
    return StepReport(
        loss=0.0,
        grad_norm=0.0,
        num_sequences=0,
        num_scored=0,
        num_tokens=0,
        ages={},
        senders={},
        blamed=blamed,
    )


def _with_gradients(
    senders: dict[str, SenderMetrics], plan: StepPlan, settled: Settled
) -> dict[str, SenderMetrics]:
    """Add how senders of other vocabularies were read, and what became of each one's gradient,
    where it was measured.
    """
    senders = with_readings(senders, plan.batch.candidates)
    spoke = {plan.sender_of(s) for s in plan.todo if s.row < plan.batch.first_kept}
    number_of = {peer: number for number, peer in enumerate(plan.batch.senders)}

    def measured(peer: str) -> SenderMetrics:
        pull, scale = settled.senders[number_of[peer]]
        return msgspec.structs.replace(senders[peer], pull=pull, grad_scale=scale)

    return {**senders, **{peer: measured(peer) for peer in senders if peer in spoke}}


def _log_ratios(plan: StepPlan, rows: list[Row], heard: list[Overheard]) -> dict[int, list[Floats]]:
    """By position: the log ratios of each rollout of audited candidates that can be compared, in
    order.
    """
    of_row = {row: table for one in heard for row, table in one.by_row().items()}
    found: dict[int, list[Floats]] = {}
    taken = zip(rows[: plan.batch.first_lesson], plan.batch.candidate_B, strict=False)
    for number, (row, candidate) in enumerate(taken):
        if candidate.position not in plan.audited:
            continue
        ratios = found.setdefault(candidate.position, [])
        if row.scored:
            ratios.append(row.scored.log_ratio)
        elif candidate.is_compared(plan.batch.number_B[number]):
            ratios.append(compared(of_row[number][: row.num_tokens], row.spans))
    return found
