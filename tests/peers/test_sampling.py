"""A sampler and the learner it follows, driven by hand on virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fakes import candidate, group
from marks import slow
from motley.clock import VirtualClock
from motley.config import CrewConfig
from motley.exchange import Entry, Head, LogError, MemoryLog, Outbox, decode, unpack
from motley.exchange.blobs import MemoryBlobs
from motley.learning.journal import WrittenStep
from motley.learning.pace import holds_up
from motley.learning.waiting import Round, Take, Wait
from motley.peers.follower import Sampler
from motley.peers.peer import Learned, Peer
from motley.peers.state import PeerState
from motley.records import HUB, Backlog, Group, Roster, Weights
from motley.runs.building import build_peer, build_sampler
from motley.runs.folder import Run
from motley.runs.local import found_log, one_process_outbox
from motley.trust import stamp_of
from motley.weights.encoding import state_hash, trained_state
from motley.weights.follower import MAX_MISSES
from sim.crews import far_crew


class CountingLog(MemoryLog):
    """Notes what is asked for, and what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.given: Counter[str] = Counter()

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        self.asked.append(sender)
        found = super().read(after, limit, sender)
        self.given.update(entry.id.split(".")[0] for entry in found)
        return found


class SickBlobs(MemoryBlobs):
    """A store that may lose blobs or give out others; it is never believed."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()
        self.spoilt: set[str] = set()
        self.fetched: list[str] = []
        self.stored: list[str] = []

    def put(self, name: str, content: bytes) -> None:
        self.stored.append(name)
        super().put(name, content)

    def get(self, name: str, num_bytes: int) -> bytes | None:
        self.fetched.append(name)
        content = super().get(name, num_bytes)
        if name in self.lost or content is None:
            return None
        return content[:-1] + bytes([content[-1] ^ 1]) if name in self.spoilt else content


class Crew:
    """A learner l and samplers, with one log and one store between them.

    Who does what when is up to the test.
    """

    def __init__(self, config: CrewConfig, folder: Path) -> None:
        self.config, self.clock, self.log = config, VirtualClock(), CountingLog()
        self.run = Run(config, folder / "run", self.clock)
        self.hub = found_log(config, self.log, self.run.task)
        self.blobs = {p.name: SickBlobs() for p in config.peer if p.role == "learner"}
        self.learners = {
            p.name: build_peer(self.run, p, self.log, one_process_outbox(config, p.name), self.hub)
            for p in config.students
        }
        self.samplers = {p.name: self.sampler(p.name) for p in config.peer if p.role == "sampler"}
        self.published: dict[int, bytes] = {}  # version -> hash of the weights, as they are sent

    def sampler(self, name: str) -> Sampler:
        me = self.config.named(name)
        return build_sampler(
            self.run,
            me,
            self.log,
            one_process_outbox(self.config, name),
            self.blobs[me.follows],
            self.hub,
        )

    @property
    def learner(self) -> Peer:
        return self.learners["l"]

    def publish(self) -> Weights | None:
        """Have the learner's present version on the log, if it is one to publish."""
        peer = self.learner
        before = len(self.log)
        peer.publish_weights()
        peer.half.outbox.deliver(self.log, self.clock.now_s(), self.blobs["l"])
        version = peer.learner.policy.version
        self.published[version] = state_hash(
            trained_state(peer.learner.policy, self.config.weights.precision)
        )
        new = [decode(unpack(entry.record).body)[1] for entry in MemoryLog.read(self.log, before)]
        return next((content for content in new if isinstance(content, Weights)), None)

    def learn(self) -> None:
        """Another version, as if by a step."""
        policy = self.learner.learner.policy
        generator = torch.Generator().manual_seed(policy.version)
        with torch.no_grad():
            for _, parameter in policy.trained():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
        policy.version += 1
        self.learner.half.refresh()
        self.learner.waiting.window.made(policy.version)

    def next_version(self) -> Weights:
        self.learn()
        made = self.publish()
        assert made is not None
        return made

    def holds(self, sampler: Sampler, version: int) -> bool:
        """The sampler samples with that version to the last bit sent."""
        policy = sampler.half.policy
        right = (
            state_hash(trained_state(policy, self.config.weights.precision))
            == self.published[version]
        )
        return sampler.follower.version == policy.version == version and right

    def contents(self) -> list[Any]:
        return [decode(unpack(entry.record).body)[1] for entry in MemoryLog.read(self.log, 0)]

    def groups(self) -> list[Group]:
        return [content for content in self.contents() if isinstance(content, Group)]


def look(sampler: Sampler) -> bool:
    sampler.receive()
    return sampler.renew()


def sample(crew: Crew, name: str) -> None:
    """A round of a sampler, on the log."""
    half = crew.samplers[name].half
    half.sample()
    half.outbox.deliver(crew.log)


FAR = "[network.link.s0]\ndelay = 10"


# Weights


@pytest.mark.slow
def test_nothing_is_sampled_before_the_first_weights_have_arrived(folder: Path) -> None:
    crew = Crew(far_crew(folder, network=FAR), folder)
    sampler = crew.samplers["s0"]
    assert (look(sampler), sampler.may_sample(), sampler.transfer) == (False, False, None)
    crew.publish()
    assert (look(sampler), sampler.may_sample()) == (False, False)
    crew.clock.advance(9.9)
    assert (look(sampler), sampler.may_sample()) == (False, False)
    crew.clock.advance(10.0)
    assert (look(sampler), sampler.may_sample()) == (True, True)
    assert crew.holds(sampler, 0)
    assert (look(sampler), sampler.may_sample()) == (False, True)


@pytest.mark.slow
def test_without_a_delay_weights_are_loaded_at_the_first_look(folder: Path) -> None:
    crew = Crew(far_crew(folder), folder)
    crew.publish()
    for sampler in crew.samplers.values():
        assert look(sampler)
        assert crew.holds(sampler, 0)


@pytest.mark.slow
def test_one_transfer_at_a_time_and_always_of_the_newest_version_there_is(folder: Path) -> None:
    crew = Crew(far_crew(folder, network=FAR), folder)
    sampler = crew.samplers["s0"]
    crew.publish()
    look(sampler)
    assert sampler.transfer is not None
    began = sampler.transfer
    for at_s in (1.0, 2.0, 3.0):
        crew.clock.advance(at_s)
        crew.next_version()
        look(sampler)
        assert sampler.transfer is began
        assert sampler.newest is not None
        assert sampler.newest.version == at_s
    crew.clock.advance(10.0)
    assert look(sampler)
    assert crew.holds(sampler, 0)
    assert ([w.version for w in sampler.transfer.plan], sampler.transfer.arrives_s) == (
        [1, 2, 3],
        20.0,
    )
    crew.clock.advance(12.0)
    crew.next_version()  # too late for this one
    look(sampler)
    crew.clock.advance(20.0)
    assert look(sampler)
    assert crew.holds(sampler, 3)
    assert ([w.version for w in sampler.transfer.plan], sampler.transfer.arrives_s) == ([4], 30.0)
    crew.clock.advance(30.0)
    look(sampler)
    assert crew.holds(sampler, 4)
    assert (sampler.transfer, sampler.failed, sampler.known) == (None, 0, {})


@pytest.mark.slow
def test_a_transfer_arrives_when_the_weather_says(folder: Path) -> None:
    config = far_crew(
        folder,
        network=(
            'delay = { shape = "lognormal", low_s = 60, high_s = 1920 }\n[network.link.l]\ndelay '
            "= 0"
        ),
    )
    crew = Crew(config, folder)
    crew.clock.advance(7.0)
    crew.publish()
    arrives_s = {}
    for name, sampler in crew.samplers.items():
        look(sampler)
        assert sampler.transfer is not None
        arrives_s[name] = sampler.transfer.arrives_s
        assert arrives_s[name] == config.weather(name).fetched("weights.0", 7.0) > 7.0
    assert arrives_s["s0"] != arrives_s["s1"]


@pytest.mark.slow
def test_a_learners_weights_are_on_the_log_when_its_link_has_brought_them_there(
    folder: Path,
) -> None:
    crew = Crew(far_crew(folder, network="[network.link.l]\nup = 5"), folder)
    assert crew.publish() is None
    assert crew.learner.half.outbox.due_s == 5.0
    assert not look(crew.samplers["s0"])
    crew.clock.advance(5.0)
    crew.publish()
    assert look(crew.samplers["s0"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "slower_s"),
    [("[network.link.s0]\ndelay = 10\noutages = [[5, 40]]", 40.0), (FAR, 10.0)],
)
def test_an_outage_holds_weights_up(folder: Path, network: str, slower_s: float) -> None:
    crew = Crew(far_crew(folder, network=network), folder)
    crew.publish()
    look(crew.samplers["s0"])
    assert crew.samplers["s0"].transfer is not None
    assert crew.samplers["s0"].transfer.arrives_s == slower_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "precision"), [("full", "bfloat16"), ("full", "float32"), ("lora", "float32")]
)
def test_a_sampler_samples_with_the_learners_weights_of_that_version(
    folder: Path, train: str, precision: str
) -> None:
    crew = Crew(far_crew(folder, train=train, weights=f'precision = "{precision}"'), folder)
    sampler = crew.samplers["s0"]
    crew.publish()
    look(sampler)
    sample(crew, "s0")
    crew.next_version()
    crew.next_version()
    look(sampler)
    sample(crew, "s0")
    assert crew.holds(sampler, 2)
    groups = crew.groups()
    assert [(g.id, g.origin.version) for g in groups] == [
        ("s0.0.0", 0),
        ("s0.0.1", 0),
        ("s0.1.0", 2),
        ("s0.1.1", 2),
    ]
    assert {g.origin.model for g in groups} == {crew.learner.learner.policy.fingerprint}
    found = crew.learner.half.engine.sample([[5, 6]], 4, crew.config.sampling, 3)
    theirs = sampler.half.engine.sample([[5, 6]], 4, crew.config.sampling, 3)
    same = [
        a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        for a, b in zip(found[0], theirs[0], strict=True)
    ]
    assert all(same) == (precision == "float32")


# Weights that do not come


def deltas(crew: Crew, count: int) -> list[Weights]:
    return [crew.next_version() for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost", "spoilt"])
def test_weights_that_cannot_be_had_are_counted_and_passed_over_at_the_next_anchor(
    folder: Path, fault: str
) -> None:
    crew = Crew(far_crew(folder, rounds=20, weights="anchor_every = 4"), folder)
    sampler, store = crew.samplers["s0"], crew.blobs["l"]
    crew.publish()
    look(sampler)
    (bad,) = deltas(crew, 1)
    assert bad.base == 0
    getattr(store, fault).update(blob.sha256 for blob in bad.blobs)
    tries = MAX_MISSES if fault == "lost" else 1  # what is wrong once is wrong for ever
    for number in range(5):
        assert not look(sampler)
        assert sampler.failed == min(number + 1, tries)
        assert crew.holds(sampler, 0)
        assert sampler.may_sample()
    deltas(crew, 2)  # changes of a version it could not get
    assert not look(sampler)
    assert (sampler.failed, sampler.transfer) == (tries, None)
    (anchor,) = deltas(crew, 1)
    assert (anchor.version, anchor.base) == (4, -1)
    assert look(sampler)
    assert crew.holds(sampler, 4)
    deltas(crew, 1)
    assert look(sampler)
    assert crew.holds(sampler, 5)
    assert sampler.failed == tries


@pytest.mark.slow
def test_blobs_that_come_back_in_time_are_used(folder: Path) -> None:
    crew = Crew(far_crew(folder, network=FAR), folder)
    sampler, store = crew.samplers["s0"], crew.blobs["l"]
    first = crew.publish()
    assert first is not None
    store.lost = {first.blobs[0].sha256}
    look(sampler)
    for at_s in (10.0, 20.0):
        crew.clock.advance(at_s)
        store.lost = store.lost if at_s < 20 else set()
        assert not look(sampler)
        assert not sampler.may_sample()
    assert sampler.failed == 2
    assert sampler.transfer is not None
    assert sampler.transfer.arrives_s == 30.0  # it was sent for again, and that takes as long
    crew.clock.advance(30.0)
    assert look(sampler)
    assert crew.holds(sampler, 0)


@pytest.mark.slow
def test_a_plan_that_fails_in_the_middle_changes_nothing(folder: Path) -> None:
    crew = Crew(far_crew(folder, network=FAR), folder)
    sampler = crew.samplers["s0"]
    crew.publish()
    look(sampler)
    crew.clock.advance(10.0)
    look(sampler)
    made = deltas(crew, 3)
    crew.blobs["l"].spoilt = {blob.sha256 for blob in made[1].blobs}
    look(sampler)
    crew.clock.advance(20.0)
    assert not look(sampler)
    assert crew.holds(sampler, 0)
    assert sampler.failed == 1
    assert sampler.transfer is not None
    assert [w.version for w in sampler.transfer.plan] == [1]  # as far as it can get
    crew.clock.advance(30.0)
    assert look(sampler)
    assert crew.holds(sampler, 1)


@pytest.mark.slow
def test_weights_on_their_way_arrive_though_their_learner_has_tidied_up_since(folder: Path) -> None:
    crew = Crew(far_crew(folder, rounds=20, network=FAR, weights="anchor_every = 2"), folder)
    sampler, publisher = crew.samplers["s0"], crew.learner.weights.publisher
    assert publisher is not None
    crew.publish()
    look(sampler)
    deltas(crew, 6)
    crew.blobs["l"].keep_only(publisher.needed())  # as a participant does at a checkpoint
    crew.clock.advance(10.0)
    assert look(sampler)
    assert crew.holds(sampler, 0)
    assert sampler.failed == 0


def test_blobs_are_fetched_once_each(folder: Path) -> None:
    crew = Crew(far_crew(folder, train="lora", weights="anchor_every = 2"), folder)
    sampler = crew.samplers["s0"]
    for number in range(5):
        if number:
            crew.learn()
        crew.publish()
        look(sampler)
        look(sampler)
    assert len(crew.blobs["l"].fetched) == len(set(crew.blobs["l"].fetched))
    assert crew.holds(sampler, 4)


def test_what_never_trains_is_stored_once(folder: Path) -> None:
    crew = Crew(far_crew(folder, train="lora", weights="anchor_every = 2"), folder)
    for number in range(4):
        if number:
            crew.learn()
        made = crew.publish()
        assert made is not None
        assert made.frozen
    counts = Counter(crew.blobs["l"].stored)
    assert {counts[blob.sha256] for blob in made.frozen} == {1}
    assert made.blobs[0].sha256 in counts


# A crash


@pytest.mark.slow
def test_after_a_crash_a_sampler_has_no_weights_and_gets_them_again(folder: Path) -> None:
    crew = Crew(far_crew(folder, network=FAR), folder)
    sampler = crew.samplers["s0"]
    crew.publish()
    look(sampler)
    crew.clock.advance(10.0)
    look(sampler)
    sample(crew, "s0")
    deltas(crew, 2)
    look(sampler)
    assert sampler.transfer is not None
    sampler.forget()
    assert (sampler.may_sample(), sampler.transfer, sampler.newest, sampler.known) == (
        False,
        None,
        None,
        {},
    )
    assert set(sampler.cursors.values()) == {0}
    crew.clock.advance(50.0)
    assert not look(sampler)
    assert not sampler.may_sample()
    assert sampler.transfer is not None
    assert ([w.version for w in sampler.transfer.plan], sampler.transfer.arrives_s) == (
        [0, 1, 2],
        60.0,
    )
    crew.clock.advance(60.0)
    assert look(sampler)
    assert crew.holds(sampler, 2)
    assert sampler.admission.refused == Counter()
    sample(crew, "s0")
    assert [g.id for g in crew.groups()] == ["s0.0.0", "s0.0.1", "s0.1.0", "s0.1.1"]


@pytest.mark.slow
def test_a_round_that_was_drawn_and_not_kept_is_drawn_again(folder: Path) -> None:
    crew = Crew(far_crew(folder), folder)
    half = crew.samplers["s0"].half
    crew.publish()
    look(crew.samplers["s0"])
    lost = half.draw()
    assert (half.sampled_rounds, len(half.outbox), half.outbox.last_round) == (0, 0, -1)
    again = half.draw()
    assert [g.id for g in again.groups] == [g.id for g in lost.groups]
    half.keep(again)
    assert (half.sampled_rounds, len(half.outbox), half.outbox.last_round) == (1, 2, 0)
    assert half.draw().round == 1


@pytest.mark.slow
def test_a_round_is_due_when_the_weather_of_its_sampler_says(folder: Path) -> None:
    config = far_crew(
        folder, network='[network.link.s0]\nup = { shape = "exponential", mean_s = 60 }'
    )
    crew = Crew(config, folder)
    crew.publish()
    look(crew.samplers["s0"])
    half = crew.samplers["s0"].half
    crew.clock.advance(100.0)
    half.sample()
    assert half.outbox.due_s == config.weather("s0").sent("0", 100.0) > 100.0
    half.outbox.deliver(crew.log, half.outbox.due_s)
    half.sample()
    assert half.outbox.due_s == config.weather("s0").sent("1", 100.0)


def test_samplers_have_problems_and_random_numbers_of_their_own(folder: Path) -> None:
    crew = Crew(far_crew(folder, layout="horizontal"), folder)
    crew.publish()
    for name, sampler in crew.samplers.items():
        look(sampler)
        sample(crew, name)
    first, second = crew.groups()[:4], crew.groups()[4:]
    assert [g.problem for g in first] == [g.problem for g in second]
    assert [[r.tokens for r in g.rollouts] for g in first] != [
        [r.tokens for r in g.rollouts] for g in second
    ]


# Reading


@pytest.mark.slow
def test_a_sampler_reads_what_the_hub_and_its_learner_wrote_and_nothing_else(folder: Path) -> None:
    crew = Crew(far_crew(folder, samplers={"s0": "l", "s1": "l", "t": "k"}), folder)
    crew.publish()
    other = crew.learners["k"]
    other.publish_weights()
    other.half.outbox.deliver(crew.log, blobs=crew.blobs["k"])
    for name in ("s0", "s1"):
        look(crew.samplers[name])
        sample(crew, name)
    crew.log.asked, crew.log.given = [], Counter()
    deltas(crew, 2)
    crew.log.asked, crew.log.given = [], Counter()
    look(crew.samplers["s0"])
    assert set(crew.log.asked) == {HUB, "l"}
    assert crew.log.given == Counter({"l": 2})  # and of those, nothing twice
    look(crew.samplers["s0"])
    assert crew.log.given == Counter({"l": 2})
    assert crew.holds(crew.samplers["s0"], 2)
    crew.samplers["s0"].forget()
    look(crew.samplers["s0"])
    assert crew.log.given == Counter({"l": 2 + 3, "hub": 2})


@pytest.mark.slow
def test_more_records_than_one_read_shows_are_all_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(far_crew(folder, rounds=20), folder)
    crew.publish()
    deltas(crew, 5)
    whole = MemoryLog.read
    monkeypatch.setattr(
        MemoryLog, "read", lambda self, after, limit=1024, sender="": whole(self, after, 2, sender)
    )
    look(crew.samplers["s0"])
    assert crew.holds(crew.samplers["s0"], 5)


@pytest.mark.slow
def test_a_sampler_is_finished_when_its_learner_has_taken_its_last_step(folder: Path) -> None:
    crew = Crew(far_crew(folder, rounds=3), folder)
    sampler = crew.samplers["s0"]
    crew.publish()
    for _ in range(3):
        look(sampler)
        assert not sampler.finished
        crew.next_version()
    look(sampler)
    assert sampler.finished


# What a learner publishes


@pytest.mark.slow
def test_only_every_so_many_versions_are_published_and_the_last_one(folder: Path) -> None:
    crew = Crew(far_crew(folder, rounds=7, weights="every = 3\nanchor_every = 6"), folder)
    found = [crew.publish()]
    for _ in range(7):
        crew.learn()
        found.append(crew.publish())
    assert [(w.version, w.base) for w in found if w] == [(0, -1), (3, 0), (6, -1), (7, 6)]


def test_a_version_is_published_once(folder: Path) -> None:
    crew = Crew(far_crew(folder), folder)
    assert crew.publish() is not None
    assert crew.publish() is None
    crew.learner.publish_weights()
    assert len(crew.learner.half.outbox) == 0


@pytest.mark.slow
def test_weights_say_how_much_waits_and_for_how_long(folder: Path) -> None:
    crew = Crew(far_crew(folder), folder)
    crew.clock.advance(5.0)
    for came_s in (4.0, 1.5, 3.0):
        crew.learner.waiting.add(replace(candidate(group()), came_s=came_s))
    made = crew.publish()
    assert made is not None
    assert (made.backlog, made.created_s, made.crew, made.peer) == (
        Backlog(waiting=(("a", 3),), oldest_s=3.5),
        5.0,
        "far",
        "l",
    )
    crew.learner.waiting.restore([], Counter())
    made = crew.next_version()
    assert made.backlog == Backlog(waiting=(), oldest_s=0.0)


def test_neither_a_peer_nor_a_sampler_publishes_weights(folder: Path) -> None:
    crew = Crew(far_crew(folder, peers={"p": ""}), folder)
    plain = crew.learners["p"]
    plain.publish_weights()
    assert (plain.weights, len(plain.half.outbox)) == (None, 0)
    assert plain.may_sample()
    assert not crew.learner.may_sample()


# What a learner takes


def published_by(crew: Crew, name: str, content: Any) -> None:
    """Put a record on the log under a peer's key, whatever it is."""
    outbox: Outbox = (
        crew.samplers[name].half.outbox
        if name in crew.samplers
        else crew.learners[name].half.outbox
    )
    outbox.put([content])
    outbox.deliver(crew.log, blobs=MemoryBlobs())


def renamed(made: Group, peer: str, version: int | None = None) -> Group:
    version = made.origin.version if version is None else version
    return msgspec.structs.replace(
        made, origin=msgspec.structs.replace(made.origin, peer=peer, version=version)
    )


def test_weights_of_one_who_is_no_learner_are_refused(folder: Path) -> None:
    crew = Crew(far_crew(folder), folder)
    made = crew.publish()
    assert made is not None
    published_by(crew, "s1", msgspec.structs.replace(made, peer="s1", version=9))
    crew.learner.receive()
    assert crew.learner.admission.refused == Counter({("s1", "role"): 1})
    look(crew.samplers["s0"])
    assert crew.holds(crew.samplers["s0"], 0)


def test_groups_of_a_learner_are_refused(folder: Path) -> None:
    crew = Crew(far_crew(folder, samplers={"s0": "l", "t": "k"}), folder)
    crew.publish()
    look(crew.samplers["s0"])
    sample(crew, "s0")
    published_by(crew, "l", renamed(crew.groups()[0], "l"))
    crew.learners["k"].receive()
    assert crew.learners["k"].admission.refused == Counter({("l", "assignment"): 1})
    assert [c.group.id for c in crew.learners["k"].waiting] == ["s0.0.0", "s0.0.1"]


@pytest.mark.slow
def test_groups_of_a_version_that_was_never_made_are_refused(folder: Path) -> None:
    crew = Crew(far_crew(folder), folder)
    crew.publish()
    half = crew.samplers["s0"].half
    look(crew.samplers["s0"])
    first, second = half.draw().groups
    published_by(crew, "s0", renamed(first, "s0", version=1))
    published_by(crew, "s0", renamed(second, "s0", version=0))
    crew.learner.receive()
    assert crew.learner.admission.refused == Counter({("s0", "version"): 1})
    assert [c.group.id for c in crew.learner.waiting] == [second.id]


@pytest.mark.slow
def test_a_foreign_version_may_be_any_that_there_can_be(folder: Path) -> None:
    crew = Crew(far_crew(folder, samplers={"s0": "l", "t": "k"}), folder)
    crew.publish()
    look(crew.samplers["s0"])
    published_by(
        crew,
        "s0",
        renamed(crew.samplers["s0"].half.draw().groups[0], "s0", version=crew.config.crew.rounds),
    )
    crew.learners["k"].receive()
    assert crew.learners["k"].admission.refused == Counter()
    assert len(crew.learners["k"].waiting) == 1


@pytest.mark.slow
def test_followers_groups_age_from_their_version_and_foreign_ones_from_their_arrival(
    folder: Path,
) -> None:
    crew = Crew(far_crew(folder, samplers={"s0": "l", "t": "k"}, peers={"p": ""}), folder)
    crew.publish()
    look(crew.samplers["s0"])
    sample(crew, "s0")  # of version 0
    for at_s in (10.0, 20.0, 30.0):
        crew.clock.advance(at_s)
        crew.learn()
    crew.learners["p"].half.sample()
    crew.learners["p"].publish()
    crew.clock.advance(45.0)
    for peer in crew.learners.values():
        peer.receive()
    assert since(crew.learners["l"]) == {"s0": (True, 0, 45.0), "p": (False, 3, 45.0)}
    assert since(crew.learners["k"]) == {"s0": (False, 0, 45.0), "p": (False, 0, 45.0)}
    assert since(crew.learners["p"]) == {"s0": (False, 0, 45.0), "p": (True, 0, 45.0)}
    crew.publish()
    look(crew.samplers["s0"])
    sample(crew, "s0")
    crew.clock.advance(60.0)
    crew.learners["l"].receive()
    assert [(c.since, c.came_s) for c in crew.learners["l"].waiting if c.group.round == 1] == [
        (3, 60.0)
    ] * 2
    ages = {
        (c.group.origin.peer, c.group.round): crew.learners["l"].waiting.window.age_s(c)
        for c in crew.learners["l"].waiting
    }
    # version 0 was superseded at 10 s; 3 is the newest
    assert ages == {("s0", 0): 50.0, ("p", 0): 15.0, ("s0", 1): 0.0}


def since(peer: Peer) -> dict[str, tuple[bool, int, float]]:
    return {c.group.origin.peer: (c.own, c.since, c.came_s) for c in peer.waiting}


@pytest.mark.slow
def test_ages_survive_a_checkpoint(folder: Path) -> None:
    crew = Crew(far_crew(folder, samplers={"s0": "l", "t": "k"}), folder)
    crew.publish()
    look(crew.samplers["s0"])
    sample(crew, "s0")
    crew.clock.advance(10.0)
    crew.learn()
    crew.learner.receive()
    state = msgspec.json.decode(msgspec.json.encode(crew.learner.state()), type=PeerState)
    again = build_peer(
        crew.run, crew.config.named("l"), crew.log, one_process_outbox(crew.config, "l"), crew.hub
    )
    again.load_state(state)
    assert since(again) == since(crew.learner) == {"s0": (True, 0, 10.0)}
    assert again.waiting.window.made_s == crew.learner.waiting.window.made_s == {0: 0.0, 1: 10.0}
    assert [again.waiting.window.age_s(c) for c in again.waiting] == [
        0.0
    ] * 2  # it has just been superseded


def mixed_ages(folder: Path, learning: str, **settings: Any) -> Crew:
    """A learner with groups of two versions waiting, more than one step takes."""
    crew = Crew(far_crew(folder, learning=learning, **settings), folder)
    crew.publish()
    for name in ("s0", "s1"):
        look(crew.samplers[name])
    sample(crew, "s0")
    crew.clock.advance(1.0)
    crew.next_version()
    look(crew.samplers["s1"])
    sample(crew, "s1")
    sample(crew, "s1")
    crew.learner.receive()
    return crew


@pytest.mark.slow
def test_the_freshest_of_each_sampler_go_first_and_under_pace_the_oldest(folder: Path) -> None:
    fresh = mixed_ages(folder, "").learner.choose()
    assert isinstance(fresh, Take)
    assert [c.group.id for c in fresh.groups] == ["s1.0.0", "s1.0.1", "s0.0.0", "s0.0.1"]
    paced = mixed_ages(folder, 'stale = "pace"').learner.choose()
    assert isinstance(paced, Take)
    assert [c.group.id for c in paced.groups] == ["s0.0.0", "s0.0.1", "s1.0.0", "s1.0.1"]


def two_versions_in_a_step(folder: Path, learning: str) -> Crew:
    crew = Crew(far_crew(folder, learning=learning), folder)
    crew.publish()
    for name in ("s0", "s1"):
        look(crew.samplers[name])
    sample(crew, "s0")
    crew.clock.advance(1.0)
    crew.next_version()
    look(crew.samplers["s1"])
    sample(crew, "s1")
    crew.learner.receive()
    return crew


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "learning"),
    [
        (mixed_ages, "max_age_s = 60"),
        (mixed_ages, 'max_age_s = 60\nstale = "pace"'),
        (two_versions_in_a_step, 'max_age_s = 60\nstale = "pace"'),
        (two_versions_in_a_step, "max_age_s = 60"),
    ],
)
def test_the_same_step_is_chosen_again_however_long_after_a_crash(
    folder: Path, make: Any, learning: str
) -> None:
    crew = make(folder, learning)
    peer, waiting = crew.learner, list(crew.learner.waiting)
    chosen = peer.choose()
    assert isinstance(chosen, Take)
    journalled, left = WrittenStep.of(0, peer.cursor, False, chosen.groups), list(peer.waiting)
    peer.waiting.restore(waiting, Counter())
    crew.clock.advance(1e6)
    again = peer.choose(again=journalled.positions)
    assert isinstance(again, Take)
    assert WrittenStep.of(0, peer.cursor, False, again.groups) == journalled
    assert list(peer.waiting) == left


@pytest.mark.slow
def test_steps_are_replayed_with_the_parts_they_had_however_late(folder: Path) -> None:
    crew = Crew(far_crew(folder, layout="horizontal", learning="max_age_s = 60"), folder)
    crew.publish()
    for sampler in crew.samplers.values():
        look(sampler)
    steps: list[WrittenStep] = []
    # at the first step the second round of s0 has no counterpart yet
    for names in (("s0", "s0", "s1"), ("s1",)):
        for name in names:
            sample(crew, name)
        crew.learner.receive()
        chosen = crew.learner.choose()
        assert isinstance(chosen, Take)
        steps.append(WrittenStep.of(len(steps), crew.learner.cursor, False, chosen.groups))
        crew.learner.step(chosen)
    again = build_peer(
        crew.run, crew.config.named("l"), crew.log, one_process_outbox(crew.config, "l"), crew.hub
    )
    crew.clock.advance(1e6)
    for step in steps:
        again.receive(until=step.cursor)
        chosen = again.choose(again=step.positions)
        assert isinstance(chosen, Take)
        assert WrittenStep.of(step.round, again.cursor, False, chosen.groups) == step
        again.step(chosen, again=True)


@pytest.mark.slow
def test_where_the_log_has_less_than_the_journal_nothing_is_chosen(folder: Path) -> None:
    crew = mixed_ages(folder, "max_age_s = 60")
    assert crew.learner.choose(again=[999]) == Wait()


@pytest.mark.slow
def test_a_window_in_seconds_drops_what_is_older_than_it(folder: Path) -> None:
    crew = mixed_ages(folder, "max_age_s = 60")
    crew.clock.advance(60.9)  # version 0 was superseded at 1 s, version 1 is the newest
    crew.learner.waiting.drop_stale(Round(0, crew.learner.crewmates, quorum=2))
    assert crew.learner.waiting.dropped == Counter()
    crew.clock.advance(61.1)
    assert isinstance(crew.learner.choose(), Take)
    assert crew.learner.waiting.dropped == Counter({("s0", "stale"): 2})
    assert list(crew.learner.waiting) == []


# Pace


def paced(folder: Path, learning: str, **settings: Any) -> Crew:
    crew = Crew(
        far_crew(folder, learning=f'stale = "pace"\n{learning}', rounds=50, **settings), folder
    )
    crew.publish()
    look(crew.samplers["s0"])
    return crew


def waits(crew: Crew, waiting: int, oldest_s: float = 0.0) -> bool:
    """Whether a sampler waits once it has heard from a learner that has so much of its left."""
    one = replace(candidate(group(peer="s0")), came_s=crew.clock.now_s() - oldest_s)
    crew.learner.waiting.restore([one] * waiting, Counter())
    crew.next_version()
    look(crew.samplers["s0"])
    return not crew.samplers["s0"].may_sample()


@pytest.mark.slow
def test_under_pace_a_sampler_waits_while_more_waits_than_the_window_can_use_up(
    folder: Path,
) -> None:
    crew = paced(folder, "max_age = 3")  # 4 groups a step
    assert [waits(crew, waiting) for waiting in (0, 4, 12, 13, 100, 12, 13, 0)] == [
        False,
        False,
        False,
        True,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.slow
def test_under_pace_with_a_window_of_nothing_one_step_may_still_wait(folder: Path) -> None:
    crew = paced(folder, "max_age = 0")
    assert [waits(crew, waiting) for waiting in (3, 4, 5)] == [False, False, True]


@pytest.mark.slow
def test_under_pace_in_seconds_a_sampler_waits_while_a_step_is_there_and_the_oldest_is_too_old(
    folder: Path,
) -> None:
    crew = paced(folder, "max_age_s = 60")
    crew.clock.advance(1000.0)
    cases = [(4, 60.5), (4, 60.0), (3, 500.0), (100, 59.0), (100, 61.0), (0, 0.0)]
    assert [waits(crew, *case) for case in cases] == [True, False, False, False, True, False]


@pytest.mark.slow
def test_without_pace_a_sampler_never_waits(folder: Path) -> None:
    crew = Crew(far_crew(folder, learning="max_age = 0", rounds=50), folder)
    crew.publish()
    look(crew.samplers["s0"])
    assert not waits(crew, 10_000, 1e6)


@pytest.mark.parametrize(
    "learning", ["max_age = 0", "max_age = 1", "max_age = 7", "max_age_s = 0.5", "max_age_s = 1e-9"]
)
def test_whoever_is_told_to_wait_waits_for_a_learner_that_can_step(
    folder: Path, learning: str
) -> None:
    config = far_crew(folder, learning=f'stale = "pace"\n{learning}')
    for waiting in range(200):
        for oldest_s in (0.0, 0.4, 0.6, 1e9):
            assert waiting >= config.crew.problems_per_round or not holds_up(
                Backlog(waiting=(("s0", waiting),), oldest_s=oldest_s), "s0", config
            )


@pytest.mark.slow
@pytest.mark.parametrize("learning", ["max_age = 2", slow("max_age = 0"), slow("max_age_s = 0.5")])
def test_a_paced_learner_and_its_samplers_go_on_for_ever(folder: Path, learning: str) -> None:
    crew = paced(folder, learning)
    learner, ever_waited = crew.learner, False
    look(crew.samplers["s1"])
    for turn in range(20):
        crew.clock.advance(0.3 * turn)
        before = (learner.learned_rounds, len(crew.log))
        for name, sampler in crew.samplers.items():
            look(sampler)
            if turn % 4 == 3:  # a learner four times as slow
                continue
            ever_waited |= not sampler.may_sample()
            if sampler.may_sample():
                sample(crew, name)
        if turn % 4 == 3 or not any(s.may_sample() for s in crew.samplers.values()):
            learner.receive()
            if isinstance(learner.learn(), Learned):
                crew.publish()
                for sampler in crew.samplers.values():
                    look(sampler)
        assert (learner.learned_rounds, len(crew.log)) != before, f"stands still at turn {turn}"
    assert ever_waited
    assert learner.waiting.dropped == Counter()


# What is on its way


@pytest.mark.slow
def test_while_a_version_is_on_its_way_up_the_next_are_left_out_but_for_the_last(
    folder: Path,
) -> None:
    crew = Crew(far_crew(folder, rounds=4, network="[network.link.l]\ndelay = 100"), folder)
    versions = lambda: [
        content.version for content in crew.contents() if isinstance(content, Weights)
    ]
    for at_s in (0.0, 10.0, 20.0):
        crew.clock.advance(at_s)
        crew.publish()
        crew.learn()
    assert (len(crew.learner.half.outbox), versions()) == (1, [])
    crew.clock.advance(100.0)
    crew.learner.half.outbox.deliver(crew.log, crew.clock.now_s(), crew.blobs["l"])
    crew.publish()  # version 3: the way is free
    crew.learn()
    crew.publish()  # version 4 is the last, and is sent whatever is on its way
    crew.clock.advance(200.0)
    crew.learner.half.outbox.deliver(crew.log, crew.clock.now_s(), crew.blobs["l"])
    assert versions() == [0, 3, 4]
    sampler = crew.samplers["s0"]
    assert look(sampler)
    assert crew.holds(sampler, 4)


@pytest.mark.slow
def test_a_roster_and_the_first_weights_that_land_between_two_reads_are_both_taken(
    folder: Path,
) -> None:
    config = far_crew(folder)
    crew = Crew(config, folder)
    roster = next(content for content in crew.contents() if isinstance(content, Roster))
    bare = MemoryLog()
    hub = one_process_outbox(config, HUB)
    hub.put([msgspec.structs.replace(roster, keys={})])
    hub.deliver(bare)
    sampler = crew.samplers["s0"]
    read, calls = bare.read, []

    def read_and_then(after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        found = read(after, limit, sender)
        calls.append(sender)
        if len(calls) == 1:  # behind the sampler's back
            hub.put([msgspec.structs.replace(roster, number=1)])
            hub.deliver(bare)
            crew.learner.publish_weights()
            crew.learner.half.outbox.deliver(bare, blobs=crew.blobs["l"])
        return found

    bare.read = read_and_then  # type: ignore[method-assign]
    sampler.log = bare
    assert look(sampler)
    assert sampler.follower.version == 0
    assert sampler.admission.refused == Counter()


@pytest.mark.slow
def test_sampling_goes_on_while_weights_are_fetched(folder: Path) -> None:
    crew = Crew(far_crew(folder), folder)
    sampler = crew.samplers["s0"]
    crew.publish()
    assert look(sampler)
    waiting: list[Callable[[], Any]] = []
    future: Future[Any] = Future()

    def later(fetch: Callable[[], Any]) -> Future[Any]:
        waiting.append(fetch)
        return future

    sampler.submit = later
    crew.next_version()
    assert not look(sampler)
    assert sampler.may_sample()
    assert sampler.half.draw().sampled.version == 0
    future.set_result(waiting[0]())
    assert look(sampler)
    assert crew.holds(sampler, 1)


@pytest.mark.slow
def test_a_fetch_that_finds_no_store_is_tried_again(folder: Path) -> None:
    crew = Crew(far_crew(folder), folder)
    sampler, get = crew.samplers["s0"], crew.blobs["l"].get
    crew.publish()
    down = True

    def get_if_up(name: str, num_bytes: int) -> bytes | None:
        if down:
            raise LogError("no connection")
        return get(name, num_bytes)

    sampler.blobs.get = get_if_up  # type: ignore[method-assign]
    for _ in range(5):  # more often than a missing blob is forgiven
        with pytest.raises(LogError, match="no connection"):
            look(sampler)
    down = False
    assert look(sampler)
    assert crew.holds(sampler, 0)


@pytest.mark.slow
def test_a_sampler_ends_when_its_learner_is_shut_out(folder: Path) -> None:
    crew = Crew(far_crew(folder), folder)
    sampler = crew.samplers["s0"]
    crew.publish()
    look(sampler)
    assert not sampler.finished
    roster = next(content for content in crew.contents() if isinstance(content, Roster))
    hub = one_process_outbox(crew.config, HUB)
    hub.head = Head(*stamp_behind(crew.log))
    keys = {name: key for name, key in roster.keys.items() if name != "l"}
    hub.put([msgspec.structs.replace(roster, number=1, keys=keys, revoked=("l",))])
    hub.deliver(crew.log)
    look(sampler)
    assert sampler.finished


def stamp_behind(log: MemoryLog) -> tuple[int, bytes]:
    """The place behind the hub's last record."""
    stamp, hash = stamp_of(MemoryLog.read(log, 0, sender=HUB)[-1])
    return stamp.counter + 1, hash
