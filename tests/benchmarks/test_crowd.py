"""Crews of many recorded peers and a few that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.benchmarks.crowd import crowd_config, crowd_cost, crowd_costs, draw_costs, rows_of
from motley.sim.recorded import record_peers
from motley.sim.simulation import SimCrew
from motley.tasks import load_task

pytestmark = pytest.mark.slow  # whole crews

HEAR, ROUNDS, REAL = 3, 4, 2


@pytest.mark.parametrize("pace", ["lockstep", "async"])
def test_what_a_peer_reads_does_not_grow_with_the_crew(pace: str) -> None:
    small, large = (crowd_cost(peers, HEAR, ROUNDS, REAL, pace) for peers in (6, 60))
    if pace == "lockstep":
        assert small.judged == large.judged == 2 * (1 + HEAR)
    assert large.judged < 1.5 * small.judged
    assert large.read_bytes < 1.5 * small.read_bytes
    assert large.passed_by > 10 * small.passed_by


def test_everyone_admits_what_was_recorded_and_finds_no_fault_with_it(tmp_path: Path) -> None:
    config = crowd_config(12, HEAR, 8, "lockstep")
    trained = ("p0000", "p0006")
    names = [peer.name for peer in config.peer if peer.name not in trained]
    recorded = record_peers(config, load_task(config.crew.task, config.task), names)
    crew = SimCrew(config, tmp_path / "run", recorded=recorded)
    for _ in crew.rounds():
        pass
    assert [student.me.name for student in crew.students] == [*trained]
    for student in crew.students:
        peer = student.peer
        assert peer.learned_rounds == 8
        assert not peer.admission.refused
        assert not peer.waiting.dropped
        assert not peer.scrutiny.suspicions()
    # a run does not wait for groups of the last round that nobody hears
    last = {name for student in crew.students for name in student.peer.hearing.of(7)}
    heard = {
        f"{peer.name}.{round}.{slot}"
        for peer in config.peer
        for round in range(8)
        for slot in range(2)
        if round < 7 or peer.name in last
    }
    assert heard <= {entry.id for entry in crew.log.read(0)}


def test_the_same_seed_records_the_same_bytes() -> None:
    config = crowd_config(4, 2, 2, "lockstep")
    task = load_task(config.crew.task, config.task)
    first, second = (record_peers(config, task, ["p0001", "p0002"]) for _ in range(2))
    assert first.records == second.records


def test_costs_are_a_table_and_a_picture(tmp_path: Path) -> None:
    (four,) = crowd_costs((4,), 2, 3, 2)
    costs = [four, four._replace(peers=8, cpu_s=2 * four.cpu_s)]
    rows = rows_of(costs)
    assert [row["peers"] for row in rows] == [4, 8]
    assert [row["of the smallest"] for row in rows] == [1, 2]
    draw_costs(costs, tmp_path / "crowd.png")
    assert (tmp_path / "crowd.png").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"expected \.png"):
        draw_costs(costs, tmp_path / "crowd.txt")
