"""Calls in a process of its own, which strangers' text may bring down but not hold up.

Knows no task; what it calls is named by others.

Signals could bound time too, but they reach only the main thread and never a long operation on big
integers. A process can be limited in processor time and memory from outside, whichever thread asks;
processor time, not the clock, so that a busy machine judges as an idle one does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import logging
import math
import os
import subprocess
import sys
import threading
from typing import Any

CPU_S = 2  # of processor time for what follows `limit`; usual comparisons take milliseconds
WALL_S = 60.0  # for a call that hangs without computing, or a system without processor limits
MEMORY_BYTES = 4 << 30
# each thread of a pool would reserve memory
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def call(function: str, *arguments: Any) -> Any:
    """Call "module:function" there with JSON arguments; None where it raised, or went beyond its
    limits.
    """
    return _caller(os.getpid()).call([function, *arguments])


def limit() -> None:
    """From here on the call may compute for CPU_S; the system ends the process after that.

    For functions that are called there.
    """
    used_s = math.ceil(sum(os.times()[:2]))
    _set_limit("RLIMIT_CPU", used_s + CPU_S)


@functools.cache
def _caller(owner: int) -> _Caller:
    """One per process: a fork must not talk through its parent's pipe."""
    caller = _Caller()
    atexit.register(caller.stop)
    return caller


class _Caller:
    """The asking side.

    The process starts with the first call, and again after one that brought it down.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def call(self, question: list[Any]) -> Any:
        with self._lock:
            reply = self._ask(self._process or self._start(), json.dumps(question))
        return json.loads(reply) if reply else None

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | ONE_THREAD,
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
        alarm = threading.Timer(WALL_S, process.kill)
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


def _set_limit(name: str, value: int | None) -> None:
    """Set a limit of this process, or lift it as far as the system allows."""
    # where the system has no such limits, the clock remains
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (hard if value is None else value, hard))


def answer_calls() -> None:
    """The answering side: one JSON [function, argument, ...] per line in, one JSON value per line
    out, until the input ends.
    """
    replies, sys.stdout = sys.stdout, sys.stderr  # parsers print what they dislike
    logging.disable()
    _set_limit("RLIMIT_CORE", 0)
    _set_limit("RLIMIT_AS", MEMORY_BYTES)
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        module, _, function = name.partition(":")
        try:
            value = getattr(importlib.import_module(module), function)(*arguments)
        except Exception:  # noqa: BLE001 - what works on a stranger's text raises what it likes
            value = None
        _set_limit("RLIMIT_CPU", None)
        print(json.dumps(value), file=replies, flush=True)


if __name__ == "__main__":
    answer_calls()
