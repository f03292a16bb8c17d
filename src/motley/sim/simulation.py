"""A crew on virtual time.

It has one log in memory, the network between everyone and it, and an ordinary run folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from motley.config import CrewConfig
from motley.exchange import MemoryLog
from motley.exchange.arriving import ArrivingLog
from motley.exchange.blobs import Blobs, MemoryBlobs
from motley.learning.checkpoint import save_checkpoint, save_training
from motley.learning.learner import StepReport
from motley.learning.pace import pace_of
from motley.peers.follower import Sampler
from motley.peers.peer import Peer
from motley.peers.sampling import Sampled
from motley.runs.building import WarmProgress, build_peer, build_sampler
from motley.runs.checking import check_config, is_mixed
from motley.runs.folder import Run, held_alone, new_folder
from motley.runs.lines import by_sender, sampler_line
from motley.runs.local import found_log, one_process_outbox
from motley.runs.metrics import MetricsLine
from motley.sim.events import Events
from motley.sim.peers import SimSampler, SimStudent
from motley.sim.recorded import RecordedPeers

# steps' worth of groups that came while everyone could have learned, and nobody did
MAX_UNLEARNED = 50


class SimState(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation in its only checkpoint."""

    round: int
    time_s: float


class SimCrew:
    """`rounds()` trains: it yields the metrics lines of whatever happened at one moment.

    The same seed gives the same lines.
    """

    def __init__(
        self,
        config: CrewConfig,
        folder: Path,
        warm_progress: WarmProgress | None = None,
        recorded: RecordedPeers | None = None,
    ) -> None:
        """`recorded`: peers that are not simulated, and as fast as the slowest that is."""
        check_config(config)
        self.config, self.folder = config, folder
        self.events = Events()
        self._blobs: dict[str, Blobs] = {}
        self._lines: list[MetricsLine] = []
        self._unlearned = self._came = 0  # records since the last step, and all of them
        self._told = 0  # up to where everyone has been told of the log
        self._recorded = recorded or RecordedPeers({})
        with new_folder(folder, config, "delete it: a simulation is not resumed"):
            self.log = MemoryLog(folder / "groups" / "log.bin")
            self._run = Run(config, folder, self.events.clock, mixed=is_mixed(config))
            hub = found_log(config, self.log, self._run.task)
            self.students = [
                SimStudent(self, self._student(name, hub, warm_progress))
                for name in (
                    p.name for p in config.students if p.name not in self._recorded.records
                )
            ]
            self.samplers = [
                SimSampler(self, self._sampler(p.name, hub))
                for p in config.peer
                if p.role == "sampler"
            ]
            self._run.write([self._run.first_line(s.peer, time_s=0.0) for s in self.students])
            if self._recorded.records:
                self._go_on_recorded()

    def _student(self, name: str, hub: bytes, progress: WarmProgress | None) -> Peer:
        weather = self.config.weather(name)
        log = (
            self.log if weather.link.instant else ArrivingLog(self.log, weather, self.events.clock)
        )
        return build_peer(
            self._run,
            self.config.named(name),
            log,
            one_process_outbox(self.config, name),
            hub,
            progress,
        )

    def _sampler(self, name: str, hub: bytes) -> Sampler:
        me = self.config.named(name)
        return build_sampler(
            self._run,
            me,
            self.log,
            one_process_outbox(self.config, name),
            self.blobs_of(me.follows),
            hub,
        )

    # What simulated peers see

    def blobs_of(self, learner: str) -> Blobs:
        return self._blobs.setdefault(learner, MemoryBlobs())

    def appended(self) -> None:
        for one in self.listeners():
            one.news()
        self._notice_standstill()

    def listeners(self) -> list[SimStudent | SimSampler]:
        """Who can use what is new on the log: in a large crew most may hear nothing of it."""
        news = [entry.id for entry in self.log.read(self._told, limit=len(self.log))]
        self._told = len(self.log)
        return [*(s for s in self.students if s.hears_of(news)), *self.samplers]

    def _go_on_recorded(self) -> None:
        """Recorded peers publish a round once everyone has learned from the one before."""
        while self._recorded.published <= self.finished_rounds < self.config.crew.rounds:
            self._recorded.publish_next(self)

    def _notice_standstill(self) -> None:
        """Stop where nothing of what samplers send can ever be learned from.

        They would never stop by themselves.
        """
        read = max(s.peer.cursor for s in self.students)
        came, self._came = read - self._came, read
        if all(s.here and not s.busy for s in self.students if not s.over):
            self._unlearned += came
        if (
            self._unlearned
            > MAX_UNLEARNED * self.config.crew.problems_per_round * self.config.authors_per_group
        ):
            dropped = {s.me.name: by_sender(s.peer.waiting.dropped) for s in self.students}
            refused = {s.me.name: by_sender(s.peer.admission.refused) for s in self.students}
            raise ValueError(
                f"nobody has learned anything from the last {self._unlearned} records, after "
                f"{self.events.clock.now_s():.0f} s: "
                f"dropped so far {dropped}, refused {refused}; these say why, or the window is "
                "far too short"
            )

    def sampled(self, author: Sampler, sampled: Sampled) -> None:
        line = sampler_line(author, sampled)
        self._lines.append(msgspec.structs.replace(line, time_s=self.events.clock.now_s()))

    def learned(
        self, student: Peer, sampled: Sampled | None, report: StepReport | None, without: list[str]
    ) -> None:
        self._unlearned = 0
        if self._recorded.records:
            self._go_on_recorded()
        line = self._run.line(student, student.learned_rounds, sampled, report)
        now_s = self.events.clock.now_s()
        self._lines.append(msgspec.structs.replace(line, time_s=now_s, without=without or None))

    # Life

    @property
    def finished_rounds(self) -> int:
        return min(s.peer.learned_rounds for s in self.students)

    def rounds(self) -> Iterator[list[MetricsLine]]:
        """Let time pass until everyone who learns has taken its last step, or all may stop."""
        with held_alone(self.folder):
            while not all(s.over for s in self.students) and not self._run.stopping.reason:
                if not self.events.happen():
                    break
                if self._lines:
                    lines, self._lines = self._lines, []
                    self._run.write(lines)
                    yield lines
            stuck = [s for s in self.students if not s.over]
            if stuck and not self._run.stopping.reason:
                yield self._end_early(stuck)
            self.save()

    def _end_early(self, stuck: list[SimStudent]) -> list[MetricsLine]:
        """End where nothing more can happen.

        Asynchronous peers have used up what was sampled, or somebody waits for ever.
        """
        runs_dry = pace_of(self.config).may_run_dry
        if not runs_dry or any(s.me.role == "learner" for s in stuck):
            words = ", ".join(
                f"{s.me.name} has {len(s.peer.waiting)} groups after round {s.peer.learned_rounds}"
                for s in stuck
            )
            raise ValueError(
                f"nothing more can happen after {self.events.clock.now_s():.0f} s, and the crew "
                f"is not finished: {words}; "
                "did everyone who samples leave, or is everything dropped as stale?"
            )
        now_s, rounds = self.events.clock.now_s(), self.config.crew.rounds
        lines: list[MetricsLine] = [
            msgspec.structs.replace(self._run.line(s.peer, rounds, None, None), time_s=now_s)
            for s in stuck
        ]
        self._run.write(lines)
        return lines

    def save(self) -> None:
        """The weights that were reached, as a checkpoint to look at.

        A simulation itself is not resumed.
        """

        def write(folder: Path) -> None:
            for student in self.students:
                save_training(
                    student.peer.learner.policy,
                    student.peer.learner.optimiser,
                    folder / student.me.name,
                )

        state = SimState(round=self.finished_rounds, time_s=self.events.clock.now_s())
        save_checkpoint(self.folder / "checkpoints", self.finished_rounds, state, write)
