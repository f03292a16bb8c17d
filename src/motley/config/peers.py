"""A [[peer]] of a crew file: its role, its model and what of it trains; how it behaves when simulated."""

from __future__ import annotations

import itertools
import math
import re
from typing import Literal, get_args

import msgspec

from motley.records import HUB

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rank: int = 8
    alpha: float = 0.0  # 0: twice the rank
    targets: tuple[Projection, ...] = get_args(Projection)

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.targets or self.alpha < 0:
            got = f"rank={self.rank}, alpha={self.alpha}, targets={list(self.targets)}"
            raise ValueError(f"lora needs rank >= 1, alpha >= 0 and at least one target; got {got}")


class TrainPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`train = { lora = { rank = 8 } }` or `train = { layers = "last:2" }`."""

    lora: Lora | None = None
    layers: str = ""  # "last:N", "first:N" or parameter-name prefixes separated by commas

    def __post_init__(self) -> None:
        if (self.lora is None) == (self.layers == ""):
            raise ValueError('train takes exactly one of lora and layers; for the whole model write train = "full"')
        if re.fullmatch(r"(first|last):0+", self.layers):
            raise ValueError(f"train layers={self.layers!r} trains nothing; use at least 1 layer")


class Warm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised warm start on the task's own answers, until each kind's answers have the chosen probability."""

    accuracy: dict[str, float]  # kind -> expected accuracy of sampled answers
    lr: float = 1e-3
    batch: int = 64
    max_steps: int = 3000

    def __post_init__(self) -> None:
        if not self.accuracy:
            raise ValueError("warm accuracy names no kind; write such as { sort = 0.5 }, or remove warm")
        if not self.lr > 0 or self.batch < 1 or self.max_steps < 1:
            raise ValueError(
                f"warm needs lr > 0, batch >= 1 and max_steps >= 1; got lr={self.lr}, batch={self.batch}, max_steps={self.max_steps}"
            )
        for kind, target in self.accuracy.items():
            if not 0 < target < 1:
                raise ValueError(f"warm accuracy of {kind} is {target}; expected a number between 0 and 1, such as 0.5")


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast a simulated peer is, in completion tokens per second."""

    sample: float = 1000.0
    learn: float = 4000.0

    def __post_init__(self) -> None:
        if not (self.sample > 0 and self.learn > 0):
            raise ValueError(f"speed needs sample > 0 and learn > 0, in tokens per second; got sample={self.sample}, learn={self.learn}")


class Churn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a simulated peer is there, in seconds since the start."""

    join_s: float = 0.0
    leave_s: float = 0.0  # 0: it stays
    crashes: tuple[tuple[float, float], ...] = ()  # [crash, restart]: what is being sampled then is lost

    def __post_init__(self) -> None:
        times = [self.join_s, *(at_s for crash in self.crashes for at_s in crash), *([self.leave_s] if self.leave_s else [])]
        if not 0 <= self.join_s < math.inf or any(not before < after for before, after in itertools.pairwise(times)):
            raise ValueError(f"churn must go join_s, crashes [crash, restart] in order, leave_s; got {times}")


Role = Literal["peer", "learner", "sampler"]


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`peer` samples and learns; `learner` only learns; `sampler` only samples, with the weights of the learner it follows."""

    name: str
    model: str = ""
    role: Role = "peer"
    follows: str = ""  # a sampler's learner
    train: Literal["full"] | TrainPart = "full"
    warm: Warm | None = None
    lr: float = 0.0  # 0: the crew's
    speed: Speed = Speed()
    churn: Churn = Churn()

    def __post_init__(self) -> None:
        if self.role == "sampler":
            if not self.follows:
                raise ValueError(f'sampler {self.name} must say whose weights it uses: follows = "LEARNER"')
            if self.model or self.warm or self.train != "full" or self.lr:
                raise ValueError(f"sampler {self.name} has the model of {self.follows}; remove its model, train, warm and lr")
        elif self.follows or not self.model:
            raise ValueError(
                f"{self.role} {self.name} needs a model, and only a sampler follows; got model={self.model!r}, follows={self.follows!r}"
            )
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ValueError(f"peer name {self.name!r} must be letters, digits, - and _ only; it names folders and subjects")
        if self.name == HUB:
            raise ValueError(f"peer name {HUB!r} is taken: the crew's own records are published under it; choose another")
        if not self.lr >= 0:
            raise ValueError(f"peer {self.name}: lr={self.lr} is negative; leave it out to use the crew's")
