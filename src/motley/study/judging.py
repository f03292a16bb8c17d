"""Claims held against outcomes: reproduced, not reproduced or undecided, and a sentence that says
why.

A claim has parts: one per crew it is about, or per crew and peer. It is reproduced where each part
is, and not reproduced where one is not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from motley.study.outcomes import Outcome
from motley.study.plans import Claim
from motley.study.report import mean_of, peers_of
from motley.study.statistics import (
    LEVEL,
    Comparison,
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
    seeds_to_decide,
    signed,
)

Verdict = Literal["reproduced", "not reproduced", "undecided"]
MEAN, OOD, EVERY_PEER = "mean", "ood", "every peer"  # what a claim can be on, beside peers, kinds
IN = " in "  # "gepo in far": the arm gepo of the crew far, whichever crew it is compared with


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
    effect: Estimate
    seeds: int | None  # that would decide it; None: no number can be named


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

    def part(self, holm_p: float, refuting_p: float) -> ClaimPart:
        differences, estimate = self.compared.differences, self.compared.estimate
        needed = _needed(self.claim, differences) if has_spread(differences) else None
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
            effect=effect_size(differences),
            seeds=None if needed is None else max(needed, len(differences) + 1),
        )


def _needed(claim: Claim, differences: Sequence[float]) -> int | None:
    mean, margin = float(np.mean(differences)), claim.margin
    if claim.is_ == "better":
        return seeds_to_decide(differences, margin)
    if mean < -margin:
        return seeds_to_decide(differences, -margin)
    if claim.is_ == "equivalent" and mean > margin:
        return seeds_to_decide(differences, margin)
    return seeds_to_be_equivalent(differences, margin, both=claim.is_ == "equivalent")


def asked(claim: Claim) -> str:
    """Of the difference.

    >>> asked(Claim(text="", arm="ftis", against="alone", is_="equivalent", margin=0.03))
    'within ±.030'
    """
    if claim.is_ == "equivalent":
        return f"within ±{number(claim.margin)}"
    least = claim.margin if claim.is_ == "better" else -claim.margin
    return f"above {signed(least) if least else '0'}"


def _numbers(claim: Claim, part: ClaimPart) -> str:
    """What a part says."""
    num, difference = len(part.compared.differences), part.difference
    units = f"{num} seed{'' if num == 1 else 's'}"
    words = f"{claim.arm} against {claim.against} {signed(difference.mean)}"
    if num < 2:
        return f"{words}, {units}; one seed decides nothing"
    if np.isnan(part.p_value):
        return f"{words} on each of {units}; without spread no test can be made"
    words += f" (95 % {signed(difference.low)} to {signed(difference.high)})"
    corrected = " after Holm" if part.holm_p != part.p_value else ""
    words += f", {asked(claim)}: {p_text(part.holm_p)}{corrected}"
    if not np.isnan(part.effect.mean):
        words += f", g = {part.effect:.1f}"
    words += f", {units}"
    return f"{words}; {outlook(part.seeds, num, 'seed')}" if part.verdict == "undecided" else words


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
    alike = lambda t: (t.where, t.claim.against, t.claim.on, t.claim.is_)
    corrected = _corrected([t.p_value for t in tested], [alike(t) for t in tested])
    refuting = _corrected([t.refuting_p for t in tested], [id(t.claim) for t in tested])
    parts = [(t.claim, t.part(*p)) for t, *p in zip(tested, corrected, refuting, strict=True)]
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
    if not parts:
        numbers = f"no seed has runs of both {claim.arm} and {claim.against}"
    elif len(parts) == 1:
        numbers = _numbers(claim, parts[0])
    else:
        each = [f"{part.where} ({part.verdict}): {_numbers(claim, part)}" for part in parts]
        held = f"{verdicts.count('reproduced')} of {len(parts)} hold"
        numbers = "; ".join([held, *each])
    needed = [part.seeds for part in parts if part.verdict == "undecided"]
    known = [seeds for seeds in needed if seeds is not None]
    return Judgement(
        claim=claim,
        verdict=verdict,
        sentence=f"{verdict}: {claim.text.rstrip('. ')}. {_heading(claim.on)}: {numbers}.",
        seeds=max(known) if verdict == "undecided" and len(known) == len(needed) > 0 else None,
        parts=parts,
    )


def _heading(on: str) -> str:
    named = {
        MEAN: "Mean over peers and kinds",
        OOD: "Out of distribution, mean over peers",
        EVERY_PEER: "Every peer by itself, mean over kinds",
    }
    return named.get(on, f"On {on}")


# What is compared


def _met(
    claim: Claim, outcomes: Mapping[str, Sequence[Outcome]]
) -> Iterator[tuple[str, Comparison]]:
    """By crew, or by crew and peer, wherever both arms were run with the same seed."""
    arm, _, in_crew = claim.arm.partition(IN)
    against, _, other_crew = claim.against.partition(IN)
    for crew in [in_crew or other_crew] if in_crew or other_crew else list(outcomes):
        ours = [o for o in outcomes.get(crew, ()) if o.arm == arm]
        theirs = [o for o in outcomes.get(other_crew or crew, ()) if o.arm == against]
        both = [peer for peer in peers_of(ours) if peer in peers_of(theirs)]
        for peer in both if claim.on == EVERY_PEER else [claim.on]:
            first, second = _by_seed(ours, peer), _by_seed(theirs, peer)
            shared = sorted(set(first) & set(second))
            if shared:
                where = f"{crew}, {peer}" if claim.on == EVERY_PEER else crew
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
