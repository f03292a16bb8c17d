"""A crew with a process for every peer: the same lines and weights as in one process, whatever dies
on the way.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fakes import spread_crew
from motley.config import CrewConfig, config_text
from motley.crew import LocalCrew
from motley.processes import ProcessCrew
from motley.run import MetricsLine, newest_checkpoint, peer_folder, read_metrics, trained_policies

pytestmark = pytest.mark.slow  # a process per peer

NAMES = ("full0", "lora1")


@pytest.fixture(scope="module")
def task(task: Path) -> Iterator[Path]:
    """Children look for modules where their parent does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)  # one thread for every child, as here
        yield task


@pytest.fixture(scope="module")
def config(task: Path) -> CrewConfig:
    return spread_crew(
        task, ("full", "lora"), learning="checkpoint_every = 3", rounds=8, processes=True
    )


@pytest.fixture(scope="module")
def local(config: CrewConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same crew in one process."""
    crew = LocalCrew.start(config, tmp_path_factory.mktemp("local") / "run")
    for _ in crew.rounds():
        pass
    return crew.folder


def children() -> dict[str, int]:
    """Process ids of the peers."""
    return {
        child.name.removeprefix("motley "): child.pid or 0
        for child in multiprocessing.active_children()
    }


def gather(crew: ProcessCrew) -> Iterator[list[MetricsLine]]:
    """Start everyone; the crew's rounds."""
    assert list(crew.gather())[-1] == len(NAMES)
    return crew.rounds()


def finish(rounds: Iterator[list[MetricsLine]]) -> None:
    for _ in rounds:
        pass


def until_round(rounds: Iterator[list[MetricsLine]], number: int) -> None:
    for lines in rounds:
        if lines and lines[0]["round"] == number:
            return
    raise AssertionError(f"there is no round {number}")


def untimed(lines: list[MetricsLine]) -> list[MetricsLine]:
    return [{key: line[key] for key in line.keys() - {"timing", "waiting"}} for line in lines]


def weights(folder: Path, name: str) -> dict[str, bytes]:
    model = newest_checkpoint(peer_folder(folder, name)) / name / "model"
    return {path.name: path.read_bytes() for path in model.glob("*.safetensors")}


def assert_ended_as(local: Path, folder: Path) -> None:
    assert untimed(read_metrics(folder)) == untimed(read_metrics(local))
    for name in NAMES:
        assert weights(folder, name) == weights(local, name), name
    assert children() == {}


def test_a_crew_of_processes_ends_as_one_in_a_single_process(
    config: CrewConfig, local: Path, tmp_path: Path
) -> None:
    crew = ProcessCrew.start(config, tmp_path / "run")
    rounds = gather(crew)
    yielded = [line for lines in rounds for line in lines]
    assert yielded == read_metrics(crew.folder)
    assert crew.finished_rounds == 8
    assert_ended_as(local, crew.folder)
    assert all(line["grad_norm"] > 0 for line in yielded if line["round"])
    assert set(trained_policies(crew.folder)) == set(NAMES)


def test_a_peer_killed_is_started_again_and_the_crew_ends_the_same(
    config: CrewConfig, local: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    crew = ProcessCrew.start(config, tmp_path / "run", said.append)
    rounds = gather(crew)
    os.kill(children()["lora1"], signal.SIGKILL)
    finish(rounds)
    assert said.count("peer lora1 was killed by signal 9; starting it again") == 1
    assert_ended_as(local, crew.folder)


def test_a_crew_stopped_and_resumed_ends_the_same(
    config: CrewConfig, local: Path, tmp_path: Path
) -> None:
    crew = ProcessCrew.start(config, tmp_path / "run")
    rounds = gather(crew)
    until_round(rounds, 1)
    crew.save()
    rounds.close()
    assert children() == {}
    resumed = ProcessCrew.resume(crew.folder)
    finish(gather(resumed))
    assert_ended_as(local, crew.folder)


def test_an_error_of_a_peer_ends_the_crew_and_is_shown(config: CrewConfig, tmp_path: Path) -> None:
    crew = ProcessCrew.start(config, tmp_path / "run")
    other = msgspec.structs.replace(config, crew=msgspec.structs.replace(config.crew, seed=1))
    (crew.folder / "peers" / "lora1").mkdir()
    (crew.folder / "peers" / "lora1" / "config.toml").write_text(config_text(other))
    with pytest.raises(
        ValueError,
        match=(
            r"peer lora1 stopped with an error: .*lora1 holds a run of other settings; choose "
            r"another folder"
        ),
    ):
        gather(crew)
    assert children() == {}
