"""The built-in engine: batched sampling from Llama-architecture models with a key-value cache.

Differs from transformers' `generate`: samples of one prompt that agree so far are one *branch*, computed once, so that a prompt
costs nothing per sample and sure answers hardly anything; a branch whose samples have all ended is gone. Projections are fused
into a snapshot of the weights (LoRA merged), and every sample draws from its own row of random numbers, so that a completion
does not depend on what else is in the batch.
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


@dataclass(frozen=True, slots=True)
class _Layer:
    """Fused weights of one layer, each norm's scale folded into the projection after it."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


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


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What was sampled, one row per sample; columns at or behind `length_B` mean nothing."""

    token_BT: Tensor
    logp_BT: Tensor
    length_B: Tensor


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
                f"prompt of {longest} tokens and max_tokens={sampling.max_tokens} do not fit the model's {self._max_positions} "
                "positions; lower max_tokens or shorten the prompts"
            )
        num_rows = len(prompts) * num_samples
        uniform_BT = torch.rand(num_rows, sampling.max_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        logits_RV, cache = self._prefill(prompts, sampling.max_tokens)
        drawn = self._decode(logits_RV, cache, longest, sampling, uniform_BT.to(logits_RV.device))
        completions = _completions(drawn, self._policy.vocabulary.end_id)
        return [completions[i : i + num_samples] for i in range(0, num_rows, num_samples)]

    def _prefill(self, prompts: Sequence[Sequence[int]], room: int) -> tuple[Tensor, _Cache]:
        """Run the prompts, one branch each, and leave room for `room` more positions."""
        device, longest = self._embed.device, max(len(p) for p in prompts)
        pad = self._policy.vocabulary.pad_id
        token_RT = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=device)
        padding_R = torch.tensor([longest - len(p) for p in prompts], device=device)
        shape = (longest + room, len(prompts), 2, self._kv_heads, self._head_dim)
        cache = _Cache([torch.empty(shape, dtype=self._embed.dtype, device=device) for _ in self._layers], padding_R)
        return self._forward(token_RT, 0, cache), cache

    def _decode(self, logits_RV: Tensor, cache: _Cache, start: int, sampling: Sampling, uniform_BT: Tensor) -> _Drawn:
        """Draw tokens until every sample has ended. Of those still running, `row_b` says which they are, `branch_b` where they stand."""
        num_rows, max_tokens = uniform_BT.shape
        device, vocabulary_size = logits_RV.device, logits_RV.shape[1]
        token_BT = torch.zeros(num_rows, max_tokens, dtype=torch.int64, device=device)
        logp_BT = torch.zeros(num_rows, max_tokens, device=device)
        length_B = torch.full((num_rows,), max_tokens, device=device)
        row_b = torch.arange(num_rows, device=device)
        branch_b = row_b // (num_rows // len(logits_RV))
        for step in range(max_tokens):
            token_b, logp_b = draw(logits_RV, branch_b, sampling, uniform_BT[row_b, step])
            token_BT[row_b, step] = token_b
            logp_BT[row_b, step] = logp_b
            ends_b = token_b == self._policy.vocabulary.end_id
            length_B[row_b[ends_b]] = step + 1
            row_b = row_b[~ends_b]
            if len(row_b) == 0 or step + 1 == max_tokens:
                break
            fork_R, branch_b = (branch_b[~ends_b] * vocabulary_size + token_b[~ends_b]).unique(return_inverse=True)
            cache.follow(fork_R // vocabulary_size, start + step)
            logits_RV = self._forward((fork_R % vocabulary_size)[:, None], start + step, cache)
        return _Drawn(token_BT, logp_BT, length_B)

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
            qkv = F.linear(self._rms(hidden), layer.qkv).view(rows, steps, -1, self._head_dim)
            query_key = qkv[:, :, :rotated]
            swapped = torch.cat([query_key[..., half:], query_key[..., :half]], -1)
            query_key = torch.addcmul(query_key * cos_RT1d, swapped, sin_RT1d)
            kv[start:stop, :, 0] = query_key[:, :, heads:].transpose(0, 1)
            kv[start:stop, :, 1] = qkv[:, :, rotated:].transpose(0, 1)
            mixed = F.scaled_dot_product_attention(
                query_key[:, :, :heads].transpose(1, 2),
                kv[:stop, :, 0].permute(1, 2, 0, 3),
                kv[:stop, :, 1].permute(1, 2, 0, 3),
                attn_mask=mask_R1TK,
                enable_gqa=heads != self._kv_heads,
            )
            hidden = torch.addmm(hidden, mixed.transpose(1, 2).reshape(rows * steps, -1), layer.out.T)
            gate, up = F.linear(self._rms(hidden), layer.gate_up).chunk(2, -1)
            hidden = torch.addmm(hidden, F.silu(gate).mul_(up), layer.down.T)
        last = hidden.view(rows, steps, -1)[:, -1]
        return F.linear(self._rms(last), self._head).float()

    def _rotation(self, position_RT: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for x·cos + swap(x)·sin, where swap exchanges the halves: the first half of sin is negative."""
        cos, sin = self._policy.base.model.rotary_emb(self._embed, position_RT)
        half = self._head_dim // 2
        return cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]

    def _rms(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], None, self._eps)


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


def draw(logits_RV: Tensor, branch_B: Tensor, sampling: Sampling, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per sample from its branch's logits, and its log-prob under the declared convention.

    Temperature 0: the best token, and its log-prob at temperature 1.
    """
    if sampling.temperature == 0:
        best = torch.log_softmax(logits_RV, -1).max(-1)
        return best.indices[branch_B], best.values[branch_B]
    full_RV = torch.log_softmax(logits_RV / sampling.temperature, -1)
    sampled_RV = _truncate(full_RV, sampling)
    # Inverse of the cumulative distribution, in float64 so that the tail of a large vocabulary is not lost.
    cumulative_BV = sampled_RV.double().exp().cumsum(-1)[branch_B]
    threshold_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    token_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True).clamp(max=logits_RV.shape[1] - 1).squeeze(1)
    reported_RV = sampled_RV if sampling.logprobs == "sampled" else full_RV
    return token_B, reported_RV[branch_B, token_B]


def _truncate(logp_RV: Tensor, sampling: Sampling) -> Tensor:
    """Keep the top k, then the smallest set of them with probability top_p, and renormalise."""
    if sampling.top_k == 0 and sampling.top_p == 1:
        return logp_RV
    sorted_RV, order_RV = logp_RV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        sorted_RV[:, sampling.top_k :] = -torch.inf
        sorted_RV = torch.log_softmax(sorted_RV, -1)
    before_RV = sorted_RV.exp().cumsum(-1) - sorted_RV.exp()
    sorted_RV = sorted_RV.masked_fill(before_RV >= sampling.top_p, -torch.inf)
    return torch.log_softmax(torch.empty_like(logp_RV).scatter_(1, order_RV, sorted_RV), -1)


def _snapshot(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = torch.cat([_merged(linear) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)])
    gate_up = torch.cat([_merged(linear) for linear in (mlp.gate_proj, mlp.up_proj)])
    return _Layer(
        qkv=qkv * layer.input_layernorm.weight,
        out=_merged(attention.o_proj).clone(),
        gate_up=gate_up * layer.post_attention_layernorm.weight,
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


def _completions(drawn: _Drawn, end_id: int) -> list[Completion]:
    completions = []
    for tokens, logprobs, length in zip(drawn.token_BT.tolist(), drawn.logp_BT.tolist(), drawn.length_B.tolist(), strict=True):
        ended = tokens[length - 1] == end_id
        completions.append(Completion(tuple(tokens[:length]), tuple(logprobs[:length]), "stop" if ended else "length"))
    return completions
