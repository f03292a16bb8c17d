"""A crew with a process for every peer on this machine, and a NATS server on loopback between them:
`processes = true`.

RUN/hub/            the hub's folder
RUN/peers/PEER/     each peer's own run folder
RUN/metrics.jsonl   the lines of all who learn, in the order of rounds
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from motley.clock import Clock, Deadline, RealClock
from motley.config import CrewConfig, parse_config
from motley.distributed.hub import Hub, check_stopped
from motley.distributed.join import Brings, join
from motley.distributed.participant import Participant
from motley.distributed.register import Place, Say, read_state
from motley.exchange.nats.server import free_port
from motley.files import replace
from motley.learning.checkpoint import checkpoints, round_of
from motley.runs.checking import check_config
from motley.runs.ending import PLAIN, resume_command
from motley.runs.folder import new_folder
from motley.runs.metrics import (
    LearnerLine,
    append_lines,
    decode_lines,
    encoded,
    learner_lines,
    read_metrics,
)
from motley.runs.resuming import config_to_resume, go_on_with, read_changes
from motley.runs.stopping import Stopping

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

# Windows can only spawn. Elsewhere torch is imported once for all.
processes: ForkServerContext | SpawnContext = (
    multiprocessing.get_context("forkserver")
    if "forkserver" in multiprocessing.get_all_start_methods()
    else multiprocessing.get_context("spawn")
)
processes.set_forkserver_preload(["motley.distributed.join"])

ASKED_AGAIN_S = 5.0  # to leave
FAILED, LEFT = 2, 3  # how a process ends: with an error, or before its last round


class ProcessCrew:
    """The parent's side: hub, supervision, metrics put together. Same use as LocalCrew."""

    def __init__(
        self, config: CrewConfig, folder: Path, say: Say, clock: Clock = RealClock()
    ) -> None:
        self.config, self.folder, self._say, self._clock = config, folder, say, clock
        self.finished_rounds, self._next = 0, 0  # the next has the skills before training first
        self._stopping = Stopping(config.evaluate)
        self._metrics = folder / "metrics.jsonl"
        self._peers_metrics = {
            peer.name: GrowingFile(folder / "peers" / peer.name / "metrics.jsonl")
            for peer in config.students
        }
        # per peer, by round
        self._lines: dict[str, dict[int, LearnerLine]] = {name: {} for name in self._peers_metrics}
        self._children: dict[str, multiprocessing.process.BaseProcess] = {}
        self._left: set[str] = set()  # who was asked by somebody else, and is to be started again
        self._closed = False
        (folder / "peers").mkdir(exist_ok=True)
        # its invitations never leave this machine
        self._hub = Hub.open(
            config, folder / "hub", self._place(), say, invite_days=0.0, may_change=True
        )

    @classmethod
    def start(cls, config: CrewConfig, folder: Path, say: Say = lambda text: None) -> ProcessCrew:
        check_config(config)
        with new_folder(folder, config, f"go on with: {resume_command(folder)}"):
            crew = cls(config, folder, say)
            crew._metrics.touch()
            return crew

    @classmethod
    def resume(
        cls,
        folder: Path,
        say: Say = lambda text: None,
        config: CrewConfig | None = None,
    ) -> ProcessCrew:
        """`config`: with other rounds, or whatever else may change; None: as RUN/config.toml."""
        config = config or config_to_resume(folder)
        check_stopped(folder / "hub")  # before anything is written
        go_on_with(folder, _agreed(folder) or config, config, max(_kept_rounds(config, folder)))
        crew = cls(config, folder, say)
        crew._take_up()
        return crew

    @property
    def stopped(self) -> str:
        """Why the crew is over before its last round; empty if it is not."""
        return self._stopping.reason

    @property
    def finished(self) -> bool:
        return bool(self.stopped) or self.finished_rounds >= self.config.crew.rounds

    def _take_up(self) -> None:
        """The rounds that are done, as they were put together before and as the peers have them.

        The file is replaced whole, so that nothing of it is missing while the peers come back.
        """
        if self._metrics.exists():
            for line in learner_lines(read_metrics(self.folder)):
                self._lines[line.peer][line.round] = line
        self._read_lines()
        self._forget_endings()
        replace(self._metrics, encoded([line for lines in self._new_rounds() for line in lines]))

    def _forget_endings(self) -> None:
        """Lines behind the checkpoint of a peer that had ended there: it goes on, and takes them
        back.
        """
        ends = {noted.before for noted in read_changes(self.folder) if noted.key == "crew.rounds"}
        kept_rounds = _kept_rounds(self.config, self.folder)
        for (name, lines), kept in zip(self._lines.items(), kept_rounds, strict=True):
            if any(kept < end and end in lines for end in ends):
                self._lines[name] = {n: line for n, line in lines.items() if n <= kept}

    def _new_rounds(self) -> Iterator[list[LearnerLine]]:
        """What every peer has finished since this was asked, to the last round or an early stop."""
        while not self.finished and all(
            max(known, default=-1) >= self._next for known in self._lines.values()
        ):
            number, self._next = self._next, self._next + 1
            # an async peer may skip some
            lines = [known[number] for known in self._lines.values() if number in known]
            for line in lines:
                self._stopping.hear(line)
            self.finished_rounds = number
            yield lines

    def _nothing_left(self) -> bool:
        """It stopped early, or everyone has learned and kept the last round."""
        rounds = self.config.crew.rounds
        return bool(self.stopped) or (
            self.finished and min(_kept_rounds(self.config, self.folder)) >= rounds
        )

    def gather(self) -> Iterator[int]:
        """Start everyone; yields how many have joined, until all have.

        A crew that stopped early or has finished is not started again.
        """
        if self._nothing_left():
            return
        try:
            self._hub.start()
            invitations = self._hub.register.invitations()
            for peer in self.config.peer:
                self._spawn(peer.name, invitations.get(peer.name, ""))
            joined = 0
            while joined < len(self._lines):
                self._look_after()
                joined = sum(map(bool, self._lines.values()))
                yield joined
        except BaseException:
            self.close()
            raise

    def rounds(self) -> Iterator[list[LearnerLine]]:
        """Train to the last round, or until every peer is as good as it is going to be; yields the
        lines of a round when every peer has finished it, and in between nothing.

        Lines of round 0 are the skills before training. A crew that goes on begins where its file
        of metrics ends. Whoever is ahead when all may stop saves where it is, and leaves.
        """
        try:
            while not self.finished:
                self._look_after()
                yield []
                for lines in self._new_rounds():
                    append_lines(self._metrics, lines)
                    yield lines
            # one that was killed is started again
            while not self.stopped and any(
                child.is_alive() or child.exitcode for child in self._children.values()
            ):
                self._look_after()
                yield []
        finally:
            self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.save()
        finally:
            self._hub.close()

    def save(self) -> None:
        """Ask every peer to save and leave, and wait for it.

        Whoever will not wait, by a second Ctrl-C, kills them: that costs a peer its turn.
        """
        try:
            self._have_all_leave()
        except BaseException:
            for child in self._children.values():
                child.kill()
            raise

    def _have_all_leave(self) -> None:
        """Asked again after a while: a process that was just started does not heed signals yet."""
        patience, named = Deadline(self._clock, 0.0), ""
        while alive := {n: c.pid for n, c in self._children.items() if c.is_alive()}:
            if patience.passed:
                for pid in filter(None, alive.values()):
                    with suppress(ProcessLookupError):  # it has just ended
                        os.kill(pid, signal.SIGINT)
                patience = Deadline(self._clock, ASKED_AGAIN_S)
            self._hub.tick()
            names = ", ".join(alive)
            if patience.passed and names != named:
                named = names
                self._say(f"waiting for {names} to end a turn and save; Ctrl-C again ends them")

    def _place(self) -> Place:
        port = (
            read_state(self.folder / "hub").place.port
            if (self.folder / "hub" / "hub.json").exists()
            else free_port()
        )
        return Place(url=f"nats://127.0.0.1:{port}", host="127.0.0.1", port=port)

    def _spawn(self, name: str, line: str) -> None:
        folder = self.folder / "peers" / name
        if line:
            folder.mkdir(exist_ok=True)
            (folder / "invitation").write_text(line.split()[-1])
        (folder / "error.txt").unlink(missing_ok=True)
        threads = max(1, (os.cpu_count() or 1) // len(self.config.peer))
        me = self.config.named(name)
        brings = Brings(
            device=me.device,
            devices=me.devices,
            engine=me.engine,
            judge=me.judge,
            crew=self.config,
        )
        arguments = (
            self._hub.register.state.place.url,
            self.config.crew.name,
            folder,
            threads,
            brings,
        )
        self._children[name] = processes.Process(
            target=take_part, args=arguments, name=f"motley {name}"
        )
        self._children[name].start()

    def _look_after(self) -> None:
        self._hub.tick()
        self._look_after_children()
        self._read_lines()

    def _look_after_children(self) -> None:
        """Start again who died or left. Who left, at the next look only: all may have been asked to
        by one Ctrl-C, and whoever reads the rounds stops then.
        """
        left, self._left = self._left, set()
        for name, child in list(self._children.items()):
            code = child.exitcode
            if not code:
                continue
            if code == LEFT and name not in left:
                self._left.add(name)
                continue
            if code > 0 and code != LEFT:
                raise ValueError(
                    f"peer {name} stopped with an error: "
                    f"{_last_words(self.folder / 'peers' / name)}"
                )
            how = "has left" if code == LEFT else f"was killed by signal {-code}"
            self._say(f"peer {name} {how}; starting it again")
            self._spawn(name, "")

    def _read_lines(self) -> None:
        """New lines of every peer's metrics.

        One that was killed writes its last rounds again, equal but for the times.
        """
        for name, file in self._peers_metrics.items():
            lines = learner_lines(decode_lines(b"".join(file.new_lines())))
            self._lines[name] |= {line.round: line for line in lines}


def _agreed(folder: Path) -> CrewConfig | None:
    """The crew as its hub knows it; None before there was one."""
    hub = folder / "hub"
    return parse_config(read_state(hub).config) if (hub / "hub.json").exists() else None


def _kept_rounds(config: CrewConfig, folder: Path) -> list[int]:
    """Of each peer's newest checkpoint; 0 where it has none."""
    kept = [checkpoints(folder / "peers" / peer.name / "checkpoints") for peer in config.students]
    return [round_of(paths[-1]) if paths else 0 for paths in kept]


class GrowingFile:
    """A file that somebody appends lines to, and may cut to write its end again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = 0  # bytes
        self._last = b""  # the line that ends there

    def new_lines(self) -> list[bytes]:
        """Whole lines that were not read before; all of them, if those read are not there."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._num_read - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._num_read, self._last = file.seek(0), b""
            content = file.read()
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        if lines:
            self._num_read, self._last = self._num_read + sum(map(len, lines)), lines[-1]
        return lines


def take_part(url: str, crew: str, folder: Path, num_threads: int, brings: Brings) -> None:
    """A child's life: join, train until it is over or a stop is asked for, save, leave."""
    # it is asked by this signal, which a parent in the background may have been told to ignore
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    torch.set_num_threads(num_threads)
    finished = False
    try:
        invitation = (folder / "invitation").read_text()
        with suppress(KeyboardInterrupt):  # on its way in there is nothing to save
            finished = stay(join(url, crew, invitation, folder, brings=brings))
    except PLAIN as error:
        if details := getattr(error, "details", ""):  # where in a user's own code it happened
            sys.stderr.write(f"{details}\n")
        (folder / "error.txt").write_text(str(error))
        raise SystemExit(FAILED) from None
    if not finished:
        raise SystemExit(LEFT)


def stay(participant: Participant) -> bool:
    """Until it is over, a stop is asked for, or nobody is left who could ask.

    Whether it is over.
    """
    asked = threading.Event()
    signal.signal(signal.SIGINT, lambda number, frame: asked.set())
    parent = multiprocessing.parent_process()
    for _ in participant.rounds():
        if participant.stuck:  # nobody here would shut anybody out
            raise ValueError(participant.stuck)
        if not (parent and parent.is_alive()) or asked.is_set():
            participant.save()
            break
    participant.close()
    return participant.finished


def _last_words(folder: Path) -> str:
    path = folder / "error.txt"
    return path.read_text() if path.exists() else "see above"
