"""What a GPU computes to sample: reading prompts, and one more token for rows.

Owns the weights it samples with. Knows no graph: the same work runs captured and as it is, on a CPU
under Triton's interpreter too.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from motley.compute.decoder import Decoder
from motley.compute.kernels import add_norm, gated, rotate
from motley.compute.layers import Deferred, Layer, Norm, Projection, Rotation, walk
from motley.engines import attention, drawing, few_rows
from motley.engines.room import Room
from motley.engines.snapshot import Snapshot
from motley.models.policy import Policy
from motley.records import Sampling


class Steps:
    def __init__(self, policy: Policy, decoder: Decoder | None = None) -> None:
        self.decoder, self.dtype = decoder or Decoder.of(policy.base), policy.dtype
        self.device = policy.device
        self.weights = Snapshot.of(self.decoder, self.dtype, self.dtype)
        size = len(self.weights.head)
        self._is_end_V = torch.zeros(size, dtype=torch.bool, device=self.device)
        self._is_end_V[[end for end in policy.vocabulary.end_ids if end < size]] = True

    def refresh(self) -> None:
        self.weights.refresh(self.decoder)

    def read(
        self, room: Room, token_PT: Tensor, place_P: Tensor, last_P: Tensor, *, start: int
    ) -> Tensor:
        """The normed state [P, D] behind each prompt; keys and values go to its place.

        `start`: how many tokens of each stand there already.
        """
        weights, prompts = self.weights, len(token_PT)
        state = Deferred(F.embedding(token_PT.flatten(), weights.embedding))
        forward = _PromptPass(self.decoder, self.dtype, room, token_PT.shape, place_P, start)
        _, normed_ND = forward.norm(walk(forward, weights.layers, state), weights.norm)
        normed_PTD = normed_ND.view(*token_PT.shape, -1)
        return normed_PTD[torch.arange(prompts, device=self.device), last_P]

    def step(self, room: Room, row_B: Tensor, sampling: Sampling) -> None:
        """One token more for each of these rows."""
        weights = self.weights
        state = Deferred(F.embedding(room.last_R[row_B], weights.embedding))
        forward = _StepPass(self.decoder, self.dtype, room, row_B)
        _, normed_BD = forward.norm(walk(forward, weights.layers, state), weights.norm)
        lane_B = torch.arange(len(row_B), device=self.device)
        self.draw(room, self.logits(normed_BD), lane_B, row_B, sampling)

    def logits(self, normed_BD: Tensor) -> Tensor:
        head = self.weights.head
        if head.dtype == torch.float32 or not head.is_cuda:
            return F.linear(normed_BD.float(), head.float())
        return torch.mm(normed_BD, head.T, out_dtype=torch.float32)

    def draw(
        self, room: Room, logits_RV: Tensor, source_B: Tensor, row_B: Tensor, sampling: Sampling
    ) -> None:
        drawing.draw(room, logits_RV, source_B, row_B, sampling, self._is_end_V)


class _KernelPass:
    """By kernels, with weights of a snapshot: a sum waits for the norm that follows."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, room: Room) -> None:
        self._heads, self._activation = decoder.heads, decoder.activation
        self._dtype, self._room = dtype, room

    def norm(self, state: Deferred, norm: Norm) -> tuple[Deferred, Tensor]:
        if state.x_ND is None:
            normed_ND = F.rms_norm(state.hidden_ND, norm.weight.shape, norm.weight, norm.eps)
            return state, normed_ND.to(self._dtype)
        made = add_norm(state.hidden_ND, state.x_ND, state.after, norm)
        return Deferred(made.sum_ND), made.normed_ND

    def gate(self, layer: Layer, x: Tensor) -> Tensor:
        return gated(layer.gate_up[0](x), self._activation)

    def add(
        self, state: Deferred, projection: Projection, x: Tensor, after: Norm | None
    ) -> Deferred:
        return Deferred(state.hidden_ND, projection(x), after)


class _StepPass(_KernelPass):
    """One token of each row, over its prompt and its own. Where rows are few, products are too."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, room: Room, row_B: Tensor) -> None:
        super().__init__(decoder, dtype, room)
        self._fact_BF = attention.look_up(row_B, room)

    def norm(self, state: Deferred, norm: Norm) -> tuple[Deferred, Tensor]:
        if state.x_ND is None or state.x_ND.dim() == 2:
            return super().norm(state, norm)
        sum_BD, normed_BD = few_rows.add_norm(
            state.hidden_ND, state.x_ND, state.after, norm, self._dtype
        )
        return Deferred(sum_BD), normed_BD

    def attend(self, layer: Layer, x: Tensor) -> Tensor:
        (qkv,) = layer.qkv
        qkv_BE = few_rows.product(x, qkv) if few_rows.does(qkv, x) else qkv(x)
        return attention.attend(qkv_BE, self._fact_BF, layer, self._room)

    def gate(self, layer: Layer, x: Tensor) -> Tensor:
        (gate_up,) = layer.gate_up
        if few_rows.does(gate_up, x):
            return few_rows.gated_product(x, gate_up, self._activation)
        return super().gate(layer, x)

    def add(
        self, state: Deferred, projection: Projection, x: Tensor, after: Norm | None
    ) -> Deferred:
        """Its parts are added up with the norm that follows."""
        if few_rows.does(projection, x):
            return Deferred(state.hidden_ND, few_rows.parts_of_product(x, projection), after)
        return super().add(state, projection, x, after)


class _PromptPass(_KernelPass):
    """Prompts, all padded to one length on the right, each over itself and what stands before."""

    def __init__(
        self,
        decoder: Decoder,
        dtype: torch.dtype,
        room: Room,
        shape: torch.Size,
        place_P: Tensor,
        start: int,
    ) -> None:
        super().__init__(decoder, dtype, room)
        prompts, longest = shape
        self._shape, self._place_P = shape, place_P
        self._start, self._end = start, start + longest
        self._visible = {
            window: _visible(start, self._end, window, place_P.device) for window in decoder.windows
        }
        self._rotations = {
            name: Rotation(*(table[start : self._end].repeat(prompts, 1) for table in rotation))
            for name, rotation in room.rotations.items()
        }

    def attend(self, layer: Layer, x: Tensor) -> Tensor:
        heads, kept = self._heads, self._room.prompt_L2PHTd[layer.index]
        qkv_NHd = self._normed(layer, layer.qkv[0](x).unflatten(1, (-1, heads.size)))
        rotated_NHd = rotate(qkv_NHd, *self._rotations[layer.rotation], heads.rotated, self._dtype)
        parts = rotated_NHd.unflatten(0, self._shape).split(heads.counts, 2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        kept[0, self._place_P, :, self._start : self._end] = key
        kept[1, self._place_P, :, self._start : self._end] = value
        if self._start:
            key, value = kept[:, self._place_P, :, : self._end]
        mask, groups = self._visible[layer.window], heads.queries // heads.keys
        if mask is not None and groups > 1:  # no fused kernel takes both a mask and grouped heads
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        mixed_PHTd = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=mask is None and groups > 1,
            scale=layer.scaling,
        )
        return mixed_PHTd.transpose(1, 2).reshape(len(qkv_NHd), -1)

    def _normed(self, layer: Layer, qkv_NHd: Tensor) -> Tensor:
        """With the norms of queries and keys, where a layer has them."""
        if layer.query_norm is None or layer.key_norm is None:
            return qkv_NHd
        query, key, value = qkv_NHd.float().split(self._heads.counts, 1)
        norm = partial(F.rms_norm, normalized_shape=(self._heads.size,), eps=layer.query_norm.eps)
        return torch.cat(
            [
                norm(query, weight=layer.query_norm.weight),
                norm(key, weight=layer.key_norm.weight),
                value,
            ],
            1,
        )


def _visible(start: int, end: int, window: int | None, device: torch.device) -> Tensor | None:
    """[T, K] of a prompt's tokens from `start` on; None: each sees all before it."""
    if start == 0 and (window is None or end <= window):
        return None
    place_K = torch.arange(end, device=device)
    place_T1 = place_K[start:, None]
    behind_TK = place_T1 >= place_K
    return behind_TK if window is None else behind_TK & (place_T1 - window < place_K)
