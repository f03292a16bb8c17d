"""Calls in a process of its own, which strangers' text may bring down but not hold up.

Knows no task; what it calls is named by others.

A call has a budget of work, counted in function calls of Python: the same on every machine, and so
every peer of a crew comes to the same verdict. The limits of processor time and memory are a wall
behind the budget, for what computes long within one call. Where the wall is hit, how fast the
machine is has decided: then nobody knows.

| process | answers | with |
|---|---|---|
| the parent | nothing; it only prepares | all that must be loaded |
| the worker, a copy of it | one call after another, fast | WORKER_S, uncounted |
| a fresh copy for one call | what took the worker longer | the budget, always from one start |

Nothing that the worker has time for goes beyond the budget, on the fastest machine there is: so
which of the two answers changes no verdict. A parser that learns as it goes has a budget of its
own, since what it costs depends on what it has seen: in a fresh copy always the same, and far more
than any usual answer takes, in a worker less.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

import msgspec

BUDGET = 2_000_000  # function calls; usual comparisons take hundreds to tens of thousands
MOST_WORKERS = 16
WORKER_S = 0.25  # of processor time, in which no machine makes so many calls
LEARNS = "antlr4"  # a parser, whose calls are counted by themselves
PARSER_BUDGET = 4_000_000  # of them; the largest usual answers take 500,000
CPU_S = 10  # of processor time, three times what the budget takes on a usual machine
WALL_S = 60.0  # for a call that hangs without computing, or a system without processor limits
MEMORY_BYTES = 4 << 30
# Each thread of a pool would reserve memory. Hashes and the library of big integers, which differ
# between machines, must not say which way a computation goes.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "SYMPY_GROUND_TYPES": "python",
    "MPMATH_NOGMPY": "1",
}


class Reply(msgspec.Struct, frozen=True):
    """What came of a call.

    `failed`: it raised, or went beyond the budget; it does so on every machine. `undecided`: it hit
    the wall.
    """

    outcome: Literal["value", "failed", "undecided"]
    value: Any = None


def call(function: str, *arguments: Any) -> Reply:
    """Call "module:function" there with JSON arguments, and what it returns within the limits.

    The function itself only prepares, and must not touch what a stranger wrote.
    """
    question = [function, *arguments]
    callers = _callers(os.getpid())
    caller = callers.take(question)
    try:
        return caller.call(question)
    except BaseException:
        caller.stop()  # its next line would be the answer to this question
        raise
    finally:
        callers.give_back(caller)


class _Callers:
    """The processes that calls wait for. There are more only while several threads call at once.

    One takes seconds to load what it needs, so it does that beside: who finds none idle waits for
    whichever is ready first, be it an old one or the new.
    """

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[_Caller] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._num_begun = 0

    def take(self, question: list[Any]) -> _Caller:
        """The one that was used last: of calls in turn, all have the same.

        `question`: what a new one prepares itself with.
        """
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        with self._lock:
            begins = self._num_begun < num_workers()
            self._num_begun += begins
        if begins:
            threading.Thread(target=self._begin, args=(question,), daemon=True).start()
        return self._idle.get()

    def _begin(self, question: list[Any]) -> None:
        caller = _Caller()
        # what fails here fails for who asks, too, and is said there
        with contextlib.suppress(Exception):
            caller.call(question)
        self._idle.put(caller)

    def give_back(self, caller: _Caller) -> None:
        self._idle.put(caller)

    def stop(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().stop()


def num_workers() -> int:
    """How many calls are answered at once: one core is left to whoever asks."""
    return min(MOST_WORKERS, max(1, (os.cpu_count() or 1) - 1))


@functools.cache
def _callers(owner: int) -> _Callers:
    """Of one process: a fork must not talk through its parent's pipes."""
    callers = _Callers()
    atexit.register(callers.stop)
    return callers


class _Caller:
    """The asking side, for one thread at a time.

    The process starts with the first call, and again after one that brought it down.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def call(self, question: list[Any]) -> Reply:
        if not hasattr(os, "fork"):
            raise ValueError(
                "formulas and puzzles are scored in copies of a process, which this system cannot "
                'make; use Linux, macOS or WSL, or equal = "exact"'
            )
        reply = self._ask(self._process or self._start(), json.dumps(question))
        return msgspec.json.decode(reply, type=Reply) if reply else Reply("undecided")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill_all(process.pid)
            with contextlib.suppress(BrokenPipeError):
                process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # Ctrl-C is for the asking side
        )
        assert process.stdout
        self._process = process
        if process.stdout.readline().strip() != "ready":
            self.stop()
            raise ValueError(
                f"scoring needs a process that did not start: {sys.executable} -m {__name__}; run "
                "that to see why"
            )
        return process

    def _ask(self, process: subprocess.Popen[str], question: str) -> str:
        assert process.stdin
        assert process.stdout
        alarm = threading.Timer(WALL_S, functools.partial(_kill_all, process.pid))
        alarm.start()
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
            reply = process.stdout.readline().strip()
        except BrokenPipeError:
            reply = ""
        finally:
            alarm.cancel()
        if not reply:
            self.stop()
        return reply


def _kill_all(leader: int) -> None:
    """The process that answers, and its copy that is at work."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


# The answering side


class _Meter:
    """Counts function calls, and ends this process with a reply at the budget.

    An exception would not do: what works on a stranger's text may catch it and go on.
    """

    def __init__(self, reply_to: int) -> None:
        # by whether it is the parser that calls
        self._left, self._reply_to = {False: BUDGET, True: PARSER_BUDGET}, reply_to

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            parses = LEARNS in frame.f_code.co_filename
            self._left[parses] -= 1
            if self._left[parses] < 0:
                _reply(self._reply_to, Reply("failed"))
                os._exit(0)


def _prepared(question: str) -> Callable[[], Any] | None:
    name, *arguments = json.loads(question)
    module, _, function = name.partition(":")
    try:
        work: Callable[[], Any] = getattr(importlib.import_module(module), function)(*arguments)
    except Exception:  # noqa: BLE001 - then there is nothing to do, on every machine
        return None
    return work


def _done(work: Callable[[], Any] | None) -> Reply:
    try:
        return Reply("value", work()) if work else Reply("failed")
    except MemoryError:
        return Reply("undecided")
    except Exception:  # noqa: BLE001 - what works on a stranger's text raises what it likes
        return Reply("failed")


def _reply(reply_to: int, reply: Reply) -> None:
    os.write(reply_to, msgspec.json.encode(reply) + b"\n")


def _set_limit(name: str, value: int) -> None:
    # where the system has no such limits, the clock remains
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        kind = getattr(resource, name)
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


class _Parent:
    """Has each question answered by its worker, or by a fresh copy of itself."""

    def __init__(self, reply_to: int) -> None:
        self._reply_to = reply_to
        self._known: set[str] = set()  # functions that have prepared all they need
        self._worker: _Worker | None = None

    def answer(self, question: str) -> None:
        name = json.loads(question)[0]
        if name not in self._known:
            _prepared(question)
            self._known.add(name)
            self._dismiss()
        self._worker = self._worker or _Worker(self._reply_to)
        if not self._worker.has_answered(question):
            self._dismiss()
            self._answer_in_copy(question)

    def _dismiss(self) -> None:
        if self._worker:
            self._worker.end()
        self._worker = None

    def _answer_in_copy(self, question: str) -> None:
        work = _prepared(question)
        copy = os.fork()
        if copy == 0:
            _set_limit("RLIMIT_CPU", CPU_S)  # a copy begins with none used
            sys.setprofile(_Meter(self._reply_to))
            reply = _done(work)
            sys.setprofile(None)
            _reply(self._reply_to, reply)
            os._exit(0)
        if os.waitpid(copy, 0)[1] != 0:
            _reply(self._reply_to, Reply("undecided"))


class _Worker:
    """A copy of the parent that answers until something is too much for it."""

    def __init__(self, reply_to: int) -> None:
        asked, self._ask = os.pipe()
        self._told, tell = os.pipe()
        self._copy = os.fork()
        if self._copy == 0:
            os.close(self._ask)
            os.close(self._told)
            for question in os.fdopen(asked):
                work = _prepared(question)
                signal.setitimer(signal.ITIMER_VIRTUAL, WORKER_S)  # whose signal ends a process
                reply = _done(work)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                if reply.outcome == "undecided":
                    os._exit(1)
                _reply(reply_to, reply)
                os.write(tell, b".")
            os._exit(0)
        os.close(asked)
        os.close(tell)

    def has_answered(self, question: str) -> bool:
        """False if it has ended instead."""
        os.write(self._ask, question.encode())
        return os.read(self._told, 1) == b"."

    def end(self) -> None:
        os.close(self._ask)
        os.close(self._told)
        os.waitpid(self._copy, 0)


def answer_calls() -> None:
    """One JSON [function, argument, ...] per line in, one JSON reply per line out, until the input
    ends.
    """
    reply_to = os.dup(sys.stdout.fileno())
    sys.stdout = sys.stderr  # parsers print what they dislike
    logging.disable()
    _set_limit("RLIMIT_CORE", 0)
    _set_limit("RLIMIT_AS", MEMORY_BYTES)
    os.write(reply_to, b"ready\n")
    parent = _Parent(reply_to)
    for question in sys.stdin:
        parent.answer(question)


if __name__ == "__main__":
    answer_calls()
