"""The forward of a known decoder in a half type, with gradient, for GPUs: by few kernels.

Differs from the plain one in `scoring`: dtypes are explicit instead of chosen by autocast; a pass
casts its weights once, all together, and those that multiply the same input are stacked; what lies
between two products is one kernel each way. Hidden states stay float32. Needs Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from motley.compute import kernels
from motley.compute.attention import PackedAttention, flashes
from motley.compute.decoder import Decoder
from motley.compute.flash import TurnedHeads, attend_turned
from motley.compute.layers import Adapter, Deferred, Layer, Norm, Projection, Rotation, walk
from motley.compute.packed import Packed


def fused_states(
    decoder: Decoder, packed: Packed, dtype: torch.dtype, checkpointed: bool
) -> Tensor:
    """Final hidden state of every packed token, in the dtype."""
    forward = _FusedPass(decoder, packed, dtype)
    state = Deferred(decoder.embed(packed.token_N))
    if decoder.held.always:
        state = walk(forward, cast_layers(decoder, dtype), state, checkpointed)
    else:  # a layer can be cast once its weights are there
        ready = lambda layer: cast_layers(decoder, dtype, [layer])[0]
        through = partial(decoder.held.walk_layer, ready=ready)
        state = walk(forward, decoder.layers, state, checkpointed, through)
    return forward.norm(state, decoder.norm)[1]


class _FusedPass:
    """By kernels: a sum and the norm behind it are one, so a sum waits for its norm."""

    def __init__(self, decoder: Decoder, packed: Packed, dtype: torch.dtype) -> None:
        self._heads, self._packed, self._dtype = decoder.heads, packed, dtype
        self._rotations = decoder.rotations(packed.position_N)
        self._attend = PackedAttention(packed)

    def norm(self, state: Deferred, norm: Norm) -> tuple[Deferred, Tensor]:
        if state.x_ND is None:
            return state, norm(state.hidden_ND).to(self._dtype)
        hidden_ND, normed_ND = add_norm(state.hidden_ND, state.x_ND, state.after, norm)
        return Deferred(hidden_ND), normed_ND

    def attend(self, layer: Layer, x: Tensor) -> Tensor:
        (qkv,) = layer.qkv
        heads, dtype, rotation = self._heads, self._dtype, self._rotations[layer.rotation]
        qkv_NHd = qkv(x).unflatten(1, (-1, heads.size))
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key, value = qkv_NHd.split(heads.counts, 1)
            qkv_NHd = torch.cat([layer.query_norm(query), layer.key_norm(key), value.float()], 1)
        if flashes(dtype, heads.size, qkv_NHd.device, self._packed, layer.window):
            turned = TurnedHeads(heads, rotation, dtype)
            return attend_turned(qkv_NHd, turned, self._packed, layer.scaling).flatten(1)
        rotated_NHd = rotate(qkv_NHd, rotation, heads.rotated, dtype)
        query, key, value = rotated_NHd.split(heads.counts, 1)
        return self._attend(query, key, value, layer.scaling, layer.window).flatten(1)

    def gate(self, layer: Layer, x: Tensor) -> Tensor:
        """Gates and ups as they are: the gate is in the product behind it."""
        (gate_up,) = layer.gate_up
        return gate_up(x)

    def add(
        self, state: Deferred, projection: Projection, x: Tensor, after: Norm | None
    ) -> Deferred:
        return Deferred(state.hidden_ND, projection(x), after)


@dataclass(frozen=True, slots=True)
class GatedProjection(Projection):
    """A projection of act(gate)·up, which takes the gates and then the ups of a row."""

    activation: str

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_bare:
            made: Tensor = _GatedLinear.apply(x, self.weight, self.activation)
            return made
        return Projection.__call__(self, gated(x, self.activation))


# Weights


def cast_layers(
    decoder: Decoder, dtype: torch.dtype, some: Sequence[Layer] | None = None
) -> list[Layer]:
    """The layers, or some of them, with all weights in the dtype.

    Those of one input are stacked, unless they have the dtype already and need no copy (under
    adapters), or are in 4 bits.
    """
    chosen = decoder.layers if some is None else some
    joined = [layer.projections for layer in chosen]
    groups = [group for four in joined for linears in four for group in _groups(linears, dtype)]
    cast = iter(_stacked(groups, dtype))
    layers = []
    for layer, four in zip(chosen, joined, strict=True):
        qkv, out, gate_up, down = (_projection(linears, cast, dtype) for linears in four)
        gated_down = GatedProjection(
            down.weights, down.bias, down.sizes, down.adapters, decoder.activation
        )
        layers.append(replace(layer, qkv=(qkv,), out=out, gate_up=(gate_up,), down=gated_down))
    return layers


def _groups(linears: Sequence[Projection], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """What is cast of these, in the order in which `_projection` takes it back."""
    if not _is_cast(linears, dtype):
        yield [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases:
        yield biases
    for adapter in chain.from_iterable(each for linear in linears for each in linear.adapters):
        yield from ([adapter.A], [adapter.B])


def _projection(
    linears: Sequence[Projection], cast: Iterator[Tensor], dtype: torch.dtype
) -> Projection:
    return Projection(
        weights=tuple(weight for linear in linears for weight in linear.weights)
        if _is_cast(linears, dtype)
        else (next(cast),),
        bias=next(cast) if any(linear.bias is not None for linear in linears) else None,
        sizes=tuple(size for linear in linears for size in linear.sizes),
        adapters=tuple(
            tuple(Adapter(next(cast), next(cast), one.scaling) for one in adapters)
            for linear in linears
            for adapters in linear.adapters
        ),
    )


def _is_cast(linears: Sequence[Projection], dtype: torch.dtype) -> bool:
    return all(linear.in_four_bits or linear.weight.dtype == dtype for linear in linears)


def _stacked(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Each group's tensors in the dtype, stacked along their first axis."""
    if not groups:
        return ()
    stacked: tuple[Tensor, ...] = _Stacked.apply(
        dtype, tuple(map(len, groups)), *(one for group in groups for one in group)
    )
    return stacked


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, counts: tuple[int, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.counts, ctx.lengths = counts, [len(one) for one in tensors]
        lengths = _by_group(ctx.lengths, counts)
        stacked = [
            torch.empty(sum(length), *group[0].shape[1:], dtype=dtype, device=group[0].device)
            for group, length in zip(_by_group(tensors, counts), lengths, strict=True)
        ]
        places = [
            place
            for whole, length in zip(stacked, lengths, strict=True)
            for place in whole.split(length)
        ]
        torch._foreach_copy_(places, list(tensors))
        trains = _by_group(ctx.needs_input_grad[2:], counts)
        ctx.mark_non_differentiable(
            *(whole for whole, group in zip(stacked, trains, strict=True) if not any(group))
        )
        return tuple(stacked)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """In float32, all at once."""
        parts: list[Tensor | None] = []
        for gradient, length in zip(gradients, _by_group(ctx.lengths, ctx.counts), strict=True):
            parts += [None] * len(length) if gradient is None else gradient.split(length)
        wanted = [
            part if needed else None
            for part, needed in zip(parts, ctx.needs_input_grad[2:], strict=True)
        ]
        given = [part for part in wanted if part is not None]
        full = [torch.empty_like(part, dtype=torch.float32) for part in given]
        if given:
            torch._foreach_copy_(full, given)
        made = iter(full)
        return None, None, *(None if part is None else next(made) for part in wanted)


def _by_group(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    left = iter(values)
    return [list(islice(left, count)) for count in counts]


# What lies between two products


def add_norm(
    hidden_ND: Tensor, x_ND: Tensor, behind: Norm | None, norm: Norm
) -> tuple[Tensor, Tensor]:
    """hidden + x, or + behind(x), in float32; and its norm in the dtype of x."""
    sum_and_normed: tuple[Tensor, Tensor] = _AddNorm.apply(
        hidden_ND, x_ND, None if behind is None else behind.weight, norm.weight, behind, norm
    )
    return sum_and_normed


class _AddNorm(torch.autograd.Function):
    """The norms' weights are arguments of their own, as autograd does not look into a Norm."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        x_ND: Tensor,
        behind_D: Tensor | None,
        weight_D: Tensor,
        behind: Norm | None,
        norm: Norm,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.behind, ctx.norm = behind, norm
        made = kernels.add_norm(hidden_ND, x_ND, behind, norm)
        ctx.save_for_backward(
            made.sum_ND, made.inverse_N, made.behind_N, None if behind is None else x_ND
        )
        return made.sum_ND, made.normed_ND

    @staticmethod
    def backward(ctx: Any, dsum_ND: Tensor | None, dnormed_ND: Tensor) -> tuple[Tensor | None, ...]:
        sum_ND, inverse_N, behind_N, x_ND = ctx.saved_tensors
        made = kernels.Normed(sum_ND, dnormed_ND, inverse_N, behind_N)
        dsum_ND = None if dsum_ND is None else dsum_ND.contiguous()
        gradient = kernels.add_norm_backward(
            dsum_ND, dnormed_ND.contiguous(), made, x_ND, ctx.behind, ctx.norm
        )
        return gradient.hidden_ND, gradient.x_ND, gradient.behind_D, gradient.scale_D, None, None


def rotate(heads_NHd: Tensor, rotation: Rotation, rotated: int, dtype: torch.dtype) -> Tensor:
    """Rotary position embedding of the first `rotated` heads; the others are only cast."""
    rotated_NHd: Tensor = _FusedRotate.apply(heads_NHd, *rotation, rotated, dtype)
    return rotated_NHd


class _FusedRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        heads_NHd: Tensor,
        cos_Nd: Tensor,
        sin_Nd: Tensor,
        rotated: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(cos_Nd, sin_Nd)
        ctx.rotated, ctx.dtype = rotated, heads_NHd.dtype
        return kernels.rotate(heads_NHd.contiguous(), cos_Nd, sin_Nd, rotated, dtype)

    @staticmethod
    def backward(ctx: Any, dout_NHd: Tensor) -> tuple[Tensor | None, ...]:
        cos_Nd, sin_Nd = ctx.saved_tensors
        return (
            kernels.rotate(
                dout_NHd.contiguous(), cos_Nd, sin_Nd, ctx.rotated, ctx.dtype, back=True
            ),
            None,
            None,
            None,
            None,
        )


def gated(gate_up_NI: Tensor, activation: str) -> Tensor:
    """act(gate)·up of rows that hold the gates and then the ups."""
    gated_NI: Tensor = _Gated.apply(gate_up_NI, activation)
    return gated_NI


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_NI: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up_NI)
        ctx.activation = activation
        return kernels.gated(gate_up_NI.contiguous(), activation)

    @staticmethod
    def backward(ctx: Any, dout_NI: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up_NI,) = ctx.saved_tensors
        return kernels.gated_backward(
            gate_up_NI.contiguous(), dout_NI.contiguous(), ctx.activation
        )[0], None


class _GatedLinear(torch.autograd.Function):
    """With the product that follows: act(gate)·up is not kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_up_NI: Tensor, weight_DI: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up_NI, weight_DI)
        ctx.activation = activation
        return F.linear(kernels.gated(gate_up_NI, activation), weight_DI)

    @staticmethod
    def backward(ctx: Any, dout_ND: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_NI, weight_DI = ctx.saved_tensors
        dgate_up_NI, acted_NI = kernels.gated_backward(
            gate_up_NI, dout_ND @ weight_DI, ctx.activation
        )
        return dgate_up_NI, dout_ND.t() @ acted_NI if ctx.needs_input_grad[1] else None, None
