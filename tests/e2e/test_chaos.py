"""Kill -9 at random, in short (`python tests/chaos.py` does it at length), and that its checks
notice what they are there for.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from chaos import (
    TRAINS,
    disturbed_run,
    faults_despite,
    faults_of,
    metrics_faults,
    undisturbed_run,
)
from fakes import spread_crew
from hubs import local_place
from motley.config import CrewConfig
from motley.distributed.hub import Hub
from motley.exchange import Entry, MemoryLog
from motley.runs.folder import newest_checkpoint
from motley.runs.metrics import MetricsLine, read_metrics

SEED = 19  # kills the server, a peer, the hub, and the two other peers
KILLS = 5


@pytest.mark.slow
def test_a_crew_whose_processes_are_killed_at_random_ends_as_if_nothing_had_happened(
    task: Path, tmp_path: Path
) -> None:
    config = spread_crew(task, TRAINS, learning="checkpoint_every = 4", rounds=24)
    reference = undisturbed_run(config, tmp_path / "undisturbed")
    rng = random.Random(SEED)
    killed: Counter[str] = Counter()
    runs = itertools.count()
    # a fast machine is through before all are killed, or any
    while killed.total() < KILLS or not killed["server"]:
        number = next(runs)
        assert number < 20, f"in {number} runs only these were killed: {dict(killed)}"
        folder = tmp_path / f"disturbed{number}"
        killed += disturbed_run(config, folder, rng, max(1, KILLS - killed.total()), timeout_s=600)
        assert faults_of(config, folder, reference) == []


@pytest.mark.slow
def test_a_crew_on_three_servers_of_which_any_is_killed_ends_as_if_nothing_had_happened(
    task: Path, tmp_path: Path
) -> None:
    config = spread_crew(task, ("full", "last"), rounds=4)
    reference = undisturbed_run(config, tmp_path / "undisturbed")
    folder = tmp_path / "disturbed"
    disturbed_run(config, folder, random.Random(SEED), 3, 600, cluster=True)
    assert faults_of(config, folder, reference) == []


@pytest.mark.slow
def test_beside_a_hostile_peer_the_others_end_as_if_it_had_never_come(
    task: Path, tmp_path: Path
) -> None:
    config = spread_crew(task, ("full", "last", "full"), rounds=6, deadline_s=0.5, quorum=2)
    *honest, hostile = [peer.name for peer in config.peer]
    reference, folder = tmp_path / "undisturbed", tmp_path / "disturbed"
    rng = random.Random(SEED)
    disturbed_run(config, reference, rng, 0, 600, honest)
    disturbed_run(config, folder, rng, 2, 600, honest, hostile)
    assert faults_despite(config, folder, reference, honest) == []
    assert "full0 has met nothing ill" in faults_despite(config, reference, reference, honest)


# The checks


@pytest.fixture(scope="module")
def config(task: Path) -> CrewConfig:
    return spread_crew(task, ("full", "last"), rounds=2)


@pytest.fixture(scope="module")
def reference(config: CrewConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed_run(config, tmp_path_factory.mktemp("reference") / "run")


Records = list[tuple[str, bytes]]


@pytest.fixture
def disturbed(config: CrewConfig, reference: Path, tmp_path: Path) -> Callable[..., Path]:
    """What a disturbed run would have left had it gone as the reference did; `change` alters what
    is on its log.
    """

    def build(change: Callable[[Records], Records] = lambda records: records) -> Path:
        for peer in config.peer:
            shutil.copytree(reference, tmp_path / peer.name)
            write_metrics(
                tmp_path / peer.name,
                [line for line in read_metrics(reference) if line.peer == peer.name],
            )
        hub = Hub.open(config, tmp_path / "hub", local_place())
        hub.start()
        entries: list[Entry] = MemoryLog.copy_of(reference / "groups" / "log.bin").read(0)
        hub.office.log.append(
            change(
                [(entry.id, entry.record) for entry in entries if not entry.id.startswith("hub.")]
            )
        )
        hub.close()
        return tmp_path

    return build


def write_metrics(folder: Path, lines: list[MetricsLine]) -> None:
    (folder / "metrics.jsonl").write_bytes(
        b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    )


@pytest.mark.slow
def test_an_equal_run_has_no_faults(
    config: CrewConfig, reference: Path, disturbed: Callable[..., Path]
) -> None:
    assert faults_of(config, disturbed(), reference) == []


def test_changed_weights_are_noticed(
    config: CrewConfig, reference: Path, disturbed: Callable[..., Path]
) -> None:
    folder = disturbed()
    path = newest_checkpoint(folder / "full0") / "full0" / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert faults_of(config, folder, reference) == ["weights of full0 differ"]


def test_a_group_missing_from_the_log_is_noticed(
    config: CrewConfig, reference: Path, disturbed: Callable[..., Path]
) -> None:
    folder = disturbed(lambda records: [record for record in records if record[0] != "last1.0.1"])
    assert faults_of(config, folder, reference) == [
        "1 records of a chain are missing",
        "lost: ['last1.0.1']",
    ]


def test_a_last_group_missing_from_the_log_is_noticed(
    config: CrewConfig, reference: Path, disturbed: Callable[..., Path]
) -> None:
    folder = disturbed(lambda records: [record for record in records if record[0] != "last1.1.1"])
    assert faults_of(config, folder, reference) == ["lost: ['last1.1.1']"]


def test_a_group_twice_on_the_log_is_noticed(
    config: CrewConfig, reference: Path, disturbed: Callable[..., Path]
) -> None:
    folder = disturbed(lambda records: [*records, ("full0.7.7", dict(records)["full0.0.0"])])
    assert faults_of(config, folder, reference) == [
        "full0.7.7 is a replay",
        "doubled: ['full0.0.0']",
    ]


def without_a_sender(line: MetricsLine) -> MetricsLine:
    return msgspec.structs.replace(line, senders={"last1": line.senders["last1"]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [*lines, lines[-1]], "last1 has rounds [0, 1, 2, 2]"),
        (lambda lines: lines[:-1], "last1 has rounds [0, 1]"),
        (
            lambda lines: [
                *lines[:-1],
                msgspec.structs.replace(lines[-1], loss=lines[-1].loss + 1e-9),
            ],
            "metrics of last1 differ",
        ),
        (
            lambda lines: [*lines[:-1], without_a_sender(lines[-1])],
            "last1 learned in round 2 from {'last1': 2}, refused {}, dropped {}",
        ),
        (
            lambda lines: [
                *lines[:-1],
                msgspec.structs.replace(lines[-1], dropped={"full0": {"late": 1}}),
            ],
            "last1 learned in round 2 from {'full0': 2, 'last1': 2}, refused {}, dropped "
            "{'full0': {'late': 1}}",
        ),
    ],
    ids=["learned twice", "not learned", "another loss", "without a crewmate", "a group dropped"],
)
def test_metrics_that_differ_are_noticed(
    change: Callable[[list[MetricsLine]], list[MetricsLine]],
    words: str,
    config: CrewConfig,
    reference: Path,
) -> None:
    expected = read_metrics(reference)
    lines = [line for line in expected if line.peer == "last1"]
    assert metrics_faults(config, "last1", lines, expected) == []
    assert words in metrics_faults(config, "last1", change(lines), expected)
