"""How long a job takes and how much of the GPU's memory; and what the machine could do at best, by
a large copy and a large product.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

GIB = 2**30
LEARNER_WARMS = 3  # steps: the first compiles, the third captures graphs of sizes that came twice
# of the copy and the product: the quickest counts, since it is the machine's own limit that is
# looked for
TRIES = 5


@dataclass(frozen=True, slots=True)
class Cost:
    seconds: float
    peak_gib: float | None  # of the GPU's memory, weights included; None on a CPU


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float  # read and written
    flops_per_s: float

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """What no program can beat that moves these bytes and computes these products."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


def seconds(job: Callable[[], object], device: torch.device) -> float:
    """From the call until the device has nothing left to do."""
    wait(device)
    start = time.perf_counter()
    job()
    wait(device)
    return time.perf_counter() - start


def cost(job: Callable[[], object], device: torch.device, repeats: int, warming: int = 1) -> Cost:
    """The median of several runs after those that warm up."""
    for _ in range(warming):
        job()
    start_peak(device)
    return Cost(statistics.median(seconds(job, device) for _ in range(repeats)), peak_gib(device))


def cost_per_token(
    job: Callable[[int], object], few: int, many: int, device: torch.device, repeats: int
) -> Cost:
    """Of a job that makes a number of tokens one after another: what it takes longer for `many`
    than for `few`, by each token more.

    So neither the prompts nor anything that is done once per call counts.
    """
    short, long = (cost(partial(job, count), device, repeats) for count in (few, many))
    return Cost((long.seconds - short.seconds) / (many - few), long.peak_gib)


def measure_machine(
    device: torch.device, dtype: torch.dtype, copied_bytes: int, size: int
) -> Machine:
    """`copied_bytes`: of the array that is copied; `size`: of the square matrices that are
    multiplied.
    """
    made = Machine(
        2 * copied_bytes / _copy_s(device, copied_bytes),
        2 * size**3 / _product_s(device, dtype, size),
    )
    clear(device)
    return made


def _copy_s(device: torch.device, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _quickest(lambda: target.copy_(source), device)


def _product_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    matrix = torch.randn(size, size, device=device).to(dtype)
    return _quickest(lambda: matrix @ matrix, device)


def _quickest(job: Callable[[], object], device: torch.device) -> float:
    job()
    return min(seconds(job, device) for _ in range(TRIES))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_peak(device: torch.device) -> None:
    """Count the most memory in use from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Taken from the device, not only in use: CUDA graphs at rest keep what they need."""
    return torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else None


def clear(device: torch.device) -> None:
    """Give back unused memory, so that one side's is not counted to the other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
