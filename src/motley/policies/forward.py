"""Log-probs of completion tokens, with gradient, for Llama-architecture models.

Differs from calling the transformers model on padded rows: a prompt shared by a group is computed once, linear layers see no
padding, and the vocabulary projection sees only the positions that predict a completion token, in chunks that are recomputed
in the backward pass, so that the batch's logits never exist at once. Owns no batching: `Packed` is built by learning.batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

LOGITS_AT_ONCE = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Prompts, then completions, laid end to end (N tokens); where each stands in rows for attention, and what is predicted.

    The last token of a completion is a target but never an input. Completion rows see their prompt's keys, then their own.
    """

    token_N: Tensor
    position_N: Tensor
    prompt_PT: Tensor  # index into N; padding repeats index 0 and is not read back
    prompt_flat: Tensor  # where the packed prompt tokens stand in prompt_PT, flattened
    row_BT: Tensor  # index into N of completion inputs; T may be 0
    row_flat: Tensor
    key_BK: Tensor  # index into N of what a completion row may see
    visible_B1TK: Tensor  # bool
    predictor_M: Tensor  # index into N of the position that predicts target m
    target_M: Tensor
    temperature_M: Tensor
    place_M: Tensor  # flat index of target m in the [B, T] table of completion tokens

    def to(self, device: torch.device) -> Packed:
        return Packed(**{name: getattr(self, name).to(device) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class Scores:
    """Per target token: log-prob under the model at the record's temperature (with gradient), and entropy (without)."""

    logp_M: Tensor
    entropy_M: Tensor


def score(model: LlamaForCausalLM, packed: Packed) -> Scores:
    """Score every completion token of a packed batch."""
    hidden_ND = hidden_states(model, packed)
    return score_hidden(hidden_ND[packed.predictor_M], model.lm_head, packed)


def hidden_states(model: LlamaForCausalLM, packed: Packed) -> Tensor:
    """Final hidden state of every packed token."""
    decoder = model.model
    hidden_ND = decoder.embed_tokens(packed.token_N)
    cos, sin = decoder.rotary_emb(hidden_ND[None], packed.position_N[None])
    cos_N1d, sin_N1d = cos[0, :, None], sin[0, :, None]
    for layer in decoder.layers:
        attention = layer.self_attn
        normed_ND = _norm(layer.input_layernorm, hidden_ND)
        query, key, value = (
            _heads(linear(normed_ND), attention.head_dim) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        mixed_ND = _attend(_rotate(query, cos_N1d, sin_N1d), _rotate(key, cos_N1d, sin_N1d), value, packed)
        hidden_ND = hidden_ND + attention.o_proj(mixed_ND)
        normed_ND = _norm(layer.post_attention_layernorm, hidden_ND)
        hidden_ND = hidden_ND + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(normed_ND)) * layer.mlp.up_proj(normed_ND))
    return _norm(decoder.norm, hidden_ND)


def score_hidden(hidden_MD: Tensor, head: nn.Linear, packed: Packed) -> Scores:
    """Project to the vocabulary in chunks; a chunk's logits are dropped after use and recomputed for the gradient."""
    rows = max(1, LOGITS_AT_ONCE // head.out_features)
    chunks = [
        _score_chunk(hidden, head, target, temperature)
        if len(hidden_MD) <= rows
        else checkpoint(_score_chunk, hidden, head, target, temperature, use_reentrant=False)
        for hidden, target, temperature in zip(
            hidden_MD.split(rows), packed.target_M.split(rows), packed.temperature_M.split(rows), strict=True
        )
    ]
    return Scores(torch.cat([logp for logp, _ in chunks]), torch.cat([entropy for _, entropy in chunks]))


def _score_chunk(hidden_MD: Tensor, head: nn.Module, target_M: Tensor, temperature_M: Tensor) -> tuple[Tensor, Tensor]:
    logp_MV = torch.log_softmax(head(hidden_MD).float() / temperature_M[:, None], -1)
    with torch.no_grad():
        entropy_M = -(logp_MV.exp() * logp_MV).sum(-1)
    return logp_MV.gather(1, target_M[:, None]).squeeze(1), entropy_M


def _norm(norm: nn.Module, hidden_ND: Tensor) -> Tensor:
    return F.rms_norm(hidden_ND, hidden_ND.shape[-1:], norm.weight, norm.variance_epsilon)  # type: ignore[arg-type]


def _heads(flat_N: Tensor, head_dim: int) -> Tensor:
    return flat_N.view(len(flat_N), -1, head_dim)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention: (x1, x2) -> (x1·cos - x2·sin, x2·cos + x1·sin)."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attend(query_NHd: Tensor, key_NHd: Tensor, value_NHd: Tensor, packed: Packed) -> Tensor:
    """Prompts among themselves, causally; completions over their prompt and themselves. Back in packed order."""
    grouped = query_NHd.shape[1] != key_NHd.shape[1]
    mixed = F.scaled_dot_product_attention(
        _rows(query_NHd, packed.prompt_PT),
        _rows(key_NHd, packed.prompt_PT),
        _rows(value_NHd, packed.prompt_PT),
        is_causal=True,
        enable_gqa=grouped,
    )
    outputs = [mixed.transpose(1, 2).flatten(0, 1).index_select(0, packed.prompt_flat)]
    if packed.row_BT.shape[1]:
        mixed = F.scaled_dot_product_attention(
            _rows(query_NHd, packed.row_BT),
            _rows(key_NHd, packed.key_BK),
            _rows(value_NHd, packed.key_BK),
            attn_mask=packed.visible_B1TK,
            enable_gqa=grouped,
        )
        outputs.append(mixed.transpose(1, 2).flatten(0, 1).index_select(0, packed.row_flat))
    return torch.cat(outputs).flatten(1)


def _rows(heads_NHd: Tensor, index_BT: Tensor) -> Tensor:
    """Gather packed heads into [B, H, T, d]."""
    return heads_NHd.index_select(0, index_BT.flatten()).unflatten(0, index_BT.shape).transpose(1, 2)
