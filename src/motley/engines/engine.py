"""Engine: the one protocol for sampling. Knows policies; knows no objective, record or log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from motley.records import Ending, Sampling


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens, the end token included when `ending` is "stop", and the log-prob of each
    under the declared convention.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ending: Ending

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.logprobs)


class Engine(Protocol):
    # it samples with weights of its own, so that the policy may train meanwhile
    keeps_snapshot: bool

    def refresh(self) -> None:
        """Take the policy's present weights for all sampling from here on."""
        ...

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        """`num_samples` completions of each prompt, in the order of the prompts.

        The same seed gives the same tokens.
        """
        ...
