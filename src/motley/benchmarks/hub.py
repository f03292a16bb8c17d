"""What one hub holds: a crew of hundreds on one NATS server of this machine, of whom some are
killed and come back, some leave for good and some come late.

Nothing is a stand-in: the hub, its server and every peer are those of `motley hub` and `motley
join`, and every peer trains. Only that several peers share a process is the benchmark's own
(`hub_peers.py`). In the end the log and every peer's own state are held against each other.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from motley.benchmarks.hub_peers import KINDS, REST, Account, HostJob, Line, Sample, host
from motley.config import CrewConfig, parse_config
from motley.distributed.hub import Hub
from motley.distributed.processes import GrowingFile, processes
from motley.distributed.register import Place
from motley.exchange import Entry, LogError
from motley.exchange.nats.server import free_port

_CREW = """
[crew]
name = "hundreds"
task = "digits"
objective = "ftis"
rounds = {rounds}
group_size = 4
problems_per_round = {peers}
pace = "{pace}"
hear = {hear}
deadline_s = {deadline_s}
[sampling]
max_tokens = 8
[learning]
checkpoint_every = 2
[evaluate]
every = {rounds}
problems = 1
traces = 0
"""
# Of a lockstep round: long enough for who is only slow, or comes back.
DEADLINE_S = 120.0
KILLED_AT = (0.25, 0.5)  # of all rounds
TICK_S = 0.05

Show = Callable[[str, int, int], None]


class HubPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which crew, and what happens to it."""

    peers: int = 200
    rounds: int = 8
    pace: Literal["lockstep", "async"] = "lockstep"
    hear: int = 8
    churn: int = 10  # peers that are killed twice and come back; as many leave, as many come late
    processes: int = 4  # that share who stays

    def __post_init__(self) -> None:
        if self.peers < 3 * self.churn + self.processes:
            raise ValueError(
                f"{self.peers} peers are too few for {self.churn} that are killed, as many that "
                f"leave, as many that come late and {self.processes} processes of others; use at "
                f"least {3 * self.churn + self.processes}, or a smaller --churn"
            )
        if self.rounds < 4:
            raise ValueError(
                f"rounds={self.rounds} are too few for all that happens; use 4 or more"
            )

    def config(self) -> CrewConfig:
        text = _CREW.format(
            rounds=self.rounds,
            peers=self.peers,
            pace=self.pace,
            hear=min(self.hear, self.peers - 1),
            deadline_s=DEADLINE_S,
        )
        names = (f'[[peer]]\nname = "p{n:04d}"\nmodel = "tiny:0.3m"\n' for n in range(self.peers))
        return parse_config(text + "".join(names))


class HubParts(NamedTuple):
    """Who shares a process."""

    stay: list[list[str]]  # in each, some leave half-way
    killed: list[str]
    late: list[str]
    leave: list[str]

    @staticmethod
    def of(plan: HubPlan, names: Sequence[str]) -> HubParts:
        churn = plan.churn
        killed, late, rest = names[:churn], names[churn : 2 * churn], names[2 * churn :]
        stay = [[*rest[n :: plan.processes]] for n in range(plan.processes)]
        return HubParts(stay, [*killed], [*late], [*rest[:churn]])


class Read(NamedTuple):
    """A record on the log, and when it was seen there."""

    entry: Entry
    at_s: float


@dataclass(slots=True)
class Life:
    """Of one process: what it has said so far."""

    job: HostJob
    child: BaseProcess
    file: GrowingFile
    samples: list[Sample] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)
    was_killed: bool = False

    def hear(self) -> None:
        for line in self.file.new_lines():
            told = msgspec.json.decode(line, type=Line)
            if told.error:
                raise ValueError(f"a peer of the benchmark failed: {told.error}")
            if told.sample:
                self.samples.append(told.sample)
            if told.account:
                self.accounts[told.account.peer] = told.account
        if self.child.exitcode and not self.was_killed:
            raise ValueError(
                f"a process of the benchmark ended with {self.child.exitcode}; see above"
            )

    @property
    def joined(self) -> int:
        return self.samples[-1].joined if self.samples else 0


class HubTrial:
    """A hub and its crew, from the first that joins to the last that leaves."""

    def __init__(self, plan: HubPlan, folder: Path, show: Show) -> None:
        self.plan, self.folder, self._show = plan, folder, show
        self.config = plan.config()
        self.parts = HubParts.of(plan, [peer.name for peer in self.config.peer])
        port = free_port()
        place = Place(url=f"nats://127.0.0.1:{port}", host="127.0.0.1", port=port)
        self.hub = Hub.open(self.config, folder / "hub", place, invite_days=0.0)
        self.lives: list[Life] = []
        self.reads: list[Read] = []
        self.rounds: Counter[str] = Counter()  # peer -> the most that it was seen at
        self.go_s = self.over_s = 0.0
        self.join_s = 0.0  # of everyone who was there from the beginning
        self.server = ServerUse(0.0, 0.0)  # from the go on
        self.hub_s = 0.0  # of the processor: the hub's own process, with the benchmark's own
        # what all processes had used of the processor, at the go and in the end
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self._invitations: dict[str, str] = {}

    def run(self) -> None:
        try:
            self.hub.start()
            lines = self.hub.register.invitations().items()
            self._invitations = {peer: line.split()[-1] for peer, line in lines}
            self._gather()
            self._take_part()
        finally:
            for life in self.lives:
                if life.child.is_alive():
                    life.child.kill()
                life.child.join()
            self.hub.close()

    def _gather(self) -> None:
        start_s = time.monotonic()
        first = [self._start(names) for names in (*self.parts.stay, self.parts.killed) if names]
        there = sum(len(life.job.invitations) for life in first)
        while (joined := sum(life.joined for life in first)) < there:
            self._tick(f"{joined} of {there} have joined", 0)
        self.join_s = time.monotonic() - start_s

    def _take_part(self) -> None:
        self.go_s = time.monotonic()
        server, own_s = ServerUse.of(self.hub), time.process_time()
        self.before = self._used_s()
        (self.folder / "go").touch()
        self._churn()
        stay = {peer.name for peer in self.config.peer} - set(self.parts.leave)
        while not self._is_done(stay):
            self._tick("taking part", self._num_rounds)
        self.over_s = time.monotonic()
        self.after = self._used_s()
        self.hub_s, self.server = time.process_time() - own_s, ServerUse.of(self.hub)
        self.server = self.server._replace(cpu_s=self.server.cpu_s - server.cpu_s)
        self._read_log()
        (self.folder / "over").write_text(str(self.reads[-1].entry.position))
        while any(life.child.is_alive() for life in self.lives):
            self._tick("giving account", self._num_rounds)
        self._tick("giving account", self._num_rounds)

    def _used_s(self) -> dict[str, float]:
        """Of the processor, by kind of thread."""
        newest = [life.samples[-1].cpu_s for life in self.lives if life.samples]
        return {kind: sum(used_s.get(kind, 0.0) for used_s in newest) for kind in (*KINDS, REST)}

    def _churn(self) -> None:
        """Have some come after the first round, and some be killed twice."""
        if not self.plan.churn:
            return
        self._until(1)
        self._start(self.parts.late)
        for share in KILLED_AT:
            self._until(max(1, round(share * self.plan.rounds)))
            self._kill(self.parts.killed)
            self._start(self.parts.killed)

    def _kill(self, names: Sequence[str]) -> None:
        """Without a word, at once."""
        last = next(life for life in reversed(self.lives) if names[0] in life.job.invitations)
        last.was_killed = True
        last.child.kill()
        last.child.join()

    def _until(self, rounds: int) -> None:
        """Wait until half of the crew has finished so many."""
        while median(self.rounds[peer.name] for peer in self.config.peer) < rounds:
            self._tick("taking part", self._num_rounds)

    @property
    def _num_rounds(self) -> int:
        return self.rounds.total()

    def _is_done(self, stay: set[str]) -> bool:
        """Whether all who stay are through, and all who leave have left."""
        accounts = {name for life in self.lives for name in life.accounts}
        return accounts >= set(self.parts.leave) and stay <= self._finished()

    def _finished(self) -> set[str]:
        """Who has taken its last step, in a process that was not killed."""
        lives = [life for life in self.lives if not life.was_killed and life.samples]
        return {name for life in lives for name in life.samples[-1].done}

    def _start(self, names: Sequence[str]) -> Life:
        number = len(self.lives)
        half_way = self.plan.rounds // 2
        job = HostJob(
            url=self.hub.register.state.place.url,
            crew=self.config.crew.name,
            folder=self.folder,
            told=self.folder / f"told-{number}.jsonl",
            invitations={name: self._invitations[name] for name in names},
            leave_after={name: half_way for name in names if name in self.parts.leave},
        )
        child = processes.Process(target=host, args=(job,), name=f"peers {number}", daemon=True)
        child.start()
        self.lives.append(Life(job, child, GrowingFile(job.told)))
        return self.lives[-1]

    def _tick(self, words: str, done: int) -> None:
        self.hub.tick(TICK_S)
        for life in self.lives:
            before = len(life.samples)
            life.hear()
            for sample in life.samples[before:]:
                for name, one in sample.peers.items():
                    self.rounds[name] = max(self.rounds[name], one.rounds)
        self._read_log()
        self._show(words, done, self.plan.peers * self.plan.rounds)

    def _read_log(self) -> None:
        """As any reader of the log; when a record is seen is when it came."""
        after = self.reads[-1].entry.position if self.reads else 0
        with suppress(LogError):  # an answer that got lost is asked for again
            self._read_pages(after)

    def _read_pages(self, after: int) -> None:
        while page := self.hub.office.log.read(after):
            self.reads += [Read(entry, time.monotonic()) for entry in page]
            after = page[-1].position


class ServerUse(NamedTuple):
    """Of the server, as the system knows it; 0 where it does not tell."""

    cpu_s: float
    peak_mib: float

    @staticmethod
    def of(hub: Hub) -> ServerUse:
        assert hub.server
        process = Path("/proc") / (hub.server.folder / "server.pid").read_text().strip()
        if not process.exists():
            return ServerUse(0.0, 0.0)
        fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
        lines = (process / "status").read_text().splitlines()
        peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        ticks = int(fields[11]) + int(fields[12])
        return ServerUse(ticks / os.sysconf("SC_CLK_TCK"), peak_kib / 1024)


def try_hub(plan: HubPlan, show: Show = lambda what, done, total: None) -> HubTrial:
    """Run a crew to its end, in a folder that is gone then."""
    with tempfile.TemporaryDirectory() as folder:
        trial = HubTrial(plan, Path(folder), show)
        trial.run()
        return trial
