"""Snapshot: a decoder's weights as an engine samples with them, apart from those that train
meanwhile.

Projections over the same input are fused into one, rounded as the trainer rounds them; norms'
scales stay apart from them for the same reason. LoRA adapters are merged in float32, and stay apart
where weights are rounded: a small change would be lost in the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from motley.policies.decoder import Block, Decoder, Linear, Norm


@dataclass(frozen=True, slots=True)
class Projection:
    weight: Tensor
    bias: Tensor | None = None
    lora_A: Tensor | None = None  # [rank, in]
    lora_B: Tensor | None = None  # [out, rank], its scale in it

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return (
            y
            if self.lora_A is None or self.lora_B is None
            else y + F.linear(F.linear(x, self.lora_A), self.lora_B)
        )

    def add(self, hidden: Tensor, x: Tensor) -> Tensor:
        """hidden + self(x), the sum in float32 whatever the product is made in."""
        if hidden.dtype == self.weight.dtype and self.lora_A is None and self.bias is None:
            return torch.addmm(hidden, x, self.weight.T)
        return hidden + self(x)


@dataclass(frozen=True, slots=True)
class Layer:
    """A block with its projections fused and its norms as float32 scales."""

    attention_norm: Tensor
    qkv: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Projection
    after_attention: Tensor | None
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    after_mlp: Tensor | None
    scaling: float
    window: int | None
    rotation: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    layers: tuple[Layer, ...]
    embedding: Tensor  # float32, scaled
    norm: Tensor
    head: Tensor
    eps: float

    @classmethod
    @torch.no_grad()
    def of(cls, decoder: Decoder, dtype: torch.dtype, head_dtype: torch.dtype) -> Snapshot:
        return cls(
            layers=tuple(_layer(block, dtype) for block in decoder.blocks),
            embedding=(decoder.embedding.float() * decoder.embed_scale).clone(),
            norm=_scale(decoder.norm),
            head=decoder.head.to(head_dtype, copy=True),
            eps=decoder.norm.eps,
        )

    @torch.no_grad()
    def refresh(self, decoder: Decoder) -> None:
        """Take the decoder's present weights where the old ones stand: whoever holds these tensors
        sees the new ones.
        """
        for layer, block in zip(self.layers, decoder.blocks, strict=True):
            for field in fields(Layer):
                old, new = getattr(layer, field.name), getattr(block, field.name)
                if isinstance(old, Projection):
                    _refresh(old, new if field.name in ("qkv", "gate_up") else (new,))
                elif isinstance(old, Tensor):
                    old.copy_(new.scale)
        self.embedding.copy_(decoder.embedding)
        if decoder.embed_scale != 1:
            self.embedding.mul_(decoder.embed_scale)
        self.norm.copy_(decoder.norm.scale)
        self.head.copy_(decoder.head)


def _refresh(projection: Projection, linears: Sequence[Linear]) -> None:
    if any(linear.adapters for linear in linears) or projection.bias is not None:
        for old, new in zip(
            _tensors(projection), _tensors(_fused(linears, projection.weight.dtype)), strict=True
        ):
            old.copy_(new)
        return
    torch._foreach_copy_(
        list(projection.weight.split([len(linear.weight) for linear in linears])),
        [linear.weight for linear in linears],
    )


def _tensors(projection: Projection) -> Iterator[Tensor]:
    return (
        value
        for field in fields(Projection)
        if (value := getattr(projection, field.name)) is not None
    )


def _layer(block: Block, dtype: torch.dtype) -> Layer:
    optional = lambda norm: None if norm is None else _scale(norm)
    return Layer(
        attention_norm=_scale(block.attention_norm),
        qkv=_fused(block.qkv, dtype),
        query_norm=optional(block.query_norm),
        key_norm=optional(block.key_norm),
        out=_fused((block.out,), dtype),
        after_attention=optional(block.after_attention),
        mlp_norm=_scale(block.mlp_norm),
        gate_up=_fused(block.gate_up, dtype),
        down=_fused((block.down,), dtype),
        after_mlp=optional(block.after_mlp),
        scaling=block.scaling,
        window=block.window,
        rotation=block.rotation,
    )


def _scale(norm: Norm) -> Tensor:
    return norm.scale.detach().float().clone()


def _fused(linears: Sequence[Linear], dtype: torch.dtype) -> Projection:
    """Projections over the same input as one: merged with their adapters in float32, and with them
    apart where it is rounded.
    """
    biases = [linear.bias for linear in linears]
    bias = (
        None
        if all(b is None for b in biases)
        else torch.cat([_or_zeros(linear) for linear in linears]).to(dtype)
    )
    if dtype == torch.float32 or not any(linear.adapters for linear in linears):
        return Projection(torch.cat([_merged(linear) for linear in linears]).to(dtype), bias)
    weights = [linear.weight.detach() for linear in linears]
    down, up = [], []
    for row, linear in enumerate(linears):
        for adapter in linear.adapters:
            down.append(adapter.A)
            # acts on its own projection's outputs only
            column = [adapter.B.new_zeros(len(w), adapter.B.shape[1]) for w in weights]
            column[row] = adapter.B * adapter.scaling
            up.append(torch.cat(column))
    return Projection(
        torch.cat([w.to(dtype) for w in weights]),
        bias,
        torch.cat(down).to(dtype),
        torch.cat(up, 1).to(dtype),
    )


def _merged(linear: Linear) -> Tensor:
    weight = linear.weight.detach().float()
    for adapter in linear.adapters:
        weight = weight + (adapter.B @ adapter.A).float() * adapter.scaling
    return weight


def _or_zeros(linear: Linear) -> Tensor:
    return (
        linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias.detach()
    )
