"""Hubs for tests: on this machine, on free ports, at work in a thread or a process of their own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from motley.config import read_config
from motley.distributed.hub import Hub
from motley.distributed.register import Place
from motley.exchange.nats.cluster import Node, address_of
from motley.exchange.nats.server import free_port

# for what must happen, on a machine that is busy with something else
PATIENCE_S = float(os.environ.get("MOTLEY_TEST_PATIENCE_S", "120"))


def local_place() -> Place:
    """A server of the hub's own on a free port of this machine."""
    port = free_port()
    return Place(url=f"nats://127.0.0.1:{port}", host="127.0.0.1", port=port)


class AtWork:
    """A hub that ticks on another thread, from now until `pause` or the end of a `with`.

    A hub is of one thread: meanwhile it is asked over the wire, as its owner asks it, or looked at.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self.hub.tick(0.01)
        except BaseException as error:  # noqa: BLE001 - raised again where it can be seen
            self._failures.append(error)

    def pause(self) -> None:
        """Answer nobody, and start no server again, until there is another at work."""
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the hub hangs"
        if self._failures:
            raise self._failures.pop()

    def __enter__(self) -> AtWork:
        return self

    def __exit__(self, *error: object) -> None:
        self.pause()


def run_hub(folder: Path, place: Place) -> None:
    """The life of a hub's process: FOLDER/PEER.invitation for everyone, until there is
    FOLDER/over.
    """
    hub = Hub.open(read_config(folder / "crew.toml"), folder / "hub", place)
    hub.start()
    for peer, line in hub.register.invitations().items():
        (folder / f"{peer}.invitation").write_text(line.split()[-1])
    (folder / "open").touch()
    while not (folder / "over").exists():
        hub.tick(0.05)
    hub.close()


def local_cluster(num_nodes: int = 3) -> Place:
    """Nodes of a cluster on free ports of this machine."""
    nodes = tuple(
        Node(
            number=number,
            name="127.0.0.1",
            host="127.0.0.1",
            port=free_port(),
            route_port=free_port(),
        )
        for number in range(1, num_nodes + 1)
    )
    return Place(
        url=address_of(nodes, "nats"),
        host="127.0.0.1",
        port=nodes[0].port,
        replicas=num_nodes,
        nodes=nodes,
    )
