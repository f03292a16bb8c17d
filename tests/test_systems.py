"""Windows and macOS, as far as another system can tell: modules and signals that they lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from motley import files

# What Windows does not have is not there for Motley. Other packages were made for this system.
HEAVY = """
import torch, peft, nats, matplotlib.figure, scipy.stats, transformers.models.llama, tokenizers
"""
HIDE = """
import os, signal, sys
import asyncio, concurrent.futures.process, multiprocessing.forkserver, cryptography.x509
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "setitimer"):
    if hasattr(signal, name):
        delattr(signal, name)
for name in ("fork", "killpg", "setsid"):
    delattr(os, name)
import multiprocessing
multiprocessing.get_all_start_methods = lambda: ["spawn"]
"""

IMPORT = """
import importlib, pkgutil, motley
for module in pkgutil.walk_packages(motley.__path__, "motley."):
    if module.name.rsplit(".", 1)[-1] not in ("kernels", "__main__"):  # Triton is for Linux
        importlib.import_module(module.name)
"""

TRAIN = """
from pathlib import Path
from motley.cli import app
here = Path(sys.argv[1])
for words in (
    f"train {here / 'crew.toml'} --rounds 1 --out {here / 'run'} -q",
    f"train --resume {here / 'run'} --rounds 2 -q",
    f"export {here / 'run'} {here / 'model'} --peer a",
):
    try:
        app(words.split())
    except SystemExit as end:
        assert not end.code, words
"""


def without(code: str, first: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", first + HIDE + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_module_imports_where_there_is_no_fcntl_and_no_fork() -> None:
    done = without(IMPORT, HEAVY)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_crew_trains_resumes_and_is_exported_there(tmp_path: Path) -> None:
    from cli.test_cli import CREW

    (tmp_path / "crew.toml").write_text(CREW)
    done = without(TRAIN, HEAVY, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_what_cannot_work_there_says_so(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from motley.exchange.nats.server import Server
from motley.tasks import sandbox
for ask in (
    lambda: Server("crew", Path(sys.argv[1]), "127.0.0.1", 4222).start(),
    lambda: sandbox.call("motley.tasks.answers:verify", "1", "1"),
):
    try:
        ask()
    except ValueError as error:
        print(error)
"""
    hub, scoring = without(code, "", tmp_path).stdout.splitlines()
    assert "need Linux or macOS; on Windows run motley hub in WSL" in hub
    assert 'use Linux, macOS or WSL, or equal = "exact"' in scoring


@pytest.fixture
def windows_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """msvcrt's way to lock, by lockf."""
    msvcrt = ModuleType("msvcrt")

    def locking(descriptor: int, mode: int, num_bytes: int) -> None:
        os.lockf(descriptor, os.F_TLOCK, num_bytes)

    msvcrt.LK_NBLCK = 2  # type: ignore[attr-defined]
    msvcrt.locking = locking  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", msvcrt)


@pytest.mark.usefixtures("windows_locks")
def test_a_folder_is_held_by_one_process_at_a_time_on_windows(tmp_path: Path) -> None:
    held = files.hold(tmp_path / "lock")
    assert held is not None
    code = f"import os; d = os.open({str(tmp_path / 'lock')!r}, os.O_RDWR); os.lockf(d, 2, 1)"
    other = [sys.executable, "-c", code]
    assert subprocess.run(other, capture_output=True, check=False).returncode != 0
    os.close(held)
    assert subprocess.run(other, capture_output=True, check=False).returncode == 0


@pytest.mark.usefixtures("windows_locks")
def test_a_lock_that_another_has_is_not_given_on_windows(tmp_path: Path) -> None:
    code = (
        f"import os, sys; d = os.open({str(tmp_path / 'lock')!r}, os.O_RDWR | os.O_CREAT); "
        "os.lockf(d, 2, 1); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        assert files.hold(tmp_path / "lock") is None


def test_a_system_without_any_locks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", None)
    with pytest.raises(ValueError, match="this system has no file locks"):
        files.hold(tmp_path / "lock")


def test_folders_are_not_synced_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WINDOWS", True)
    files.replace(tmp_path / "file", b"old")
    files.replace(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
