"""What a peer's round costs in a crew of any size, where it hears a few of the others.

A few peers train for real, on virtual time; the rest of the crew is recorded (`sim/recorded.py`).
Only the time of the processor counts that the real ones take. What the log takes to write a record
is a hub's, and is told apart.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from motley.benchmarks.bench import Row
from motley.config import CrewConfig, parse_config
from motley.files import whole
from motley.records import HUB
from motley.sim.recorded import record_peers
from motley.sim.simulation import SimCrew
from motley.tasks import load_task

SIZES = (10, 30, 100, 300, 1000)
SUFFIXES = (".png", ".svg", ".pdf")

_CREW = """
[crew]
name = "crowd"
task = "digits"
objective = "ftis"
rounds = {rounds}
group_size = 8
problems_per_round = {problems}
pace = "{pace}"
hear = {hear}
[sampling]
max_tokens = 8
[learning]
checkpoint_every = {rounds}
[evaluate]
every = {rounds}
problems = 1
traces = 0
"""
PROBLEMS = 2  # of a peer, in a round


class CrowdCost(NamedTuple):
    """Of one crew, by peer that trains and round."""

    peers: int
    cpu_s: float
    judged: float  # groups that were read whole
    read_bytes: float  # of these
    passed_by: float  # groups of which the head was read
    head_bytes: float  # of these: id, position and size
    hub_s: float  # of the processor, to write one record to the log
    peak_mib: float  # of the whole process, the log included


class _Beside:
    """The processor's time that is not the peers'."""

    def __init__(self) -> None:
        self.spent_s, self.times = 0.0, 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        start_s = time.process_time()
        yield
        self.spent_s += time.process_time() - start_s
        self.times += 1


def crowd_config(peers: int, hear: int, rounds: int, pace: str) -> CrewConfig:
    text = _CREW.format(rounds=rounds, problems=PROBLEMS * peers, hear=hear, pace=pace)
    names = "".join(f'[[peer]]\nname = "p{n:04d}"\nmodel = "tiny:0.3m"\n' for n in range(peers))
    return parse_config(text + names)


def crowd_cost(peers: int, hear: int, rounds: int, real: int, pace: str = "lockstep") -> CrowdCost:
    """Of a crew in this process. Its first round is not counted, in which memory is taken, nor its
    last, in which it is evaluated.
    """
    torch.set_num_threads(1)
    config = crowd_config(peers, hear, rounds, pace)
    names = [peer.name for peer in config.peer]
    trained = names[:: -(-peers // real)]
    task = load_task(config.crew.task, config.task)
    recorded = record_peers(config, task, [name for name in names if name not in trained])
    recorded.beside = beside = _Beside()
    marks: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        crew = SimCrew(config, Path(folder) / "run", recorded=recorded)
        for _ in crew.rounds():
            marks.setdefault(crew.finished_rounds, time.process_time() - beside.spent_s)
        each = len(trained) * (rounds - 2)
        cpu_s = (marks[rounds - 1] - marks[1]) / each
        return CrowdCost(
            peers,
            cpu_s,
            *_reading(crew, len(trained) * rounds),
            beside.spent_s / max(1, beside.times * PROBLEMS),
            _peak_mib(),
        )


def _reading(crew: SimCrew, each: int) -> tuple[float, float, float, float]:
    judged = read_bytes = passed_by = head_bytes = 0
    entries = crew.log.read(0, limit=len(crew.log))
    for student in crew.students:
        for entry in entries[: student.peer.cursor]:
            if entry.id.startswith(f"{HUB}."):  # once, whatever the number of rounds
                continue
            if student.peer.hearing.may_matter(entry.id):
                judged += 1
                read_bytes += len(entry.record)
            else:
                passed_by += 1
                head_bytes += len(entry.id) + 16
    return judged / each, read_bytes / each, passed_by / each, head_bytes / each


def _peak_mib() -> float:
    import resource  # Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def crowd_costs(
    sizes: Sequence[int],
    hear: int,
    rounds: int,
    real: int,
    pace: str = "lockstep",
    repeats: int = 1,
    show: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[CrowdCost]:
    """Each crew in a process of its own, several times in turn; of each, the quickest."""
    costs: dict[int, list[CrowdCost]] = {size: [] for size in sizes}
    for number in range(repeats):
        for place, size in enumerate(sizes):
            show(f"a crew of {size}", number * len(sizes) + place, repeats * len(sizes))
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                made = alone.submit(crowd_cost, size, hear, rounds, real, pace).result()
            costs[size].append(made)
    return [min(made, key=lambda cost: cost.cpu_s) for made in costs.values()]


def rows_of(costs: Sequence[CrowdCost]) -> list[Row]:
    """As a table, with what each crew takes against the smallest."""
    first = costs[0]
    return [
        {
            "peers": cost.peers,
            "ms of a peer's round": round(1e3 * cost.cpu_s, 1),
            "of the smallest": round(cost.cpu_s / first.cpu_s, 2),
            "groups read": round(cost.judged, 1),
            "KiB read": round(cost.read_bytes / 1024, 1),
            "heads passed by": round(cost.passed_by, 1),
            "KiB of heads": round(cost.head_bytes / 1024, 1),
            "peak MiB": round(cost.peak_mib),
            "KiB a peer more": round(1024 * (cost.peak_mib - first.peak_mib) / more)
            if (more := cost.peers - first.peers)
            else None,
            "hub us a record": round(1e6 * cost.hub_s),
        }
        for cost in costs
    ]


def draw_costs(costs: Sequence[CrowdCost], path: Path) -> None:
    """Processor time and bytes of a peer's round, and memory, by the size of the crew."""
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"cannot draw to {path}: the name ends in {path.suffix or 'nothing'}; expected "
            f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    peers = [cost.peers for cost in costs]
    left.plot(peers, [1e3 * cost.cpu_s for cost in costs], marker="o")
    left.set(title="processor time of a peer's round, ms", ylim=(0, None))
    middle.plot(peers, [c.read_bytes / 1024 for c in costs], marker="o", label="groups heard")
    middle.plot(peers, [c.head_bytes / 1024 for c in costs], marker="o", label="heads passed by")
    middle.set(title="read in a peer's round, KiB")
    middle.legend()
    right.plot(peers, [cost.peak_mib for cost in costs], marker="o")
    right.set(title="memory of the simulation, MiB", ylim=(0, None))
    for axis in (left, middle):
        axis.set(xscale="log", xlabel="peers")
    right.set(xlabel="peers")
    with whole(path) as partial:
        figure.savefig(partial, dpi=120)
