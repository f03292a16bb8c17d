"""Nodes of a hub's cluster: how each is, what is said about it, and what a node on another machine
is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from nats.aio.client import Client
from nats.js.api import StreamInfo

from motley.clock import Clock, Deadline
from motley.distributed.register import Register, Say, hub_login, read_state
from motley.distributed.rights import Board, Rights
from motley.exchange import LogError
from motley.exchange.nats.cluster import Node, address_of, issue_pass, server_name
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.names import Names
from motley.exchange.nats.server import fingerprint
from motley.files import read_json, replace
from motley.trust import Identity

LOOK_S = 3.0
ANSWER_S = 2.0

Health = Literal["leads", "follows", "is behind", "is down"]


class NodeHealth(NamedTuple):
    node: Node
    health: Health
    num_behind: int = 0  # entries that it has yet to take in

    @property
    def words(self) -> str:
        where = f"node {self.node.number} at {self.node.name}:{self.node.port} {self.health}"
        return f"{where} by {self.num_behind} entries" if self.health == "is behind" else where


def look_at_nodes(connection: Connection, crew: str, nodes: Sequence[Node]) -> list[NodeHealth]:
    """How each is, as the one says that leads the log; LogError if none does."""

    async def work(client: Client) -> StreamInfo:
        return await client.jetstream(timeout=ANSWER_S).stream_info(Names(crew).stream)

    cluster = connection.call(work, ANSWER_S + 1).cluster
    if cluster is None or not cluster.leader:
        raise LogError("no node leads the log")
    others = {peer.name: peer for peer in cluster.replicas or () if peer.name}
    found = []
    for node in nodes:
        name = server_name(crew, node.number)
        peer = others.get(name)
        if name == cluster.leader:
            found.append(NodeHealth(node, "leads"))
        elif peer is None or peer.offline:
            found.append(NodeHealth(node, "is down"))
        elif peer.current:
            found.append(NodeHealth(node, "follows"))
        else:
            found.append(NodeHealth(node, "is behind", peer.lag or 0))
    return found


class NodesWatch:
    """Says when a node goes down, comes back, or too few are left; and keeps how they are."""

    def __init__(self, crew: str, nodes: Sequence[Node], say: Say, clock: Clock) -> None:
        self._crew, self._nodes, self._say, self._clock = crew, tuple(nodes), say, clock
        self.found: list[NodeHealth] = []  # nothing: none leads
        self._down: set[int] = set()
        self._next = Deadline(clock, LOOK_S)
        self._leaderless = False

    def look(self, connection: Connection) -> None:
        if not self._nodes or not self._next.passed:
            return
        try:
            self.found = look_at_nodes(connection, self._crew, self._nodes)
        except LogError:
            self.found = []
        self._next = Deadline(self._clock, LOOK_S)
        self._tell_leading()
        if self.found:
            self._tell_down({one.node.number for one in self.found if one.health == "is down"})

    @property
    def words(self) -> str:
        if not self._nodes:
            return ""
        return "; ".join(one.words for one in self.found) or "no node leads the log"

    def _tell_leading(self) -> None:
        most = len(self._nodes) // 2 + 1
        if not self.found and not self._leaderless:
            self._say(
                f"no node leads the log: they are choosing one, or fewer than {most} of "
                f"{len(self._nodes)} run. Peers keep what they have to send"
            )
        elif self.found and self._leaderless:
            self._say("a node leads the log again")
        self._leaderless = not self.found

    def _tell_down(self, down: set[int]) -> None:
        num_up = len(self._nodes) - len(down)
        for node in self._nodes:
            where = f"node {node.number} at {node.name}:{node.port}"
            if node.number in down - self._down:
                remedy = (
                    "it is started again by itself"
                    if node.here
                    else f"bring it back there with: motley node node-{node.number}.json"
                )
                self._say(
                    f"{where} is down; the log goes on with {num_up} of {len(self._nodes)}; "
                    f"{remedy}"
                )
            if node.number in self._down - down:
                self._say(f"{where} is back; {num_up} of {len(self._nodes)} nodes run")
        self._down = down


def nodes_of(folder: Path, clock: Clock) -> list[str]:
    """How every node of a hub's cluster is, in words, asked from its owner's machine."""
    state = read_state(folder)
    if not state.place.nodes:
        raise ValueError(
            f"the hub of {folder} has no cluster of its own; start one with --replicas 3"
        )
    connection = Connection(hub_login(folder, state), clock=clock)
    try:
        found = look_at_nodes(connection, state.crew, state.place.nodes)
    except LogError as error:
        most = len(state.place.nodes) // 2 + 1
        raise ValueError(
            f"the log of {folder} cannot be written now ({error}); at least {most} of "
            f"{len(state.place.nodes)} nodes must run, and have a few seconds to choose who leads"
        ) from None
    finally:
        connection.close()
    return [one.words for one in found]


# Nodes on other machines


class NodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node on another machine needs; secret."""

    crew: str
    me: Node
    nodes: tuple[Node, ...]
    hub: bytes  # public key: whose rights count
    seed: str  # of the key by which it reads them
    url: str  # of all nodes
    secret: str
    authority: str  # PEM, and so are all below
    certificate: str
    key: str
    shown: tuple[str, str] | None  # what peers are shown, and its key
    pin: str  # sha256 of that
    rights: Rights


def read_node_file(path: Path) -> NodeFile:
    return read_json(path, NodeFile, "give the file HUB/nodes/node-NUMBER.json that the hub wrote")


class FarNodes:
    """A hub's word to the nodes on other machines."""

    def __init__(self, folder: Path, register: Register) -> None:
        self._folder, self._register = folder / "nodes", register
        self._nodes = [node for node in register.state.place.nodes if not node.here]
        self._due: Rights | None = None  # to be told

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._identity(node).nkey for node in self._nodes)

    @property
    def rights(self) -> Rights:
        """Who may do what on all servers now."""
        register = self._register
        return Rights(
            hub=register.identity.nkey,
            users=tuple(register.users()),
            learners=tuple(register.learners),
            nodes=self.keys,
        )

    def write_files(self, clock: Clock) -> list[Path]:
        """What to bring to each machine."""
        return [self._write(node, clock) for node in self._nodes]

    def tell(self, rights: Rights) -> None:
        self._due = rights if self._nodes else None

    def deliver(self, connection: Connection) -> None:
        """As soon as it can be."""
        if self._due and not connection.trouble:
            with suppress(LogError):
                board = Board(connection, self._register.state.crew)
                board.put(self._due, self._register.identity)
                self._due = None

    def _identity(self, node: Node) -> Identity:
        self._folder.mkdir(parents=True, exist_ok=True)
        return Identity.kept_at(self._folder / f"{node.number}.nkey")

    def _write(self, node: Node, clock: Clock) -> Path:
        state = self._register.state
        shown, pair = issue_pass(self._folder, node, clock), state.place.certificate
        nodes = state.place.nodes
        content = NodeFile(
            crew=state.crew,
            me=node,
            nodes=nodes,
            hub=self._register.identity.public,
            seed=self._identity(node).nkey_seed,
            url=address_of(nodes, "tls" if pair else "nats"),
            secret=shown.secret,
            authority=shown.authority.read_text(),
            certificate=shown.certificate.read_text(),
            key=shown.key.read_text(),
            shown=(Path(pair[0]).read_text(), Path(pair[1]).read_text()) if pair else None,
            pin=fingerprint(Path(pair[0])) if pair and state.place.pinned else "",
            rights=self.rights,
        )
        path = self._folder / f"node-{node.number}.json"
        replace(path, msgspec.json.encode(content), mode=0o600)
        return path
