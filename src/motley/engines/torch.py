"""The built-in engine: batched sampling from Llama-architecture models with a key-value cache.

Differs from transformers' `generate`: projections are fused into a snapshot of the weights (LoRA merged), a prompt is
computed once for all its samples, finished rows leave the batch, and every row draws from its own row of random numbers, so
that a completion does not depend on which others share its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from motley.engines.engine import Completion
from motley.policies.policy import Policy
from motley.records import Sampling

# Rows that have finished are cut out of the cache once they are this share of it; cutting copies the rest.
FINISHED_SHARE_TO_CUT = 0.5


@dataclass(frozen=True, slots=True)
class _Layer:
    """Fused weights of one layer, each norm's scale folded into the projection after it."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class _Cache:
    """Keys and values per layer [2, positions, kv heads, d, B]: the batch innermost, so that a decode step is plain vector work.

    Prompts end at `prompt_length` and are padded on the left.
    """

    layers: list[Tensor]
    padding_B: Tensor  # how many positions on the left of a row are padding
    prompt_length: int

    def keep(self, rows: Tensor) -> None:
        self.layers = [layer[..., rows] for layer in self.layers]
        self.padding_B = self.padding_B[rows]

    def copies(self, num_samples: int, room: int) -> _Cache:
        """Every row `num_samples` times next to each other, with `room` more positions."""
        return _Cache(
            [_copies(layer, num_samples, room) for layer in self.layers], self.padding_B.repeat_interleave(num_samples), self.prompt_length
        )


class TorchEngine:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        model = self._policy.base
        config = model.config
        self._layers = [_snapshot(layer) for layer in model.model.layers]
        self._embed: Tensor = model.model.embed_tokens.weight.detach().clone()
        self._head: Tensor = model.lm_head.weight.detach() * model.model.norm.weight
        self._eps: float = config.rms_norm_eps
        self._head_dim: int = model.model.layers[0].self_attn.head_dim
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._max_positions: int = config.max_position_embeddings

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int) -> list[list[Completion]]:
        longest = max(len(p) for p in prompts)
        if longest + sampling.max_tokens > self._max_positions:
            raise ValueError(
                f"prompt of {longest} tokens and max_tokens={sampling.max_tokens} do not fit the model's {self._max_positions} positions; "
                "lower max_tokens or shorten the prompts"
            )
        num_rows = len(prompts) * num_samples
        uniform_BT = torch.rand(num_rows, sampling.max_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        logits_PV, prompt_cache = self._prefill(prompts)
        cache = prompt_cache.copies(num_samples, sampling.max_tokens - 1)
        logits_BV = logits_PV.repeat_interleave(num_samples, 0)
        tokens_BT, logp_BT, length_B = self._decode(logits_BV, cache, sampling, uniform_BT.to(logits_PV.device))
        completions = _completions(tokens_BT, logp_BT, length_B, self._policy.vocabulary.end_id)
        return [completions[i : i + num_samples] for i in range(0, num_rows, num_samples)]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, _Cache]:
        """Run the prompts, padded on the left."""
        device, longest = self._embed.device, max(len(p) for p in prompts)
        pad = self._policy.vocabulary.pad_id
        token_TP = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=device).T
        padding_P = torch.tensor([longest - len(p) for p in prompts], device=device)
        shape = (2, longest, self._kv_heads, self._head_dim, len(prompts))
        cache = _Cache([torch.empty(shape, dtype=self._embed.dtype, device=device) for _ in self._layers], padding_P, longest)
        return self._forward(token_TP, 0, cache), cache

    def _decode(self, logits_BV: Tensor, cache: _Cache, sampling: Sampling, uniform_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw tokens until every row has ended. Rows index the full batch; `row_b` says which of them are still running."""
        num_rows, max_tokens = uniform_BT.shape
        device = logits_BV.device
        tokens_BT = torch.zeros(num_rows, max_tokens, dtype=torch.int64, device=device)
        logp_BT = torch.zeros(num_rows, max_tokens, device=device)
        length_B = torch.full((num_rows,), max_tokens, device=device)
        row_b = torch.arange(num_rows, device=device)
        running_b = torch.ones(num_rows, dtype=torch.bool, device=device)
        for step in range(max_tokens):
            token_b, logp_b = draw(logits_BV, sampling, uniform_BT[row_b, step])
            tokens_BT[row_b, step] = token_b
            logp_BT[row_b, step] = logp_b
            ends_b = running_b & (token_b == self._policy.vocabulary.end_id)
            length_B[row_b[ends_b]] = step + 1
            running_b = running_b & ~ends_b
            alive = int(running_b.sum())
            if alive == 0 or step + 1 == max_tokens:
                break
            if alive <= (1 - FINISHED_SHARE_TO_CUT) * len(row_b):
                kept = running_b.nonzero().squeeze(1)
                cache.keep(kept)
                row_b, token_b, running_b = row_b[kept], token_b[kept], running_b[kept]
            logits_BV = self._forward(token_b[None], cache.prompt_length + step, cache)
        return tokens_BT, logp_BT, length_B

    def _forward(self, token_TB: Tensor, start: int, cache: _Cache) -> Tensor:
        """Logits [B, V] after the last of T tokens that stand at cache positions start..start+T. Features lead: [D, T·B]."""
        steps, rows = token_TB.shape
        stop = start + steps
        place_T = torch.arange(start, stop, device=token_TB.device)
        position_TB = (place_T[:, None] - cache.padding_B).clamp(min=0)
        cos, sin = self._policy.base.model.rotary_emb(self._embed, position_TB)
        cos_dTB, sin_dTB = (table[..., : self._head_dim // 2].permute(2, 0, 1).contiguous() for table in (cos, sin))
        mask_TKB = _mask(place_T, stop, cache.padding_B)
        hidden = F.embedding(token_TB.flatten(), self._embed).T.contiguous()
        for layer, kv in zip(self._layers, cache.layers, strict=True):
            qkv = (layer.qkv @ self._rms(hidden)).view(-1, self._head_dim, steps, rows)
            query, key, value = qkv.split((self._heads, self._kv_heads, self._kv_heads))
            kv[0, start:stop] = _rotate(key, cos_dTB, sin_dTB).permute(2, 0, 1, 3)
            kv[1, start:stop] = value.permute(2, 0, 1, 3)
            mixed = _attend(_rotate(query, cos_dTB, sin_dTB), kv[:, :stop], mask_TKB)
            hidden = torch.addmm(hidden, layer.out, mixed.reshape(-1, steps * rows))
            gate, up = (layer.gate_up @ self._rms(hidden)).chunk(2)
            hidden = torch.addmm(hidden, layer.down, F.silu(gate).mul_(up))
        return (self._head @ self._rms(hidden[:, -rows:])).T.float()

    def _rms(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(0) + self._eps)


def _copies(layer: Tensor, num_samples: int, room: int) -> Tensor:
    kinds, positions, heads, head_dim, rows = layer.shape
    wide = layer.new_empty(kinds, positions + room, heads, head_dim, rows, num_samples)
    wide[:, :positions] = layer[..., None]
    return wide.flatten(-2)


def _rotate(heads_HdTB: Tensor, cos_dTB: Tensor, sin_dTB: Tensor) -> Tensor:
    """Rotary position embedding along the second axis, halves convention."""
    first, second = heads_HdTB.chunk(2, 1)
    return torch.cat([first * cos_dTB - second * sin_dTB, second * cos_dTB + first * sin_dTB], 1)


def _mask(place_T: Tensor, stop: int, padding_B: Tensor) -> Tensor | None:
    """[T, K, B], True where a row may look: not at padding, not ahead. None where that is everywhere."""
    if len(place_T) == 1 and not bool(padding_B.any()):
        return None
    key_K = torch.arange(stop, device=place_T.device)
    ahead_TK1 = (key_K > place_T[:, None])[..., None]
    padding_KB = key_K[:, None] < padding_B
    # A padded query sees itself, so that no row of the softmax is empty.
    itself_TK1 = (key_K == place_T[:, None])[..., None]
    return ~ahead_TK1 & (~padding_KB | itself_TK1)


def _attend(query_HdTB: Tensor, kv: Tensor, mask_TKB: Tensor | None) -> Tensor:
    """Attention of T queries over the cached keys and values [2, K, kv heads, d, B], as [H, d, T, B]."""
    heads, head_dim, steps, rows = query_HdTB.shape
    key_KhdB, value_KhdB = kv
    if steps > 1:
        assert mask_TKB is not None
        mixed = F.scaled_dot_product_attention(
            query_HdTB.permute(3, 0, 2, 1),
            key_KhdB.permute(3, 1, 0, 2),
            value_KhdB.permute(3, 1, 0, 2),
            attn_mask=mask_TKB.permute(2, 0, 1)[:, None],
            enable_gqa=heads != key_KhdB.shape[1],
        )
        return mixed.permute(1, 3, 2, 0)
    kv_heads = key_KhdB.shape[1]
    query_hgdB = query_HdTB.view(kv_heads, heads // kv_heads, head_dim, rows) * head_dim**-0.5
    score_KhgB = (key_KhdB[:, :, None] * query_hgdB).sum(3)
    if mask_TKB is not None:
        score_KhgB = score_KhgB.masked_fill(~mask_TKB[0][:, None, None], -torch.inf)
    weight_KhgB = score_KhgB.softmax(0)
    return (weight_KhgB[:, :, :, None] * value_KhdB[:, :, None]).sum(0)


def draw(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-prob under the declared convention. Temperature 0: the best token, log-prob at temperature 1."""
    if sampling.temperature == 0:
        logp_BV = torch.log_softmax(logits_BV, -1)
        best = logp_BV.max(-1)
        return best.indices, best.values
    full_BV = torch.log_softmax(logits_BV / sampling.temperature, -1)
    sampled_BV = _truncate(full_BV, sampling)
    # Inverse of the cumulative distribution, in float64 so that the tail of a large vocabulary is not lost.
    cumulative_BV = sampled_BV.double().exp().cumsum(-1)
    threshold_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    token_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True).clamp(max=logits_BV.shape[1] - 1)
    reported_BV = sampled_BV if sampling.logprobs == "sampled" else full_BV
    return token_B1.squeeze(1), reported_BV.gather(1, token_B1).squeeze(1)


def _truncate(logp_BV: Tensor, sampling: Sampling) -> Tensor:
    """Keep the top k, then the smallest set of them with probability top_p, and renormalise."""
    if sampling.top_k == 0 and sampling.top_p == 1:
        return logp_BV
    sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        sorted_BV[:, sampling.top_k :] = -torch.inf
        sorted_BV = torch.log_softmax(sorted_BV, -1)
    before_BV = sorted_BV.exp().cumsum(-1) - sorted_BV.exp()
    sorted_BV = sorted_BV.masked_fill(before_BV >= sampling.top_p, -torch.inf)
    return torch.log_softmax(torch.empty_like(logp_BV).scatter_(1, order_BV, sorted_BV), -1)


def _snapshot(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        qkv=torch.cat([_merged(linear) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)])
        * layer.input_layernorm.weight,
        out=_merged(attention.o_proj).clone(),
        gate_up=torch.cat([_merged(linear) for linear in (mlp.gate_proj, mlp.up_proj)]) * layer.post_attention_layernorm.weight,
        down=_merged(mlp.down_proj).clone(),
    )


def _merged(linear: Any) -> Tensor:
    """The weight a linear layer acts with, its LoRA adapters added in."""
    if not hasattr(linear, "base_layer"):
        return linear.weight.detach()
    weight = linear.base_layer.weight.detach()
    for name in linear.active_adapters:
        weight = weight + linear.get_delta_weight(name)
    return weight


def _completions(tokens_BT: Tensor, logp_BT: Tensor, length_B: Tensor, end_id: int) -> list[Completion]:
    completions = []
    for tokens, logprobs, length in zip(tokens_BT.tolist(), logp_BT.tolist(), length_B.tolist(), strict=True):
        ended = tokens[length - 1] == end_id
        completions.append(Completion(tuple(tokens[:length]), tuple(logprobs[:length]), "stop" if ended else "length"))
    return completions
