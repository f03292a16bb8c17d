"""One run of the GPU benchmark: how much work, on which device, and what that could do at best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from motley.benchmarks.models import build
from motley.benchmarks.timing import Machine
from motley.models.policy import Policy

Cell = str | int | float | None
Row = dict[str, Cell]  # column -> what stands there
Job = Callable[[], list[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much work each section does."""

    copied_bytes: int = 2**32
    product: int = 8192  # rows and columns of the measured product
    repeats: int = 3
    prompt: int = 96
    new_tokens: int = 128
    generate_tokens: int = 24  # of `generate` in the decode section: its steps all take alike
    few_tokens: int = 8  # what is taken off both sides, to leave single steps
    sequences: tuple[int, ...] = (64, 256, 1024, 4096)
    generate_sequences: int = 1024  # most of them
    contexts: tuple[int, ...] = (256, 1024, 4096)
    context_sequences: int = 256
    # of the longest context: the last are more than memory holds
    full_sequences: tuple[int, ...] = (512, 1024, 2048)
    full_tokens: int = 16
    problems: int = 64
    samples: int = 8
    # lengths of ragged answers: log-normal, cut to the shortest and longest
    ragged_median: int = 256
    ragged_spread: float = 0.9
    ragged_shortest: int = 50
    ragged_longest: int = 2048
    rows: int = 64  # of the training step
    row_tokens: int = 256
    trl_rows: int = 128  # of one of TRL's micro-batches


@dataclass(frozen=True, slots=True)
class Bench:
    machine: Machine
    device: torch.device
    dtype: str
    sizes: Sizes
    vllm: str = ""  # the interpreter that has it

    def build(self, model: str) -> Policy:
        return build(model, str(self.device), self.dtype)
