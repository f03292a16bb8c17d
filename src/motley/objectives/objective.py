"""Objective: one row of the table; prepares a batch's terms, computes a micro-batch's loss."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from motley.objectives.advantages import (
    Adjustment,
    Advantage,
    Standardised,
    group_sum,
    num_groups,
)
from motley.objectives.batch import LossBatch, LossOutput, Samples, Terms
from motley.objectives.importance import Filter, KeepAll, Unweighted, Weight
from motley.objectives.looks import Look, NoLook
from motley.objectives.ratios import Ratio, TokenRatio, k3, log_expectation, span_ratio
from motley.objectives.reductions import PairSurvivors, Reduction, SequenceMean
from motley.objectives.surrogates import (
    DUAL_CLIP,
    ClippedRatio,
    InnerClip,
    LogProb,
    Reinforce,
    Surrogate,
)

Setting = float | str
# settings are 0 or more, but for these: a k1 estimate of KL can be negative, and a bound on a ratio
# must leave a ratio of 1 alone
LEAST = {"g": -math.inf, "dual_clip": 1.0, "delta": 1.0, "most_skill": 1.0}
LEAST |= {"tau_pos": 0.01, "tau_neg": 0.01, "base_ess": 0.01}  # they divide

# What the settings that are text may say; the parts' Literal types say the same.
CHOICES = {
    "kl": ("k3", "k1"),
    "kl_over": ("own", "group"),
    "scope": ("group", "microbatch"),
    "toward": ("sampler", "code", "reference"),
    "beta_times": ("one", "ratio"),
    "baseline": ("none", "group"),
    "ess": ("truncated", "free"),
    "held": ("mastered", "all"),
}


@dataclass(frozen=True, slots=True)
class Penalty:
    """beta·k3 of every token, reduced as the row's loss is, over all sequences; toward the sampler
    of every span, where it has another vocabulary.

    toward "sampler": exp(d) - 1 - d, unbiased for KL(q||p) on samples of q. "code": the other
    direction, exp(-d) - 1 + d, as GEPO's released code has it; it spikes where the learner finds a
    token unlikely. "reference": exp(x) - 1 - x with x = log p of the policy that the peer began
    with - log p, unbiased for KL(p||reference) on samples of p.

    beta_times "ratio": times the row's ratio, with gradient and before its clip; rho_t in rows
    without one, and in GMPO's and HACPO's. Times rho_t, or RLOO's, on samples of q "reference" is
    unbiased for KL(p||reference) and "code" for KL(p||q). Times s_i or another it is not.

    A stranger's exponent is at most log(dual_clip) and its ratio at most dual_clip, with no
    gradient beyond: it may report any q, and choose any token.
    """

    beta: float = 0.0
    toward: Literal["sampler", "code", "reference"] = "sampler"
    beta_times: Literal["one", "ratio"] = "one"
    dual_clip: float = DUAL_CLIP

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0 and self.toward == "reference"

    def __call__(self, batch: LossBatch, ratio: Ratio, reduction: Reduction) -> torch.Tensor:
        if batch.withheld_BT is not None:
            batch = batch.fixed(batch.withheld_BT)
        most_B1 = torch.where(batch.terms.stranger_B, self.dual_clip, torch.inf)[:, None]
        value_BT = k3(self._exponent(batch).clamp(max=most_B1.log()))
        if self.beta_times == "ratio":
            value_BT = value_BT * span_ratio(ratio, batch).clamp(max=most_B1)
        if self.toward != "reference":
            value_BT = torch.where(batch.once(batch.mask_BT), value_BT, 0.0)
        keep_B = torch.ones_like(batch.ended_B)
        return self.beta * reduction(value_BT, keep_B, batch.penalised())

    def _exponent(self, batch: LossBatch) -> torch.Tensor:
        if self.toward == "reference":
            return batch.ref_log_ratio_BT
        log_ratio_BT = batch.span_log_ratio_BT
        return log_ratio_BT if self.toward == "sampler" else -log_ratio_BT


@dataclass(frozen=True, slots=True)
class Keeping:
    """Own successes of earlier steps, up to one for every two foreign rollouts of a step: A = keep,
    and w = 1 on tokens that have become less likely than when they were sampled, else 0.

    `held`: of which kinds of problems. "mastered": so many as more than half of them are solved.
    """

    keep: float = 0.0  # 0: nothing is remembered
    held: Literal["mastered", "all"] = "mastered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """advantage x adjustments x weight x filter x surrogate x reduction, a penalty, and what is
    kept of own successes.

    loss = -reduce(weight·surrogate over the sequences kept) + penalty
    """

    advantage: Advantage = Standardised()
    adjust: tuple[Adjustment, ...] = ()
    weight: Weight = Unweighted()
    filter: Filter = KeepAll()
    surrogate: Surrogate = Reinforce()
    reduction: Reduction = SequenceMean()
    look: Look = NoLook()
    penalty: Penalty = Penalty()
    keeping: Keeping = Keeping()
    end_token: bool = True  # False masks the end token out of the loss
    skip_silent: bool = False  # True leaves zero-advantage groups out of the denominators too

    def prepare(self, samples: Samples) -> Terms:
        """Compute once what needs the whole group or batch."""
        advantage_B = self.advantage(samples)
        for adjust in self.adjust:
            advantage_B = adjust(samples, advantage_B)
        counted_B = torch.ones_like(samples.own_B)
        if self.skip_silent:
            counted_B = group_sum(advantage_B.abs(), samples.group_B) > 0
        pair_B = _pairs(samples)
        return Terms(
            advantage_B=advantage_B.float(),
            own_B=samples.own_B,
            stranger_B=samples.stranger_B,
            success_B=samples.success_B,
            log_expectation_B=log_expectation(samples.logq_mean_B, samples.group_B),
            group_longest_B=_group_longest(samples, self.end_token),
            pair_B=pair_B,
            num_sequences=int(counted_B.sum()),
            num_tokens=int(samples.length_B[counted_B].sum()),
            num_penalised=len(samples.reward_B),
            num_penalised_tokens=int(samples.length_B.sum()),
            num_penalised_pairs=int(pair_B.max()) + 1,
            num_pairs=int(pair_B.max()) + 1,
            max_length=samples.max_length,
        )

    @property
    def weighs_own(self) -> bool:
        """Whether own sequences count by the ratio to what they were sampled with."""
        return not (
            isinstance(self.weight, Unweighted)
            and isinstance(self.surrogate, Reinforce | InnerClip | LogProb)
        )

    @property
    def looks(self) -> bool:
        """Whether the batch must be scored before its first step, for `settle`."""
        return not isinstance(self.look, NoLook)

    def settle(self, terms: Terms, scored: Sequence[LossBatch]) -> Terms:
        """The terms with what the scored batch decides; `scored` are all its micro-batches."""
        return self.look(terms, scored)

    def loss(self, batch: LossBatch) -> LossOutput:
        """The share of one micro-batch in the loss of the batch its terms come from.

        In a later step of a round the filter still decides as at its start. So does the weight
        where the surrogate has the ratio since then; elsewhere it is the present policy's.
        """
        if not self.end_token:
            batch = batch.without_end()
        withheld_BT = torch.zeros_like(batch.mask_BT)
        penalised = batch
        if batch.withheld_BT is not None:
            withheld_BT = batch.withheld_BT & (batch.advantage_B > 0)[:, None]
            batch = batch.fixed(withheld_BT)
        start = batch.at_start()
        weighed = start if isinstance(self.surrogate, InnerClip) else batch
        keep_B, kl_B = self.filter(start)
        weight_BT = self.weight(weighed)
        surrogate_BT, factor_BT, ratio_BT = self.surrogate(batch)
        loss = -self.reduction(weight_BT * surrogate_BT, keep_B, batch)
        if self.penalty.beta:
            ratio = self.surrogate.ratio if isinstance(self.surrogate, ClippedRatio) else None
            loss = loss + self.penalty(penalised, ratio or TokenRatio(), self.reduction)
        used_BT = torch.where(batch.mask_BT & ~withheld_BT, weight_BT * factor_BT, 0.0)
        free_BT = torch.where(batch.mask_BT, self.weight.free(weighed) * ratio_BT, 0.0)
        return LossOutput(
            loss=loss,
            weight_BT=used_BT,
            free_BT=free_BT,
            factor_BT=factor_BT,
            keep_B=keep_B,
            kl_B=kl_B,
        )

    def settings(self) -> dict[str, Setting]:
        """Every number or choice a crew file may set on this row, with its value.

        >>> Objective(weight=Truncated(C=2.0)).settings()
        {'C': 2.0, 'beta': 0.0, 'toward': 'sampler', 'beta_times': 'one', 'dual_clip': 3.0,
        'keep': 0.0, 'held': 'mastered'}
        """
        return {name: value for part in self._parts() for name, value in _settings_of(part).items()}

    def with_settings(self, settings: dict[str, Setting]) -> Objective:
        """The same row with some settings changed; a setting the row does not use is an error."""
        known = self.settings()
        for name, value in settings.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ValueError(
                    f"objective setting {name!r} is not used by this objective; it uses "
                    f"{', '.join(sorted(known))}{hint}"
                )
            if isinstance(known[name], str) != isinstance(value, str):
                kind = "text" if isinstance(known[name], str) else "a number"
                raise ValueError(
                    f"objective setting {name} = {value!r}: expected {kind}, such as "
                    f"{known[name]!r}"
                )
            least = LEAST.get(name, 0.0)
            if isinstance(value, int | float) and not value >= least:
                raise ValueError(
                    f"objective setting {name} = {value}: expected a number of at least "
                    f"{least:g}, such as {known[name]!r}"
                )
            if name in CHOICES and value not in CHOICES[name]:
                raise ValueError(
                    f"objective setting {name} = {value!r}: expected one of "
                    f"{', '.join(CHOICES[name])}"
                )
        return _replace(self, settings)

    def _parts(self) -> list[Any]:
        return [
            self.advantage,
            *self.adjust,
            self.weight,
            self.filter,
            self.surrogate,
            self.reduction,
            self.look,
            self.penalty,
            self.keeping,
        ]

    def silent(self, terms: Terms) -> torch.Tensor:
        """bool_B: sequences that cannot change the gradient and need not be scored."""
        if self.penalty.beta:
            return torch.zeros_like(terms.advantage_B, dtype=torch.bool)
        silent_B = terms.advantage_B == 0
        # a silent half of a pair still counts as its survivor
        if isinstance(self.reduction, PairSurvivors):
            return group_sum((~silent_B).float(), terms.pair_B) == 0
        return silent_B


def _pairs(samples: Samples) -> torch.Tensor:
    """Number the pairs (0,1), (2,3), ... of each sender within each group, one number per pair over
    the batch.
    """
    numbers: list[int] = []
    num_pairs = 0
    half: dict[tuple[int, int], int] = {}  # pairs that lack their second
    for key in zip(samples.group_B.tolist(), samples.sender_B.tolist(), strict=True):
        if key in half:
            numbers.append(half.pop(key))
        else:
            half[key] = num_pairs
            numbers.append(num_pairs)
            num_pairs += 1
    return torch.tensor(numbers, device=samples.group_B.device)


def _group_longest(samples: Samples, end_token: bool) -> torch.Tensor:
    length_B = samples.length_B if end_token else samples.length_B - samples.ended_B.long()
    longest_P = length_B.new_ones(num_groups(samples.group_B))
    return longest_P.scatter_reduce(0, samples.group_B, length_B, "amax")[samples.group_B]


def _settings_of(part: Any) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        settings |= _settings_of(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return settings


def _replace(part: Any, settings: dict[str, Setting]) -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = _replace(value, settings)
        elif isinstance(value, tuple):
            changes[field.name] = tuple(_replace(item, settings) for item in value)
        elif field.name in settings and not isinstance(part, Objective):
            changes[field.name] = settings[field.name]
    return dataclasses.replace(part, **changes)
