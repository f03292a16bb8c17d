"""Train a crew over a long and lossy link, and compare with a crew in one process.

    python tests/far.py --delay 0.3 --loss 0.01 --rounds 4

Two network namespaces on this machine, joined by a link that holds every packet for the delay (one
way: a round trip takes it twice) and drops some: `tc netem` on a veth pair where the kernel has it,
else two TUN devices and a process that moves packets between them. The hub and one peer are in
one namespace, another peer in the other. Needs root. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import multiprocessing
import os
import random
import re
import select
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from chaos import faults_of, undisturbed_run, wait_until
from fakes import spread_crew, write_task
from hubs import PATIENCE_S, local_place, run_hub
from motley.config import CrewConfig, write_config
from motley.distributed.hub import Hub
from motley.distributed.join import join
from motley.distributed.register import Place
from motley.exchange.nats.server import Server

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["motley.distributed.join", "hubs"])

ADDRESSES = ("10.213.77.1", "10.213.77.2")  # near, far
PORT = 4222
URL = f"nats://{ADDRESSES[0]}:{PORT}"
DEVICE = "motley"


@dataclass(frozen=True)
class Quality:
    delay_s: float  # one way
    loss: float  # share of packets, each way
    seed: int = 0


# Namespaces


def refusal() -> str:
    """Why this machine lets us make no namespaces; nothing if it does."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not shutil.which("ip"):
        return "there is no ip command"
    name = f"motley-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "there is no /dev/net/tun"


def enter(namespace: str) -> None:
    """Have this thread, and those it starts, in a namespace."""
    with Path("/var/run/netns", namespace).open() as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def configure(namespace: str, device: str, address: str, peer: str) -> None:
    ip("-n", namespace, "link", "set", "lo", "up")
    ip("-n", namespace, "addr", "add", address, "peer", peer, "dev", device)
    ip("-n", namespace, "link", "set", device, "up")


@dataclass
class Link:
    near: str  # namespaces
    far: str
    kind: str
    counts: Callable[[], tuple[int, int]]  # (moved, dropped), both ways together


@contextmanager
def far_link(quality: Quality) -> Iterator[Link]:
    names = [f"motley-{os.getpid()}-{side}" for side in ("near", "far")]
    with ExitStack() as undo:
        for name in names:
            undo.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
            ip("netns", "add", name)
        link = _by_netem(*names, quality)
        if link is None:
            link = undo.enter_context(_by_forwarder(*names, quality))
        yield link


def _by_netem(near: str, far: str, quality: Quality) -> Link | None:
    """None where the kernel does not have it."""
    try:
        ip("-n", near, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", far)
        for name in (near, far):
            words = (
                f"netns exec {name} tc qdisc add dev {DEVICE} root netem delay "
                f"{quality.delay_s * 1000}ms loss {quality.loss * 100}%"
            )
            ip(*words.split())
    except subprocess.CalledProcessError:
        with suppress(subprocess.CalledProcessError):
            ip("-n", near, "link", "del", DEVICE)
        return None
    for name, address, peer in zip((near, far), ADDRESSES, reversed(ADDRESSES), strict=True):
        configure(name, DEVICE, address, peer)

    def counts() -> tuple[int, int]:
        shown = [
            subprocess.run(
                ["ip", "netns", "exec", name, "tc", "-s", "qdisc", "show", "dev", DEVICE],
                capture_output=True,
                text=True,
            ).stdout
            for name in (near, far)
        ]
        found = [re.search(r"(\d+) pkt \(dropped (\d+)", text) for text in shown]
        return sum(int(m[1]) for m in found if m), sum(int(m[2]) for m in found if m)

    return Link(near, far, "tc netem", counts)


@contextmanager
def _by_forwarder(near: str, far: str, quality: Quality) -> Iterator[Link]:
    shared = processes.Array("q", 3)  # moved, dropped, ready
    child = processes.Process(
        target=run_forwarder, args=((near, far), quality, shared), name="link"
    )
    child.start()
    try:
        wait_until(
            lambda: bool(shared[2]) or child.exitcode is not None,
            PATIENCE_S,
            "the link did not come up",
        )
        yield Link(near, far, "TUN devices and our forwarder", lambda: (shared[0], shared[1]))
    finally:
        child.kill()
        child.join()


def run_forwarder(namespaces: Sequence[str], quality: Quality, shared: Sequence[int]) -> None:
    tuns = []
    for name, address, peer in zip(namespaces, ADDRESSES, reversed(ADDRESSES), strict=True):
        enter(name)
        tuns.append(open_tun())
        configure(name, DEVICE, address, peer)
    shared[2] = 1  # type: ignore[index]
    forward(tuns, quality, shared)


def open_tun() -> int:
    """A TUN device in the present namespace: whole IP packets, nothing before them."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    set_interface, tun_no_header = 0x400454CA, 0x1001
    fcntl.ioctl(tun, set_interface, struct.pack("16sH22s", DEVICE.encode(), tun_no_header, b""))
    return tun


def forward(tuns: Sequence[int], quality: Quality, counts: Sequence[int]) -> None:
    """Move packets for ever, each after the delay, or never."""
    rng = random.Random(quality.seed)
    other = dict(zip(tuns, reversed(tuns), strict=True))
    # (due, where to, packet); the delay is the same for all, so it is in order
    held: deque[tuple[float, int, bytes]] = deque()
    while True:
        readable, _, _ = select.select(
            tuns, [], [], max(0.0, held[0][0] - time.monotonic()) if held else None
        )
        for tun in readable:
            with suppress(BlockingIOError):
                while packet := os.read(tun, 2**16):
                    if packet[0] >> 4 != 4:  # IPv6 asks for routers
                        continue
                    lost = rng.random() < quality.loss
                    counts[int(lost)] += 1  # type: ignore[index]
                    if not lost:
                        held.append((time.monotonic() + quality.delay_s, other[tun], packet))
        while held and held[0][0] <= time.monotonic():
            _, tun, packet = held.popleft()
            with suppress(OSError):
                os.write(tun, packet)


# The crew


def run_near_hub(namespace: str, folder: Path) -> None:
    enter(namespace)
    run_hub(folder, Place(url=URL, host=ADDRESSES[0], port=PORT))


def run_member(namespace: str, folder: Path, name: str) -> None:
    import torch

    torch.set_num_threads(1)
    enter(namespace)
    times = [time.monotonic()]
    invitation = (folder / f"{name}.invitation").read_text()
    participant = join(URL, "spread", invitation, folder / name)
    times.append(time.monotonic())
    times += [time.monotonic() for event in participant.rounds() if not isinstance(event, str)]
    participant.close()
    (folder / f"{name}.times").write_text(json.dumps(times))


def round_trip_s(namespace: str) -> float:
    """Of a TCP handshake with the hub's server; the fastest, so that nothing was lost."""
    found: list[float] = []

    def measure() -> None:
        enter(namespace)
        for _ in range(3):
            start = time.monotonic()
            socket.create_connection((ADDRESSES[0], PORT), timeout=30).close()
            found.append(time.monotonic() - start)

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    return min(found)


@dataclass(kw_only=True)
class Report:
    link: str
    round_trip_s: float
    join_s: float  # of the far peer
    round_s: float  # median, of the far peer
    packets: int
    dropped: int
    faults: list[str] = field(default_factory=list)


def far_run(config: CrewConfig, folder: Path, quality: Quality, timeout_s: float) -> Report:
    """Train a crew of two over a far link; what it took."""
    near, far = (peer.name for peer in config.peer)
    folder.mkdir()
    write_config(config, folder / "crew.toml")
    with far_link(quality) as link, ExitStack() as undo:
        hub = processes.Process(target=run_near_hub, args=(link.near, folder), name="hub")
        hub.start()
        undo.callback(end, hub, folder)
        wait_until(
            lambda: (folder / "open").exists() or hub.exitcode is not None,
            PATIENCE_S,
            "the hub did not open",
        )
        trip_s = round_trip_s(link.far)
        members = [
            processes.Process(target=run_member, args=(namespace, folder, name), name=name)
            for namespace, name in ((link.near, near), (link.far, far))
        ]
        for member in members:
            member.start()
            undo.callback(member.kill)
        over = lambda: (
            all(member.exitcode == 0 for member in members)
            or any(member.exitcode for member in members)
        )
        wait_until(over, timeout_s, "the crew did not finish")
        if failed := [member.name for member in members if member.exitcode]:
            raise SystemExit(f"{', '.join(failed)} ended with an error")
        packets, dropped = link.counts()
    bring_home(config, folder)
    times = json.loads((folder / f"{far}.times").read_text())
    join_s, *rounds = (after - before for before, after in pairwise(times))
    return Report(
        link=link.kind,
        round_trip_s=trip_s,
        join_s=join_s,
        round_s=statistics.median(rounds),
        packets=packets,
        dropped=dropped,
    )


def end(hub: multiprocessing.process.BaseProcess, folder: Path) -> None:
    """Stop the hub and its server, whatever happened."""
    (folder / "over").touch()
    hub.join(PATIENCE_S)
    hub.kill()
    server = Server("spread", folder / "hub" / "server", ADDRESSES[0], PORT)
    if server.folder.exists() and server.alive():
        server.kill()


def bring_home(config: CrewConfig, folder: Path) -> None:
    """Have the hub of a run listen on this machine, for who looks at its log."""
    hub = Hub.open(config, folder / "hub", local_place())
    hub.start()
    hub.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delay", type=float, default=0.3, help="seconds, one way")
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    if reason := refusal():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_task(root)
        sys.path.insert(0, str(root))
        config = spread_crew(root, ("full", "last"), rounds=wanted.rounds)
        reference = undisturbed_run(config, root / "local")
        report = far_run(
            config, root / "run", Quality(wanted.delay, wanted.loss, wanted.seed), timeout_s=1200
        )
        report.faults = faults_of(config, root / "run", reference)
    for name, value in asdict(report).items():
        print(f"{name:14} {value}")
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
