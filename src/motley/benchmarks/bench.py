"""One run of the GPU benchmark: how much work, on which device, and what that could do at best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch

from motley.benchmarks.models import SMOLLM2, build
from motley.benchmarks.setups import Setup, setup_of
from motley.benchmarks.timing import LEARNER_WARMS, Machine
from motley.models.policy import Policy

Cell = str | int | float | None
Row = dict[str, Cell]  # column -> what stands there
Job = Callable[[], Iterable[Row]]
Rival = Literal["none", "float32", "bfloat16"]  # what TRL keeps its weights in; none: no TRL
RIVALS: tuple[Rival, ...] = get_args(Rival)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much work each section does."""

    copied_bytes: int = 2**32
    product: int = 8192  # rows and columns of the measured product
    repeats: int = 3
    warms: int = LEARNER_WARMS  # steps of our learner before those that count
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
    trl_rows: int = 128  # most of one of TRL's micro-batches


def sizes_of(settings: Sequence[str], usual: Sizes = Sizes()) -> Sizes:
    """The usual sizes with some numbers changed, each given as KEY=NUMBER."""
    known = [key for key, value in asdict(usual).items() if isinstance(value, int)]
    changes: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in known or not value.isdecimal() or int(value) < 1:
            raise ValueError(
                f"--size {setting!r} is no size; write KEY=NUMBER, the number at least 1, with one "
                f"of {', '.join(known)}; such as --size problems=32"
            )
        changes[key] = int(value)
    return replace(usual, **changes)


def rivals_of(names: Sequence[str]) -> tuple[Rival, ...]:
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise ValueError(f"--trl {unknown[0]} is not known; choose from {', '.join(RIVALS)}")
    return tuple(rival for rival in RIVALS if rival in names)


@dataclass(frozen=True, slots=True)
class Bench:
    machine: Machine
    device: torch.device
    dtype: str
    sizes: Sizes
    vllm: str = ""  # the interpreter that has it
    setups: tuple[Setup, ...] = ()  # in which ours takes whole steps; none: the usual one
    rivals: tuple[Rival, ...] = ()  # of whole steps; none: each that is of use
    vocabulary: str = SMOLLM2  # a model whose words random models speak

    @property
    def usual(self) -> Setup:
        """What a crew file sets that says nothing but the type of the arithmetic."""
        return setup_of("default", self.dtype)

    def build(self, model: str, setup: Setup | None = None) -> Policy:
        return build(model, str(self.device), setup or self.usual, self.vocabulary)
