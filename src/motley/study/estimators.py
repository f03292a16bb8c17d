"""Estimators: how far a row's gradient is from that of the expected reward, and how much it varies.

K batches of n problems. The receiver p and every sender q answer the same ones.

    g*_k  the gradient of the expected reward on batch k, by samples of p: mean over sequences of
          (r - mean of the others of the group) · sum_t grad log p(a_t). Its expectation is exact.
    g_k   what a step of the row makes of the samples of one sender
    u(a, b)  mean over k != l of <a_k, b_l>: unbiased for <E a, E b>, since batches are independent

A row has its own unit (1/std, 1/length): it is multiplied by c = u(o, g*) / u(o, o), o its
gradient on samples of p itself, which brings that nearest to g*. Then

    bias      |c·E g - E g*| / |E g*|
    cosine    of E g and E g*
    variance  c^2 · (E|g_k|^2 - |E g|^2) / |E g*|^2, of a batch of n groups

Errors are jackknife errors over batches. Knows arrays; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from motley.files import replace
from motley.learning.senders import Number
from motley.reports.drawing import Curve
from motley.study.outcomes import StudyRun
from motley.study.sections import Section
from motley.study.statistics import interval

Vectors = NDArray[np.float32]  # [K, values]: a gradient per batch
Gram = NDArray[np.float64]  # [K, K]
FILE = "estimators.jsonl"
PART = 2**16  # values
MOST_NOISE = 0.5  # of |g*|^2, as a share of it: beyond, a reader is warned
TEXT = (
    "At a checkpoint, the receiver and every sender answer the same fresh problems. Reference: the "
    "gradient of the receiver's expected reward, by its own samples. Bias: |E g - g*| / |g*|, in "
    "the unit in which the row's gradient on the receiver's own samples is nearest to the "
    "reference. The row's own bias is in the lines where sender and receiver are the same: what "
    "others add to it is theirs. Variance: of a step of so many groups, over |g*|². Effective "
    "share: effective sample size, as a share of tokens. All rows have the same samples."
)


class EstimatorLine(msgspec.Struct, frozen=True, kw_only=True):
    """One row on one sender's samples: a line of RUN/estimators.jsonl.

    A number is None where the noise of so few batches hides it.
    """

    round: int
    receiver: str
    sender: str
    row: str
    bias: Number
    bias_error: Number
    cosine: Number
    cosine_error: Number
    variance: Number
    ess: Number  # mean over batches, of the tokens scored
    weight: Number  # mean of the used weight
    reference_error: Number  # of |g*|^2, as a share of it
    batches: int
    groups: int  # of a batch
    values: int  # of a gradient
    projected: int  # to so many numbers; 0: the gradients are exact

    @property
    def is_known(self) -> bool:
        """Whether the reference is larger than its noise, so that the rest means something."""
        return self.reference_error is not None and self.reference_error <= MOST_NOISE

    @property
    def key(self) -> tuple[int, str, str, str]:
        return self.round, self.receiver, self.sender, self.row


@dataclass(frozen=True, slots=True)
class Found:
    """A number and its jackknife error; both nan where noise hides them."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Compared:
    """A row's gradient against the reference."""

    squared_bias: Found
    cosine: Found
    variance: float
    reference_error: float

    @property
    def bias(self) -> Found:
        """The root, and how far it would reach with one error more."""
        # what is unbiased can fall below 0; what is no number stays none
        square = float(np.maximum(0.0, self.squared_bias.value))
        return Found(square**0.5, (square + self.squared_bias.error) ** 0.5 - square**0.5)


def compare(vectors: Vectors, own: Vectors, reference: Vectors) -> Compared:
    """`own`: of the same row on the receiver's own samples."""
    count = len(vectors)
    gg, gr = products(vectors, vectors), products(vectors, reference)
    oo, of_r = products(own, own), products(own, reference)
    rr = products(reference, reference)

    def scale(u: Callable[[Gram], float]) -> float:
        return _over(u(of_r), u(oo))

    def squared_bias(u: Callable[[Gram], float]) -> float:
        c = scale(u)
        return _over(c**2 * u(gg) - 2 * c * u(gr) + u(rr), u(rr))

    def cosine(u: Callable[[Gram], float]) -> float:
        lengths = u(gg) * u(rr) if min(u(gg), u(rr)) > 0 else 0.0
        return _over(u(gr), lengths**0.5)  # noise can take it beyond 1

    spread = float(np.diag(gg).mean()) - between(gg)
    return Compared(
        squared_bias=_jackknifed(squared_bias, count),
        cosine=_jackknifed(cosine, count),
        variance=_over(scale(between) ** 2 * spread, between(rr)),
        reference_error=_over(_jackknifed(lambda u: u(rr), count).error, between(rr)),
    )


def products(first: Vectors, second: Vectors) -> Gram:
    """<a_k, b_l> in float64, of a part at a time: twice the memory is not needed at once."""
    parts = range(0, first.shape[1], PART)
    cut = lambda table, start: table[:, start : start + PART].astype(np.float64)
    made = [cut(first, start) @ cut(second, start).T for start in parts]
    return np.sum(made, axis=0)


def between(gram: Gram) -> float:
    """Mean of what lies off the diagonal: products of batches that share nothing.

    >>> between(np.array([[5.0, 1.0], [3.0, 7.0]]))
    2.0
    """
    count = len(gram)
    return float((gram.sum() - np.trace(gram)) / (count * (count - 1)))


def _over(above: float, below: float) -> float:
    return above / below if below > 0 else float("nan")


def _jackknifed(number: Callable[[Callable[[Gram], float]], float], count: int) -> Found:
    """A function of products between batches, and its error by leaving out each batch."""
    without = [number(partial(_between_others, left_out)) for left_out in range(count)]
    spread = np.square(np.array(without) - np.mean(without)).sum()
    return Found(number(between), float((spread * (count - 1) / count) ** 0.5))


def _between_others(left_out: int, gram: Gram) -> float:
    kept = np.delete(np.arange(len(gram)), left_out)
    return between(gram[np.ix_(kept, kept)])


# Files


def read_estimators(folder: Path) -> list[EstimatorLine]:
    """Those of a run; none where none were measured."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        return [
            msgspec.json.decode(line, type=EstimatorLine) for line in path.read_bytes().splitlines()
        ]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} has a line that is no measurement ({error}); delete the file, and measure "
            "again if the run still has its checkpoints"
        ) from None


def keep_estimators(folder: Path, measured: Sequence[EstimatorLine]) -> None:
    """Add to what a run has; what is measured again counts instead."""
    known = {line.key: line for line in [*read_estimators(folder), *measured]}
    content = b"".join(msgspec.json.encode(known[key]) + b"\n" for key in sorted(known))
    replace(folder / FILE, content)


def noisy(lines: Sequence[EstimatorLine]) -> list[str]:
    """Of which receivers the reference is hardly larger than its own error."""
    return [f"{line.receiver} at round {line.round}" for line in lines if not line.is_known]


def shown(line: EstimatorLine) -> dict[str, str | float | None]:
    """A row of a table."""
    told = ("round", "receiver", "sender", "row", "bias", "bias_error", "cosine", "cosine_error")
    return {key: getattr(line, key) for key in (*told, "variance", "ess", "reference_error")}


# A section of a report


def estimators_of(runs: Sequence[StudyRun]) -> list[Section]:
    """A section for each crew whose runs were measured."""
    sections = []
    crews = list(dict.fromkeys(run.crew for run in runs))
    for crew in crews:
        lines = [
            (run, line) for run in runs if run.crew == crew for line in read_estimators(run.folder)
        ]
        if lines:
            before = f"{crew}: " if len(crews) > 1 else ""
            sections.append(_section(before, lines))
    return sections


def _section(before: str, lines: Sequence[tuple[StudyRun, EstimatorLine]]) -> Section:
    by_place: dict[tuple[str, int, str, str, str], list[EstimatorLine]] = {}
    for run, line in lines:
        place = (run.arm, line.round, f"{line.sender} → {line.receiver}", line.row, line.receiver)
        by_place.setdefault(place, []).append(line)
    head = ["arm", "round", "sender → receiver", "row"]
    head += ["bias", "its error", "cosine", "variance", "effective share", "mean weight"]
    rows = [
        [arm, str(round), pair, row, *_cells(some)]
        for (arm, round, pair, row, _), some in sorted(by_place.items(), key=lambda item: item[0])
    ]
    return Section(
        f"{before}Bias and variance of the gradient",
        f"{TEXT} {_exactness([line for _, line in lines])}",
        (head, rows),
        _charts(lines),
        y_label="bias",
    )


def _cells(lines: Sequence[EstimatorLine]) -> list[str]:
    """Means over seeds; the error is that of one seed's, at most. Nothing of what noise hides."""
    hidden = ("bias", "bias_error", "cosine", "variance")
    keys = (*hidden, "ess", "weight")
    known = {
        key: [
            value
            for one in lines
            if (one.is_known or key not in hidden) and (value := getattr(one, key)) is not None
        ]
        for key in keys
    }
    texts = {key: f"{interval(values):.3g}" for key, values in known.items()}
    texts["bias_error"] = f"{max(known['bias_error']):.2g}" if known["bias_error"] else ""
    return [texts[key] for key in keys]


def _charts(lines: Sequence[tuple[StudyRun, EstimatorLine]]) -> dict[str, list[Curve]]:
    """Bias over rounds, a curve per row: mean over foreign senders and seeds."""
    arms = {run.arm for run, _ in lines}
    points: dict[str, dict[str, dict[int, list[float]]]] = {}
    for run, line in lines:
        if line.sender != line.receiver and line.is_known and line.bias is not None:
            where = f"{line.receiver} in {run.arm}" if len(arms) > 1 else line.receiver
            chart = points.setdefault(f"bias on others' samples: {where}", {})
            chart.setdefault(line.row, {}).setdefault(line.round, []).append(line.bias)
    return {
        title: [
            Curve(row, sorted(by_round), [float(np.mean(by_round[r])) for r in sorted(by_round)])
            for row, by_round in chart.items()
        ]
        for title, chart in points.items()
    }


def _exactness(lines: Sequence[EstimatorLine]) -> str:
    sizes = sorted({(one.batches, one.groups) for one in lines})
    told = ", ".join(f"{batches} batches of {groups} groups" for batches, groups in sizes)
    projected = max(one.projected for one in lines)
    exact = "gradients are exact."
    if projected:
        exact = (
            f"gradients are projected to {projected} numbers by random signs, which moves a "
            f"product of two of them by about {projected**-0.5:.1%} of their lengths."
        )
    hidden = (
        " Cells are empty where the reference is hardly larger than its error: more batches would "
        "fill them."
    )
    return f"Measured with {told}; {exact}{hidden if noisy(lines) else ''}"
