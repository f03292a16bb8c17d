"""A step of AdamW by one kernel: against float64, against torch's own step, and on average."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from compiling import sizes_of
from compute import programs
from compute.devices import DEVICES, needs_gpu, needs_interpreter
from motley.compute import lean_kernel
from motley.compute.lean_kernel import Coded, Rates
from motley.learning import lean
from motley.learning.lean import BLOCK, MOMENTS, LeanAdam, decoded, encoded

SIZES = [1, 255, 256, 257, 1000]
RATES = Rates(first=0.9, second=0.999, length=0.02, root=5.0, eps=1e-8, decay=1e-3)
STILL = Rates(first=1.0, second=1.0, length=0.0, root=1.0, eps=1e-8, decay=0.0)
ZERO, LOWEST = 127, 0  # the codes of a first moment that is zero, and of the least second moment


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def levels(name: str) -> Tensor:
    return lean._levels(name, torch.device("cpu"))


@dataclass
class Parameter:
    """What a step reads and writes."""

    value: Tensor
    gradient: Tensor
    first: Tensor  # the moments, of which the nearest codes are kept
    second: Tensor
    device: str = "cpu"
    codes: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, moment in zip(MOMENTS, (self.first, self.second), strict=True):
            code, scale = encoded(moment, levels(name), dice())
            self.codes.append(code.to(self.device))
            self.scales.append(scale.to(self.device))
        self.value, self.gradient = self.value.to(self.device), self.gradient.to(self.device)

    def moments(self) -> list[Tensor]:
        return [
            decoded(code.cpu(), scale.cpu(), levels(name))
            for name, code, scale in zip(MOMENTS, self.codes, self.scales, strict=True)
        ]

    def stepped(self, rates: Rates = RATES, seed: int = 1 << 40) -> Parameter:
        made = copy.deepcopy(self)
        octaves = (lean.OCTAVES_SIGNED, lean.OCTAVES)
        first, second = map(Coded, made.codes, made.scales, octaves)
        lean_kernel.step(made.value, made.gradient, (first, second), rates, block=BLOCK, seed=seed)
        return made

    def bits(self) -> list[Tensor]:
        return [self.value, *self.codes, *self.scales]


def some(size: int, device: str = "cpu", weight=torch.float32, gradient=torch.float32) -> Parameter:
    """Values of many sizes."""
    normal = lambda seed: torch.randn(size, generator=dice(seed))
    return Parameter(
        normal(1).to(weight),
        (normal(2) * normal(3).exp()).to(gradient),
        normal(4) * normal(5).exp(),
        (normal(6) * normal(7).exp()).square(),
        device,
    )


def exact(given: Parameter, rates: Rates = RATES) -> tuple[Tensor, Tensor, Tensor]:
    """Value and moments after a step of torch's formula."""
    first, second = (one.double() for one in given.moments())
    value, gradient = given.value.cpu().double(), given.gradient.cpu().double()
    first = rates.first * first + (1 - rates.first) * gradient
    second = rates.second * second + (1 - rates.second) * gradient**2
    way = rates.length * first / (second.sqrt() * rates.root + rates.eps)
    return value - rates.decay * value - way, first, second


def assert_beside(code: Tensor, scale: Tensor, moment: Tensor, name: str) -> None:
    """Every code is of one of the two levels beside its moment."""
    padded = torch.nn.functional.pad(moment, (0, -len(moment) % BLOCK)).view(-1, BLOCK)
    torch.testing.assert_close(scale.cpu().double(), padded.abs().amax(1), rtol=2e-6, atol=0)
    share = (padded / padded.abs().amax(1, keepdim=True)).view(-1)[: len(moment)]
    steps, number = levels(name).double(), code.cpu().long()
    tall = 1 + 2e-5 * share.sign()  # a level that is as good as reached may be passed
    above = torch.bucketize(share * tall, steps, right=True).clamp(max=len(steps) - 1)
    below = (torch.bucketize(share / tall, steps) - 1).clamp(min=0)
    assert bool(((below <= number) & (number <= above)).all())
    assert bool((above - below <= 2).all())


# A step


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_adamws(device: str, size: int, gradient: torch.dtype) -> None:
    given = some(size, device, gradient=gradient)
    made, (value, *moments) = given.stepped(), exact(given)
    torch.testing.assert_close(made.value.cpu().double(), value, rtol=2e-7, atol=1e-6)
    for name, code, scale, moment in zip(MOMENTS, made.codes, made.scales, moments, strict=True):
        assert_beside(code, scale, moment, name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_weights_become_one_of_their_two_neighbours(device: str, size: int) -> None:
    given = some(size, device, weight=torch.bfloat16, gradient=torch.bfloat16)
    made, (value, *moments) = given.stepped(), exact(given)
    assert made.value.dtype == torch.bfloat16
    width = 2.0 ** (value.abs().log2().floor() - 7)
    assert bool(((made.value.cpu().double() - value).abs() <= width * (1 + 1e-3)).all())
    for name, code, scale, moment in zip(MOMENTS, made.codes, made.scales, moments, strict=True):
        assert_beside(code, scale, moment, name)


@pytest.mark.parametrize("device", DEVICES)
def test_no_gradient_lets_moments_decay_and_zeros_stay(device: str) -> None:
    given = some(600, device)
    given = replace(given, gradient=torch.zeros(600), codes=[], scales=[])
    made, (value, *_) = given.stepped(), exact(given)
    # values go to 11 here, and on a GPU a root and a division are each off by a unit or two
    rtol = 2e-7 if device == "cpu" else 1e-6
    torch.testing.assert_close(made.value.cpu().double(), value, rtol=rtol, atol=1e-6)
    for kept, before, rate in zip(made.scales, given.scales, (0.9, 0.999), strict=True):
        torch.testing.assert_close(kept, rate * before)
    zeros = [torch.zeros(600) for _ in range(4)]
    made = Parameter(*zeros, device=device).stepped()
    assert not made.value.any()
    assert not any(scale.any() for scale in made.scales)
    assert [one.unique().tolist() for one in made.codes] == [[ZERO], [LOWEST]]


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_step_begins_with_nothing(device: str) -> None:
    zeros, normal = torch.zeros(300), torch.randn(300, generator=dice())
    gradient = normal + normal.sign()
    given = Parameter(zeros, gradient, zeros, zeros, device)
    given.codes = [torch.zeros_like(code) for code in given.codes]  # as LeanAdam begins
    rates = RATES._replace(length=0.01 / (1 - 0.9), root=(1 - 0.999) ** -0.5)
    made = given.stepped(rates).value.cpu()
    torch.testing.assert_close(made, -0.01 * gradient.sign(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1e-44, 1e-39, 1e-30, 1e-12, 1e12, 1e18])
def test_huge_and_tiny_gradients_leave_numbers(size: float, device: str) -> None:
    """Also beside each other: what is far below its block's largest is zero or the lowest level."""
    gradient = torch.randn(3 * BLOCK, generator=dice()) * size
    gradient[BLOCK : 2 * BLOCK : 2] = 1.0
    gradient[2 * BLOCK :: 2] = 0.0
    given = replace(some(3 * BLOCK), gradient=gradient, device=device, codes=[], scales=[])
    given = replace(given, first=gradient, second=gradient**2, codes=[], scales=[])
    made, (value, *_) = given.stepped(), exact(given)
    assert all(bool(one.isfinite().all()) for one in (made.value, *made.scales, *made.moments()))
    torch.testing.assert_close(made.value.cpu().double(), value, rtol=1e-5, atol=1e-5)
    assert bool((made.codes[0] < 255).all())


@pytest.mark.parametrize("device", DEVICES)
def test_past_the_end_nothing_is_written(device: str) -> None:
    given = some(700, device)
    whole = [torch.cat([one, one.new_full((600,), 77)]) for one in given.bits()]
    value, *kept = (one[: len(own)] for one, own in zip(whole, given.bits(), strict=True))
    given.value, given.codes, given.scales = value, kept[:2], kept[2:]
    octaves = (lean.OCTAVES_SIGNED, lean.OCTAVES)
    first, second = map(Coded, given.codes, given.scales, octaves)
    lean_kernel.step(value, given.gradient, (first, second), RATES, block=BLOCK, seed=1)
    assert all(bool((one[-600:] == 77).all()) for one in whole)


# Rounding


@pytest.mark.parametrize("device", DEVICES)
def test_moments_that_stay_keep_their_codes(device: str) -> None:
    """Every level is found again: its logarithm may be rounded either way."""
    given = some(2 * BLOCK, device)
    for number, name in enumerate(MOMENTS):
        code = torch.arange(2 * BLOCK) % len(levels(name))
        given.codes[number] = code.to(torch.uint8).to(device)
        given.scales[number] = torch.tensor([0.25, 2.0**20], device=device)
    for seed in range(3):
        made = given.stepped(STILL._replace(eps=1.0), seed)
        assert all(map(torch.equal, made.bits(), given.bits()))


def many(parameter: Parameter, rates: Rates, monkeypatch: pytest.MonkeyPatch) -> Parameter:
    """The same block many times, each with dice of its own; interpreted at once."""
    times = 1024
    if parameter.device == "cpu":
        monkeypatch.setattr(lean_kernel, "BLOCKS_AT_ONCE", times)
    made = copy.copy(parameter)
    made.value, made.gradient = parameter.value.repeat(times), parameter.gradient.repeat(times)
    made.codes = [one.repeat(times) for one in parameter.codes]
    made.scales = [one.repeat(times) for one in parameter.scales]
    return made.stepped(rates)


def assert_unbiased(rolled_RN: Tensor, exact_N: Tensor, low_N: Tensor, high_N: Tensor) -> Tensor:
    """Draws of one of two neighbours; their deviations, as a normal variable has them."""
    width_N = high_N - low_N
    assert bool(((rolled_RN == low_N) | (rolled_RN == high_N)).all())
    chance_N = ((exact_N - low_N) / width_N).clamp(0, 1)
    deviation_N, times = (chance_N * (1 - chance_N)).sqrt(), len(rolled_RN)
    error_N = (rolled_RN.mean(0) - exact_N) / width_N
    assert bool((error_N.abs() < 5 * (deviation_N / times**0.5 + 1 / times)).all())
    open_N = deviation_N > 0.2
    assert int(open_N.sum()) > BLOCK // 2
    score_N = error_N[open_N] / deviation_N[open_N] * times**0.5
    assert abs(float(score_N.mean())) < 5 / len(score_N) ** 0.5
    assert 0.6 < float(score_N.square().mean()) < 1.5
    return (rolled_RN - exact_N) / width_N / deviation_N.clamp(min=0.2)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_rounded_is_right_on_average(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = some(BLOCK, device, weight=torch.bfloat16)
    given.codes[0][:50] = ZERO
    given.gradient[:50] *= 1e-5  # first moments between zero and the level beside it
    rates = RATES._replace(second=0.9)  # else few second moments leave their level
    made, (value, *moments) = many(given, rates, monkeypatch), exact(given, rates)
    low = value.float().view(torch.int32) & -(1 << 16)  # the neighbour that is nearer to zero
    low, high = (one.view(torch.float32).double() for one in (low, low + (1 << 16)))
    fallen = [assert_unbiased(made.value.cpu().double().view(-1, BLOCK), value, low, high)]
    for name, code, moment in zip(MOMENTS, made.codes, moments, strict=True):
        steps = levels(name).double() * moment.abs().max()
        above = torch.bucketize(moment, steps).clamp(1, len(steps) - 1)
        rolled = steps[code.cpu().long()].view(-1, BLOCK)
        fallen.append(assert_unbiased(rolled, moment, steps[above - 1], steps[above]))
    for one, other in itertools.combinations(fallen, 2):  # the three roll by themselves
        assert float((one * other).mean(0).abs().max()) < 5 / 32
        assert abs(float((one * other).mean())) < 0.02


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_says_how_the_dice_fall(device: str) -> None:
    given = some(700, device, weight=torch.bfloat16)
    one, again, other = (given.stepped(seed=seed).bits() for seed in (5, 5, 5 + (1 << 33)))
    assert all(map(torch.equal, one, again))
    assert not any(map(torch.equal, one[:3], other[:3]))


@pytest.mark.parametrize("at_once", [1, 2, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_dice_do_not_know_how_many_blocks_a_program_has(
    device: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = some(5 * BLOCK - 3, device, weight=torch.bfloat16)
    expected = given.stepped().bits()
    monkeypatch.setattr(lean_kernel, "BLOCKS_AT_ONCE", at_once)
    assert all(map(torch.equal, given.stepped().bits(), expected))


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_does_not_know_the_others(device: str) -> None:
    given = some(6 * BLOCK, device, weight=torch.bfloat16)
    part = copy.deepcopy(given)
    part.value, part.gradient = given.value[: 2 * BLOCK], given.gradient[: 2 * BLOCK]
    part.codes = [one[: 2 * BLOCK].clone() for one in given.codes]
    part.scales = [one[:2].clone() for one in given.scales]
    for whole, own in zip(given.stepped().bits(), part.stepped().bits(), strict=True):
        assert torch.equal(whole[: len(own)], own)


# The optimiser


def parameters(device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    shapes = [(30, 40), (40,), (3, 700)]
    made = [torch.randn(shape, generator=dice(sum(shape))) for shape in shapes]
    return [
        nn.Parameter(one.to(dtype if one.dim() > 1 else torch.float32).to(device)) for one in made
    ]


def lean_adam(own: list[nn.Parameter]) -> LeanAdam:
    optimiser = LeanAdam(own, 1e-2, in_8_bits=True, offload=False, seed=3)
    optimiser.param_groups[0]["weight_decay"] = 0.1
    return optimiser


def walk(own: list[nn.Parameter], optimiser: torch.optim.Optimizer, steps: range) -> None:
    """Toward zero, from gradients of many sizes."""
    for number in steps:
        for place, one in enumerate(own):
            noise = torch.randn(one.shape, generator=dice(100 * number + place)).to(one.device)
            one.grad = (one.detach().float() + 0.1 * noise).to(one.dtype)
        optimiser.step()


def kernels(monkeypatch: pytest.MonkeyPatch, run: bool) -> None:
    monkeypatch.setattr(lean, "runs_kernels", lambda device: run)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_both_ways_to_step_are_as_far_from_adamw(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = [nn.Parameter(one.detach().float()) for one in parameters(device, dtype)]
    before = [one.detach().clone() for one in reference]
    walk(reference, torch.optim.AdamW(reference, lr=1e-2, weight_decay=0.1), range(20))
    apart, kept = [], []
    for run in (True, False):
        kernels(monkeypatch, run)
        own = parameters(device, dtype)
        optimiser = lean_adam(own)
        walk(own, optimiser, range(20))
        apart.append(distance(own, reference))
        kept.append([optimiser.state[one] for one in own])
    assert 0.8 < apart[0] / apart[1] < 1.25
    assert apart[0] < (0.06 if dtype == torch.float32 else 0.15) * distance(before, reference)
    for one, other in zip(*kept, strict=True):
        assert list(one) == list(other)
        for key in one:
            assert (one[key].dtype, one[key].shape) == (other[key].dtype, other[key].shape)
            assert one[key].device == other[key].device
        for name in MOMENTS:
            scales = (state[f"{name}_scale"] for state in (one, other))
            torch.testing.assert_close(*scales, rtol=0.2, atol=0)


def distance(these: Sequence[Tensor], those: Sequence[Tensor]) -> float:
    """Of all values together."""
    apart = [
        (one.detach() - other.detach()).double().square().sum()
        for one, other in zip(these, those, strict=True)
    ]
    return math.sqrt(float(sum(apart)))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_either_goes_on_where_the_other_stopped(
    device: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same moments the next float32 weights are the same, but for the last bits."""
    ours, theirs = (parameters(device, torch.float32)[:1] for _ in range(2))
    optimiser, other = lean_adam(ours), lean_adam(theirs)
    for own, one in ((ours, optimiser), (theirs, other)):
        kernels(monkeypatch, first)
        walk(own, one, range(1))
        kernels(monkeypatch, one is optimiser)
        walk(own, one, range(1, 2))
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=2e-7, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_training_goes_on_to_the_same_bits(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels(monkeypatch, True)
    whole, parts = (parameters(device, dtype) for _ in range(2))
    optimiser, begun = lean_adam(whole), lean_adam(parts)
    walk(whole, optimiser, range(4))
    walk(parts, begun, range(2))
    again = lean_adam(parts)
    for one in parts:
        again.state[one] = {key: value.clone() for key, value in begun.state[one].items()}
    walk(parts, again, range(2, 4))
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
        for key, value in optimiser.state[one].items():
            assert torch.equal(value, again.state[other][key])


@needs_gpu
@pytest.mark.gpu
def test_a_gpu_is_stepped_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    own, taken, step = parameters("cuda", torch.bfloat16), [], lean._step_in_one_pass
    monkeypatch.setattr(lean, "_step_in_one_pass", lambda *a: taken.append(step(*a)))
    walk(own, lean_adam(own), range(2))
    assert len(taken) == 2 * len(own)


@needs_interpreter
def test_other_moments_and_parameters_are_stepped_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("stepped by the kernel")

    kernels(monkeypatch, True)
    monkeypatch.setattr(lean, "_step_in_one_pass", refuse)
    across = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    for one, in_8_bits, offload in (
        (across, True, False),
        (nn.Parameter(torch.ones(3)), False, False),
        (nn.Parameter(torch.ones(3)), True, True),
    ):
        walk([one], LeanAdam([one], 1e-2, in_8_bits=in_8_bits, offload=offload, seed=0), range(1))
    with pytest.raises(AssertionError, match="stepped by the kernel"):
        walk([one], LeanAdam([one], 1e-2, in_8_bits=True, offload=False, seed=0), range(1))


@needs_interpreter
@pytest.mark.slow
def test_it_compiles_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """What the interpreter takes, a compiler may refuse."""
    sizes = sizes_of(programs, tmp_path)
    assert len(sizes) == 5
    assert all(size > 0 for size in sizes.values())
