"""The built-in engine where there are no CUDA graphs: batched sampling from a known decoder with a
key-value cache.

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

from motley.engines.drawing import Drawn, Prompts, draw, sample_rows
from motley.engines.engine import Completion
from motley.engines.snapshot import Projection, Snapshot
from motley.policies.policy import Policy
from motley.records import Sampling


@dataclass(slots=True)
class _Cache:
    """Keys and values per layer [R, positions, 2, kv heads, d] of R branches; prompts are padded on
    the left.
    """

    layers: list[Tensor]
    padding_R: Tensor  # how many positions on the left of a branch are padding
    rotations: dict[str, tuple[Tensor, Tensor]]  # of every position

    def follow(self, parent_R: Tensor, filled: int) -> None:
        """Make the branches anew, each with its parent's past of `filled` positions."""
        if len(parent_R) == len(self.padding_R) and bool(
            (parent_R == torch.arange(len(parent_R), device=parent_R.device)).all()
        ):
            return
        self.layers = [_gather(layer, parent_R, filled) for layer in self.layers]
        self.padding_R = self.padding_R[parent_R]


class TorchEngine:
    keeps_snapshot = True

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._decoder = decoder = policy.decoder
        self._dtype = policy.dtype
        self._weights = Snapshot.of(decoder, self._dtype, torch.float32)
        self._heads, self._kv_heads, self._head_dim = (
            decoder.heads,
            decoder.kv_heads,
            decoder.head_dim,
        )

    def refresh(self) -> None:
        self._weights.refresh(self._policy.decoder)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        return sample_rows(
            partial(self._rows, sampling), self._policy, prompts, num_samples, sampling, seed
        )

    def _rows(self, sampling: Sampling, prompts: Prompts, uniform_BT: Tensor) -> Drawn:
        logits_RV, cache = self._prefill(prompts, sampling.max_tokens)
        return self._decode(logits_RV, cache, max(len(p) for p in prompts), sampling, uniform_BT)

    def _prefill(self, prompts: Prompts, room: int) -> tuple[Tensor, _Cache]:
        """Run the prompts, one branch each, and leave room for `room` more positions."""
        device, longest = self._policy.device, max(len(p) for p in prompts)
        pad = self._policy.vocabulary.pad_id
        token_RT = torch.tensor(
            [[pad] * (longest - len(p)) + list(p) for p in prompts], device=device
        )
        padding_R = torch.tensor([longest - len(p) for p in prompts], device=device)
        shape = (len(prompts), longest + room, 2, self._kv_heads, self._head_dim)
        layers = [
            torch.empty(shape, dtype=self._dtype, device=device) for _ in self._weights.layers
        ]
        found = self._decoder.rotations(torch.arange(longest + room, device=device))
        cache = _Cache(
            layers,
            padding_R,
            {name: self._rotation(cos, sin) for name, (cos, sin) in found.items()},
        )
        return self._forward(token_RT, 0, cache), cache

    def _decode(
        self, logits_RV: Tensor, cache: _Cache, start: int, sampling: Sampling, uniform_BT: Tensor
    ) -> Drawn:
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
        return Drawn(token_BT, logp_BT, length_B)

    def _forward(self, token_RT: Tensor, start: int, cache: _Cache) -> Tensor:
        """Logits [R, V] after the last of T tokens that stand at cache positions start..start+T."""
        rows, steps = token_RT.shape
        stop = start + steps
        place_T = torch.arange(start, stop, device=token_RT.device)
        position = (place_T - cache.padding_R[:, None]).clamp(min=0).flatten()
        rotations = {
            name: (cos.index_select(0, position), sin.index_select(0, position))
            for name, (cos, sin) in cache.rotations.items()
        }
        masks = {
            window: _mask(place_T, stop, cache.padding_R, window)
            for window in {layer.window for layer in self._weights.layers}
        }
        heads, rotated, half = self._heads, self._heads + self._kv_heads, self._head_dim // 2
        hidden = F.embedding(token_RT.flatten(), self._weights.embedding)
        for layer, kv in zip(self._weights.layers, cache.layers, strict=True):
            qkv = layer.qkv(self._rms(hidden, layer.attention_norm).to(self._dtype)).view(
                rows * steps, -1, self._head_dim
            )
            query_key = qkv[:, :rotated]
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = (
                    self._rms(qkv[:, :heads].float(), layer.query_norm),
                    self._rms(qkv[:, heads:rotated].float(), layer.key_norm),
                )
                query_key = torch.cat([query, key], 1)
            swapped = torch.cat([query_key[..., half:], query_key[..., :half]], -1)
            cos, sin = rotations[layer.rotation]
            query_key = torch.addcmul(query_key * cos, swapped, sin).to(self._dtype)
            query_key, value = (
                part.unflatten(0, (rows, steps)) for part in (query_key, qkv[:, rotated:])
            )
            kv[:, start:stop, 0] = query_key[:, :, heads:]
            kv[:, start:stop, 1] = value
            mixed = F.scaled_dot_product_attention(
                query_key[:, :, :heads].transpose(1, 2),
                kv[:, :stop, 0].transpose(1, 2),
                kv[:, :stop, 1].transpose(1, 2),
                attn_mask=masks[layer.window],
                enable_gqa=heads != self._kv_heads,
                scale=layer.scaling,
            )
            hidden = self._add(
                hidden,
                layer.out,
                mixed.transpose(1, 2).reshape(rows * steps, -1),
                layer.after_attention,
            )
            gate, up = layer.gate_up(self._rms(hidden, layer.mlp_norm).to(self._dtype)).chunk(2, -1)
            hidden = self._add(
                hidden, layer.down, self._decoder.act(gate).mul_(up), layer.after_mlp
            )
        last = hidden.view(rows, steps, -1)[:, -1]
        return F.linear(self._rms(last, self._weights.norm), self._weights.head)

    def _rotation(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for x·cos + swap(x)·sin, where swap exchanges the halves: the first half of
        sin is negative.
        """
        half = self._head_dim // 2
        return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)

    def _rms(self, hidden: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], scale, self._weights.eps)

    def _add(
        self, hidden: Tensor, projection: Projection, x: Tensor, norm: Tensor | None
    ) -> Tensor:
        return (
            projection.add(hidden, x)
            if norm is None
            else hidden + self._rms(projection(x).float(), norm)
        )


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
