"""The built-in engine: batched sampling from Llama-architecture models with a key-value cache.

Differs from transformers' `generate`: samples of one prompt that agree so far are one *branch*, computed once, so that a prompt
costs nothing per sample and sure answers hardly anything; a branch whose samples have all ended is gone. Projections are fused
into a snapshot of the weights (LoRA merged in float32), and every sample draws from its own row of random numbers, so that a completion
does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from motley.engines.drawing import Drawn, Prompts, draw, sample_rows
from motley.engines.engine import Completion
from motley.policies.policy import Policy, merged_weight
from motley.records import Sampling


@dataclass(frozen=True, slots=True)
class _Linear:
    """A weight, and beside it the adapters that cannot be merged into it: a small change would be lost in the weight's rounding."""

    weight: Tensor
    lora_A: Tensor | None = None  # [rank, in]
    lora_B: Tensor | None = None  # [out, rank], its scale in it

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y if self.lora_A is None or self.lora_B is None else y + F.linear(F.linear(x, self.lora_A), self.lora_B)

    def add(self, hidden: Tensor, x: Tensor) -> Tensor:
        """hidden + self(x), the sum in float32 whatever the product is made in."""
        if hidden.dtype == self.weight.dtype and self.lora_A is None:
            return torch.addmm(hidden, x, self.weight.T)
        return hidden + self(x)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Fused weights of one layer, rounded as the trainer rounds them; norms' scales stay apart for the same reason."""

    attention_norm: Tensor
    qkv: _Linear
    out: _Linear
    mlp_norm: Tensor
    gate_up: _Linear
    down: _Linear


@dataclass(slots=True)
class _Cache:
    """Keys and values per layer [positions, R, 2, kv heads, d] of R branches; prompts are padded on the left."""

    layers: list[Tensor]
    padding_R: Tensor  # how many positions on the left of a branch are padding

    def follow(self, parent_R: Tensor, filled: int) -> None:
        """Make the branches anew, each with its parent's past of `filled` positions."""
        if len(parent_R) == len(self.padding_R) and bool((parent_R == torch.arange(len(parent_R), device=parent_R.device)).all()):
            return
        self.layers = [_gather(layer, parent_R, filled) for layer in self.layers]
        self.padding_R = self.padding_R[parent_R]


class TorchEngine:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        model = self._policy.base
        config = model.config
        self._dtype = self._policy.dtype
        self._layers = [_snapshot(layer, self._dtype) for layer in model.model.layers]
        self._embed: Tensor = model.model.embed_tokens.weight.detach().float().clone()
        self._norm: Tensor = model.model.norm.weight.detach().clone()
        self._head: Tensor = merged_weight(model.lm_head).clone()
        self._eps: float = config.rms_norm_eps
        self._head_dim: int = model.model.layers[0].self_attn.head_dim
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int) -> list[list[Completion]]:
        return sample_rows(partial(self._rows, sampling), self._policy, prompts, num_samples, sampling, seed)

    def _rows(self, sampling: Sampling, prompts: Prompts, uniform_BT: Tensor) -> Drawn:
        logits_RV, cache = self._prefill(prompts, sampling.max_tokens)
        return self._decode(logits_RV, cache, max(len(p) for p in prompts), sampling, uniform_BT)

    def _prefill(self, prompts: Prompts, room: int) -> tuple[Tensor, _Cache]:
        """Run the prompts, one branch each, and leave room for `room` more positions."""
        device, longest = self._embed.device, max(len(p) for p in prompts)
        pad = self._policy.vocabulary.pad_id
        token_RT = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=device)
        padding_R = torch.tensor([longest - len(p) for p in prompts], device=device)
        shape = (longest + room, len(prompts), 2, self._kv_heads, self._head_dim)
        cache = _Cache([torch.empty(shape, dtype=self._dtype, device=device) for _ in self._layers], padding_R)
        return self._forward(token_RT, 0, cache), cache

    def _decode(self, logits_RV: Tensor, cache: _Cache, start: int, sampling: Sampling, uniform_BT: Tensor) -> Drawn:
        """Draw tokens until every sample has ended. Of those still running, `row_b` says which they are, `branch_b` where they stand."""
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
            fork_R, branch_b = (branch_b[~ends_b] * vocabulary_size + token_b[~ends_b]).unique(return_inverse=True)
            cache.follow(fork_R // vocabulary_size, start + step)
            logits_RV = self._forward((fork_R % vocabulary_size)[:, None], start + step, cache)
        return Drawn(token_BT, logp_BT, length_B)

    def _forward(self, token_RT: Tensor, start: int, cache: _Cache) -> Tensor:
        """Logits [R, V] after the last of T tokens that stand at cache positions start..start+T."""
        rows, steps = token_RT.shape
        stop = start + steps
        place_T = torch.arange(start, stop, device=token_RT.device)
        cos_RT1d, sin_RT1d = self._rotation((place_T - cache.padding_R[:, None]).clamp(min=0))
        mask_R1TK = _mask(place_T, stop, cache.padding_R)
        heads, rotated, half = self._heads, self._heads + self._kv_heads, self._head_dim // 2
        hidden = F.embedding(token_RT, self._embed).view(rows * steps, -1)
        for layer, kv in zip(self._layers, cache.layers, strict=True):
            qkv = layer.qkv(self._rms(hidden, layer.attention_norm).to(self._dtype)).view(rows, steps, -1, self._head_dim)
            query_key = qkv[:, :, :rotated]
            swapped = torch.cat([query_key[..., half:], query_key[..., :half]], -1)
            query_key = torch.addcmul(query_key * cos_RT1d, swapped, sin_RT1d).to(self._dtype)
            kv[start:stop, :, 0] = query_key[:, :, heads:].transpose(0, 1)
            kv[start:stop, :, 1] = qkv[:, :, rotated:].transpose(0, 1)
            mixed = F.scaled_dot_product_attention(
                query_key[:, :, :heads].transpose(1, 2),
                kv[:stop, :, 0].permute(1, 2, 0, 3),
                kv[:stop, :, 1].permute(1, 2, 0, 3),
                attn_mask=mask_R1TK,
                enable_gqa=heads != self._kv_heads,
            )
            hidden = layer.out.add(hidden, mixed.transpose(1, 2).reshape(rows * steps, -1))
            gate, up = layer.gate_up(self._rms(hidden, layer.mlp_norm).to(self._dtype)).chunk(2, -1)
            hidden = layer.down.add(hidden, F.silu(gate).mul_(up))
        last = hidden.view(rows, steps, -1)[:, -1]
        return F.linear(self._rms(last, self._norm), self._head)

    def _rotation(self, position_RT: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for x·cos + swap(x)·sin, where swap exchanges the halves: the first half of sin is negative."""
        cos, sin = self._policy.base.model.rotary_emb(self._embed, position_RT)
        half = self._head_dim // 2
        return cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]

    def _rms(self, hidden: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], scale, self._eps)


def _gather(layer: Tensor, parent_R: Tensor, filled: int) -> Tensor:
    made = layer.new_empty(len(layer), len(parent_R), *layer.shape[2:])
    torch.index_select(layer[:filled], 1, parent_R, out=made[:filled])
    return made


def _mask(place_T: Tensor, stop: int, padding_R: Tensor) -> Tensor | None:
    """[R, 1, T, K], True where a query may look: not at padding, not ahead. None where that is everywhere."""
    if len(place_T) == 1 and not bool(padding_R.any()):
        return None
    key_K = torch.arange(stop, device=place_T.device)
    behind_TK = key_K <= place_T[:, None]
    real_R1K = (key_K >= padding_R[:, None])[:, None]
    # A padded query sees itself, so that no row of the softmax is empty.
    itself_TK = key_K == place_T[:, None]
    return (behind_TK & (real_R1K | itself_TK))[:, None]


def _snapshot(layer: Any, dtype: torch.dtype) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        attention_norm=layer.input_layernorm.weight.detach().clone(),
        qkv=_fused((attention.q_proj, attention.k_proj, attention.v_proj), dtype),
        out=_fused((attention.o_proj,), dtype),
        mlp_norm=layer.post_attention_layernorm.weight.detach().clone(),
        gate_up=_fused((mlp.gate_proj, mlp.up_proj), dtype),
        down=_fused((mlp.down_proj,), dtype),
    )


def _fused(linears: Sequence[Any], dtype: torch.dtype) -> _Linear:
    """Linear layers over the same input as one: merged with their adapters in float32, and with them apart where it is rounded."""
    if dtype == torch.float32 or not any(hasattr(linear, "base_layer") for linear in linears):
        return _Linear(torch.cat([merged_weight(linear) for linear in linears]).to(dtype))
    weights = [getattr(linear, "base_layer", linear).weight.detach().float() for linear in linears]
    down, up = [], []
    for row, linear in enumerate(linears):
        for name in getattr(linear, "active_adapters", ()):
            down.append(linear.lora_A[name].weight)
            column = [w.new_zeros(len(w), linear.r[name]) for w in weights]  # acts on its own layer's outputs only
            column[row] = linear.lora_B[name].weight * linear.scaling[name]
            up.append(torch.cat(column))
    return _Linear(torch.cat(weights).to(dtype), torch.cat(down).to(dtype), torch.cat(up, 1).to(dtype))
