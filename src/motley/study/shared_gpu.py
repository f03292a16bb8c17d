"""Whether one more job fits on the GPU that jobs share, those of other studies too: by what is
free, and by the most that jobs alike to it were seen to hold. Knows nothing of what is run.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from motley.study.neighbours import Neighbours, Plans, neighbours_on

MARGIN = 1.2  # of what alike jobs held: the next one may take a little more
GROWN = 1.05  # less than this is no growth
RAISED = 1.3  # of what a job held that ran out of memory: so much it needs at least
NVML = "libnvidia-ml.so.1"  # comes with the driver, and needs no room on the GPU itself
NAME_BYTES = 96  # of a GPU's name or id, as the driver gives it

# Begins to measure. What it gives says the most bytes of the GPU that were held since.
Measure = Callable[[], Callable[[], int]]

logger = logging.getLogger(__name__)


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a job of a class was seen to hold."""

    alike: str
    gpu: str
    held_bytes: int


class Peaks:
    """The most that jobs of each class held on this kind of GPU: a file that only grows, for who
    comes later. The largest line of a class counts.
    """

    def __init__(self, path: Path, gpu: str) -> None:
        self._path, self._gpu = path, gpu
        self._bytes: dict[str, int] = {}

    def of(self, alike: str) -> int | None:
        """None: no such job was measured."""
        if alike not in self._bytes:
            self._read()  # perhaps another study knows by now
        return self._bytes.get(alike)

    def _read(self) -> None:
        for line in self._path.read_bytes().splitlines() if self._path.exists() else ():
            try:
                peak = msgspec.json.decode(line, type=Peak)
            except msgspec.DecodeError:
                continue  # cut off by a crash: it will be measured again
            if peak.gpu == self._gpu:
                self._bytes[peak.alike] = max(peak.held_bytes, self._bytes.get(peak.alike, 0))

    def saw(self, alike: str, held: int) -> None:
        known = self.of(alike)
        if known is not None and held <= GROWN * known:
            return
        self._bytes[alike] = held
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            line = msgspec.json.encode(Peak(alike=alike, gpu=self._gpu, held_bytes=held))
            file.write(line + b"\n")


@dataclass(slots=True)
class _GoingOn:
    alike: str
    held: int = 0  # at the most, as far as it told
    times_told: int = 0


class SharedGpu:
    """A job begins if what is free, less what those that go on will still take, holds it.

    The first of a class shows what such a job takes. Nothing begins beside it until a whole round
    went by in which it did not grow, or it ended. Who tells of no round shows nothing.
    """

    def __init__(
        self,
        free_bytes: Callable[[], int],
        peaks: Peaks,
        measure: Measure,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.measure = measure  # in the process of each job
        self._free_bytes, self._peaks, self._neighbours = free_bytes, peaks, neighbours
        self._at_first = 0  # what was free then, while jobs go on
        self._raised: dict[str, float] = {}  # by class, of those that ran out
        self._going_on: dict[str, _GoingOn] = {}  # by name
        self._waits = False  # for others; said once

    def fits(self, alike: str) -> bool:
        """Whether a job of this class can begin now. Alone it always can: it could not have more
        room.
        """
        reserved = [*self._own_needed(), *(one for plan in self._beside() for one in plan.needed)]
        fits = not reserved or self._fits_beside(reserved, self._needed(alike))
        if not fits and not self._going_on and not self._waits:
            self._waits = True
            logger.warning("another study uses this GPU: %s; waiting for room", self.text(alike))
        return fits

    def _fits_beside(self, reserved: Sequence[float | None], needed: float | None) -> bool:
        known = [one for one in reserved if one is not None]
        if len(known) < len(reserved):
            return False  # one of them has not shown what it takes
        free = self._free_bytes()
        untaken = max(0.0, sum(known) - max(0, self._free_at_first() - free))
        # one that nobody knows is taken to be as large as the largest beside it
        return free - untaken >= MARGIN * (max(known) if needed is None else needed)

    def _free_at_first(self) -> int:
        """Before the first of all jobs that go on, of neighbours too."""
        if self._going_on:
            return self._at_first
        beside = [plans.free_at_first for plans in self._beside()]
        return max(beside) if beside else self._free_bytes()

    def _own_needed(self) -> tuple[float | None, ...]:
        return tuple(self._needed(one.alike) for one in self._going_on.values())

    def _beside(self) -> Sequence[Plans]:
        return self._neighbours.plans() if self._neighbours else ()

    def _say(self) -> None:
        if self._neighbours:
            plans = Plans(free_at_first=self._at_first, needed=self._own_needed())
            self._neighbours.say(plans)

    def began(self, name: str, alike: str) -> None:
        self._at_first = self._free_at_first()
        self._going_on[name] = _GoingOn(alike)
        self._say()

    def told(self, name: str, held: int) -> None:
        """A job began its rounds, or ended one, and held so much at the most."""
        one = self._going_on[name]
        one.times_told += 1
        settled = one.times_told > 2 and held <= GROWN * one.held
        one.held = max(one.held, held)
        if settled or self._peaks.of(one.alike) is not None:
            self._peaks.saw(one.alike, one.held)
            self._say()

    def ended(self, name: str, held: int) -> None:
        one = self._going_on.pop(name)
        if one.times_told > 1:  # else there was nothing left to do
            self._peaks.saw(one.alike, max(held, one.held))
        self._say()

    def ran_out(self, name: str, held: int) -> None:
        """Of memory. So such jobs take more than it held, in this study at least."""
        one = self._going_on.pop(name)
        held = max(held, one.held)
        self._peaks.saw(one.alike, held)
        self._raised[one.alike] = max(RAISED * held, self._raised.get(one.alike, 0))
        self._say()

    def lost(self, name: str) -> None:
        """A job is over that may not have come far enough to show what it takes."""
        del self._going_on[name]
        self._say()

    def _needed(self, alike: str) -> float | None:
        peak = self._peaks.of(alike)
        return None if peak is None else max(peak, self._raised.get(alike, 0))

    def text(self, alike: str) -> str:
        gib, needed = 2.0**30, self._needed(alike)
        takes = "nobody knows what such a run takes"
        if needed is not None:
            takes = f"such a run was to take up to {needed / gib:.1f}"
        return f"{self._free_bytes() / gib:.1f} GiB of the GPU were free, and {takes}"


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def shared_gpu(peaks: Path, measure: Measure) -> SharedGpu | None:
    """Of the first GPU that may be used. None: nobody can say what is free, and a warning says so.

    The driver is asked: torch would take some of the GPU for the question alone.
    """
    try:
        name, neighbours = gpu_name(), neighbours_on(gpu_id())
        free_gpu_bytes()
    except OSError as error:
        logger.warning("the GPU's free memory is not known (%s); --jobs alone limits runs", error)
        return None
    return SharedGpu(free_gpu_bytes, Peaks(peaks, name), measure, neighbours)


def free_gpu_bytes() -> int:
    library, memory = _nvml(), _Memory()
    _check(library.nvmlDeviceGetMemoryInfo(_gpu(), ctypes.byref(memory)), "its memory")
    return int(memory.free)


def gpu_name() -> str:
    name = ctypes.create_string_buffer(NAME_BYTES)
    _check(_nvml().nvmlDeviceGetName(_gpu(), name, NAME_BYTES), "its name")
    return name.value.decode(errors="replace")


def gpu_id() -> str:
    given = ctypes.create_string_buffer(NAME_BYTES)
    _check(_nvml().nvmlDeviceGetUUID(_gpu(), given, NAME_BYTES), "its id")
    return given.value.decode(errors="replace")


@lru_cache
def _nvml() -> ctypes.CDLL:
    library = ctypes.CDLL(NVML)
    _check(library.nvmlInit_v2(), "the driver")
    return library


@lru_cache
def _gpu() -> ctypes.c_void_p:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    handle, library = ctypes.c_void_p(), _nvml()
    if first.isdecimal():
        error = library.nvmlDeviceGetHandleByIndex_v2(int(first), ctypes.byref(handle))
    else:
        error = library.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(handle))
    _check(error, f"GPU {first}")
    return handle


def _check(error: int, what: str) -> None:
    if error:
        raise OSError(f"{what} could not be asked: NVML error {error}")
