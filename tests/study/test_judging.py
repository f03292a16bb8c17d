from __future__ import annotations

import re
from math import isnan

import msgspec
import pytest
from scipy import stats

from motley.study.judging import Judgement, cells, judged
from motley.study.outcomes import Outcome
from motley.study.plans import Claim
from motley.study.statistics import effect_size, holm, number, p_text

NOISE = (-0.01, 0.0, 0.01, 0.004, -0.004)


def crew(seeds: int = 5, **gains: float) -> list[Outcome]:
    """`gains`: arm -> how far its two peers end above alone; out of distribution half as far."""
    return [
        outcome(arm, seed, peer, 0.5 + gain + (arm != "alone") * NOISE[seed])
        for arm, gain in {"alone": 0.0, **gains}.items()
        for seed in range(seeds)
        for peer in "ab"
    ]


def outcome(arm: str, seed: int, peer: str, end: float) -> Outcome:
    return Outcome(
        arm=arm,
        seed=seed,
        peer=peer,
        start={"sort": 0.1, "sum": 0.1},
        end={"sort": end + 0.05, "sum": end - 0.05},
        lowest={"sort": 0.1, "sum": 0.1},
        ood={"all": (end + 0.5) / 2},
    )


def claim(is_: str, margin: float = 0.0, on: str = "mean", arm: str = "ftis") -> Claim:
    text = f"{arm} is {is_}."
    return msgspec.convert(
        {"text": text, "arm": arm, "against": "alone", "is": is_, "margin": margin, "on": on}, Claim
    )


def judge(one: Claim, *crews: list[Outcome]) -> Judgement:
    (found,) = judged([one], {f"c{place}": some for place, some in enumerate(crews)})
    return found


@pytest.mark.parametrize(
    ("is_", "margin", "gain", "verdict"),
    [
        ("better", 0.0, 0.05, "reproduced"),
        ("better", 0.0, -0.05, "not reproduced"),
        ("better", 0.0, 0.004, "undecided"),
        ("better", 0.03, 0.05, "reproduced"),
        ("better", 0.05, 0.05, "undecided"),
        ("better", 0.03, 0.0, "not reproduced"),  # it may be better, but not by three points
        ("equivalent", 0.03, 0.0, "reproduced"),
        ("equivalent", 0.03, 0.012, "reproduced"),
        ("equivalent", 0.03, 0.029, "undecided"),
        ("equivalent", 0.03, 0.08, "not reproduced"),
        ("equivalent", 0.03, -0.08, "not reproduced"),
        ("not worse", 0.03, -0.012, "reproduced"),
        ("not worse", 0.03, 0.5, "reproduced"),
        ("not worse", 0.03, -0.03, "undecided"),
        ("not worse", 0.03, -0.08, "not reproduced"),
    ],
)
def test_a_claim_is_decided_by_the_tests_that_it_asks_for(
    is_: str, margin: float, gain: float, verdict: str
) -> None:
    found = judge(claim(is_, margin), crew(ftis=gain))
    assert found.verdict == verdict
    assert found.sentence.startswith(f"{verdict}: ftis is {is_}. Mean over peers and kinds: ftis ")
    assert (found.seeds is not None) == ("would decide it" in found.sentence)
    if verdict != "undecided":
        assert found.seeds is None


def test_a_sentence_has_the_numbers_it_was_made_of() -> None:
    differences = [0.012 + noise for noise in NOISE]
    test = stats.ttest_1samp(differences, 0)
    low, high = test.confidence_interval(0.95)
    p = max(
        stats.ttest_1samp(differences, -0.03, alternative="greater").pvalue,
        stats.ttest_1samp(differences, 0.03, alternative="less").pvalue,
    )
    g = effect_size(differences)
    assert judge(claim("equivalent", 0.03), crew(ftis=0.012)).sentence == (
        "reproduced: ftis is equivalent. Mean over peers and kinds: ftis against alone "
        f"+.012 (95 % +{number(low)} to +{number(high)}), within ±.030: p = {number(p)}, "
        f"g = {g.mean:.1f} ({g.low:.1f} to {g.high:.1f}), 5 seeds."
    )


@pytest.mark.parametrize(
    ("is_", "margin", "gain", "of", "against"),
    [
        ("better", 0.0, -0.05, "below 0", 0.0),
        ("better", 0.0, -0.004, "below 0", 0.0),  # undecided
        ("better", 0.03, 0.0, r"below \+.030", 0.03),
        ("not worse", 0.03, -0.08, r"below -.030", -0.03),
        ("equivalent", 0.03, -0.08, r"below -.030", -0.03),
        ("equivalent", 0.03, 0.08, r"above \+.030", 0.03),
    ],
)
def test_the_p_value_of_what_speaks_against_a_claim_says_of_what_it_is(
    is_: str, margin: float, gain: float, of: str, against: float
) -> None:
    found = judge(claim(is_, margin), crew(ftis=gain))
    p = stats.ttest_1samp([gain + noise for noise in NOISE], against).pvalue
    assert re.search(rf"\), {of}: {re.escape(p_text(p))}, g = ", found.sentence)
    head, (row,) = cells([found])
    shown = p_text(p).removeprefix("p ").removeprefix("= ")
    assert re.fullmatch(f"{of}: {re.escape(shown)}", dict(zip(head, row, strict=True))["p (Holm)"])


def test_what_speaks_against_a_claim_of_several_parts_is_corrected_and_says_so() -> None:
    found = judge(claim("better"), crew(ftis=-0.02), crew(ftis=0.05))
    p = 2 * stats.ttest_1samp([-0.02 + noise for noise in NOISE], 0).pvalue
    assert f"), below 0: {p_text(p)} after Holm, g = " in found.sentence


def test_an_open_claim_says_how_many_seeds_would_decide_it() -> None:
    found = judge(claim("better"), crew(ftis=0.004))
    assert found.seeds is not None
    assert found.seeds > 5
    assert f"; about {found.seeds} seeds would decide it." in found.sentence
    never = judge(claim("equivalent", 0.03), crew(ftis=0.03))
    assert never.seeds is None
    assert never.sentence.endswith("more than 200 seeds would be needed.")


def test_a_claim_can_be_on_a_peer_on_a_kind_and_out_of_distribution() -> None:
    some = [
        msgspec.structs.replace(o, end={kind: v - 0.3 for kind, v in o.end.items()})
        if (o.peer, o.arm) == ("b", "ftis")
        else o
        for o in crew(ftis=0.1)
    ]
    mean = {
        on: judge(claim("better", on=on), some).parts[0].compared.estimate.mean
        for on in ("mean", "a", "b", "sum", "ood")
    }
    expected = {"mean": -0.05, "a": 0.1, "b": -0.2, "sum": -0.05, "ood": 0.05}
    assert mean == pytest.approx(expected)


def test_a_claim_on_every_peer_fails_with_one_of_them() -> None:
    some = [o for o in crew(ftis=0.1) if o.peer == "a" or o.arm == "alone"]
    some += [o for o in crew(ftis=-0.1) if o.peer == "b" and o.arm == "ftis"]
    found = judge(claim("not worse", 0.02, "every peer"), some)
    assert [(part.where, part.verdict) for part in found.parts] == [
        ("a of c0", "reproduced"),
        ("b of c0", "not reproduced"),
    ]
    assert found.verdict == "not reproduced"
    assert (
        "mean over kinds: 1 of 2 hold; not reproduced: b of c0; the clearest is b of c0: ftis "
        "against alone -.100 (95 % "
    ) in found.sentence


def test_of_many_places_one_unlucky_one_does_not_refute_a_claim() -> None:
    low = crew(ftis=-0.011)  # its interval ends below 0, but only just
    assert judge(claim("better"), low).verdict == "not reproduced"
    many = judge(claim("better"), low, *[crew(ftis=0.05)] * 4)
    assert many.verdict == "undecided"
    assert many.parts[0].refuting_p == pytest.approx(5 * many.parts[0].p_value)


def test_over_several_crews_a_claim_must_hold_in_each() -> None:
    better = claim("better")
    assert judge(better, crew(ftis=0.1), crew(ftis=0.2)).verdict == "reproduced"
    open_ = judge(better, crew(ftis=0.1), crew(ftis=0.004))
    assert (open_.verdict, open_.seeds) == ("undecided", open_.parts[1].seeds)
    assert "1 of 2 hold; undecided: c1; the weakest is c1: ftis against" in open_.sentence
    assert "2 of 2 hold; the weakest is c0: ftis against alone +.100" in (
        judge(better, crew(ftis=0.1), crew(ftis=0.2)).sentence
    )
    assert judge(better, crew(ftis=0.004), crew(ftis=-0.1)).verdict == "not reproduced"
    # only one of them has the arm
    assert [part.where for part in judge(better, crew(), crew(ftis=0.2)).parts] == ["c1"]


def test_a_table_has_every_part_of_every_claim() -> None:
    found = judged(
        [claim("better"), claim("equivalent", 0.03), claim("better", arm="none")],
        {"c0": crew(ftis=0.1), "c1": crew(1, ftis=0.004)},
    )
    head, rows = cells(found)
    first, second, third, _ = (dict(zip(head, row, strict=True)) for row in rows)
    assert [(row["where"], row["verdict"]) for row in (first, second, third)] == [
        ("c0", "reproduced"),
        ("c1", "undecided"),
        ("c0", "not reproduced"),
    ]
    assert (first["difference"], first["p (Holm)"]) == ("+0.100 ± 0.009", "< .001")
    assert (first["it should be"], third["it should be"]) == ("above 0", "within ±.030")
    assert (second["difference"], second["p (Holm)"], second["seeds"]) == ("-0.006", "", "1")
    assert second["seeds that would decide it"] == ""


def test_a_claim_can_compare_an_arm_of_one_crew_with_an_arm_of_another() -> None:
    late = Claim(
        text="late", arm="gepo in far", against="gepo in near", is_="not worse", margin=0.02
    )
    crews = {"near": crew(gepo=0.1), "far": crew(gepo=0.0)[:-1], "other": crew(gepo=0.9)}
    (found,) = judged([late], crews)
    (part,) = found.parts
    assert part.where == "far"
    assert part.compared.differences[:4] == pytest.approx([-0.1] * 4)
    inside = msgspec.structs.replace(late, against="alone")
    (found,) = judged([inside], crews)
    assert found.parts[0].compared.differences[:4] == pytest.approx(NOISE[:4])


def test_claims_of_the_same_kind_are_corrected_together_and_others_are_not() -> None:
    claims = [claim("better", arm=arm) for arm in ("ftis", "topr")] + [claim("not worse", 0.03)]
    found = judged(claims, {"c": crew(ftis=0.008, topr=0.009)})
    p_values = [one.parts[0].p_value for one in found]
    assert [one.parts[0].holm_p for one in found] == pytest.approx(
        [*holm(p_values[:2]), p_values[2]]
    )
    assert "after Holm" in found[0].sentence
    assert "after Holm" not in found[2].sentence


def test_a_claim_that_does_not_survive_its_correction_is_undecided() -> None:
    alone = judged([claim("better")], {"c": crew(ftis=0.011)})
    assert alone[0].verdict == "reproduced"
    many = [claim("better", arm=arm) for arm in ("ftis", "t", "u", "v")]
    found = judged(many, {"c": crew(ftis=0.011, t=0.0, u=0.0, v=0.0)})
    assert found[0].verdict == "undecided"
    assert found[0].seeds == 9


def test_one_seed_equal_seeds_and_missing_runs_decide_nothing() -> None:
    single = judge(claim("better"), crew(1, ftis=0.5))
    assert single.verdict == "undecided"
    assert single.sentence.endswith("+.490, 1 seed; one seed decides nothing.")
    flat = [o for o in crew(3, ftis=0.5) if o.arm == "alone"]
    flat += [msgspec.structs.replace(o, arm="ftis") for o in flat]
    same = judge(claim("equivalent", 0.1), flat)
    assert (same.verdict, isnan(same.parts[0].p_value)) == ("undecided", True)
    assert "without spread no test can be made" in same.sentence
    missing = judge(claim("better", arm="hacpo"), crew(ftis=0.1))
    assert (missing.verdict, missing.seeds, missing.parts) == ("undecided", None, [])
    assert "no seed has runs of both hacpo and alone" in missing.sentence


def found_share(effect: float, seeds: int, largest_p: float) -> float:
    """How often a two-sided t test finds a mean of so many spreads, by the noncentral t."""
    quantile = stats.t.ppf(1 - largest_p / 2, seeds - 1)
    return float(stats.nct.sf(quantile, seeds - 1, effect * seeds**0.5))


@pytest.mark.parametrize("num_arms", [1, 4, 12])
def test_so_many_seeds_as_are_named_decide_a_claim_after_its_correction(num_arms: int) -> None:
    gain = 0.006
    arms = [f"x{place}" for place in range(num_arms)]
    found = judged(
        [claim("better", arm=arm) for arm in arms], {"c": crew(**dict.fromkeys(arms, gain))}
    )
    seeds = found[0].seeds
    assert seeds is not None
    effect = gain / stats.tstd(NOISE)
    assert found_share(effect, seeds, 0.05 / num_arms) >= 0.799
    assert found_share(effect, seeds - 1, 0.05 / num_arms) < 0.801


def test_so_many_seeds_as_are_named_decide_all_crews_of_a_claim() -> None:
    gain = 0.006
    found = judge(claim("better"), *[crew(ftis=gain)] * 4)
    assert found.seeds is not None
    missed = 1 - found_share(gain / stats.tstd(NOISE), found.seeds, 0.05)
    assert 4 * missed <= 0.201
    assert f"about {found.seeds} seeds would decide it" in found.sentence


def test_a_crew_in_which_a_claim_holds_so_far_must_go_on_to_hold() -> None:
    found = judge(claim("better"), crew(ftis=0.011), crew(3, ftis=0.02))
    assert [part.verdict for part in found.parts] == ["reproduced", "undecided"]
    holds, open_ = (part.seeds for part in found.parts)
    assert holds
    assert open_
    assert holds > open_
    assert found.seeds == holds
    assert f"about {holds} seeds would decide it" in found.sentence


def test_the_same_difference_with_all_seeds_is_said_and_decides_nothing() -> None:
    flat = [o for o in crew(5) if o.arm == "alone"]
    flat += [msgspec.structs.replace(o, arm="ftis", end={"sort": 0.2, "sum": 0.2}) for o in flat]
    found = judge(claim("better"), flat)
    assert (found.verdict, found.seeds) == ("undecided", None)
    assert found.sentence.endswith(
        "ftis against alone -.300: all 5 seeds gave the same difference; without spread no test "
        "can be made."
    )


def test_a_claim_on_what_was_not_measured_says_so() -> None:
    bare = [msgspec.structs.replace(o, ood={}) for o in crew(ftis=0.1)]
    words = "no seed has runs of both ftis and alone with problems out of distribution."
    assert judge(claim("better", on="ood"), bare).sentence.endswith(words)
