"""Whole crews of several vocabularies: in one process, in several, simulated; stopped and resumed
anywhere they are the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import motley.runs.folder
from fakes import FixedClock, spread_crew
from motley.cli import app
from motley.clock import RealClock
from motley.config import CrewConfig, parse_config
from motley.distributed.processes import ProcessCrew
from motley.records import Table
from motley.runs.local import LocalCrew
from motley.runs.metrics import learner_lines, read_metrics
from motley.runs.replay import KeptLog, Replay
from sim.crews import crew_text, simulated

from .test_crew import assert_same_run, contents, finish, metrics, run

pytestmark = pytest.mark.slow  # whole crews

MODELS = ("tiny:0.3m", "tiny:0.3m/bytes", "tiny:0.3m/pairs")
NAMES = ("full0", "full1", "full2")


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(motley.runs.folder, "RealClock", FixedClock)
    return folder


def mixed_crew(folder: Path, learning: str = "", **crew: Any) -> CrewConfig:
    """Groups are so large that some of each can be read: untrained models draw special tokens."""
    settings = {"task": "spread_reward:digits", "group_size": 12, "rounds": 4} | crew
    trains = ("full",) * len(MODELS)
    return spread_crew(
        folder, trains, f"checkpoint_every = 2\n{learning}", models=MODELS, **settings
    )


def refused_of(folder: Path) -> list[object]:
    return [line.refused for line in learner_lines(read_metrics(folder)) if line.round]


@pytest.mark.parametrize("pace", ["lockstep", "async"])
def test_a_mixed_crew_stopped_anywhere_and_resumed_ends_the_same(pace: str, folder: Path) -> None:
    config = mixed_crew(folder, pace=pace)
    whole = run(config, folder / "whole")
    assert [c.peer for c in contents(whole) if isinstance(c, Table)] == list(NAMES)
    assert all(refused == {} for refused in refused_of(whole.folder))
    last = {line.peer: line for line in learner_lines(read_metrics(whole.folder))}
    for name in NAMES:  # everyone learns from everyone
        assert set(last[name].senders or {}) == set(NAMES)
    stopped = LocalCrew.start(config, folder / "stopped")
    for _ in zip(range(3), stopped.rounds(), strict=False):
        pass
    assert_same_run(finish(LocalCrew.resume(folder / "stopped")), whole)
    assert metrics(folder / "stopped") == metrics(folder / "whole")


def test_what_reading_other_vocabularies_took_is_part_of_learning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(motley.runs.folder, "RealClock", RealClock)
    for models, is_mixed in ((MODELS, True), (MODELS[:1] * 3, False)):
        config = spread_crew(folder, ("full",) * 3, models=models, rounds=2, group_size=4)
        run(config, folder / f"mixed-{is_mixed}")
        lines = learner_lines(read_metrics(folder / f"mixed-{is_mixed}"))
        timings = [line.timing for line in lines if line.timing]
        assert len(timings) == 6
        for timing in timings:
            assert (timing.translate_s is not None) == is_mixed
            assert (timing.translate_s or 0) < (timing.learn_s or 0)
        assert is_mixed == any(timing.translate_s for timing in timings)


@pytest.mark.parametrize("layout", ["vertical", "horizontal"])
def test_a_group_that_cannot_be_read_holds_nobody_up(layout: str, folder: Path) -> None:
    """Of untrained models many completions have special tokens inside, which are no text."""
    size = 2 if layout == "vertical" else 6
    config = mixed_crew(folder, group_size=size, layout=layout, task="spread_reward:spread")
    whole = run(config, folder / "whole")
    dropped = [line.dropped or {} for line in learner_lines(read_metrics(whole.folder))]
    assert any("unread" in reasons for each in dropped for reasons in each.values())
    stopped = LocalCrew.start(config, folder / "stopped")
    next(stopped.rounds())
    assert_same_run(finish(LocalCrew.resume(folder / "stopped")), whole)


def test_a_mixed_crew_of_processes_learns_from_the_same_as_one_in_a_single_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    config = mixed_crew(folder, processes=True)
    local = run(config, folder / "local")
    crew = ProcessCrew.start(config, folder / "processes")
    for _ in crew.gather():
        pass
    for _ in crew.rounds():
        pass
    assert told(crew.folder) == told(local.folder)
    assert all(refused == {} for refused in refused_of(crew.folder))


def told(folder: Path) -> dict[tuple[int, str], object]:
    """What became of everyone's groups, without what a rounding can change."""
    return {
        (line.round, line.peer): (
            pytest.approx(line.reward, abs=1e-6),
            {name: sender.sequences for name, sender in (line.senders or {}).items()},
            line.dropped,
            line.num_tokens,
        )
        for line in learner_lines(read_metrics(folder))
        if line.round
    }


def test_tables_arrive_before_groups_however_late_these_are(folder: Path) -> None:
    """Groups of a later round may be on the log before those of an earlier one."""
    delays = '[network]\nup = { shape = "lognormal", low_s = 1, high_s = 2000 }'
    config = mixed_crew(folder, f"max_age = 100\n{delays}", pace="async", rounds=8)
    crew = simulated(config, folder / "run")
    places = [entry.id.split(".")[:2] for entry in crew.log.read(0, 10**6)]
    for name in NAMES:
        own = [place for sender, place in places if sender == name]
        assert own[0] == "table"
        rounds = list(map(int, own[1:]))
        assert rounds != sorted(rounds), "nothing was overtaken"
    lines = learner_lines(read_metrics(folder / "run"))
    assert all(refused == {} for refused in refused_of(folder / "run"))
    assert any(len(line.senders or {}) == 3 for line in lines)


def test_samplers_publish_the_tables_of_their_learners(folder: Path) -> None:
    followed = {"s0": "l", "s1": "m"}
    crew = {"task": "spread_reward:digits", "group_size": 12, "learning": "max_age = 5"}
    text = crew_text(folder, samplers=followed, **crew)
    before, name, behind = text.partition('name = "m"')
    other = behind.replace("tiny:0.3m", "tiny:0.3m/bytes", 1)
    far = simulated(parse_config(before + name + other), folder / "run")
    tables = [entry.id for entry in far.log.read(0, 10**6) if entry.id.endswith(".table")]
    assert tables == ["s0.table", "s1.table"]
    assert all(refused == {} for refused in refused_of(folder / "run"))
    last = learner_lines(read_metrics(folder / "run"))[-2:]
    assert [set(line.senders or {}) for line in last] == [{"s0", "s1"}] * 2


def test_a_mixed_run_is_taken_again_from_its_log_and_exported(folder: Path) -> None:
    whole = run(mixed_crew(folder), folder / "whole")
    entries = whole._log.read(0, 10**6)
    hub = whole.peers[0].admission.hub
    Replay(whole.folder, KeptLog(entries), hub, (), 0, folder / "again").run()
    assert metrics(folder / "again").splitlines()[-1] != b""
    assert all(refused == {} for refused in refused_of(folder / "again"))
    path = folder / "groups.jsonl"
    result = CliRunner().invoke(app, ["log", str(whole.folder), "--export", str(path)])
    assert result.exit_code == 0
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert {row["peer"] for row in rows} == set(NAMES)
    for row in rows:
        for rollout in row["rollouts"]:
            spelled = rollout["token_bytes"][: -1 if rollout["ending"] == "stop" else None]
            if None not in spelled:
                text = bytes.fromhex("".join(spelled)).decode(errors="replace")
                assert text == rollout["text"]
