"""A peer whose devices torchrun started: it ends as one that started them itself, refuses another
number of them, and ends when one is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from fakes import spread_crew
from hubs import PATIENCE_S, AtWork, local_place
from motley.clock import Deadline, RealClock
from motley.config import CrewConfig
from motley.distributed.hub import Hub
from motley.exchange.nats.server import free_port
from motley.runs.metrics import LearnerLine, decode_lines, learner_lines, read_metrics

from .test_devices import wait_until_gone
from .test_processes import untimed, weights

pytestmark = [
    pytest.mark.slow,  # processes that import torch
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

NAME = "full0"
ROUNDS = 200  # so many that none is over before somebody looks
TORCHRUN = ("-m", "torch.distributed.run")
TWO = (*TORCHRUN, "--nproc-per-node", "2")


def crew_of(task: Path, rounds: int) -> CrewConfig:
    """A crew of one, on two devices."""
    config = spread_crew(task, ("full",), learning="checkpoint_every = 3", rounds=rounds)
    peers = tuple(msgspec.structs.replace(peer, devices=2) for peer in config.peer)
    return msgspec.structs.replace(config, peer=peers)


class Place(NamedTuple):
    """A hub at work, and what a peer says to join it."""

    folder: Path
    words: Sequence[str]

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def begin(self, launcher: Sequence[str] = (), more: Sequence[str] = ()) -> subprocess.Popen:
        path = os.pathsep.join(sys.path)  # it finds what is found here
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", "motley", *self.words, *more],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@contextmanager
def hub_for(config: CrewConfig, folder: Path, task: Path) -> Iterator[Place]:
    place = local_place()
    hub = Hub.open(config, folder / "hub", place)
    hub.start()
    invitation = hub.register.invitations()[NAME].split()[-1]
    words = ["join", place.url, "--crew", "spread", "--invite", invitation]
    try:
        with AtWork(hub):
            yield Place(folder, [*words, "--data", str(task), "--out", str(folder / "run")])
    finally:
        hub.close()


def ended(process: subprocess.Popen) -> str:
    """What a process said, once it is over."""
    try:
        return process.communicate(timeout=5 * PATIENCE_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it hangs: {process.communicate()[0]}") from None


def finished(*processes: subprocess.Popen) -> None:
    for process in processes:
        said = ended(process)
        assert process.returncode == 0, said


# Ending as without torchrun


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a peer that starts its devices itself."""
    folder = tmp_path_factory.mktemp("alone")
    with hub_for(crew_of(task, rounds=4), folder, task) as place:
        finished(place.begin())
    return place.run


def assert_ended_as(alone: Path, run: Path) -> None:
    lines = learner_lines(read_metrics(run))
    assert untimed([*lines]) == untimed([*learner_lines(read_metrics(alone))])
    assert len([line for line in lines if line.grad_norm]) == 4, "it learned"
    assert weights(run, NAME) == weights(alone, NAME)


def test_two_ranks_of_torchrun_end_as_two_devices(task: Path, tmp_path: Path, alone: Path) -> None:
    with hub_for(crew_of(task, rounds=4), tmp_path, task) as place:
        finished(place.begin(TWO))
    assert_ended_as(alone, place.run)


def test_ranks_of_two_machines_end_as_two_devices(task: Path, tmp_path: Path, alone: Path) -> None:
    """Each has a torchrun of its own, and a LOCAL_RANK of 0."""
    meet = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    machine = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *meet, "--node-rank")
    with hub_for(crew_of(task, rounds=4), tmp_path, task) as place:
        second = place.begin((*machine, "1"), ("--out", str(tmp_path / "nothing")))
        finished(place.begin((*machine, "0")), second)
    assert_ended_as(alone, place.run)
    assert not (tmp_path / "nothing").exists(), "only the first writes"


# Refusing


def test_another_number_of_processes_is_refused_in_a_line_by_each(
    task: Path, tmp_path: Path
) -> None:
    with hub_for(crew_of(task, rounds=4), tmp_path, task) as place:
        process = place.begin(TWO, ("--devices", "3"))
        said = ended(process)
    assert process.returncode
    why = (
        f"peer {NAME}: devices=3, and torchrun started 2 processes; start 3, or give --devices 2\n"
    )
    assert f"error: {why}" in said
    assert f"error: rank 1 ends, since rank 0 failed: {why}" in said
    assert_no_page(said)
    assert not (place.run / "config.toml").exists()


def assert_no_page(said: str) -> None:
    """Torchrun's own is the only traceback."""
    assert "src/motley" not in said, said
    assert said.count("Traceback") <= 1, said


# Losing a rank


def ranks_of(torchrun: int) -> dict[str, int]:
    """Process ids by rank."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    found = {}
    for pid in children:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        found |= {word.removeprefix("RANK="): int(pid) for word in words if word[:5] == "RANK="}
    return found


def lines_of(run: Path) -> list[LearnerLine]:
    path = run / "metrics.jsonl"
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    return [line for line in learner_lines(decode_lines(whole)) if line.round]


def wait_for_round(run: Path, number: int, process: subprocess.Popen) -> None:
    clock = RealClock()
    deadline = Deadline(clock, 5 * PATIENCE_S)
    while len(lines_of(run)) < number:
        assert process.poll() is None, ended(process)
        assert not deadline.passed
        clock.sleep_s(0.05)


def assert_went_on(run: Path, before: Sequence[LearnerLine]) -> None:
    lines = lines_of(run)
    assert [line.round for line in lines] == [*range(1, len(lines) + 1)], "each round once"
    assert [line.reward for line in lines[: len(before)]] == [line.reward for line in before]


@pytest.mark.parametrize(
    ("killed", "reason", "launcher", "devices"),
    [
        ("1", f"error: peer {NAME}: its process for device 1 has gone, and the others", TWO, "2"),
        (
            "0",
            "error: rank 1 ends, since rank 0 failed: it was killed, or its machine has gone\n",
            (),
            "1",
        ),
    ],
    ids=["rank 1, then two again", "rank 0, then one process"],
)
def test_a_rank_that_is_killed_ends_all_and_the_run_goes_on_with_other_devices(
    killed: str, reason: str, launcher: Sequence[str], devices: str, task: Path, tmp_path: Path
) -> None:
    with hub_for(crew_of(task, ROUNDS), tmp_path, task) as place:
        process = place.begin(TWO)
        wait_for_round(place.run, 4, process)
        ranks = ranks_of(process.pid)
        os.kill(ranks[killed], signal.SIGKILL)
        said = ended(process)
        assert process.returncode
        assert reason in said
        assert_no_page(said)
        wait_until_gone([*ranks.values()])
        before = lines_of(place.run)
        assert len(before) < ROUNDS
        process = place.begin(launcher, ("--devices", devices))
        wait_for_round(place.run, len(before) + 3, process)
        process.send_signal(signal.SIGINT)
        said = ended(process)
    assert "left after round" in said
    assert_went_on(place.run, before)


def test_torchrun_starts_all_again_if_it_is_told_to(task: Path, tmp_path: Path) -> None:
    with hub_for(crew_of(task, ROUNDS), tmp_path, task) as place:
        process = place.begin((*TWO, "--max-restarts", "1"))
        wait_for_round(place.run, 4, process)
        ranks = ranks_of(process.pid)
        os.kill(ranks["1"], signal.SIGKILL)
        wait_until_gone([ranks["0"]])
        before = lines_of(place.run)
        wait_for_round(place.run, len(before) + 3, process)
        process.send_signal(signal.SIGINT)
        assert "left after round" in ended(process)
    assert_went_on(place.run, before)
