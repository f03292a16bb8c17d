"""Rewards are found once in a process, at once where that is faster, and the same every time."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hubs import PATIENCE_S
from motley.clock import VirtualClock
from motley.records import Problem
from motley.tasks import RewardError, Scorer, own_task, sandbox, scoring, unsteady
from motley.tasks.task import Scoring

PROBLEMS = [Problem(prompt=f"p{n}", answer=str(n)) for n in range(3)]
TEXTS = [["a", "bb"], ["", "ccc"], ["a", "a"]]


class Lengths:
    """A task that rewards length, slowly."""

    def __init__(self, scoring: Scoring, takes_s: float, clock: VirtualClock) -> None:
        self.scoring, self.takes_s, self.clock = scoring, takes_s, clock
        self.lock = threading.Lock()
        self.asked: list[list[str]] = []
        self.threads: list[threading.Thread] = []

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        self.asked.append(list(completions))
        self.threads.append(threading.current_thread())
        with self.lock:
            self.clock.sleep_s(self.takes_s * len(completions))
        if "boom" in completions:
            raise KeyError("boom")
        return [math.nan if text == "?" else float(len(text)) for text in completions]


def scorer(way: Scoring, takes_s: float = 0.0) -> tuple[Any, Lengths]:
    clock = VirtualClock()
    task: Any = Lengths(way, takes_s, clock)
    return Scorer(task, clock), task


@pytest.mark.parametrize("way", ["in turn", "beside", "groups", "each"])
@pytest.mark.parametrize("takes_s", [0.0, 0.004])
def test_rewards_are_in_the_order_asked_for_however_they_are_found(
    way: Scoring, takes_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    one, _ = scorer(way, takes_s)
    for _ in range(3):  # from the second time on it is known how long it takes
        assert one.begin(PROBLEMS, TEXTS)() == [[1.0, 2.0], [0.0, 3.0], [1.0, 1.0]]


def test_a_group_is_scored_once_and_an_answer_with_other_neighbours_again() -> None:
    one, task = scorer("in turn")
    one.begin(PROBLEMS, TEXTS)()
    for problem, texts in zip(PROBLEMS, TEXTS, strict=True):
        assert one.group(problem, texts) == [float(len(text)) for text in texts]
    assert len(task.asked) == 1
    one.group(PROBLEMS[1], TEXTS[0])
    one.group(PROBLEMS[1], TEXTS[0])
    assert task.asked[1:] == [TEXTS[0]]


def test_what_could_not_be_found_out_stays_so() -> None:
    one, _ = scorer("in turn")
    one.begin(PROBLEMS[:1], [["?"]])()
    assert math.isnan(one.group(PROBLEMS[0], ["?"])[0])


def test_a_strangers_group_is_scored_no_further_than_the_first_answer_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    one, task = scorer("each")
    found = one.group(PROBLEMS[0], ["a", "b", "c", "?", "e", "f"])
    assert found[:3] == [1.0, 1.0, 1.0]
    assert all(map(math.isnan, found[3:]))
    assert sorted(text for asked in task.asked for text in asked) == ["?", "a", "b", "c"]


def test_only_so_many_groups_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MOST_GROUPS", 2)
    one, task = scorer("in turn")
    for texts in (["a"], ["b"], ["c"], ["c"], ["a"]):
        one.group(PROBLEMS[0], texts)
    assert task.asked == [["a"], ["b"], ["c"], ["a"]]


def test_a_function_is_called_where_rewards_are_asked_for_unless_it_says_otherwise() -> None:
    one, task = scorer("in turn", 0.02)
    with ThreadPoolExecutor(1) as beside:
        for _ in range(2):
            beside.submit(one.begin, PROBLEMS, TEXTS).result()()
    assert task.threads == [threading.main_thread()] * 2


def test_what_takes_long_is_found_beside_and_what_does_not_in_place() -> None:
    slow, task = scorer("beside", 0.005)
    quick, quick_task = scorer("beside")
    for _ in range(2):
        for each in (slow, quick):
            each.begin(PROBLEMS, TEXTS)()
    assert task.threads[1] is not threading.main_thread()
    assert quick_task.threads == [threading.main_thread()] * 2


@pytest.mark.parametrize("way", ["in turn", "beside", "groups", "each"])
def test_an_exception_is_kept_for_who_asks(way: Scoring) -> None:
    one, _ = scorer(way, 0.02)
    one.begin(PROBLEMS, TEXTS)()
    promise = one.begin(PROBLEMS, [["a"], ["boom"], ["c"]])
    with pytest.raises(KeyError, match="boom"):
        promise()


def test_completions_of_one_function_that_stands_threads_are_scored_at_once() -> None:
    meeting = threading.Barrier(3, timeout=PATIENCE_S)

    def met(completions: list[str]) -> list[float]:
        meeting.wait()
        return [1.0] * len(completions)

    rows = [{"prompt": f"p{n}", "answer": "x"} for n in range(30)]
    one = Scorer(own_task(rows, rewards=met, parallel=True))
    assert one.begin(PROBLEMS, TEXTS)() == [[1.0, 1.0]] * 3


def test_async_functions_go_on_while_others_work_and_an_alarm_has_its_thread() -> None:
    rows = [{"prompt": f"p{n}", "answer": "x"} for n in range(30)]

    clock, asked = VirtualClock(), threading.Event()

    async def judge(completions: list[str]) -> list[float]:
        assert await asyncio.to_thread(asked.wait, PATIENCE_S)
        clock.sleep_s(1.0)
        return [1.0] * len(completions)

    def alarm(completions: list[str]) -> list[float]:
        assert threading.current_thread() is threading.main_thread()
        return [0.0] * len(completions)

    assert own_task(rows, rewards=judge).scoring == "beside"
    assert own_task(rows, rewards=[judge, alarm]).scoring == "in turn"
    assert own_task(rows, rewards=alarm).scoring == "in turn"
    one = Scorer(own_task(rows, rewards=judge), clock)
    asked.set()
    one.begin(PROBLEMS, TEXTS)()  # now it is known how long it takes
    asked.clear()
    promise = one.begin(PROBLEMS, TEXTS)  # comes back before the function does
    asked.set()
    assert promise() == [[1.0, 1.0]] * 3


def test_a_function_that_raises_the_third_time_stops_the_third_time() -> None:
    calls = []

    def fragile(completions: list[str]) -> list[float]:
        calls.append(completions)
        if len(calls) == 3:
            raise OSError("disk")
        return [0.0] * len(completions)

    one = Scorer(own_task([{"prompt": p} for p in "abcd"], rewards=fragile))
    for _ in range(2):
        one.begin(PROBLEMS, TEXTS)()
    with pytest.raises(RewardError, match="fragile failed: OSError: disk"):
        one.begin(PROBLEMS, TEXTS)()


class FakeCaller(sandbox._Caller):
    """One that is ready when it is let."""

    ready: threading.Event

    def call(self, question: list[Any]) -> sandbox.Reply:
        self.ready.wait(60)
        return sandbox.Reply("value")


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> sandbox._Callers:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(sandbox, "_Caller", FakeCaller)
    monkeypatch.setattr(FakeCaller, "ready", threading.Event(), raising=False)
    return sandbox._Callers()


def test_processes_are_as_many_as_calls_at_once_and_one_for_calls_in_turn(
    callers: sandbox._Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCaller.ready.set()
    first = callers.take(["f"])
    callers.give_back(first)
    assert callers.take(["f"]) is first
    others = [callers.take(["f"]), callers.take(["f"])]
    assert len({id(first), *map(id, others)}) == 3
    assert sandbox.num_workers() == 3
    monkeypatch.setattr(os, "cpu_count", lambda: 400)
    assert sandbox.num_workers() == sandbox.MOST_WORKERS


def test_nobody_waits_for_a_process_to_begin_while_another_is_free(
    callers: sandbox._Callers,
) -> None:
    FakeCaller.ready.set()
    first = callers.take(["f"])
    FakeCaller.ready.clear()  # a second takes for ever
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(callers.take, ["f"])
        callers.give_back(first)
        assert second.result(60) is first
    FakeCaller.ready.set()


def test_a_call_that_is_interrupted_leaves_no_answer_behind_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verify = "motley.tasks.answers:verify"
    assert sandbox.call(verify, "1", "1").value is True

    def interrupted(caller: sandbox._Caller, process: Any, question: str) -> str:
        process.stdin.write(question + "\n")
        process.stdin.flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sandbox._Caller, "_ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sandbox.call(verify, "1", "1")
    assert sandbox.call(verify, "1", "2").value is False


def test_a_reward_that_differs_when_it_is_computed_again_is_named_with_both_values() -> None:
    calls = []

    def moody(completions: list[str]) -> list[float]:
        calls.append(completions)
        return [float(len(calls))] * len(completions)

    rows = [{"prompt": f"p{n}", "answer": "x"} for n in range(30)]
    (fault,) = unsteady(own_task(rows, rewards=moody))
    assert "computed again: 1.0, then 2.0, for 'x'" in fault
    assert "set crew.check_rewards = false" in fault
    assert unsteady(own_task(rows)) == []
