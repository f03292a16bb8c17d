"""A peer on two devices in a process of its own: it trains, and goes on when one is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fakes import spread_crew
from hubs import PATIENCE_S
from motley.clock import Deadline, RealClock
from motley.config import CrewConfig
from motley.distributed.processes import ProcessCrew
from motley.distributed.recovery import LearnerState
from motley.learning.checkpoint import load_manifest
from motley.runs.building import trained_policies
from motley.runs.folder import newest_checkpoint, peer_folder
from motley.runs.local import LocalCrew
from motley.runs.metrics import LearnerLine, learner_lines, read_metrics

from .test_processes import bounded, children, finish

pytestmark = [
    pytest.mark.slow,  # a process per device
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

# so many that none is over before somebody looks
ROUNDS, NAME = 24, "full0"


@pytest.fixture(scope="module")
def task(task: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        yield task


def crew_of(task: Path, devices: int) -> CrewConfig:
    """A crew of one."""
    config = spread_crew(task, ("full",), learning="checkpoint_every = 3", rounds=ROUNDS)
    peers = tuple(msgspec.structs.replace(peer, devices=devices) for peer in config.peer)
    crew = msgspec.structs.replace(config.crew, processes=True)
    return msgspec.structs.replace(config, crew=crew, peer=peers)


def gather(crew: ProcessCrew) -> Iterator[list[LearnerLine]]:
    assert list(bounded(crew.gather()))[-1] == 1
    return crew.rounds()


def forked(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def device_processes() -> list[int]:
    """Those of the peer's other devices, which its own server of processes forks."""
    return [pid for helper in forked(children()[NAME]) for pid in forked(helper)]


def wait_until_gone(processes: list[int]) -> None:
    clock = RealClock()
    deadline = Deadline(clock, PATIENCE_S)
    while left := [pid for pid in processes if runs(pid)]:
        assert not deadline.passed, f"processes {left} of devices still run"
        clock.sleep_s(0.05)


def runs(process: int) -> bool:
    path = Path(f"/proc/{process}/stat")
    try:
        return path.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def learned(folder: Path) -> list[LearnerLine]:
    return [line for line in learner_lines(read_metrics(folder)) if line.round]


def assert_whole(folder: Path) -> None:
    """Every round was learned from, once."""
    lines = learned(folder)
    assert [line.round for line in lines] == [*range(1, ROUNDS + 1)]
    assert [line.version for line in lines] == [*range(1, ROUNDS + 1)]
    state = load_manifest(newest_checkpoint(peer_folder(folder, NAME)), LearnerState).peer
    assert (state.version, state.learned_rounds, state.sampled_rounds) == (ROUNDS,) * 3
    assert set(trained_policies(folder)) == {NAME}
    assert children() == {}


def test_a_peer_on_two_devices_trains_and_takes_them_with_it_when_it_is_killed(
    task: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    crew = ProcessCrew.start(crew_of(task, devices=2), tmp_path / "run", said.append)
    rounds = gather(crew)
    devices = device_processes()
    assert len(devices) == 1
    os.kill(children()[NAME], signal.SIGKILL)
    finish(rounds)
    assert said.count(f"peer {NAME} was killed by signal 9; starting it again") == 1
    wait_until_gone(devices)
    assert_whole(crew.folder)
    local = LocalCrew.start(crew_of(task, devices=1), tmp_path / "local")
    (ours,) = next(local.rounds())
    theirs = learned(crew.folder)[0]
    assert theirs.loss == pytest.approx(ours.loss, abs=1e-6)
    assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=1e-4)
    same = (theirs.reward, theirs.num_tokens, theirs.num_scored)
    assert same == (ours.reward, ours.num_tokens, ours.num_scored), "the same rollouts"


@pytest.mark.parametrize("devices", [1, 2])
def test_when_a_device_is_killed_the_crew_ends_and_goes_on_with_as_many_as_there_are(
    devices: int, task: Path, tmp_path: Path
) -> None:
    crew = ProcessCrew.start(crew_of(task, devices=2), tmp_path / "run")
    rounds = gather(crew)
    (device,) = device_processes()
    os.kill(device, signal.SIGKILL)
    with pytest.raises(
        ValueError,
        match=rf"peer {NAME} stopped with an error: .*device 1 was killed by signal 9.*--resume",
    ):
        finish(rounds)
    assert children() == {}
    before = learned(crew.folder)
    finish(gather(ProcessCrew.resume(crew.folder, config=crew_of(task, devices))))
    assert_whole(crew.folder)
    rewards = [line.reward for line in learned(crew.folder)]
    assert rewards[: len(before)] == [line.reward for line in before]
