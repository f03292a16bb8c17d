"""Kill -9 peers, server and hub at random moments, and compare with a crew that nobody disturbed.

    python tests/chaos.py --kills 100 --seed 0

A crew of three in lockstep without a deadline trains on a hub; a seeded killer strikes until it has
struck often enough, in as many runs as that takes. In every run each peer's final weights must
equal the undisturbed ones bit for bit, the log must hold every group once and its chains whole, and
every peer must have learned from every group exactly once. Exits with 1 if anything differs.

    python tests/chaos.py --kills 10 --hostile

A fourth peer with a valid key does all the ill it can (disturber.py), and is killed, too. A round
goes on without it after a deadline, but never without the other three (`quorum`). So these must end
as in an undisturbed crew on a hub to which the fourth never came.

    python tests/chaos.py --kills 100 --cluster

The hub has three servers, any of which is killed, too: one after another, or two at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import msgspec

from disturber import run_hostile
from fakes import spread_crew, write_task
from hubs import PATIENCE_S, local_cluster, local_place, run_hub
from motley.clock import RealClock
from motley.config import CrewConfig, write_config
from motley.distributed.join import join
from motley.distributed.nodes import look_at_nodes
from motley.distributed.register import HubState, Place, hub_login, read_state
from motley.distributed.servers import Servers
from motley.exchange import Entry, LogError, decode, unpack
from motley.exchange.nats.connection import Connection, Login
from motley.exchange.nats.log import NatsLog
from motley.records import Group
from motley.runs.folder import newest_checkpoint
from motley.runs.local import LocalCrew
from motley.runs.metrics import LearnerLine, read_metrics
from motley.trust.chain import Chain

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["motley.distributed.join", "hubs"])

TRAINS = ("full", "lora", "last")


def run_peer(folder: Path, url: str, name: str) -> None:
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))  # the reward module
    invitation = (folder / f"{name}.invitation").read_text()
    participant = join(url, "spread", invitation, folder / name)
    for _ in participant.rounds():
        pass
    participant.close()


@dataclass
class Household:
    """The processes of one run, each started again when it is dead."""

    folder: Path
    place: Place
    names: list[str]
    hostile: str = ""  # one who is no part of what must come out
    slowest_s: float = 1.5  # between two kills
    children: dict[str, multiprocessing.process.BaseProcess] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    @property
    def victims(self) -> dict[str, int]:
        """Who may be killed, and how often beside the others."""
        servers = [f"server-{node.number}" for node in self.place.nodes[1:]]
        return {
            **dict.fromkeys(self.names, 3),
            **({self.hostile: 1} if self.hostile else {}),
            **dict.fromkeys(["server", *servers], 2),
            "hub": 1,
        }

    def start(self) -> None:
        self._begin("hub")
        wait_until(lambda: (self.folder / "open").exists(), PATIENCE_S, "the hub did not open")
        for name in [*self.names, *([self.hostile] if self.hostile else [])]:
            self._begin(name)

    def revive(self) -> None:
        for name, child in list(self.children.items()):
            if child.exitcode == 0:
                self.finished.add(name)
            elif child.exitcode is not None:
                if child.exitcode > 0 and name != self.hostile:
                    raise SystemExit(f"{name} ended with an error (exit code {child.exitcode})")
                self._begin(name)

    def kill(self, victim: str) -> bool:
        """kill -9; False if there is nothing to kill just now."""
        if victim.startswith("server"):
            with suppress(OSError, ValueError):
                os.kill(
                    int((self.folder / "hub" / victim / "server.pid").read_text()), signal.SIGKILL
                )
                return True
            return False
        child = self.children[victim]
        if child.exitcode is not None or child.pid is None:
            return False
        os.kill(child.pid, signal.SIGKILL)
        child.join(PATIENCE_S)
        return True

    def end(self) -> None:
        (self.folder / "over").touch()
        self.children["hub"].join(PATIENCE_S)
        for child in self.children.values():
            if child.is_alive():
                child.kill()

    def _begin(self, name: str) -> None:
        work: Callable[..., None] = run_hostile if name == self.hostile else run_peer
        given: tuple[object, ...] = (self.folder, self.place.url, name)
        if name == "hub":
            work, given = run_hub, (self.folder, self.place)
        self.children[name] = processes.Process(target=work, args=given, name=name)
        self.children[name].start()


def wait_until(condition: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    stop = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > stop:
            raise SystemExit(otherwise)
        time.sleep(0.02)


def disturbed_run(
    config: CrewConfig,
    folder: Path,
    rng: random.Random,
    kills: int,
    timeout_s: float,
    honest: Sequence[str] = (),
    hostile: str = "",
    cluster: bool = False,
) -> Counter[str]:
    """Train to the end while processes are killed; who was killed how often.

    `honest`: only these, and who is hostile; otherwise everyone.
    """
    folder.mkdir()
    write_config(config, folder / "crew.toml")
    write_task(folder)
    names = list(honest) or [peer.name for peer in config.peer]
    house = Household(folder, local_place(), names, hostile)
    if cluster:  # which takes up to ten seconds to choose who leads when the last one is dead
        house = Household(folder, local_cluster(), names, hostile, slowest_s=6.0)
    killed: Counter[str] = Counter()
    stop = time.monotonic() + timeout_s
    house.start()
    next_kill = time.monotonic() + rng.uniform(0, 3)
    try:
        while house.finished < set(house.names):
            if time.monotonic() > stop:
                raise SystemExit(
                    f"the crew did not finish in {timeout_s:.0f} s; killed so far {dict(killed)}"
                )
            if killed.total() < kills and time.monotonic() > next_kill:
                victim = rng.choices(list(house.victims), list(house.victims.values()))[0]
                killed[victim] += house.kill(victim)
                next_kill = time.monotonic() + rng.uniform(0.05, house.slowest_s)
            house.revive()
            time.sleep(0.02)
    finally:
        house.end()
    return killed


# What must hold


def weights(folder: Path, peer: str) -> dict[str, bytes]:
    model = newest_checkpoint(folder) / peer / "model"
    return {path.name: path.read_bytes() for path in sorted(model.glob("*.safetensors"))}


def faults_of(config: CrewConfig, folder: Path, reference: Path) -> list[str]:
    """Everything in which a disturbed run differs from what it must be."""
    faults = []
    for peer in config.peer:
        if weights(folder / peer.name, peer.name) != weights(reference, peer.name):
            faults.append(f"weights of {peer.name} differ")
        faults += metrics_faults(
            config, peer.name, read_metrics(folder / peer.name), read_metrics(reference)
        )
    return faults + log_faults(config, folder / "hub")


def metrics_faults(
    config: CrewConfig, peer: str, found: list[LearnerLine], expected: list[LearnerLine]
) -> list[str]:
    """Every round once, learned from every group of everyone, and equal to the undisturbed line but
    for what depends on time.
    """
    faults = []
    if [line.round for line in found] != list(range(config.crew.rounds + 1)):
        faults.append(f"{peer} has rounds {[line.round for line in found]}")
    for line in found[1:]:
        groups = {name: sender.groups for name, sender in line.senders.items()}
        if (
            groups != {p.name: config.problems_per_peer for p in config.peer}
            or line.refused
            or line.dropped
        ):
            faults.append(
                f"{peer} learned in round {line.round} from {groups}, refused "
                f"{line.refused}, dropped {line.dropped}"
            )
    if untimed(found, peer) != untimed(expected, peer):
        faults.append(f"metrics of {peer} differ")
    return faults


def untimed(lines: list[LearnerLine], peer: str) -> list[LearnerLine]:
    """Without what time decides; and whom a peer suspects, which rests on a lot of its own key."""
    return [
        msgspec.structs.replace(line, timing=None, waiting=None, suspects=None)
        for line in lines
        if line.peer == peer
    ]


def read_log(hub_folder: Path) -> list[Entry]:
    """Everything on the log of a hub that is not running: on each of its servers the same."""
    state = read_state(hub_folder)
    servers = Servers.of(state, hub_folder, lambda text: None, RealClock())
    servers.start()
    try:
        login = hub_login(hub_folder, state)
        if state.place.nodes:
            wait_until(lambda: all_have_all(login, state), PATIENCE_S, "the nodes do not agree")
        # who is dialled answers itself
        first, *others = [
            read_server(dataclasses.replace(login, url=url), state.crew) for url in login.urls
        ]
        assert all(other == first for other in others), "the nodes have different logs"
        return first
    finally:
        servers.stop()


def all_have_all(login: Login, state: HubState) -> bool:
    with suppress(LogError), closing(Connection(login)) as connection:
        found = look_at_nodes(connection, state.crew, state.place.nodes)
        return all(one.health in ("leads", "follows") for one in found)
    return False


def read_server(login: Login, crew: str) -> list[Entry]:
    with closing(Connection(login)) as connection:
        log = NatsLog(connection, crew)
        entries: list[Entry] = []
        while page := log.read(entries[-1].position if entries else 0):
            entries += page
        return entries


def log_faults(config: CrewConfig, hub_folder: Path) -> list[str]:
    """Every group on the log once, every chain whole."""
    entries = read_log(hub_folder)
    faults, ids, chains = [], Counter(), {}
    for entry in entries:
        sealed = unpack(entry.record)
        stamp, content = decode(sealed.body)
        fault = chains.setdefault(stamp.key, Chain()).add(stamp, sealed.hash)
        faults += [f"{entry.id} is a {fault}"] if fault else []
        ids.update([content.id] if isinstance(content, Group) else [])
    faults += [
        f"{len(chain.missing)} records of a chain are missing"
        for chain in chains.values()
        if chain.missing
    ]
    expected = {
        f"{p.name}.{round}.{slot}"
        for p in config.peer
        for round in range(config.crew.rounds)
        for slot in range(config.problems_per_peer)
    }
    lost, strange = expected - set(ids), set(ids) - expected
    doubled = [id for id, count in ids.items() if count > 1]
    return faults + [
        f"{what}: {sorted(which)}"
        for what, which in (("lost", lost), ("strange", strange), ("doubled", doubled))
        if which
    ]


def undisturbed_run(config: CrewConfig, folder: Path) -> Path:
    crew = LocalCrew.start(config, folder)
    for _ in crew.rounds():
        pass
    return folder


def faults_despite(
    config: CrewConfig, folder: Path, reference: Path, honest: Sequence[str]
) -> list[str]:
    """Everything in which honest peers beside a hostile one are not as they must be."""
    faults = []
    per_peer = config.problems_per_peer
    for name in honest:
        if weights(folder / name, name) != weights(reference / name, name):
            faults.append(f"weights of {name} differ")
        lines = read_metrics(folder / name)
        if [line.round for line in lines] != list(range(config.crew.rounds + 1)):
            faults.append(f"{name} has rounds {[line.round for line in lines]}")
        for line in lines[1:]:
            if {sender: it.groups for sender, it in line.senders.items()} != dict.fromkeys(
                honest, per_peer
            ):
                faults.append(f"{name} learned in round {line.round} from {list(line.senders)}")
            faults += [
                f"{name} refused records of {sender}: {reasons}"
                for sender, reasons in (line.refused or {}).items()
                if sender in honest
            ]
        if not lines[-1].refused:
            faults.append(f"{name} has met nothing ill")
    mine = [e for e in read_log(folder / "hub") if e.id.split(".")[0] in honest]
    ids = sorted(e.id for e in mine)
    rounds = range(config.crew.rounds)
    if ids != sorted(f"{n}.{r}.{s}" for n in honest for r in rounds for s in range(per_peer)):
        faults.append(f"the log has of the honest peers {ids}")
    return faults


# (root, number, rng, kills left): killed, faults
OneRun = Callable[[Path, int, random.Random, int], tuple[Counter[str], list[str]]]


def struggle(
    parser: argparse.ArgumentParser, one_run: Callable[[argparse.Namespace], OneRun]
) -> None:
    """Runs until there were kills enough; prints what came of them, and exits with 1 if anything is
    wrong.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    rng, run = random.Random(wanted.seed), one_run(wanted)
    killed: Counter[str] = Counter()
    faults: list[str] = []
    started, num_runs = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_task(root)
        sys.path.insert(0, str(root))
        while killed.total() < wanted.kills:
            more, found = run(root, num_runs, rng, wanted.kills - killed.total())
            killed += more
            faults += found
            num_runs += 1
            left = (
                (time.monotonic() - started)
                / max(1, killed.total())
                * (wanted.kills - killed.total())
            )
            print(
                f"{killed.total()} of {wanted.kills} kills, {num_runs} runs, {len(faults)} "
                f"faults, {left:.0f} s left",
                file=sys.stderr,
            )
    report = {
        "kills": killed.total(),
        "victims": dict(killed),
        "runs": num_runs,
        "faults": faults,
        "seconds": time.monotonic() - started,
    }
    if wanted.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:10} {value}")
    sys.exit(1 if faults else 0)


def one_run(wanted: argparse.Namespace) -> OneRun:
    def run(
        root: Path, number: int, rng: random.Random, kills: int
    ) -> tuple[Counter[str], list[str]]:
        config = spread_crew(
            root,
            TRAINS,
            learning="checkpoint_every = 4",
            rounds=wanted.rounds,
            seed=wanted.seed + number,
        )
        reference, folder = (
            undisturbed_run(config, root / f"undisturbed{number}"),
            root / f"disturbed{number}",
        )
        killed = disturbed_run(config, folder, rng, kills, 1200, cluster=wanted.cluster)
        return killed, faults_of(config, folder, reference)

    return run


def one_hostile_run(wanted: argparse.Namespace) -> OneRun:
    def run(
        root: Path, number: int, rng: random.Random, kills: int
    ) -> tuple[Counter[str], list[str]]:
        config = spread_crew(
            root,
            (*TRAINS, "full"),
            learning="checkpoint_every = 4",
            rounds=wanted.rounds,
            seed=wanted.seed + number,
            deadline_s=0.5,
            quorum=len(TRAINS),
        )
        *honest, hostile = [peer.name for peer in config.peer]
        reference, folder = root / f"undisturbed{number}", root / f"disturbed{number}"
        disturbed_run(config, reference, rng, 0, 1200, honest)
        killed = disturbed_run(config, folder, rng, kills, 1200, honest, hostile)
        return killed, faults_despite(config, folder, reference, honest)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cluster", action="store_true", help="with a hub of three servers")
    parser.add_argument("--hostile", action="store_true", help="with a fourth peer that means ill")
    struggle(parser, lambda wanted: (one_hostile_run if wanted.hostile else one_run)(wanted))


if __name__ == "__main__":
    main()
