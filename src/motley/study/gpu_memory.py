"""What runs of a study take of a GPU's memory: which take alike, and what this process holds.

Whether one more fits is asked of `shared_gpu.py`, which knows no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import torch

from motley.config import CrewConfig, PeerConfig
from motley.models.devices import choose_device
from motley.models.opening import is_tiny
from motley.study.keys import KEY_LETTERS

PEAKS = "memory.jsonl"  # beside the runs: what they took of a GPU
# CUDA itself, the code of kernels and captured graphs: held by a process, and not counted by torch
CUDA_BYTES = 1 << 30
# keys of [crew] on which a run's memory does not depend
NOT_SIZE = frozenset(
    ("name", "seed", "objective", "variant", "chosen", "rounds", "report", "report_all")
)


def uses_gpu(config: CrewConfig) -> bool:
    devices = [choose_device(p.device, small=is_tiny(p.model)) for p in config.students]
    return any(device.type == "cuda" for device in devices)


def alike_run(config: CrewConfig, measured: bool) -> str:
    """The same for runs that take about as much memory: with any seed and names, and learning by
    any objective, unless that needs a copy of the model. `measured`: gradients are.
    """
    plain = msgspec.to_builtins(config)
    plain["crew"] = {key: one for key, one in plain["crew"].items() if key not in NOT_SIZE}
    plain["peer"] = [peer | {"name": ""} for peer in plain["peer"]]
    plain["objective"] = plain["objective"].get("toward", "")
    return f"run {_digest(plain)}" + (", with gradients" if measured else "")


def alike_warm(peer: PeerConfig) -> str:
    return f"warm start of {peer.model} {_digest(msgspec.structs.replace(peer, name='any'))}"


def _digest(content: object) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:KEY_LETTERS]


def measure() -> Callable[[], int]:
    """What this process holds of the GPU at the most, from now on."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    return _most_held


def _most_held() -> int:
    if not torch.cuda.is_initialized():
        return 0
    return torch.cuda.max_memory_reserved() + CUDA_BYTES
