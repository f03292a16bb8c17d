"""Log-probs of completion tokens, with gradient.

Differs from calling the transformers model on padded rows: a prompt shared by a group is computed once, linear layers see no
padding, and the vocabulary projection sees only the positions that predict a completion token, in chunks that are recomputed
in the backward pass, so that the batch's logits never exist at once. Owns no batching: `Packed` is built by learning.batches.

Llama models have a forward of their own here. Any other model runs its own code, with only the attention replaced by ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from motley.policies.policy import Policy

LOGITS_AT_ONCE = 2**24
ATTENTION = "motley"  # what transformers knows our attention by
UNUSUAL = ("softcap", "s_aux", "position_bias")  # what some layers ask of attention, and neither torch's nor ours does


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


def score(policy: Policy, packed: Packed) -> Scores:
    """Score every completion token of a packed batch."""
    hidden_ND = hidden_states(policy, packed)
    return score_hidden(hidden_ND[packed.predictor_M].float(), policy.base.get_output_embeddings(), packed)


def hidden_states(policy: Policy, packed: Packed) -> Tensor:
    """Final hidden state of every packed token. Products in the policy's dtype; sums, norms and what is handed on in float32."""
    model = policy.base
    with torch.autocast(policy.device.type, dtype=policy.dtype, enabled=policy.dtype != torch.float32):
        if is_plain_llama(model):
            return _llama(model, packed, policy.gradient_checkpointing and torch.is_grad_enabled())
        return _by_its_own_code(model, packed, policy.gradient_checkpointing)


def is_plain_llama(model: nn.Module) -> bool:
    """Whether the forward and the engine written for Llama compute this model: no biases, the usual activation."""
    if type(model) is not LlamaForCausalLM:
        return False
    config: Any = model.config
    return config.hidden_act == "silu" and not config.attention_bias and not config.mlp_bias


def _llama(model: LlamaForCausalLM, packed: Packed, checkpointed: bool) -> Tensor:
    decoder = model.model
    hidden_ND = decoder.embed_tokens(packed.token_N).float()
    cos, sin = decoder.rotary_emb(hidden_ND[None], packed.position_N[None])
    cos_N1d, sin_N1d = cos[0, :, None], sin[0, :, None]
    for layer in decoder.layers:
        if checkpointed:
            hidden_ND = checkpoint(_llama_layer, layer, hidden_ND, cos_N1d, sin_N1d, packed, use_reentrant=False)
        else:
            hidden_ND = _llama_layer(layer, hidden_ND, cos_N1d, sin_N1d, packed)
    return _norm(decoder.norm, hidden_ND)


def _llama_layer(layer: Any, hidden_ND: Tensor, cos_N1d: Tensor, sin_N1d: Tensor, packed: Packed) -> Tensor:
    attention, mlp = layer.self_attn, layer.mlp
    normed_ND = _norm(layer.input_layernorm, hidden_ND)
    query, key, value = (_heads(linear(normed_ND), attention.head_dim) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    query, key = (_rotate(heads, cos_N1d, sin_N1d).to(value.dtype) for heads in (query, key))
    hidden_ND = hidden_ND + attention.o_proj(_attend(query, key, value, packed).flatten(1))
    normed_ND = _norm(layer.post_attention_layernorm, hidden_ND)
    return hidden_ND + mlp.down_proj(F.silu(mlp.gate_proj(normed_ND)) * mlp.up_proj(normed_ND))


def _by_its_own_code(model: PreTrainedModel, packed: Packed, checkpointed: bool) -> Tensor:
    """The model's forward on one row of all packed tokens. A mask of one element keeps transformers from making one of N x N."""
    prepare(model)
    if checkpointed != bool(model.is_gradient_checkpointing):
        model.gradient_checkpointing_enable({"use_reentrant": False}) if checkpointed else model.gradient_checkpointing_disable()
    model.train(checkpointed)  # transformers checkpoints in training mode only
    output = model.base_model(
        input_ids=packed.token_N[None],
        position_ids=packed.position_N[None],
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.token_N.device),
        use_cache=False,
        packed=packed,
    )
    hidden_ND: Tensor = output[0][0]
    return hidden_ND


def prepare(model: PreTrainedModel) -> None:
    """Give a model our attention, and take its dropout: log-probs must be those of the policy that samples."""
    if model.config._attn_implementation == ATTENTION:
        return
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    model.eval()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in [name for name, value in vars(part).items() if "dropout" in name and isinstance(value, float)]:
            setattr(part, name, 0.0)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: Packed | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What a transformers layer calls: torch's own attention, or over packed tokens ours. Heads come as [1, H, N, d]."""
    unusual = [name for name in UNUSUAL if others.get(name) is not None]
    if unusual:
        raise ValueError(f"its attention needs {' and '.join(unusual)}, which is not computed here")
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **others)
    query_NHd, key_NHd, value_NHd = (heads[0].transpose(0, 1) for heads in (query, key, value))
    mixed_NHd = _attend(query_NHd, key_NHd, value_NHd, packed, scaling, sliding_window)
    return mixed_NHd[None], None


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


def _attend(
    query_NHd: Tensor,
    key_NHd: Tensor,
    value_NHd: Tensor,
    packed: Packed,
    scaling: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Prompts among themselves, causally; completions over their prompt and themselves. Back in packed order, [N, H, d].

    `window`: how many positions back a token sees, itself included; None: all.
    """
    grouped = query_NHd.shape[1] != key_NHd.shape[1]
    prompts = packed.prompt_PT
    near_PTT = None if window is None or prompts.shape[1] <= window else _near(packed, prompts, prompts, window)
    if near_PTT is not None:
        near_PTT = near_PTT & torch.ones(prompts.shape[1], prompts.shape[1], dtype=torch.bool, device=prompts.device).tril()
    mixed = F.scaled_dot_product_attention(
        _rows(query_NHd, prompts),
        _rows(key_NHd, prompts),
        _rows(value_NHd, prompts),
        attn_mask=None if near_PTT is None else near_PTT[:, None],
        is_causal=near_PTT is None,
        enable_gqa=grouped,
        scale=scaling,
    )
    outputs = [mixed.transpose(1, 2).flatten(0, 1).index_select(0, packed.prompt_flat)]
    if packed.row_BT.shape[1]:
        visible = packed.visible_B1TK
        if window is not None and packed.key_BK.shape[1] > window:
            visible = visible & _near(packed, packed.row_BT, packed.key_BK, window)[:, None]
        mixed = F.scaled_dot_product_attention(
            _rows(query_NHd, packed.row_BT),
            _rows(key_NHd, packed.key_BK),
            _rows(value_NHd, packed.key_BK),
            attn_mask=visible,
            enable_gqa=grouped,
            scale=scaling,
        )
        outputs.append(mixed.transpose(1, 2).flatten(0, 1).index_select(0, packed.row_flat))
    return torch.cat(outputs)


def _near(packed: Packed, query_BT: Tensor, key_BK: Tensor, window: int) -> Tensor:
    """[B, T, K], True where a key stands less than a window behind the query. Padding sees itself, so that no row is empty."""
    back_BTK = packed.position_N[query_BT][:, :, None] - packed.position_N[key_BK][:, None]
    return back_BTK < window


def _rows(heads_NHd: Tensor, index_BT: Tensor) -> Tensor:
    """Gather packed heads into [B, H, T, d]."""
    return heads_NHd.index_select(0, index_BT.flatten()).unflatten(0, index_BT.shape).transpose(1, 2)
