"""A crew with a process for every peer: the same lines and weights as in one process, whatever dies
on the way.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar, cast

import msgspec
import pytest

from fakes import spread_crew
from hubs import PATIENCE_S, local_place
from motley.clock import Deadline, RealClock
from motley.config import CrewConfig, config_text, read_config, write_config
from motley.distributed.hub import Hub, HubRunsError
from motley.distributed.join import Brings
from motley.distributed.participant import Participant
from motley.distributed.processes import (
    LEFT,
    GrowingFile,
    ProcessCrew,
    processes,
    stay,
    take_part,
)
from motley.learning.traces import read_trace, traced_rounds
from motley.runs.building import trained_policies
from motley.runs.folder import newest_checkpoint, peer_folder
from motley.runs.local import LocalCrew
from motley.runs.metrics import LearnerLine, MetricsLine, append_lines, read_metrics
from motley.runs.resuming import read_changes

T = TypeVar("T")

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
    assert list(bounded(crew.gather()))[-1] == len(NAMES)
    return crew.rounds()


def bounded(events: Iterator[T]) -> Iterator[T]:
    """All there are, or a failure if they do not end."""
    deadline = Deadline(RealClock(), 5 * PATIENCE_S)
    for event in events:
        assert not deadline.passed
        yield event


def finish(rounds: Iterator[list[MetricsLine]]) -> None:
    for _ in bounded(rounds):
        pass


def until_round(rounds: Iterator[list[MetricsLine]], number: int) -> None:
    for lines in bounded(rounds):
        if lines and lines[0].round == number:
            return
    raise AssertionError(f"there is no round {number}")


def untimed(lines: list[MetricsLine]) -> list[MetricsLine]:
    return [
        msgspec.structs.replace(line, timing=None, waiting=None, unheard=None) for line in lines
    ]


def weights(folder: Path, name: str) -> dict[str, bytes]:
    model = newest_checkpoint(peer_folder(folder, name)) / name / "model"
    return {path.name: path.read_bytes() for path in model.glob("*.safetensors")}


def assert_ended_as(local: Path, folder: Path) -> None:
    assert untimed(read_metrics(folder)) == untimed(read_metrics(local))
    for name in NAMES:
        assert weights(folder, name) == weights(local, name), name
        assert pushes(folder, name) == pushes(local, name)
    assert children() == {}


def pushes(folder: Path, name: str) -> dict[int, list[bytes]]:
    """By round, of every traced rollout; their places in the log depend on who was quick."""
    traces = {round: read_trace(folder, name, round) for round in traced_rounds(folder, name)}
    rounds = read_config(folder / "config.toml").crew.rounds
    assert [*traces] == [*range(1, rounds + 1)]
    return {
        round: sorted(one.push.tobytes() for one in trace.rollouts) if trace else []
        for round, trace in traces.items()
    }


def test_a_crew_of_processes_ends_as_one_in_a_single_process(
    config: CrewConfig, local: Path, tmp_path: Path
) -> None:
    crew = ProcessCrew.start(config, tmp_path / "run")
    rounds = gather(crew)
    yielded = [line for lines in bounded(rounds) for line in lines]
    assert yielded == read_metrics(crew.folder)
    assert crew.finished_rounds == 8
    assert_ended_as(local, crew.folder)
    assert all(line.grad_norm > 0 for line in yielded if line.round)
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


def stopped_and_resumed(config: CrewConfig, tmp_path: Path) -> Path:
    """The run folder of a crew that was stopped on its way, went on and ended as one that was not.

    However late the order to stop comes, there are rounds left; so it ends some rounds later.
    """
    crew = ProcessCrew.start(with_rounds(config, 1000), tmp_path / "run")
    rounds = gather(crew)
    until_round(rounds, 1)
    crew.save()
    rounds.close()
    assert children() == {}
    # what the peers say: the crew may have read less of it
    last = max(read_metrics(peer_folder(crew.folder, name))[-1].round for name in NAMES)
    ends = with_rounds(config, last + 2)
    finish(gather(ProcessCrew.resume(crew.folder, config=ends)))
    local = LocalCrew.start(ends, tmp_path / "local")
    for _ in local.rounds():
        pass
    assert_ended_as(local.folder, crew.folder)
    return crew.folder


def with_rounds(config: CrewConfig, rounds: int) -> CrewConfig:
    return msgspec.structs.replace(config, crew=msgspec.structs.replace(config.crew, rounds=rounds))


def last_round(folder: Path) -> list[MetricsLine]:
    lines = read_metrics(folder)
    return [line for line in lines if line.round == lines[-1].round]


def test_a_crew_stopped_and_resumed_ends_the_same(config: CrewConfig, tmp_path: Path) -> None:
    stopped_and_resumed(config, tmp_path)


def test_a_finished_crew_is_not_started_again_and_one_that_goes_on_hides_nothing(
    config: CrewConfig, tmp_path: Path
) -> None:
    short = with_rounds(config, 3)
    crew = ProcessCrew.start(short, tmp_path / "run")
    finish(gather(crew))
    before = read_metrics(crew.folder)
    again = ProcessCrew.resume(crew.folder)
    assert list(again.gather()) == list(again.rounds()) == []
    assert children() == {}
    assert again.finished
    assert again.finished_rounds == 3
    assert read_metrics(crew.folder) == before

    longer = ProcessCrew.resume(crew.folder, config=config)
    assert not longer.finished
    coming = longer.gather()
    next(coming)
    assert read_metrics(crew.folder) == before, "the lines stay while the peers come back"
    finish(coming)
    rounds = [lines[0].round for lines in bounded(longer.rounds()) if lines]
    assert rounds == [4, 5, 6, 7, 8], "what was told is not told again"
    lines = read_metrics(crew.folder)
    assert lines[: len(before)] == before
    assert [line.round for line in lines] == [round for round in range(9) for _ in NAMES]


def test_a_peer_whose_lines_are_lost_leaves_those_of_the_crew_as_they_were(
    config: CrewConfig, tmp_path: Path
) -> None:
    short = with_rounds(config, 2)
    crew = ProcessCrew.start(short, tmp_path / "run")
    finish(gather(crew))
    before = read_metrics(crew.folder)
    (crew.folder / "peers" / "lora1" / "metrics.jsonl").unlink()
    assert ProcessCrew.resume(crew.folder).finished_rounds == 2
    assert read_metrics(crew.folder) == before


def test_peers_that_ended_with_fewer_steps_than_rounds_are_waited_for_when_the_crew_goes_on(
    config: CrewConfig, tmp_path: Path
) -> None:
    short = with_rounds(config, 4)
    crew = ProcessCrew.start(short, tmp_path / "run")
    crew.close()
    for name in NAMES:
        folder = crew.folder / "peers" / name
        (folder / "checkpoints" / "round-000002").mkdir(parents=True)
        lines = [LearnerLine(round=number, peer=name, version=number) for number in (0, 1, 2, 4)]
        append_lines(folder / "metrics.jsonl", lines)
    again = ProcessCrew.resume(crew.folder)
    assert again.finished_rounds == 4
    again.close()
    for longer in (config, None):
        on = ProcessCrew.resume(crew.folder, config=longer)
        assert on.finished_rounds == 2, "they take the line of round 4 back, and learn on"
        on.close()
        kept = [line for line in read_metrics(crew.folder) if line.round]
        assert [line.round for line in kept] == [1, 1, 2, 2]


def test_a_crew_that_trains_is_not_told_to_go_on_differently(
    config: CrewConfig, tmp_path: Path
) -> None:
    crew = ProcessCrew.start(config, tmp_path / "run")
    longer = with_rounds(config, 20)
    with pytest.raises(HubRunsError, match="already running"):
        ProcessCrew.resume(crew.folder, config=longer)
    crew.close()
    assert read_config(crew.folder / "config.toml") == config
    assert read_changes(crew.folder) == []


def test_processes_stopped_and_resumed_are_pulled_toward_where_their_run_began(
    task: Path, tmp_path: Path
) -> None:
    pull = '[objective]\nbeta = 0.1\ntoward = "reference"'
    config = spread_crew(task, ("full", "lora"), learning=pull, processes=True)
    apart = [line.reference_kl for line in last_round(stopped_and_resumed(config, tmp_path))]
    assert len(apart) == len(NAMES)
    assert min(apart) > 0


def test_processes_stopped_and_resumed_keep_the_same_successes(task: Path, tmp_path: Path) -> None:
    row = {"objective": "uplift", "variant": "kept", "learning": '[objective]\nheld = "all"'}
    config = spread_crew(task, ("full", "lora"), processes=True, **row)
    last = [line.kept for line in last_round(stopped_and_resumed(config, tmp_path))]
    assert len(last) == len(NAMES)
    assert all(last)


# Asked to leave


def test_a_peer_that_somebody_else_asks_to_leave_is_started_again(
    config: CrewConfig, local: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    crew = ProcessCrew.start(config, tmp_path / "run", said.append)
    rounds = gather(crew)
    until_round(rounds, 1)
    os.kill(children()["lora1"], signal.SIGINT)
    finish(rounds)
    assert said.count("peer lora1 has left; starting it again") == 1
    assert_ended_as(local, crew.folder)


def test_who_will_not_wait_until_peers_have_saved_kills_them_and_nothing_is_lost(
    config: CrewConfig, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = ProcessCrew.start(config, tmp_path / "run")
    rounds = gather(crew)
    until_round(rounds, 1)

    def interrupted(hub: Hub) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Hub, "tick", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rounds.close()
    deadline = Deadline(RealClock(), PATIENCE_S)
    while children():
        assert not deadline.passed
        RealClock().sleep_s(0.05)
    finish(gather(ProcessCrew.resume(crew.folder)))
    assert_ended_as(local, crew.folder)


class Endless:
    """A participant whose crewmate is gone: it waits, and says so, and nothing comes of it."""

    stuck = ""
    finished = False

    def __init__(self) -> None:
        self.did: list[str] = []

    def rounds(self) -> Iterator[str]:
        for _ in range(100):
            yield "waiting"
        raise AssertionError("it did not heed that it was asked to leave")

    def save(self) -> None:
        self.did.append("saved")

    def close(self) -> None:
        self.did.append("closed")


class AskingParent:
    """Asks its child to leave in the very moment in which that looks whether it is alive."""

    def __init__(self, asks: bool, alive: bool) -> None:
        self._asks, self._alive = asks, alive

    def is_alive(self) -> bool:
        if self._asks:
            os.kill(os.getpid(), signal.SIGINT)
        return self._alive


@pytest.fixture
def keyboard() -> Iterator[None]:
    """What Ctrl-C does, put back in the end."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("keyboard")
@pytest.mark.parametrize("parent", [AskingParent(True, True), AskingParent(False, False), None])
def test_a_peer_that_is_asked_to_leave_or_has_no_parent_saves_and_leaves(
    parent: AskingParent | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    participant = Endless()
    assert not stay(cast(Participant, participant))
    assert participant.did == ["saved", "closed"]


@pytest.mark.usefixtures("keyboard")
@pytest.mark.parametrize("ignored", [False, True], ids=["", "though its parent ignores Ctrl-C"])
def test_a_peer_on_its_way_into_a_crew_that_cannot_be_reached_leaves_when_asked(
    ignored: bool, config: CrewConfig, tmp_path: Path
) -> None:
    place = local_place()
    hub = Hub.open(config, tmp_path / "hub", place)
    invitation = hub.register.invitations()["lora1"].split()[-1]
    hub.close()  # it was never started
    folder = tmp_path / "lora1"
    folder.mkdir()
    (folder / "invitation").write_text(invitation)
    write_config(config, folder / "config.toml")  # so it has come before, and is patient
    arguments = (place.url, config.crew.name, folder, 1, Brings())
    context = multiprocessing.get_context("spawn") if ignored else processes
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = context.Process(target=take_part, args=arguments)
    child.start()
    deadline = Deadline(RealClock(), PATIENCE_S)
    while not (folder / "peer.key").exists():
        assert not deadline.passed
        RealClock().sleep_s(0.05)
    assert child.pid
    os.kill(child.pid, signal.SIGINT)
    child.join(PATIENCE_S)
    code = child.exitcode
    child.kill()
    child.join()
    assert code == LEFT


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


# Metrics as they are written


@pytest.fixture
def growing(tmp_path: Path) -> tuple[Path, GrowingFile]:
    path = tmp_path / "metrics.jsonl"
    return path, GrowingFile(path)


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def test_lines_are_read_once_and_when_they_are_whole(growing: tuple[Path, GrowingFile]) -> None:
    path, file = growing
    assert file.new_lines() == []  # before there is one
    append(path, b"one\ntwo\nthr")
    assert file.new_lines() == [b"one\n", b"two\n"]
    assert file.new_lines() == []
    append(path, b"ee\n")
    assert file.new_lines() == [b"three\n"]
    append(path, b"four\nfive\n")
    assert file.new_lines() == [b"four\n", b"five\n"]


def test_only_what_is_new_is_read(
    growing: tuple[Path, GrowingFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = growing
    append(path, b"a line\n" * 10_000)
    assert len(file.new_lines()) == 10_000
    num_read: list[int] = []

    class Counted(io.BufferedReader):
        def read(self, *size: int) -> bytes:
            content = super().read(*size)
            num_read.append(len(content))
            return content

    monkeypatch.setattr(Path, "open", lambda path, mode: Counted(io.FileIO(path, mode)))
    assert file.new_lines() == []
    assert sum(num_read) == len(b"a line\n")  # by which it is known that nothing was cut


@pytest.mark.parametrize(
    "again", [b"", b"one\n", b"one\nTWO\n", b"one\nTWO\nTHREE\nFOUR\n", b"one\nlonger\nx"]
)
def test_a_file_that_was_cut_and_written_again_is_read_from_the_start(
    growing: tuple[Path, GrowingFile], again: bytes
) -> None:
    path, file = growing
    append(path, b"one\ntwo\nthree\n")
    file.new_lines()
    path.write_bytes(again)
    whole = again[: again.rfind(b"\n") + 1].splitlines(keepends=True)
    assert file.new_lines() == whole
    append(path, b"\n")
    assert b"".join(file.new_lines()) == (again + b"\n")[len(b"".join(whole)) :]


def test_a_reward_module_beside_the_crew_file_is_found_in_processes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir(), elsewhere.mkdir()
    (home / "marked.py").write_text("def f(completions):\n    return [0.5] * len(completions)\n")
    (elsewhere / "marked.py").write_text("raise SystemExit('the wrong one')\n")
    rows = "".join(f'{{"prompt": "sort {n}=", "answer": "1"}}\n' for n in range(40))
    (home / "p.jsonl").write_text(rows)
    (home / "crew.toml").write_text(
        '[crew]\nname = "c"\ntask = "file:p.jsonl"\nobjective = "ftis"\nrounds = 1\n'
        "group_size = 2\nproblems_per_round = 2\nprocesses = true\n"
        '[task]\nreward = "marked:f"\n[sampling]\nmax_tokens = 4\n[evaluate]\nproblems = 1\n'
        '[[peer]]\nname = "a"\nmodel = "tiny:0.3m"\n[[peer]]\nname = "b"\nmodel = "tiny:0.3m"\n'
    )
    monkeypatch.chdir(elsewhere)
    crew = ProcessCrew.start(read_config(home / "crew.toml"), tmp_path / "run")
    assert list(bounded(crew.gather()))[-1] == 2
    lines = [line for some in bounded(crew.rounds()) for line in some if line.round == 1]
    assert [line.reward for line in lines] == [0.5, 0.5]
    assert not any(line.refused for line in lines)


REWARDS = """
import os, random

def luck(prompts, completions, **columns):
    return [random.random() for _ in completions]

def machine(prompts, completions, **columns):
    return [float(os.getpid())] * len(completions)
"""


@pytest.fixture
def rewards(task: Path) -> Path:
    (task / "unlike_rewards.py").write_text(REWARDS)
    return task


@pytest.mark.parametrize("problems", [4, 6], ids=["few groups", "groups enough to mute a sender"])
def test_rewards_that_are_never_the_same_end_a_crew_with_the_cause_and_it_goes_on_on_trust(
    problems: int, rewards: Path, tmp_path: Path
) -> None:
    config = spread_crew(
        rewards, task="unlike_rewards:luck", problems_per_round=problems, processes=True
    )
    crew = ProcessCrew.start(config, tmp_path / "run")
    words = (
        r"peer full\d stopped with an error: the reward function gives another number each time: "
        r"\S+, then \S+, for '.*set crew\.check_rewards = false"
    )
    with pytest.raises(ValueError, match=words):
        finish(gather(crew))
    assert children() == {}
    trusting = msgspec.structs.replace(config.crew, check_rewards=False)
    resumed = ProcessCrew.resume(crew.folder, config=msgspec.structs.replace(config, crew=trusting))
    finish(gather(resumed))
    lines = read_metrics(crew.folder)
    assert resumed.finished_rounds == 3
    assert all(len(line.senders) == 2 for line in lines if line.round), "a group was lost"


def test_rewards_that_every_machine_finds_differently_end_a_crew_with_what_was_refused(
    rewards: Path, tmp_path: Path
) -> None:
    config = spread_crew(rewards, task="unlike_rewards:machine", processes=True)
    crew = ProcessCrew.start(config, tmp_path / "run")
    words = (
        r"peer full\d stopped with an error: round 1 cannot go on: groups of full\d came and do "
        r"not count, and it needs those of 2 peers, refused full\d: 2 for reward; the last because "
        r"rollout 0 claims a reward of .*; computed here it is .*set crew\.check_rewards = false"
    )
    with pytest.raises(ValueError, match=words):
        finish(gather(crew))
    assert children() == {}
