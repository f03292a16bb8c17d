"""The page in a browser: what a user sees, clicks and reads.

Needs Debian's chromium and chromium-driver (apt-get install chromium chromium-driver), and
selenium, which the extra `dev` has. The tests of accessibility need axe-core as well: `npm install
axe-core` in a folder of yours, and MOTLEY_AXE=FOLDER/node_modules.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import msgspec
import pytest
import torch

pytest.importorskip("selenium", reason="needs selenium: pip install 'motley-rl[dev]'")

from selenium.webdriver.common.keys import Keys

from dashboard.browser import PHONE, VIEWS, WIDE, Browser, Theme, axe, missing, page_at
from fakes import reference_logp, spread_crew
from hubs import PATIENCE_S
from motley.config import CrewConfig, parse_config
from motley.dashboard.formulas import shown
from motley.engines import Completion, Engine
from motley.models.policy import Policy
from motley.peers.sampling import SamplerHalf
from motley.records import Sampling
from motley.runs.local import LocalCrew

WITHOUT = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)]

PEERS = ["small", "adapted", "bytes"]
OTHERS = ["full0", "full1"]
TRAINED, ROUNDS = 6, 30  # rounds before a page is opened, and in all
EVILS = ("<script>document.title=1</script>", "<img src=x onerror=document.title=1>")
SCRIPT = "document.body.append('ran')"
REPORT = f"<!doctype html><title>A study</title><h1>What came of it</h1><script>{SCRIPT}</script>"


def crew_config(task: Path, rounds: int, name: str = "watched") -> CrewConfig:
    """Three models, one of which spells any text, and a filter that little passes."""
    return parse_config(f"""
[crew]
name = "{name}"
task = "spread_reward:digits"
rounds = {rounds}
group_size = 4
problems_per_round = 6
objective = "ftis"

[objective]
g = 0.001

[task]
file = "{task / "problems.jsonl"}"

[sampling]
max_tokens = {max(map(len, EVILS)) + 1}

[learning]
lr = 2e-3

[evaluate]
every = 2
problems = 2

[[peer]]
name = "small"
model = "tiny:0.3m"

[[peer]]
name = "adapted"
model = "tiny:1m"
train = {{ lora = {{ rank = 2 }} }}

[[peer]]
name = "bytes"
model = "tiny:0.3m/bytes"
""")


class SaysMarkup:
    """An engine whose first completions of a round are markup, with the log-probs they have."""

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self._engine, self._policy = engine, policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        made = self._engine.sample(prompts, num_samples, sampling, seed)
        if num_samples < len(EVILS):  # an evaluation
            return made
        vocabulary = self._policy.vocabulary
        for number, evil in enumerate(EVILS):
            tokens = (*vocabulary.encode(evil), vocabulary.end_id)
            with torch.no_grad():
                logprobs = reference_logp(self._policy, prompts[0], tokens).tolist()
            made[0][number] = Completion(tokens, tuple(logprobs), "stop")
        return made


class Watched:
    """A crew that learns while it is watched: round by round, when a test says so."""

    def __init__(self, task: Path) -> None:
        self.folder = task / "watched"
        self._crew = LocalCrew.start(crew_config(task, rounds=ROUNDS), self.folder)
        self._rounds = self._crew.rounds()
        for _ in range(TRAINED - 1):
            self.learn()
        half = self._crew.peers[-1].half
        plain, half.engine = half.engine, SaysMarkup(half.engine, half.policy)
        self.learn()
        half.engine = plain
        self._send_unasked(half)
        self.learn()

    @property
    def round(self) -> int:
        return self._crew.finished_rounds

    def learn(self) -> None:
        next(self._rounds)

    def _send_unasked(self, half: SamplerHalf) -> None:
        """Have a peer answer a problem that it was not given: nobody admits it."""
        group = half.draw().groups[0]
        half.outbox.put([msgspec.structs.replace(group, round=ROUNDS - 1)])


@pytest.fixture(scope="module")
def watched(task: Path) -> Watched:
    return Watched(task)


@pytest.fixture(scope="module")
def other(task: Path) -> Path:
    """A second run, which is over."""
    folder = task / "other"
    for _ in LocalCrew.start(spread_crew(task, rounds=2), folder).rounds():
        pass
    return folder


@pytest.fixture(scope="module")
def home(watched: Watched, other: Path, task: Path) -> Iterator[str]:
    study = task / "study"
    study.mkdir()
    (study / "report.html").write_text(REPORT)
    with page_at(watched.folder, other, study) as address:
        yield address


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture
def page(window: Browser, home: str) -> Iterator[Browser]:
    """The start page. Whatever a test does, no error is logged, and nobody else is asked."""
    window.size()
    window.open(home)
    window.hear()
    window.errors.clear()
    window.asked.clear()
    yield window
    window.hear()
    assert window.errors == []
    assert [url for url in window.asked if not url.startswith(home)] == []


def asked(home: str, path: str, **query: object) -> Any:
    """What the page is told about the run that learns."""
    url = f"{home}api/runs/watched/{path}?{urlencode(query)}"
    with urlopen(url, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def traced(home: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The position of a group, a rollout of it that `small` learned from, and its trace."""
    groups = asked(home, "groups", sender="adapted", learner="small", fate="learned")["groups"]
    for line in groups:
        for rollout in asked(home, f"groups/{line['position']}")["rollouts"]:
            for trace in rollout["traces"]:
                if trace["learner"] == "small" and trace["fate"] == "learned":
                    return line["position"], rollout, trace
    raise AssertionError("small has learned from no rollout of adapted")


def test_requests_and_errors_of_a_page_are_noticed(page: Browser, home: str) -> None:
    page.open(home)
    page.run("console.error('a fault'); fetch('http://localhost:9/elsewhere').catch(() => 0)")
    page.until(lambda: page.hear() or len(page.errors) > 1)
    assert f"{home}static/main.js" in page.asked
    assert any("a fault" in error for error in page.errors)
    # the page's policy has it stopped before it is sent
    assert any("Content Security Policy" in error for error in page.errors)
    page.errors.clear()
    page.asked = [url for url in page.asked if "elsewhere" not in url]


# Crew


def test_curves_of_every_peer_are_on_the_start_page(page: Browser) -> None:
    for chart in ("heldout", "number"):
        lines = page.all(f"[data-key=chart-{chart}] path.line")
        assert [line.get_attribute("data-series") for line in lines] == PEERS
        assert all("L" in line.get_attribute("d") for line in lines)


def test_a_round_that_is_learned_arrives_without_a_reload(page: Browser, watched: Watched) -> None:
    page.run("window.kept = document.querySelector('#number'); window.kept.focus()")
    line = "[data-key=chart-number] path.line"
    before = page.one(line).get_attribute("d")
    watched.learn()
    page.until(lambda: f"round {watched.round}" in page.text("#status"))
    page.until(lambda: page.text(".facts dd") == f"{watched.round} of {ROUNDS}")
    page.until(lambda: page.one(line).get_attribute("d") != before)
    # what the user was at is still there
    assert page.run("return document.activeElement === window.kept && window.kept.isConnected")


def test_an_arrow_leads_to_the_pair_that_it_joins(page: Browser) -> None:
    page.click('[data-arrow="adapted>small"] .knob')
    page.until(lambda: page.view == "offpolicy")
    assert "small learns from adapted" in page.text("[data-key=chart-pair] figcaption")
    assert page.one("[data-pair='adapted>small']").get_attribute("aria-current") == "true"
    assert page.all("[data-key=chart-ratios] .bar-part")


def test_arrow_keys_go_from_arrow_to_arrow(page: Browser) -> None:
    page.run("document.querySelector('[data-arrow]').focus()")
    page.keys(Keys.ARROW_RIGHT)
    wanted = page.all("[data-arrow]")[1].get_attribute("data-arrow")
    assert page.focus.get_attribute("data-arrow") == wanted
    sender, learner = wanted.split(">")
    assert f"{learner} learns from {sender}" in page.text("#arrow-readout")
    page.keys(Keys.ENTER)
    page.until(lambda: page.view == "offpolicy")


def test_a_point_of_a_chart_leads_to_its_rollouts(page: Browser) -> None:
    page.run("document.querySelector('[data-chart=number]').focus()")
    page.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    said = page.text("[data-key=chart-number] .readout")
    page.keys(Keys.ENTER)
    page.until(lambda: page.view == "rollouts")
    rounds = {row.text for row in page.all("#groups td:first-child")}
    assert len(rounds) == 1
    assert f"round {rounds.pop()} " in said
    page.driver.back()
    page.until(lambda: page.view == "crew")
    page.click("[data-chart=number]")
    page.until(lambda: page.view == "rollouts")


# Rollouts


def test_a_group_is_opened_by_a_click_and_by_keys(page: Browser) -> None:
    page.click("[data-nav=rollouts]")
    page.click("#groups [data-position]")
    page.until(lambda: page.view == "group")
    assert len(page.all("[data-rollout]")) == 4
    page.click("#back")
    page.until(lambda: page.view == "rollouts")
    page.keys("j", "j", "j")
    third = page.all("#groups [data-position]")[2].get_attribute("data-position")
    assert page.focus.get_attribute("data-position") == third
    page.keys("k", "j", Keys.ENTER)
    page.until(lambda: page.view == "group")
    assert f"open={third}" in page.hash
    page.keys("n")
    fourth = str(int(third) + 1)
    page.until(lambda: page.text("#group-title") == f"Group {fourth}")
    page.keys(Keys.ESCAPE)
    page.until(lambda: page.view == "rollouts")
    page.until(lambda: page.focus.get_attribute("data-position") == fourth)


def test_a_token_shows_its_formula_with_the_values_of_its_trace(page: Browser, home: str) -> None:
    position, rollout, trace = traced(home)
    page.go(f"#/group?open={position}&trace=small")
    page.click(f"[data-rollout='{rollout['number']}'] [data-token='1']")
    page.until(lambda: "token 1" in page.text("#formula h3"))
    result = lambda symbol: page.text(f"#formula [data-symbol='{symbol}'] strong")
    assert result("d") == shown(trace["log_ratio"][1])
    assert result("ρ") == shown(math.exp(trace["log_ratio"][1]))
    assert result("weight") == shown(trace["weight"][1])
    assert result("A") == shown(trace["advantage"])
    assert result("KL") == shown(trace["filter_kl"])
    assert result("push") == shown(trace["push"][1])
    assert page.focus.get_attribute("data-token") == "1"
    page.keys(Keys.ARROW_RIGHT, Keys.ENTER)
    page.until(lambda: "token 2" in page.text("#formula h3"))
    assert result("d") == shown(trace["log_ratio"][2])


def test_text_is_found_and_filters_stand_in_the_address(page: Browser) -> None:
    page.click("[data-nav=rollouts]")
    page.one("#f-text").send_keys("onerror", Keys.ENTER)
    page.until(lambda: "text=onerror" in page.hash)
    page.settled()
    assert len(page.all("#groups [data-position]")) == 1
    page.driver.refresh()
    page.settled()
    assert page.one("#f-text").get_attribute("value") == "onerror"
    assert len(page.all("#groups [data-position]")) == 1
    page.click("#clear")
    page.until(lambda: len(page.all("#groups [data-position]")) > 1)


def test_markup_of_a_peer_is_text_and_runs_nothing(page: Browser, home: str) -> None:
    (evil,) = asked(home, "groups", text="onerror")["groups"]
    page.go(f"#/group?open={evil['position']}&trace=bytes")
    for number, text in enumerate(EVILS):
        tokens = page.text(f"[data-rollout='{number}'] .tokens")
        assert tokens.replace("·", " ").startswith(text)
    page.click("[data-rollout='0'] [data-token='3']")
    page.until(lambda: "token 3" in page.text("#formula h3"))
    assert page.all("main script, main img") == []
    assert page.driver.title == "Group · watched"


# Discarded


SEEN = """
const {top, bottom} = document.querySelector(arguments[0]).getBoundingClientRect();
return top >= 0 && bottom <= innerHeight;
"""


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_why_a_sample_was_filtered_is_three_clicks_away(page: Browser, width: int) -> None:
    page.size(width)
    page.click("[data-nav=discarded]")
    page.click("[data-reason=filtered] a")
    page.click("#groups [data-position]")
    verdict = page.text("#verdict")
    assert re.search(r"its KL of [\d.]+ is not below g = 0.001", verdict)
    wanted = page.one(".completion.wanted [data-learner=small]")
    assert wanted.get_attribute("data-fate") == "filtered"
    # without a scroll
    assert page.run(SEEN, "#verdict")
    assert page.run(SEEN, "[data-token][aria-pressed=true]")


def test_a_refused_record_is_counted_and_opens(page: Browser) -> None:
    page.go("#/discarded?learner=small")
    page.click("[data-reason^=refused] a")
    page.click("#groups [data-position]")
    assert "refused" in page.text("#formula")
    page.go("#/trust")
    assert re.search(r"\w+ 1", page.text("[data-suspect='bytes>small'] td:nth-of-type(2)"))


def test_a_bar_leads_to_the_rollouts_of_its_rounds(page: Browser) -> None:
    page.go("#/discarded?learner=small")
    page.run("document.querySelector('[data-chart^=discarded]').focus()")
    page.keys(Keys.ARROW_RIGHT)
    said = page.text("[data-key^=chart-discarded] .readout")
    page.keys(Keys.ENTER)
    page.until(lambda: page.view == "rollouts")
    fate = page.one("#f-fate").get_attribute("value")
    assert fate
    assert fate in said


# Several views


def test_the_back_button_goes_back_and_a_bookmark_opens_what_was_shown(
    page: Browser, home: str
) -> None:
    page.click("[data-nav=discarded]")
    page.until(lambda: page.view == "discarded")
    page.click("[data-nav=speed]")
    page.until(lambda: page.view == "speed")
    page.driver.back()
    page.until(lambda: page.view == "discarded")
    page.driver.back()
    page.until(lambda: page.view == "crew")
    page.open(home, "#/rollouts?run=watched&sender=bytes&rounds=2..3")
    senders = {row.text.split()[0] for row in page.all("#groups td:nth-child(2)")}
    assert senders == {"bytes"}
    assert page.one("#f-rounds").get_attribute("value") == "2..3"


def test_many_tabs_can_be_open_at_once(page: Browser, home: str) -> None:
    first = page.driver.current_window_handle
    for _ in range(7):  # a browser has six connections to a server
        page.driver.switch_to.new_window("tab")
        page.size()
        page.open(home, "#/speed")
    for handle in page.driver.window_handles:
        if handle != first:
            page.driver.switch_to.window(handle)
            page.driver.close()
    page.driver.switch_to.window(first)


def test_a_page_whose_server_is_gone_says_so_and_goes_on_when_it_is_back(
    window: Browser, other: Path
) -> None:
    status = lambda: window.one("#status").get_attribute("data-state")
    with page_at(other) as home:
        window.size()
        window.open(home)
        window.until(lambda: status() == "over")
    window.until(lambda: status() == "lost")
    window.click("[data-nav=trust]")
    window.until(lambda: "The server does not answer" in window.text("#problem"))
    with page_at(other, port=urlsplit(home).port):
        window.until(lambda: status() == "over")
        window.settled()
        assert window.text("#problem") == ""
        window.driver.get("about:blank")


def test_two_runs_stand_side_by_side(page: Browser) -> None:
    page.click("[data-nav=compare]")
    page.one("[data-key=chart-compare] path.line")
    names = [line.get_attribute("data-series") for line in page.all("path.line")]
    assert {name.split(":")[0] for name in names} == {"watched", "other"}
    assert "2 of 2, over" in page.text("main table")


def test_another_run_is_chosen_at_the_top(page: Browser) -> None:
    page.one("#run").send_keys("other")
    page.until(lambda: page.text("#title") == "other" and "run=other" in page.hash)
    page.until(lambda: page.text("#status").startswith("over"))
    page.until(lambda: [card.get_attribute("data-peer") for card in page.all(".card")] == OTHERS)


def test_a_report_is_shown_in_a_frame_where_no_script_runs(page: Browser) -> None:
    page.go("#/compare")
    page.click("[data-report]")
    page.driver.switch_to.frame(page.one("iframe"))
    try:
        assert page.text("body") == "What came of it" + SCRIPT
    finally:
        page.driver.switch_to.default_content()
    page.hear()
    assert all("sandboxed" in error for error in page.errors)
    page.errors.clear()


@pytest.mark.parametrize("view", [*VIEWS, "group"])
def test_a_phone_scrolls_no_view_sideways(page: Browser, home: str, view: str) -> None:
    page.size(PHONE)
    page.open(home, address_of(view, home))
    assert page.run("return document.documentElement.scrollWidth") == PHONE


def address_of(view: str, home: str) -> str:
    """Of a view with something in it."""
    if view != "group":
        return f"#/{view}"
    position, rollout, _ = traced(home)
    return f"#/group?open={position}&trace=small&token={rollout['number']}.1"


# Keyboard


STOP = """
const at = document.activeElement, drawn = at.querySelector(".knob, .disc") ?? at;
const looks = () => { const style = getComputedStyle(drawn);
  return [style.outlineStyle, style.outlineWidth, style.stroke, style.strokeWidth].join(); };
const focused = looks();
at.blur();
const plain = looks();
at.focus();
const name = (at.id && `#${at.id}`) || Object.keys(at.dataset)[0] || at.tagName;
return [name, focused !== plain];
"""


def stops(page: Browser, most: int = 60) -> dict[str, bool]:
    """What Tab comes to, by id, data attribute or tag, and whether one sees that it is there."""
    found: dict[str, bool] = {}
    page.run("document.querySelector('#skip').focus()")
    for _ in range(most):
        page.keys(Keys.TAB)
        if page.run("return document.activeElement === document.body"):
            break
        name, is_seen = page.run(STOP)
        found[name] = found.get(name, True) and is_seen
    return found


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        ("crew", {"nav", "#run", "#kind", "#number", "chart", "arrow", "peer"}),
        ("rollouts", {"nav", "#f-sender", "#f-text", "#f-fate", "#clear", "position"}),
        ("discarded", {"nav", "#learner", "#reasons", "chart"}),
        ("offpolicy", {"nav", "#number", "pair", "chart"}),
        ("group", {"nav", "#back", "#next", "#trace", "#by", "token"}),
    ],
)
def test_tab_reaches_all_that_can_be_used_and_one_sees_where(
    page: Browser, home: str, view: str, wanted: set[str]
) -> None:
    page.open(home, address_of(view, home))
    found = stops(page)
    assert wanted - found.keys() == set()
    assert [name for name, is_seen in found.items() if not is_seen] == []


def test_the_first_stop_skips_to_the_view(page: Browser) -> None:
    page.keys(Keys.TAB)
    assert page.focus.get_attribute("id") == "skip"
    assert page.focus.rect["x"] >= 0
    page.keys(Keys.ENTER)
    assert page.focus.get_attribute("id") == "view"


def test_why_a_sample_was_filtered_is_found_without_a_mouse(page: Browser) -> None:
    page.keys("3")
    page.until(lambda: page.view == "discarded")
    page.run("document.querySelector('[data-reason=filtered] a').focus()")
    page.keys(Keys.ENTER)
    page.until(lambda: page.view == "rollouts")
    page.keys("j", Keys.ENTER)
    assert "g = 0.001" in page.text("#verdict")


# Accessibility


AXE = """
const done = arguments[0];
axe.run(document, {resultTypes: ["violations"]}).then((found) => done([found.passes.length,
  found.violations.filter((one) => one.impact === "serious" || one.impact === "critical")
  .flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.html.slice(0, 200)}`))]));
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, PHONE])
@pytest.mark.parametrize("view", [*VIEWS, "group"])
def test_axe_finds_no_serious_fault(
    page: Browser, home: str, view: str, width: int, theme: Theme
) -> None:
    script = axe()
    if script is None:
        pytest.skip("needs axe-core: npm install axe-core, and MOTLEY_AXE=its node_modules")
    page.size(width, theme=theme)
    page.open(home, address_of(view, home))
    page.run(script.read_text())
    num_passed, faults = page.driver.execute_async_script(AXE)
    assert faults == []
    assert num_passed > 10
