"""Which models our own forward computes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from architectures import ARCHITECTURES, own_code_policy
from motley.compute.decoder import known_decoder
from motley.compute.support import runs_flash, runs_kernels, why_unknown


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_all_but_gpt2_and_opt_have_a_forward_of_our_own(kind: str) -> None:
    model = own_code_policy(kind).base
    assert bool(why_unknown(model)) == (kind in ("gpt2", "opt"))
    assert (known_decoder(model) is None) == (kind in ("gpt2", "opt"))


@pytest.mark.parametrize(
    ("kind", "sizes", "reason"),
    [
        ("gpt2", {}, "GPT2LMHeadModel is none of LlamaForCausalLM, "),
        ("qwen2", {"hidden_act": "relu"}, "its activation is relu"),
        ("llama with biases", {"mlp_bias": True}, "its MLP has biases"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "it caps its logits"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "its rotary embedding is dynamic",
        ),
    ],
)
def test_the_reason_is_told(kind: str, sizes: dict[str, object], reason: str) -> None:
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[kind](**sizes))
    assert why_unknown(model).startswith(reason)


def test_a_cpu_runs_neither_kernels_nor_flash() -> None:
    assert not runs_kernels(torch.device("cpu"))
    assert not runs_flash(torch.device("cpu"))
