"""Calls in processes of their own, several at a time. A process that dies costs its call only.

One that dies, or has too little memory, is tried again when nothing runs beside it. Where a GPU is
shared it is first tried when that has more room. Knows nothing of what is called.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Generic, TypeVar, cast

from motley.runs.ending import PLAIN
from motley.study.shared_gpu import Measure, SharedGpu

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Tell = Callable[[float], None]  # how much of a job is done, from 0 to 1
Heard = Callable[[str, float], None]  # (name of a job, how much of it is done)
LOOK_S = 1.0  # between two looks at who still lives
NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate")
# how often a job failed that was tried alone
TIMES = {2: " (twice, the second time alone)", 3: " (three times, the last time alone)"}
MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")  # of Linux: also how often it killed for room

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job(Generic[T_co]):
    """A call that can be pickled. It starts when all jobs in `needs` are done.

    `tells`: the call takes a function, by which it tells how much is done. `alike`: jobs of which
    this is the same take about as much memory of a GPU. They tell before the first round of what
    they do and after each.
    """

    name: str
    call: Callable[..., T_co]
    needs: tuple[str, ...] = ()
    tells: bool = False
    alike: str = ""


@dataclass(frozen=True, slots=True)
class Returned(Generic[T_co]):
    name: str
    value: T_co


@dataclass(frozen=True, slots=True)
class Lost:
    """A job that gave nothing, and why."""

    name: str
    why: str


class LostRunsError(ValueError):
    """Runs that gave nothing, after all others were made and kept."""

    def __init__(self, lost: Sequence[Lost], total: int) -> None:
        each = "; ".join(f"{one.name}: {one.why}" for one in lost)
        super().__init__(
            f"{len(lost)} of {total} runs gave nothing: {each}; all others are kept, and the same "
            "command goes on with these"
        )


def _unheard(name: str, share: float) -> None:
    pass


def make_all(
    num: int,
    first: Sequence[Job[None]],
    then: Sequence[Job[T]],
    kept: Callable[[T], None],
    heard: Heard = _unheard,
    gpu: SharedGpu | None = None,
) -> list[Lost]:
    """Do all of `then` in `num` processes, each after what it needs of `first`, and call `kept`
    with each result as it comes; which of them were lost. `gpu`: what they share.
    """
    names, lost = {job.name for job in then}, []
    for end in in_processes(num, _in_order(first, then), heard, gpu):
        if isinstance(end, Lost):
            logger.warning("%s: %s; going on with the others", end.name, end.why)
            lost += [end] if end.name in names else []
        elif end.name in names:
            kept(cast("T", end.value))
    return lost


def _in_order(first: Sequence[Job[None]], then: Sequence[Job[T]]) -> list[Job[T | None]]:
    """Each job behind what it needs, and nothing before somebody needs it: results come early."""
    prepared = {job.name: job for job in first}
    work: dict[str, Job[T | None]] = {}
    for job in then:
        work |= {name: prepared[name] for name in job.needs if name not in work}
        work[job.name] = job
    return list(work.values())


def in_processes(
    num: int, work: Sequence[Job[T]], heard: Heard = _unheard, gpu: SharedGpu | None = None
) -> Iterator[Returned[T] | Lost]:
    """What became of each job, as it comes. Jobs stand behind those that they need."""
    for place, job in enumerate(work):
        assert set(job.needs) <= {one.name for one in work[:place]}, job.name
    pool = _Pool(num, work, heard, gpu)
    try:
        yield from pool.ends()
    finally:
        for worker in (*pool.idle, *pool.busy):
            worker.stop()


class _Pool(Generic[T]):
    def __init__(
        self, num: int, work: Sequence[Job[T]], heard: Heard, gpu: SharedGpu | None
    ) -> None:
        self.num, self.heard, self.gpu = num, heard, gpu
        self.waiting = list(work)
        self.again: list[Job[T]] = []  # to be tried with nothing beside them
        self.alone = set[str]()  # those that were
        self.failures = Counter[str]()
        self.passed = Counter[str]()  # how often others began before the first that waits
        self.done, self.lost = set[str](), set[str]()
        self.idle, self.busy = list[_Process](), dict[_Process, Job[T]]()

    def ends(self) -> Iterator[Returned[T] | Lost]:
        while self.waiting or self.again or self.busy:
            yield from self._hopeless()
            self._begin_what_fits()
            for worker in _speaking(list(self.busy)):
                if end := self._end_of(worker):
                    (self.lost if isinstance(end, Lost) else self.done).add(end.name)
                    yield end

    def _hopeless(self) -> Iterator[Lost]:
        for job in [job for job in self.waiting if self.lost.intersection(job.needs)]:
            self.waiting.remove(job)
            self.lost.add(job.name)
            needed = next(name for name in job.needs if name in self.lost)
            yield Lost(job.name, f"not begun, since it needs {needed}")

    def _begin_what_fits(self) -> None:
        if any(job.name in self.alone for job in self.busy.values()):
            return  # one that must have nothing beside it
        while len(self.busy) < self.num and (job := self._next()):
            self.waiting.remove(job)
            self._begin(job)
        if self.again and not self.busy:
            for worker in self.idle:  # what they hold is given back
                worker.stop()
            self.idle.clear()
            job = self.again.pop(0)
            self.alone.add(job.name)
            self._begin(job)

    def _next(self) -> Job[T] | None:
        """The first that is ready and fits. Others pass one that does not fit, but only so many:
        then they wait until it does.
        """
        ready = [job for job in self.waiting if self.done.issuperset(job.needs)]
        for job in ready:
            if self.gpu is None or self.gpu.fits(job.alike):
                self.passed[ready[0].name] += job is not ready[0]
                return job
            if self.passed[ready[0].name] >= self.num:
                return None
        return None

    def _begin(self, job: Job[T]) -> None:
        worker = _worker_of(self.idle, self.gpu.measure if self.gpu else _nothing_measured)
        self.busy[worker] = job
        if self.gpu:
            self.gpu.began(job.name, job.alike)
        worker.begin(job)

    def _end_of(self, worker: _Process) -> Returned[T] | Lost | None:
        """None: it has not ended, or will be tried again."""
        job, said = self.busy[worker], worker.said()
        if isinstance(said, _Told):
            self.heard(job.name, said.share)
            if self.gpu:
                self.gpu.told(job.name, said.held)
            return None
        del self.busy[worker]
        if not isinstance(said.value, _Failed):
            self.idle.append(worker)
            if self.gpu and said.held is not None:
                self.gpu.ended(job.name, said.held)
            return Returned(job.name, cast("T", said.value))
        worker.stop()  # what it holds is given back
        return self._failed(job, said.value, said.held)

    def _failed(self, job: Job[T], failed: _Failed, held: int | None) -> Lost | None:
        """None: it will be tried again."""
        self.failures[job.name] += 1
        beside = ""
        if self.gpu:
            beside = f"; {self.gpu.text(job.alike)}"
            if failed.for_room and held is not None:
                self.gpu.ran_out(job.name, held)
            else:
                self.gpu.lost(job.name)
        if job.name in self.alone:
            return Lost(job.name, failed.why + TIMES[self.failures[job.name]])
        if not failed.for_room:
            return Lost(job.name, failed.why)
        if self.gpu and held is not None and self.failures[job.name] == 1:
            self.waiting.insert(0, job)
            when = "when the GPU has more room"
        else:
            self.again.append(job)
            when = "alone, after the others"
        logger.warning("%s: %s%s; it is tried again %s", job.name, failed.why, beside, when)
        return None


def _worker_of(idle: list[_Process], measure: Measure) -> _Process:
    """One that waits for a call, or a new one."""
    while idle:
        if (worker := idle.pop()).process.is_alive():
            return worker
        worker.stop()
    return _Process(measure)


def _nothing_measured() -> Callable[[], int]:
    return lambda: 0


class _Process:
    """A process that makes one call after another."""

    def __init__(self, measure: Measure) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, measure))
        self.process.start()
        theirs.close()
        self._kills = 0  # by the kernel, for memory, before the call

    def begin(self, job: Job[T]) -> None:
        self._kills = _kills_for_memory()
        with suppress(BrokenPipeError):  # it has just died; `said` says so
            self.pipe.send((job.call, job.tells))

    def said(self) -> _Told | _Ended:
        with suppress(EOFError, ConnectionResetError):
            # a child of a dead worker can hold its pipe open, with nothing in it
            if self.pipe.poll():
                return cast("_Told | _Ended", self.pipe.recv())
        self.process.join()
        killed = _kills_for_memory() > self._kills
        return _Ended(_Failed(_cause_of_death(self.process.exitcode, killed), for_room=True), None)

    def stop(self) -> None:
        """At once: a run that is stopped goes on from its checkpoint."""
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _speaking(busy: Sequence[_Process]) -> list[_Process]:
    """Those who have something to say, or cannot any more; perhaps nobody."""
    ready = set(wait([worker.pipe for worker in busy], LOOK_S))
    return [w for w in busy if w.pipe in ready or not w.process.is_alive()]


@dataclass(frozen=True, slots=True)
class _Told:
    share: float
    held: int  # bytes of the GPU, at the most so far


@dataclass(frozen=True, slots=True)
class _Ended:
    value: object  # a result or `_Failed`
    held: int | None  # None: the process died


@dataclass(frozen=True, slots=True)
class _Failed:
    why: str
    for_room: bool = False  # perhaps for want of memory, so that it may succeed with more


def _serve(pipe: Connection, measure: Measure) -> None:
    while True:
        try:
            _answer(pipe, measure)
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            return  # whoever asked has gone


def _answer(pipe: Connection, measure: Measure) -> None:
    call, tells = pipe.recv()
    held = measure()
    tell: Tell = lambda share: pipe.send(_Told(share, held()))
    value = _result_of(call, *([tell] if tells else []))
    pipe.send(_Ended(value, held()))


def _result_of(call: Callable[..., T], *given: Tell) -> T | _Failed:
    try:
        return call(*given)
    except PLAIN as error:
        if details := getattr(error, "details", ""):  # where in a user's own code it happened
            sys.stderr.write(f"{details}\n")
        return _Failed(str(error), _is_for_room(error))
    except Exception as error:  # noqa: BLE001 - one run's fault must not cost the others
        if not (for_room := _is_for_room(error)):
            traceback.print_exc()
        return _Failed(f"{type(error).__name__}: {error}", for_room)


def _is_for_room(error: Exception) -> bool:
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(text in words for text in NO_MEMORY)


def _kills_for_memory() -> int:
    """How many processes here the kernel has killed for memory; 0 where it does not say."""
    try:
        lines = MEMORY_EVENTS.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _cause_of_death(exit_code: int | None, killed_for_memory: bool) -> str:
    if exit_code is None or exit_code >= 0:
        return f"its process ended by itself with exit status {exit_code}"
    known = {number.value: number.name for number in signal.Signals}
    name = known.get(-exit_code, f"signal {-exit_code}")
    remedy = ""
    if killed_for_memory:
        remedy = "; the machine's memory was full: use fewer --jobs"
    elif name == "SIGKILL":
        remedy = "; too little memory is the usual cause: use fewer --jobs"
    return f"its process was killed by {name}{remedy}"
