"""A [[peer]] of a crew file: its role, its model, what of it trains and on what; who samples for
it; how it behaves when simulated.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Literal

import msgspec

from motley.records import HUB, Convention

MOST_LR = 1.0  # at which a step of Adam moves every weight by about 1


def check_name(whose: str, name: str) -> None:
    """A name that comes from outside must be one before any folder or subject is made of it."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(
            f"{whose} name {name[:80]!r} must be letters, digits, - and _ only; it names folders "
            "and subjects"
        )


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rank: int = 8
    alpha: float = 0.0  # 0: twice the rank
    # names of linear layers, such as q_proj; none: every one but the vocabulary projection
    targets: tuple[str, ...] = ()
    bits: int = 0  # 4: so many for each value of the frozen linear layers; 0: the arithmetic's type

    def __post_init__(self) -> None:
        if self.bits not in (0, 4):
            raise ValueError(
                f"lora bits={self.bits} is not known; use 4, or leave it out to hold the frozen "
                "model in the type of the arithmetic"
            )
        if self.rank < 1 or self.alpha < 0:
            raise ValueError(
                f"lora needs rank >= 1 and alpha >= 0; got rank={self.rank}, alpha={self.alpha}"
            )
        if "lm_head" in self.targets:
            raise ValueError(
                "lora targets name lm_head, the vocabulary projection, which many models share "
                "with their embeddings; leave it out"
            )


class TrainPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`train = { lora = { rank = 8 } }` or `train = { layers = "last:2" }`."""

    lora: Lora | None = None
    layers: str = ""  # "last:N", "first:N" or parameter-name prefixes separated by commas

    def __post_init__(self) -> None:
        if (self.lora is None) == (self.layers == ""):
            raise ValueError(
                "train takes exactly one of lora and layers; for the whole model write train = "
                '"full"'
            )
        if re.fullmatch(r"(first|last):0+", self.layers):
            raise ValueError(f"train layers={self.layers!r} trains nothing; use at least 1 layer")

    @property
    def bits(self) -> int:
        """Of a frozen value beside an adapter; 0: as the arithmetic has it."""
        return 0 if self.lora is None else self.lora.bits


class Warm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised warm start on the task's own answers: until each kind's have the chosen
    probability, or for a number of steps.
    """

    accuracy: dict[str, float] = {}  # kind -> expected accuracy of sampled answers
    kinds: tuple[str, ...] = ()  # with steps: of which problems
    steps: int = 0
    lr: float = 1e-3  # pretrained models want 1e-4 or less
    batch: int = 64
    max_steps: int = 3000  # with accuracy

    @property
    def of_kinds(self) -> tuple[str, ...]:
        return self.kinds or tuple(self.accuracy)

    def share(self, steps: int, reached: dict[str, float]) -> float:
        """How much of it is done after so many steps, with so much accuracy per kind."""
        if self.steps:
            return steps / self.steps
        return sum(
            min(1.0, reached[kind] / target) for kind, target in self.accuracy.items()
        ) / len(self.accuracy)

    def __post_init__(self) -> None:
        if bool(self.accuracy) == bool(self.kinds) or bool(self.kinds) != bool(self.steps):
            raise ValueError(
                "warm takes either accuracy = { sort = 0.5 }, or kinds = ['sort'] with steps = "
                "120; "
                f"got accuracy={self.accuracy}, kinds={list(self.kinds)}, steps={self.steps}"
            )
        if not 0 < self.lr <= MOST_LR or self.batch < 1 or self.max_steps < 1 or self.steps < 0:
            raise ValueError(
                f"warm needs 0 < lr <= {MOST_LR:g}, batch >= 1, max_steps >= 1 and steps >= 0; "
                f"got lr={self.lr}, batch={self.batch}, max_steps={self.max_steps}, "
                f"steps={self.steps}"
            )
        for kind, target in self.accuracy.items():
            if not 0 < target < 1:
                raise ValueError(
                    f"warm accuracy of {kind} is {target}; expected a number between 0 and 1, "
                    "such as 0.5"
                )


class Vllm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vLLM server that Motley starts beside the peer, from an environment of its own."""

    python: str = ""  # the interpreter that has vllm; none: the one Motley runs in
    args: tuple[str, ...] = ()  # further arguments of the server
    start_s: float = 600.0  # how long it may take to come up


class OpenAI(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that someone else runs, with the OpenAI completions API and token log-probs."""

    url: str  # such as http://127.0.0.1:8000/v1
    model: str = ""  # none: the first one the server names
    key_env: str = ""  # the environment variable that holds the key
    logprobs: Convention = "sampled"  # what its log-probs mean: motley check measures it
    # it takes adapters while it runs (vLLM), so that it can follow a peer that trains one
    lora: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not re.match(r"https?://", self.url):
            raise ValueError(
                f"openai url={self.url!r} is no address; write such as http://127.0.0.1:8000/v1"
            )


class EnginePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engine = { vllm = {} }` or `engine = { openai = { url = "http://127.0.0.1:8000/v1" } }`."""

    vllm: Vllm | None = None
    openai: OpenAI | None = None

    def __post_init__(self) -> None:
        if (self.vllm is None) == (self.openai is None):
            raise ValueError(
                "engine takes exactly one of vllm and openai; for the built-in one write engine = "
                '"torch"'
            )


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast a simulated peer is, in completion tokens per second."""

    sample: float = 1000.0
    learn: float = 4000.0

    def __post_init__(self) -> None:
        if not (self.sample > 0 and self.learn > 0):
            raise ValueError(
                "speed needs sample > 0 and learn > 0, in tokens per second; got "
                f"sample={self.sample}, learn={self.learn}"
            )


class Churn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a simulated peer is there, in seconds since the start."""

    join_s: float = 0.0
    leave_s: float = 0.0  # 0: it stays
    # [crash, restart]: what is being sampled then is lost
    crashes: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        times = [
            self.join_s,
            *(at_s for crash in self.crashes for at_s in crash),
            *([self.leave_s] if self.leave_s else []),
        ]
        if not 0 <= self.join_s < math.inf or any(
            not before < after for before, after in itertools.pairwise(times)
        ):
            raise ValueError(
                f"churn must go join_s, crashes [crash, restart] in order, leave_s; got {times}"
            )


Role = Literal["peer", "learner", "sampler"]
Optimizer = Literal["adamw", "adamw8bit", "adafactor"]
Masters = Literal["float32", "bfloat16"]


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`peer` samples and learns; `learner` only learns; `sampler` only samples, with the weights of
    the learner it follows.
    """

    name: str
    # tiny:NAME, tiny:NAME/bytes, a name that `motley models` lists, a folder, a .gguf file or a
    # Hugging Face id
    model: str = ""
    # above 0: only this many of the model's layers, evenly chosen, the first and the last among
    # them
    keep_layers: int = 0
    role: Role = "peer"
    follows: str = ""  # a sampler's learner
    train: Literal["full"] | TrainPart = "full"
    warm: Warm | None = None
    lr: float = 0.0  # 0: the crew's
    engine: Literal["torch"] | EnginePart = "torch"  # who samples
    judge: OpenAI | None = None  # whose opinion multiplies the rewards that this peer learns from
    device: str = "auto"  # cpu, cuda, cuda:1, mps
    devices: int = 1  # so many of them share the model, from `device` on
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the arithmetic
    # less memory, a third more time; auto: where few tokens fit without it
    gradient_checkpointing: bool | Literal["auto"] = False
    optimizer: Optimizer = "adamw"
    masters: Masters = "float32"  # what trains is kept in; bfloat16 is rounded by chance
    offload: bool = False  # the optimiser's moments are in the CPU's memory
    speed: Speed = Speed()
    churn: Churn = Churn()

    def __post_init__(self) -> None:
        if self.role == "sampler":
            if not self.follows:
                raise ValueError(
                    f'sampler {self.name} must say whose weights it uses: follows = "LEARNER"'
                )
            if self.model or self.warm or self.train != "full" or self.lr:
                raise ValueError(
                    f"sampler {self.name} has the model of {self.follows}; remove its model, "
                    "train, warm and lr"
                )
        elif self.follows or not self.model:
            raise ValueError(
                f"{self.role} {self.name} needs a model, and only a sampler follows; got "
                f"model={self.model!r}, follows={self.follows!r}"
            )
        check_name("peer", self.name)
        if self.name == HUB:
            raise ValueError(
                f"peer name {HUB!r} is taken: the crew's own records are published under it; "
                "choose another"
            )
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise ValueError(
                f"peer {self.name}: device={self.device!r} is not known; use auto, cpu, cuda, "
                "cuda:N or mps"
            )
        self._check_memory()
        self._check_devices()
        if self.keep_layers < 0 or self.keep_layers == 1:
            raise ValueError(
                f"peer {self.name}: keep_layers={self.keep_layers}; use at least 2, the first and "
                "the last, or 0 for all"
            )
        if not 0 <= self.lr <= MOST_LR:
            raise ValueError(
                f"peer {self.name}: lr={self.lr} is outside 0..{MOST_LR:g}; leave it out to use "
                "the crew's, or start pretrained models at 1e-4 or less"
            )

    @property
    def bits(self) -> int:
        """Of a frozen value beside an adapter; 0: as the arithmetic has it."""
        return 0 if isinstance(self.train, str) else self.train.bits

    def _check_memory(self) -> None:
        """Of settings that trade something for memory: which do not go together."""
        if self.masters == "bfloat16" and (self.dtype != "bfloat16" or self.train != "full"):
            raise ValueError(
                f'peer {self.name}: masters = "bfloat16" is for train = "full" with dtype = '
                f'"bfloat16"; got train = {_shown(self.train)}, dtype = "{self.dtype}"; set them, '
                "or leave masters out"
            )
        if self.optimizer == "adafactor" and (self.offload or self.masters == "bfloat16"):
            raise ValueError(
                f'peer {self.name}: optimizer = "adafactor" keeps next to nothing, and steps '
                'float32 weights only; leave offload and masters out, or use "adamw8bit"'
            )
        if self.role == "sampler" and (
            self.optimizer != "adamw" or self.masters != "float32" or self.offload
        ):
            raise ValueError(
                f"sampler {self.name} does not learn; remove its optimizer, masters and offload"
            )

    def _check_devices(self) -> None:
        if self.devices < 1:
            raise ValueError(
                f"peer {self.name}: devices={self.devices} computes nothing; use at least 1"
            )
        if self.devices == 1:
            return
        refused = {
            "a sampler has no learner to share; use a sampler for each device": (
                self.role == "sampler"
            ),
            "Apple has one GPU; leave devices out": self.device == "mps",
            'each device samples by itself; use engine = "torch"': self.engine != "torch",
            "a part of the moments is on each device as it is; leave optimizer and offload out": (
                self.optimizer != "adamw" or self.offload
            ),
            'parts are kept in float32; leave masters = "bfloat16" out': self.masters != "float32",
            "a model in 4 bits is on one device; leave devices or bits = 4 out": self.bits == 4,
        }
        for reason, is_so in refused.items():
            if is_so:
                raise ValueError(f"peer {self.name}: devices={self.devices}: {reason}")


def _shown(train: str | TrainPart) -> str:
    return f'"{train}"' if isinstance(train, str) else "a part of it"
