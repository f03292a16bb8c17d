"""Orders: what the devices of one peer do together, each with its own part of the model.

Every device does the same order at the same time: torch gathers weights and adds up gradients under
way, and would wait for ever for one that does something else. Only a round's sampling needs nobody
else. Owns no process: who gives orders, and how they travel, is in `team`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from motley.compute.logprobs import Scores
from motley.compute.packed import Packed
from motley.compute.sharding import Shards
from motley.engines import Completion
from motley.records import Sampling

Policies = Literal["learner", "reference"]
Moments = dict[str, Tensor]  # what an optimiser remembers of a parameter


class SharedEngine(Protocol):
    """An engine that samples some prompts of a round."""

    def refresh(self) -> None: ...

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        first: int = 0,
    ) -> list[list[Completion]]: ...


@dataclass(slots=True)
class DevicePart:
    """What one device of a peer has."""

    rank: int  # 0: the peer itself
    shards: Shards
    reference: Shards | None  # of the policy that the peer began with, where a penalty asks for it
    engine: SharedEngine
    optimiser: torch.optim.Optimizer
    logp_M: Tensor | None = field(default=None)  # of the newest scores, for their gradient

    def shards_of(self, policy: Policies) -> Shards:
        shards = self.shards if policy == "learner" else self.reference
        assert shards, "a reference that nobody asked for"
        return shards

    @property
    def parameters(self) -> list[Tensor]:
        return [p for _, p in self.shards.trained()]


class TeamOrder(Protocol):
    def do(self, part: DevicePart) -> Any: ...


@dataclass(frozen=True, slots=True)
class ScoreOrder:
    """Score a micro-batch; `learns`: such that a gradient can follow."""

    packed: Packed
    learns: bool
    by: Policies = "learner"

    def do(self, part: DevicePart) -> Scores:
        with torch.set_grad_enabled(self.learns):
            made = part.shards_of(self.by).score(self.packed)
        part.logp_M = made.logp_M if self.learns else None
        return Scores(made.logp_M.detach().cpu(), made.entropy_M.detach().cpu())


@dataclass(frozen=True, slots=True)
class BackwardOrder:
    """Add the gradient of the newest scores, given the loss's with respect to them.

    None: nothing of it counts, since the micro-batch is another device's.
    """

    dloss_M: Tensor | None
    scale: float

    def do(self, part: DevicePart) -> None:
        logp_M, part.logp_M = part.logp_M, None
        assert logp_M is not None, "scores were made without a gradient"
        dloss_M = torch.zeros_like(logp_M) if self.dloss_M is None else self.dloss_M
        scaled_M = logp_M if self.scale == 1 else logp_M * self.scale
        scaled_M.backward(dloss_M.to(logp_M.device))


@dataclass(frozen=True, slots=True)
class ZeroGradOrder:
    def do(self, part: DevicePart) -> None:
        part.optimiser.zero_grad()


@dataclass(frozen=True, slots=True)
class ClipOrder:
    """Take the scale out of the gradient, and clip it; its norm before that."""

    scale: float
    limit: float

    def do(self, part: DevicePart) -> Tensor:
        given = [p.grad for p in part.parameters if p.grad is not None]
        if self.scale != 1 and given:
            torch._foreach_mul_(given, 1 / self.scale)
        norm = clip_grad_norm_(part.parameters, self.limit)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).detach().cpu()


@dataclass(frozen=True, slots=True)
class StepOrder:
    lr: float

    def do(self, part: DevicePart) -> None:
        for group in part.optimiser.param_groups:
            group["lr"] = self.lr
        part.optimiser.step()


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Have the first device see a tensor whole."""

    name: str

    def do(self, part: DevicePart) -> Tensor | None:
        whole = part.shards.parameter(self.name).full_tensor()
        return None if part.rank else whole.detach().cpu()


@dataclass(frozen=True, slots=True)
class TakeOrder:
    """Give a parameter a value; None on all devices but the first."""

    name: str
    value: Tensor | None
    of: Policies = "learner"

    def do(self, part: DevicePart) -> None:
        part.shards_of(self.of).take(self.name, self.value)


@dataclass(frozen=True, slots=True)
class FetchMomentsOrder:
    """Have the first device see what the optimiser remembers of a parameter."""

    name: str

    def do(self, part: DevicePart) -> Moments | None:
        known = part.optimiser.state.get(part.shards.parameter(self.name), {})
        whole = {
            key: (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
            for key, value in known.items()
        }
        return None if part.rank else whole


@dataclass(frozen=True, slots=True)
class TakeMomentsOrder:
    """Give the optimiser memories of a parameter.

    `alike`: by key, those of the parameter's shape; None on all devices but the first. `others`:
    the rest, which every device has.
    """

    name: str
    alike: dict[str, Tensor | None]
    others: Moments

    def do(self, part: DevicePart) -> None:
        shards = part.shards
        parameter = shards.parameter(self.name)
        there = parameter.device if part.optimiser.defaults.get("fused") else torch.device("cpu")
        part.optimiser.state[parameter] = {
            **{key: value.to(there) for key, value in self.others.items()},
            **{key: shards.scattered(self.name, value) for key, value in self.alike.items()},
        }


@dataclass(frozen=True, slots=True)
class RefreshOrder:
    def do(self, part: DevicePart) -> None:
        part.engine.refresh()


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Answer some prompts of a round; `first`: how many stand before them."""

    prompts: Sequence[Sequence[int]]
    num_samples: int
    sampling: Sampling
    seed: int
    first: int

    def do(self, part: DevicePart) -> list[list[Completion]]:
        if not self.prompts:
            return []
        return part.engine.sample(
            self.prompts, self.num_samples, self.sampling, self.seed, self.first
        )
