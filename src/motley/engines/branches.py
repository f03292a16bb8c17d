"""The built-in engine where there are no CUDA graphs: sampling from a known decoder with a cache.

Differs from transformers' `generate`: samples of one prompt that agree so far are one *branch*,
computed once, so that a prompt costs nothing per sample and sure answers hardly anything; a branch
whose samples have all ended is gone. It samples with a snapshot of the weights, and every sample
draws from its own row of random numbers, so that a completion does not depend on what else is in
the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from motley.compute.decoder import Decoder
from motley.compute.layers import Layer, Norm, Projection, Rotation, walk
from motley.engines.engine import Completion
from motley.engines.sampling import PromptIds, SampledRows, draw, sample_rows
from motley.engines.snapshot import Snapshot
from motley.models.policy import Policy
from motley.records import Sampling


@dataclass(slots=True)
class _Cache:
    """Keys and values of R branches.

    Per layer [R, positions, 2, kv heads, d]; prompts are padded on the left.
    """

    layers: list[Tensor]
    padding_R: Tensor  # how many positions on the left of a branch are padding
    rotations: dict[str, Rotation]  # of every position

    def follow(self, parent_R: Tensor, filled: int) -> None:
        """Make the branches anew, each with its parent's past of `filled` positions."""
        if len(parent_R) == len(self.padding_R) and bool(
            (parent_R == torch.arange(len(parent_R), device=parent_R.device)).all()
        ):
            return
        for number, layer in enumerate(self.layers):  # one at a time, so that none is there twice
            self.layers[number] = _gather(layer, parent_R, filled)
            del layer
        self.padding_R = self.padding_R[parent_R]


class TorchEngine:
    keeps_snapshot = True

    def __init__(self, policy: Policy, decoder: Decoder | None = None) -> None:
        """`decoder`: the policy's, where its weights come and go; otherwise it is read here."""
        self._policy = policy
        self._dtype = policy.dtype
        self._decoder = decoder or Decoder.of(policy.base)
        self._weights = Snapshot.of(self._decoder, self._dtype, torch.float32)

    def refresh(self) -> None:
        self._weights.refresh(self._decoder)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        first: int = 0,
    ) -> list[list[Completion]]:
        rows = partial(self._rows, sampling)
        return sample_rows(rows, self._policy, prompts, num_samples, sampling, seed, first)

    def _rows(self, sampling: Sampling, prompts: PromptIds, uniform_BT: Tensor) -> SampledRows:
        logits_RV, cache = self._prefill(prompts, sampling.max_tokens)
        return self._decode(logits_RV, cache, max(len(p) for p in prompts), sampling, uniform_BT)

    def _prefill(self, prompts: PromptIds, room: int) -> tuple[Tensor, _Cache]:
        """Run the prompts, one branch each, and leave room for `room` more positions."""
        device, longest = self._policy.device, max(len(p) for p in prompts)
        pad = self._policy.vocabulary.pad_id
        token_RT = torch.tensor(
            [[pad] * (longest - len(p)) + list(p) for p in prompts], device=device
        )
        padding_R = torch.tensor([longest - len(p) for p in prompts], device=device)
        heads, dtype = self._decoder.heads, self._dtype
        shape = (len(prompts), longest + room, 2, heads.keys, heads.size)
        rotations = self._decoder.rotations(torch.arange(longest + room, device=device))
        cache = _Cache(
            [torch.empty(shape, dtype=dtype, device=device) for _ in self._weights.layers],
            padding_R,
            {name: _swapping(rotation) for name, rotation in rotations.items()},
        )
        return self._forward(token_RT, 0, cache), cache

    def _decode(
        self, logits_RV: Tensor, cache: _Cache, start: int, sampling: Sampling, uniform_BT: Tensor
    ) -> SampledRows:
        """Draw tokens until every sample has ended.

        Of those still running, `row_b` says which they are, `branch_b` where they stand.
        """
        num_rows, max_tokens = uniform_BT.shape
        device, vocabulary_size = logits_RV.device, logits_RV.shape[1]
        token_BT = torch.zeros(num_rows, max_tokens, dtype=torch.int64, device=device)
        logp_BT = torch.zeros(num_rows, max_tokens, device=device)
        length_B = torch.full((num_rows,), max_tokens, device=device)
        end_ids = torch.tensor(self._policy.vocabulary.end_ids, device=device)
        row_b = torch.arange(num_rows, device=device)
        branch_b = row_b // (num_rows // len(logits_RV))
        for step in range(max_tokens):
            token_b, logp_b = draw(logits_RV, branch_b, sampling, uniform_BT[row_b, step])
            token_BT[row_b, step] = token_b
            logp_BT[row_b, step] = logp_b
            ends_b = torch.isin(token_b, end_ids)
            length_B[row_b[ends_b]] = step + 1
            row_b = row_b[~ends_b]
            if len(row_b) == 0 or step + 1 == max_tokens:
                break
            fork_R, branch_b = (branch_b[~ends_b] * vocabulary_size + token_b[~ends_b]).unique(
                return_inverse=True
            )
            cache.follow(fork_R // vocabulary_size, start + step)
            logits_RV = self._forward((fork_R % vocabulary_size)[:, None], start + step, cache)
        return SampledRows(token_BT, logp_BT, length_B)

    def _forward(self, token_RT: Tensor, start: int, cache: _Cache) -> Tensor:
        """Logits [R, V] after the last of T tokens that stand at cache positions start..start+T."""
        weights, (rows, steps) = self._weights, token_RT.shape
        hidden_ND = F.embedding(token_RT.flatten(), weights.embedding)
        place_T = torch.arange(start, start + steps, device=token_RT.device)
        forward = _CachedPass(self._decoder, self._dtype, cache, place_T, start)
        hidden_ND = walk(forward, weights.layers, hidden_ND)
        last_RD = hidden_ND.view(rows, steps, -1)[:, -1]
        return F.linear(_normed(last_RD, weights.norm), weights.head)


class _CachedPass:
    """New tokens of every branch, at the same places of the cache, over it and themselves."""

    def __init__(
        self, decoder: Decoder, dtype: torch.dtype, cache: _Cache, place_T: Tensor, start: int
    ) -> None:
        self._decoder, self._dtype, self._cache = decoder, dtype, cache
        self._shape = (len(cache.padding_R), len(place_T))
        self._count = self._shape[0] * self._shape[1]  # of tokens; a tensor is slow to tell
        self._start, self._stop = start, start + len(place_T)
        position_N = (place_T - cache.padding_R[:, None]).clamp(min=0).flatten()
        self._rotations = {
            name: Rotation(*(table.index_select(0, position_N) for table in rotation))
            for name, rotation in cache.rotations.items()
        }
        self._masks = {
            window: _mask(place_T, self._stop, cache.padding_R, window)
            for window in decoder.windows
        }

    def norm(self, state: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return state, _normed(state, norm).to(self._dtype)

    def attend(self, layer: Layer, x: Tensor) -> Tensor:
        heads, start, stop = self._decoder.heads, self._start, self._stop
        qkv_NHd = layer.qkv[0](x).view(self._count, -1, heads.size)
        query_key, value = (
            part.unflatten(0, self._shape)
            for part in (self._rotated(layer, qkv_NHd), qkv_NHd[:, heads.rotated :])
        )
        kv = self._cache.layers[layer.index]
        kv[:, start:stop, 0] = query_key[:, :, heads.queries :]
        kv[:, start:stop, 1] = value
        mixed_RHTd = F.scaled_dot_product_attention(
            query_key[:, :, : heads.queries].transpose(1, 2),
            kv[:, :stop, 0].transpose(1, 2),
            kv[:, :stop, 1].transpose(1, 2),
            attn_mask=self._masks[layer.window],
            enable_gqa=heads.queries != heads.keys,
            scale=layer.scaling,
        )
        return mixed_RHTd.transpose(1, 2).reshape(self._count, -1)

    def _rotated(self, layer: Layer, qkv_NHd: Tensor) -> Tensor:
        """Queries and keys, normed where a layer does, at their positions."""
        heads, half = self._decoder.heads, self._decoder.heads.size // 2
        query_key = qkv_NHd[:, : heads.rotated]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = query_key.float().split(heads.counts[:2], 1)
            query_key = torch.cat(
                [_normed(query, layer.query_norm), _normed(key, layer.key_norm)], 1
            )
        swapped = torch.cat([query_key[..., half:], query_key[..., :half]], -1)
        cos, sin = self._rotations[layer.rotation]
        return torch.addcmul(query_key * cos, swapped, sin).to(self._dtype)

    def gate(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up[0](x).chunk(2, -1)
        return self._decoder.act(gate).mul_(up)

    def add(self, state: Tensor, projection: Projection, x: Tensor, after: Norm | None) -> Tensor:
        """The sum in float32 whatever the product is made in."""
        if after is not None:
            return state + _normed(projection(x).float(), after)
        if projection.is_bare and state.dtype == projection.weight.dtype:
            return torch.addmm(state, x, projection.weight.T)
        return state + projection(x)


def _normed(hidden: Tensor, norm: Norm) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.eps)


def _swapping(rotation: Rotation) -> Rotation:
    """cos and sin [T, 1, d] for x·cos + swap(x)·sin, where swap exchanges the halves.

    The first half of sin is negative.
    """
    cos, sin = (table[:, None] for table in rotation)
    half = sin.shape[-1] // 2
    return Rotation(cos, torch.cat([-sin[..., :half], sin[..., half:]], -1))


def _gather(layer: Tensor, parent_R: Tensor, filled: int) -> Tensor:
    made = layer.new_empty(len(parent_R), *layer.shape[1:])
    torch.index_select(layer[:, :filled], 0, parent_R, out=made[:, :filled])
    return made


def _mask(place_T: Tensor, stop: int, padding_R: Tensor, window: int | None) -> Tensor | None:
    """[R, 1, T, K], True where a query may look: not at padding, not ahead, not behind its window.

    None where that is everywhere.
    """
    near = window is None or stop <= window
    if len(place_T) == 1 and near and not bool(padding_R.any()):
        return None
    key_K = torch.arange(stop, device=place_T.device)
    visible_TK = key_K <= place_T[:, None]
    if window is not None:
        visible_TK &= key_K > place_T[:, None] - window
    real_R1K = (key_K >= padding_R[:, None])[:, None]
    # A padded query sees itself, so that no row of the softmax is empty.
    itself_TK = key_K == place_T[:, None]
    return (visible_TK & (real_R1K | itself_TK))[:, None]
