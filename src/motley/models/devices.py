"""What a policy computes on: the device, its arithmetic by a quick measurement, and when its memory
is full. Knows no model, and nothing of how one is computed.
"""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable
from functools import lru_cache

import torch

# of the measured product: large enough that starting it does not count
CPU_SIZE, GPU_SIZE = 512, 4096
REPEATS = 8
HOPELESS_S = 0.05
WORTH = 1.3  # half types round more, so they must be this much faster

# of Apple's GPUs, and of CPUs
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


def choose_device(wanted: str, small: bool) -> torch.device:
    """`small`: costs more to start than to compute, and stays on the CPU unless told otherwise."""
    if wanted != "auto":
        if wanted.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(
                f"device={wanted!r}, and torch finds no CUDA GPU here; use auto or cpu, or "
                "install a torch built for CUDA"
            )
        if (
            wanted.startswith("cuda:")
            and int(wanted.removeprefix("cuda:")) >= torch.cuda.device_count()
        ):
            raise ValueError(
                f"device={wanted!r}, and the last CUDA GPU here is "
                f"cuda:{torch.cuda.device_count() - 1}; use one that is here"
            )
        if wanted == "mps" and not torch.backends.mps.is_available():
            raise ValueError("device='mps', and torch finds no Apple GPU here; use auto or cpu")
        return torch.device(wanted)
    if small:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """As people know it.

    >>> device_name(torch.device("cuda"))
    'NVIDIA H200'
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "Apple GPU" if device.type == "mps" else f"CPU ({platform.machine()})"


def check_dtype(wanted: str, device: torch.device) -> None:
    if wanted == "float16" and device.type != "cuda":
        raise ValueError(
            f"dtype='float16' is for CUDA GPUs, and this peer computes on {device}; use auto, "
            "float32 or bfloat16"
        )


def choose_dtype(
    wanted: str, device: torch.device, small: bool, fits_float16: Callable[[], bool] = lambda: False
) -> torch.dtype:
    """On a CPU float32 unless told otherwise: many have no bfloat16 arithmetic, and those that do
    round more for little.

    `fits_float16`: whether the model does; asked only where it decides. float16 rounds eight times
    less than bfloat16.
    """
    check_dtype(wanted, device)
    if wanted == "float16":
        return torch.float16
    if wanted == "bfloat16":
        if not is_faster(torch.bfloat16, str(device)):
            warnings.warn(
                f"bfloat16 is not faster than float32 on {device}; dtype = 'auto' would use "
                "float32",
                stacklevel=2,
            )
        return torch.bfloat16
    if wanted == "float32" or small or device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and is_faster(torch.float16, str(device)) and fits_float16():
        return torch.float16
    return torch.bfloat16 if is_faster(torch.bfloat16, str(device)) else torch.float32


@lru_cache
def is_faster(half: torch.dtype, device: str) -> bool:
    """Whether products in a half type are clearly faster than in float32; measured once."""
    spare_onednn(half, device)
    return _seconds(half, device) * WORTH < _seconds(torch.float32, device)


def spare_onednn(dtype: torch.dtype, device: str) -> None:
    """Keep torch from trying oneDNN for bfloat16 on an Arm CPU that has no such arithmetic.

    There the first product fails, torch warns with a page of C++ frames, and switches oneDNN off
    for the process. This switches it off before, without the page. An x86 CPU is not tried.
    """
    if (
        dtype == torch.bfloat16
        and device == "cpu"
        and platform.machine() in ("aarch64", "arm64")
        and torch.backends.mkldnn.is_available()
        and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        torch.backends.mkldnn.set_flags(False)


def _seconds(dtype: torch.dtype, device: str) -> float:
    """The best of several products, after one that only wakes the device up; one that is hopeless
    is not repeated.
    """
    size = CPU_SIZE if device == "cpu" else GPU_SIZE
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    _product_s(matrix)
    best = _product_s(matrix)
    for _ in range(REPEATS - 1):
        if best > HOPELESS_S:
            break
        best = min(best, _product_s(matrix))
    return best


def _product_s(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    float((matrix @ matrix)[0, 0])  # reading a value waits for the device
    return time.perf_counter() - start


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in OUT_OF_MEMORY
    )
