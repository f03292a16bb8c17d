"""What a snapshot shares with the policy, counted by storages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from architectures import own_code_policy
from fakes import four_bit_policy
from motley.compute.decoder import Decoder
from motley.config import Lora, TrainPart
from motley.engines.snapshot import Snapshot
from motley.models.four_bits import FourBits
from motley.models.policy import Policy, with_trained_part


def adapted(dtype: torch.dtype, **lora: object) -> Policy:
    policy = replace(own_code_policy("qwen2"), dtype=dtype)
    return with_trained_part(policy, TrainPart(lora=Lora(rank=2, **lora)), seed=0)


def snapshot_of(policy: Policy) -> Snapshot:
    return Snapshot.of(Decoder.of(policy.base), policy.dtype, policy.dtype)


def places(policy: Policy) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in policy.model.parameters()}


def weights_of(snapshot: Snapshot) -> list[torch.Tensor]:
    return [one.weight for layer in snapshot.layers for (one,) in layer.projections]


def test_an_adapters_base_is_there_once_in_half_types() -> None:
    policy = adapted(torch.bfloat16)
    known = places(policy)
    assert all(w.untyped_storage().data_ptr() in known for w in weights_of(snapshot_of(policy)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_trains_or_is_merged_is_a_copy(dtype: torch.dtype) -> None:
    full = replace(own_code_policy("qwen2"), dtype=dtype)
    for policy in (full, adapted(torch.float32)):
        known = places(policy)
        made = weights_of(snapshot_of(policy))
        assert not any(w.untyped_storage().data_ptr() in known for w in made)


def test_shared_weights_are_those_of_all_layers_of_an_input() -> None:
    policy = adapted(torch.bfloat16)
    for layer, kept in zip(policy.base.model.layers, snapshot_of(policy).layers, strict=True):
        attention = layer.self_attn
        rows = [getattr(attention, f"{n}_proj").base_layer.weight for n in "qkv"]
        assert torch.equal(kept.qkv[0].weight, torch.cat(rows))
        ups = [layer.mlp.gate_proj.base_layer.weight, layer.mlp.up_proj.base_layer.weight]
        assert torch.equal(kept.gate_up[0].weight, torch.cat(ups))


def test_adapters_of_some_layers_leave_the_others_as_copies() -> None:
    policy = adapted(torch.bfloat16, targets=("q_proj", "v_proj"))
    snapshot = snapshot_of(policy)
    before = [w.clone() for w in weights_of(snapshot)]
    with torch.no_grad():
        for _, parameter in policy.trained():
            parameter.add_(1.0)
    snapshot.refresh(Decoder.of(policy.base))
    assert all(map(torch.equal, before, weights_of(snapshot)))
    (adapter,) = snapshot.layers[0].qkv[0].adapters[0]
    first = policy.base.model.layers[0].self_attn.q_proj
    assert torch.equal(adapter.A[:2], first.lora_A["default"].weight.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [(), ("q_proj",)])
def test_a_base_in_four_bits_is_there_once_in_every_type(
    targets: tuple[str, ...], dtype: torch.dtype
) -> None:
    policy = replace(four_bit_policy(targets=targets), dtype=dtype)
    known, snapshot = places(policy), snapshot_of(policy)
    held = [
        weight
        for layer in snapshot.layers
        for (one,) in layer.projections
        for weight in one.weights
    ]
    assert len(held) == 2 * 7
    for weight in held:
        assert isinstance(weight, FourBits)
        assert {
            part.untyped_storage().data_ptr() for part in (weight.code_EJ, weight.scale_EK)
        } <= known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_beside_four_bits_are_taken_anew(dtype: torch.dtype) -> None:
    policy = replace(four_bit_policy(), dtype=dtype)
    snapshot = snapshot_of(policy)
    with torch.no_grad():
        for _, parameter in policy.trained():
            parameter.add_(1.0)
    (adapter,) = snapshot.layers[0].qkv[0].adapters[0]
    first = policy.base.model.layers[0].self_attn.q_proj.lora_A["default"].weight
    assert not torch.equal(adapter.A[:4], first.to(dtype))
    snapshot.refresh(Decoder.of(policy.base))
    assert torch.equal(adapter.A[:4], first.to(dtype))
