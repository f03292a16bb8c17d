"""Rollouts of a run: what was sampled, and what every learner made of it."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from fakes import spread_crew
from motley.archive import LoggedRollout, RolloutFilter, read_range, read_rollouts, rollouts
from motley.archive.rollouts import FateBook
from motley.cli import app
from motley.learning.fates import FateFile, StepFates, read_fates
from motley.runs.local import LocalCrew
from motley.runs.metrics import learner_lines, read_metrics

pytestmark = pytest.mark.slow

SILENT_IN_PART = """
def half(prompts, completions, **columns):
    \"\"\"Nothing of a prompt that ends in an even number is better than the rest.\"\"\"
    return [
        0.0 if int(prompt.rstrip("=")[-1]) % 2 == 0 else len(text) - 3.0
        for prompt, text in zip(prompts, completions)
    ]
"""


@pytest.fixture(scope="module")
def run(task: Path) -> Path:
    """Two peers, four rounds, of which the last two were done again after a stop."""
    (task / "half_reward.py").write_text(SILENT_IN_PART)
    config = spread_crew(
        task, task="half_reward:half", rounds=4, learning="checkpoint_every = 2\nquota = 1"
    )
    folder = task / "run"
    for lines in LocalCrew.start(config, folder).rounds():
        if lines[0].round == 3:
            break
    with (folder / "groups" / "fates.jsonl").open("ab") as file:
        file.write(b'{"round":4,"peer":"fu')  # killed in the middle of a line
    for _ in LocalCrew.resume(folder).rounds():
        pass
    return folder


def test_every_rollout_of_a_run_is_told_with_prompt_text_and_reward(run: Path) -> None:
    rows = rollouts(run)
    assert len(rows) == 4 * 4 * 4  # rounds, problems, samples
    assert {row.sender for row in rows} == {"full0", "full1"}
    assert [*dict.fromkeys(row.round for row in rows)] == [1, 2, 3, 4]
    assert all(row.prompt and row.kind in row.prompt for row in rows if row.kind)
    for row in rows:
        even = int((row.prompt or "").rstrip("=")[-1]) % 2 == 0
        assert row.reward == (0.0 if even else len(row.completion or "") - 3.0)


def test_the_reason_why_a_sample_was_not_learned_from_is_told(run: Path) -> None:
    for row in rollouts(run):
        assert row.fates.keys() == {"full0", "full1"}
        for learner, fate in row.fates.items():
            if (row.reward, fate) == (0.0, "silent group"):
                continue
            expected = {"learned", "filtered", "no advantage", "silent group", "withheld in part"}
            assert fate in expected | ({"not selected"} if learner != row.sender else set())
    fates = Counter(row.fates["full0"] for row in rollouts(run) if row.sender == "full1")
    assert fates["not selected"] == 4 * 1 * 4  # quota = 1: one of two groups a round is left out


def test_the_letters_agree_with_the_metrics_of_the_same_steps(run: Path) -> None:
    by_step = {(f.peer, f.round): f for f in read_fates(run / "groups" / "fates.jsonl")}
    for line in learner_lines(read_metrics(run)):
        if line.num_sequences is None:
            continue
        letters = "".join(by_step[line.peer, line.round].groups.values())
        assert len(letters) == line.num_sequences
        assert sum(letter != "s" for letter in letters) <= (line.num_scored or 0)
        silent = sum(
            set(group) == {"s"} for group in by_step[line.peer, line.round].groups.values()
        )
        assert silent == sum(s.silent_groups for s in (line.senders or {}).values())


def test_a_resumed_run_has_every_step_once(run: Path) -> None:
    steps = [(f.round, f.peer) for f in read_fates(run / "groups" / "fates.jsonl")]
    assert sorted(steps) == [(n, peer) for n in (1, 2, 3, 4) for peer in ("full0", "full1")]


def test_a_cut_takes_back_one_peer_only(tmp_path: Path) -> None:
    file = FateFile(tmp_path / "fates.jsonl")
    steps = [StepFates(round=n, peer=peer, cursor=n) for n in (1, 2) for peer in "ab"]
    for step in steps:
        file.write(step)
    file.cut("a", 1)
    assert [*read_fates(tmp_path / "fates.jsonl")] == [s for s in steps if s != steps[2]]


def test_what_is_not_written_down_is_said_to_be_so(run: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    (old / "groups").mkdir(parents=True)
    for name in ("config.toml", "groups/log.bin"):
        (old / name).write_bytes((run / name).read_bytes())
    said: list[str] = []
    (row, *_) = read_rollouts(old, say=said.append)
    assert row.fates == {"full0": "not recorded", "full1": "not recorded"}
    assert "fates.jsonl is not there" in said[0]


def test_groups_that_no_step_took_wait_or_are_not_read_yet(tmp_path: Path) -> None:
    (tmp_path / "groups").mkdir()
    file = FateFile(tmp_path / "groups" / "fates.jsonl")
    file.write(StepFates(round=1, peer="a", cursor=5, groups={3: "lsf"}, let_go={4: "stale"}))
    file.write(StepFates(round=2, peer="a", cursor=6, let_go={2: "refused: reward"}))
    book = FateBook.read(tmp_path)
    assert [book.of(3, n)["a"] for n in range(3)] == ["learned", "no advantage", "filtered"]
    assert [book.of(position, 0)["a"] for position in (4, 2, 5, 7)] == [
        "stale", "refused: reward", "waiting", "not read yet",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "ends"),
    [("3", (3, 3)), ("3..7", (3, 7)), ("..0.5", (float("-inf"), 0.5)), ("-2..-1", (-2, -1))],
)
def test_a_range_has_both_its_ends(text: str, ends: tuple[float, float]) -> None:
    assert read_range(text, "--reward") == ends


@pytest.mark.parametrize("text", ["", "x", "7..3", "nan", "1..2..3"])
def test_what_is_no_range_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"--round .* is no range; expected such as 3, 3\.\.7"):
        read_range(text, "--round")


# The command


def motley(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["rollouts", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout if code == 0 else result.stderr


def as_json(*arguments: object) -> dict[str, Any]:
    return json.loads(motley(*arguments, "--json"))


def matching(run: Path, *arguments: object) -> list[LoggedRollout]:
    found = as_json(run, *arguments, "--limit", 1000)
    assert found["more"] is False
    return [msgspec.convert(row, LoggedRollout) for row in found["rollouts"]]


def test_filters_choose_rollouts(run: Path) -> None:
    every = rollouts(run)
    assert matching(run) == every
    assert matching(run, "--sender", "full1") == [r for r in every if r.sender == "full1"]
    assert matching(run, "--round", "2..3") == [r for r in every if r.round in (2, 3)]
    assert matching(run, "--kind", "sort") == [r for r in every if r.kind == "sort"]
    assert matching(run, "--reward", "..-1") == [r for r in every if (r.reward or 0) <= -1]
    assert matching(run, "--reason", "truncated") == [r for r in every if r.ending == "length"]
    mine = matching(run, "--reason", "not selected", "--peer", "full0")
    assert mine == [r for r in every if r.fates["full0"] == "not selected"]
    assert mine
    assert matching(run, "--grep", r"^reverse \d+=$") == [r for r in every if r.kind == "reverse"]


def test_pages_follow_each_other(run: Path) -> None:
    first, second = (as_json(run, "--limit", 30, "--page", n) for n in (1, 2))
    assert first["more"] is second["more"] is True
    third = as_json(run, "--limit", 30, "--page", 3)
    rows = [*first["rollouts"], *second["rollouts"], *third["rollouts"]]
    assert rows == msgspec.to_builtins(rollouts(run))
    assert third["more"] is False
    assert "there is no page 9" in motley(run, "--page", 9)


def test_a_table_and_whole_texts_are_printed(run: Path) -> None:
    table = motley(run, "--limit", 4)
    assert "what became of it" in table
    assert "there are more: --page 2" in table
    blocks = motley(run, "--limit", 2, "--full", "--peer", "full1")
    assert "--- round 1, full0, problem 0, sample 0" in blocks
    assert "completion: " in blocks
    assert "no rollout matches" in motley(run, "--grep", "nowhere")


def test_a_csv_has_a_column_for_every_learner(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "rollouts.csv"
    assert "64 rollouts in" in motley(run, "--csv", out)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["completion"] for row in rows] == [r.completion for r in rollouts(run)]
    assert [row["fate_full1"] for row in rows] == [r.fates["full1"] for r in rollouts(run)]
    assert "is there already" in motley(run, "--csv", out, code=2)


def test_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    assert "Who sampled is --sender" in motley(run, "--peer", "nobody", code=2)
    assert "is no range" in motley(run, "--round", "a..b", code=2)
    assert "is no regular expression" in motley(run, "--grep", "(", code=2)
    assert "there is no log at" in motley(tmp_path / "none", code=2)


def test_a_reward_that_is_no_number_is_in_no_range() -> None:
    row = LoggedRollout(
        position=1, round=1, sender="a", version=0, slot=0, number=0, problem="p", kind=None,
        prompt=None, answer=None, completion=None, num_tokens=3, reward=None, ending="stop",
        fates={},
    )  # fmt: skip
    assert RolloutFilter().wants(row)
    assert not RolloutFilter(rewards=(-1e9, 1e9)).wants(row)
