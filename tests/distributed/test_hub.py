from __future__ import annotations

import itertools
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from nats.aio.client import Client

from exchange.contract import admission, rounds_of
from exchange.nats_server import eventually, open_server, refused, settle
from fakes import identity
from hubs import PATIENCE_S, AtWork, local_place
from motley.clock import Clock, RealClock
from motley.config import CrewConfig, parse_config
from motley.distributed import hub as module
from motley.distributed import orders, watch
from motley.distributed.desk import Desk
from motley.distributed.hub import Hub
from motley.distributed.orders import give_order
from motley.distributed.register import Answer, Order, Place, read_state
from motley.exchange import Entry, LogError, Mark, Outbox, Signer, stands_under
from motley.exchange.nats.connection import Connection, Login, NotAdmittedError
from motley.exchange.nats.log import NatsLog, create_stream
from motley.exchange.nats.names import Names
from motley.exchange.nats.presence import Beat, Presence, Voice
from motley.exchange.nats.server import Server, _binary, fingerprint, free_port, self_signed
from motley.exchange.nats.stream import HEADERS_BYTES
from motley.records import HUB, Charter, Roster
from motley.tasks import load_task
from motley.trust import Admitted, Identity, known, read_hub
from motley.trust.invitation import Enrolment, Invitation

NAME = "crew"
CREW = f"""
[crew]
name = "{NAME}"
task = "digits"
rounds = 3
group_size = 4
problems_per_round = 2
objective = "ftis"
[[peer]]
name = "a"
model = "tiny:0.3m"
[[peer]]
name = "b"
model = "tiny:0.3m"
"""
CONFIG = parse_config(CREW)
NAMES = Names(NAME)
NUMBERS = itertools.count()  # of crews on a server that is shared


class Household:
    """One hub's folder on this machine, and all that is opened around it."""

    def __init__(self, folder: Path, place: Place | None = None, crew: str = NAME) -> None:
        self.folder, self.place = folder, place or local_place()
        self.crew, self.names = crew, Names(crew)
        self.config = parse_config(CREW.replace(f'"{NAME}"', f'"{crew}"'))
        self.said: list[str] = []
        self.hubs: list[Hub] = []
        self.connections: list[Connection] = []

    def open(self, config: CrewConfig | None = None) -> Hub:
        made = Hub.open(config or self.config, self.folder, self.place, self.said.append)
        self.hubs.append(made)
        return made

    def start(self) -> Hub:
        made = self.open()
        made.start()
        return made

    def stop(self, hub: Hub) -> None:
        self.hubs.remove(hub)
        hub.close()

    def invitation(self, peer: str) -> Invitation:
        return Invitation.read(self.hubs[-1].register.invitations()[peer].split()[-1])

    def connect(self, name: str, key: Identity, certificate: str = "") -> Connection:
        made = Connection(Login(self.place.url, name, key.nkey_seed, certificate))
        self.connections.append(made)
        return made

    def log(self, name: str, key: Identity) -> NatsLog:
        """Logged in as a peer, as soon as its key is let in."""
        return NatsLog(eventually(lambda: self.admitted(name, key)), self.crew)

    def admitted(self, name: str, key: Identity, certificate: str = "") -> Connection | None:
        try:
            return self.connect(name, key, certificate)
        except NotAdmittedError:
            return None

    def join(self, peer: str, key: Identity) -> NatsLog:
        """Enrol and log in, as a participant does.

        Question and answer may be lost while the server takes in new rights.
        """
        joined = f"{peer} has joined with key {key.nkey}"

        def asked() -> bool:
            line = self.hubs[-1].register.invitations().get(peer)
            invited = Invitation.read(line.split()[-1]) if line else None
            guest = invited and self.admitted(f"invited-{peer}", Identity.of(invited.secret))
            if invited and guest:
                with suppress(LogError):
                    assert ask(guest, Enrolment.ask(self.crew, invited, key)) == Answer()
                guest.close()
            return joined in self.said

        eventually(lambda: joined in self.said or asked())
        return self.log(peer, key)

    def enrolment(self, peer: str, key: Identity) -> Enrolment:
        return Enrolment.ask(self.crew, self.invitation(peer), key)

    def guest(self, peer: str) -> Connection:
        invited = Identity.of(self.invitation(peer).secret)
        return eventually(lambda: self.admitted(f"invited-{peer}", invited))

    def rosters(self) -> list[Roster]:
        """All on the log, each signed by the hub."""
        hub = self.hubs[-1]
        entries = hub.office.log.records_of(HUB)
        read_hub(entries, self.crew, hub.register.identity.public)
        return [content for content, _ in map(known, entries) if isinstance(content, Roster)]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for hub in self.hubs:
            hub.close()


def ask(
    connection: Connection, asked: Enrolment | bytes, subject: str = "", timeout_s: float = 5
) -> Answer:
    content = asked if isinstance(asked, bytes) else msgspec.msgpack.encode(asked)
    if not subject:
        assert isinstance(asked, Enrolment)
        subject = Names(asked.crew).enrolment(asked.peer)
    reply = connection.call(lambda client: client.request(subject, content, timeout_s))
    return msgspec.msgpack.decode(reply.data, type=Answer)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Household]:
    made = Household(tmp_path / "hub")
    yield made
    made.close()


@pytest.fixture
def hub(home: Household) -> Iterator[Hub]:
    """Started and at work."""
    made = home.start()
    with AtWork(made):
        yield made


# Founding


def test_a_new_hub_writes_its_charter_and_an_empty_roster_signed_by_its_key(
    home: Household,
) -> None:
    hub = home.start()
    charter, roster = read_hub(hub.office.log.records_of(HUB), "crew", hub.register.identity.public)
    assert parse_config(charter.config) == CONFIG
    assert charter.task == load_task("digits", {}).fingerprint
    assert (roster.number, roster.keys, roster.revoked) == (0, {}, ())
    assert [entry.id for entry in hub.office.log.read(0)] == ["hub.charter", "hub.roster.0"]
    with pytest.raises(ValueError, match="not signed by the hub"):
        read_hub(hub.office.log.records_of(HUB), "crew", identity("other").public)


def test_a_hub_that_is_started_again_goes_on_with_what_is_there(home: Household) -> None:
    first = home.start()
    with AtWork(first):
        home.join("a", identity("a"))
    before, lines = first.office.log.read(0), first.register.invitations()
    home.stop(first)
    second = home.start()
    assert second.register.identity == first.register.identity
    assert second.office.log.read(0) == before
    assert second.register.invitations() == lines
    assert list(lines) == ["b"]
    assert home.rosters()[-1].keys == {"a": identity("a").public}
    home.log("a", identity("a")).append([("a.0.0", b"x")])


def test_only_its_owner_may_read_what_the_hub_keeps(home: Household) -> None:
    home.start()
    for name in ("hub.json", "hub.key", "server/server.json"):
        assert stat.S_IMODE((home.folder / name).stat().st_mode) == 0o600


def test_two_hubs_cannot_run_in_one_folder(home: Household) -> None:
    hub = home.start()
    with pytest.raises(
        ValueError,
        match=r"a hub is already running in .*; stop it first, or choose another folder with --out",
    ):
        home.open()
    assert hub.server
    assert hub.server.alive()
    home.stop(hub)
    home.open()


def test_a_folder_of_another_crew_is_refused(home: Household) -> None:
    home.stop(home.start())
    other = parse_config(CREW.replace("rounds = 3", "rounds = 4"))
    with pytest.raises(
        ValueError, match="other settings; choose another folder with --out, or delete it"
    ):
        home.open(other)
    home.open()


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff", b'{"crew": 3}'])
def test_a_folder_without_a_hubs_state_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "hub.json").write_bytes(content)
    with pytest.raises(ValueError, match="is not the folder of a hub"):
        read_state(tmp_path)


# Invitations


def test_there_is_one_line_to_paste_per_peer(home: Household) -> None:
    hub = home.start()
    lines = hub.register.invitations()
    assert list(lines) == ["a", "b"]
    for peer, line in lines.items():
        found = re.fullmatch(r"motley join (\S+) --crew (\S+) --invite (\S+)", line)
        assert found
        assert found[1] == home.place.url
        assert found[2] == "crew"
        invitation = Invitation.read(found[3])
        assert (invitation.peer, invitation.hub, invitation.certificate) == (
            peer,
            hub.register.identity.public,
            "",
        )
    assert home.invitation("a").secret != home.invitation("b").secret


def test_with_an_invitation_a_peer_brings_its_key_and_is_let_in_without_a_restart(
    home: Household, hub: Hub
) -> None:
    assert hub.server
    pid = hub.server._pid()
    key = identity("a")
    with pytest.raises(NotAdmittedError):
        home.connect("a", key)
    log = home.join("a", key)
    log.append([("a.0.0", b"of a")])
    assert [entry.id for entry in log.read(0)] == [
        "hub.charter",
        "hub.roster.0",
        "hub.roster.1",
        "a.0.0",
    ]
    _, roster = read_hub(log.records_of(HUB), "crew", hub.register.identity.public)
    assert (roster.number, roster.keys, roster.revoked) == (1, {"a": key.public}, ())
    assert list(hub.register.invitations()) == ["b"]
    assert hub.server._pid() == pid
    assert hub.office.connection.trouble == ""


def test_a_key_is_let_in_only_behind_the_roster_that_has_it(
    home: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = home.start()
    usual, rosters = Server.reload, []

    def reload(server: Server) -> None:
        rosters.append(home.rosters()[-1].keys)
        usual(server)

    monkeypatch.setattr(Server, "reload", reload)
    with AtWork(hub):
        home.join("a", identity("a"))
    assert rosters == [{"a": identity("a").public}]


def test_an_invitation_is_good_for_one_key(home: Household, hub: Hub) -> None:
    invitation = home.invitation("a")
    home.join("a", identity("a"))
    eventually(lambda: home.admitted("invited-a", Identity.of(invitation.secret)) is None)
    late = Enrolment.ask("crew", invitation, identity("late"))
    answer = ask(hub.office.connection, late)  # had it still been connected
    assert "invitation of a is not open" in answer.error
    # its first answer was lost
    assert ask(hub.office.connection, Enrolment.ask("crew", invitation, identity("a"))) == Answer()
    assert [roster.number for roster in home.rosters()] == [0, 1]
    assert home.rosters()[-1].keys == {"a": identity("a").public}


def test_who_enrols_beside_others_is_on_one_roster_with_them(home: Household) -> None:
    hub = home.start()
    for peer in ("a", "b"):
        asked = msgspec.msgpack.encode(home.enrolment(peer, identity(peer)))
        home.guest(peer).publish(NAMES.enrolment(peer), asked)
    eventually(lambda: hub.office.asked._waiting.qsize() == 2)
    hub.tick(0)
    assert [sorted(roster.keys) for roster in home.rosters()] == [[], ["a", "b"]]
    assert sum(" has joined with key " in said for said in home.said) == 2
    for peer in ("a", "b"):
        home.log(peer, identity(peer))


def test_peers_enrol_at_the_same_time(home: Household, hub: Hub) -> None:
    joined: dict[str, NatsLog] = {}
    threads = [
        threading.Thread(
            target=lambda peer=peer: joined.update({peer: home.join(peer, identity(peer))})
        )
        for peer in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert home.rosters()[-1].keys == {peer: identity(peer).public for peer in ("a", "b")}
    assert hub.register.invitations() == {}
    for peer, log in joined.items():
        eventually(lambda log=log, peer=peer: appended(log, f"{peer}.0.0"))


def appended(log: NatsLog, id: str) -> bool:
    """An answer may be lost while the server lets another peer in."""
    try:
        log.append([(id, b"x")])
    except LogError:
        return False
    return True


def test_an_enrolled_peer_is_heard_and_another_key_under_its_name_is_not(
    home: Household, hub: Hub
) -> None:
    connection = home.join("a", identity("a")).connection
    for key, state in ((identity("other"), "learning"), (identity("a"), "sampling")):
        voice = Presence(
            connection, "crew", lambda peer, signature, message: False, Voice("a", key.sign)
        )
        voice.say(Beat(state, 1))
        if key == identity("a"):
            eventually(
                lambda: (
                    "a" in hub.office.presence.heard
                    and hub.office.presence.heard["a"].state == "sampling"
                )
            )
        voice.close(Beat(state, 1))
    assert hub.office.presence.heard["a"].state == "sampling"


# Shutting out


def test_a_peer_that_is_shut_out_is_disconnected_and_cannot_come_back(
    home: Household, hub: Hub
) -> None:
    a, b = home.join("a", identity("a")), home.join("b", identity("b"))
    assert "motley hub ... --invite a" in give_order(home.folder, Order("revoke", "a"))
    eventually(lambda: a.connection.shut_out)
    with pytest.raises(LogError, match=f"no connection to {home.place.url}"):
        a.append([("a.0.0", b"x")])
    assert home.admitted("a", identity("a")) is None
    assert b.connection.trouble == ""
    eventually(lambda: appended(b, "b.0.0"))
    roster = home.rosters()[-1]
    assert (roster.number, roster.keys, roster.revoked) == (3, {"b": identity("b").public}, ("a",))
    with pytest.raises(ValueError, match="a is shut out already"):
        give_order(home.folder, Order("revoke", "a"))


@pytest.mark.slow
def test_a_peer_that_never_came_can_be_shut_out(home: Household, hub: Hub) -> None:
    guest = home.guest("a")
    give_order(home.folder, Order("revoke", "a"))
    eventually(lambda: guest.shut_out)
    assert list(hub.register.invitations()) == ["b"]
    assert home.rosters()[-1].revoked == ("a",)


def test_peers_admit_records_of_who_is_on_the_roster_and_refuse_them_after_it_was_shut_out(
    home: Household, hub: Hub
) -> None:
    gate = admission()
    gate.hub = hub.register.identity.public
    outbox = Outbox(None, Signer(identity("a").public, identity("a").sign))
    first, second = rounds_of("a")[:2]
    log = home.join("a", identity("a"))
    outbox.put([first])
    outbox.deliver(log)
    give_order(home.folder, Order("revoke", "a"))
    outbox.put([second])
    outbox.deliver(hub.office.log)  # as if it had come through at the last moment
    verdicts = [gate.admit(entry) for entry in hub.office.log.read(0)]
    admitted = [verdict.group.id for verdict in verdicts if isinstance(verdict, Admitted)]
    assert admitted == [first.id]
    assert gate.refused == {("a", "revoked"): 1}
    assert gate.kept[-1].id == second.id


def test_a_peer_invited_anew_comes_back_with_another_key_and_is_no_longer_shut_out(
    home: Household, hub: Hub
) -> None:
    old = home.invitation("a")
    home.join("a", identity("a"))
    give_order(home.folder, Order("revoke", "a"))
    assert give_order(home.folder, Order("invite", "a")) == hub.register.invitations()["a"]
    assert home.rosters()[-1].revoked == ("a",)  # until it is there
    assert home.invitation("a").secret != old.secret
    refusal = ask(hub.office.connection, Enrolment.ask("crew", old, identity("new")))
    assert "replaced by a newer one" in refusal.error
    home.join("a", identity("new")).append([("a.5.0", b"back")])
    assert home.admitted("a", identity("a")) is None
    roster = home.rosters()[-1]
    assert (roster.keys, roster.revoked) == ({"a": identity("new").public}, ())


@pytest.mark.slow
def test_a_peer_that_lost_its_key_is_invited_anew_and_the_old_key_stops_counting(
    home: Household, hub: Hub
) -> None:
    lost = home.join("a", identity("a"))
    give_order(home.folder, Order("invite", "a"))
    assert eventually(lambda: home.admitted("a", identity("a")))  # still counts
    home.join("a", identity("new"))
    eventually(lambda: lost.connection.shut_out)
    assert home.rosters()[-1].keys == {"a": identity("new").public}


@pytest.mark.parametrize("what", ["revoke", "invite"])
def test_an_order_about_an_unknown_peer_is_refused(home: Household, hub: Hub, what: str) -> None:
    with pytest.raises(ValueError, match="the crew has no peer 'zoe'; it has a, b"):
        give_order(home.folder, Order(what, "zoe"))
    assert [roster.number for roster in home.rosters()] == [0]


@pytest.fixture
def patiences(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long orders wait for a hub that is running; none is."""
    waited: list[float] = []

    def fail(login: Login, patience_s: float, clock: Clock) -> Connection:
        waited.append(patience_s)
        raise LogError("cannot reach it")

    monkeypatch.setattr(orders, "Connection", fail)
    return waited


@pytest.mark.slow
def test_orders_to_a_stopped_hub_count_when_it_runs_next(
    home: Household, patiences: list[float]
) -> None:
    hub = home.start()
    with AtWork(hub):
        home.join("a", identity("a"))
    home.stop(hub)
    assert "a is shut out" in give_order(home.folder, Order("revoke", "a"))
    assert hub.server
    assert not hub.server.alive()
    line = give_order(home.folder, Order("invite", "a"))
    hub = home.start()
    assert hub.register.invitations()["a"] == line
    assert home.admitted("a", identity("a")) is None
    assert [(roster.number, roster.revoked) for roster in home.rosters()] == [
        (0, ()),
        (1, ()),
        (2, ("a",)),
    ]


def test_an_order_does_not_wait_long_for_a_hub_that_may_be_stopped(
    home: Household, patiences: list[float]
) -> None:
    home.stop(home.start())
    give_order(home.folder, Order("revoke", "a"))
    assert patiences == [1]


def test_a_running_hub_that_does_not_answer_an_order_is_not_taken_for_a_stopped_one(
    home: Household, hub: Hub, patiences: list[float]
) -> None:
    with pytest.raises(ValueError, match=r"is running and did not take the order: cannot reach it"):
        give_order(home.folder, Order("revoke", "a"))
    assert read_state(home.folder).revoked == []


# Quotas


def flood(log: NatsLog, peer: str, first: int, num_records: int) -> None:
    """As many records as it can, until the server takes no more; some answers may be lost."""
    for start in range(first, first + num_records, 100):
        try:
            log.append([(f"{peer}.{start + number}.0", b"x") for number in range(100)])
        except LogError as error:
            if "permissions violation" in str(error):
                return


def muted(home: Household, peer: str) -> bool:
    return any(said.startswith(f"{peer} has ") and "--pardon" in said for said in home.said)


@pytest.mark.slow
def test_who_writes_more_than_it_can_need_may_not_write_any_more_and_others_can(
    home: Household, hub: Hub
) -> None:
    a, b = home.join("a", identity("a")), home.join("b", identity("b"))
    flood(a, "a", 1000, 2000)
    eventually(lambda: muted(home, "a"))
    eventually(lambda: refused(a, "a.0.0"))
    assert read_state(home.folder).muted == ["a"]
    assert a.read(0)  # it can still see what the crew does
    eventually(lambda: appended(b, "b.0.0"))
    assert b.connection._client.stats["reconnects"] == 0


@pytest.mark.slow
def test_a_peer_that_was_muted_can_be_pardoned_and_then_has_its_quota_again(
    home: Household, hub: Hub
) -> None:
    a = home.join("a", identity("a"))
    flood(a, "a", 1000, 1000)
    eventually(lambda: muted(home, "a"))
    assert "a may write again" in give_order(home.folder, Order("pardon", "a"))
    eventually(lambda: appended(a, "a.0.0"))
    home.said.clear()
    flood(a, "a", 5000, 1000)
    eventually(lambda: muted(home, "a"))


@pytest.mark.slow
def test_a_hub_that_starts_counts_what_is_on_the_log_already(home: Household) -> None:
    first = home.start()
    with AtWork(first):
        a = home.join("a", identity("a"))
    flood(a, "a", 0, 400)  # while nobody counts
    home.stop(first)
    with AtWork(home.start()):
        eventually(lambda: muted(home, "a"))


def test_the_log_and_the_stores_have_limits_and_room_for_all_beside_what_is_there(
    home: Household, hub: Hub
) -> None:
    log = home.join("a", identity("a"))
    before = limits(hub)
    log.append([(f"a.0.{number}", bytes(9000)) for number in range(100)])
    give_order(home.folder, Order("revoke", "a"))
    quotas = hub.register.quotas
    assert before[0] >= quotas.room_bytes
    assert limits(hub)[0] >= quotas.room_bytes + 100 * 9000
    assert limits(hub)[1] == quotas.largest_bytes + HEADERS_BYTES


def limits(hub: Hub) -> tuple[int, int]:
    """Of the log. A server that takes in new rights may have nobody who answers, for a moment."""

    async def work(client: Client) -> tuple[int, int]:
        config = (await client.jetstream().stream_info(NAMES.stream)).config
        return config.max_bytes, config.max_msg_size

    def asked() -> tuple[int, int] | None:
        with suppress(LogError):
            return hub.office.connection.call(work)
        return None

    return eventually(asked)


def test_a_record_larger_than_any_honest_one_is_not_taken(home: Household, hub: Hub) -> None:
    a, b = home.join("a", identity("a")), home.join("b", identity("b"))
    size = hub.register.quotas.record_bytes(CONFIG.peer[0]) + 2 * HEADERS_BYTES
    with pytest.raises(LogError):
        a.append([("a.0.0", bytes(size))])
    assert b.connection.trouble == ""
    assert [entry for entry in b.read(0) if entry.id == "a.0.0"] == []


# Clocks


class SetClock(RealClock):
    """Shows another time than it is."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


@pytest.mark.parametrize("ahead_s", [-3600.0, 3e9])
def test_orders_are_carried_out_whatever_the_clock_shows(
    home: Household, hub: Hub, ahead_s: float
) -> None:
    give_order(home.folder, Order("invite", "a"), SetClock(ahead_s))
    give_order(home.folder, Order("invite", "b"))
    assert "a is shut out" in give_order(home.folder, Order("revoke", "a"), SetClock(-ahead_s))


def test_an_order_is_not_carried_out_again_by_a_hub_that_was_started_anew(home: Household) -> None:
    hub = home.start()
    order = Order("revoke", "a").by(hub.register.state, hub.register.identity)
    hub.register.check(order)
    home.stop(hub)
    again = home.open()
    with pytest.raises(ValueError, match="or gave before"):
        again.register.check(order)


# Invitations that end


def test_an_invitation_is_good_until_its_end_by_the_hubs_clock(home: Household, hub: Hub) -> None:
    for days, error in ((-1.0, "was good until"), (1.0, ""), (0.0, "")):
        give_order(home.folder, Order("invite", "a", days=days))
        invitation = home.invitation("a")
        assert bool(invitation.expires_s) == bool(days)
        answer = ask(hub.office.connection, Enrolment.ask("crew", invitation, identity(f"{days}")))
        assert error in answer.error
        assert bool(error) == bool(answer.error)


def test_a_hub_folder_without_ends_of_invitations_is_read(home: Household) -> None:
    hub = home.open()
    content = msgspec.json.decode(msgspec.json.encode(hub.register.state))
    for late in ("expires_s", "muted", "forgiven", "ordered"):
        del content[late]
    (home.folder / "hub.json").write_bytes(msgspec.json.encode(content))
    assert read_state(home.folder).expires_s == {}


# A server where anybody may write


@pytest.mark.slow
def test_who_takes_the_hubs_subjects_or_a_peers_first_blocks_nobody(open_home: Household) -> None:
    stranger = open_home.connect("stranger", identity("stranger"))
    create_stream(stranger, open_home.crew)
    forged = NatsLog(stranger, open_home.crew)
    forged.append([("hub.charter", b"forged"), ("hub.roster.0", b"forged"), ("a.0.0", b"forged")])
    hub = open_home.start()
    with AtWork(hub):
        assert ask(open_home.guest("a"), open_home.enrolment("a", identity("a"))) == Answer()
    charter, roster = read_hub(
        hub.office.log.records_of(HUB), open_home.crew, hub.register.identity.public
    )
    assert parse_config(charter.config) == open_home.config
    assert roster.keys == {"a": identity("a").public}
    log = open_home.log("a", identity("a"))
    for _ in range(2):
        log.append([("a.0.0", b"of a")])
    found = [entry for entry in log.read(0) if entry.id.startswith("a.0.0")]
    assert [entry.record for entry in found] == [b"forged", b"of a"]
    assert stands_under(found[1].id, "a.0.0", b"of a")
    assert not stands_under(found[1].id, "a.0.0", b"forged")


# A server of an older version


def test_a_server_with_other_settings_of_its_streams_is_started_anew_when_it_is_taken_over(
    home: Household,
) -> None:
    hub = home.start()
    assert hub.server
    path = home.folder / "server" / "server.json"
    old = json.loads(path.read_bytes())
    old["jetstream"].pop("max_file_store")
    hub.server.stop()
    path.write_text(json.dumps(old))
    hub.server.start()
    pid = hub.server._pid()
    other = Server(NAME, hub.server.folder, hub.server.host, hub.server.port)
    other.configure(hub.register.identity.nkey, hub.register.users())
    assert other.start() is False
    assert other._pid() != pid
    other.stop()


# Crashes


RUN = """
import sys
from pathlib import Path
import msgspec
from motley.config import read_config
from motley.distributed.hub import Hub
from motley.distributed.register import Place
place = msgspec.json.decode(sys.argv[3], type=Place)
hub = Hub.open(read_config(Path(sys.argv[1])), Path(sys.argv[2]), place)
hub.start()
print("up", flush=True)
while True:
    hub.tick(0.01)
"""


@contextmanager
def hub_process(home: Household) -> Iterator[subprocess.Popen[str]]:
    """A hub in a process of its own, killed -9 in the end; its server goes on."""
    path = home.folder.with_name("crew.toml")
    path.write_text(CREW)
    command = [
        sys.executable,
        "-c",
        RUN,
        str(path),
        str(home.folder),
        msgspec.json.encode(home.place).decode(),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def invitation_in(folder: Path, peer: str) -> Invitation:
    return Invitation(
        peer, read_state(folder).invited[peer], Identity.kept_at(folder / "hub.key").public
    )


def test_after_kill_9_a_hub_goes_on_with_its_key_its_roster_and_its_server(home: Household) -> None:
    with hub_process(home):
        invitation = invitation_in(home.folder, "a")
        guest = eventually(lambda: home.admitted("invited-a", Identity.of(invitation.secret)))
        with suppress(LogError):
            ask(guest, Enrolment.ask("crew", invitation, identity("a")))
        log = home.log("a", identity("a"))
        eventually(lambda: log.last_of(HUB).id == "hub.roster.1")
        log.append([("a.0.0", b"before")])
    log.append([("a.0.1", b"the server lives")])
    before = log.read(0)
    server = (home.folder / "server" / "server.pid").read_text()
    hub = home.start()
    assert home.said == [f"took over the server at {home.place.url}"]
    assert hub.register.identity.public == invitation.hub
    assert hub.register.state.number == 1
    assert hub.office.log.read(0) == before
    assert (home.folder / "server" / "server.pid").read_text() == server
    with AtWork(hub):
        home.join("b", identity("b"))
        eventually(lambda: appended(log, "a.0.2"))
    assert [roster.number for roster in home.rosters()] == [0, 1, 2]
    assert log.connection._client.stats["reconnects"] == 0


@pytest.mark.slow
def test_an_order_after_kill_9_is_carried_out_though_the_server_lives(home: Household) -> None:
    with hub_process(home):
        pass
    try:
        assert "a is shut out" in give_order(home.folder, Order("revoke", "a"))
        assert read_state(home.folder).revoked == ["a"]
    finally:
        home.start()  # takes the server over, and stops it in the end


@pytest.mark.slow
@pytest.mark.parametrize(
    "put", [False, True], ids=["before the roster was kept", "before the roster was sent"]
)
def test_a_crash_between_keeping_the_state_and_publishing_the_roster_is_repaired(
    home: Household, put: bool
) -> None:
    hub = home.start()
    hub.register.state.number += 1
    hub.register.state.keys["a"] = identity("a").public
    del hub.register.state.invited["a"]
    hub.register.keep()
    if put:
        hub.outbox.put(
            [Roster(crew="crew", number=1, keys=dict(hub.register.state.keys))], Mark("roster", 1)
        )
    home.stop(hub)
    home.start()
    assert [(roster.number, list(roster.keys)) for roster in home.rosters()] == [
        (0, []),
        (1, ["a"]),
    ]
    home.log("a", identity("a")).append([("a.0.0", b"x")])


def test_a_crash_before_the_charter_was_sent_is_repaired(home: Household) -> None:
    hub = home.open()
    outbox = Outbox(
        home.folder / "outbox.sqlite",
        Signer(hub.register.identity.public, hub.register.identity.sign),
    )
    outbox.put(
        [
            Charter(
                crew="crew",
                config=hub.register.state.config,
                task=load_task("digits", {}).fingerprint,
            )
        ],
        Mark("charter"),
    )
    outbox.close()
    hub.start()
    assert [entry.id for entry in hub.office.log.read(0)] == ["hub.charter", "hub.roster.0"]


def test_a_server_that_dies_is_started_again_and_everyone_comes_back(
    home: Household, hub: Hub
) -> None:
    log = home.join("a", identity("a"))
    assert hub.server
    hub.server.kill()
    eventually(lambda: "the server died; starting it again" in home.said)
    eventually(lambda: not log.connection.trouble and not hub.office.connection.trouble)
    eventually(lambda: appended(log, "a.0.0"))
    home.join("b", identity("b"))


@pytest.mark.slow
def test_who_is_invited_while_the_server_is_dead_is_let_in_when_it_is_back(home: Household) -> None:
    hub = home.start()
    assert hub.server
    hub.server.kill()
    eventually(lambda: not hub.server.alive())
    hub.invite("a")
    hub.tick(0)
    eventually(lambda: not hub.office.connection.trouble)
    home.guest("a")


@pytest.mark.slow
def test_a_key_brought_while_the_server_is_dead_is_let_in_when_it_is_back(home: Household) -> None:
    hub = home.start()
    assert hub.server
    asked = home.enrolment("a", identity("a"))
    guest = home.guest("a")
    guest.publish(NAMES.enrolment("a"), msgspec.msgpack.encode(asked))
    eventually(lambda: not hub.office.asked.empty())
    hub.server.kill()
    eventually(lambda: not hub.server.alive() and hub.office.connection.trouble)
    hub.tick(0)
    eventually(lambda: not hub.office.connection.trouble)
    for _ in range(3):
        hub.tick(0)
    home.log("a", identity("a"))
    assert [roster.number for roster in home.rosters()] == [0, 1]


# Requests that are not to be granted, on a server where everybody may send everything


@pytest.fixture(scope="module")
def open_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all, each with a crew of its own."""
    with open_server(tmp_path_factory.mktemp("open") / "server") as url:
        yield url


@pytest.fixture
def open_home(tmp_path: Path, open_url: str) -> Iterator[Household]:
    made = Household(tmp_path / "hub", Place(url=open_url), f"crew-{next(NUMBERS)}")
    yield made
    made.close()


@pytest.fixture
def open_hub(open_home: Household) -> Iterator[Hub]:
    made = open_home.start()
    with AtWork(made):
        yield made


def test_a_hub_on_a_server_of_somebody_elses_admits_peers_and_keeps_the_log(
    open_home: Household, open_hub: Hub
) -> None:
    assert open_hub.server is None
    guest = open_home.guest("a")
    invitation = open_home.invitation("a")
    assert ask(guest, Enrolment.ask(open_home.crew, invitation, identity("a"))) == Answer()
    assert ask(guest, Enrolment.ask(open_home.crew, invitation, identity("a"))) == Answer()
    assert (
        "not open" in ask(guest, Enrolment.ask(open_home.crew, invitation, identity("late"))).error
    )
    log = open_home.log("a", identity("a"))
    log.append([("a.0.0", b"x")])
    log.append([("a.0.0", b"x")])
    assert [(entry.id, entry.record) for entry in log.read(0)[3:]] == [("a.0.0", b"x")]
    charter, roster = read_hub(log.records_of(HUB), open_home.crew, invitation.hub)
    assert parse_config(charter.config) == open_home.config
    assert roster.keys == {"a": identity("a").public}


def test_on_a_server_of_somebody_elses_the_hub_stops_and_comes_back(open_home: Household) -> None:
    first = open_home.start()
    with AtWork(first):
        assert ask(open_home.guest("a"), open_home.enrolment("a", identity("a"))) == Answer()
    before = first.office.log.read(0)
    open_home.stop(first)
    second = open_home.start()
    assert second.office.log.read(0) == before
    with AtWork(second):
        assert "a is shut out" in give_order(open_home.folder, Order("revoke", "a"))
    assert open_home.rosters()[-1].revoked == ("a",)


def test_an_order_to_a_stopped_hub_on_a_server_of_somebody_elses_is_carried_out(
    open_home: Household,
) -> None:
    open_home.stop(open_home.start())
    assert "a is shut out" in give_order(open_home.folder, Order("revoke", "a"))


@pytest.mark.parametrize("what", ["revoke", "invite"])
def test_orders_of_strangers_are_not_carried_out(
    open_home: Household, open_hub: Hub, what: str
) -> None:
    stranger = open_home.connect("stranger", identity("stranger"))
    before = msgspec.json.encode(open_hub.register.state)
    try:
        answer = ask(stranger, msgspec.msgpack.encode(Order(what, "a")), open_home.names.control, 1)
    except LogError:
        answer = Answer(error="none came")
    assert answer.error
    assert msgspec.json.encode(open_hub.register.state) == before


def test_orders_that_strangers_overhear_are_of_no_use_to_them(
    open_home: Household, open_hub: Hub
) -> None:
    stranger, heard = open_home.connect("stranger", identity("stranger")), []
    stranger.subscribe(">", lambda message: heard.append((message.subject, message.data)))
    stranger.call(settle)
    give_order(open_home.folder, Order("revoke", "a"))
    line = give_order(open_home.folder, Order("invite", "a"))
    stranger.call(settle)
    secret = line.split()[-1].encode()
    assert not [subject for subject, content in heard if secret in content]
    overheard = [content for subject, content in heard if subject == open_home.names.control]
    assert len(overheard) == 2
    for content in overheard:
        assert ask(stranger, content, open_home.names.control).error
    assert open_hub.register.invitations()["a"] == line


def forgeries() -> dict[str, Callable[[Invitation, Invitation], tuple[str, bytes]]]:
    """Requests made of both peers' invitations: where they are sent, and what."""
    own, packed = identity("forger"), msgspec.msgpack.encode
    fields = lambda asked, **changes: packed(msgspec.structs.replace(asked, **changes))
    good = lambda invitation: Enrolment.ask("crew", invitation, own)
    wrong = lambda a: msgspec.structs.replace(a, secret=own.secret)
    return {
        "another invitation's key": lambda a, b: (
            "a",
            packed(Enrolment.ask("crew", wrong(a), own)),
        ),
        "the other peer's invitation": lambda a, b: (
            "a",
            packed(Enrolment.ask("crew", msgspec.structs.replace(b, peer="a"), own)),
        ),
        "the other peer's subject": lambda a, b: ("b", packed(good(a))),
        "an unknown peer": lambda a, b: (
            "zoe",
            packed(Enrolment.ask("crew", msgspec.structs.replace(a, peer="zoe"), own)),
        ),
        "another crew": lambda a, b: ("a", packed(Enrolment.ask("other", a, own))),
        "no signature by the invitation": lambda a, b: ("a", fields(good(a), by_invitation=b"")),
        "no signature by the key": lambda a, b: ("a", fields(good(a), by_key=b"")),
        "another's key": lambda a, b: ("a", fields(good(a), key=identity("b").public)),
        "a short key": lambda a, b: ("a", fields(good(a), key=b"short")),
        "no key": lambda a, b: ("a", fields(good(a), key=b"")),
        "nothing": lambda a, b: ("a", b""),
        "no message pack": lambda a, b: ("a", b"\xc1"),
        "no text": lambda a, b: ("a", b"\x82\xa4crew\xa1\xff\xa4peer\xa1a"),
        "a list": lambda a, b: ("a", packed(["crew", "a", own.public])),
    }


FORGERIES = forgeries()


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory, open_url: str) -> Iterator[Household]:
    """A hub on an open server, which is to refuse all that is asked of it."""
    made = Household(tmp_path_factory.mktemp("besieged") / "hub", Place(url=open_url))
    try:
        with AtWork(made.start()):
            yield made
    finally:
        made.close()


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_enrolment_is_refused(
    besieged: Household, forge: Callable[[Invitation, Invitation], tuple[str, bytes]]
) -> None:
    hub = besieged.hubs[-1]
    before = msgspec.json.encode(hub.register.state)
    subject, content = forge(besieged.invitation("a"), besieged.invitation("b"))
    besieged.said.clear()
    answer = ask(besieged.connect("forger", identity("forger")), content, NAMES.enrolment(subject))
    assert answer.error
    assert besieged.said == [f"refused a request on {NAMES.enrolment(subject)}: {answer.error}"]
    assert msgspec.json.encode(hub.register.state) == before
    assert [roster.number for roster in besieged.rosters()] == [0]


def test_no_request_can_end_the_hub(home: Household) -> None:
    hub = home.start()
    guest = home.guest("a")
    guest.publish(NAMES.enrolment("a"), b"\x81\xa1x" + b"\x91" * 4000 + b"\xc0")
    eventually(lambda: not hub.office.asked.empty())
    hub.tick(0)


def test_a_request_without_a_place_to_answer_to_does_not_end_the_hub(home: Household) -> None:
    hub = home.start()
    guest = home.guest("a")
    guest.publish(NAMES.enrolment("a"), b"nobody waits")
    eventually(lambda: not hub.office.asked.empty())
    hub.tick(0)
    assert any("could not answer" in said for said in home.said)
    with AtWork(hub):
        home.join("a", identity("a"))


def test_a_key_cannot_be_brought_for_a_second_peer(home: Household, hub: Hub) -> None:
    home.join("a", identity("a"))
    guest = home.guest("b")
    try:
        answer = ask(guest, home.enrolment("b", identity("a")))
    except LogError:
        answer = Answer()
    assert answer.error
    assert home.rosters()[-1].keys == {"a": identity("a").public}


# Servers


def test_with_a_certificate_of_its_own_invitations_carry_its_fingerprint(tmp_path: Path) -> None:
    port = free_port()
    certificate, key = self_signed(tmp_path / "tls", "127.0.0.1")
    url = f"tls://127.0.0.1:{port}"
    place = Place(
        url=url, host="127.0.0.1", port=port, certificate=(str(certificate), str(key)), pinned=True
    )
    home = Household(tmp_path / "hub", place)
    try:
        hub = home.start()
        invitation = home.invitation("a")
        assert invitation.certificate == fingerprint(certificate)
        guest = eventually(
            lambda: home.admitted(
                "invited-a", Identity.of(invitation.secret), invitation.certificate
            )
        )
        with AtWork(hub), suppress(LogError):
            assert ask(guest, Enrolment.ask("crew", invitation, identity("a"))) == Answer()
        assert hub.register.state.keys == {"a": identity("a").public}
    finally:
        home.close()


def test_a_server_that_keeps_no_streams_is_refused_and_the_hub_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_S", 0)
    port = free_port()
    with subprocess.Popen(
        [_binary(), "--addr", "127.0.0.1", "--port", str(port)], stderr=subprocess.DEVNULL
    ) as plain:
        try:
            hub = Hub.open(CONFIG, tmp_path / "hub", Place(url=f"nats://127.0.0.1:{port}"))
            with closing(hub), pytest.raises(LogError):
                hub.start()
        finally:
            plain.kill()


def test_a_hub_that_was_never_started_can_be_closed(tmp_path: Path) -> None:
    Household(tmp_path / "hub").open().close()


# A full disk


@pytest.mark.slow
def test_a_server_whose_disk_was_full_is_started_again_when_there_is_room(
    home: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [2**40]
    monkeypatch.setattr(
        watch.shutil, "disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=free[0])
    )
    monkeypatch.setattr(watch, "LOOK_S", 0.0)
    hub = home.start()
    assert hub.server
    with AtWork(hub):
        log = home.join("a", identity("a"))
        free[0] = 2**29
        eventually(lambda: any("only 512 MiB are free" in said for said in home.said))
        free[0] = 2**20
        pid = hub.server._pid()
        with (home.folder / "server" / "server.log").open("a") as file:
            file.write(
                "[ERR] JetStream failed to store a msg: write 8.blk: no space left on device\n"
            )
        eventually(lambda: any("could not write: 1 MiB are free" in said for said in home.said))
        assert hub.server._pid() == pid
        free[0] = 2**30
        eventually(lambda: any("there is room again" in said for said in home.said))
        eventually(lambda: appended(log, "a.0.0"))
        assert hub.server._pid() != pid
        eventually(lambda: "a" in [entry.id.split(".")[0] for entry in read(log)])


def read(log: NatsLog) -> list[Entry]:
    with suppress(LogError):
        return log.read(0)
    return []


@pytest.mark.skipif(
    os.geteuid() != 0 or not sys.platform.startswith("linux"),
    reason="only root on Linux can make a disk that is soon full",
)
@pytest.mark.slow
def test_peers_lose_nothing_by_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk]).returncode:
        pytest.skip("no disk can be mounted here")
    home = Household(disk / "hub")
    try:
        with AtWork(home.start()):
            log = home.join("a", identity("a"))
            outbox = Outbox(tmp_path / "a.sqlite", Signer(identity("a").public, identity("a").sign))
            outbox.put(rounds_of("a"))
            (disk / "filling").write_bytes(bytes(2**24 + 2**22))
            with suppress(OSError), (disk / "filling").open("ab") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            with suppress(LogError):
                outbox.deliver(log)
            eventually(lambda: any("the server could not write" in said for said in home.said))
            assert len(outbox)
            (disk / "filling").unlink()
            subprocess.run(["mount", "-o", "remount,size=96m", disk], check=True)
            eventually(lambda: any("there is room again" in said for said in home.said))
            eventually(lambda: delivered(outbox, log))
            ids = [entry.id for entry in read(log) if entry.id.startswith("a.")]
            assert ids == [group.id for group in rounds_of("a")]
    finally:
        home.close()
        subprocess.run(["umount", "-l", disk])


def delivered(outbox: Outbox, log: NatsLog) -> bool:
    with suppress(LogError):
        outbox.deliver(log)
    return len(outbox) == 0


def test_who_asks_faster_than_it_is_answered_keeps_nobody_waiting() -> None:
    desk = Desk()
    for _ in range(10_000):
        desk.put(SimpleNamespace(subject="motley.crew.enrol.a"))
    desk.put(SimpleNamespace(subject="motley.crew.enrol.b"))
    subjects = []
    while message := desk.next(0):
        subjects.append(message.subject)
    assert subjects[-1] == "motley.crew.enrol.b"
    assert len(subjects) < 20
