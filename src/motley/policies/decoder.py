"""What our own forward passes need to know of a transformers model: its layers as norms,
projections and how they attend.

Written for Llama, Mistral, Qwen 2 and 3 and Gemma 3, which differ in biases, norms of queries and
keys, norms behind a layer's parts, windows and the activation. `why_unknown` says what keeps any
other model from it; those run their own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from motley.policies.parts import rms_norm

FAMILIES = (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Gemma3ForCausalLM,
)
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}  # what transformers calls them
# others change with the longest row of a batch
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")


class Norm(NamedTuple):
    """x / rms(x) · (weight + offset)."""

    weight: Tensor
    offset: float
    eps: float

    @property
    def scale(self) -> Tensor:
        return self.weight + self.offset if self.offset else self.weight

    def __call__(self, x: Tensor) -> Tensor:
        """In float32."""
        if x.device.type == "cpu":
            return rms_norm(x.float(), self.scale.float(), self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], self.scale, self.eps)


class Adapter(NamedTuple):
    """Adds scaling · B(A(x))."""

    A: Tensor
    B: Tensor
    scaling: float


class Linear(NamedTuple):
    """A projection and the LoRA adapters beside it."""

    weight: Tensor
    bias: Tensor | None
    adapters: tuple[Adapter, ...]

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        for adapter in self.adapters:
            y = y + F.linear(F.linear(x, adapter.A), adapter.B) * adapter.scaling
        return y


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: hidden += after_attention(out(attention(qkv(attention_norm(hidden))))), then the
    same with the MLP.
    """

    attention_norm: Norm
    qkv: tuple[Linear, Linear, Linear]
    query_norm: Norm | None  # over each head, before the rotation
    key_norm: Norm | None
    out: Linear
    after_attention: Norm | None
    mlp_norm: Norm
    gate_up: tuple[Linear, Linear]
    down: Linear
    after_mlp: Norm | None
    scaling: float  # of a query's product with a key
    window: int | None  # how many positions back a token sees, itself included
    rotation: str  # which of the decoder's rotations


@dataclass(frozen=True, slots=True)
class Decoder:
    """Of a model as it is now: it holds the model's own tensors, not copies."""

    model: PreTrainedModel
    blocks: tuple[Block, ...]
    norm: Norm
    activation: str  # "silu" | "gelu"
    embed_scale: float
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Decoder:
        """The decoder of a model that `why_unknown` finds nothing wrong with."""
        config: Any = model.config
        offset = 1.0 if isinstance(model, Gemma3ForCausalLM) else 0.0
        embed: Any = model.model.embed_tokens
        attention = model.model.layers[0].self_attn
        return cls(
            model=model,
            blocks=tuple(_block(layer, config, offset) for layer in model.model.layers),
            norm=_norm(model.model.norm, offset),
            activation=ACTIVATIONS[_activation(config)],
            embed_scale=float(getattr(embed, "scalar_embed_scale", 1.0)),
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
        )

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self.model.model.embed_tokens.weight
        return weight

    @property
    def head(self) -> Tensor:
        weight: Tensor = self.model.lm_head.weight
        return weight

    def embed(self, token_N: Tensor) -> Tensor:
        """In float32. The padding token's row gets no gradient from here, as in transformers."""
        hidden_ND = F.embedding(
            token_N, self.embedding, self.model.model.embed_tokens.padding_idx
        ).float()
        return hidden_ND * self.embed_scale if self.embed_scale != 1 else hidden_ND

    def rotations(self, position_N: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """cos and sin [N, 1, d] in float32, by the name that blocks call them."""
        found = {}
        with torch.autocast(position_N.device.type, enabled=False):
            x = self.embedding[:1, :1].float()
            for name in dict.fromkeys(block.rotation for block in self.blocks):
                cos, sin = self.model.model.rotary_emb(
                    x, position_N[None], *([name] if name else [])
                )
                found[name] = (cos[0, :, None], sin[0, :, None])
        return found

    def act(self, gate: Tensor) -> Tensor:
        return F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")


def why_unknown(model: nn.Module) -> str:
    """Why our own forward passes do not compute this model; empty where they do."""
    if type(model) not in FAMILIES:
        return (
            f"{type(model).__name__} is none of {', '.join(family.__name__ for family in FAMILIES)}"
        )
    config: Any = model.config
    if _activation(config) not in ACTIVATIONS:
        return f"its activation is {_activation(config)}"
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases"
    if getattr(config, "attn_logit_softcapping", None) or getattr(
        config, "final_logit_softcapping", None
    ):
        return "it caps its logits"
    if getattr(config, "use_bidirectional_attention", False):
        return "it looks ahead"
    rotations = config.rope_parameters
    named = [rotations] if "rope_type" in rotations else [one for one in rotations.values() if one]
    unusual = [one["rope_type"] for one in named if one["rope_type"] not in FIXED_ROTATIONS]
    return f"its rotary embedding is {unusual[0]}" if unusual else ""


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _block(layer: Any, config: Any, offset: float) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    norm = lambda module: None if module is None else _norm(module, offset)
    # Gemma: then the norm called post_attention is behind the attention
    apart = hasattr(layer, "pre_feedforward_layernorm")
    return Block(
        attention_norm=_norm(layer.input_layernorm, offset),
        qkv=(linear_of(attention.q_proj), linear_of(attention.k_proj), linear_of(attention.v_proj)),
        query_norm=norm(getattr(attention, "q_norm", None)),
        key_norm=norm(getattr(attention, "k_norm", None)),
        out=linear_of(attention.o_proj),
        after_attention=norm(layer.post_attention_layernorm) if apart else None,
        mlp_norm=_norm(
            layer.pre_feedforward_layernorm if apart else layer.post_attention_layernorm, offset
        ),
        gate_up=(linear_of(mlp.gate_proj), linear_of(mlp.up_proj)),
        down=linear_of(mlp.down_proj),
        after_mlp=norm(layer.post_feedforward_layernorm) if apart else None,
        scaling=attention.scaling,
        window=_window(attention, config),
        rotation="" if "rope_type" in config.rope_parameters else attention.layer_type,
    )


def _window(attention: Any, config: Any) -> int | None:
    """Mistral has one for all layers, others by layer."""
    found: int | None = getattr(
        attention,
        "sliding_window",
        getattr(config, "sliding_window", None) if config.model_type == "mistral" else None,
    )
    return found


def _norm(module: Any, offset: float) -> Norm:
    eps: float = getattr(module, "variance_epsilon", None) or module.eps
    return Norm(module.weight, offset, eps)


def linear_of(module: Any) -> Linear:
    base = getattr(module, "base_layer", module)
    adapters = tuple(
        Adapter(module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])
        for name in getattr(module, "active_adapters", ())
    )
    return Linear(base.weight, base.bias, adapters)
