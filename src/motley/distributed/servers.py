"""Servers: those of a hub's own that run on its machine: one, or nodes of a cluster.

HUB/server/, HUB/server-2/, ...   configuration, certificate and data of each
HUB/nodes/                        what lets the nodes of a cluster know each other
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from motley.clock import Clock
from motley.distributed.register import HubState, Say
from motley.distributed.rights import Rights
from motley.exchange.nats.cluster import Cluster, Node, issue_pass
from motley.exchange.nats.server import Server


@dataclass(frozen=True, slots=True)
class Servers:
    """All of them do the same; of somebody else's there is none."""

    all: tuple[Server, ...]
    num_nodes: int  # here and elsewhere
    say: Say
    clock: Clock

    @staticmethod
    def of(state: HubState, folder: Path, say: Say, clock: Clock) -> Servers:
        place = state.place
        if not place.host:
            return Servers((), 0, say, clock)
        pair = (
            (Path(place.certificate[0]), Path(place.certificate[1])) if place.certificate else None
        )
        if not place.nodes:
            alone = Server(state.crew, folder / "server", place.host, place.port, pair, clock)
            return Servers((alone,), 1, say, clock)
        here = tuple(
            Server(
                state.crew,
                node_folder(folder, node),
                node.host,
                node.port,
                pair,
                clock,
                cluster_of(state, folder, node, clock),
            )
            for node in place.nodes
            if node.here
        )
        return Servers(here, len(place.nodes), say, clock)

    def __bool__(self) -> bool:
        return bool(self.all)

    @property
    def first(self) -> Server | None:
        return self.all[0] if self.all else None

    @property
    def any_elsewhere(self) -> bool:
        return self.num_nodes > len(self.all)

    @property
    def any_alive(self) -> bool:
        return any(server.alive() for server in self.all)

    def configure(self, rights: Rights) -> None:
        for server in self.all:
            server.configure(rights.hub, rights.users, rights.learners, rights.nodes)

    def start(self) -> bool:
        """Start them, or take over those that a hub before us left; True if one was."""
        taken_over = [server.start() for server in self.all]
        return any(taken_over)

    def revive(self, pause_s: float) -> None:
        """Start again who died."""
        for server in self.all:
            if server.alive():
                continue
            self.say(f"{self.called(server)} died; starting it again")
            try:
                server.start()
            except ValueError as error:  # something took its port for a moment, perhaps
                self.say(str(error))
                self.clock.sleep_s(pause_s)

    def reload(self) -> None:
        for server in self.all:
            if server.alive():
                server.reload()

    def stop(self) -> None:
        for server in self.all:
            server.stop()

    def called(self, server: Server) -> str:
        if not server.cluster:
            return "the server"
        return f"node {server.cluster.me.number} of {self.num_nodes}"


def node_folder(folder: Path, node: Node) -> Path:
    return folder / ("server" if node.number == 1 else f"server-{node.number}")


def cluster_of(state: HubState, folder: Path, node: Node, clock: Clock) -> Cluster:
    shown = issue_pass(folder / "nodes", node, clock)
    return Cluster(state.crew, node, state.place.nodes, shown)
