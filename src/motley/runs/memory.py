"""What each peer of a crew takes of its device's memory, and what to change where that is too much.

Loads no weights: a model's configuration and its tokenizer are enough. The formulas are in
`learning.footprint`; this module knows which sizes a crew file gives them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import msgspec
import torch
from transformers import PreTrainedModel

from motley.compute.support import why_unknown
from motley.config import AUTO, CrewConfig, Lora, PeerConfig, TrainPart
from motley.learning.descent import Upkeep, moment_bytes
from motley.learning.fitting import (
    ENOUGH_TOKENS,
    LEAST_TOKENS,
    MOST_TOKENS,
    SHARE,
    TINY_PARAMETERS,
    TINY_TOKENS,
    free_bytes,
)
from motley.learning.footprint import (
    Arithmetic,
    EngineShape,
    Footprint,
    MemorySettings,
    ModelShape,
    StepShape,
    footprint,
    kept_bytes,
    shape_of,
    trained_bytes,
    weight_bytes,
)
from motley.models.devices import choose_device
from motley.models.named import TINY, is_tiny
from motley.models.opening import vocabulary_of
from motley.models.policy import choose_trained
from motley.models.prompts import Prompts
from motley.models.sources import empty_model, find, keep_layers, read_shape
from motley.models.tiny import tiny_model
from motley.objectives import objective
from motley.runs.evaluation import AT_ONCE
from motley.tasks import Task, evaluation_set, load_task

UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}
GIB = 2.0**30
HALF_TYPES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Of the machine that a peer runs on."""

    name: str  # as the crew file says
    nbytes: int
    is_gpu: bool


class MemoryChange(msgspec.Struct, frozen=True):
    """What to write in the crew file, beside what stands before it in the list."""

    peer: str
    change: str
    gib: float
    fits: bool


@dataclass(frozen=True, slots=True)
class PeerMemory:
    peer: str
    device: DeviceMemory
    token_budget: int
    takes: Footprint
    changes: tuple[MemoryChange, ...]

    @property
    def fits(self) -> bool:
        return self.takes.nbytes <= self.device.nbytes


def parse_memory(text: str) -> int:
    """139GiB in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if not found or found[2] not in UNITS or not float(found[1]) > 0:
        raise ValueError(
            f"--memory {text!r} is no size; write a number and one of {', '.join(UNITS)}, such as "
            "139GiB"
        )
    return int(float(found[1]) * UNITS[found[2]])


def crew_memory(config: CrewConfig, memory: int = 0, only: str = "") -> list[PeerMemory]:
    """Of each peer, or of one. `memory`: bytes of the GPU that it will run on; 0: this machine's
    own devices.
    """
    names = [peer.name for peer in config.peer]
    if only and only not in names:
        raise ValueError(f"--peer {only!r} is not in this crew; it has {', '.join(names)}")
    task = load_task(config.crew.task, config.task)
    return [
        _peer_memory(config, peer, task, memory) for peer in config.peer if only in ("", peer.name)
    ]


def _peer_memory(config: CrewConfig, peer: PeerConfig, task: Task, memory: int) -> PeerMemory:
    asked = _Weighed(config, peer, _prompt_sizes(config, peer, task), _device(config, peer, memory))
    changes = []
    best = asked
    if not asked.fits:
        for words, change in _remedies(asked):
            best = change(best)
            gib = round(best.takes.nbytes / GIB, 2)
            changes.append(MemoryChange(peer.name, words, gib, best.fits))
            if best.fits:
                break
    return PeerMemory(peer.name, asked.device, asked.token_budget, asked.takes, tuple(changes))


@dataclass(frozen=True, slots=True)
class _Weighed:
    """A peer as a crew file has it, or with changes."""

    config: CrewConfig
    peer: PeerConfig
    prompts: _PromptSizes
    device: DeviceMemory
    budget: int = 0  # instead of the crew file's

    @property
    def fits(self) -> bool:
        return self.takes.nbytes <= self.device.nbytes

    @property
    def model(self) -> PeerConfig:
        """Whose model it has."""
        return self.config.named(self.config.student_of(self.peer.name))

    @property
    def shape(self) -> ModelShape:
        model = self.model if self.peer.follows else self.peer
        return _trained_shape(model.model, model.keep_layers, model.train)

    @property
    def arithmetic(self) -> Arithmetic:
        is_half = self.peer.dtype in HALF_TYPES or (
            self.peer.dtype == "auto" and self.device.is_gpu and not is_tiny(self.model.model)
        )
        known = not why_unknown(_empty(self.model.model, self.model.keep_layers))
        return Arithmetic(2 if is_half else 4, fused=is_half and self.device.is_gpu and known)

    @property
    def settings(self) -> MemorySettings:
        row = self.config.crew
        method = objective(row.objective, row.variant, self.config.objective)
        settings = MemorySettings(
            reference=method.penalty.needs_reference,
            masters=2 if self.peer.masters == "bfloat16" else 4,
            upkeep=Upkeep(kind=self.peer.optimizer, offload=self.peer.offload),
        )
        recomputes = self.peer.gradient_checkpointing is True
        if self.peer.gradient_checkpointing == AUTO:
            recomputes = self._fitting(settings) < (self._wanted or ENOUGH_TOKENS)
        return replace(settings, checkpointed=recomputes)

    @property
    def _wanted(self) -> int:
        return self.budget or self.config.learning.token_budget

    @property
    def token_budget(self) -> int:
        return self._wanted or self._fitting(self.settings)

    def _fitting(self, settings: MemorySettings) -> int:
        """As `learning.fitting` would find it."""
        shape, arithmetic = self.shape, self.arithmetic
        values = shape.num_trained + shape.beside + shape.in_four_bits + shape.frozen
        if values < TINY_PARAMETERS:
            return TINY_TOKENS
        held = weight_bytes(shape, arithmetic, settings) + trained_bytes(shape, settings)
        held += moment_bytes(shape.trained, settings.upkeep)
        room, budget = SHARE * (self.device.nbytes - held), LEAST_TOKENS
        while budget < MOST_TOKENS and self._kept(2 * budget, settings) <= room:
            budget *= 2
        return budget

    def _kept(self, tokens: int, settings: MemorySettings) -> int:
        one = StepShape(prompts=tokens, group=1, prompt_tokens=1, tokens=1, token_budget=tokens)
        return kept_bytes(self.shape, self.arithmetic, settings.checkpointed, one)

    @property
    def takes(self) -> Footprint:
        crew, tokens = self.config.crew, self.config.sampling.max_tokens
        step = StepShape(
            prompts=crew.problems_per_round,
            group=crew.group_size,
            prompt_tokens=self.prompts.longest,
            tokens=tokens,
            token_budget=self.token_budget,
        )
        # a learner samples nothing but what it is measured by, and nobody measures a sampler
        learns = self.peer.role != "sampler"
        prompts = self.config.problems_per_peer if self.peer.role != "learner" else 0
        measured = self.prompts.measured if learns else 0
        engine = EngineShape(
            prompts=max(prompts, measured),
            rows=max(prompts * self.config.rollouts_per_group, measured),
            prompt_tokens=self.prompts.longest,
            tokens=tokens,
        )
        is_ours = isinstance(self.peer.engine, str)
        return footprint(
            self.shape,
            self.arithmetic,
            self.settings,
            step if learns else None,
            engine if is_ours else None,
        )

    def with_peer(self, **keys: object) -> _Weighed:
        return replace(self, peer=msgspec.structs.replace(self.peer, **keys))


def _remedies(asked: _Weighed) -> Iterator[tuple[str, Callable[[_Weighed], _Weighed]]]:
    """What helps, the mildest first. Each is taken beside those before it."""
    peer = asked.peer
    if peer.role == "sampler":
        return
    budget = asked.token_budget
    while budget > LEAST_TOKENS and not replace(asked, budget=budget).fits:
        budget //= 2
    if budget < asked.token_budget:
        yield f"learning.token_budget = {budget}", lambda one: replace(one, budget=budget)
    if peer.gradient_checkpointing is not True:
        yield (
            "gradient_checkpointing = true",
            lambda one: one.with_peer(gradient_checkpointing=True),
        )
    if peer.optimizer == "adamw" and not peer.offload:
        yield 'optimizer = "adamw8bit"', lambda one: one.with_peer(optimizer="adamw8bit")
    if peer.masters == "float32" and peer.train == "full" and peer.optimizer != "adafactor":
        words = 'masters = "bfloat16" with dtype = "bfloat16"'
        yield words, lambda one: one.with_peer(masters="bfloat16", dtype="bfloat16")
    if not peer.offload and peer.optimizer != "adafactor":
        yield "offload = true", lambda one: one.with_peer(offload=True)
    lora = peer.train.lora if isinstance(peer.train, TrainPart) else Lora(rank=16)
    if isinstance(peer.train, str):
        yield (
            "train = { lora = { rank = 16 } }",
            lambda one: one.with_peer(train=TrainPart(lora=lora), masters="float32"),
        )
    known = not why_unknown(_empty(peer.model, peer.keep_layers))
    if lora is not None and not lora.bits and known and peer.devices == 1:
        few = TrainPart(lora=msgspec.structs.replace(lora, bits=4))
        yield (
            "bits = 4 in train = { lora = { … } }",
            lambda one: one.with_peer(train=few, masters="float32"),
        )


# Sizes


class _PromptSizes(NamedTuple):
    longest: int  # tokens
    measured: int  # prompts at a time


def _prompt_sizes(config: CrewConfig, peer: PeerConfig, task: Task) -> _PromptSizes:
    """Of what a run measures, and of as many problems of every other split."""
    model = config.named(config.student_of(peer.name)).model
    prompts = Prompts.of(vocabulary_of(model, config.prompt), config.prompt, task)
    per_kind = config.evaluate.problems
    drawn = {split: evaluation_set(task, split, per_kind) for split in task.splits}
    return _PromptSizes(
        max(len(prompts.ids(problem)) for problems in drawn.values() for problem in problems),
        min(AT_ONCE, max(len(drawn.get(split, ())) for split in ("heldout", "ood"))),
    )


def _device(config: CrewConfig, peer: PeerConfig, memory: int) -> DeviceMemory:
    small = is_tiny(config.named(config.student_of(peer.name)).model)
    on_cpu = peer.device == "cpu" or (small and peer.device == "auto")
    if memory and not on_cpu:
        return DeviceMemory(peer.device, memory, is_gpu=True)
    if peer.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"peer {peer.name}: device={peer.device!r}, and torch finds no CUDA GPU here; say what "
            "its GPU has, such as --memory 80GiB"
        )
    device = choose_device(peer.device, small)
    return DeviceMemory(peer.device, int(free_bytes(device)), device.type == "cuda")


@lru_cache(maxsize=8)
def _empty(model: str, layers: int) -> PreTrainedModel:
    """A model without its values. `layers`: that are kept of it; 0: all."""
    if is_tiny(model):
        with torch.device("meta"):
            empty: PreTrainedModel = tiny_model(model.removeprefix(TINY), seed=0)
    else:
        empty = empty_model(read_shape(find(model)))
    if layers:
        keep_layers(empty, layers)
    return empty


@lru_cache(maxsize=16)
def _trained_shape(model: str, layers: int, train: str | TrainPart) -> ModelShape:
    empty = copy.deepcopy(_empty(model, layers))
    config = empty.config.get_text_config()
    return shape_of(choose_trained(empty, train, seed=0), config)
