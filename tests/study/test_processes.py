from __future__ import annotations

import logging
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from motley.study.processes import Job, Lost, LostRunsError, Returned, in_processes, make_all


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
    assert why["gone"] == "its process ended by itself with exit status 7"
    assert len(why) == len(lost) == 4
    assert "killed: its process was killed by SIGKILL" in caplog.text  # when it happens


def test_what_needs_a_lost_job_is_not_begun() -> None:
    work = [
        Job("warm", kill_oneself),
        Job("run", partial(str, 1), ("warm",)),
        Job("other", partial(str, 2)),
    ]
    found = list(in_processes(1, work))
    assert found[0].name == "warm"
    assert Lost("run", "not begun, since it needs warm") in found
    assert Returned("other", "2") in found


def test_a_child_that_outlives_its_process_holds_nobody_up() -> None:
    (found,) = in_processes(1, [Job("gone", die_with_a_child_that_holds_the_pipe)])
    assert found == Lost("gone", "its process ended by itself with exit status 3")


def test_a_job_that_needs_what_is_not_there_is_a_mistake_and_no_endless_loop() -> None:
    with pytest.raises(AssertionError, match="run"):
        list(in_processes(1, [Job("run", partial(str, 1), ("warm",))]))


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
