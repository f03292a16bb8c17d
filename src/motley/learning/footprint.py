"""Footprint: what a peer takes of a device's memory, by part, from sizes alone.

Owns the formulas. Computes nothing with a model and loads none: a model on torch's meta device has
all that is asked of it. What is counted is tensors; an allocator's own loss is a share of them.

Two computations have formulas of their own: ours in a GPU's half type (`compute.fused`), and ours
by torch's operations (`compute.scoring`). A model's own code is taken to keep as much as the
latter. Sizes of a step are its largest: all completions as long as they may be, none alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import Tensor, nn
from transformers import PretrainedConfig

from motley.compute.graphs import FILLER
from motley.compute.logprobs import LOGITS_AT_ONCE, LOGITS_AT_ONCE_GPU
from motley.compute.shared_prefixes import ROW_TOKENS
from motley.learning.descent import Upkeep, moment_bytes
from motley.learning.lean import AT_ONCE
from motley.models.four_bits import BYTES_IN_MAKING, BYTES_PER_VALUE, FourBitLinear

FULL = 4  # bytes of a float32
CONTEXT = 1 << 29  # what CUDA, cuBLAS and our kernels take before there is any tensor
LOST = 0.06  # of what an allocator gives out: blocks that nothing fits into
PROMPT_STEP = 64  # an engine on a GPU makes room for prompts in these
PAGE = 32  # and for completions in these
PREFILL_TOKENS = 1 << 15  # and reads as many tokens of them at once
PASSES = 3  # tables of logits that drawing a token has at once

When = Literal["always", "sampling", "learning"]


# What is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model decides its memory. Widths are values of one token."""

    layers: int
    kept_layers: int  # those behind whose input something trains
    hidden: int
    queries: int  # all heads together
    keys: int  # and as many values
    heads: int
    between: int  # the MLP's
    vocabulary: int
    norms_heads: bool  # queries and keys, before the rotation
    norms_after: bool  # what attention and MLP add
    takes: frozenset[str]  # inputs of linear layers that train: "qkv", "out", "gate_up", "down"
    ranks: int  # of all adapters together
    trained: tuple[tuple[int, ...], ...]  # shapes
    beside: int  # values of linear layers beside an adapter, but for those in 4 bits
    in_four_bits: int  # values
    largest_in_four_bits: int  # values of one layer
    frozen: int  # further values that do not train
    head_trains: bool
    embedding: int  # values
    linear: int  # values that products are made with, but for the vocabulary's

    @property
    def num_trained(self) -> int:
        return sum(map(math.prod, self.trained))


class Arithmetic(NamedTuple):
    """How a device computes."""

    half: int  # bytes of a value in a product: 2 in half types, 4 in float32
    fused: bool  # by our kernels, on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """What a crew file says about a peer's memory."""

    checkpointed: bool = False
    reference: bool = False  # an objective pulls toward the policy as it began
    masters: int = FULL  # bytes of a value of a matrix that trains
    upkeep: Upkeep = Upkeep()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Of what one step learns from."""

    prompts: int
    group: int
    prompt_tokens: int
    tokens: int  # of a completion
    token_budget: int

    @property
    def micro(self) -> StepShape:
        """A micro-batch: whole groups as many as fit, all about equally many; or a part of one."""
        group, whole = self.group, self.prompt_tokens + self.group * (self.tokens - 1)
        if whole <= self.token_budget:
            count = -(-self.prompts // (self.token_budget // whole))
            return replace(self, prompts=-(-self.prompts // count))
        while group > 2 and self.prompt_tokens + group * (self.tokens - 1) > self.token_budget:
            group = max(2, group // 4 * 2)
        return replace(self, prompts=1, group=group)

    @property
    def packed_tokens(self) -> int:
        return self.prompts * (self.prompt_tokens + self.group * (self.tokens - 1))

    @property
    def targets(self) -> int:
        return self.prompts * self.group * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The largest of all calls of the built-in engine, each number by itself: one room on a GPU is
    for all of them.
    """

    prompts: int
    rows: int  # completions
    prompt_tokens: int
    tokens: int


# What is answered


class MemoryPart(NamedTuple):
    name: str
    nbytes: int
    when: When = "always"


@dataclass(frozen=True, slots=True)
class Footprint:
    parts: tuple[MemoryPart, ...]

    @property
    def nbytes(self) -> int:
        """At the fullest moment."""
        return self.of("always") + max(self.of("sampling"), self.of("learning"))

    def of(self, *names: str) -> int:
        """All parts of a name, or of a time."""
        return sum(part.nbytes for part in self.parts if {part.name, part.when} & {*names})

    def __getitem__(self, name: str) -> int:
        return self.of(name)


def footprint(
    shape: ModelShape,
    arithmetic: Arithmetic,
    settings: MemorySettings,
    step: StepShape | None,
    engine: EngineShape | None,
) -> Footprint:
    """By part. `step` None: it only samples; `engine` None: its own server does."""
    parts: list[MemoryPart] = [MemoryPart("weights", weight_bytes(shape, arithmetic, settings))]
    making = BYTES_IN_MAKING + arithmetic.half
    parts.append(MemoryPart("weights in full", making * shape.largest_in_four_bits))
    if step is not None:
        parts += _learning(shape, arithmetic, settings, step)
    if engine is not None:
        parts += _sampling(shape, arithmetic, engine)
    if arithmetic.fused:
        parts.append(MemoryPart("CUDA", CONTEXT))
        both = Footprint(tuple(parts)).nbytes
        parts.append(MemoryPart("lost to blocks", int(LOST * both)))
    return Footprint(tuple(part for part in parts if part.nbytes))


# Weights


def weight_bytes(shape: ModelShape, arithmetic: Arithmetic, settings: MemorySettings) -> int:
    """The policy's own: what trains in the masters' type, linear layers beside an adapter in that
    of the arithmetic or in 4 bits, and the rest in float32.
    """
    return (
        trained_bytes(shape, settings)
        + FULL * shape.frozen
        + arithmetic.half * shape.beside
        + int(BYTES_PER_VALUE * shape.in_four_bits)
    )


def trained_bytes(shape: ModelShape, settings: MemorySettings) -> int:
    """Of what trains, and again of its gradient. Vectors are float32 whatever the masters are."""
    return sum(
        math.prod(one) * (settings.masters if len(one) > 1 else FULL) for one in shape.trained
    )


def _learning(
    shape: ModelShape, arithmetic: Arithmetic, settings: MemorySettings, step: StepShape
) -> Iterator[MemoryPart]:
    yield MemoryPart("gradients", trained_bytes(shape, settings))
    yield MemoryPart("optimiser", moment_bytes(shape.trained, settings.upkeep))
    if settings.upkeep.offload:  # parts of values, gradients and moments, on their way
        yield MemoryPart("moments that visit", 4 * FULL * AT_ONCE, "learning")
    if settings.reference:
        yield MemoryPart("reference", arithmetic.half * shape.num_trained)
    rounded = rounded_bytes(shape, arithmetic, settings)
    if settings.checkpointed and not arithmetic.fused:  # autocast rounds a layer when it comes
        rounded //= shape.layers
    yield MemoryPart("rounded weights", rounded, "learning")
    micro = step.micro
    # of all but the first layers nothing is left when gradients are rounded up; so either
    making = _making_bytes(shape, arithmetic, settings)
    kept = kept_bytes(shape, arithmetic, settings.checkpointed, micro)
    yield MemoryPart("activations", max(kept, making), "learning")
    yield MemoryPart("log-probs", logprob_bytes(shape, arithmetic, micro), "learning")


def rounded_bytes(shape: ModelShape, arithmetic: Arithmetic, settings: MemorySettings) -> int:
    """What a pass multiplies with, where that is not what is kept."""
    if arithmetic.half == FULL or settings.masters < FULL:
        return 0
    return arithmetic.half * (shape.linear - shape.beside - shape.in_four_bits + _adapters(shape))


def _adapters(shape: ModelShape) -> int:
    return shape.num_trained if shape.beside or shape.in_four_bits else 0


def _making_bytes(shape: ModelShape, arithmetic: Arithmetic, settings: MemorySettings) -> int:
    """Gradients on their way: as the products made them, then in the masters' type, before they
    are added to the others.
    """
    rounded = arithmetic.half if settings.masters == FULL else 0
    return (rounded + settings.masters) * shape.num_trained if arithmetic.fused else 0


# Activations


def kept_bytes(
    shape: ModelShape, arithmetic: Arithmetic, checkpointed: bool, micro: StepShape
) -> int:
    """What the layers keep of a micro-batch until its backward pass."""
    layer = layer_bytes(shape, arithmetic, micro)
    if not shape.kept_layers:
        return 0
    if not checkpointed:
        return shape.kept_layers * layer
    entering = FULL + (arithmetic.half if arithmetic.fused else 0)  # with a sum that is still due
    return shape.kept_layers * entering * shape.hidden * _tokens(arithmetic, micro) + layer


def layer_bytes(shape: ModelShape, arithmetic: Arithmetic, micro: StepShape) -> int:
    """What one layer keeps."""
    per_token = _fused_layer(shape) if arithmetic.fused else _plain_layer(shape, arithmetic)
    attended = 0 if arithmetic.fused else _plain_attention(shape, arithmetic, micro)
    return int(per_token * _tokens(arithmetic, micro) + attended)


def _tokens(arithmetic: Arithmetic, micro: StepShape) -> int:
    """On a GPU graphs are of a few sizes, at most an eighth apart; a filler is always there."""
    tokens = micro.packed_tokens
    return tokens + (tokens // 16 + FILLER if arithmetic.fused else 0)


def _fused_layer(shape: ModelShape) -> float:
    """Of a token: what `fused` and `flash` save."""
    half, takes = 2, shape.takes
    sums = 2 * FULL * (shape.hidden + 1)  # float32, before either norm, and its inverse norm
    if shape.norms_after:
        sums += 2 * half * shape.hidden
    normed = half * shape.hidden * (("qkv" in takes) + ("gate_up" in takes))
    heads = shape.queries + shape.keys
    turned = half * (heads + shape.keys) + half * shape.queries + FULL * shape.heads
    if shape.norms_heads:
        turned += FULL * heads
    gated = half * shape.between * (2 + (bool(shape.ranks) and "down" in takes))
    return sums + normed + turned + gated + half * shape.ranks / shape.layers


def _plain_layer(shape: ModelShape, arithmetic: Arithmetic) -> float:
    """Of a token: what torch's operations save, but for the attention."""
    half, takes = arithmetic.half, shape.takes
    # autocast rounds an input once for each layer that takes it
    qkv, gate_up = (3, 2) if half < FULL else (1, 1)
    sums = 2 * FULL * (shape.hidden + 1)
    if shape.norms_after:
        sums += 2 * FULL * (shape.hidden + 1)
    normed = half * shape.hidden * (qkv * ("qkv" in takes) + gate_up * ("gate_up" in takes))
    heads = half * shape.queries * ("out" in takes)
    if shape.norms_heads:
        heads += FULL * (shape.queries + shape.keys + 2 * shape.heads)
    gated = half * shape.between * (3 + ("down" in takes))
    return sums + normed + heads + gated + half * shape.ranks / shape.layers


def _plain_attention(shape: ModelShape, arithmetic: Arithmetic, micro: StepShape) -> int:
    """Queries and outputs, keys and values laid out in padded rows.

    Short completions of a prompt share a row, and every row has the prompt's keys before its own.
    """
    inputs = micro.tokens - 1
    a_row = min(micro.group, max(1, ROW_TOKENS // inputs)) if inputs else 1
    rows = micro.prompts * -(-micro.group // a_row)
    queries = micro.prompts * micro.prompt_tokens + rows * a_row * inputs
    keys = queries + rows * micro.prompt_tokens
    mask = 0
    if arithmetic.half < FULL:  # rounded anew in every layer
        mask = rows * a_row * inputs * (micro.prompt_tokens + a_row * inputs)
    return (
        arithmetic.half * (2 * shape.queries * queries + 2 * shape.keys * keys + mask)
        + FULL * shape.heads * queries
    )


def logprob_bytes(shape: ModelShape, arithmetic: Arithmetic, micro: StepShape) -> int:
    """From the last hidden states to log-probs: states, the head as it multiplies, and one chunk of
    logits with their gradient.
    """
    width, targets = shape.hidden, micro.targets
    states = (FULL * _tokens(arithmetic, micro) + (FULL + arithmetic.half) * targets) * width
    head = shape.vocabulary * width
    making = FULL * head if shape.head_trains else 0
    if arithmetic.fused:
        rows = max(1, min(targets, LOGITS_AT_ONCE_GPU // shape.vocabulary))
        logits = rows * shape.vocabulary * (FULL + arithmetic.half)
        return states + arithmetic.half * head + making + logits
    rows = max(1, min(targets, LOGITS_AT_ONCE // shape.vocabulary))
    return states + making + 2 * FULL * rows * shape.vocabulary


# Sampling


def _sampling(
    shape: ModelShape, arithmetic: Arithmetic, engine: EngineShape
) -> Iterator[MemoryPart]:
    yield MemoryPart("engine's weights", snapshot_bytes(shape, arithmetic))
    rows, half = engine.rows, arithmetic.half
    kept = 2 * shape.keys * shape.layers * half
    tables = rows * engine.tokens * 20 + 2 * FULL * (engine.prompt_tokens + engine.tokens)
    if not arithmetic.fused:
        # every sample becomes a branch of its own, made beside the ones before it
        places = (engine.prompt_tokens + engine.tokens) * rows
        yield MemoryPart(
            "keys and values", kept * places * (shape.layers + 1) // shape.layers, "sampling"
        )
        logits = min(rows, LOGITS_AT_ONCE // shape.vocabulary + 1) * shape.vocabulary
        yield MemoryPart("drawing", PASSES * 2 * FULL * logits + tables, "sampling")
        return
    long = -(-engine.prompt_tokens // PROMPT_STEP) * PROMPT_STEP
    own = -(-engine.tokens // PAGE) * PAGE if engine.tokens > PAGE else engine.tokens
    places = engine.prompts * long + (rows + 1) * own
    yield MemoryPart("keys and values", kept * places + tables)
    # the graphs' own memory: one step of all rows, and prompts being read
    read = min(PREFILL_TOKENS, engine.prompts * engine.prompt_tokens)
    widest = FULL * 2 * shape.hidden + half * (shape.queries + 2 * shape.keys + 2 * shape.between)
    yield MemoryPart("engine's graphs", PASSES * FULL * rows * shape.vocabulary + rows * widest)
    yield MemoryPart("reading prompts", read * widest, "sampling")


def snapshot_bytes(shape: ModelShape, arithmetic: Arithmetic) -> int:
    """The weights that an engine samples with, beside the policy's: linear layers in the type of
    the arithmetic, but for those in 4 bits, and beside an adapter in half types; embeddings in
    float32; a head.
    """
    shared = shape.in_four_bits + (shape.beside if arithmetic.half < FULL else 0)
    head = arithmetic.half if arithmetic.fused else FULL
    # those of one input are one, with zeros where they do not meet: about half as much again
    apart = arithmetic.half < FULL or shape.in_four_bits
    adapters = arithmetic.half * _adapters(shape) * 3 // 2 if apart else 0
    return (
        arithmetic.half * (shape.linear - shared)
        + adapters
        + FULL * shape.embedding
        + head * shape.vocabulary * shape.hidden
    )


# A model's shape

_INPUTS = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "out",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
}


def shape_of(model: nn.Module, config: PretrainedConfig) -> ModelShape:
    """Of a model with what trains chosen; its weights may be on the meta device.

    `config`: of its text part.
    """
    held = [part for part in model.modules() if isinstance(part, FourBitLinear)]
    packed = {id(p) for part in held for p in (part.code, part.scale)}
    named = {name: p for name, p in model.named_parameters() if id(p) not in packed}
    in_four_bits = [part.out_features * part.in_features for part in held]
    trains = {name: p for name, p in named.items() if p.requires_grad}
    beside = {name for name in named if name.endswith("base_layer.weight")} - trains.keys()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer_numbers = [number for name in trains if (number := _layer_number(name)) is not None]
    embedding = _tensor(model, "get_input_embeddings")
    head = _tensor(model, "get_output_embeddings")
    below = embedding is not None and embedding.requires_grad
    first = 0 if below else min(layer_numbers, default=config.num_hidden_layers)
    inputs = {_INPUTS.get(part) for name in trains for part in name.split(".")} - {None}
    own_names = not any(part in _INPUTS for name in named for part in name.split("."))
    return ModelShape(
        layers=config.num_hidden_layers,
        kept_layers=config.num_hidden_layers - first,
        hidden=config.hidden_size,
        queries=heads * size,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * size,
        heads=heads,
        between=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocabulary=config.vocab_size,
        norms_heads=any(".q_norm." in name for name in named),
        norms_after=any(".pre_feedforward_layernorm." in name for name in named),
        takes=frozenset(_INPUTS.values()) if own_names else frozenset(map(str, inputs)),
        ranks=sum(len(p) for name, p in trains.items() if ".lora_A." in name),
        trained=tuple(tuple(p.shape) for p in trains.values()),
        beside=sum(named[name].numel() for name in beside),
        in_four_bits=sum(in_four_bits),
        largest_in_four_bits=max(in_four_bits, default=0),
        frozen=sum(
            p.numel() for name, p in named.items() if name not in trains and name not in beside
        ),
        head_trains=head is not None and head.requires_grad,
        embedding=0 if embedding is None else embedding.numel(),
        linear=sum(in_four_bits)
        + sum(
            p.numel()
            for name, p in named.items()
            if p.dim() > 1 and p is not head and p is not embedding and ".lora_" not in name
        ),
    )


def _tensor(model: nn.Module, getter: str) -> Tensor | None:
    inner = getattr(model, "get_base_model", lambda: model)()
    weight: Tensor | None = getattr(getattr(inner, getter)(), "weight", None)
    return weight


def _layer_number(name: str) -> int | None:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else None
