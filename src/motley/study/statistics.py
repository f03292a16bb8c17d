"""What seeds say: means, 95 % intervals, paired differences, and sentences made of them.

Knows numbers only: no arm, no crew, no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import optimize, special, stats

from motley.tasks import Measure

LEVEL, POWER = 0.95, 0.8
FEW_SEEDS = 5  # below it a report warns
MOST_SEEDS = 200  # beyond it nobody is told how many would decide
MARGIN = (
    0.03  # of accuracies: a smaller difference makes no difference, unless a study says another
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval; both ends are nan for one seed.

    >>> f"{Estimate(0.5, 0.25, 0.75):.2f}", f"{Estimate(0.98, 0.9, 0.995):.2f}"
    ('0.50 ± 0.25', '0.98 (0.90 to 0.99)')
    """

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return format(self, ".2f")

    def __format__(self, spec: str) -> str:
        if np.isnan(self.mean):
            return ""  # there is none, as of other kinds where there is one
        if np.isnan(self.low):
            return format(self.mean, spec)
        if np.isclose(self.mean - self.low, self.high - self.mean):
            return f"{self.mean:{spec}} ± {self.half_width:{spec}}"
        return f"{self.mean:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


UNKNOWN = Estimate(float("nan"), float("nan"), float("nan"))


def interval(values: Sequence[float]) -> Estimate:
    """Mean and 95 % t interval."""
    mean = float(np.mean(values)) if len(values) else float("nan")
    if len(values) < 2:
        return Estimate(mean, float("nan"), float("nan"))
    half = _t_quantile(len(values)) * _standard_error(values)
    return Estimate(mean, mean - half, mean + half)


def bounded_interval(values: Sequence[float], measure: Measure) -> Estimate:
    """Mean and 95 % interval; of accuracies one that stays in 0..1.

    The t interval is taken on the log-odds scale: logit(m) ± t · se / (m(1 - m)). Where all values
    are 0, or all 1, it is that point.
    """
    plain = interval(values)
    inside = len(values) > 1 and min(values) >= 0 and max(values) <= 1
    if measure != "accuracy" or not inside or plain.mean in (0.0, 1.0):
        return plain
    m = plain.mean
    half = (plain.high - m) / (m * (1 - m))
    # beyond it a float is 0 or 1 anyway
    ends = np.clip([_logit(m) - half, _logit(m) + half], -700, 700)
    low, high = 1 / (1 + np.exp(-ends))
    return Estimate(m, float(low), float(high))


def _logit(share: float) -> float:
    return float(np.log(share) - np.log1p(-share))


def _t_quantile(num: int, share: float = (1 + LEVEL) / 2) -> float:
    return float(stats.t.ppf(share, num - 1))


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


@cache  # one study asks for the same ones hundreds of times
def _spread_ratios(df: int) -> np.ndarray:
    """Measured over true spread: equally likely values of its chi distribution."""
    shares = (np.arange(1000) + 0.5) / 1000
    return np.sqrt(stats.chi2.ppf(shares, df) / df)


def has_spread(values: Sequence[float]) -> bool:
    """Whether a test against zero can be made: not with one value, nor with several that differ by
    rounding only.
    """
    return len(values) > 1 and float(np.std(values)) > 1e-9


def p_value_of(differences: Sequence[float], beyond: float = 0.0) -> float:
    """Two-sided paired t test against a difference of `beyond`; nan where it cannot be made."""
    if not has_spread(differences):
        return float("nan")
    return float(stats.ttest_1samp(differences, beyond).pvalue)


def not_worse_p(differences: Sequence[float], margin: float) -> float:
    """One-sided paired t test against a loss of `margin` or more; nan where it cannot be made."""
    if not has_spread(differences):
        return float("nan")
    return float(stats.ttest_1samp(differences, -margin, alternative="greater").pvalue)


def equivalence_p(differences: Sequence[float], margin: float) -> float:
    """Two one-sided paired t tests: against a loss, and against a gain, of `margin` or more.

    The larger of both p. Below .05 says: the difference is smaller than the margin, either way.
    """
    return float(
        np.maximum(not_worse_p(differences, margin), not_worse_p([-d for d in differences], margin))
    )


def effect_size(differences: Sequence[float]) -> Estimate:
    """Hedges' g of paired differences, with its 95 % interval; nan for fewer than 3.

    g = J · mean / sd, with J = Γ(df/2) / (√(df/2) Γ((df-1)/2)), which takes away the bias of few
    seeds. The interval is that of the noncentral t distribution: t = √n mean / sd has the
    noncentrality √n times the true effect. Given the ratio r of measured to true spread, t is at
    most what it is with the chance Φ(t r - noncentrality).
    """
    num = len(differences)
    if num < 3 or not has_spread(differences):
        return UNKNOWN
    df, root = num - 1, np.sqrt(num)
    unbiased = float(
        np.exp(special.gammaln(df / 2) - special.gammaln((df - 1) / 2)) / np.sqrt(df / 2)
    )
    t = float(np.mean(differences) / _standard_error(differences))
    ratios = _spread_ratios(df)
    far = 4 * abs(t) + 10  # wider than any interval of 3 seeds or more
    low, high = (
        optimize.brentq(lambda shift, p=p: np.mean(special.ndtr(t * ratios - shift)) - p, -far, far)
        for p in ((1 + LEVEL) / 2, (1 - LEVEL) / 2)
    )
    return Estimate(*(float(unbiased * value / root) for value in (t, low, high)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing against another, paired by seed, or by crew. `differences`: one per unit, first
    less second.
    """

    first: str
    second: str
    differences: tuple[float, ...]
    unit: str = "seed"

    @property
    def estimate(self) -> Estimate:
        return interval(self.differences)

    @property
    def p_value(self) -> float:
        return p_value_of(self.differences)


def sentence(compared: Comparison, corrected_p: float | None = None) -> str:
    """What a comparison says.

    `corrected_p`: Holm's, among those that were made with it.

    >>> sentence(Comparison("uplift", "alone", (0.11, 0.13, 0.12, 0.14, 0.1)))
    'uplift is better than alone by .120 (95 % .100 to .140), p < .001, 5 seeds'
    """
    num, estimate, p = len(compared.differences), compared.estimate, compared.p_value
    unit = compared.unit
    seeds = f"{num} {unit}{'' if num == 1 else 's'}"
    both = f"{compared.first} against {compared.second}"
    if not num:
        return f"undecided: {both}: no {unit} has runs of both"
    if num < 2:
        return f"undecided: {both}, {signed(estimate.mean)} on {seeds}; one {unit} decides nothing"
    if np.isnan(p):
        return (
            f"undecided: {both}, {signed(estimate.mean)}: all {seeds} gave the same difference; "
            f"without spread between {unit}s no test can be made"
        )
    if p >= 1 - LEVEL:
        inner = f"95 % {signed(estimate.low)} to {signed(estimate.high)}"
        words = f"undecided: {both}, {signed(estimate.mean)} ({inner}), {p_text(p)}, {seeds}"
        return f"{words}; {_outlook(compared)}"
    better, sign = ("better", 1) if estimate.mean > 0 else ("worse", -1)
    low, high = sorted((sign * estimate.low, sign * estimate.high))
    words = (
        f"{compared.first} is {better} than {compared.second} by {number(abs(estimate.mean))} "
        f"(95 % {number(low)} to {number(high)}), {p_text(p)}, {seeds}"
    )
    if corrected_p is not None and corrected_p >= 1 - LEVEL:
        words += f"; not after Holm's correction for several comparisons ({p_text(corrected_p)})"
    return words


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of one test of several: how small its p must be, and how often it must be.

    >>> Demand.of(tests=6, parts=2)
    Demand(largest_p=0.00833, power=0.9)
    """

    largest_p: float
    power: float

    @staticmethod
    def of(tests: int, parts: int) -> Demand:
        """`tests`: so many are corrected together. The first step of Holm, below which a p always
        counts. `parts`: so many must all succeed; that they fail adds up at the most.
        """
        return Demand((1 - LEVEL) / tests, 1 - (1 - POWER) / parts)


ONE_TEST = Demand.of(tests=1, parts=1)


def seeds_to_tell(differences: Sequence[float], beyond: float, demand: Demand) -> int | None:
    """Seeds with which a two-sided test would tell a difference of this size and spread from
    `beyond`, as often as is demanded.

    None: more than MOST_SEEDS.
    """
    distance = abs(float(np.mean(differences)) - beyond)

    def power(num: int) -> float:
        error = float(np.std(differences, ddof=1)) / np.sqrt(num)
        room = _t_quantile(num, 1 - demand.largest_p / 2) * _spread_ratios(num - 1)
        return float(np.mean(special.ndtr(distance / error - room)))

    return _fewest_seeds(len(differences), power, demand)


def seeds_to_be_equivalent(
    differences: Sequence[float], margin: float, both: bool = True, demand: Demand = ONE_TEST
) -> int | None:
    """Seeds with which a difference of this size and spread would be found to be inside the margin,
    as often as is demanded; or, not `both`, to be no loss of it.

    Given the ratio r of measured to true spread, the mean must lie t · r standard errors inside.
    None: more than MOST_SEEDS.
    """
    mean = float(np.mean(differences))

    def power(num: int) -> float:
        error = float(np.std(differences, ddof=1)) / np.sqrt(num)
        room = _t_quantile(num, 1 - demand.largest_p) * _spread_ratios(num - 1)
        above_loss = (mean + margin) / error - room
        below_gain = (margin - mean) / error - room
        if not both:
            return float(np.mean(special.ndtr(above_loss)))
        chance = special.ndtr(below_gain) - special.ndtr(-above_loss)
        return float(np.mean(np.maximum(chance, 0.0)))

    return _fewest_seeds(len(differences), power, demand)


def _fewest_seeds(made: int, power: Callable[[int], float], demand: Demand) -> int | None:
    nums = range(max(3, made), MOST_SEEDS + 1)
    return next((num for num in nums if power(num) >= demand.power), None)


def _outlook(compared: Comparison) -> str:
    num = seeds_to_tell(compared.differences, 0.0, ONE_TEST)
    words = outlook(num, len(compared.differences), compared.unit)
    return f"{words} for a difference this small" if num is None else words


def outlook(num: int | None, made: int, unit: str) -> str:
    """What so many units would do, where `made` were too few."""
    if num is None:
        return f"more than {MOST_SEEDS} {unit}s would be needed"
    return f"about {max(num, made + 1)} {unit}s would decide it"


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm 1979); nan where there is no test."""
    order = [int(i) for i in np.argsort(p_values) if not np.isnan(p_values[i])]
    corrected, largest = [float("nan")] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def sentences(compared: Sequence[Comparison]) -> list[str]:
    """One per comparison, each corrected for all of them."""
    corrected = holm([one.p_value for one in compared])
    return [sentence(one, p) for one, p in zip(compared, corrected, strict=True)]


def number(value: float) -> str:
    """Three digits behind the point, and no 0 before it.

    >>> number(0.12), number(-0.05), number(12.3456)
    ('.120', '-.050', '12.346')
    """
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"


def signed(value: float) -> str:
    """The same with its sign."""
    return number(value) if value < 0 else f"+{number(value)}"


def p_text(value: float) -> str:
    return "p < .001" if value < 0.001 else f"p = {number(value)}"


def few_seeds_warning(num_seeds: int) -> str:
    """Empty if there are enough."""
    if num_seeds >= FEW_SEEDS:
        return ""
    if num_seeds == 1:
        return "one seed: there is no interval, and nothing here is decided; use at least 5 seeds"
    return (
        f"{num_seeds} seeds: with fewer than {FEW_SEEDS} one unlucky seed can turn a result "
        "around; use at least 5, and 8 or more for small differences"
    )
