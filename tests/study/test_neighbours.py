from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path

import pytest

from motley.study.neighbours import Neighbours, Plans, neighbours_on
from motley.study.shared_gpu import Peaks, SharedGpu

GIB = 1 << 30


class Gpu:
    """A GPU on which so much is free."""

    def __init__(self, free: int) -> None:
        self.free = free

    def __call__(self) -> int:
        return self.free * GIB


def study_of(folder: Path, name: str, gpu: Gpu) -> SharedGpu:
    peaks = Peaks(folder / f"{name}.jsonl", "H200")
    peaks.saw("crew", 20 * GIB)
    return SharedGpu(gpu, peaks, lambda: lambda: 0, Neighbours(folder / "gpu", name))


def test_a_study_counts_what_jobs_of_another_will_still_take(tmp_path: Path) -> None:
    gpu = Gpu(70)
    one, other = study_of(tmp_path, "one", gpu), study_of(tmp_path, "other", gpu)
    one.began("a", "crew")
    assert other.fits("crew")
    other.began("b", "crew")  # 40 of 70 are taken, though nobody holds them yet
    assert one.fits("crew")
    one.began("c", "crew")
    assert not one.fits("crew")
    assert not other.fits("crew")
    gpu.free = 40  # they hold half of it
    assert not other.fits("crew")
    one.ended("a", 20 * GIB)
    assert other.fits("crew")


def test_a_study_waits_beside_one_that_nobody_knows_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu(140)
    one, other = study_of(tmp_path, "one", gpu), study_of(tmp_path, "other", gpu)
    one.began("a", "unknown")
    with caplog.at_level(logging.WARNING):
        assert not other.fits("crew")
        assert not other.fits("crew")
    assert caplog.text.count("another study uses this GPU") == 1
    one.lost("a")
    assert other.fits("crew")


def end_at_once(folder: Path) -> None:
    Neighbours(folder, "ended").say(Plans(free_at_first=1, needed=(5.0,)))
    os._exit(1)


def test_a_study_that_died_takes_nothing(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=end_at_once, args=(tmp_path,))
    process.start()
    process.join()
    assert (tmp_path / "ended.json").exists()
    assert Neighbours(tmp_path, "one").plans() == []
    assert not (tmp_path / "ended.json").exists()


def test_studies_of_one_machine_find_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = neighbours_on("GPU-1")
    mine.say(Plans(free_at_first=1, needed=(None,)))
    assert mine.plans() == []
    (folder,) = tmp_path.glob("*/GPU-1")
    assert Neighbours(folder, "other").plans() == [Plans(free_at_first=1, needed=(None,))]
    assert Neighbours(folder.with_name("GPU-2"), "other").plans() == []


def test_a_file_that_is_no_plan_counts_for_nothing(tmp_path: Path) -> None:
    one = Neighbours(tmp_path, "one")
    (tmp_path / "one.json").write_text("{")
    assert Neighbours(tmp_path, "other").plans() == []
    one.say(Plans(free_at_first=1, needed=()))
    assert Neighbours(tmp_path, "third").plans() == []
