"""Linear layers whose frozen weight is held in 4 bits a value: NF4, as QLoRA has it.

Owns the format, which layers of a model are held so, and the product with such a weight. 64 values
of a row that follow each other are a block. A value is one of 16 levels, times the largest absolute
value of its block. The levels are quantiles of a normal distribution, which weights mostly follow.
By plain operations of torch, so the same weight has the same bits on every device.

Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023, section 3 and appendix E.
Differs from it: the blocks' largest values stay in float32, and are not quantised again.

Knows no adapter and no policy. Full weights are made where a product is, and gone behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
BLOCK = 64
BYTES_PER_VALUE = 1 / 2 + 4 / BLOCK
# what making a full value takes beside it: half an int32 of a code, and a float32
BYTES_IN_MAKING = 2 + 4


@dataclass(frozen=True, slots=True, eq=False)
class FourBits:
    """A weight of E outputs and I inputs.

    Values that follow each other share a byte, the first in its high bits: levels 15 and 7 are the
    code 0xf7.
    """

    code_EJ: Tensor  # uint8, J = I / 2
    scale_EK: Tensor  # float32, K = I / 64: the largest absolute value of a block

    @classmethod
    @torch.no_grad()
    def of(cls, weight_EI: Tensor) -> FourBits:
        """Every value at the nearest level."""
        block_EKb = weight_EI.detach().float().unflatten(1, (-1, BLOCK))
        scale_EK = block_EKb.abs().amax(2)
        # a block of zeros has no largest value, and every level of it is zero
        share_EKb = block_EKb / torch.where(scale_EK > 0, scale_EK, 1.0)[..., None]
        levels = _levels(weight_EI.device)
        level_EKb = torch.zeros_like(share_EKb, dtype=torch.uint8)
        for middle in (levels[1:] + levels[:-1]) / 2:  # on a CPU quicker than bucketize
            level_EKb += share_EKb > middle
        level_EJ2 = level_EKb.flatten(1).unflatten(1, (-1, 2))
        code_EJ = level_EJ2[..., 0] * 16 + level_EJ2[..., 1]
        return cls(code_EJ, scale_EK)

    def full(self, dtype: torch.dtype) -> Tensor:
        """[E, I], multiplied in float32 and rounded last."""
        value_EJ2 = F.embedding(self.code_EJ.int(), _pairs(self.code_EJ.device))
        block_EKb = value_EJ2.flatten(1).unflatten(1, (-1, BLOCK))
        return block_EKb.mul_(self.scale_EK[..., None]).flatten(1).to(dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As F.linear, in the type of x or of autocast. Only x gets a gradient."""
        place = x.device.type
        half = torch.is_autocast_enabled(place)
        dtype = torch.get_autocast_dtype(place) if half else x.dtype
        y: Tensor = _FourBitProduct.apply(x, self.code_EJ, self.scale_EK, bias, dtype)
        return y


class _FourBitProduct(torch.autograd.Function):
    """Makes the full weight again for the gradient, so that no pass keeps it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        code_EJ: Tensor,
        scale_EK: Tensor,
        bias_E: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(code_EJ, scale_EK)
        ctx.given, ctx.dtype = x.dtype, dtype
        bias_E = None if bias_E is None else bias_E.to(dtype)
        return F.linear(x.to(dtype), FourBits(code_EJ, scale_EK).full(dtype), bias_E)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = dy.to(ctx.dtype) @ FourBits(*ctx.saved_tensors).full(ctx.dtype)
        return dx.to(ctx.given), None, None, None, None


@lru_cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


@lru_cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2], the levels of both values of a byte."""
    levels = _levels(device)
    return torch.cartesian_prod(levels, levels)


class FourBitLinear(nn.Module):
    """A linear layer that does not train."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        held = FourBits.of(linear.weight)
        self.code = nn.Parameter(held.code_EJ, requires_grad=False)
        self.scale = nn.Parameter(held.scale_EK, requires_grad=False)
        self.bias = linear.bias

    @property
    def four_bits(self) -> FourBits:
        return FourBits(self.code, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.four_bits.product(x, self.bias)


# Models


def hold_in_four_bits(model: PreTrainedModel) -> None:
    """Replace a model's frozen linear layers, one after the other; adapters may be around them."""
    for name, linear in _frozen_linears(model):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, FourBitLinear(linear))
        del linear


@torch.no_grad()
def round_to_four_bits(model: PreTrainedModel) -> None:
    """Give a model's linear layers the values that they would be held with, in full.

    Of a model without adapters.
    """
    for _, linear in _frozen_linears(model.requires_grad_(False)):
        linear.weight.copy_(FourBits.of(linear.weight).full(linear.weight.dtype))


def _frozen_linears(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """Names and layers, but for the vocabulary projection, adapters, and layers whose inputs are no
    whole blocks.
    """
    head = model.get_output_embeddings()
    linears = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
        and part is not head
        and ".lora_" not in name
        and not part.weight.requires_grad
        and part.in_features % BLOCK == 0
    ]
    if not linears:
        raise ValueError(
            f"bits=4 finds no linear layer in {type(model).__name__} with inputs in blocks of "
            f"{BLOCK}; leave bits out"
        )
    return linears


def num_values(model: nn.Module) -> int:
    """How many a model has, in however many bits."""
    return sum(math.prod(shape) for _, shape in full_shapes(model))


def full_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model's parameters, as they would be without 4 bits."""
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        part = model.get_submodule(owner)
        if not isinstance(part, FourBitLinear) or last == "bias":
            yield name, tuple(parameter.shape)
        elif last == "code":
            yield f"{owner}.weight", (part.out_features, part.in_features)
