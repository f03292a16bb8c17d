"""Claims held against outcomes: reproduced, not reproduced or undecided, and a sentence that says
why.

A claim has parts: one per crew it is about, or per crew and peer. It is reproduced where each part
is, and not reproduced where one is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from motley.study.outcomes import Outcome
from motley.study.plans import EVERY_PEER, MEAN, OOD, Claim, Side
from motley.study.report import mean_of, peers_of
from motley.study.statistics import (
    LEVEL,
    MOST_SEEDS,
    Comparison,
    Demand,
    Estimate,
    effect_size,
    equivalence_p,
    has_spread,
    holm,
    not_worse_p,
    number,
    outlook,
    p_text,
    p_value_of,
    seeds_to_be_equivalent,
    seeds_to_tell,
    signed,
)

Verdict = Literal["reproduced", "not reproduced", "undecided"]


@dataclass(frozen=True, slots=True)
class ClaimPart:
    """A claim in one crew, or for one peer of it."""

    where: str  # crew, and peer if the claim is on every one
    verdict: Verdict
    compared: Comparison
    difference: Estimate
    p_value: float  # of the test that the claim asks for; nan: it cannot be made
    holm_p: float  # among the arms of which the same is claimed against the same, on the same
    refuting_p: float  # two-sided, that it is not so; corrected for the parts of the claim
    is_refuting_corrected: bool
    effect: Estimate
    seeds: int | None  # that would decide it, as its claim demands; None: no number can be named


class _Tested(NamedTuple):
    """A comparison that a claim asks for, before anything is corrected."""

    claim: Claim
    where: str
    compared: Comparison

    @property
    def p_value(self) -> float:
        differences, margin = self.compared.differences, self.claim.margin
        if self.claim.is_ == "better":
            return p_value_of(differences, margin)
        test = equivalence_p if self.claim.is_ == "equivalent" else not_worse_p
        return test(differences, margin)

    @property
    def refuting_p(self) -> float:
        """1 where the data are on the claim's side. Below .05 the whole 95 % interval lies where
        the claim is wrong.
        """
        differences, margin = self.compared.differences, self.claim.margin
        mean = float(np.mean(differences))
        if self.claim.is_ == "better":
            return p_value_of(differences, margin) if mean < margin else 1.0
        if mean < -margin:
            return p_value_of(differences, -margin)
        too_good = self.claim.is_ == "equivalent" and mean > margin
        return p_value_of(differences, margin) if too_good else 1.0

    def part(self, holm_p: float, refuting_p: float, demands: _Demands) -> ClaimPart:
        differences, estimate = self.compared.differences, self.compared.estimate
        needed = _needed(self.claim, differences, demands) if has_spread(differences) else None
        # the test of "better" is two-sided, as those of the tables are
        on_its_side = self.claim.is_ != "better" or estimate.mean > self.claim.margin
        verdict: Verdict = "undecided"
        if refuting_p < 1 - LEVEL:
            verdict = "not reproduced"
        elif on_its_side and holm_p < 1 - LEVEL:
            verdict = "reproduced"
        return ClaimPart(
            where=self.where,
            verdict=verdict,
            compared=self.compared,
            difference=estimate,
            p_value=self.p_value,
            holm_p=holm_p,
            refuting_p=refuting_p,
            is_refuting_corrected=refuting_p != self.refuting_p,
            effect=effect_size(differences),
            seeds=None if needed is None else max(needed, len(differences) + 1),
        )


class _Demands(NamedTuple):
    """What a part must do that its claim is decided."""

    showing: Demand  # that it holds
    refuting: Demand


def _needed(claim: Claim, differences: Sequence[float], demands: _Demands) -> int | None:
    mean, margin, refuting = float(np.mean(differences)), claim.margin, demands.refuting
    if claim.is_ == "better":
        demand = demands.showing if mean > margin else refuting
        return seeds_to_tell(differences, margin, demand)
    if mean < -margin:
        return seeds_to_tell(differences, -margin, refuting)
    if claim.is_ == "equivalent" and mean > margin:
        return seeds_to_tell(differences, margin, refuting)
    both = claim.is_ == "equivalent"
    return seeds_to_be_equivalent(differences, margin, both, demands.showing)


def asked(claim: Claim) -> str:
    """Of the difference.

    >>> asked(Claim(text="", arm="ftis", against="alone", is_="equivalent", margin=0.03))
    'within ±.030'
    """
    if claim.is_ == "equivalent":
        return f"within ±{number(claim.margin)}"
    return f"above {_edge(claim.margin if claim.is_ == 'better' else -claim.margin)}"


def _edge(value: float) -> str:
    return signed(value) if value else "0"


class _Stated(NamedTuple):
    """The test that is told of a part, and of what: never that of a claim which the data are
    against, since a small p beside it would read as speaking for it.
    """

    of: str
    p_value: float
    is_corrected: bool

    @classmethod
    def of_part(cls, claim: Claim, part: ClaimPart) -> _Stated:
        mean, margin = part.difference.mean, claim.margin
        against = claim.is_ == "better" and mean < margin
        if not against and part.verdict != "not reproduced":
            return cls(asked(claim), part.holm_p, part.holm_p != part.p_value)
        low = margin if claim.is_ == "better" else -margin
        of = f"below {_edge(low)}" if mean < low else f"above {_edge(margin)}"
        return cls(of, part.refuting_p, part.is_refuting_corrected)


def _numbers(claim: Claim, part: ClaimPart, needed: int | None) -> str:
    """What a part says. `needed`: seeds that would decide the claim."""
    num, difference = len(part.compared.differences), part.difference
    units = f"{num} seed{'' if num == 1 else 's'}"
    words = f"{claim.arm} against {claim.against} {signed(difference.mean)}"
    if num < 2:
        return f"{words}, {units}; one seed decides nothing"
    if np.isnan(part.p_value):
        return f"{words}: all {units} gave the same difference; without spread no test can be made"
    words += f" (95 % {signed(difference.low)} to {signed(difference.high)})"
    stated = _Stated.of_part(claim, part)
    words += (
        f", {stated.of}: {p_text(stated.p_value)}{' after Holm' if stated.is_corrected else ''}"
    )
    if not np.isnan(part.effect.mean):
        words += f", g = {part.effect:.1f}"
    words += f", {units}"
    return f"{words}; {outlook(needed, num, 'seed')}" if part.verdict == "undecided" else words


@dataclass(frozen=True, slots=True)
class Judgement:
    claim: Claim
    verdict: Verdict
    sentence: str
    seeds: int | None  # that would decide it, if it is undecided and a number can be named
    parts: list[ClaimPart]


def judged(claims: Sequence[Claim], outcomes: Mapping[str, Sequence[Outcome]]) -> list[Judgement]:
    """One per claim, in their order. `outcomes`: by crew."""
    tested = [_Tested(claim, *met) for claim in claims for met in _met(claim, outcomes)]
    alike = [(t.where, t.claim.against, t.claim.on, t.claim.is_) for t in tested]
    claimed = [id(t.claim) for t in tested]
    corrected = _corrected([t.p_value for t in tested], alike)
    refuting = _corrected([t.refuting_p for t in tested], claimed)
    num_alike, num_parts = Counter(alike), Counter(claimed)
    parts = []
    for place, t in enumerate(tested):
        num = num_parts[claimed[place]]
        demands = _Demands(Demand.of(num_alike[alike[place]], num), Demand.of(num, num))
        parts.append((t.claim, t.part(corrected[place], refuting[place], demands)))
    return [
        _judgement(claim, [part for other, part in parts if other is claim]) for claim in claims
    ]


def _corrected(p_values: Sequence[float], families: Sequence[Hashable]) -> list[float]:
    """Holm's, among those of the same family."""
    found = list(p_values)
    for family in set(families):
        places = [place for place, other in enumerate(families) if other == family]
        for place, p in zip(places, holm([p_values[place] for place in places]), strict=True):
            found[place] = p
    return found


def _judgement(claim: Claim, parts: list[ClaimPart]) -> Judgement:
    verdicts = [part.verdict for part in parts]
    if "not reproduced" in verdicts:
        verdict: Verdict = "not reproduced"
    else:
        verdict = "undecided" if "undecided" in verdicts or not parts else "reproduced"
    # with more seeds all parts must hold, those that do already too
    known = [part.seeds for part in parts if part.seeds is not None]
    needed = max(known) if len(known) == len(parts) > 0 else None
    if not parts:
        numbers = f"no seed has runs of both {claim.arm} and {claim.against}{_with(claim.on)}"
    elif len(parts) == 1:
        numbers = _numbers(claim, parts[0], needed)
    else:
        numbers = _told(claim, verdict, parts, needed)
    return Judgement(
        claim=claim,
        verdict=verdict,
        sentence=f"{verdict}: {claim.text.rstrip('. ')}. {_heading(claim.on)}: {numbers}.",
        seeds=needed if verdict == "undecided" else None,
        parts=parts,
    )


def _told(claim: Claim, verdict: Verdict, parts: Sequence[ClaimPart], needed: int | None) -> str:
    """Several parts in short: how many hold, which do not, and the numbers of one."""
    deciding = [part for part in parts if part.verdict == verdict]
    words = f"{sum(part.verdict == 'reproduced' for part in parts)} of {len(parts)} hold"
    if verdict == "not reproduced":
        shown, which = min(deciding, key=lambda part: part.refuting_p), "clearest"
    else:
        shown, which = max(deciding, key=_weakness), "weakest"
    if verdict != "reproduced":
        words += f"; {verdict}: {', '.join(part.where for part in deciding)}"
    return f"{words}; the {which} is {shown.where}: {_numbers(claim, shown, needed)}"


def _weakness(part: ClaimPart) -> tuple[float, float]:
    """The more seeds would be needed, the weaker; then by p. What has no test is weakest."""
    needed = 0.0
    if part.verdict == "undecided":
        needed = np.inf if part.seeds is None else part.seeds
    return needed, np.nan_to_num(part.holm_p, nan=np.inf)


def cells(judgements: Sequence[Judgement]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: every part of every claim."""
    head = ["claim", "where", "verdict", "difference", "it should be", "p (Holm)", "g", "seeds"]
    head.append("seeds that would decide it")
    return head, [
        [
            one.claim.text.rstrip(". "),
            part.where,
            part.verdict,
            f"{part.difference:+.3f}".replace("± +", "± "),
            asked(one.claim),
            _p_cell(one.claim, part),
            f"{part.effect:.1f}",
            str(len(part.compared.differences)),
            _needed_cell(part),
        ]
        for one in judgements
        for part in one.parts
    ]


def _p_cell(claim: Claim, part: ClaimPart) -> str:
    """With what was tested, where that is not what the claim asks for."""
    if np.isnan(part.p_value):
        return ""
    stated = _Stated.of_part(claim, part)
    p = p_text(stated.p_value).removeprefix("p ").lstrip("= ")
    return p if stated.of == asked(claim) else f"{stated.of}: {p}"


def _needed_cell(part: ClaimPart) -> str:
    if part.verdict != "undecided" or np.isnan(part.p_value):
        return ""
    return f"> {MOST_SEEDS}" if part.seeds is None else str(part.seeds)


def _heading(on: str) -> str:
    named = {
        MEAN: "Mean over peers and kinds",
        OOD: "Out of distribution, mean over peers",
        EVERY_PEER: "Every peer by itself, mean over kinds",
    }
    return named.get(on, f"On {on}")


def _with(on: str) -> str:
    """What such runs must have, too."""
    if on in (MEAN, EVERY_PEER):
        return ""
    return " with problems out of distribution" if on == OOD else f" with {on}"


# What is compared


def _met(
    claim: Claim, outcomes: Mapping[str, Sequence[Outcome]]
) -> Iterator[tuple[str, Comparison]]:
    """By crew, or by crew and peer, wherever both arms were run with the same seed."""
    (arm, in_crew), (against, other_crew) = Side.of(claim.arm), Side.of(claim.against)
    for crew in [in_crew or other_crew] if in_crew or other_crew else list(outcomes):
        ours = [o for o in outcomes.get(crew, ()) if o.arm == arm]
        theirs = [o for o in outcomes.get(other_crew or crew, ()) if o.arm == against]
        both = [peer for peer in peers_of(ours) if peer in peers_of(theirs)]
        for peer in both if claim.on == EVERY_PEER else [claim.on]:
            first, second = _by_seed(ours, peer), _by_seed(theirs, peer)
            shared = sorted(set(first) & set(second))
            if shared:
                where = f"{peer} of {crew}" if claim.on == EVERY_PEER else crew
                differences = tuple(first[seed] - second[seed] for seed in shared)
                yield where, Comparison(claim.arm, claim.against, differences)


def _by_seed(outcomes: Sequence[Outcome], on: str) -> dict[int, float]:
    """The mean over the peers of each run that have what is asked for."""
    found: dict[int, list[float]] = {}
    is_peer = on in peers_of(outcomes)
    for one in outcomes:
        value = _value(one, MEAN if is_peer else on)
        if (not is_peer or one.peer == on) and not np.isnan(value):
            found.setdefault(one.seed, []).append(value)
    return {seed: float(np.mean(values)) for seed, values in found.items()}


def _value(outcome: Outcome, on: str) -> float:
    if on == OOD:
        return mean_of(outcome.ood)
    return mean_of(outcome.end) if on == MEAN else outcome.end.get(on, float("nan"))
