from __future__ import annotations

import ctypes
import logging

import pytest

from motley.study import shared_gpu as module
from motley.study.shared_gpu import SETTLED_S, SharedGpu, shared_gpu

GIB = 1 << 30


class Gpu:
    """A GPU of which others, and the runs that go on, hold a part."""

    def __init__(self, free: float) -> None:
        self.free = free

    def __call__(self) -> int:
        return int(self.free * GIB)


class Clock:
    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def elapsed_s(self) -> float:
        return self.at_s

    def sleep_s(self, seconds: float) -> None:
        self.at_s += seconds


def test_the_second_run_waits_until_the_first_has_all_it_takes() -> None:
    gpu, clock = Gpu(80), Clock()
    shared = SharedGpu(gpu, clock)
    assert shared.fits_another(0)
    shared.began()
    for free in (78, 70, 60):  # it loads a model, and makes its first step
        gpu.free = free
        clock.at_s += 10
        shared.look(1)
        assert not shared.fits_another(1)
    clock.at_s += SETTLED_S
    assert shared.fits_another(1)  # 20 of 60


def test_as_many_begin_as_fit_by_what_the_first_took() -> None:
    gpu, clock = Gpu(80), Clock()
    shared = SharedGpu(gpu, clock)
    gpu.free = 60
    shared.look(1)
    shared.ended()  # what one takes is known: nobody need wait for the others to settle
    gpu.free = 80
    running = 0
    while shared.fits_another(running):
        shared.began()  # and has taken nothing yet
        running += 1
    assert running == 3  # three of 20, and a margin


def test_what_others_take_meanwhile_counts() -> None:
    gpu, clock = Gpu(80), Clock()
    shared = SharedGpu(gpu, clock)
    gpu.free = 60
    shared.look(1)
    clock.at_s += SETTLED_S
    assert shared.fits_another(1)
    gpu.free = 20
    assert not shared.fits_another(1)
    assert shared.fits_another(0)  # alone it has all there is


def test_runs_that_take_nothing_of_the_gpu_always_fit() -> None:
    clock = Clock()
    shared = SharedGpu(Gpu(80), clock)
    clock.at_s += SETTLED_S
    assert all(shared.fits_another(running) for running in range(9))


def test_a_machine_that_cannot_say_what_is_free_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "NVML", "libnothing-at-all.so.1")
    module._nvml.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert shared_gpu() is None
    assert "free memory is not known" in caplog.text
    assert "--jobs alone limits runs" in caplog.text


def test_the_driver_is_asked_for_the_gpu_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Driver:
        def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:
            asked.append(index)
            return 0

        def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: object) -> int:
            asked.append(name)
            return 0

        def nvmlDeviceGetMemoryInfo(self, gpu: object, memory: object) -> int:
            memory._obj.free = 7 * GIB  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(module, "_nvml", Driver)
    for visible in ("1,0", "GPU-abc"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        module._gpu.cache_clear()
        assert module.free_gpu_bytes() == 7 * GIB
    module._gpu.cache_clear()
    assert asked == [1, b"GPU-abc"]
    assert ctypes.sizeof(module._Memory) == 24
