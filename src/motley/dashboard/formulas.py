"""Formula: what a step made of one token, line by line with its values, and a verdict in words.

The values are those that the step wrote down (learning/traces.py); the words are those of the row's
parts. Where nothing was written down it says why.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from motley.archive.rollouts import NO_ADVANTAGE, WORDS
from motley.dashboard.answers import Formula, FormulaLine
from motley.dashboard.reasons import fate_words
from motley.dashboard.rows import ObjectiveRow
from motley.learning.fates import LEARNED, RESCUED, SILENT, WITHHELD
from motley.learning.traces import RolloutTrace

NEAR = 1e-3  # of a value, by which two are the same

# What the weight is made of, before its bounds.
RATIOS = {
    "": ("ρ", "exp(d)"),
    "TokenRatio": ("ρ", "exp(d)"),
    "SequenceRatio": ("s", "exp(mean of d over the completion)"),
    "ProductRatio": ("Πρ", "exp(sum of d over the completion)"),
    "GroupRatio": ("w", "exp(mean log p − log E), E: what the group's senders expect"),
    "GroupOrSequenceRatio": ("w", "exp(mean log p − log E), or exp(mean of d) if KL is small"),
    "SmoothedSequenceRatio": ("s", "p / ((1 − mix)·q + mix·p), of mean log-probs"),
    "GeometricRatio": ("s", "exp(mean of d over the completion, each d clipped)"),
}
OF_SEQUENCE = {"SequenceTruncated", "SequenceMasked", "TaperedNegatives"}
BOUNDS = {
    "C": "the weight is at most this",
    "floor": "of a success it is at least this",
    "sure": "if above 0, of others' successes at least floor · (sender's probability of it)^this",
    "gate": "if above 0, of others' successes at least floor · (1 − own success on the kind)^this",
    "clip_low": "a ratio below 1 − this has no gradient where A < 0",
    "clip_high": "a ratio above 1 + this has no gradient where A > 0",
    "dual_clip": "a stranger's ratio counts at most this where A < 0",
    "delta": "a ratio counts at most this where A < 0",
    "log_clip": "each d is clipped here",
    "mask_low": "a token whose probability fell by more has no gradient where A < 0",
    "mask_high": "a token whose probability rose by more has no gradient where A > 0",
    "cross_clip": "another's sequence below 1 − this, or above 1, has no gradient",
    "tau_pos": "how soon the gate closes where A > 0",
    "tau_neg": "how soon the gate closes where A < 0",
    "gamma": "others' successes weigh γp/(p + γ)² instead, if this is above 0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """What is known of a token: of the log, of its fate, and of the step if that wrote it down."""

    token: int  # its place in the learner's cut
    learner: str
    sender: str
    fate: str
    logprob: float | None  # the sender's; None: it has another cut
    rewards: Sequence[float]  # of the group
    reward: float
    round: int | None  # of the step that took the group
    trace: RolloutTrace | None


def formula(row: ObjectiveRow, facts: TokenFacts) -> Formula:
    """Of one token."""
    lines = [*_ratio_lines(row, facts), *_advantage_lines(row, facts), *_push_lines(row, facts)]
    verdict = _verdict(row, facts, facts.trace) if facts.trace else _untraced(facts)
    return Formula(objective=row.name, about=row.about, lines=lines, verdict=verdict)


def shown(value: float | None) -> str:
    """To three digits, with a minus sign that is one.

    >>> shown(-1.2345)
    '−1.23'
    """
    if value is None or math.isnan(value):
        return "not known"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.3g}".replace("-", "−")


def _line(symbol: str, formula: str, values: str, result: float | None, words: str) -> FormulaLine:
    return FormulaLine(
        symbol=symbol, formula=formula, values=values, result=shown(result), words=words
    )


# Ratio, weight and filter


def _ratio_lines(row: ObjectiveRow, facts: TokenFacts) -> Iterator[FormulaLine]:
    log_q, trace = facts.logprob, facts.trace
    if log_q is not None:
        said = f"how likely the token was to {facts.sender}, who drew it"
        yield _line("log q", "", "", log_q, said)
    if trace is None:
        return
    d = float(trace.log_ratio[facts.token])
    of_span = "of the span that the token is in: both cuts agree at its ends" if trace.spans else ""
    if log_q is not None and not of_span:
        said = f"how likely it was to {facts.learner} when it learned"
        yield _line("log p", "log q + d", f"{shown(log_q)} + ({shown(d)})", log_q + d, said)
    values = "" if log_q is None or of_span else f"{shown(log_q + d)} − ({shown(log_q)})"
    yield _line("d", "log p − log q", values, d, of_span or _nearness(d))
    yield _line("ρ", "exp(d)", f"exp({shown(d)})", _exp(d), "so many times as likely to it")
    yield from _weight_lines(row, facts, trace)
    yield from _filter_lines(row, trace)


def _nearness(d: float) -> str:
    if abs(d) < 0.05:
        return "both find it about as likely"
    return "the learner finds it likelier" if d > 0 else "the learner finds it less likely"


def _weight_lines(
    row: ObjectiveRow, facts: TokenFacts, trace: RolloutTrace
) -> Iterator[FormulaLine]:
    free, weight = float(trace.free[facts.token]), float(trace.weight[facts.token])
    symbol, how = RATIOS.get(row.surrogate.ratio, RATIOS[""])
    if row.weight.kind in OF_SEQUENCE:
        symbol, how = RATIOS["ProductRatio"]
    yield _line(f"{symbol} free", how, "", free, "the weight before truncation, clip and filter")
    for name, value in row.settings.items():
        if name in BOUNDS and isinstance(value, int | float):
            yield _line(name, "", "", float(value), f"a setting: {BOUNDS[name]}")
    parts = [part.formula for part in (row.weight, row.surrogate) if part.formula]
    said = "as it is" if _same(free, weight) else "a bound acts"
    yield _line("weight", " · ".join(parts), _weight_values(row, free), weight, said)


def _weight_values(row: ObjectiveRow, free: float) -> str:
    cap, high = row.weight.number("C"), row.surrogate.number("clip_high")
    if row.weight.kind in ("Truncated", "SequenceTruncated") and cap is not None:
        return f"min({shown(free)}, {shown(cap)})"
    low = row.surrogate.number("clip_low")
    if row.surrogate.kind == "ClippedRatio" and low is not None and high is not None:
        return f"{shown(free)} against {shown(1 - low)} to {shown(1 + high)}"
    return ""


def _filter_lines(row: ObjectiveRow, trace: RolloutTrace) -> Iterator[FormulaLine]:
    g = row.filter.number("g")
    if g is None:
        return
    estimator = "mean of −d" if row.filter.settings.get("kl") == "k1" else "mean of exp(−d) − 1 + d"
    said = "kept" if trace.kept else "dropped, and with it the whole completion"
    values = f"{shown(trace.filter_kl)} against g = {shown(g)}"
    yield _line("KL", f"{estimator} over the completion", values, trace.filter_kl, said)


# Advantage and push


def _advantage_lines(row: ObjectiveRow, facts: TokenFacts) -> Iterator[FormulaLine]:
    trace = facts.trace
    if trace is not None and trace.is_lesson:
        yield _line("A", "the weight of [teach]", "", trace.advantage, "it is learned as a rescue")
        return
    values, computed = _advantage_of(row.advantage.kind, facts)
    used = trace.advantage if trace else computed
    said = "better than its group" if (used or 0) > 0 else "no better than its group"
    if used == 0:
        said = "as good as its group on average: nothing to learn"
    if computed is not None and used is not None and not _same(computed, used):
        adjusted = ", ".join(part.formula for part in row.adjust)
        said = f"the step had another, {'by the row: ' + adjusted if adjusted else _FAMILY}"
    yield _line("A", row.advantage.formula.removeprefix("A = "), values, used, said)


_FAMILY = "since its group has parts of other peers"


def _advantage_of(kind: str, facts: TokenFacts) -> tuple[str, float | None]:
    """The values that an advantage is made of, where the group alone makes it."""
    rewards, reward = [one for one in facts.rewards if math.isfinite(one)], facts.reward
    if not rewards or not math.isfinite(reward):
        return "", None
    mean = statistics.fmean(rewards)
    if kind == "Standardised":
        std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        values = f"({shown(reward)} − {shown(mean)}) / ({shown(std)} + 0.0001)"
        return values, (reward - mean) / (std + 1e-4)
    if kind == "Centred":
        return f"{shown(reward)} − {shown(mean)}", reward - mean
    if kind == "LeaveOneOut" and len(rewards) > 1:
        others = (sum(rewards) - reward) / (len(rewards) - 1)
        return f"{shown(reward)} − {shown(others)}", reward - others
    return f"r = {shown(reward)}, mean {shown(mean)}", None


def _push_lines(row: ObjectiveRow, facts: TokenFacts) -> Iterator[FormulaLine]:
    trace = facts.trace
    if trace is None:
        return
    entropy, push = float(trace.entropy[facts.token]), float(trace.push[facts.token])
    yield _line("H", "entropy of the learner's next token", "", entropy, _sureness(entropy))
    weight = float(trace.used_weight[facts.token])
    values = f"{shown(weight)} · {shown(trace.advantage)}, over the step"
    if trace.scale != 1:
        values += f", times {shown(trace.scale)} of grad_share"
    said = "the step made it likelier" if push > 0 else "the step made it less likely"
    formula = f"weight · A, reduced: {row.reduction.formula}" if row.reduction.formula else ""
    yield _line("push", formula, values, push, "the step left it alone" if push == 0 else said)


def _sureness(entropy: float) -> str:
    return "it was sure of what comes here" if entropy < 0.1 else "it was open to several tokens"


# Verdicts


def _verdict(row: ObjectiveRow, facts: TokenFacts, trace: RolloutTrace) -> str:
    if trace.is_lesson:
        return "learned as a rescue: the learner had failed this problem, and this solves it."
    if not trace.kept:
        return _filtered(row, trace)
    free, weight = float(trace.free[facts.token]), float(trace.weight[facts.token])
    push = float(trace.push[facts.token])
    way = "likelier" if trace.advantage > 0 else "less likely"
    if weight == 0 and facts.fate == WORDS[WITHHELD]:
        return (
            "withheld: it is in a phrase, or beyond a length, that only its sender keeps to, so it "
            "was not pushed up."
        )
    if weight == 0:
        return (
            f"left alone: its ratio of {shown(free)} is outside the row's bounds, so that the "
            "clip took its gradient."
        )
    if push == 0:
        return (
            "left alone: its advantage is 0, or the gradient of its sender was scaled to nothing."
        )
    if not _same(free, weight):
        return (
            f"made {way}, with a weight of {shown(weight)} instead of {shown(free)}: a bound "
            f"of the row held it."
        )
    return (
        f"made {way}: its completion is {'better' if trace.advantage > 0 else 'worse'} than "
        f"its group, and its weight is {shown(weight)}."
    )


def _filtered(row: ObjectiveRow, trace: RolloutTrace) -> str:
    g = row.filter.number("g")
    against = f"not below g = {shown(g)}" if g is not None else "too high"
    return (
        f"dropped: its KL of {shown(trace.filter_kl)} is {against} and its advantage of "
        f"{shown(trace.advantage)} is not positive, so the filter left the whole completion out."
    )


def _untraced(facts: TokenFacts) -> str:
    """Why nothing was written down of the token."""
    if facts.fate == WORDS[SILENT]:
        rewards = {*facts.rewards}
        alike = f" of {shown(facts.reward)}" if len(rewards) == 1 else ""
        return f"not scored: all of its group have the same reward{alike}, so A = 0."
    if facts.fate == NO_ADVANTAGE:
        return "not scored: it is as good as its group on average, so A = 0."
    if facts.round is not None and facts.fate in (WORDS[LEARNED], WORDS[RESCUED], WORDS[WITHHELD]):
        return (
            f"{facts.fate}, but the step of round {facts.round} kept no trace of it: traces are "
            "written if `traces` of [evaluate] is above 0, and older ones make room for newer."
        )
    words = fate_words(facts.fate)
    return f"{facts.fate or 'not recorded'}: {words}" if words else facts.fate or "not recorded"


def _exp(value: float) -> float:
    return math.exp(min(value, 60.0))


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR * max(1.0, abs(one), abs(other))
