"""A crew with rewards of any range, as a user sees it: no accuracy is claimed, and a run that
learns nothing says so.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fakes import spread_crew
from motley.cli import app
from motley.config import write_config

pytestmark = pytest.mark.slow

REWARDS = """
def wild(prompts, completions, **columns):
    return [100.0 * len(set(text)) - 5000 for text in completions]

def ones(prompts, completions, **columns):
    return [1.0] * len(completions)
"""


def motley(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@pytest.fixture(scope="module")
def trained(task: Path) -> tuple[Path, str]:
    """A run of rewards from -5000, and what was on the screen."""
    (task / "any_reward.py").write_text(REWARDS)
    write_config(spread_crew(task, task="any_reward:wild", rounds=2), task / "crew.toml")
    out = motley("train", task / "crew.toml", "--out", task / "run").stdout
    return task / "run", out


def test_rewards_of_thousands_are_printed_as_rewards(trained: tuple[Path, str]) -> None:
    _, out = trained
    assert "held-out reward: before → after" in out
    assert "%" not in out
    assert "accuracy" not in out


def test_eval_of_rewards_has_no_pass_rate_and_no_best_constant(trained: tuple[Path, str]) -> None:
    found = json.loads(motley("eval", trained[0], "--problems", 4, "--samples", 2, "--json").stdout)
    assert found["title"].endswith("heldout: reward")
    for row in found["rows"]:
        assert row["greedy"] < -3000
        assert row["pass@2"] is row["constant"] is None


def test_the_card_of_a_model_trained_on_rewards_names_no_accuracy(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    motley("export", trained[0], tmp_path / "model", "--peer", "full0")
    card = (tmp_path / "model" / "README.md").read_text()
    results = card[card.index("## Reward") : card.index("## Training")]
    assert "%" not in results
    assert "best constant" not in results
    assert "-4" in results


def test_check_accepts_shaped_rewards(task: Path, trained: tuple[Path, str]) -> None:
    (task / "shaped_reward.py").write_text(
        "def shaped(prompts, completions, answer, **columns):\n"
        "    return [int(a) / 10 if a == c else 1.5 for a, c in zip(answer, completions)]\n"
    )
    write_config(spread_crew(task, ("full",), task="shaped_reward:shaped"), task / "shaped.toml")
    found = json.loads(motley("check", task / "shaped.toml", "--json").stdout)
    assert found["rows"][0]["result"] == "ok"
    assert "problems words do as well as the answer" in found["rows"][0]["note"]


def test_a_run_that_learns_nothing_says_so_when_it_shows_and_at_the_end(
    task: Path, trained: tuple[Path, str]
) -> None:
    write_config(spread_crew(task, task="any_reward:ones", rounds=3), task / "ones.toml")
    out = motley("train", task / "ones.toml", "--out", task / "ones").stdout
    words = "full0, full1: constant reward: every completion had the same reward, 1"
    assert out.count(words) == 2
    assert f"warning: round 3, {words}" in out
    assert f"- round 3, {words}" in out[out.index("in this run:") :]
    content = (task / "ones" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in content.splitlines()]
    constant = [w["sign"] for line in lines for w in line.get("warnings", [])]
    assert constant.count("constant reward") == 2
    simulated = motley("sim", task / "ones.toml", "--out", task / "simulated").stdout
    assert "warning: round 3, full0: constant reward" in simulated
    assert f"- round 3, {words}" in simulated


def test_an_attack_is_not_measured_by_rewards(task: Path, trained: tuple[Path, str]) -> None:
    words = motley("attack", task / "crew.toml", "--out", task / "attack", code=2).stderr
    assert "use a task whose answers are right or wrong" in words
    assert not (task / "attack").exists()
