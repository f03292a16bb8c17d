from __future__ import annotations

import csv
import html
import re
from html.parser import HTMLParser

import msgspec
import pytest

from motley.config import parse_config
from motley.reports.drawing import Curve
from motley.study.findings import Findings, findings, plain
from motley.study.outcomes import CrewOutcome, Outcome, Spent
from motley.study.pages import Making, study_page, sweep_page, words_of
from motley.study.plans import Claim
from motley.study.sections import Section
from motley.study.spreadsheets import (
    CLAIMS_HEAD,
    COMPARISONS_HEAD,
    STUDY_HEAD,
    claims_csv,
    comparisons_csv,
    study_csv,
    sweep_csv,
)
from motley.study.standings import below, said
from motley.study.sweep import DIAGNOSTICS, Trial
from motley.study.writing import files_of, markdown, results_lines
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
        arm=arm, seed=seed, peer=peer, start=start, end=ends, lowest=start, ood={}, curve=curve,
        spent=Spent(sampled=100 + seed, own=90, foreign=40, seconds=1.5),
    )  # fmt: skip


def outcomes(seeds: int) -> list[Outcome]:
    return [
        outcome(arm, seed, peer, base + 0.01 * seed * (arm == "alone"))
        for arm, base in (("alone", 0.4), ("ftis:C=3", 0.6))
        for seed in range(seeds)
        for peer in "ab"
    ]


def made(measure: Measure = "accuracy", arms: list[str] = ARMS) -> Making:
    return Making("motley study crew.toml --arms 'alone ftis:C=3'", [CREW], arms, measure)


def of(some: list[Outcome], arms: list[str] = ARMS, measure: Measure = "accuracy") -> Findings:
    return findings({"pair": some}, arms, measure)


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
    page = study_page(of(outcomes(5)), made())
    check_self_contained(page)
    assert page.count("<svg") == 4  # all, a, b, and the differences
    assert "prefers-color-scheme: dark" in page


def test_a_page_says_what_was_compared_how_it_was_made_and_what_p_means() -> None:
    page = html.unescape(study_page(of(outcomes(5)), made()))
    (crew,) = of(outcomes(5)).crews
    assert len(said(crew.over_peers)) == 1
    assert "ftis:C=3 is better than alone by " in page
    for text in (*said(crew.standings), *below(crew.standings)):
        assert text in page
    assert "a: ftis:C=3 is better than alone" in page
    assert "motley study crew.toml --arms 'alone ftis:C=3'" in page
    assert 'model = "tiny:1m"' in page
    assert "95 of 100" in page
    assert "paired t test" in page
    assert re.search(r"written with Motley \d", page)


@pytest.mark.parametrize(("seeds", "warned"), [(1, True), (4, True), (5, False)])
def test_few_seeds_are_warned_of_at_the_top(seeds: int, warned: bool) -> None:
    page = study_page(of(outcomes(seeds)), made())
    check_self_contained(page)
    assert ('class="warning"' in page) == warned
    assert page.index("What was found") > page.find('class="warning"')


def test_labels_cannot_break_a_page() -> None:
    hostile = [
        msgspec.structs.replace(o, arm="<script>x</script>" if o.arm != "alone" else "alone")
        for o in outcomes(2)
    ]
    arms = ["alone", "<script>x</script>"]
    check_self_contained(study_page(of(hostile, arms), made(arms=arms)))


def test_rewards_are_called_rewards_and_have_axes_of_their_own() -> None:
    shaped = [
        msgspec.structs.replace(
            o,
            end={kind: -100 * value for kind, value in o.end.items()},
            curve={n: {k: -100 * v for k, v in at.items()} for n, at in o.curve.items()},
        )
        for o in outcomes(5)
    ]
    page = study_page(of(shaped, measure="reward"), made("reward"))
    assert "accurac" not in page.replace(html.escape(made().command), "")
    assert "held-out reward" in page
    assert "−60" in page


def test_outcomes_of_before_that_kept_no_curve_are_drawn_from_start_to_end() -> None:
    old = [msgspec.structs.replace(o, curve={}) for o in outcomes(5)]
    check_self_contained(study_page(of(old), made()))


def test_with_one_arm_there_is_nothing_to_compare() -> None:
    one = [o for o in outcomes(5) if o.arm == "alone"]
    page = study_page(of(one, ["alone"]), made(arms=["alone"]))
    check_self_contained(page)
    assert "nothing to compare" in page
    assert "paired t test" not in page


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def test_the_csv_has_a_row_per_arm_seed_peer_and_kind() -> None:
    found = rows(study_csv(of(outcomes(3)), "accuracy"))
    assert tuple(found[0]) == STUDY_HEAD
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
    assert (one["sampled_tokens"], one["own_tokens"], one["foreign_tokens"]) == ("102", "90", "40")
    old = [msgspec.structs.replace(o, spent=None) for o in outcomes(1)]
    assert {r["seconds"] for r in rows(study_csv(of(old), "accuracy"))} == {""}


def test_the_csv_has_rows_of_kinds_that_are_out_of_distribution_only() -> None:
    made = [msgspec.structs.replace(o, ood={"svamp": 0.25, "sum": 0.5}) for o in outcomes(1)]
    found = rows(study_csv(of(made), "accuracy"))
    got = {r["kind"]: (r["end"] != "", r["out_of_distribution"]) for r in found}
    assert got == {"sort": (True, ""), "sum": (True, "0.5"), "svamp": (False, "0.25")}
    assert {r["compared_with"] for r in found if r["kind"] == "svamp"} == {""}


def test_only_comparisons_that_have_a_test_are_counted() -> None:
    assert any(
        "3 comparisons are made here" in text for text in words_of(of(outcomes(3)), "accuracy")
    )
    assert not any("comparisons are made" in text for text in words_of(of(outcomes(1)), "accuracy"))


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
    found = rows(sweep_csv(TRIALS, "pair", "accuracy"))
    assert len(found) == 6
    assert [r["difference"] for r in found[:3]] == [""] * 3
    assert {r["compared_with"] for r in found[3:]} == {"pair"}
    assert float(found[4]["difference"]) == pytest.approx(-0.3)
    old = [msgspec.structs.replace(t, start={}, end={}) for t in TRIALS]
    assert {r["kind"] for r in rows(sweep_csv(old, "pair", "accuracy"))} == {"mean"}


# Claims, sections and words

BETTER = Claim(text="It pays <b> to join.", arm="ftis:C=3", against="alone", is_="better")
EQUAL = Claim(
    text="Sharing ends where alone ends", arm="ftis:C=3", against="alone", is_="equivalent",
    margin=0.02, on="every peer",
)  # fmt: skip


def claimed(seeds: int = 5) -> Findings:
    return findings({"pair": outcomes(seeds)}, ARMS, "accuracy", [BETTER, EQUAL])


def test_the_claims_come_first_and_say_how_they_ended() -> None:
    found = claimed()
    page, text = study_page(found, made()), markdown(found, made())
    check_self_contained(page)
    assert [one.verdict for one in found.judgements] == ["reproduced", "not reproduced"]
    for one in found.judgements:
        assert one.sentence in html.unescape(page)
        assert f"- {one.sentence}\n" in text
    assert page.index("<h2>The claims</h2>") < page.index("<h2>What was found</h2>")
    assert text.startswith("## The claims\n\n- reproduced: It pays <b> to join. Mean over peers")
    assert "<th>it should be</th>" in page
    assert "| it should be |" in text
    single = findings({"pair": outcomes(5)}, ARMS, "accuracy", [BETTER])
    assert "it should be" not in study_page(single, made()) + markdown(single, made())
    assert "<h2>The claims</h2>" not in study_page(of(outcomes(5)), made())
    assert msgspec.json.decode(msgspec.json.encode(plain(found)))["judgements"][1]["verdict"] == (
        "not reproduced"
    )


def test_the_csv_of_claims_has_a_row_per_place_where_a_claim_is_judged() -> None:
    found = rows(claims_csv(claimed()))
    assert tuple(found[0]) == CLAIMS_HEAD
    assert [(r["is"], r["where"], r["verdict_there"]) for r in found] == [
        ("better", "pair", "reproduced"),
        ("equivalent", "a of pair", "not reproduced"),
        ("equivalent", "b of pair", "not reproduced"),
    ]
    assert float(found[0]["difference"]) == pytest.approx(0.18)
    lost = findings({"pair": outcomes(3)[:6]}, ARMS, "accuracy", [BETTER])
    (row,) = rows(claims_csv(lost))
    assert (row["verdict"], row["where"], row["p"]) == ("undecided", "", "")


def test_the_words_are_explained_once_at_the_foot() -> None:
    page = html.unescape(study_page(claimed(), made()))
    text = markdown(claimed(), made())
    foot = page.index("<h2>How to read this")
    assert page.index("<h2>Every peer</h2>") < foot < page.index("<h2>How it was made</h2>")
    for words in ("a ± b", "p: the chance", "Holm's correction", "two one-sided", "Hedges' g"):
        assert page.count(words) >= 1
        assert page.index(words) > foot
        assert words in text[text.index("## How to read this") :]
    assert "Claims: reproduced means" in page
    assert "Claims: reproduced means" not in study_page(of(outcomes(5)), made())
    assert "the margin is .030" in page
    assert "the margin is" not in study_page(of(outcomes(5), measure="reward"), made("reward"))


def test_sections_of_others_are_shown_after_the_tables() -> None:
    section = Section(
        title="Weights",
        text="Before & after truncation.",
        table=(["round", "mean"], [["1", "<0.5>"]]),
        curves={"weights of a": [Curve("before", [1, 2], [0.5, 0.25])]},
    )
    bare = Section(title="Nothing yet", text="No run kept it.")
    page = study_page(of(outcomes(5)), made(), [section, bare])
    check_self_contained(page)
    assert page.count("<svg") == 5
    assert page.index("<h2>Every peer</h2>") < page.index("<h2>Weights</h2>")
    assert "<td>&lt;0.5&gt;</td>" in page
    text = markdown(of(outcomes(5)), made(), [section, bare])
    assert "## Weights\n\nBefore & after truncation.\n\n| round | mean |\n" in text
    assert "## Nothing yet\n\nNo run kept it.\n\n## How" in text


def test_a_report_has_outcomes_with_their_crew_and_a_file_of_claims_if_there_are_any() -> None:
    files = files_of(claimed(), made())
    assert set(files) == {
        *("report.html", "table.md", "outcomes.csv", "comparisons.csv"),
        *("results.jsonl", "claims.csv"),
    }
    assert "claims.csv" not in files_of(of(outcomes(2)), made())
    first = msgspec.json.decode(
        results_lines(several(), "accuracy").splitlines()[-1], type=CrewOutcome
    )
    assert (first.crew, first.arm, first.seed, first.peer) == ("far", "ftis:C=3", 2, "b")


def test_accuracy_out_of_distribution_has_differences_too() -> None:
    far = [msgspec.structs.replace(o, ood={"x": o.end["sum"] / 2}) for o in outcomes(5)]
    page, text = study_page(of(far), made()), markdown(of(far), made())
    assert "<h2>Against alone, out of distribution</h2>" in page
    assert "| peer | arm | out of distribution | against alone |" in text
    found = rows(comparisons_csv(of(far)))
    assert [r["on"] for r in found] == ["heldout", "ood"] * 3
    (whole,) = [r for r in found if (r["peer"], r["on"]) == ("", "ood")]
    assert float(whole["difference"]) == pytest.approx(0.09)
    assert (whole["margin"], whole["units"]) == ("0.03", "5")
    assert float(whole["g_low"]) < float(whole["g"]) < float(whole["g_high"])


# Several crews


def several(seeds: int = 3) -> Findings:
    arms = ["alone", "alone/own", "ftis:C=3"]
    lower = {"alone": 0.0, "alone/own": -0.1, "ftis:C=3": 0.1}

    def crew(shift: float) -> list[Outcome]:
        return [
            outcome(arm, seed, peer, 0.5 + lower[arm] + shift * (arm == "ftis:C=3") * (1 + seed))
            for arm in arms
            for seed in range(seeds)
            for peer in "ab"
        ]

    return findings({"pair": crew(0.01), "far": crew(-0.001)}, arms, "accuracy")


BOTH = Making(
    "motley study a.toml b.toml", [CREW, FAR], ["alone"], "accuracy", {"best": "ftis:C=3"}
)


@pytest.mark.slow
def test_several_crews_have_sections_of_their_own_and_one_over_crews() -> None:
    text = html.unescape(study_page(several(), BOTH))
    check_self_contained(study_page(several(), BOTH))
    for name in ("pair: Curves", "far: Curves", "Over crews", "far: Every peer"):
        assert f"<h2>{name}</h2>" in text
    assert all(one.sentence in text for one in several().over)
    assert "best = ftis:C=3" in text
    assert text.count("<details>") == 2


def test_text_and_json_of_several_crews_have_the_same() -> None:
    found = several()
    text, json = markdown(found, BOTH), plain(found)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## pair",
        "## far",
        "## Over crews",
        "## How to read this",
    ]
    assert {len(row.split("|")) for row in text.split("## Over")[1].splitlines() if "|" in row} == {
        12
    }
    assert all(f"- {sentence}\n" in text for sentence in json["sentences"])  # type: ignore[attr-defined]
    assert set(json) == {"judgements", "crews", "over_crews", "sentences"}
    assert len(msgspec.json.encode(json)) > 1000
    one = plain(of(outcomes(3)))
    assert set(one) == {"judgements", "glance", "lines", "standings", "sentences", "below"}


def test_the_csv_of_comparisons_has_crews_peers_and_the_row_over_crews() -> None:
    found = rows(comparisons_csv(several()))
    assert tuple(found[0]) == COMPARISONS_HEAD
    assert len(found) == 2 * 3 * 2 + 2
    assert {(r["crew"], r["peer"]) for r in found} == {
        (crew, peer) for crew in ("pair", "far") for peer in ("", "a", "b")
    } | {("", "")}
    last = found[-1]
    assert (last["compared_with"], last["unit"], last["units"]) == ("alone/own", "crew", "2")
    single = rows(comparisons_csv(several(1)))
    assert (single[0]["low"], single[0]["p"]) == ("", "")


def test_arms_and_crews_whose_runs_were_all_lost_are_left_out() -> None:
    some = [o for o in outcomes(3) if o.arm == "alone"]
    found = findings({"pair": outcomes(3), "far": some, "gone": []}, ARMS, "accuracy")
    assert [(one.crew, one.arms) for one in found.crews] == [("pair", ARMS), ("far", ["alone"])]
    check_self_contained(study_page(found, BOTH))
    assert "## far" in markdown(found, BOTH)
