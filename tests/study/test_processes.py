from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from motley.study import processes
from motley.study.processes import (
    Job,
    Lost,
    LostRunsError,
    Returned,
    Tell,
    in_processes,
    make_all,
)
from motley.study.shared_gpu import Peaks, SharedGpu


def note(path: Path, text: str) -> str:
    with path.open("a") as file:
        file.write(f"{text}\n")
    return text


def kill_oneself() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "never said"


def refuse(error: type[Exception]) -> str:
    raise error("lr is far too large")


def die_with_a_child_that_holds_the_pipe() -> None:
    if os.fork():
        os._exit(3)
    signal.alarm(10)
    signal.pause()


@pytest.mark.slow
def test_a_process_that_dies_costs_its_call_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "notes"
    then = [
        Job("one", partial(note, path, "one"), ("first",)),
        Job("killed", kill_oneself, ("first",)),
        Job("wrong", partial(refuse, ValueError)),
        Job("broken", partial(refuse, KeyError)),
        Job("gone", partial(os._exit, 7)),
        Job("two", partial(note, path, "two"), ("first",)),
    ]
    kept: list[str] = []
    with caplog.at_level(logging.WARNING):
        lost = make_all(2, [Job("first", partial(note, path, "first"))], then, kept.append)
    assert sorted(kept) == ["one", "two"]
    assert path.read_text().splitlines()[0] == "first"
    why = {one.name: one.why for one in lost}
    assert why["killed"].startswith("its process was killed by SIGKILL; too little memory")
    assert "fewer --jobs" in why["killed"]
    assert why["wrong"] == "lr is far too large"
    assert why["broken"].startswith("KeyError: ")
    assert why["gone"].startswith("its process ended by itself with exit status 7 (twice")
    assert len(why) == len(lost) == 4
    assert "killed: its process was killed by SIGKILL" in caplog.text  # when it happens


@pytest.mark.slow
def test_what_needs_a_lost_job_is_not_begun() -> None:
    work = [
        Job("warm", kill_oneself),
        Job("run", partial(str, 1), ("warm",)),
        Job("other", partial(str, 2)),
    ]
    found = list(in_processes(1, work))
    assert [one.name for one in found] == ["other", "warm", "run"]
    assert Lost("run", "not begun, since it needs warm") in found
    assert Returned("other", "2") in found


@pytest.mark.slow
def test_a_child_that_outlives_its_process_holds_nobody_up() -> None:
    (found,) = in_processes(1, [Job("gone", die_with_a_child_that_holds_the_pipe)])
    twice = "its process ended by itself with exit status 3 (twice, the second time alone)"
    assert found == Lost("gone", twice)


def test_a_job_that_needs_what_is_not_there_is_a_mistake_and_no_endless_loop() -> None:
    with pytest.raises(AssertionError, match="run"):
        list(in_processes(1, [Job("run", partial(str, 1), ("warm",))]))


@pytest.mark.slow
def test_what_is_needed_is_made_when_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    job = lambda name, *needs: Job(name, partial(note, path, name), needs)
    first = [job("warm a"), job("warm b"), job("warm c")]
    then = [job("run a", "warm a"), job("run ab", "warm a", "warm b")]
    assert make_all(1, first, then, lambda name: None) == []
    assert path.read_text().splitlines() == ["warm a", "run a", "warm b", "run ab"]


def test_lost_runs_are_named_with_what_to_do() -> None:
    error = LostRunsError([Lost("arm a", "killed"), Lost("arm b", "wrong")], 9)
    assert str(error) == (
        "2 of 9 runs gave nothing: arm a: killed; arm b: wrong; all others are kept, and the same "
        "command goes on with these"
    )


# What is shared, and what happens to those for whom it is too little


def die_first(path: Path, how: str) -> str:
    """End for want of memory, unless this is the second time."""
    if note(path, how) and len(path.read_text().splitlines()) > 1:
        return how
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "full":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    raise ValueError("out of memory with 1024 tokens in a micro-batch")


def watch_alone(path: Path, seconds: float) -> str:
    """Say how many are at work while this is."""
    note(path, "in")
    time.sleep(seconds)
    lines = path.read_text().splitlines()
    note(path, "out")
    return str(lines.count("in") - lines.count("out"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "full", "told"])
def test_who_had_too_little_memory_is_named_and_tried_again_alone(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = [
        Job("greedy", partial(die_first, tmp_path / "notes", how)),
        Job("after", partial(str, 1), ("greedy",)),
        Job("other", partial(str, 2)),
    ]
    with caplog.at_level(logging.WARNING):
        found = list(in_processes(2, work))
    # the others first, then the one that was lost, then who waited for it
    assert found == [Returned("other", "2"), Returned("greedy", how), Returned("after", "1")]
    assert "greedy: " in caplog.text
    assert "it is tried again alone, after the others" in caplog.text


def test_an_ordinary_mistake_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert list(in_processes(1, [Job("wrong", partial(refuse, ValueError))])) == [
            Lost("wrong", "lr is far too large")
        ]
    assert "again" not in caplog.text


@pytest.mark.slow
def test_the_kernel_s_own_word_tells_what_killed_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "memory.events"
    monkeypatch.setattr(processes, "MEMORY_EVENTS", events)
    events.write_text("oom 2\noom_kill 2\n")
    (found,) = in_processes(1, [Job("big", partial(kill_and_note, events))])
    assert isinstance(found, Lost)
    assert "the machine's memory was full: use fewer --jobs (twice" in found.why


def kill_and_note(events: Path) -> None:
    number = int(events.read_text().split()[-1])
    events.write_text(f"oom 2\noom_kill {number + 1}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def tell_and_end(tell: Tell) -> str:
    for share in (0.25, 0.5):
        tell(share)
    return "done"


@pytest.mark.slow
def test_a_job_tells_how_far_it_is() -> None:
    heard: list[tuple[str, float]] = []
    work = [Job("slow", tell_and_end, tells=True)]
    ends = list(in_processes(1, work, lambda name, share: heard.append((name, share))))
    assert (ends, heard) == ([Returned("slow", "done")], [("slow", 0.25), ("slow", 0.5)])


def hold(gib: int, tell: Tell) -> None:
    """As a run does that takes some of the GPU."""
    held.append(gib << 30)
    tell(0.0)
    tell(1.0)


held: list[int] = []  # in the process of a job


def measure_held() -> Callable[[], int]:
    held.clear()
    return lambda: max(held, default=0)


def hold_and_run_out(path: Path, tell: Tell) -> str:
    hold(5, tell)
    return die_first(path, "full")


@pytest.mark.slow
def test_no_more_run_than_fit_on_the_gpu(tmp_path: Path) -> None:
    """A GPU of which only one run fits: two are never at work together, whatever --jobs says."""
    peaks = Peaks(tmp_path / "memory.jsonl", "H200")
    peaks.saw("run", 6 << 30)
    gpu = SharedGpu(lambda: 10 << 30, peaks, measure_held)
    work = [Job(name, partial(watch_alone, tmp_path / "notes", 0.2), alike="run") for name in "abc"]
    found = list(in_processes(3, work, gpu=gpu))
    assert [one.value for one in found if isinstance(one, Returned)] == ["1", "1", "1"]


@pytest.mark.slow
def test_a_process_tells_what_its_job_held_and_not_what_the_job_before_did(tmp_path: Path) -> None:
    peaks = Peaks(tmp_path / "memory.jsonl", "H200")
    gpu = SharedGpu(lambda: 80 << 30, peaks, measure_held)
    work = [
        Job("large", partial(hold, 9), tells=True, alike="large"),
        Job("small", partial(hold, 2), tells=True, alike="small"),
        Job("wrong", partial(refuse, ValueError), alike="wrong"),
    ]
    list(in_processes(1, work, gpu=gpu))
    assert (peaks.of("large"), peaks.of("small"), peaks.of("wrong")) == (9 << 30, 2 << 30, None)


@pytest.mark.slow
def test_who_ran_out_tells_what_it_held_and_is_tried_when_there_is_more_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peaks = Peaks(tmp_path / "memory.jsonl", "H200")
    gpu = SharedGpu(lambda: 80 << 30, peaks, measure_held)
    work = [
        Job(
            "greedy",
            partial(hold_and_run_out, tmp_path / "notes"),
            tells=True,
            alike="greedy",
        ),
        Job("other", partial(str, 2), alike="other"),
    ]
    with caplog.at_level(logging.WARNING):
        found = list(in_processes(1, work, gpu=gpu))
    assert found == [Returned("greedy", "full"), Returned("other", "2")]  # not after all others
    assert peaks.of("greedy") == 5 << 30
    assert "80.0 GiB of the GPU were free, and nobody knows what such a run takes" in caplog.text
