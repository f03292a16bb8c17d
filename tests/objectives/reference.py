"""Every objective again, in float64 numpy, by loops over groups, sequences and tokens.

Written from the methods' formulas, not from the code under test. A row is a function `share(b, i,
lp)`: what sequence i adds to the loss when its learner log-probs are `lp`. What stands under a
stop-gradient reads `b.fixed` instead, the log-probs at which the gradient is taken; so central
differences in `lp` give the gradient.

rho = exp(lp - lq), R = exp(lp - fixed), A the advantage.
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
            "dual_clip": 3.0,
        }
        self.o |= constants
        self.o |= {"clip_low": self.o["e"], "clip_high": self.o["e"]} | options
        self.A = advantage(case)
        for step in adjust:
            self.A = step(case, self.A, self.o)
        self.A = [float(np.float32(a)) for a in self.A]
        self._share = share
        self.B = len(case)

    def share(self, i: int, lp: np.ndarray) -> float:
        loss = self._share(self, i, lp)
        if self.o["beta"]:
            loss += self.o["beta"] * self.penalty(i, lp) / self.B
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

    def penalty(self, i: int, lp: np.ndarray) -> float:
        exponents = lp - self.lq[i] if self.o["toward"] == "sampler" else self.lq[i] - lp
        most = np.inf if self.case.own[i] else log(self.o["dual_clip"])
        return float(np.mean([exp(min(x, most)) - 1 - min(x, most) for x in exponents]))

    def group_members(self, i: int) -> list[int]:
        return [j for j in range(self.B) if self.case.group[j] == self.case.group[i]]

    def num_trained(self, i: int) -> int:
        """How many tokens count: in the F-TIS code all but the end token."""
        return len(self.lq[i]) - (1 if self.o.get("no_end") and self.case.ended[i] else 0)

    def kl(self, i: int) -> float:
        total = 0.0
        for t in range(self.num_trained(i)):
            d = self.fixed[i][t] - self.lq[i][t]
            total += exp(-d) - 1 + d if self.o["kl"] == "k3" else -d
        if self.o.get("kl_over") == "group":
            return total / max(len(self.lq[j]) for j in self.group_members(i))
        return total / max(1, self.num_trained(i))

    def kept(self, i: int) -> bool:
        return not self.o.get("filter") or self.A[i] > 0 or self.kl(i) < self.o["g"]

    def total_tokens(self) -> int:
        return sum(len(row) for row in self.lq)

    def log_expectation(self, members: list[int]) -> float:
        q = [exp(float(np.mean(self.lq[j]))) for j in members]
        return log(sum(x * x for x in q) / sum(q))


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
    return value if b.case.own[i] or b.A[i] >= 0 else max(value, b.o["dual_clip"] * b.A[i])


def clipped_rho(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    return clipped(b, i, exp(lp[t] - b.lq[i][t]))


def truncated(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    return min(exp(b.fixed[i][t] - b.lq[i][t]), b.o["C"]) * clipped_unit(b, i, t, lp)


def uplifted(b: Reference, i: int, t: int, lp: np.ndarray) -> float:
    if b.o["gamma"] > 0 and b.A[i] > 0 and not b.case.own[i]:
        p = exp(b.fixed[i][t])
        return b.o["gamma"] * p / (p + b.o["gamma"]) ** 2 * plain(b, i, t, lp)
    rho = exp(b.fixed[i][t] - b.lq[i][t])
    weight = clip(rho, b.o["floor"], b.o["C"]) if b.A[i] > 0 else min(rho, 1.0)
    return weight * plain(b, i, t, lp)


Token = Callable[[Reference, int, int, np.ndarray], float]


# Shares of one sequence.


def sequence_mean(token: Token) -> Callable[[Reference, int, np.ndarray], float]:
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
        total += clip(exp(b.fixed[i][t] - b.lq[i][t]), 0.0, 1 + b.o["clip_high"]) * lp[t] * b.A[i]
    return -total / b.total_tokens()


def sapo_swarm(b: Reference, i: int, lp: np.ndarray) -> float:
    speaking = [j for j in range(b.B) if len(set(rewards_of_group(b.case, b.case.group[j]))) > 1]
    if i not in speaking:
        return 0.0
    return -sum(plain(b, i, t, lp) for t in range(len(lp))) / sum(len(b.lq[j]) for j in speaking)


def gspo(b: Reference, i: int, lp: np.ndarray) -> float:
    return -clipped(b, i, exp(float(np.mean(lp)) - float(np.mean(b.lq[i])))) / b.B


def gepo(b: Reference, i: int, lp: np.ndarray) -> float:
    members = list(range(b.B)) if b.o.get("scope") == "microbatch" else b.group_members(i)
    return -clipped(b, i, exp(float(np.mean(lp)) - b.log_expectation(members))) / b.B


def gepo_plus(b: Reference, i: int, lp: np.ndarray) -> float:
    d = b.fixed[i] - b.lq[i]
    near = float(np.mean(np.exp(d) - 1 - d)) < b.o["near"]
    denominator = (
        exp(float(np.mean(b.lq[i]))) if near else exp(b.log_expectation(b.group_members(i)))
    )
    return -clipped(b, i, exp(float(np.mean(lp))) / denominator) / b.B


def ds_gspo(b: Reference, i: int, lp: np.ndarray) -> float:
    q, p_fixed = exp(float(np.mean(b.lq[i]))), exp(float(np.mean(b.fixed[i])))
    return (
        -clipped(b, i, exp(float(np.mean(lp))) / ((1 - b.o["mix"]) * q + b.o["mix"] * p_fixed))
        / b.B
    )


def gmpo(b: Reference, i: int, lp: np.ndarray) -> float:
    product, bound = 1.0, exp(b.o["log_clip"])
    for t in range(len(lp)):
        rho = exp(lp[t] - b.lq[i][t])
        product *= min(rho, bound) if b.A[i] > 0 else max(rho, 1 / bound)
    return -dual_clipped(b, i, product ** (1 / len(lp)) * b.A[i]) / b.B


def topr(b: Reference, i: int, lp: np.ndarray) -> float:
    if not b.kept(i):
        return 0.0
    product = float(np.prod(np.exp(b.fixed[i] - b.lq[i])))
    weight = 1.0 if b.A[i] >= 0 else clip(product, 0.0, 1.0)
    return -weight * float(np.sum(lp)) * b.A[i] / b.B


def ftis_code(b: Reference, i: int, lp: np.ndarray) -> float:
    """The mean over micro-batches of two neighbours of a group of the mean over those of the two
    that the filter kept.
    """
    if not b.kept(i) or b.num_trained(i) == 0:
        return 0.0
    members = b.group_members(i)
    start = 2 * (members.index(i) // 2)
    survivors = sum(b.kept(j) for j in members[start : start + 2])
    sizes = [len(rewards_of_group(b.case, p)) for p in set(b.case.group)]
    num_pairs = sum((size + 1) // 2 for size in sizes)
    tokens = range(b.num_trained(i))
    return -sum(truncated(b, i, t, lp) for t in tokens) / len(tokens) / survivors / num_pairs


def _relative(case: Case, advantage: list[float], o: dict) -> list[float]:
    return receiver_relative(case, advantage, o["scale"])


def _rehearsed(case: Case, advantage: list[float], o: dict) -> list[float]:
    return rehearsed(case, advantage, o["rehearse"])


def _capped(case: Case, advantage: list[float], o: dict) -> list[float]:
    return foreign_capped(case, advantage, o["foreign_cap"])


_FTIS = {"filter": True, "C": 2.0}
_UPLIFT = {"filter": True, "C": 1.0, "floor": 1.0, "gamma": 0.0}
_uplift = sequence_mean(uplifted)

# (name, variant) -> advantage, adjustments, share, constants
ROWS: dict[tuple[str, str], tuple] = {
    ("alone", ""): (standardised, (), sequence_mean(plain), {}),
    ("nois", ""): (standardised, (), sequence_mean(plain), {}),
    ("grpo", ""): (standardised, (), sequence_mean(clipped_rho), {}),
    ("tis", ""): (standardised, (), sequence_mean(truncated), {"C": 2.0}),
    ("ftis", ""): (standardised, (), sequence_mean(truncated), _FTIS),
    ("ftis", "code"): (centred, (), ftis_code, _FTIS | {"no_end": True, "kl_over": "group"}),
    ("fnois", ""): (standardised, (), sequence_mean(plain), {"filter": True}),
    ("fvis", ""): (standardised, (), sequence_mean(clipped_rho), {"filter": True}),
    ("dr_grpo", ""): (centred, (), dr_grpo, {}),
    ("bnpo", ""): (beta_normalised, (), bnpo, {}),
    ("gspo", ""): (standardised, (), gspo, {}),
    ("gepo", ""): (centred, (), gepo, {}),
    ("gepo", "code"): (centred, (), gepo, {"scope": "microbatch", "toward": "code"}),
    ("gepo_plus", ""): (centred, (), gepo_plus, {"near": 0.002}),
    ("ds_gspo", ""): (standardised, (), ds_gspo, {"mix": 0.005}),
    ("cispo", ""): (standardised, (), cispo, {"e": 4.0}),
    ("topr", ""): (centred, (), topr, {}),
    ("topr", "filtered"): (centred, (), topr, {"filter": True}),
    ("gmpo", ""): (standardised, (), gmpo, {"log_clip": 0.4}),
    ("uplift", ""): (standardised, (), _uplift, _UPLIFT),
    ("uplift", "relative"): (standardised, (_relative,), _uplift, _UPLIFT | {"scale": 2.0}),
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
    ("sapo_swarm", ""): (standardised, (), sapo_swarm, {}),
}
for _name in ("grpo", "fvis", "dr_grpo", "bnpo", "gspo", "gepo", "gepo_plus", "ds_gspo", "gmpo"):
    _advantage, _adjust, _share, _constants = ROWS[(_name, "")]
    ROWS[(_name, "published")] = (_advantage, _adjust, _share, _constants | {"dual_clip": np.inf})
