"""A run folder is one process's at a time: a second that begins or resumes it changes nothing."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from fakes import spread_crew
from motley.files import WINDOWS
from motley.runs.folder import LOCK, held_alone
from motley.runs.local import LocalCrew
from motley.runs.metrics import read_metrics
from motley.sim.simulation import SimCrew

WORDS = "another process trains a crew in .*run; wait until it ends, or stop it first"


def _train(run: Path, simulated: bool, pipe: Connection) -> None:
    """Stop in the middle, until the pipe is closed."""
    sys.path.insert(0, str(run.parent))  # the reward module
    torch.set_num_threads(1)
    config = spread_crew(run.parent, ("full",), rounds=3)
    rounds = SimCrew(config, run).rounds() if simulated else LocalCrew.start(config, run).rounds()
    next(rounds)
    pipe.send("trains")
    pipe.recv()


@pytest.fixture(params=[False, True], ids=["train", "sim"])
def held(request: pytest.FixtureRequest, folder: Path) -> Iterator[Path]:
    """The folder of a run that another process is in the middle of."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    other = context.Process(target=_train, args=(folder / "run", request.param, theirs))
    other.start()
    theirs.close()
    assert pipe.recv() == "trains"
    yield folder / "run"
    other.kill()
    other.join()


def _contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != LOCK}


def test_a_run_that_another_process_trains_is_neither_resumed_nor_begun_anew(
    held: Path, folder: Path
) -> None:
    config, before = spread_crew(folder, ("full",), rounds=3), _contents(held)
    if (held / "checkpoints" / "round-000000").exists():
        with pytest.raises(ValueError, match=WORDS):
            LocalCrew.resume(held)
        assert _contents(held) == before
        # as before its first checkpoint, when a folder that nobody holds is begun anew
        shutil.rmtree(held / "checkpoints" / "round-000000")
    left = _contents(held)
    for begin in (LocalCrew.start, SimCrew):
        with pytest.raises(ValueError, match=WORDS):
            begin(config, held)
    assert _contents(held) == left


def test_a_run_that_is_stopped_is_anybodys_again(folder: Path) -> None:
    crew = LocalCrew.start(spread_crew(folder, ("full",), rounds=3), folder / "run")
    for _ in crew.rounds():
        crew.save()
        break
    _in_another_process(_go_on, folder / "run")
    assert [line.round for line in read_metrics(folder / "run")] == [0, 1, 2, 3]


def test_a_run_that_another_process_went_on_with_is_not_gone_on_with_from_before(
    folder: Path,
) -> None:
    crew = LocalCrew.start(spread_crew(folder, ("full",), rounds=3), folder / "run")
    for _ in crew.rounds():
        crew.save()
        break
    _in_another_process(_go_on, folder / "run")
    left = _contents(folder / "run")
    for go_on in (lambda: next(crew.rounds()), crew.save):
        with pytest.raises(ValueError, match=r"another crew or process has gone on with .*run"):
            go_on()
    assert _contents(folder / "run") == left


@pytest.mark.skipif(WINDOWS, reason="its programs do not fork")
def test_the_lock_is_kept_when_its_file_is_read_and_when_a_process_is_forked(folder: Path) -> None:
    lock = folder / "run" / LOCK
    lock.parent.mkdir()
    with held_alone(lock.parent):
        assert not _is_free(lock)
        with held_alone(lock.parent):
            shutil.copytree(lock.parent, folder / "copy")
        assert not _is_free(lock), "read, and held twice"
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        assert not _is_free(lock)
    assert _is_free(lock), "although the child lives"
    child.kill()
    child.join()


def _is_free(lock: Path) -> bool:
    """Whether another process could hold it."""
    code = f"import sys; from motley.files import hold; sys.exit(hold({str(lock)!r}) is None)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _in_another_process(work: Callable[[Path], None], run: Path) -> None:
    other = multiprocessing.get_context("spawn").Process(target=work, args=(run,))
    other.start()
    other.join()


def _go_on(run: Path) -> None:
    sys.path.insert(0, str(run.parent))
    torch.set_num_threads(1)
    for _ in LocalCrew.resume(run).rounds():
        pass


@pytest.mark.skipif(WINDOWS, reason="its locks are a part of its files")
def test_a_disk_that_knows_no_locks_may_be_trained_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", unknown)
    crew = LocalCrew.start(spread_crew(folder, ("full",), rounds=1), folder / "run")
    assert len(list(crew.rounds())) == 1
