from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from motley.files import DiskError, cache_folder, held, hold, new_run_folder, replace, whole


def test_the_cache_is_where_the_environment_says_and_else_under_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in (
        lambda: monkeypatch.setenv("MOTLEY_CACHE", ""),
        lambda: monkeypatch.delenv("MOTLEY_CACHE"),
    ):
        unset()
        assert cache_folder() == tmp_path / ".cache" / "motley"


def test_a_folder_gets_its_name_when_all_of_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder"
    with whole(path) as partial:
        partial.mkdir()
        (partial / "one").write_text("1")
        assert not path.exists()
    assert (path / "one").read_text() == "1"
    assert [p.name for p in path.parent.iterdir()] == ["folder"]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with whole(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_fails_half_way_leaves_nothing_new(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with whole(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    with whole(tmp_path / "folder") as partial:
        partial.mkdir()
    plain = tmp_path / "plain"
    plain.mkdir()
    assert (tmp_path / "folder").stat().st_mode == plain.stat().st_mode


def test_two_who_replace_the_same_file_at_once_both_succeed_and_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, contents = tmp_path / "file", [b"second"]
    fsync = os.fsync

    def meanwhile(descriptor: int) -> None:
        if contents:  # between the first's writing and its publishing
            replace(path, contents.pop())
            assert path.read_bytes() == b"second"
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    replace(path, b"first", mode=0o600)
    assert path.read_bytes() == b"first"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_file_that_cannot_be_replaced_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise error("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError if error is OSError else error):
        replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_whoever_starts_at_the_same_moment_has_a_run_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    together = threading.Barrier(8)

    def start(number: int) -> Path:
        together.wait()
        with new_run_folder("crew") as folder:
            together.wait()  # all have chosen, and nobody has written
            (folder / "config.toml").write_text("")
        return folder

    with ThreadPoolExecutor(8) as threads:
        folders = set(threads.map(start, range(8)))
    assert folders == {Path("runs") / f"crew-{number:03d}" for number in range(1, 9)}
    assert all((folder / "config.toml").exists() for folder in folders)


def test_a_start_that_fails_leaves_no_empty_run_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no such model"), new_run_folder("crew") as folder:
        raise ValueError("no such model")
    assert not folder.exists()


def test_runs_that_lead_nowhere_are_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to(tmp_path / "not mounted")
    with pytest.raises(ValueError, match=r"runs is no folder.*--out"), new_run_folder("crew"):
        pass


def test_a_file_that_another_holds_is_waited_for_and_that_is_told_once(tmp_path: Path) -> None:
    first, told = hold(tmp_path / "lock"), []
    assert first is not None
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            os.close(first)

    with held(tmp_path / "lock", sleep, lambda: told.append(1)):
        assert len(slept) == 3
        assert hold(tmp_path / "lock") is None
    with held(tmp_path / "lock", sleep, lambda: told.append(2)):
        pass
    assert told == [1]
    assert len(slept) == 3
