"""The forward of a known decoder in a half type, with gradient, for GPUs: the same numbers as the
plain one in `forward`, in few kernels.

Differs from it in this: dtypes are explicit instead of chosen by autocast; a forward casts its
weights once, all together, and those that multiply the same input are stacked; what lies between
two products is one kernel each way. The hidden state between layers stays float32. Needs Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from motley.policies import kernels
from motley.policies.attention import attend, flashes
from motley.policies.decoder import Adapter, Block, Decoder, Linear, Norm
from motley.policies.flash import attend_turned
from motley.policies.packed import Packed


def fused_states(
    decoder: Decoder, packed: Packed, dtype: torch.dtype, checkpointed: bool
) -> Tensor:
    """Final hidden state of every packed token, in the dtype."""
    hidden_ND = decoder.embed(packed.token_N)
    rotations = {
        name: (cos[:, 0], sin[:, 0])
        for name, (cos, sin) in decoder.rotations(packed.position_N).items()
    }
    norms = [*(block.attention_norm for block in decoder.blocks), decoder.norm]
    normed_ND = norms[0](hidden_ND).to(dtype)
    for block, cast, following in zip(
        decoder.blocks, cast_blocks(decoder.blocks, dtype), norms[1:], strict=True
    ):
        given = (
            decoder,
            block,
            cast,
            following,
            hidden_ND,
            normed_ND,
            *rotations[block.rotation],
            packed,
        )
        hidden_ND, normed_ND = (
            checkpoint(fused_layer, *given, use_reentrant=False, preserve_rng_state=False)
            if checkpointed
            else fused_layer(*given)
        )
    return normed_ND


def fused_layer(
    decoder: Decoder,
    block: Block,
    cast: CastBlock,
    following: Norm,
    hidden_ND: Tensor,
    normed_ND: Tensor,
    cos_Nd: Tensor,
    sin_Nd: Tensor,
    packed: Packed,
) -> tuple[Tensor, Tensor]:
    """From the hidden state and its norm to those behind the layer; `following` is the norm that
    comes next.
    """
    heads, kv_heads = decoder.heads, decoder.kv_heads
    qkv_NHd = cast.qkv(normed_ND).unflatten(1, (-1, decoder.head_dim))
    if block.query_norm is not None and block.key_norm is not None:
        query, key, value = qkv_NHd.split((heads, kv_heads, kv_heads), 1)
        qkv_NHd = torch.cat([block.query_norm(query), block.key_norm(key), value.float()], 1)
    if flashes(normed_ND.dtype, decoder.head_dim, normed_ND.device, packed, block.window):
        mixed_NHd = attend_turned(
            qkv_NHd, cos_Nd, sin_Nd, heads, packed, block.scaling, normed_ND.dtype
        )
    else:
        rotated_NHd = rotate(qkv_NHd, cos_Nd, sin_Nd, heads + kv_heads, normed_ND.dtype)
        query, key, value = rotated_NHd.split((heads, kv_heads, kv_heads), 1)
        mixed_NHd = attend(query, key, value, packed, block.scaling, block.window)
    mixed_ND = cast.out(mixed_NHd.flatten(1))
    hidden_ND, normed_ND = add_norm(hidden_ND, mixed_ND, block.after_attention, block.mlp_norm)
    made_ND = _gated_down(cast.gate_up(normed_ND), cast.down, decoder.activation)
    return add_norm(hidden_ND, made_ND, block.after_mlp, following)


def _gated_down(gate_up_NI: Tensor, down: Projection, activation: str) -> Tensor:
    if down.bias is None and not any(down.adapters):
        made_ND: Tensor = _GatedLinear.apply(gate_up_NI, down.weights[0], activation)
        return made_ND
    return down(gated(gate_up_NI, activation))


# Weights


class Projection(NamedTuple):
    """Linear layers of one input as one: their outputs side by side."""

    weights: tuple[Tensor, ...]  # one for all, or one for each
    bias: Tensor | None
    sizes: tuple[int, ...]  # of each one's output
    adapters: tuple[tuple[Adapter, ...], ...]  # of each

    def __call__(self, x_ND: Tensor) -> Tensor:
        if len(self.weights) == 1:
            y_NE = F.linear(x_ND, self.weights[0], self.bias)
        else:
            y_NE = torch.cat([F.linear(x_ND, weight) for weight in self.weights], 1)
            y_NE = y_NE if self.bias is None else y_NE + self.bias
        if any(self.adapters):
            y_NE = y_NE + torch.cat(
                [
                    _adapted(x_ND, each, size)
                    for each, size in zip(self.adapters, self.sizes, strict=True)
                ],
                1,
            )
        return y_NE


def _adapted(x_ND: Tensor, adapters: tuple[Adapter, ...], size: int) -> Tensor:
    parts = [
        F.linear(F.linear(x_ND, adapter.A), adapter.B) * adapter.scaling for adapter in adapters
    ]
    return sum(parts[1:], parts[0]) if parts else x_ND.new_zeros(len(x_ND), size)


class CastBlock(NamedTuple):
    """The projections of a block, in the dtype."""

    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection


def cast_blocks(blocks: Sequence[Block], dtype: torch.dtype) -> list[CastBlock]:
    """All weights in the dtype.

    Those of one input are stacked, unless they have the dtype already and need no copy (under
    adapters).
    """
    joined = [(block.qkv, (block.out,), block.gate_up, (block.down,)) for block in blocks]
    groups = [group for four in joined for linears in four for group in _groups(linears, dtype)]
    cast = iter(_stacked(groups, dtype))
    return [CastBlock(*(_projection(linears, cast, dtype) for linears in four)) for four in joined]


def _groups(linears: Sequence[Linear], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """What is cast of these, in the order in which `_projection` takes it back."""
    if not _is_cast(linears, dtype):
        yield [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases:
        yield biases
    for linear in linears:
        for adapter in linear.adapters:
            yield from ([adapter.A], [adapter.B])


def _projection(
    linears: Sequence[Linear], cast: Iterator[Tensor], dtype: torch.dtype
) -> Projection:
    return Projection(
        weights=tuple(linear.weight for linear in linears)
        if _is_cast(linears, dtype)
        else (next(cast),),
        bias=next(cast) if any(linear.bias is not None for linear in linears) else None,
        sizes=tuple(len(linear.weight) for linear in linears),
        adapters=tuple(
            tuple(Adapter(next(cast), next(cast), one.scaling) for one in linear.adapters)
            for linear in linears
        ),
    )


def _is_cast(linears: Sequence[Linear], dtype: torch.dtype) -> bool:
    return all(linear.weight.dtype == dtype for linear in linears)


def _stacked(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Each group's tensors in the dtype, stacked along their first axis."""
    if not groups:
        return ()
    found: tuple[Tensor, ...] = _Stacked.apply(
        dtype, tuple(map(len, groups)), *(one for group in groups for one in group)
    )
    return found


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
    found: tuple[Tensor, Tensor] = _AddNorm.apply(
        hidden_ND, x_ND, None if behind is None else behind.weight, norm.weight, behind, norm
    )
    return found


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
        behind_scale = None if behind is None else behind.scale
        found = kernels.add_norm(
            hidden_ND,
            x_ND,
            behind_scale,
            0.0 if behind is None else behind.eps,
            norm.scale,
            norm.eps,
        )
        ctx.save_for_backward(
            found.sum_ND, found.inverse_N, found.behind_N, None if behind is None else x_ND
        )
        return found.sum_ND, found.normed_ND

    @staticmethod
    def backward(ctx: Any, dsum_ND: Tensor | None, dnormed_ND: Tensor) -> tuple[Tensor | None, ...]:
        sum_ND, inverse_N, behind_N, x_ND = ctx.saved_tensors
        found = kernels.Normed(sum_ND, dnormed_ND, inverse_N, behind_N)
        behind_D = None if ctx.behind is None else ctx.behind.scale
        dsum_ND = None if dsum_ND is None else dsum_ND.contiguous()
        gradient = kernels.add_norm_backward(
            dsum_ND, dnormed_ND.contiguous(), found, ctx.norm.scale, x_ND, behind_D
        )
        return gradient.hidden_ND, gradient.x_ND, gradient.behind_D, gradient.scale_D, None, None


def rotate(
    heads_NHd: Tensor, cos_Nd: Tensor, sin_Nd: Tensor, rotated: int, dtype: torch.dtype
) -> Tensor:
    """Rotary position embedding of the first `rotated` heads; the others are only cast."""
    found: Tensor = _Rotate.apply(heads_NHd, cos_Nd, sin_Nd, rotated, dtype)
    return found


class _Rotate(torch.autograd.Function):
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
    found: Tensor = _Gated.apply(gate_up_NI, activation)
    return found


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
    """The product that follows too: so that act(gate)·up, its input, need not be kept for the
    backward pass.
    """

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
