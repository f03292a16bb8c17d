"""Decoder: a transformers model read as layers, with what stands before and behind them.

Owns the knowledge of how Llama, Mistral, Qwen 2 and 3 and Gemma 3 name and arrange their parts.
Holds the model's own tensors, not copies: whoever computes with a model reads it once, and keeps
the decoder for as long as the model's modules stay. Only for models that `support` knows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Gemma3ForCausalLM, PreTrainedModel

from motley.compute.layers import (
    Adapter,
    Heads,
    Layer,
    Norm,
    Projection,
    Rotation,
    walk_layer,
)
from motley.compute.support import ACTIVATIONS, activation_of, why_unknown
from motley.models.four_bits import FourBitLinear

Ready = Callable[[Layer], Layer]


def as_it_is(layer: Layer) -> Layer:
    return layer


class Held(Protocol):
    """Who has weights come and go, where a device does not always hold them (`sharding`)."""

    always: bool  # they never go

    def holding(self, index: int | None) -> AbstractContextManager[None]:
        """In it the weights of a layer are there; None: those before and behind the layers."""
        ...

    def walk_layer(self, forward: Any, layer: Layer, state: Any, ready: Ready = as_it_is) -> Any:
        """As `layers.walk_layer`, with the layer's weights there for it and for its gradient.

        `ready`: what is done to the layer first.
        """
        ...


class _AlwaysThere:
    always = True

    def holding(self, index: int | None) -> AbstractContextManager[None]:
        return nullcontext()

    def walk_layer(self, forward: Any, layer: Layer, state: Any, ready: Ready = as_it_is) -> Any:
        return walk_layer(forward, ready(layer), state)


@dataclass(frozen=True, slots=True)
class Decoder:
    model: PreTrainedModel
    layers: tuple[Layer, ...]
    norm: Norm
    activation: str  # "silu" | "gelu"
    embed_scale: float
    heads: Heads
    held: Held

    @classmethod
    def of(cls, model: PreTrainedModel, held: Held = _AlwaysThere()) -> Decoder:
        """The decoder of a model that `why_unknown` finds nothing wrong with."""
        config: Any = model.config
        offset = 1.0 if isinstance(model, Gemma3ForCausalLM) else 0.0
        embed: Any = model.model.embed_tokens
        return cls(
            model=model,
            layers=tuple(
                _held_layer(index, layer, config, offset, held)
                for index, layer in enumerate(model.model.layers)
            ),
            norm=_held_norm(model.model.norm, offset, held),
            activation=ACTIVATIONS[activation_of(config)],
            embed_scale=float(getattr(embed, "scalar_embed_scale", 1.0)),
            heads=Heads(
                queries=config.num_attention_heads,
                keys=config.num_key_value_heads,
                size=model.model.layers[0].self_attn.head_dim,
            ),
            held=held,
        )

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self.model.model.embed_tokens.weight
        return weight

    @property
    def head(self) -> Tensor:
        weight: Tensor = self.model.lm_head.weight
        return weight

    @property
    def windows(self) -> set[int | None]:
        return {layer.window for layer in self.layers}

    def embed(self, token_N: Tensor) -> Tensor:
        """In float32. The padding token's row gets no gradient from here, as in transformers."""
        hidden_ND = F.embedding(
            token_N, self.embedding, self.model.model.embed_tokens.padding_idx
        ).float()
        return hidden_ND * self.embed_scale if self.embed_scale != 1 else hidden_ND

    def rotations(self, position_N: Tensor) -> dict[str, Rotation]:
        """[N, d] in float32, by the name that layers call them."""
        tables = {}
        with torch.autocast(position_N.device.type, enabled=False):
            x = torch.zeros(1, 1, device=position_N.device)  # asked for its type and place only
            for name in dict.fromkeys(layer.rotation for layer in self.layers):
                cos, sin = self.model.model.rotary_emb(
                    x, position_N[None], *([name] if name else [])
                )
                tables[name] = Rotation(cos[0], sin[0])
        return tables

    def act(self, gate: Tensor) -> Tensor:
        return F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")


def known_decoder(model: PreTrainedModel) -> Decoder | None:
    """None: a model that runs its own code."""
    return None if why_unknown(model) else Decoder.of(model)


def _held_layer(index: int, layer: Any, config: Any, offset: float, held: Held) -> Layer:
    with held.holding(index):
        return _layer(index, layer, config, offset)


def _held_norm(module: Any, offset: float, held: Held) -> Norm:
    with held.holding(None):
        return _norm(module, offset)


def _layer(index: int, layer: Any, config: Any, offset: float) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norm = lambda module: None if module is None else _norm(module, offset)
    # Gemma: then the norm called post_attention is behind the attention
    apart = hasattr(layer, "pre_feedforward_layernorm")
    return Layer(
        index=index,
        attention_norm=_norm(layer.input_layernorm, offset),
        qkv=tuple(map(_projection, (attention.q_proj, attention.k_proj, attention.v_proj))),
        query_norm=norm(getattr(attention, "q_norm", None)),
        key_norm=norm(getattr(attention, "k_norm", None)),
        out=_projection(attention.o_proj),
        after_attention=norm(layer.post_attention_layernorm) if apart else None,
        mlp_norm=_norm(
            layer.pre_feedforward_layernorm if apart else layer.post_attention_layernorm, offset
        ),
        gate_up=tuple(map(_projection, (mlp.gate_proj, mlp.up_proj))),
        down=_projection(mlp.down_proj),
        after_mlp=norm(layer.post_feedforward_layernorm) if apart else None,
        scaling=attention.scaling,
        window=_window(attention, config),
        rotation="" if "rope_type" in config.rope_parameters else attention.layer_type,
    )


def _window(attention: Any, config: Any) -> int | None:
    """Mistral has one for all layers, others by layer."""
    window: int | None = getattr(
        attention,
        "sliding_window",
        getattr(config, "sliding_window", None) if config.model_type == "mistral" else None,
    )
    return window


def _norm(module: Any, offset: float) -> Norm:
    eps: float = getattr(module, "variance_epsilon", None) or module.eps
    return Norm(module.weight, offset, eps)


def _projection(module: Any) -> Projection:
    """A linear layer and the LoRA adapters beside it."""
    base = getattr(module, "base_layer", module)
    adapters = tuple(
        Adapter(module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])
        for name in getattr(module, "active_adapters", ())
    )
    weight = base.four_bits if isinstance(base, FourBitLinear) else base.weight
    return Projection((weight,), base.bias, (base.out_features,), (adapters,))
