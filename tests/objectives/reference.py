"""Every objective again, in float64 numpy, by loops over groups, sequences and tokens.

Written from the methods' formulas, not from the code under test. A row is a function `share(b, i,
lp)`: what sequence i adds to the loss when its learner log-probs are `lp`. What stands under a
stop-gradient reads `b.fixed` instead, the log-probs at which the gradient is taken; so central
differences in `lp` give the gradient.

rho = exp(lp - lq), R = exp(lp - fixed), A the advantage.

Of a sequence with spans lp - lq is that of a token's span. What is summed over tokens varies with
the token's own lp alone (`d`), what is counted once per span with all of its (`whole_d`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, sqrt

import numpy as np
from scipy import stats

from .cases import Case

STEP = 1e-5


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


# Advantages, one number per sequence.


def rewards_of_group(case: Case, p: int) -> list[float]:
    return [r for r, q in zip(case.reward, case.group, strict=True) if q == p]


def centred(case: Case) -> list[float]:
    return [
        r - float(np.mean(rewards_of_group(case, p)))
        for r, p in zip(case.reward, case.group, strict=True)
    ]


def standardised(case: Case) -> list[float]:
    advantage = []
    for r, p in zip(case.reward, case.group, strict=True):
        rewards = rewards_of_group(case, p)
        mean = sum(rewards) / len(rewards)
        std = (
            sqrt(sum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1))
            if len(rewards) > 1
            else 0.0
        )
        advantage.append((r - mean) / (std + 1e-4))
    return advantage


def beta_normalised(case: Case) -> list[float]:
    means = [float(np.mean(rewards_of_group(case, p))) for p in sorted(set(case.group))]
    mu = sum(means) / len(means)
    v = sum((m - mu) ** 2 for m in means) / (len(means) - 1) if len(means) > 1 else 0.0
    a = (mu * (1 - mu) / v - 1) * mu if v > 1e-12 else 0.0
    b = (mu * (1 - mu) / v - 1) * (1 - mu) if v > 1e-12 else 0.0
    alpha, beta = max(1.0, 1 + a / 3), max(1.0, 1 + b / 3)
    advantage = []
    for r, p in zip(case.reward, case.group, strict=True):
        density = float(stats.beta.pdf(means[p], alpha, beta))
        advantage.append((r - means[p]) * min(1e6, 1 / density if density > 0 else 1e6))
    return advantage


def receiver_relative(case: Case, advantage: list[float], scale: float) -> list[float]:
    adjusted = list(advantage)
    for i in range(len(case)):
        if not case.own[i]:
            gain = case.reward[i] - case.success[i]
            adjusted[i] = scale * gain if gain > 0 else min(advantage[i], 0.0)
    return adjusted


def both_baselines(case: Case, advantage: list[float], scale: float) -> list[float]:
    adjusted = list(advantage)
    for i in range(len(case)):
        if not case.own[i]:
            gain = case.reward[i] - case.success[i]
            adjusted[i] = max(scale * gain, advantage[i]) if gain > 0 else min(advantage[i], 0.0)
    return adjusted


def rehearsed(case: Case, advantage: list[float], rehearse: float) -> list[float]:
    adjusted = list(advantage)
    for i in range(len(case)):
        rewards = rewards_of_group(case, case.group[i])
        if case.own[i] and min(rewards) == max(rewards) > 0:
            adjusted[i] = rehearse * case.reward[i]
    return adjusted


def foreign_capped(case: Case, advantage: list[float], cap: float) -> list[float]:
    own = sum(abs(a) for a, mine in zip(advantage, case.own, strict=True) if mine)
    foreign = sum(abs(a) for a, mine in zip(advantage, case.own, strict=True) if not mine)
    if foreign == 0 or foreign / (own + foreign) <= cap:
        return advantage
    target = own * cap / (1 - cap)  # then target / (own + target) = cap
    return [
        a if mine else a * target / foreign for a, mine in zip(advantage, case.own, strict=True)
    ]


# The batch a share is part of.


class Reference:
    """One row on one case. `options` overrides the row's constants."""

    def __init__(self, case: Case, name: str, variant: str = "", **options: float | str) -> None:
        advantage, adjust, share, constants = ROWS[(name, variant)]
        self.case, self.fixed, self.lq = case, case.lp, case.lq
        self.o = {
            "e": 0.2,
            "g": 50.0,
            "kl": "k3",
            "beta": 0.0,
            "toward": "sampler",
            "beta_times": "one",
            "dual_clip": 3.0,
            "delta": np.inf,
            "over": mean_of_means,
            "ratio": rho,
        }
        self.o |= constants
        self.o = {"clip_low": self.o["e"], "clip_high": self.o["e"]} | self.o | options
        self.A = advantage(case)
        for step in adjust:
            self.A = step(case, self.A, self.o)
        self.A = [float(np.float32(a)) for a in self.A]
        self._share = share
        self.B = len(case)

    def share(self, i: int, lp: np.ndarray) -> float:
        loss = self._share(self, i, lp)
        if self.o["beta"]:
            loss += self.o["beta"] * self.o["over"](self, i, self.penalty(i, lp))
        return loss

    def loss(self, lp: list[np.ndarray]) -> float:
        return sum(self.share(i, lp[i]) for i in range(self.B))

    def gradient(self) -> list[np.ndarray]:
        """Central differences of the loss at the case's learner log-probs, which stay put under
        every stop-gradient.
        """
        gradient = []
        for i in range(self.B):
            row = np.zeros(len(self.fixed[i]))
            for t in range(len(row)):
                up, down = self.fixed[i].copy(), self.fixed[i].copy()
                up[t] += STEP
                down[t] -= STEP
                row[t] = (self.share(i, up) - self.share(i, down)) / (2 * STEP)
            gradient.append(row)
        return gradient

    def penalty(self, i: int, lp: np.ndarray) -> list[float]:
        """Of each token that counts."""
        most = np.inf if self.case.own[i] else self.o["dual_clip"]
        values = []
        for t in range(self.num_trained(i)):
            if self.o["toward"] != "reference" and t != self.span(i, t)[0]:
                values.append(0.0)
                continue
            x = {
                "sampler": self.whole_d(i, t, lp),
                "code": -self.whole_d(i, t, lp),
                "reference": self.case.ref[i][t] - lp[t] if self.case.ref else 0.0,
            }[self.o["toward"]]
            x = min(x, log(most))
            ratio = self.o["ratio"]
            ratio = min((whole_rho if ratio is rho else ratio)(self, i, t, lp), most)
            values.append((exp(x) - 1 - x) * (ratio if self.o["beta_times"] == "ratio" else 1.0))
        return values

    def group_members(self, i: int) -> list[int]:
        return [j for j in range(self.B) if self.case.group[j] == self.case.group[i]]

    def pair(self, i: int) -> list[int]:
        """Whom the F-TIS code has in one micro-batch with sequence i, of one author."""
        members = self.group_members(i)
        start = 2 * (members.index(i) // 2)
        return members[start : start + 2]

    def num_pairs(self) -> int:
        sizes = [len(rewards_of_group(self.case, p)) for p in set(self.case.group)]
        return sum((size + 1) // 2 for size in sizes)

    def num_trained(self, i: int) -> int:
        """How many tokens count: in the F-TIS code all but the end token."""
        return len(self.lq[i]) - (1 if self.o.get("no_end") and self.case.ended[i] else 0)

    def kl(self, i: int) -> float:
        total = 0.0
        for t in self.span_starts(i):
            d = self.d(i, t, self.fixed[i])
            total += exp(-d) - 1 + d if self.o["kl"] == "k3" else -d
        if self.o.get("kl_over") == "group":
            return total / max(1, *(self.num_trained(j) for j in self.group_members(i)))
        return total / max(1, self.num_trained(i))

    # Spans

    def span(self, i: int, t: int) -> list[int]:
        """The trained tokens of the span of a token."""
        start = 0
        for size in self.case.spans[i] if self.case.spans else []:
            if start <= t < start + size:
                return [u for u in range(start, start + size) if u < self.num_trained(i)]
            start += size
        return [t]

    def span_starts(self, i: int) -> list[int]:
        return [t for t in range(self.num_trained(i)) if t == self.span(i, t)[0]]

    def is_open(self, i: int, t: int) -> bool:
        """Whether a token's span was cut by length, or lost its end token."""
        if not self.case.spans or not self.case.spans[i]:
            return False
        last = len(self.lq[i]) - 1
        size, lost = self.case.spans[i][-1], self.num_trained(i) <= last
        return t > last - size and (self.case.open[i] or lost)

    def excess(self, i: int, t: int) -> float:
        """What the log-ratio of a token's span is above what it counts as."""
        total = sum(self.fixed[i][u] - self.lq[i][u] for u in self.span(i, t))
        return max(0.0, total) if self.is_open(i, t) else 0.0

    def d(self, i: int, t: int, lp: np.ndarray) -> float:
        fixed = sum(self.fixed[i][u] - self.lq[i][u] for u in self.span(i, t))
        return fixed - self.excess(i, t) + lp[t] - self.fixed[i][t]

    def whole_d(self, i: int, t: int, lp: np.ndarray) -> float:
        return sum(lp[u] - self.lq[i][u] for u in self.span(i, t)) - self.excess(i, t)

    def sum_d(self, i: int, lp: np.ndarray) -> float:
        """Of the whole sequence."""
        return sum(self.whole_d(i, t, lp) for t in self.span_starts(i))

    def mean_lp(self, i: int, lp: np.ndarray) -> float:
        excess = sum(self.excess(i, t) for t in self.span_starts(i))
        return (float(np.sum(lp)) - excess) / len(lp)

    def kept(self, i: int) -> bool:
        return not self.o.get("filter") or self.A[i] > 0 or self.kl(i) < self.o["g"]

    def total_tokens(self) -> int:
        return sum(len(row) for row in self.lq)

    def log_expectation(self, members: list[int]) -> float:
        q = [exp(float(np.mean(self.lq[j]))) for j in members]
        return log(sum(x * x for x in q) / sum(q))


# What the values of a sequence's tokens add to the penalty: as its row sums, over all sequences.


def mean_of_means(b: Reference, i: int, values: list[float]) -> float:
    return sum(values) / max(1, len(values)) / b.B


def mean_of_sums(b: Reference, i: int, values: list[float]) -> float:
    return sum(values) / b.B


def mean_of_tokens(b: Reference, i: int, values: list[float]) -> float:
    return sum(values) / b.total_tokens()


def mean_over_limit(b: Reference, i: int, values: list[float]) -> float:
    return sum(values) / (b.B * b.case.max_length)


def mean_of_pairs(b: Reference, i: int, values: list[float]) -> float:
    return sum(values) / max(1, len(values)) / len(b.pair(i)) / b.num_pairs()


# Ratios of one token, with gradient and without clip.


def rho(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    return exp(b.d(i, t, lp))


def whole_rho(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    return exp(b.whole_d(i, t, lp))


def gspo_ratio(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    return exp(b.mean_lp(i, lp) - float(np.mean(b.lq[i])))


def gepo_ratio(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    members = list(range(b.B)) if b.o.get("scope") == "microbatch" else b.group_members(i)
    return exp(b.mean_lp(i, lp) - b.log_expectation(members))


def gepo_plus_ratio(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    ds = [b.d(i, s, b.fixed[i]) for s in b.span_starts(i)]
    near = sum(exp(-d) - 1 + d for d in ds) / len(lp) < b.o["near"]
    return gspo_ratio(b, i, t, lp) if near else gepo_ratio(b, i, t, lp)


def ds_gspo_ratio(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    q, p_fixed = exp(float(np.mean(b.lq[i]))), exp(b.mean_lp(i, b.fixed[i]))
    return exp(b.mean_lp(i, lp)) / ((1 - b.o["mix"]) * q + b.o["mix"] * p_fixed)


# Values of one token.


def plain(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    return exp(lp[t] - b.fixed[i][t]) * b.A[i]


def clipped_unit(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    unit = exp(lp[t] - b.fixed[i][t])
    return min(unit * b.A[i], clip(unit, 1 - b.o["e"], 1 + b.o["e"]) * b.A[i])


def clipped(b: Reference, i: int, ratio: float) -> float:
    value = min(ratio * b.A[i], clip(ratio, 1 - b.o["clip_low"], 1 + b.o["clip_high"]) * b.A[i])
    return dual_clipped(b, i, value)


def dual_clipped(b: Reference, i: int, value: float) -> float:
    if b.A[i] >= 0:
        return value
    value = max(value, b.o["delta"] * b.A[i])
    return value if b.case.own[i] else max(value, b.o["dual_clip"] * b.A[i])


def clipped_rho(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    return clipped(b, i, rho(b, i, t, lp))


def truncated(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    return min(rho(b, i, t, b.fixed[i]), b.o["C"]) * clipped_unit(b, i, t, lp)


def uplifted(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    if b.o["gamma"] > 0 and b.A[i] > 0 and not b.case.own[i]:
        p = exp(b.fixed[i][t])
        return b.o["gamma"] * p / (p + b.o["gamma"]) ** 2 * plain(b, i, t, lp)
    ratio, floor = rho(b, i, t, b.fixed[i]), b.o["floor"]
    if not b.case.own[i]:
        fails = 1 - clip(b.case.success[i], 0.0, 1.0)
        q = min(exp(sum(b.lq[i][u] for u in b.span(i, t))), 1.0)
        floor *= fails ** b.o["gate"] * q ** b.o["sure"]
    weight = clip(ratio, floor, b.o["C"]) if b.A[i] > 0 else min(ratio, 1.0)
    return weight * plain(b, i, t, lp)


Token = Callable[[Reference, int, int, np.ndarray], float]
Share = Callable[[Reference, int, np.ndarray], float]


# Shares of one sequence.


def sequence_mean(token: Token) -> Share:
    """-(1/B) (1/|a_i|) sum_t, zero where the filter drops the sequence."""

    def share(b: Reference, i: int, lp: np.ndarray) -> float:
        return (
            -sum(token(b, i, t, lp) for t in range(len(lp))) / len(lp) / b.B if b.kept(i) else 0.0
        )

    return share


def dr_grpo(b: Reference, i: int, lp: np.ndarray) -> float:
    return -sum(clipped_rho(b, i, t, lp) for t in range(len(lp))) / (b.B * b.case.max_length)


def bnpo(b: Reference, i: int, lp: np.ndarray) -> float:
    return -sum(clipped_rho(b, i, t, lp) for t in range(len(lp))) / b.total_tokens()


def cispo(b: Reference, i: int, lp: np.ndarray) -> float:
    total = 0.0
    for t in range(len(lp)):
        total += clip(rho(b, i, t, b.fixed[i]), 0.0, 1 + b.o["clip_high"]) * lp[t] * b.A[i]
    return -total / b.total_tokens()


def sapo_swarm(b: Reference, i: int, lp: np.ndarray) -> float:
    speaking = [j for j in range(b.B) if len(set(rewards_of_group(b.case, b.case.group[j]))) > 1]
    if i not in speaking:
        return 0.0
    return -sum(plain(b, i, t, lp) for t in range(len(lp))) / sum(len(b.lq[j]) for j in speaking)


def of_ratio(ratio: Token) -> Share:
    """-(1/B) of one clipped ratio for all tokens."""
    return lambda b, i, lp: -clipped(b, i, ratio(b, i, 0, lp)) / b.B


def gmpo(b: Reference, i: int, lp: np.ndarray) -> float:
    product, bound = 1.0, exp(b.o["log_clip"])
    for t in b.span_starts(i):
        ratio = whole_rho(b, i, t, lp)
        product *= min(ratio, bound) if b.A[i] > 0 else max(ratio, 1 / bound)
    return -dual_clipped(b, i, product ** (1 / len(lp)) * b.A[i]) / b.B


def topr(b: Reference, i: int, lp: np.ndarray) -> float:
    if not b.kept(i):
        return 0.0
    weight = 1.0 if b.A[i] >= 0 else clip(product(b, i), 0.0, 1.0)
    return -weight * float(np.sum(lp)) * b.A[i] / b.B


def ftis_code(b: Reference, i: int, lp: np.ndarray) -> float:
    """The mean over micro-batches of two neighbours of a group of the mean over those of the two
    that the filter kept.
    """
    if not b.kept(i) or b.num_trained(i) == 0:
        return 0.0
    survivors = sum(b.kept(j) for j in b.pair(i))
    tokens = range(b.num_trained(i))
    return -sum(truncated(b, i, t, lp) for t in tokens) / len(tokens) / survivors / b.num_pairs()


def _both(case: Case, advantage: list[float], o: dict) -> list[float]:
    return both_baselines(case, advantage, o["scale"])


def _relative(case: Case, advantage: list[float], o: dict) -> list[float]:
    return receiver_relative(case, advantage, o["scale"])


def _rehearsed(case: Case, advantage: list[float], o: dict) -> list[float]:
    return rehearsed(case, advantage, o["rehearse"])


def _capped(case: Case, advantage: list[float], o: dict) -> list[float]:
    return foreign_capped(case, advantage, o["foreign_cap"])


_FTIS = {"filter": True, "C": 2.0}
_UPLIFT = {
    "filter": True,
    "C": 1.0,
    "floor": 1.0,
    "gamma": 0.0,
    "gate": 0.0,
    "sure": 0.0,
}
_uplift = sequence_mean(uplifted)

# (name, variant) -> advantage, adjustments, share, constants
ROWS: dict[tuple[str, str], tuple] = {
    ("alone", ""): (standardised, (), sequence_mean(plain), {}),
    ("nois", ""): (standardised, (), sequence_mean(plain), {}),
    ("grpo", ""): (standardised, (), sequence_mean(clipped_rho), {}),
    ("tis", ""): (standardised, (), sequence_mean(truncated), {"C": 2.0}),
    ("ftis", ""): (standardised, (), sequence_mean(truncated), _FTIS),
    ("ftis", "code"): (
        centred,
        (),
        ftis_code,
        _FTIS | {"no_end": True, "kl_over": "group", "over": mean_of_pairs},
    ),
    ("fnois", ""): (standardised, (), sequence_mean(plain), {"filter": True}),
    ("fvis", ""): (standardised, (), sequence_mean(clipped_rho), {"filter": True}),
    ("dr_grpo", ""): (centred, (), dr_grpo, {"over": mean_over_limit}),
    ("bnpo", ""): (beta_normalised, (), bnpo, {"over": mean_of_tokens}),
    ("gspo", ""): (standardised, (), of_ratio(gspo_ratio), {"ratio": gspo_ratio}),
    ("gepo", ""): (centred, (), of_ratio(gepo_ratio), {"ratio": gepo_ratio}),
    ("gepo", "code"): (
        centred,
        (),
        of_ratio(gepo_ratio),
        {"scope": "microbatch", "toward": "code", "ratio": gepo_ratio},
    ),
    ("gepo_plus", ""): (
        centred,
        (),
        of_ratio(gepo_plus_ratio),
        {"near": 0.002, "ratio": gepo_plus_ratio},
    ),
    ("ds_gspo", ""): (centred, (), of_ratio(ds_gspo_ratio), {"mix": 0.005, "ratio": ds_gspo_ratio}),
    ("cispo", ""): (standardised, (), cispo, {"e": 4.0, "over": mean_of_tokens}),
    ("topr", ""): (centred, (), topr, {"over": mean_of_sums}),
    ("topr", "filtered"): (centred, (), topr, {"filter": True, "over": mean_of_sums}),
    ("gmpo", ""): (standardised, (), gmpo, {"log_clip": 0.4}),
    ("uplift", ""): (standardised, (), _uplift, _UPLIFT),
    ("uplift", "relative"): (standardised, (_relative,), _uplift, _UPLIFT | {"scale": 2.0}),
    ("uplift", "both"): (
        standardised,
        (_both, _rehearsed),
        _uplift,
        _UPLIFT | {"scale": 1.0, "rehearse": 0.3},
    ),
    ("uplift", "rehearsed"): (standardised, (_rehearsed,), _uplift, _UPLIFT | {"rehearse": 0.3}),
    ("uplift", "relative_rehearsed"): (
        standardised,
        (_relative, _rehearsed),
        _uplift,
        _UPLIFT | {"scale": 1.0, "rehearse": 0.3},
    ),
    ("uplift", "floored"): (standardised, (), _uplift, _UPLIFT | {"floor": 0.3, "C": 2.0}),
    ("uplift", "shaped"): (standardised, (), _uplift, _UPLIFT | {"gamma": 0.1}),
    ("uplift", "relative_shaped"): (
        standardised,
        (_relative,),
        _uplift,
        _UPLIFT | {"scale": 2.0, "gamma": 0.1},
    ),
    ("uplift", "relative_rehearsed_shaped"): (
        standardised,
        (_relative, _rehearsed),
        _uplift,
        _UPLIFT | {"scale": 1.0, "rehearse": 0.3, "gamma": 0.1},
    ),
    ("uplift", "capped"): (standardised, (_capped,), _uplift, _UPLIFT | {"foreign_cap": 0.5}),
    ("uplift", "relative_capped"): (
        standardised,
        (_relative, _rehearsed, _capped),
        _uplift,
        _UPLIFT | {"scale": 2.0, "rehearse": 0.3, "foreign_cap": 0.5},
    ),
    ("sapo_swarm", ""): (standardised, (), sapo_swarm, {"over": mean_of_tokens}),
}
# what is kept of own successes is no part of a batch's answers
ROWS[("uplift", "kept")] = ROWS[("uplift", "both")]
for _name, _guard in (("sure", {"sure": 1.0}), ("gated", {"gate": 8.0})):
    ROWS[("uplift", _name)] = (
        standardised,
        (_both, _rehearsed),
        _uplift,
        _UPLIFT | {"scale": 1.0, "rehearse": 0.3} | _guard,
    )
for _name in ("grpo", "fvis", "dr_grpo", "bnpo", "gspo", "gepo", "gepo_plus", "ds_gspo", "gmpo"):
    _advantage, _adjust, _share, _constants = ROWS[(_name, "")]
    ROWS[(_name, "published")] = (_advantage, _adjust, _share, _constants | {"dual_clip": np.inf})


# HACPO


def capability_aware(case: Case) -> list[float]:
    skill = [
        1.0 if mine else clip(x, 0.1, 10.0) for mine, x in zip(case.own, case.skill, strict=True)
    ]
    advantage = []
    for i in range(len(case)):
        members = [j for j in range(len(case)) if case.group[j] == case.group[i]]
        rewards = [case.reward[j] for j in members]
        if max(rewards) == min(rewards):
            advantage.append(0.0)
            continue
        baseline = sum(case.reward[j] / skill[j] for j in members) / len(members)
        if baseline > max(rewards):
            baseline = float(np.mean([case.reward[j] for j in members if case.own[j]] or rewards))
        std = float(np.std(rewards, ddof=1))
        advantage.append(skill[i] * (case.reward[i] - baseline) / (std + 1e-4))
    return advantage


def hacpo(b: Reference, i: int, lp: np.ndarray) -> float:
    s = gspo_ratio(b, i, 0, lp)
    if b.case.own[i]:
        return -clipped(b, i, s) / b.B
    low = min(1.0, 1 - b.o["cross_clip"] + b.o.get("taken", 0) * b.o["cross_step"])
    fixed = gspo_ratio(b, i, 0, b.fixed[i])
    return -clip(s, low, 1.0) * clip(fixed, low, 1.0) ** b.o["alpha"] * b.A[i] / b.B


# Rows of TRL, verl and prime-rl


def batch_standardised(case: Case) -> list[float]:
    std = float(np.std(case.reward, ddof=1))
    return [a / (std + 1e-4) for a in centred(case)]


def leave_one_out(case: Case) -> list[float]:
    advantage = []
    for i in range(len(case)):
        others = [
            case.reward[j] for j in range(len(case)) if case.group[j] == case.group[i] and j != i
        ]
        advantage.append(case.reward[i] - sum(others) / len(others) if others else 0.0)
    return advantage


def whitened(case: Case, values: list[float]) -> list[float]:
    tokens = [x for x, n in zip(values, case.lengths, strict=True) for _ in range(n)]
    mean, variance = float(np.mean(tokens)), float(np.var(tokens, ddof=1))
    return [(x - mean) / sqrt(variance + 1e-8) for x in values]


def product(b: Reference, i: int) -> float:
    return exp(b.sum_d(i, b.fixed[i]))


def token_masked(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    ratio = rho(b, i, t, b.fixed[i])
    return ratio * clipped_unit(b, i, t, lp) if ratio <= b.o["C"] else 0.0


def sequence_truncated(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    return min(product(b, i), b.o["C"]) * clipped_unit(b, i, t, lp)


def sequence_masked(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    w = product(b, i)
    return w * clipped_unit(b, i, t, lp) if w <= b.o["C"] else 0.0


def vcpo(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    return min(product(b, i), b.o["C"]) * plain(b, i, t, lp)


def soft_gate(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    tau = b.o["tau_pos"] if b.A[i] > 0 else b.o["tau_neg"]
    x = min(tau * (rho(b, i, t, lp) - 1), 700.0)
    return 4 / tau * exp(x) / (1 + exp(x)) * b.A[i]


def bounded_rho(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    ratio = rho(b, i, t, lp)
    return ratio if b.case.own[i] else min(ratio, b.o["dual_clip"])


def token_sum(token: Token) -> Callable[[Reference, int, np.ndarray], float]:
    """-(1/all tokens) sum_t."""

    def share(b: Reference, i: int, lp: np.ndarray) -> float:
        return -sum(token(b, i, t, lp) for t in range(len(lp))) / b.total_tokens()

    return share


def dppo(b: Reference, i: int, lp: np.ndarray) -> float:
    if b.A[i] == 0:
        return 0.0
    speaking = [j for j in range(b.B) if len(set(rewards_of_group(b.case, b.case.group[j]))) > 1]
    total = 0.0
    for t in range(len(lp)):
        p, q = (exp(sum(row[i][u] for u in b.span(i, t))) for row in (b.fixed, b.lq))
        moved = p - q
        if (moved <= b.o["mask_high"]) if b.A[i] > 0 else (moved >= -b.o["mask_low"]):
            total += bounded_rho(b, i, t, lp) * b.A[i]
        d = b.d(i, t, lp)
        most = log(b.o["dual_clip"])
        total -= b.o["tau"] * (d if b.case.own[i] else clip(d, -most, most)) ** 2
    return -total / sum(len(b.lq[j]) for j in speaking)


def second_moment(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    d = b.d(i, t, b.fixed[i])
    if d * b.A[i] > 0 and d * d > most_square(b):
        return 0.0
    return bounded_rho(b, i, t, lp) * b.A[i]


def most_square(b: Reference) -> float:
    """By taking the largest away until the mean of the rest fits, as the paper has it; by the
    log-probs that the case begins with.
    """
    present, b.fixed = b.fixed, b.case.lp
    ratios = [(b.A[i], b.d(i, t, b.fixed[i])) for i in range(b.B) for t in b.span_starts(i)]
    b.fixed = present
    squares = sorted(d * d for A, d in ratios if d * A > 0)
    while squares and sum(squares) / len(squares) > b.o["budget"]:
        largest = squares.pop()
        while squares and largest <= squares[-1] * (1 + 2e-5):  # equal but for rounding
            largest = squares.pop()
    return squares[-1] * (1 + 1e-5) if squares else 0.0


def product_ratio(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    return exp(b.sum_d(i, lp))


_TOKENS = {"over": mean_of_tokens}


ROWS |= {
    ("hacpo", ""): (
        capability_aware,
        (),
        hacpo,
        {"cross_clip": 0.8, "cross_step": 0.025, "alpha": 1.0},
    ),
    ("grpo", "batch_std"): (batch_standardised, (), sequence_mean(clipped_rho), {}),
    ("tis", "token_mask"): (standardised, (), sequence_mean(token_masked), {"C": 3.0}),
    ("tis", "sequence"): (standardised, (), sequence_mean(sequence_truncated), {"C": 3.0}),
    ("tis", "sequence_mask"): (standardised, (), sequence_mean(sequence_masked), {"C": 3.0}),
    ("tis", "trl"): (standardised, (), token_sum(sequence_masked), {"C": 3.0} | _TOKENS),
    ("dapo", ""): (standardised, (), token_sum(clipped_rho), {"clip_high": 0.28} | _TOKENS),
    ("sapo", ""): (standardised, (), sequence_mean(soft_gate), {"tau_pos": 1.0, "tau_neg": 1.05}),
    ("rloo", ""): (leave_one_out, (), of_ratio(product_ratio), {"ratio": product_ratio}),
    ("reinforce_pp", ""): (
        lambda case: whitened(case, case.reward),
        (),
        token_sum(clipped_rho),
        _TOKENS,
    ),
    ("reinforce_pp", "baseline"): (
        lambda case: whitened(case, centred(case)),
        (),
        token_sum(clipped_rho),
        _TOKENS,
    ),
    ("dppo", ""): (centred, (), dppo, {"mask_low": 0.2, "mask_high": 0.2, "tau": 1e-3} | _TOKENS),
    ("m2po", ""): (standardised, (), token_sum(second_moment), {"budget": 0.04} | _TOKENS),
    ("vcpo", ""): (standardised, (), sequence_mean(vcpo), {"C": 8.0}),
}
for _name in ("dapo", "rloo", "reinforce_pp"):
    _advantage, _adjust, _share, _constants = ROWS[(_name, "")]
    ROWS[(_name, "published")] = (_advantage, _adjust, _share, _constants | {"dual_clip": np.inf})
