"""Scorer: a task's rewards for everyone in a process, each computed once and beside other work.

Owns threads and what is remembered; knows no peer and no record. Where a task's scoring waits for
others (a process that compares formulas, a judge on the network), many completions are scored at
once. What is quick is scored in place.

| `Task.scoring` | calls | of |
|---|---|---|
| "in turn" | one, when rewards are asked for, in the thread that asks | all completions |
| "beside" | one, in a thread | all completions |
| "groups" | one for each problem, in threads | its completions |
| "each" | one for each completion, in threads if they take long | it alone |
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from motley.clock import Clock, RealClock
from motley.records import Problem
from motley.tasks.sandbox import num_workers
from motley.tasks.task import UNDECIDED, Task

IN_PLACE_S = 0.01  # completions that take longer in all are handed to threads
NUM_THREADS = 16  # that wait for a user's functions
MOST_GROUPS = 1 << 14  # that are remembered


Promise = Callable[[], list[list[float]]]  # waits for the rewards of groups, or raises


class Scorer:
    def __init__(self, task: Task, clock: Clock = RealClock()) -> None:
        self.task = task
        self._clock = clock
        self._lock = threading.Lock()  # a user's function is called by one thread at a time
        self._known: OrderedDict[bytes, list[float]] = OrderedDict()
        self._each_s = 0.0  # what a completion took last

    def score(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[float]:
        """As `Task.score`; the same rewards in whatever order they are found."""
        began_s = self._clock.elapsed_s()
        match self.task.scoring:
            case "in turn" | "beside":
                with self._lock:
                    rewards = self.task.score(problems, texts)
            case "groups":
                rewards = self._score_groups(problems, texts)
            case "each":
                rewards = self._score_each(problems, texts)
        self._each_s = (self._clock.elapsed_s() - began_s) / max(1, len(texts))
        return rewards

    def begin(self, problems: Sequence[Problem], texts_PG: Sequence[Sequence[str]]) -> Promise:
        """Score groups beside whatever comes next, or in place if it is quick."""
        asked = [p for p, texts in zip(problems, texts_PG, strict=True) for _ in texts]
        flat = [text for texts in texts_PG for text in texts]

        def work() -> list[list[float]]:
            rewards = iter(self.score(asked, flat))
            made = [[next(rewards) for _ in texts] for texts in texts_PG]
            for problem, texts, known in zip(problems, texts_PG, made, strict=True):
                self._remember(_key(problem, texts), known)
            return made

        if self.task.scoring == "in turn":
            return work
        if self._each_s * len(flat) < IN_PLACE_S:
            return _done(work).result
        return self._beside.submit(work).result

    def group(self, problem: Problem, texts: Sequence[str]) -> list[float]:
        """Rewards of a group, as found before in this process, or found now."""
        key = _key(problem, texts)
        known = self._known.get(key)
        if known is None:
            known = self._score_until_undecided(problem, texts)
            self._remember(key, known)
        return known

    def _score_until_undecided(self, problem: Problem, texts: Sequence[str]) -> list[float]:
        """Rewards of a stranger's group. Where each is found alone, those behind one that takes too
        long are not looked for: nobody wants the others then.
        """
        if self.task.scoring != "each":
            return self.score([problem] * len(texts), texts)
        rewards: list[float] = []
        while len(rewards) < len(texts) and not any(map(math.isnan, rewards)):
            some = texts[len(rewards) : len(rewards) + num_workers()]
            rewards += self.score([problem] * len(some), some)
        return rewards + [UNDECIDED] * (len(texts) - len(rewards))

    def _remember(self, key: bytes, rewards: list[float]) -> None:
        self._known[key] = rewards
        while len(self._known) > MOST_GROUPS:
            self._known.popitem(last=False)

    def _score_groups(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[float]:
        runs = _runs(problems)
        work = lambda run: self.task.score(problems[run[0] : run[1]], texts[run[0] : run[1]])
        parts = [work(run) for run in runs] if len(runs) < 2 else self._threads.map(work, runs)
        return [reward for part in parts for reward in part]

    def _score_each(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[float]:
        one = lambda i: self.task.score([problems[i]], [texts[i]])[0]
        rewards: list[float] = []
        until_s = self._clock.elapsed_s() + IN_PLACE_S
        while len(rewards) < len(texts) and self._clock.elapsed_s() < until_s:
            rewards.append(one(len(rewards)))
        rest = range(len(rewards), len(texts))
        several = len(rest) > 1 and num_workers() > 1
        return rewards + list(self._threads.map(one, rest) if several else map(one, rest))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        count = num_workers() if self.task.scoring == "each" else NUM_THREADS
        return ThreadPoolExecutor(count, thread_name_prefix="scoring")

    @cached_property
    def _beside(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="rewards")


def _done(work: Callable[[], list[list[float]]]) -> Future[list[list[float]]]:
    future: Future[list[list[float]]] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - as a thread would keep it
        future.set_exception(error)
    return future


def _runs(problems: Sequence[Problem]) -> list[tuple[int, int]]:
    """Where completions of the same problem begin and end: [a, a, b] -> [(0, 2), (2, 3)]."""
    starts = [i for i, p in enumerate(problems) if i == 0 or p is not problems[i - 1]]
    return list(zip(starts, [*starts[1:], len(problems)], strict=True)) if starts else []


def _key(problem: Problem, texts: Sequence[str]) -> bytes:
    digest = hashlib.sha256(problem.id.encode())
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.digest()
