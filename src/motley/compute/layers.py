"""A transformer's layer, and the one walk through it that training and every engine take.

Owns what a layer is made of (norms, projections, how it attends) and the order of its steps. How
steps are computed is a `Pass`: plain, by kernels, over a cache. Knows no transformers model, which
`decoder` reads as layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from motley.compute.parts import rms_norm
from motley.models.four_bits import FourBits

State = TypeVar("State")  # what a pass carries from layer to layer: hidden states, or more


class Norm(NamedTuple):
    """x / rms(x) · (weight + offset)."""

    weight: Tensor
    offset: float
    eps: float

    @property
    def scale(self) -> Tensor:
        return self.weight + self.offset if self.offset else self.weight

    def __call__(self, x: Tensor) -> Tensor:
        """In float32."""
        if x.device.type == "cpu":
            return rms_norm(x.float(), self.scale.float(), self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], self.scale, self.eps)


class Adapter(NamedTuple):
    """Adds scaling · B(A(x))."""

    A: Tensor
    B: Tensor
    scaling: float

    def __call__(self, x: Tensor) -> Tensor:
        made = F.linear(F.linear(x, self.A), self.B)
        return made if self.scaling == 1 else made * self.scaling


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer, or several over the same input as one: their outputs side by side.

    Queries, keys and values of widths 8, 4 and 4 as one: `sizes=(8, 4, 4)`, and one weight of 16
    rows or three of 8, 4 and 4.
    """

    weights: tuple[Tensor | FourBits, ...]  # one for all, or one for each
    bias: Tensor | None
    sizes: tuple[int, ...]  # of each one's output
    adapters: tuple[tuple[Adapter, ...], ...]  # beside each

    @property
    def weight(self) -> Tensor:
        """The one for all, where it is there in full."""
        (weight,) = self.weights
        assert isinstance(weight, Tensor)
        return weight

    @property
    def in_four_bits(self) -> bool:
        """Whether its weights are made in full for every product; they never train."""
        return isinstance(self.weights[0], FourBits)

    @property
    def is_bare(self) -> bool:
        """Whether it is its weight in full, and nothing beside."""
        return self.bias is None and not any(self.adapters) and not self.in_four_bits

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.weights) == 1:
            y = _product(x, self.weights[0], self.bias)
        else:
            y = torch.cat([_product(x, weight) for weight in self.weights], 1)
            y = y if self.bias is None else y + self.bias
        if not any(self.adapters):
            return y
        if len(self.adapters) == 1:
            for adapter in self.adapters[0]:
                y = y + adapter(x)
            return y
        return y + torch.cat(
            [_adapted(x, *each) for each in zip(self.adapters, self.sizes, strict=True)], 1
        )


def _product(x: Tensor, weight: Tensor | FourBits, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, FourBits):
        return weight.product(x, bias)
    return F.linear(x, weight, bias)


def _adapted(x: Tensor, adapters: tuple[Adapter, ...], size: int) -> Tensor:
    parts = [adapter(x) for adapter in adapters]
    return sum(parts[1:], parts[0]) if parts else x.new_zeros(len(x), size)


class Heads(NamedTuple):
    """How a layer's products fall into heads: those of queries, then of keys, then of values."""

    queries: int
    keys: int  # and as many of values
    size: int  # of a head

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.queries, self.keys, self.keys

    @property
    def rotated(self) -> int:
        return self.queries + self.keys


class Rotation(NamedTuple):
    """cos and sin of positions, as wide as a head."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """hidden += after_attention(out(attend(qkv(attention_norm(hidden))))), then the same with the
    MLP.
    """

    index: int  # its place in the model
    attention_norm: Norm
    qkv: tuple[Projection, ...]  # queries', keys' and values', or one for all
    query_norm: Norm | None  # over each head, before the rotation
    key_norm: Norm | None
    out: Projection
    after_attention: Norm | None
    mlp_norm: Norm
    gate_up: tuple[Projection, ...]  # gates' and ups', or one for both
    down: Projection
    after_mlp: Norm | None
    scaling: float  # of a query's product with a key
    window: int | None  # how many positions back a token sees, itself included
    rotation: str  # which of the decoder's rotations

    @property
    def projections(self) -> tuple[tuple[Projection, ...], ...]:
        """Those of one input together."""
        return self.qkv, (self.out,), self.gate_up, (self.down,)


class Deferred(NamedTuple):
    """Hidden states, and after(x) still to be added to them: a kernel does it with the norm that
    follows.
    """

    hidden_ND: Tensor
    x_ND: Tensor | None = None
    after: Norm | None = None


class Pass(Protocol[State]):
    """One forward pass: how it computes a layer's projections and what lies between them."""

    def norm(self, state: State, norm: Norm) -> tuple[State, Tensor]:
        """The hidden states' norm, as the next projection takes it."""
        ...

    def attend(self, layer: Layer, x: Tensor) -> Tensor:
        """From what `layer.qkv` takes to what `layer.out` takes."""
        ...

    def gate(self, layer: Layer, x: Tensor) -> Tensor:
        """From what `layer.gate_up` takes to what `layer.down` takes."""
        ...

    def add(self, state: State, projection: Projection, x: Tensor, after: Norm | None) -> State:
        """The hidden states and after(projection(x)): a pass may do it with the norm to come."""
        ...


def walk_layer(forward: Pass[State], layer: Layer, state: State) -> State:
    state, normed = forward.norm(state, layer.attention_norm)
    mixed = forward.attend(layer, normed)
    state = forward.add(state, layer.out, mixed, layer.after_attention)
    state, normed = forward.norm(state, layer.mlp_norm)
    gated = forward.gate(layer, normed)
    return forward.add(state, layer.down, gated, layer.after_mlp)


WalkLayer = Callable[[Any, Layer, Any], Any]  # what `walk_layer` does, with something around it


def walk(
    forward: Pass[State],
    layers: Sequence[Layer],
    state: State,
    checkpointed: bool = False,
    through: WalkLayer = walk_layer,
) -> State:
    """Through all layers.

    `checkpointed`: keep only what enters a layer, and walk through it again for the gradient.
    `through`: how one layer is walked through, where its weights must come first.
    """
    for layer in layers:
        if checkpointed:  # nothing here is random
            state = checkpoint(
                through, forward, layer, state, use_reentrant=False, preserve_rng_state=False
            )
        else:
            state = through(forward, layer, state)
    return state
