"""Members of a crew on a hub, in one process and in turn: whoever leaves, is cut off or cheats, the
others end as they must.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from architectures import text_tokenizer, write_model
from exchange.nats_server import OpenCluster, Regions, read_all
from fakes import entry, spread_crew, write_task
from hubs import PATIENCE_S, AtWork, local_place
from motley.clock import Deadline, RealClock
from motley.config import CrewConfig, EnginePart, OpenAI, config_text
from motley.distributed import enrolment, participant
from motley.distributed.enrolment import read_membership
from motley.distributed.hub import Hub
from motley.distributed.join import Brings, join
from motley.distributed.learner import LearnerRole
from motley.distributed.orders import give_order
from motley.distributed.participant import Participant
from motley.distributed.register import Order, Place
from motley.engines import TorchEngine
from motley.engines.engine import Completion
from motley.exchange import Entry, LogError, decode, unpack
from motley.exchange.nats import presence
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.names import Names
from motley.learning import waiting
from motley.learning.checkpoint import checkpoints
from motley.learning.journal import WrittenStep
from motley.learning.select import Candidate
from motley.learning.waiting import Waiting
from motley.peers.peer import Peer
from motley.records import FIRST_PREVIOUS, Group, Sampling
from motley.runs import building
from motley.runs.local import LocalCrew
from motley.runs.metrics import MetricsLine, learner_lines, read_metrics
from motley.trust import GroupPlace, Identity
from motley.trust.chain import Chain
from motley.trust.invitation import Invitation

# of the NATS client, when the server refuses to take it back
pytestmark = [
    pytest.mark.slow,  # whole crews, each with a server
    pytest.mark.filterwarnings("ignore:unclosed <StreamWriter"),
]


class ShiftedClock(RealClock):
    """The machine's, hours later when a test says so."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def skip(self, seconds: float = 10_000.0) -> None:
        self._skipped_s += seconds

    def elapsed_s(self) -> float:
        return super().elapsed_s() + self._skipped_s


class House:
    """A hub at work on a thread of its own, and participants that are stepped in turn.

    `clock` is theirs: by it deadlines and outages are measured.
    """

    def __init__(self, config: CrewConfig, folder: Path, place: Place | None = None) -> None:
        self.config, self.folder, self.clock = config, folder, ShiftedClock()
        self._place = place or local_place()
        self.open_hub()
        lines = self.hub.register.invitations()
        self.invitations = {name: line.split()[-1] for name, line in lines.items()}
        self.names = [peer.name for peer in config.peer]
        self.members: dict[str, Participant] = {}
        self.lines: dict[str, list[MetricsLine]] = {name: [] for name in self.names}
        self.said: dict[str, list[str]] = {name: [] for name in self.names}
        self._runs: dict[str, Iterator[MetricsLine | str]] = {}

    # The hub

    def open_hub(self) -> None:
        self.hub = Hub.open(self.config, self.folder / "hub", self._place)
        self.hub.start()
        self._at_work = AtWork(self.hub)

    @property
    def url(self) -> str:
        return self._place.url

    def pause(self) -> None:
        """Have the hub answer nobody, and start no server again, until `get_server_back`."""
        self._at_work.pause()

    def lose_server(self) -> None:
        self.pause()
        self.hub.server.kill()

    def get_server_back(self) -> None:
        self._at_work = AtWork(self.hub)

    def revoke(self, peer: str) -> None:
        give_order(self.hub.folder, Order("revoke", peer))

    def invite(self, peer: str) -> None:
        line = give_order(self.hub.folder, Order("invite", peer))
        self.invitations[peer] = line.split()[-1]

    def entries(self) -> list[Entry]:
        return self.hub.office.log.read(0, 10**5)

    def groups(self, sender: str = "") -> list[Group]:
        contents = [decode(unpack(entry.record).body)[1] for entry in self.entries()]
        return [c for c in contents if isinstance(c, Group) and sender in ("", c.origin.peer)]

    # Members

    def join(
        self,
        *names: str,
        data: Path | None = None,
        model: str = "",
        device: str = "",
        url: str = "",
    ) -> None:
        for name in names or self.names:
            self.members[name] = join(
                url or self.url,
                "spread",
                self.invitations[name],
                self.folder / name,
                self.said[name].append,
                Brings(data, model, device),
                clock=self.clock,
            )
            self._runs[name] = self.members[name].rounds()

    def role(self, name: str) -> LearnerRole:
        return self.members[name].role

    def peer(self, name: str) -> Peer:
        return self.role(name).peer

    def leave(self, name: str) -> None:
        """Go with a word but without saving: what a run folder of one that was killed looks
        like.
        """
        self._runs.pop(name, None)
        self.members.pop(name).close()

    def cut_off(self, name: str) -> None:
        """Lose the network for good, and without a word."""
        self.members[name].station.log.connection.close()

    def turn(self, *names: str) -> None:
        """One step of each that has not finished."""
        for name in names or list(self._runs):
            event = next(self._runs[name], None) if name in self._runs else None
            if event is None:
                self._runs.pop(name, None)
            elif isinstance(event, str):
                self.said[name].append(event)
            else:
                self.lines[name].append(event)

    def until(self, condition: Callable[[], bool], *names: str) -> None:
        """Step until it is so."""
        deadline = Deadline(RealClock(), PATIENCE_S)
        while not condition():
            assert not deadline.passed, {name: said[-3:] for name, said in self.said.items()}
            self.turn(*names)

    def during(self, seconds: float, *names: str) -> None:
        """Step for a while, in which something must not happen."""
        over = Deadline(RealClock(), seconds)
        self.until(lambda: over.passed, *names)

    def finish(self, *names: str) -> None:
        names = names or tuple(self._runs)
        self.until(lambda: not any(name in self._runs for name in names), *names)

    def learned(self, name: str) -> int:
        return self.members[name].finished_rounds

    def close(self) -> None:
        for name in list(self.members):
            self._runs.pop(name, None)
            self.members.pop(name).close()
        self._at_work.pause()
        self.hub.close()


HouseOf = Callable[[CrewConfig], House]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "RETRY_S", 0.05)
    monkeypatch.setattr(participant, "WAIT_S", 0.05)


@pytest.fixture
def house_of(tmp_path: Path) -> Iterator[HouseOf]:
    with ExitStack() as houses:

        def build(config: CrewConfig) -> House:
            house = House(config, tmp_path)
            houses.callback(house.close)
            return house

        yield build


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Callable[[CrewConfig], LocalCrew]:
    """The same crew in one process, trained to its end; once for all tests."""
    found: dict[bytes, LocalCrew] = {}

    def run(config: CrewConfig) -> LocalCrew:
        key = msgspec.json.encode(config)
        if key not in found:
            found[key] = LocalCrew.start(config, tmp_path_factory.mktemp("local") / "run")
            for _ in found[key].rounds():
                pass
        return found[key]

    return run


def untimed(lines: Sequence[MetricsLine], peer: str) -> list[MetricsLine]:
    return [
        msgspec.structs.replace(line, timing=None, waiting=None, unheard=None)
        for line in lines
        if line.peer == peer
    ]


def assert_same_weights(house: House, local: LocalCrew) -> None:
    for peer in local.peers:
        ours = weights_of(house.members[peer.me.name])
        for parameter, value in peer.learner.policy.model.named_parameters():
            assert torch.equal(ours[parameter], value), f"{peer.me.name}: {parameter}"


def weights_of(member: Participant) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().clone()
        for name, value in member.role.peer.learner.policy.model.named_parameters()
    }


def assert_ends_as(house: House, local: LocalCrew) -> None:
    """Weights bit for bit, metrics but for times, and the log."""
    assert_same_weights(house, local)
    for name in house.names:
        assert untimed(read_metrics(house.folder / name), name) == untimed(
            read_metrics(local.folder), name
        )
    contents = [decode(unpack(entry.record).body)[1] for entry in local._log.read(0, 10**5)]
    assert unstamped(house.groups()) == unstamped(c for c in contents if isinstance(c, Group))
    assert_whole_chains(house.entries())


def unstamped(groups: Iterable[Group]) -> list[Group]:
    """In the order of their ids, whenever they were made."""
    made = (msgspec.structs.replace(group, created_s=0.0) for group in groups)
    return sorted(made, key=lambda group: group.id)


def assert_whole_chains(entries: Sequence[Entry]) -> None:
    chains: dict[bytes, Chain] = {}
    for found in entries:
        sealed = unpack(found.record)
        stamp, _ = decode(sealed.body)
        assert chains.setdefault(stamp.key, Chain()).add(stamp, sealed.hash) == "", found.id
    assert not any(chain.missing for chain in chains.values())


def steps_of(house: House, name: str) -> list[WrittenStep]:
    return [
        msgspec.json.decode(line, type=WrittenStep)
        for line in (house.folder / name / "journal.jsonl").read_bytes().splitlines()
    ]


def assert_learned_once(house: House) -> None:
    """Every group is on the log once, and nobody has learned from one twice or has lost one."""
    rounds, slots = range(house.config.crew.rounds), range(house.config.problems_per_peer)
    assert sorted(group.id for group in house.groups()) == sorted(
        f"{n}.{r}.{s}" for n in house.names for r in rounds for s in slots
    )
    assert_whole_chains(house.entries())
    for name in house.names:
        peer, lines = house.peer(name), read_metrics(house.folder / name)
        peer.receive_all()  # who is done does not wait for what others have still to send
        assert [line.version for line in lines if line.senders is not None] == list(
            range(1, house.learned(name) + 1)
        )
        learned = sum(sender.groups for line in lines for sender in (line.senders or {}).values())
        assert peer.admitted.complete == dict.fromkeys(house.names, len(rounds))
        assert learned + len(peer.waiting) + peer.waiting.dropped.total() == len(house.groups())
        journal = Counter(position for step in steps_of(house, name) for position in step.positions)
        assert max(journal.values()) == 1


# Equal to a crew in one process


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "uplift", "variant": "relative"},
        {"layout": "horizontal", "objective": "gepo", "group_size": 6, "problems_per_round": 2},
        {"hear": 1},
    ],
    ids=["vertical", "horizontal", "hearing"],
)
def test_members_on_a_hub_end_as_a_crew_in_one_process(
    settings: dict[str, Any], task: Path, house_of: HouseOf, local: Callable[..., LocalCrew]
) -> None:
    config = spread_crew(task, ("full", "lora", "last"), rounds=3, **settings)
    house = house_of(config)
    house.join()
    house.finish()
    assert_ends_as(house, local(config))
    assert all(line.grad_norm > 0 for lines in house.lines.values() for line in lines)


@pytest.mark.parametrize("pace", ["lockstep", "async"])
def test_members_that_are_sent_one_lot_of_the_groups_learn_from_all_they_hear(
    pace: str, task: Path, house_of: HouseOf, local: Callable[..., LocalCrew]
) -> None:
    config = spread_crew(task, ("full",) * 6, rounds=4, pace=pace, hear=1)
    house = house_of(config)
    house.join()
    house.until(lambda: house.learned("full2") == 2)
    house.leave("full2")  # and comes back from its folder
    house.join("full2")
    house.finish()
    if pace == "lockstep":
        assert_ends_as(house, local(config))
    for name in house.names:
        peer, sent = house.peer(name), read_all(house.members[name].station.log)
        heard = {
            f"{sender}.{round}.{slot}"
            for round in range(4)
            for sender in peer.hearing.of(round)
            for slot in range(config.problems_per_peer)
        }
        peer.receive_all()
        assert heard <= {entry.id for entry in sent}
        assert len(sent) < 0.7 * len(house.entries())
        dropped = peer.waiting.dropped.total()
        lines = read_metrics(house.folder / name)
        learned = sum(sender.groups for line in lines for sender in (line.senders or {}).values())
        assert learned + len(peer.waiting) + dropped == len(heard)


@pytest.mark.parametrize("dies", ["nobody", "near", "far"])
def test_members_in_two_regions_end_as_a_crew_in_one_process(
    dies: str, task: Path, tmp_path: Path, local: Callable[..., LocalCrew]
) -> None:
    config = spread_crew(task, ("full", "lora", "last"), rounds=4)
    with Regions(tmp_path / "servers") as regions:
        house = House(config, tmp_path, Place(url=regions.near))
        with closing(house):
            near, *far = house.names
            house.join(near)
            house.join(*far, url=regions.far)
            house.until(lambda: house.learned(near) >= 2)
            if dies != "nobody":
                regions.kill(dies)
                house.during(2.0)
                regions.start(dies)
            house.finish()
            assert_ends_as(house, local(config))


@pytest.mark.parametrize("dies", ["one", "two", "three"])
def test_members_on_somebody_elses_cluster_end_as_a_crew_in_one_process(
    dies: str, task: Path, tmp_path: Path, local: Callable[..., LocalCrew]
) -> None:
    config = spread_crew(task, ("full", "lora", "last"), rounds=4)
    with OpenCluster(tmp_path / "servers") as cluster:
        house = House(config, tmp_path, Place(url=cluster.url, replicas=3))
        with closing(house):
            house.join()
            house.until(lambda: house.learned(house.names[0]) >= 2)
            cluster.kill(dies)
            house.finish()
            assert_ends_as(house, local(config))


# Leaving and coming back


def pair(task: Path, **settings: Any) -> CrewConfig:
    return spread_crew(
        task, ("full", "last"), learning="checkpoint_every = 2", **({"rounds": 5} | settings)
    )


@pytest.mark.parametrize(
    ("lost", "after"),
    [
        ("nothing", 3),
        ("nothing, in the middle of a round", 3),
        ("the round since the checkpoint", 2),
        ("the newest checkpoint", 0),
    ],
)
def test_a_member_that_comes_back_with_the_same_line_ends_the_same(
    lost: str, after: int, task: Path, house_of: HouseOf, local: Callable[..., LocalCrew]
) -> None:
    house = house_of(pair(task))
    house.join()
    house.until(lambda: house.learned("last1") == 3)
    if lost == "nothing, in the middle of a round":
        house.until(lambda: house.peer("last1").half.sampled_rounds == 4, "last1")
    if lost.startswith("nothing"):
        house.members["last1"].save()
    house.leave("last1")
    if lost == "the newest checkpoint":
        shutil.rmtree(checkpoints(house.folder / "last1" / "checkpoints")[-1])
    house.until(
        lambda: (
            re.fullmatch(r"round [45]: waiting for last1 for \d+ s", house.said["full0"][-1])
            is not None
        ),
        "full0",
    )
    house.join("last1")
    assert house.said["last1"][-1] == f"going on after round {after}"
    house.finish()
    assert_ends_as(house, local(pair(task)))


def test_a_member_that_comes_back_after_the_end_has_nothing_to_do(
    task: Path, house_of: HouseOf, local: Callable[..., LocalCrew]
) -> None:
    house = house_of(pair(task))
    house.join()
    house.finish()
    house.leave("last1")
    house.join("last1")
    house.finish()
    assert_ends_as(house, local(pair(task)))


@pytest.fixture
def stopped(task: Path, house_of: HouseOf) -> House:
    """A pair of which last1 was killed after three rounds, with a checkpoint of the second."""
    house = house_of(pair(task))
    house.join()
    house.until(lambda: house.learned("last1") == 3)
    house.leave("last1")
    return house


def test_a_journal_that_contradicts_the_log_is_an_error(stopped: House) -> None:
    steps = steps_of(stopped, "last1")
    contradictions: dict[str, dict[str, Any]] = {
        r"round 2 was learned from records \[1, 2\] before the restart and would now be "
        r"learned from \[\d+": {"positions": (1, 2)},
        r"round 2 was .*; is it another log, or were files of this run changed\?": {
            "sha256": "0" * 64
        },
        r"the log ends at \d+, and this peer had read to 1000; is it another log\?": {
            "cursor": 1000
        },
        r"the log does not hold what round 3 was learned from before the restart": {"cursor": 3},
    }
    for words, changes in contradictions.items():
        changed = [
            msgspec.structs.replace(step, **changes) if step.round == 2 else step for step in steps
        ]
        (stopped.folder / "last1" / "journal.jsonl").write_bytes(
            b"".join(msgspec.json.encode(step) + b"\n" for step in changed)
        )
        stopped.join("last1")
        with pytest.raises(ValueError, match=words):
            stopped.until(lambda: stopped.learned("last1") == 3, "last1")
        stopped.leave("last1")


def test_a_lost_outbox_goes_on_behind_its_last_record(
    stopped: House, local: Callable[..., LocalCrew]
) -> None:
    for path in (stopped.folder / "last1" / "groups").glob("outbox.sqlite*"):
        path.unlink()
    stopped.join("last1")
    counters = [
        decode(unpack(e.record).body)[0].counter
        for e in stopped.entries()
        if e.id.startswith("last1.")
    ]
    assert (
        f"the outbox was lost; going on behind record {max(counters)} of the log"
        in stopped.said["last1"]
    )
    stopped.finish()
    assert_same_weights(stopped, local(stopped.config))
    assert [line.round for line in read_metrics(stopped.folder / "last1")] == list(range(6))
    assert_whole_chains(stopped.entries())


def test_a_lost_outbox_that_was_half_sent_leaves_no_gap(
    task: Path, house_of: HouseOf, local: Callable[..., LocalCrew]
) -> None:
    house = house_of(pair(task))
    house.join()
    # last1 has its turn last, and samples in its next one: when it is cut off
    house.until(lambda: house.learned("last1") == 3)
    cheat = Cheat(house, "last1")
    cheat.send(cheat.sampled[0])
    for path in (house.folder / "last1" / "groups").glob("outbox.sqlite*"):
        path.unlink()
    house.join("last1")
    house.finish()
    assert_same_weights(house, local(house.config))
    assert_whole_chains(house.entries())


def test_an_async_member_that_was_killed_takes_the_same_steps_again(
    task: Path, house_of: HouseOf
) -> None:
    config = spread_crew(
        task, ("full", "last"), rounds=6, pace="async", learning="max_age = 2\ncheckpoint_every = 2"
    )
    house = house_of(config)
    house.join()
    house.until(lambda: house.learned("last1") == 3)
    before, steps, line = (
        weights_of(house.members["last1"]),
        steps_of(house, "last1"),
        house.lines["last1"][-1],
    )
    house.leave("last1")
    # there is more to learn from by now
    house.until(lambda: house.peer("full0").half.sampled_rounds == 6, "full0")
    house.join("last1")
    assert house.learned("last1") == 2
    house.until(lambda: house.learned("last1") == 3, "last1")
    after = weights_of(house.members["last1"])
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert house.lines["last1"][-1].senders == line.senders
    assert steps_of(house, "last1") == steps
    house.finish()
    assert_learned_once(house)


def test_an_async_crew_that_hears_some_ends_with_nothing_lost(
    task: Path, house_of: HouseOf
) -> None:
    config = spread_crew(task, ("full",) * 4, rounds=5, pace="async", hear=1)
    house = house_of(config)
    house.join()
    house.until(lambda: house.learned("full1") == 2)
    house.leave("full1")
    house.until(lambda: house.peer("full0").half.sampled_rounds == 5, "full0")
    house.join("full1")
    house.finish()
    assert_whole_chains(house.entries())
    assert len(house.groups()) == 4 * 5 * 2
    for name in house.names:
        peer = house.peer(name)
        peer.receive_all()
        heard = sum(len(peer.hearing.of(round)) for round in range(5)) * 2
        lines = read_metrics(house.folder / name)
        learned = sum(sender.groups for line in lines for sender in (line.senders or {}).values())
        assert learned + len(peer.waiting) + peer.waiting.dropped.total() == heard
        read = [entry for entry in house.entries() if entry.position <= peer.cursor]
        places = [place for entry in read if (place := GroupPlace.read(entry.id))]
        unheard = [place for place in places if not peer.hearing.hears(place.sender, place.round)]
        assert peer.hearing.passed_by == len(unheard)
        assert not peer.admission.refused


# Without the hub's server


def cut_off_text(house: House, kept: int) -> str:
    """What a participant says that was cut off, hours later."""
    return rf"no connection to {house.url} for 1\d{{4}} s \(.+\)" + (
        f"; {kept} records wait to be sent" if kept else ""
    )


def is_cut_off(house: House) -> bool:
    return all(member.station.log.connection.trouble for member in house.members.values())


def test_without_the_server_an_async_member_samples_within_the_window_and_says_what_it_keeps(
    task: Path, house_of: HouseOf
) -> None:
    config = spread_crew(
        task,
        ("full", "last"),
        rounds=6,
        pace="async",
        learning="max_age = 2\ncheckpoint_every = 100",
    )
    house = house_of(config)
    house.join()
    house.until(lambda: house.learned("full0") >= 1 and house.learned("last1") >= 1)
    house.lose_server()
    outbox = house.peer("full0").half.outbox
    house.until(lambda: is_cut_off(house) and len(outbox) >= 2 * config.problems_per_peer, "full0")
    house.clock.skip()
    house.turn(*["full0"] * 5)
    assert len(outbox) == 2 * config.problems_per_peer
    assert re.fullmatch(cut_off_text(house, kept=len(outbox)), house.said["full0"][-1])
    house.get_server_back()
    house.until(
        lambda: not len(outbox) and not house.members["full0"].station.log.connection.trouble,
        "full0",
    )
    house.finish()
    assert_learned_once(house)


def test_without_the_server_a_lockstep_member_never_trains_alone(
    task: Path, house_of: HouseOf, local: Callable[..., LocalCrew]
) -> None:
    config = pair(task, deadline_s=60, quorum=1)
    house = house_of(config)
    house.join()
    house.until(lambda: house.learned("full0") == house.learned("last1") == 2)
    house.lose_server()
    house.until(lambda: is_cut_off(house))
    house.clock.skip()
    house.turn(*house.names * 5)
    assert {name: house.learned(name) for name in house.names} == {"full0": 2, "last1": 2}
    for name in house.names:
        # nothing, where the next round was on the log before the server was lost
        kept = len(house.members[name].station.outbox)
        assert kept in (0, config.problems_per_peer)
        assert re.fullmatch(cut_off_text(house, kept), house.said[name][-1])
    house.get_server_back()
    house.until(lambda: house.learned("full0") == house.learned("last1") == 3)
    house.finish()
    assert_ends_as(house, local(config))


def test_who_waits_for_the_server_does_not_spin(task: Path, house_of: HouseOf) -> None:
    house = house_of(pair(task))
    house.join()
    house.until(lambda: len(house.groups("last1")) == 2, "last1")
    house.lose_server()
    house.until(lambda: is_cut_off(house), "last1")
    before = len(house.said["full0"])
    house.during(0.5, "full0")
    assert len(house.said["full0"]) - before < 50
    house.get_server_back()
    house.until(lambda: not is_cut_off(house))


def test_a_hub_stopped_and_started_again_is_found_again(
    task: Path, house_of: HouseOf, local: Callable[..., LocalCrew]
) -> None:
    house = house_of(pair(task))
    house.join()
    house.until(lambda: house.learned("full0") == house.learned("last1") == 2)
    house.pause()
    house.hub.close()
    house.until(lambda: is_cut_off(house))
    house.open_hub()
    house.finish()
    assert_ends_as(house, local(house.config))


# Deadlines


def trio(task: Path, **settings: Any) -> CrewConfig:
    return spread_crew(
        task, ("full", "full", "last"), **({"rounds": 4, "deadline_s": 60.0} | settings)
    )


def rounds_without(house: House, name: str) -> dict[int, list[str]]:
    return {line.round: line.without for line in house.lines[name] if line.without is not None}


def test_after_the_deadline_a_round_goes_on_without_who_is_absent(
    task: Path, house_of: HouseOf
) -> None:
    house = house_of(trio(task, rounds=2))
    house.join("full0", "full1")
    present = {"full0", "full1"}
    for round in (1, 2):
        house.until(lambda: all(house.peer(name).awaited() == ["last2"] for name in present))
        house.turn(*house.names * 3)
        assert house.said["full0"][-1].startswith(f"round {round}: waiting for last2 for")
        assert all(house.learned(name) == round - 1 for name in present)
        house.clock.skip()
        house.until(lambda: all(house.learned(name) == round for name in present))  # noqa: B023
    house.finish()
    assert (
        rounds_without(house, "full0")
        == rounds_without(house, "full1")
        == {1: ["last2"], 2: ["last2"]}
    )
    assert all(set(line.senders) == present for line in house.lines["full0"])


def test_with_fewer_than_the_quorum_it_waits_past_every_deadline(
    task: Path, house_of: HouseOf
) -> None:
    house = house_of(trio(task))
    house.join("full0")
    house.until(lambda: house.peer("full0").awaited() == ["full1", "last2"])
    house.clock.skip()
    house.turn(*["full0"] * 5)
    assert house.learned("full0") == 0
    assert re.fullmatch(
        r"round 1: waiting for full1, last2 for 1\d{4} s; to go on without one, .* --revoke full1",
        house.said["full0"][-1],
    )


def test_who_has_left_is_not_waited_for(task: Path, house_of: HouseOf) -> None:
    house = house_of(trio(task))
    house.join()
    house.until(lambda: all(house.learned(name) == 1 for name in house.names))
    house.leave("last2")
    house.finish()
    for name in ("full0", "full1"):
        assert [line.round for line in house.lines[name]] == [1, 2, 3, 4]
        missed = rounds_without(house, name)
        assert set(missed) >= {3, 4}
        assert all(who == ["last2"] for who in missed.values())


def test_who_fell_silent_is_not_waited_for_and_catches_up_when_it_is_back(
    task: Path, house_of: HouseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "SILENT_S", 1.0)
    monkeypatch.setattr(presence, "BEAT_S", 0.2)
    house = house_of(trio(task, rounds=8))
    house.join()
    house.until(lambda: house.learned("last2") == 2)
    house.cut_off("last2")  # at once: with one more turn its groups of round 3 would be on the log
    house.until(lambda: len(house.peer("last2").half.outbox) == 2, "last2")
    house.until(lambda: sum(group.round == 5 for group in house.groups()) == 4, "full0", "full1")
    house.leave("last2")
    house.join("last2")
    house.until(lambda: house.learned("last2") >= 5, "last2")
    house.finish()
    sampled = {group.round for group in house.groups("last2")}
    assert sampled >= {0, 1, 2}
    assert sampled.isdisjoint({3, 4}), "rounds that the crew had passed"
    for name in ("full0", "full1"):
        # those of round 3; where a busy machine takes it for silent again, later ones too
        assert house.lines[name][-1].dropped["last2"]["late"] >= 2
        assert house.peer(name).learner.policy.version == 8
    # Its own groups of round 3 are its own, and of rounds 4 and 5 there are none.
    assert rounds_without(house, "last2").keys() >= {4, 5}
    assert house.peer("last2").learner.policy.version == 8
    assert_whole_chains(house.entries())


def test_who_has_caught_up_is_waited_for_again(task: Path, house_of: HouseOf) -> None:
    house = house_of(trio(task, rounds=7))
    house.join()
    house.until(lambda: all(house.learned(name) == 1 for name in house.names))
    house.leave("last2")
    house.until(
        lambda: house.learned("full0") >= 4 and house.learned("full1") >= 4, "full0", "full1"
    )
    house.join("last2")
    others = max(house.learned("full0"), house.learned("full1"))
    house.until(
        lambda: (
            house.peer("last2").half.sampled_rounds > others
            and not len(house.peer("last2").half.outbox)
        ),
        "last2",
    )
    house.finish()
    assert house.lines["full0"][-1].without is None
    assert house.lines["full1"][-1].without is None
    assert set(house.lines["full0"][-1].senders) == set(house.names)


def test_a_member_shut_out_ends_with_the_reason_and_the_others_go_on(
    task: Path, house_of: HouseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = house_of(trio(task, deadline_s=0.0))
    house.join()
    house.until(lambda: all(house.learned(name) == 1 for name in house.names))
    house.revoke("last2")
    with pytest.raises(
        ValueError,
        match=r"the hub has shut this peer out; what it has is saved, and .* can invite it anew",
    ):
        house.finish("last2")
    house.finish("full0", "full1")
    for name in ("full0", "full1"):
        assert [line.round for line in house.lines[name]] == [1, 2, 3, 4]
        assert set(house.lines[name][-1].senders) == {"full0", "full1"}
    house.leave("last2")
    monkeypatch.setattr(enrolment, "ADMISSION_S", 0.5)
    with pytest.raises(
        ValueError,
        match=(
            r"the hub does not let last2 in: .* or ask for a new one \(motley hub --invite last2\)"
        ),
    ):
        house.join("last2")


def test_a_member_invited_anew_goes_on_where_it_was(task: Path, house_of: HouseOf) -> None:
    house = house_of(trio(task, deadline_s=0.0, rounds=6))
    house.join()
    house.until(lambda: all(house.learned(name) == 1 for name in house.names))
    house.revoke("last2")
    with pytest.raises(ValueError, match="the hub has shut this peer out"):
        house.finish("last2")
    house.leave("last2")
    house.until(lambda: house.learned("full0") >= 3 and house.learned("full1") >= 3)
    house.invite("last2")
    house.join("last2")
    house.finish()
    assert {name: house.learned(name) for name in house.names} == dict.fromkeys(house.names, 6)
    assert_whole_chains(house.entries())


@pytest.mark.parametrize("pace", ["lockstep", "async"])
def test_a_member_shut_out_ends_at_a_server_that_is_not_the_hubs_too(
    task: Path, tmp_path: Path, pace: str
) -> None:
    crew = spread_crew(task, ("full", "last", "full"), rounds=6, pace=pace)
    with (
        OpenCluster(tmp_path / "servers") as cluster,
        closing(House(crew, tmp_path, Place(url=cluster.url, replicas=3))) as house,
    ):
        house.join()
        house.until(lambda: house.learned("last1") == 2)
        house.revoke("last1")
        with pytest.raises(ValueError, match="the hub has shut this peer out"):
            house.finish("last1")
        house.finish("full0", "full2")
        assert house.learned("full0") == house.learned("full2") == 6


# Ends of async crews


def test_an_async_member_goes_on_after_steps_of_an_older_rule(
    task: Path, house_of: HouseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(waiting, "own_per_step", lambda config, learner: 0)
        learning = "max_age = 2\ncheckpoint_every = 4"
        house = house_of(
            spread_crew(task, ("full", "last"), rounds=6, pace="async", learning=learning)
        )
        house.join()
        house.until(lambda: house.learned("full0") == 2, "full0")
        steps = steps_of(house, "full0")
        house.leave("full0")
    house.join("full0")
    house.until(lambda: house.learned("full0") == 2, "full0")
    assert steps_of(house, "full0") == steps
    house.finish()


@pytest.mark.parametrize("window", ["max_age = 0", "max_age = 1"])
def test_an_async_member_with_a_narrow_window_loses_no_round(
    task: Path, house_of: HouseOf, window: str
) -> None:
    house = house_of(spread_crew(task, ("full", "last"), rounds=6, pace="async", learning=window))
    house.join()
    house.finish()
    for name in house.names:
        assert house.learned(name) == 6
        assert house.peer(name).waiting.dropped[name, "stale"] == 0


def test_an_async_member_waits_for_nobody(task: Path, house_of: HouseOf) -> None:
    house = house_of(spread_crew(task, ("full", "last"), rounds=4, pace="async"))
    house.join()
    house.until(lambda: house.members["full0"].finished, "full0")  # the other takes no turn
    assert (house.learned("full0"), house.learned("last1")) == (4, 0)
    house.until(lambda: house.members["last1"].finished, "last1")
    lines = [line for line in house.lines["last1"] if line.senders]
    assert [line.senders["last1"].groups for line in lines] == [2] * 4
    assert [line.senders["full0"].groups for line in lines] == [2] * 4


def test_an_async_member_whose_last_groups_are_too_few_ends_and_stays_ended(
    task: Path, house_of: HouseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Waiting.add

    def lossy(waiting: Waiting, candidate: Candidate) -> None:
        if waiting.me == "full0" and candidate.own and candidate.group.round >= 2:
            waiting.drop_at_once("full0", "stale", candidate.position)
        else:
            add(waiting, candidate)

    monkeypatch.setattr(Waiting, "add", lossy)
    house = house_of(spread_crew(task, ("full", "last"), rounds=4, pace="async"))
    house.join()
    house.until(lambda: house.members["full0"].finished, "full0")
    house.finish()
    assert house.learned("full0") == 2
    lines = read_metrics(house.folder / "full0")
    assert [line.round for line in lines] == [0, 1, 2, 4]
    assert lines[-1].heldout
    house.leave("full0")
    house.join("full0")
    house.finish()
    assert read_metrics(house.folder / "full0") == lines


def test_an_async_crew_with_a_deadline_ends_without_who_never_came(
    task: Path, house_of: HouseOf
) -> None:
    house = house_of(spread_crew(task, ("full", "last"), rounds=3, pace="async", deadline_s=60.0))
    house.join()
    house.leave("last1")
    house.until(lambda: house.peer("full0").half.sampled_rounds == 3, "full0")
    house.until(lambda: len(house.groups("full0")) == 6, "full0")
    house.turn(*["full0"] * 3)
    house.clock.skip()
    house.turn(*["full0"] * 10)
    assert house.members["full0"].finished


# Who may join, with what


class Overconfident(TorchEngine):
    """Reports a little more than the log-prob of what it drew."""

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        made = super().sample(prompts, num_samples, sampling, seed)
        return [
            [Completion(c.tokens, tuple(x + 1e-3 for x in c.logprobs), c.ending) for c in row]
            for row in made
        ]


def test_an_engine_that_reports_other_logprobs_is_refused_with_figures(
    task: Path, house_of: HouseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = house_of(pair(task))
    words = (
        r"the engine of full0 differs by more than 1e-05 on average from its trainer "
        r"\(mean 1\.0e-03, 99th percentile 1\.0e-03\): .*; see motley check"
    )
    monkeypatch.setattr(building, "open_engine", lambda policy, part, folder: Overconfident(policy))
    with pytest.raises(ValueError, match=words):
        house.join("full0")
    assert "differ by 1.0e-03 on average, by 1.0e-03 in one token" in house.said["full0"][-1]
    assert house.groups("full0") == []


def test_a_member_that_was_refused_lets_go_of_its_folder(
    task: Path, house_of: HouseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = house_of(pair(task))
    with monkeypatch.context() as patch:
        patch.setattr(building, "open_engine", lambda policy, part, folder: Overconfident(policy))
        with pytest.raises(ValueError, match="the engine of full0 differs"):
            house.join("full0")
    house.join("full0")


def test_two_members_in_one_folder_are_refused(task: Path, house_of: HouseOf) -> None:
    house = house_of(pair(task))
    house.join("full0")
    with pytest.raises(ValueError, match=r"already running in .*full0; stop it first"):
        join(house.url, "spread", house.invitations["full0"], house.folder / "full0")


def test_a_mixed_up_line_is_refused_with_what_to_do(
    task: Path, house_of: HouseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = house_of(pair(task))
    house.join("full0")
    house.leave("full0")
    monkeypatch.setattr(enrolment, "ADMISSION_S", 0.5)
    invitation = house.invitations["full0"]
    strange = msgspec.structs.replace(Invitation.read(invitation), hub=Identity.new().public).text
    with pytest.raises(
        ValueError,
        match=r"is the folder of full0 in crew spread .*; choose another folder with --out",
    ):
        join(house.url, "spread", house.invitations["last1"], house.folder / "full0")
    with pytest.raises(
        ValueError,
        match=r"is the folder of full0 in crew spread .*; choose another folder with --out",
    ):
        join(house.url, "other", invitation, house.folder / "full0")
    with pytest.raises(
        ValueError,
        match=(
            r"its invitation was used from another folder.*; come back with the folder you joined "
            r"with"
        ),
    ):
        join(house.url, "spread", invitation, house.folder / "elsewhere")
    with pytest.raises(
        ValueError, match=r"the invitation is damaged .*; copy the whole line that the hub printed"
    ):
        join(house.url, "spread", invitation[:-3], house.folder / "damaged")
    shutil.copytree(house.folder / "full0", house.folder / "strange")
    (house.folder / "strange" / "member.json").unlink()
    with pytest.raises(
        ValueError,
        match=r"record hub\.\S+ of the log is not signed by the hub of the invitation",
    ):
        join(house.url, "spread", strange, house.folder / "strange")
    monkeypatch.undo()
    house.join("full0")


@pytest.mark.quick
def test_a_folder_with_a_run_of_other_settings_is_refused(task: Path, house_of: HouseOf) -> None:
    house = house_of(pair(task))
    (house.folder / "full0").mkdir()
    (house.folder / "full0" / "config.toml").write_text(config_text(pair(task, seed=1)))
    with pytest.raises(
        ValueError,
        match=r"holds a run of other settings; choose another folder with --out, or delete it",
    ):
        house.join("full0")


def test_a_server_that_dies_while_a_member_joins_does_not_matter(
    task: Path, house_of: HouseOf
) -> None:
    house = house_of(pair(task, rounds=1))

    def kill_server(text: str) -> None:
        if text.startswith("engine against trainer"):
            house.hub.server.kill()

    join(
        house.url, "spread", house.invitations["full0"], house.folder / "full0", kill_server
    ).close()
    house.join()
    house.finish()


def test_a_server_that_dies_while_a_member_enrols_does_not_matter(
    task: Path, house_of: HouseOf
) -> None:
    house = house_of(pair(task))
    house.pause()

    def join_patiently() -> None:
        try:
            house.join("full0")
        except LogError as error:
            house.said["full0"].append(str(error))

    joining = threading.Thread(target=join_patiently, daemon=True)
    joining.start()
    house.until(lambda: not house.hub.office.asked.empty())
    house.hub.server.kill()
    house.until(lambda: house.hub.office.connection.trouble != "")
    house.get_server_back()
    joining.join(PATIENCE_S)
    assert "full0" in house.members, house.said["full0"]


def test_the_crews_problems_are_found_in_the_folder_of_data_and_must_be_the_same(
    task: Path, house_of: HouseOf, tmp_path: Path
) -> None:
    (tmp_path / "hub's own").mkdir()
    write_task(tmp_path / "hub's own")
    house = house_of(pair(tmp_path / "hub's own", rounds=1))
    problems = (tmp_path / "hub's own" / "problems.jsonl").rename(tmp_path / "problems.jsonl")
    with pytest.raises(ValueError, match=r"cannot read problems from .*hub's own"):
        house.join("full0")
    other = tmp_path / "other"
    other.mkdir()
    (other / "problems.jsonl").write_text(problems.read_text().replace('"59"', '"58"'))
    with pytest.raises(
        ValueError,
        match=(
            r"asks other problems here than at the hub; give the folder with the crew's own .* "
            r"with --data"
        ),
    ):
        house.join("full0", data=other)
    house.join(data=tmp_path)
    house.finish()
    assert [line.round for line in house.lines["full0"]] == [1]


def test_each_brings_a_model_of_its_own_that_nobody_else_has(
    task: Path, house_of: HouseOf, tmp_path: Path
) -> None:
    """One vocabulary, two architectures, neither named so in the crew file that the hub and the
    other read.
    """
    config = pair(task, rounds=2)
    unknown = tuple(msgspec.structs.replace(p, model=f"/only/with/{p.name}") for p in config.peer)
    house = house_of(msgspec.structs.replace(config, peer=unknown))
    with pytest.raises(ValueError, match="there is no model folder /only/with/full0"):
        house.join("full0")
    models = {
        name: str(write_model(tmp_path / kind, kind))
        for name, kind in (("full0", "qwen2"), ("last1", "llama with biases"))
    }
    for name, model in models.items():
        house.join(name, model=model, device="cpu")
    house.turn("full0")
    house.leave("full0")
    house.join("full0")  # it has said once what it brings
    house.finish()
    assert {name: len({line.round for line in lines}) for name, lines in house.lines.items()} == {
        "full0": 2,
        "last1": 2,
    }
    assert len({group.origin.model for group in house.groups()}) == 2
    assert all(not line.refused for lines in house.lines.values() for line in lines)


def test_nobody_asks_a_server_that_the_crew_file_names_for_it(
    task: Path, house_of: HouseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who wrote the file could otherwise have any key of this machine, and any program started."""
    monkeypatch.setenv("PRIVATE", "secret")
    server = OpenAI(url="http://127.0.0.1:9/v1", key_env="PRIVATE")
    named = {"engine": EnginePart(openai=server), "judge": server}
    config = pair(task, rounds=1)
    house = house_of(
        msgspec.structs.replace(
            config, peer=tuple(msgspec.structs.replace(p, **named) for p in config.peer)
        )
    )
    house.join()
    assert all(member.role.peer.half.judge is None for member in house.members.values())
    assert all(
        isinstance(member.role.peer.half.engine, TorchEngine) for member in house.members.values()
    )
    house.finish()


def two_vocabularies(house_of: HouseOf, config: CrewConfig, folder: Path) -> House:
    """Each peer brings a model of its own, whatever the crew file calls it."""
    house = house_of(config)
    for name, size in (("full0", 300), ("last1", 310)):
        model = write_model(folder / f"of {name}", tokenizer=text_tokenizer(size=size))
        house.join(name, model=str(model))
    return house


def test_crewmates_of_other_models_read_each_others_vocabularies(
    task: Path, house_of: HouseOf, tmp_path: Path
) -> None:
    config = pair(task, rounds=1)
    peers = tuple(msgspec.structs.replace(p, model=f"/only/with/{p.name}") for p in config.peer)
    house = two_vocabularies(house_of, msgspec.structs.replace(config, peer=peers), tmp_path)
    house.until(lambda: all(house.peer(name).learned_rounds == 1 for name in ("full0", "last1")))
    for name in ("full0", "last1"):
        assert not house.peer(name).admission.refused
        last = list(learner_lines(read_metrics(house.folder / name)))[-1]
        assert set(last.senders or {}) == {"full0", "last1"}


def test_a_crewmate_of_another_vocabulary_is_named_and_not_waited_for_in_silence(
    task: Path, house_of: HouseOf, tmp_path: Path
) -> None:
    """Where the crew file calls all models by one name nobody expects another vocabulary."""
    config = pair(task, rounds=1)
    peers = tuple(msgspec.structs.replace(p, model="/only/elsewhere") for p in config.peer)
    house = two_vocabularies(house_of, msgspec.structs.replace(config, peer=peers), tmp_path)
    house.until(
        lambda: any(
            "groups of last1 came and do not count" in text and "vocabulary" in text
            for text in house.said["full0"]
        )
    )


# Cheats


class Cheat:
    """The owner of a peer's real key, who puts on the log what it likes.

    The peer has gone, and what it sampled last was never sent.
    """

    def __init__(self, house: House, name: str) -> None:
        house.cut_off(name)
        house.until(lambda: len(house.peer(name).half.outbox) > 0, name)
        house.leave(name)
        with closing(sqlite3.connect(house.folder / name / "groups" / "outbox.sqlite")) as database:
            unsent = database.execute("SELECT id, record FROM unsent ORDER BY counter").fetchall()
        self.sampled = [Entry(0, id, record) for id, record in unsent]
        self.honest = [decode(unpack(record).body)[1] for _, _, record in self.sampled]
        self.identity = Identity.kept_at(house.folder / name / "peer.key")
        self._login = read_membership(house.folder / name).login(self.identity)
        self.counter, self.previous = 0, FIRST_PREVIOUS

    def group(self, round: int, slot: int, **changes: Any) -> Group:
        """An honest group but for its place, and for a change of its first rollout."""
        made = self.honest[slot]
        first = msgspec.structs.replace(made.rollouts[0], **changes)
        return msgspec.structs.replace(
            made, round=round, slot=slot, rollouts=(first, *made.rollouts[1:])
        )

    def put(self, content: Group, id: str = "") -> None:
        """Sign it, next in the chain, and send it."""
        made = entry(content, self.identity, self.counter, self.previous)
        self.send(made._replace(id=id or made.id))
        self.counter, self.previous = self.counter + 1, unpack(made.record).hash

    def send(self, made: Entry) -> None:
        """Past everything that our own code checks before it sends."""
        connection = Connection(self._login)
        try:
            answer = connection.call(
                lambda client: client.request(Names("spread").record(made.id), made.record, 10)
            )
        finally:
            connection.close()
        assert "error" not in msgspec.json.decode(answer.data)


@pytest.mark.quick
def test_what_a_cheat_puts_on_the_log_is_refused_by_name_and_training_goes_on(
    task: Path, house_of: HouseOf
) -> None:
    house = house_of(trio(task, deadline_s=0.1))
    house.join("last2")
    cheat = Cheat(house, "last2")
    tokens = cheat.honest[1].rollouts[0].tokens
    cheat.put(cheat.group(0, 0, reward=9.0))
    cheat.put(cheat.group(0, 1, logprobs=(float("nan"),) * len(tokens)))
    cheat.put(cheat.group(1, 0))  # the problem of round 0
    cheat.put(cheat.group(1, 1, reward=float("nan")))
    cheat.send(Entry(0, "last2.2.0", bytes([2]) + bytes(2**14)))
    cheat.send(entry(cheat.group(2, 1), Identity.new(), cheat.counter, cheat.previous))
    foreign = msgspec.structs.replace(
        cheat.honest[0], origin=msgspec.structs.replace(cheat.honest[0].origin, peer="full0")
    )
    cheat.put(foreign, id="last2.3.0")
    cheat.counter, cheat.previous = 1, FIRST_PREVIOUS
    cheat.put(cheat.group(3, 1))
    with pytest.raises(LogError, match="refuses: nats: permissions violation for publish"):
        cheat.put(foreign)

    house.join("full0", "full1")
    house.finish()
    refused = {
        "reward": 2,
        "logprob": 1,
        "assignment": 1,
        "size": 1,
        "key": 1,
        "subject": 1,
        "fork": 1,
    }
    for name in ("full0", "full1"):
        assert [line.round for line in house.lines[name]] == [1, 2, 3, 4]
        assert rounds_without(house, name) == {}  # for who is muted nobody waits
        assert house.lines[name][-1].suspects["last2"].muted == "assignment"
        assert house.lines[name][-1].refused == {"last2": refused}
        assert set(house.lines[name][-1].senders) == {"full0", "full1"}
        kept = [
            msgspec.json.decode(line)
            for line in (house.folder / name / "refused.jsonl").read_bytes().splitlines()
        ]
        assert Counter(refusal["reason"] for refusal in kept) == refused
        assert [refusal["id"] for refusal in kept] == [
            f"last2.{round}.{slot}" for round in range(4) for slot in range(2)
        ]
        assert kept[0]["detail"].startswith(
            "rollout 0 claims a reward of 9.0; computed here it is "
        )
