"""Calls in processes of their own, several at a time. A process that dies costs its call only.

Knows nothing of what is called.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar, cast

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
LOOK_S = 1.0  # between two looks at who still lives
PLAIN_ERRORS = (ValueError, FloatingPointError, OSError)  # whose own words say enough

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job(Generic[T_co]):
    """A call that can be pickled. It starts when all jobs in `needs` are done."""

    name: str
    call: Callable[[], T_co]
    needs: tuple[str, ...] = ()


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


def make_all(
    num: int, first: Sequence[Job[None]], then: Sequence[Job[T]], kept: Callable[[T], None]
) -> list[Lost]:
    """Do all of `then` in `num` processes, each after what it needs of `first`, and call `kept`
    with each result as it comes; which of them were lost.
    """
    names, lost = {job.name for job in then}, []
    for end in in_processes(num, _in_order(first, then)):
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


def in_processes(num: int, work: Sequence[Job[T]]) -> Iterator[Returned[T] | Lost]:
    """What became of each job, as it comes. Jobs stand behind those that they need."""
    for place, job in enumerate(work):
        assert set(job.needs) <= {one.name for one in work[:place]}, job.name
    waiting, done, lost = list(work), set[str](), set[str]()
    idle, busy = list[_Process](), dict[_Process, Job[T]]()
    try:
        while waiting or busy:
            for job in _hopeless(waiting, lost):
                waiting.remove(job)
                lost.add(job.name)
                needed = next(name for name in job.needs if name in lost)
                yield Lost(job.name, f"not begun, since it needs {needed}")
            while len(busy) < num and (ready := _ready(waiting, done)):
                waiting.remove(ready)
                worker = _worker_of(idle)
                busy[worker] = ready
                worker.begin(ready.call)
            for worker in _ended(list(busy)):
                job = busy.pop(worker)
                end = worker.end_of(job)
                (lost if isinstance(end, Lost) else done).add(job.name)
                idle.append(worker)
                yield end
    finally:
        for worker in (*idle, *busy):
            worker.stop()


def _hopeless(waiting: Sequence[Job[T]], lost: set[str]) -> list[Job[T]]:
    return [job for job in waiting if lost.intersection(job.needs)]


def _ready(waiting: Sequence[Job[T]], done: set[str]) -> Job[T] | None:
    return next((job for job in waiting if done.issuperset(job.needs)), None)


def _worker_of(idle: list[_Process]) -> _Process:
    """One that waits for a call, or a new one."""
    while idle:
        if (worker := idle.pop()).process.is_alive():
            return worker
        worker.stop()
    return _Process()


class _Process:
    """A process that makes one call after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def begin(self, call: Callable[[], object]) -> None:
        with suppress(BrokenPipeError):  # it has just died; `end_of` says so
            self.pipe.send(call)

    def end_of(self, job: Job[T]) -> Returned[T] | Lost:
        try:
            # a child of a dead worker can hold its pipe open, with nothing in it
            value: T | _Failed = self.pipe.recv() if self.pipe.poll() else _NOTHING
        except (EOFError, ConnectionResetError):
            value = _NOTHING
        if value is _NOTHING:
            self.process.join()
            return Lost(job.name, _cause_of_death(self.process.exitcode))
        return (
            Lost(job.name, value.why) if isinstance(value, _Failed) else Returned(job.name, value)
        )

    def stop(self) -> None:
        """At once: a run that is stopped goes on from its checkpoint."""
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _ended(busy: Sequence[_Process]) -> list[_Process]:
    """Those who have something to say, or cannot any more; at least one, if there are any."""
    while busy:
        ready = set(wait([worker.pipe for worker in busy], LOOK_S))
        if ended := [w for w in busy if w.pipe in ready or not w.process.is_alive()]:
            return ended
    return []


@dataclass(frozen=True, slots=True)
class _Failed:
    why: str


_NOTHING = _Failed("")


def _serve(pipe: Connection) -> None:
    while True:
        try:
            call = pipe.recv()
            pipe.send(_result_of(call))
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            return  # whoever asked has gone


def _result_of(call: Callable[[], T]) -> T | _Failed:
    try:
        return call()
    except PLAIN_ERRORS as error:
        if details := getattr(error, "details", ""):  # where in a user's own code it happened
            sys.stderr.write(f"{details}\n")
        return _Failed(str(error))
    except Exception as error:  # noqa: BLE001 - one run's fault must not cost the others
        traceback.print_exc()
        return _Failed(f"{type(error).__name__}: {error}")


def _cause_of_death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        known = {number.value: number.name for number in signal.Signals}
        name = known.get(-exit_code, f"signal {-exit_code}")
        remedy = "; too little memory is the usual cause: use fewer --jobs"
        return f"its process was killed by {name}{remedy if name == 'SIGKILL' else ''}"
    return f"its process ended by itself with exit status {exit_code}"
