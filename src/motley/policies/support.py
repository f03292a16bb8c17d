"""What our own forward computes: which architectures, and on which devices its kernels run.

A model that `why_unknown` gives a reason for runs its own code instead: several times slower on a
GPU, otherwise the same. Whether that code can be used at all is tried out by `learning.fitting`.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

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


def why_unknown(model: nn.Module) -> str:
    """Why our own forward passes do not compute this model; empty where they do."""
    if type(model) not in FAMILIES:
        return (
            f"{type(model).__name__} is none of {', '.join(family.__name__ for family in FAMILIES)}"
        )
    config: Any = model.config
    if activation_of(config) not in ACTIVATIONS:
        return f"its activation is {activation_of(config)}"
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


def activation_of(config: Any) -> str:
    """As transformers calls it."""
    return getattr(config, "hidden_activation", None) or config.hidden_act


@lru_cache
def runs_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run there: tried out, since Triton also needs a C compiler."""
    if (
        device.type != "cuda"
        or find_spec("triton") is None
        or torch.cuda.get_device_capability(device) < (7, 0)
    ):
        return False
    from motley.policies.kernels import gated

    try:
        with torch.cuda.device(device):
            gated(torch.zeros(1, 2, device=device), "silu")
    except (RuntimeError, OSError, SubprocessError) as error:
        said, *_ = str(error).splitlines() or [type(error).__name__]
        warnings.warn(
            f"Triton does not work here, so sampling and training are several times slower: {said}",
            stacklevel=2,
        )
        return False
    return True


@lru_cache
def runs_flash(device: torch.device) -> bool:
    """Whether torch's flash attention runs there too: NVIDIA's from Ampere on."""
    return (
        runs_kernels(device)
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
