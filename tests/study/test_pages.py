from __future__ import annotations

import csv
import html
import re
from html.parser import HTMLParser

import msgspec
import pytest

from motley.config import parse_config
from motley.study.outcomes import Outcome
from motley.study.pages import (
    CSV_HEAD,
    Making,
    study_csv,
    study_page,
    sweep_csv,
    sweep_page,
)
from motley.study.report import comparisons
from motley.study.statistics import sentences
from motley.study.sweep import DIAGNOSTICS, Trial
from motley.tasks import Measure

CREW = parse_config(
    '[crew]\nname = "pair"\ntask = "digits"\nrounds = 20\ngroup_size = 4\nproblems_per_round = 4\n'
    'objective = "ftis"\n[[peer]]\nname = "a"\nmodel = "tiny:1m"\n[[peer]]\nname = "b"\n'
    'model = "tiny:1m"\n'
)
FAR = msgspec.structs.replace(CREW, crew=msgspec.structs.replace(CREW.crew, name="far"))
ARMS = ["alone", "ftis:C=3"]
VOID = {"meta", "br", "hr"}


def outcome(arm: str, seed: int, peer: str, end: float) -> Outcome:
    start = {"sort": 0.1, "sum": 0.3}
    ends = {"sort": end, "sum": end + 0.02 * seed}
    curve = {0: start, 10: {"sort": end / 2, "sum": end / 2}, 20: ends}
    return Outcome(
        arm=arm, seed=seed, peer=peer, start=start, end=ends, lowest=start, ood={}, curve=curve
    )


def outcomes(seeds: int) -> list[Outcome]:
    return [
        outcome(arm, seed, peer, base + 0.01 * seed * (arm == "alone"))
        for arm, base in (("alone", 0.4), ("ftis:C=3", 0.6))
        for seed in range(seeds)
        for peer in "ab"
    ]


def made(measure: Measure = "accuracy", arms: list[str] = ARMS) -> Making:
    return Making("motley study crew.toml --arms 'alone ftis:C=3'", [CREW], arms, measure)


class Reader(HTMLParser):
    """Checks that tags nest, and keeps what a page asks for from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asks: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asks += [value or "" for key, value in attrs if key in ("src", "href")]
        self.asks += [tag] * (tag in ("script", "link", "iframe"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("path", "circle"):
            return  # closed by themselves
        while self.open[-1] in ("path", "circle", "li", "td"):
            if self.open[-1] == tag:
                break
            self.open.pop()
        assert self.open.pop() == tag


def check_self_contained(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.asks == []
    assert "url(" not in page
    assert "@import" not in page


def test_a_study_is_one_page_that_asks_for_nothing() -> None:
    page = study_page(outcomes(5), made())
    check_self_contained(page)
    assert page.count("<svg") == 4  # all, a, b, and the differences
    assert "prefers-color-scheme: dark" in page


def test_a_page_says_what_was_compared_how_it_was_made_and_what_p_means() -> None:
    page = html.unescape(study_page(outcomes(5), made()))
    compared = comparisons(outcomes(5), ARMS)
    assert len(compared) == 1
    assert "ftis:C=3 is better than alone by " in page
    assert sentences(compared)[0].split(";")[0] in page
    assert "a: ftis:C=3 is better than alone" in page
    assert "motley study crew.toml --arms 'alone ftis:C=3'" in page
    assert 'model = "tiny:1m"' in page
    assert "95 of 100" in page
    assert "paired t test" in page
    assert re.search(r"written with Motley \d", page)


@pytest.mark.parametrize(("seeds", "warned"), [(1, True), (4, True), (5, False)])
def test_few_seeds_are_warned_of_at_the_top(seeds: int, warned: bool) -> None:
    page = study_page(outcomes(seeds), made())
    check_self_contained(page)
    assert ('class="warning"' in page) == warned
    assert page.index("What was found") > page.find('class="warning"')


def test_labels_cannot_break_a_page() -> None:
    hostile = [
        msgspec.structs.replace(o, arm="<script>x</script>" if o.arm != "alone" else "alone")
        for o in outcomes(2)
    ]
    check_self_contained(study_page(hostile, made(arms=["alone", "<script>x</script>"])))


def test_rewards_are_called_rewards_and_have_axes_of_their_own() -> None:
    shaped = [
        msgspec.structs.replace(
            o,
            end={kind: -100 * value for kind, value in o.end.items()},
            curve={n: {k: -100 * v for k, v in at.items()} for n, at in o.curve.items()},
        )
        for o in outcomes(5)
    ]
    page = study_page(shaped, made("reward"))
    assert "accurac" not in page.replace(html.escape(made().command), "")
    assert "held-out reward" in page
    assert "−60" in page


def test_outcomes_of_before_that_kept_no_curve_are_drawn_from_start_to_end() -> None:
    old = [msgspec.structs.replace(o, curve={}) for o in outcomes(5)]
    check_self_contained(study_page(old, made()))


def test_with_one_arm_there_is_nothing_to_compare() -> None:
    one = [o for o in outcomes(5) if o.arm == "alone"]
    page = study_page(one, made(arms=["alone"]))
    check_self_contained(page)
    assert "nothing to compare" in page
    assert "paired t test" not in page


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def test_the_csv_has_a_row_per_arm_seed_peer_and_kind() -> None:
    found = rows(study_csv(outcomes(3), made()))
    assert tuple(found[0]) == CSV_HEAD
    assert len(found) == 2 * 3 * 2 * 2
    assert len({(r["arm"], r["seed"], r["peer"], r["kind"]) for r in found}) == len(found)
    (one,) = [
        r
        for r in found
        if (r["arm"], r["seed"], r["peer"], r["kind"]) == ("ftis:C=3", "2", "b", "sum")
    ]
    assert (one["crew"], one["measure"], one["compared_with"]) == ("pair", "accuracy", "alone")
    assert float(one["end"]) == pytest.approx(0.64)
    assert float(one["difference"]) == pytest.approx(0.64 - (0.42 + 0.04))
    assert {r["difference"] for r in found if r["arm"] == "alone"} == {""}


def trial(crew: str, seed: int, end: float, **fields: object) -> Trial:
    kinds = {"start": {"sort": 0.1}, "end": {"sort": end}} | fields
    return Trial(
        crew=crew, arm="gepo", seed=seed, peer="l", curve={0: 0.1, 20: end}, hours=1.0,
        mean_age=1.0, max_age=2, dropped=0, grad_norm=1.0,
        diagnostics=dict.fromkeys(DIAGNOSTICS, 0.5), **kinds,
    )  # fmt: skip


TRIALS = [trial(c, s, e + 0.01 * s) for c, e in (("pair", 0.8), ("far", 0.5)) for s in range(3)]
SWEEP = Making("motley sweep", [CREW, FAR], ["gepo"], "accuracy")


def test_a_sweep_is_one_page_too() -> None:
    far = [*TRIALS[:3], *(trial("far", s, 0.5 + 0.02 * s * s) for s in range(3))]
    page = sweep_page(far, SWEEP)
    check_self_contained(page)
    assert "gepo under far is worse than under pair by " in page
    assert page.count("<details>") == 2
    assert 'class="warning"' in page


def test_the_csv_of_a_sweep_compares_with_the_first_crew() -> None:
    found = rows(sweep_csv(TRIALS, SWEEP))
    assert len(found) == 6
    assert [r["difference"] for r in found[:3]] == [""] * 3
    assert {r["compared_with"] for r in found[3:]} == {"pair"}
    assert float(found[4]["difference"]) == pytest.approx(-0.3)
    old = [msgspec.structs.replace(t, start={}, end={}) for t in TRIALS]
    assert {r["kind"] for r in rows(sweep_csv(old, SWEEP))} == {"mean"}
