"""Snapshot: a decoder's weights as an engine samples with them, apart from those that train
meanwhile.

Projections over the same input are fused into one, rounded as the trainer rounds them; norms'
scales stay apart from them for the same reason. LoRA adapters are merged in float32, and stay apart
where weights are rounded: a small change would be lost in the rounding. What never changes and has
the type already, such as linear layers beside an adapter, is the policy's own and no copy. So are
those in 4 bits, in every type: they stay apart from their adapters and from each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor

from motley.compute.decoder import Decoder
from motley.compute.layers import Adapter, Layer, Norm, Projection


@dataclass(frozen=True, slots=True)
class Snapshot:
    layers: tuple[Layer, ...]  # with one projection for each input, and norms as float32 scales
    embedding: Tensor  # float32, scaled
    norm: Norm
    head: Tensor
    dtype: torch.dtype  # of products

    @classmethod
    @torch.no_grad()
    def of(cls, decoder: Decoder, dtype: torch.dtype, head_dtype: torch.dtype) -> Snapshot:
        return cls(
            layers=tuple(_held_layer(decoder, layer, dtype) for layer in decoder.layers),
            **_ends(decoder, head_dtype),
            dtype=dtype,
        )

    @torch.no_grad()
    def refresh(self, decoder: Decoder) -> None:
        """Take the decoder's present weights in place: whoever holds these tensors sees them."""
        for old, new in zip(self.layers, decoder.layers, strict=True):
            with decoder.held.holding(new.index):
                _refresh_layer(old, new, self.dtype)
        with decoder.held.holding(None):
            self.embedding.copy_(decoder.embedding)
            if decoder.embed_scale != 1:
                self.embedding.mul_(decoder.embed_scale)
            self.norm.weight.copy_(decoder.norm.scale)
            self.head.copy_(decoder.head)


class _Ends(TypedDict):
    embedding: Tensor
    norm: Norm
    head: Tensor


def _ends(decoder: Decoder, head_dtype: torch.dtype) -> _Ends:
    """What stands before and behind the layers."""
    with decoder.held.holding(None):
        return {
            "embedding": (decoder.embedding.float() * decoder.embed_scale).clone(),
            "norm": _kept_norm(decoder.norm),
            "head": decoder.head.to(head_dtype, copy=True),
        }


def _held_layer(decoder: Decoder, layer: Layer, dtype: torch.dtype) -> Layer:
    with decoder.held.holding(layer.index):
        return _kept_layer(layer, dtype)


def _refresh_layer(old: Layer, new: Layer, dtype: torch.dtype) -> None:
    for (kept,), linears in zip(old.projections, new.projections, strict=True):
        _refresh(kept, linears, dtype)
    for kept_norm, norm in zip(_norms(old), _norms(new), strict=True):
        kept_norm.weight.copy_(norm.scale)


def _norms(layer: Layer) -> list[Norm]:
    norms = (
        layer.attention_norm,
        layer.query_norm,
        layer.key_norm,
        layer.after_attention,
        layer.mlp_norm,
        layer.after_mlp,
    )
    return [norm for norm in norms if norm is not None]


def _refresh(kept: Projection, linears: Sequence[Projection], dtype: torch.dtype) -> None:
    if all(linear.is_bare for linear in linears):
        torch._foreach_copy_(
            list(kept.weight.split([len(linear.weight) for linear in linears])),
            [linear.weight for linear in linears],
        )
        return
    new = _fused(linears, dtype)
    for old, value in zip(_tensors(kept), _tensors(new), strict=True):
        if old.data_ptr() != value.data_ptr():  # shared ones are as they were
            old.copy_(value)


def _tensors(projection: Projection) -> Iterator[Tensor]:
    """What may change."""
    if not projection.in_four_bits:
        yield projection.weight
    if projection.bias is not None:
        yield projection.bias
    for (adapter,) in filter(None, projection.adapters):
        yield from (adapter.A, adapter.B)


def _kept_layer(layer: Layer, dtype: torch.dtype) -> Layer:
    optional = lambda norm: None if norm is None else _kept_norm(norm)
    qkv, out, gate_up, down = (_fused(linears, dtype) for linears in layer.projections)
    return replace(
        layer,
        attention_norm=_kept_norm(layer.attention_norm),
        qkv=(qkv,),
        query_norm=optional(layer.query_norm),
        key_norm=optional(layer.key_norm),
        out=out,
        after_attention=optional(layer.after_attention),
        mlp_norm=_kept_norm(layer.mlp_norm),
        gate_up=(gate_up,),
        down=down,
        after_mlp=optional(layer.after_mlp),
    )


def _kept_norm(norm: Norm) -> Norm:
    return Norm(norm.scale.detach().float().clone(), 0.0, norm.eps)


def _fused(linears: Sequence[Projection], dtype: torch.dtype) -> Projection:
    """Projections over the same input as one: merged with their adapters in float32, and with them
    apart where it is rounded or in 4 bits.
    """
    bias, size = _joined_bias(linears, dtype), sum(_width(linear) for linear in linears)
    if any(linear.in_four_bits for linear in linears):  # then all are: they have as many inputs
        weights = tuple(weight for linear in linears for weight in linear.weights)
        return Projection(weights, bias, (size,), (_joined_adapters(linears, dtype),))
    if dtype == torch.float32 or not any(any(linear.adapters) for linear in linears):
        weight = torch.cat([_merged(linear) for linear in linears]).to(dtype)
        return Projection((weight,), bias, (size,), ((),))
    own = [linear.weight.detach() for linear in linears]
    frozen = not any(linear.weight.requires_grad for linear in linears)
    shared = _in_a_row(own, dtype) if frozen else None
    weight = torch.cat([w.to(dtype) for w in own]) if shared is None else shared
    return Projection((weight,), bias, (size,), (_joined_adapters(linears, dtype),))


def _width(linear: Projection) -> int:
    return sum(linear.sizes)


def _joined_bias(linears: Sequence[Projection], dtype: torch.dtype) -> Tensor | None:
    given = next((linear.bias for linear in linears if linear.bias is not None), None)
    if given is None:
        return None
    each = [
        given.new_zeros(_width(linear)) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return torch.cat(each).to(dtype)


def _joined_adapters(linears: Sequence[Projection], dtype: torch.dtype) -> tuple[Adapter, ...]:
    """All adapters as one, if there is any."""
    down, up = [], []
    for row, linear in enumerate(linears):
        for adapter in linear.adapters[0]:
            down.append(adapter.A)
            # acts on its own projection's outputs only
            column = [adapter.B.new_zeros(_width(one), adapter.B.shape[1]) for one in linears]
            column[row] = adapter.B * adapter.scaling
            up.append(torch.cat(column))
    if not down:
        return ()
    return (Adapter(torch.cat(down).to(dtype), torch.cat(up, 1).to(dtype), 1.0),)


def _in_a_row(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """These weights as one, if they have the type and stand one behind the other in memory."""
    first, width, end = weights[0], weights[0].shape[1], weights[0].data_ptr()
    for weight in weights:
        if weight.dtype != dtype or not weight.is_contiguous() or weight.data_ptr() != end:
            return None
        if weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += weight.nbytes
    return first.as_strided((sum(map(len, weights)), width), (width, 1))


def _merged(linear: Projection) -> Tensor:
    weight = linear.weight.detach().float()
    (adapters,) = linear.adapters
    for adapter in adapters:
        weight = weight + (adapter.B @ adapter.A).float() * adapter.scaling
    return weight
