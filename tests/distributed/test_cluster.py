"""A hub on several servers: what each is told, who is let in, and what a dead one costs."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import MagicMock

import msgspec
import pytest

from distributed.test_hub import CONFIG, NAME, Household
from exchange.nats_server import Net, eventually
from fakes import identity, spread_crew, write_task
from hubs import PATIENCE_S, AtWork, local_cluster, local_place
from motley.archive import open_left, open_log
from motley.cli.hosting import ServerOptions, _place
from motley.clock import RealClock, VirtualClock
from motley.distributed.hub import Hub
from motley.distributed.node import FarNode
from motley.distributed.nodes import NodeHealth, NodesWatch, nodes_of, read_node_file
from motley.distributed.register import HubState, Place, hub_login, invitations
from motley.distributed.rights import Rights
from motley.exchange import LogError
from motley.exchange.nats.accounts import peer_user
from motley.exchange.nats.cluster import Cluster, Node, NodePass, issue_pass
from motley.exchange.nats.connection import Connection, Login, NotAdmittedError, urls_of
from motley.exchange.nats.log import LAG_S, NatsLog
from motley.exchange.nats.server import Server, free_port, self_signed
from motley.exchange.nats.stream import ApiError, Outgoing, Receipt, Stored
from motley.records import HUB
from motley.trust import Identity

NEAR = "127.0.0.1"


def node(number: int, **changes: object) -> Node:
    made = Node(number=number, name=NEAR, host=NEAR, port=4221 + number, route_port=6221 + number)
    return msgspec.structs.replace(made, **changes)


# Addresses


def test_an_address_may_name_several_servers_of_one_kind() -> None:
    assert urls_of("nats://a:1, nats://b:2") == ["nats://a:1", "nats://b:2"]
    assert urls_of("tls://a:1") == ["tls://a:1"]
    for wrong in ("", ",", "nats://a:1,tls://b:2"):
        with pytest.raises(ValueError, match="is no address of a server; expected nats://"):
            urls_of(wrong)


def test_an_address_may_name_the_domain_of_the_streams() -> None:
    there = Login("nats://a:1,nats://b:2?domain=near-1", "a")
    assert (there.urls, there.domain) == (["nats://a:1", "nats://b:2"], "near-1")
    assert Login("nats://a:1", "a").domain == ""
    for wrong in ("near", "domain=", "domain=a.b", "domain=a,nats://b:2", "domain=>"):
        with pytest.raises(ValueError, match="behind its question mark; expected domain=NAME"):
            urls_of(f"nats://a:1?{wrong}")


def test_every_invitation_has_all_servers_and_each_another_in_front() -> None:
    place = Place(url="nats://x:1,nats://y:2,nats://z:3")
    lines = invitations(HubState.new(CONFIG, place), b"h" * 32)
    assert [line.split()[2] for line in lines.values()] == [
        "nats://x:1,nats://y:2,nats://z:3",
        "nats://y:2,nats://z:3,nats://x:1",
    ]


def test_a_line_of_a_hub_with_one_server_is_as_ever() -> None:
    lines = invitations(HubState.new(CONFIG, Place(url="nats://x:1")), b"h" * 32)
    assert all(line.startswith(f"motley join nats://x:1 --crew {NAME} ") for line in lines.values())


OPTIONS = ServerOptions(NEAR, 4222, "", "", "", 1, "")


def test_replicas_on_this_machine_have_ports_one_behind_the_other(tmp_path: Path) -> None:
    place = _place(tmp_path, OPTIONS._replace(replicas=3))
    assert place.url == f"nats://{NEAR}:4222,nats://{NEAR}:4223,nats://{NEAR}:4224"
    assert [each.route_port for each in place.nodes] == [6222, 6223, 6224]
    assert (place.replicas, all(each.here for each in place.nodes)) == (3, True)


def test_nodes_on_other_machines_are_as_many_replicas(tmp_path: Path) -> None:
    place = _place(tmp_path, OPTIONS._replace(public="a", nodes="b,c:5000"))
    assert place.url == "nats://a:4222,nats://b:4222,nats://c:5000"
    assert place.replicas == 3
    assert [each.here for each in place.nodes] == [True, False, False]


def test_one_server_is_placed_as_ever(tmp_path: Path) -> None:
    place = _place(tmp_path, OPTIONS)
    assert place == Place(url=f"nats://{NEAR}:4222", host=NEAR, port=4222)


def test_somebody_elses_cluster_keeps_replicas_too(tmp_path: Path) -> None:
    place = _place(tmp_path, OPTIONS._replace(nats="nats://x:1,nats://y:2", replicas=3))
    assert place == Place(url="nats://x:1,nats://y:2", replicas=3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"replicas": 2}, "--replicas 2: expected 1, 3 or 5"),
        ({"replicas": 7}, "--replicas 7: expected 1, 3 or 5"),
        ({"replicas": 5, "nodes": "b,c"}, "--nodes has 2 nodes beside this one, and --replicas 5"),
        ({"nodes": "b"}, "--replicas 2: expected"),
        ({"nodes": "b:x,c"}, "'b:x' is no address"),
        ({"nats": "nats://x:1", "nodes": "b,c"}, "leave them out with --nats"),
        ({"nats": "nats://x:1?domain=near"}, "is the address of a leaf node"),
    ],
)
def test_what_makes_no_cluster_is_refused(
    tmp_path: Path, wrong: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        _place(tmp_path, OPTIONS._replace(**wrong))


# Configuration


def test_a_server_alone_is_told_nothing_of_a_cluster(tmp_path: Path) -> None:
    server = Server(NAME, tmp_path, NEAR, 4222)
    server.configure(identity(HUB).nkey, [peer_user(NAME, "a", identity("a").nkey)])
    written = json.loads((tmp_path / "server.json").read_bytes())
    assert "cluster" not in written
    assert written["server_name"] == "motley-4222"
    assert written["accounts"]["HUB"]["users"] == [{"nkey": identity(HUB).nkey}]


def test_nodes_link_by_certificates_of_the_hubs_own_and_by_a_secret(tmp_path: Path) -> None:
    nodes = (node(1), node(2), node(3, name="c.example"))
    passes = [issue_pass(tmp_path, each, VirtualClock()) for each in nodes]
    settings = Cluster(NAME, nodes[0], nodes, passes[0]).settings()
    secret = passes[0].secret
    assert len(secret) == 64
    assert {each.secret for each in passes} == {secret}
    assert settings["tls"]["verify"] is True
    assert settings["routes"] == [
        f"nats-route://node:{secret}@{NEAR}:6223",
        f"nats-route://node:{secret}@c.example:6224",
    ]
    assert all(path.stat().st_mode & 0o77 == 0 for path in tmp_path.glob("*.key"))
    assert (tmp_path / "secret").stat().st_mode & 0o77 == 0
    assert issue_pass(tmp_path, nodes[0]) == passes[0]


def test_rights_count_only_if_the_hub_has_signed_them_for_this_crew() -> None:
    rights = Rights(
        hub=identity(HUB).nkey,
        users=(peer_user(NAME, "a", identity("a").nkey),),
        learners=(),
        nodes=(identity("n").nkey,),
    )
    said = rights.signed(NAME, identity(HUB))
    assert Rights.read(said, NAME, identity(HUB).public) == rights
    for crew, key, bytes_ in (
        ("other", HUB, said),
        (NAME, "a", said),
        (NAME, HUB, said[:-1] + b"]"),
        (NAME, HUB, b""),
    ):
        with pytest.raises(ValueError, match="not signed by its hub"):
            Rights.read(bytes_, crew, identity(key).public)


def test_a_log_on_one_server_does_not_become_a_nodes(tmp_path: Path) -> None:
    Hub.open(CONFIG, tmp_path, local_place()).close()
    with pytest.raises(ValueError, match="holds a log on 1 servers, and 3 are asked for; say"):
        Hub.open(CONFIG, tmp_path, local_cluster())


@pytest.mark.parametrize(("replicas", "lots"), [(1, True), (3, False)])
def test_groups_stand_in_lots_where_one_server_has_them_all(
    replicas: int, lots: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path)
    config = spread_crew(tmp_path, ("full",) * 4, hear=1)
    place = Place(url="nats://127.0.0.1:4222", replicas=replicas)
    hub = Hub.open(config, tmp_path / "hub", place)
    assert hub.register.state.lots is hub.register.charter().lots is lots
    hub.close()
    more = msgspec.structs.replace(place, replicas=5)
    if lots:
        with pytest.raises(ValueError, match="stand in lots, on one server, and --replicas 5"):
            Hub.open(config, tmp_path / "hub", more)
    else:
        Hub.open(config, tmp_path / "hub", more).close()


# Writing where several servers answer


class Copies:
    """A stream of a cluster: who leads refuses, and the others have a record after some looks."""

    def __init__(self, error: ApiError, looks: int, content: bytes) -> None:
        self.error, self.looks, self.content = error, looks, content

    def write(self, messages: Sequence[Outgoing]) -> list[Receipt]:
        return [Receipt(error=self.error) for _ in messages]

    def last_of_each(self, subjects: Sequence[str]) -> list[Stored | None]:
        self.looks -= 1
        return [Stored(1, s, self.content) if self.looks < 0 else None for s in subjects]


class Offline:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.login = Login("nats://x:1", "a")


def log_over(copies: Copies) -> NatsLog:
    log = NatsLog(cast(Connection, Offline()), NAME)
    log._stream = cast(object, copies)  # type: ignore[assignment]
    return log


WRONG_SEQUENCE = ApiError(10071, "wrong last sequence: 7")
UNDER_WAY = ApiError(10164, "wrong last sequence")
TAKEN = ApiError(10077, "maximum messages per subject exceeded")
FULL = ApiError(10077, "maximum bytes exceeded")


@pytest.mark.parametrize("error", [WRONG_SEQUENCE, UNDER_WAY, TAKEN])
def test_a_record_that_a_copy_does_not_have_yet_is_looked_for_again(error: ApiError) -> None:
    log_over(Copies(error, 3, b"mine")).append([("a.0.0", b"mine")])


def test_a_record_under_way_that_never_lands_is_not_taken_for_written() -> None:
    log = log_over(Copies(UNDER_WAY, 10**9, b""))
    with pytest.raises(LogError, match=r"a\.0\.0 is not confirmed: the server that leads the log"):
        log.append([("a.0.0", b"mine")])
    assert log.connection.clock.elapsed_s() == pytest.approx(LAG_S, abs=0.1)


def test_a_full_log_is_not_waited_for() -> None:
    log = log_over(Copies(FULL, 10**9, b""))
    with pytest.raises(LogError, match="no room for it"):
        log.append([("a.0.0", b"mine")])
    assert log.connection.clock.elapsed_s() == 0.0


@pytest.mark.slow
def test_a_server_that_does_not_know_a_key_yet_is_passed_over(tmp_path: Path) -> None:
    unaware, aware = Net(tmp_path / "1"), Net(tmp_path / "2")
    unaware.users, dead = [], free_port()
    url = f"{unaware.url},{aware.url},nats://{NEAR}:{dead}"
    try:
        unaware.start(), aware.start()
        with closing(Connection(Login(url, "a", identity("a").nkey_seed))) as connection:
            assert not connection.shut_out
            assert connection.call(lambda client: client.flush()) is None
        with pytest.raises(NotAdmittedError):  # nor do the others know this one
            Connection(Login(url, "z", identity("z").nkey_seed))
    finally:
        unaware.close(), aware.close()


# How the nodes are, in words


class Told(NodesWatch):
    """Is told how the nodes are."""

    def hear(self, *healths: str) -> None:
        self.found = [
            NodeHealth(each, health)  # type: ignore[arg-type]
            for each, health in zip(self._nodes, healths, strict=False)
        ]
        self._tell_leading()
        if self.found:
            self._tell_down({one.node.number for one in self.found if one.health == "is down"})


def test_what_happens_to_nodes_is_said_once_and_with_a_remedy() -> None:
    said: list[str] = []
    nodes = (node(1), node(2), node(3, name="c.example", here=False))
    watch = Told(NAME, nodes, said.append, VirtualClock())
    watch.hear("leads", "follows", "follows")
    watch.hear("leads", "follows", "is down")
    watch.hear("leads", "follows", "is down")
    watch.hear()
    watch.hear()
    watch.hear("leads", "follows", "is behind")
    assert said == [
        "node 3 at c.example:4224 is down; the log goes on with 2 of 3; bring it back there with: "
        "motley node node-3.json",
        "no node leads the log: they are choosing one, or fewer than 2 of 3 run. Peers keep what "
        "they have to send",
        "a node leads the log again",
        "node 3 at c.example:4224 is back; 3 of 3 nodes run",
    ]


# A real one


def patiently(work: Callable[[], object]) -> None:
    """As a courier does: a cluster may take seconds to choose who leads."""

    def done() -> bool:
        with suppress(LogError):
            work()
            return True
        return False

    eventually(done)


def ids_on(hub: Hub, url: str) -> list[str]:
    """What a server has; nothing, while it starts or nobody leads."""
    login = replace(hub_login(hub.folder, hub.register.state), url=url)
    with suppress(LogError), closing(Connection(login)) as connection:
        return [entry.id for entry in NatsLog(connection, NAME).read(0)]
    return []


@pytest.mark.slow
def test_any_node_may_die_and_what_was_written_is_on_each(tmp_path: Path) -> None:
    home = Household(tmp_path / "hub", local_cluster())
    try:
        hub = home.start()
        with AtWork(hub):
            log = home.join("a", identity("a"))
            expected: list[str] = []
            patiently(lambda: expected.extend(entry.id for entry in log.read(0)))
            for number, server in enumerate(hub.servers.all):
                records = [(f"a.{number}.{slot}", b"%d" % slot) for slot in range(3)]
                server.kill()
                patiently(lambda records=records: log.append(records))
                patiently(lambda records=records: log.append(records))  # its answer was lost
                expected += [id for id, _ in records]
            for url in urls_of(home.place.url):
                eventually(lambda url=url: ids_on(hub, url) == expected)
            eventually(lambda: "is down" not in hub.nodes.words and hub.nodes.found)
            assert len(nodes_of(home.folder, RealClock())) == 3
        assert sum("died; starting it again" in words for words in home.said) == 3
        home.stop(hub)
        for opened in (open_log, open_left):
            with opened(home.folder) as archive:
                assert [entry.id for entry in archive.source.read(0, 100)] == expected
    finally:
        close(home)


def close(home: Household) -> None:
    for connection in home.connections:
        connection.close()
    for hub in home.hubs:
        hub.close()


class FarAtWork:
    """A node of another machine, in a thread of this one."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.node = FarNode(read_node_file(path), folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self.node.start()
        while not self._stop.is_set():
            self.node.tick(0.01)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the node hangs"
        self.node.close()


def spread(folder: Path) -> Place:
    """Of three nodes two are elsewhere, and all show one certificate."""
    place = local_cluster()
    first, *others = place.nodes
    pair = self_signed(folder / "server", NEAR)
    return msgspec.structs.replace(
        place,
        url=place.url.replace("nats:", "tls:"),
        nodes=(first, *(msgspec.structs.replace(each, here=False) for each in others)),
        certificate=(str(pair[0]), str(pair[1])),
        pinned=True,
    )


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Household, list[FarAtWork]]]:
    home = Household(tmp_path / "hub", spread(tmp_path / "hub"))
    hub, nodes = home.open(), []
    try:
        for path in hub.far_nodes.write_files(RealClock()):
            assert path.stat().st_mode & 0o77 == 0
            nodes.append(FarAtWork(path, tmp_path / path.stem))
        hub.start()
        yield home, nodes
    finally:
        close(home)
        for each in nodes:
            each.close()


@pytest.mark.slow
def test_a_node_elsewhere_that_was_away_knows_who_came_and_went_when_it_is_back(
    far: tuple[Household, list[FarAtWork]], tmp_path: Path
) -> None:
    home, nodes = far
    hub = home.hubs[0]
    pin = home.invitation("a").certificate
    urls = urls_of(home.place.url)

    def is_admitted(peer: str, key: Identity, at: str) -> bool:
        with (
            suppress(NotAdmittedError),
            closing(Connection(Login(at, peer, key.nkey_seed, pin))) as connection,
        ):
            return not connection.shut_out
        return False

    def enrol(peer: str) -> None:
        guest = eventually(
            lambda: home.admitted(f"invited-{peer}", Identity.of(home.invitation(peer).secret), pin)
        )
        asked = msgspec.msgpack.encode(home.enrolment(peer, identity(peer)))
        with suppress(LogError):
            guest.call(lambda client: client.request(home.names.enrolment(peer), asked, 5))
        eventually(lambda: f"{peer} has joined with key {identity(peer).nkey}" in home.said)

    with AtWork(hub):
        enrol("a")
        eventually(lambda: all(is_admitted("a", identity("a"), url) for url in urls))
        nodes.pop().close()
        enrol("b")
    hub.revoke("a")
    path = home.folder / "nodes" / "node-3.json"
    nodes.append(FarAtWork(path, tmp_path / path.stem))
    with AtWork(hub):
        eventually(lambda: all(is_admitted("b", identity("b"), url) for url in urls))
        eventually(lambda: not any(is_admitted("a", identity("a"), url) for url in urls))


def test_a_node_elsewhere_says_once_that_the_hub_is_not_heard_and_once_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Household(tmp_path / "hub", spread(tmp_path / "hub"))
    hub, said = home.open(), list[str]()
    path, *_ = hub.far_nodes.write_files(RealClock())
    node = FarNode(read_node_file(path), tmp_path / "node", said.append)
    is_away = iter([True, True, False, False])

    def hear(connection: Connection) -> bool:
        if next(is_away):
            raise LogError("nobody answers")
        return False

    monkeypatch.setattr(node, "_connect", lambda patience_s: MagicMock(shut_out=False))
    monkeypatch.setattr(node, "_hear", hear)
    try:
        for _ in range(4):
            node._follow()
        assert said == [
            "the hub's word on who may come in cannot be heard: nobody answers",
            "the hub's word is heard again",
        ]
    finally:
        node.close()
        close(home)


def said_to(shown: NodePass | None, port: int) -> bytes:
    """What a node says to one who links to it as another node would, and shows this."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if shown:
        context.load_cert_chain(shown.certificate, shown.key)
    with (
        suppress(ssl.SSLError, ConnectionError),
        socket.create_connection((NEAR, port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain) as link,
    ):
        return link.recv(65536)
    return b""


@pytest.mark.slow
def test_no_stranger_becomes_a_node(far: tuple[Household, list[FarAtWork]], tmp_path: Path) -> None:
    home, _ = far
    first = home.place.nodes[0]
    known = issue_pass(home.folder / "nodes", first)
    assert said_to(known, first.route_port).startswith(b"INFO ")
    assert said_to(issue_pass(tmp_path / "other", first), first.route_port) == b""
    assert said_to(None, first.route_port) == b""
