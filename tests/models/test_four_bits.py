"""Weights in 4 bits: the format against a float64 reading of it, products and their gradients, and
which layers of a model are held so.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from fakes import four_bit_policy, reference_logp, small_llama, tiny_policy
from motley.config import Lora, TrainPart
from motley.models.devices import spare_onednn
from motley.models.four_bits import (
    BLOCK,
    BYTES_PER_VALUE,
    LEVELS,
    FourBitLinear,
    FourBits,
    hold_in_four_bits,
    num_values,
    round_to_four_bits,
)
from motley.models.opening import saved_policy
from motley.models.policy import MadeOf, Policy, choose_trained, frozen_copy, merged_weight
from motley.models.sources import empty_model
from motley.models.tiny import tiny_vocabulary

F32 = torch.float32
WIDEST = max(after - before for before, after in itertools.pairwise(LEVELS))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def held_layers(policy: Policy) -> dict[str, FourBitLinear]:
    return {
        name: part for name, part in policy.base.named_modules() if isinstance(part, FourBitLinear)
    }


def test_levels_are_the_quantiles_of_the_paper() -> None:
    """Appendix E: eight negative and nine positive ones of a normal distribution, zero once."""
    offset = 0.9677083
    up, down = np.linspace(offset, 0.5, 9)[:-1], np.linspace(offset, 0.5, 8)[:-1]
    made = np.array([*stats.norm.ppf(up), 0.0, *-stats.norm.ppf(down)])
    np.testing.assert_allclose(sorted(made / made.max()), LEVELS, atol=1e-6)


def test_every_level_comes_back_exactly_at_every_place_of_a_byte() -> None:
    levels = torch.tensor(LEVELS)
    pairs_BI = torch.cartesian_prod(levels, levels).view(-1, BLOCK)
    assert (pairs_BI.abs().amax(1) == 1).all()  # so that each block's largest value is known
    scale_B1 = torch.tensor([[0.013], [1.0], [3.0], [700.0]]).repeat(2, 1)
    held = FourBits.of(pairs_BI * scale_B1)
    assert torch.equal(held.full(F32), pairs_BI * scale_B1)
    assert held.code_EJ.flatten().tolist() == list(range(256))


def test_the_first_of_two_values_is_in_the_high_bits() -> None:
    weight_EI = torch.zeros(1, BLOCK)
    weight_EI[0, :2] = torch.tensor([1.0, -1.0])
    assert FourBits.of(weight_EI).code_EJ[0, :2].tolist() == [0xF0, 0x77]


def test_values_are_at_the_nearest_level_of_their_block() -> None:
    weight_EI = normal(24, 3 * BLOCK) * torch.logspace(-3, 2, 24)[:, None]
    made_EI = FourBits.of(weight_EI).full(F32).numpy()
    block = weight_EI.double().numpy().reshape(-1, BLOCK)
    largest = np.abs(block).max(1, keepdims=True)
    levels = np.array(LEVELS, np.float32).astype(np.float64)
    nearest = levels[np.abs(block[..., None] / largest[..., None] - levels).argmin(-1)] * largest
    np.testing.assert_allclose(made_EI, nearest.reshape(made_EI.shape), rtol=1e-6)
    away = np.abs(made_EI.reshape(-1, BLOCK) - block) / largest
    assert away.max() <= WIDEST / 2 * 1.0001


def test_the_error_of_normal_weights_is_about_a_tenth_of_their_spread() -> None:
    weight_EI = normal(256, 512)
    away = FourBits.of(weight_EI).full(F32) - weight_EI
    assert 0.07 < float(away.std()) < 0.11


def test_a_weight_that_was_held_is_held_the_same_again() -> None:
    held = FourBits.of(normal(8, 2 * BLOCK))
    again = FourBits.of(held.full(F32))
    assert torch.equal(again.code_EJ, held.code_EJ)
    assert torch.equal(again.scale_EK, held.scale_EK)


def test_zeros_stay_zeros() -> None:
    weight_EI = normal(3, 2 * BLOCK)
    weight_EI[1, :BLOCK] = 0.0
    made_EI = FourBits.of(weight_EI).full(F32)
    assert not made_EI[1, :BLOCK].any()
    assert made_EI[1, BLOCK:].abs().max() == weight_EI[1, BLOCK:].abs().max()


def test_rows_one_behind_the_other_are_held_as_each_by_itself() -> None:
    one, other = normal(3, 2 * BLOCK), 5 * normal(4, 2 * BLOCK, seed=1)
    both, parts = FourBits.of(torch.cat([one, other])), [FourBits.of(one), FourBits.of(other)]
    assert torch.equal(both.full(F32), torch.cat([part.full(F32) for part in parts]))


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_and_its_gradient_are_those_of_the_full_weight(biased: bool) -> None:
    held, bias = FourBits.of(normal(12, 2 * BLOCK)), normal(12, seed=2) if biased else None
    ours, theirs = (normal(5, 2 * BLOCK, seed=3).requires_grad_() for _ in range(2))
    made, expected = held.product(ours, bias), F.linear(theirs, held.full(F32), bias)
    assert torch.equal(made, expected)
    weight = normal(5, 12, seed=4)
    made.backward(weight)
    expected.backward(weight)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
    assert ours.grad.abs().max() > 0


def test_under_autocast_a_product_is_that_of_the_rounded_weight() -> None:
    spare_onednn(torch.bfloat16, "cpu")
    held, bias = FourBits.of(normal(12, 2 * BLOCK)), normal(12, seed=2)
    ours, theirs = (normal(5, 2 * BLOCK, seed=3).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        made, expected = held.product(ours, bias), F.linear(theirs, held.full(F32), bias)
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, expected)
    made.float().sum().backward()
    expected.float().sum().backward()
    assert ours.grad is not None
    assert ours.grad.dtype == F32
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_nothing_of_a_full_weight_is_kept_for_the_gradient() -> None:
    held, kept = FourBits.of(normal(256, 4 * BLOCK)), []
    given = normal(2, 4 * BLOCK).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.nbytes) or t, lambda t: t
    ):
        held.product(given).sum()
    assert 0 < sum(kept) <= held.code_EJ.nbytes + held.scale_EK.nbytes


def test_a_base_takes_less_than_six_tenths_of_a_byte_for_each_value() -> None:
    held = held_layers(four_bit_policy())
    values = sum(part.in_features * part.out_features for part in held.values())
    taken = sum(part.code.nbytes + part.scale.nbytes for part in held.values())
    assert taken == BYTES_PER_VALUE * values < 0.6 * values
    assert len(held) == 2 * 7  # the projections of two layers


def test_what_is_no_linear_layer_of_whole_blocks_stays_as_it_was() -> None:
    policy = tiny_policy(TrainPart(lora=Lora(rank=2, bits=4)))  # inputs of 96 and of 256
    assert {name.split(".")[-2] for name in held_layers(policy)} == {"down_proj"}
    kinds = {p.dtype for name, p in policy.base.named_parameters() if not name.endswith("code")}
    assert kinds == {F32}
    assert isinstance(policy.base.get_output_embeddings(), nn.Linear)


def test_layers_without_an_adapter_are_held_in_four_bits_too() -> None:
    policy = four_bit_policy(targets=("q_proj",))
    assert len(held_layers(policy)) == 2 * 7
    assert all("q_proj" in name for name, _ in policy.trained())


def test_nothing_of_a_full_weight_is_left_in_the_model() -> None:
    projections = [
        (name, p) for name, p in four_bit_policy().base.named_parameters() if "_proj" in name
    ]
    left = [name for name, p in projections if p.dim() > 1 and ".lora_" not in name]
    assert {name.rpartition(".")[2] for name in left} == {"code", "scale"}


def test_a_model_without_whole_blocks_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"bits=4 finds no linear layer .* of 64; leave bits out"):
        hold_in_four_bits(small_llama().requires_grad_(False))


def test_a_policy_in_four_bits_has_the_size_and_fingerprint_of_one_in_full() -> None:
    held, full = four_bit_policy(), four_bit_policy(bits=0)
    assert held.fingerprint == full.fingerprint
    assert num_values(held.model) == num_values(full.model)
    assert num_values(full.model) == sum(p.numel() for p in full.model.parameters())


def test_a_model_without_values_is_held_in_four_bits_of_the_same_shapes() -> None:
    model = small_llama(hidden_size=64, intermediate_size=128, attention_bias=True)
    empty = choose_trained(empty_model(model.config), TrainPart(lora=Lora(rank=4, bits=4)), 0)
    shapes = {name: p.shape for name, p in four_bit_policy().model.named_parameters()}
    assert {name: p.shape for name, p in empty.named_parameters()} == shapes


def test_a_reference_shares_what_is_in_four_bits() -> None:
    policy = four_bit_policy()
    for one, other in zip(
        held_layers(policy).values(), held_layers(frozen_copy(policy)).values(), strict=True
    ):
        assert one is not other
        assert one.code is other.code
        assert one.scale is other.scale


def test_a_merged_weight_is_the_full_one_with_its_adapter() -> None:
    linear = four_bit_policy().base.model.layers[0].mlp.up_proj
    expected = linear.base_layer.four_bits.full(F32) + linear.get_delta_weight("default")
    assert torch.equal(merged_weight(linear), expected)
    assert (expected - linear.base_layer.four_bits.full(F32)).abs().max() > 0


@pytest.mark.slow
def test_a_saved_adapter_is_opened_beside_the_same_four_bits(tmp_path: Path) -> None:
    policy = tiny_policy(TrainPart(lora=Lora(rank=2, bits=4)), seed=3)
    model = tiny_policy(seed=3)
    model.save(tmp_path / "base")
    policy.made_of = MadeOf(model=str(tmp_path / "base"), bits=4)
    with torch.no_grad():
        for _, parameter in policy.trained():
            parameter.add_(0.1)
    policy.save(tmp_path / "adapter")
    opened = saved_policy(tmp_path / "adapter")
    assert held_layers(opened).keys() == held_layers(policy).keys() != set()
    prompt, tokens = (5, 12, 13), (14, 15, 1)
    with torch.no_grad():
        ours, theirs = (reference_logp(one, prompt, tokens) for one in (opened, policy))
    assert torch.equal(ours, theirs)


def test_rounding_a_model_gives_it_the_values_that_it_would_be_held_with() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "attention_bias": True}
    model = small_llama(**sizes)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    round_to_four_bits(model)
    policy = Policy(model, tiny_vocabulary())
    for name, part in held_layers(four_bit_policy()).items():
        place = name.removesuffix(".base_layer")
        weight = policy.model.get_submodule(place).weight
        assert torch.equal(weight, part.four_bits.full(F32)), place
        assert not torch.equal(weight, before[f"{place}.weight"])
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])
