"""LeanAdam: AdamW that keeps its moments in 8 bits or off the GPU, and steps bfloat16 weights.

Differs from torch's AdamW in what lies between two steps only: a step itself is torch's own, in
float32, on a part of the values at a time. Moments in 8 bits on a GPU are stepped by a kernel, in
one pass over memory (`compute.lean_kernel`): the formula and what is kept are the same.

What is rounded is rounded to one of its two neighbours by chance, so that it is right on average:
an 8-bit moment, or a bfloat16 weight, would else stand still where a step is small beside it. The
dice follow from a seed, the parameter's number and the step, so that a resumed run rolls the same.
The kernel's are other dice than torch's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from motley.compute.support import runs_kernels

BLOCK = 256  # values that share a scale
AT_ONCE = 1 << 24  # values that are in float32 at a time; whole blocks
MOMENTS = ("exp_avg", "exp_avg_sq")
BETAS, EPS = (0.9, 0.999), 1e-8  # torch's
OCTAVES_SIGNED, OCTAVES = 21, 32  # that the codes of first and second moments reach down


class LeanAdam(torch.optim.Optimizer):
    """`in_8_bits`: the moments; otherwise they are those of torch's Adam, by name and value.
    `offload`: they stay in the CPU's memory.
    """

    def __init__(
        self, groups: Iterable[Any], lr: float, *, in_8_bits: bool, offload: bool, seed: int
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.in_8_bits = in_8_bits
        self._offload, self._seed = offload, seed

    def place_of(self, parameter: Tensor) -> torch.device:
        """Where the moments of a parameter are kept."""
        return torch.device("cpu") if self._offload else parameter.device

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "nothing here asks twice"
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self._step(parameter, group, number)

    def _step(self, parameter: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[parameter]
        if not state:
            state |= self._beginning(parameter)
        seed = _seed_of(f"{self._seed}/{number}/{int(state['step'])}")
        if self._is_one_pass(parameter):
            _step_in_one_pass(parameter, state, group, seed)
        else:
            self._step_in_parts(parameter, state, group, seed)
        state["step"] += 1

    def _is_one_pass(self, parameter: Tensor) -> bool:
        return (
            self.in_8_bits
            and not self._offload
            and parameter.is_contiguous()
            and runs_kernels(parameter.device)
        )

    def _step_in_parts(
        self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], seed: int
    ) -> None:
        dice = torch.Generator(parameter.device).manual_seed(seed)
        value, gradient = parameter.detach().reshape(-1), parameter.grad.reshape(-1)  # type: ignore[union-attr]
        for start in range(0, len(value), AT_ONCE):
            part = slice(start, min(start + AT_ONCE, len(value)))
            full = value[part].float()  # float32 values themselves, and no copy
            moments = [self._read(state, name, part, parameter.device) for name in MOMENTS]
            _adamw(full, gradient[part].float(), moments, float(state["step"]), group)
            for name, moment in zip(MOMENTS, moments, strict=True):
                self._write(state, name, part, moment, dice)
            if value.dtype == torch.bfloat16:
                value[part] = to_bfloat16(full, dice)
        if value.data_ptr() != parameter.data_ptr():  # it does not lie in a row
            parameter.copy_(value.view_as(parameter))

    def _beginning(self, parameter: Tensor) -> dict[str, Tensor]:
        place, made = self.place_of(parameter), {"step": torch.tensor(0.0)}
        pinned = place.type == "cpu" and parameter.is_cuda  # so that it travels quickly
        for name in MOMENTS:
            if not self.in_8_bits:
                made[name] = torch.zeros(
                    parameter.shape, dtype=torch.float32, device=place, pin_memory=pinned
                )
                continue
            count = parameter.numel()
            made[f"{name}_code"] = torch.zeros(
                count, dtype=torch.uint8, device=place, pin_memory=pinned
            )
            made[f"{name}_scale"] = torch.zeros(-(-count // BLOCK), device=place, pin_memory=pinned)
        return made

    def _read(
        self, state: dict[str, Tensor], name: str, part: slice, device: torch.device
    ) -> Tensor:
        if not self.in_8_bits:
            return state[name].view(-1)[part].to(device)
        code, scale = state[f"{name}_code"][part], state[f"{name}_scale"][_blocks(part)]
        return decoded(code.to(device), scale.to(device), _levels(name, device))

    def _write(
        self,
        state: dict[str, Tensor],
        name: str,
        part: slice,
        moment: Tensor,
        dice: torch.Generator,
    ) -> None:
        if not self.in_8_bits:
            state[name].view(-1)[part].copy_(moment)  # onto itself, unless it was moved
            return
        code, scale = encoded(moment, _levels(name, moment.device), dice)
        state[f"{name}_code"][part].copy_(code)
        state[f"{name}_scale"][_blocks(part)].copy_(scale)


def _adamw(
    value: Tensor, gradient: Tensor, moments: list[Tensor], steps: float, group: dict[str, Any]
) -> None:
    """torch's own step, in place."""
    adamw(
        [value],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [torch.tensor(steps, device=value.device)],
        fused=value.device.type in ("cpu", "cuda"),
        amsgrad=False,
        beta1=BETAS[0],
        beta2=BETAS[1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=EPS,
        maximize=False,
    )


def _step_in_one_pass(
    parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], seed: int
) -> None:
    """Where kernels run: the same step."""
    from motley.compute.lean_kernel import Coded, Rates, step

    steps, lr = int(state["step"]) + 1, group["lr"]
    rates = Rates(
        first=BETAS[0],
        second=BETAS[1],
        length=lr / (1 - BETAS[0] ** steps),
        root=(1 - BETAS[1] ** steps) ** -0.5,
        eps=EPS,
        decay=lr * group["weight_decay"],
    )
    first, second = (
        Coded(state[f"{name}_code"], state[f"{name}_scale"], octaves)
        for name, octaves in zip(MOMENTS, (OCTAVES_SIGNED, OCTAVES), strict=True)
    )
    value, gradient = parameter.detach().view(-1), parameter.grad.reshape(-1)  # type: ignore[union-attr]
    step(value, gradient, (first, second), rates, block=BLOCK, seed=seed)


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def to_bfloat16(value: Tensor, dice: torch.Generator) -> Tensor:
    """Each value as one of the two bfloat16 next to it, the nearer the likelier: right on average.

    A bfloat16 is a float32 without its last 16 bits, so that a random number is added to those.
    """
    noise = torch.randint(
        0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=dice
    )
    return ((value.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).bfloat16()


# Codes of 8 bits


def encoded(value: Tensor, levels: Tensor, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes, and the largest magnitude of every block: a code is the number of a level, a share of
    that. Of the two levels beside a value one is drawn, the nearer the likelier.
    """
    count = len(value)
    padded = torch.nn.functional.pad(value, (0, -count % BLOCK)).view(-1, BLOCK)
    scale = padded.abs().amax(1)
    share = (padded / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[:count]
    above = torch.bucketize(share, levels).clamp(1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    draw = torch.rand(share.shape, device=share.device, generator=dice)
    code = torch.where(draw * (high - low) < share - low, above, above - 1)
    return code.to(torch.uint8), scale


def decoded(code: Tensor, scale: Tensor, levels: Tensor) -> Tensor:
    return levels[code.long()] * scale.repeat_interleave(BLOCK)[: len(code)]


@lru_cache(maxsize=16)
def _levels(name: str, device: torch.device) -> Tensor:
    """Even in their logarithm, so that small values are as exact as large ones.

    Second moments have no zero among them: an update is divided by their root.
    """
    if name == "exp_avg":
        half = torch.logspace(-OCTAVES_SIGNED, 0, 127, base=2.0, dtype=torch.float64)
        return (
            torch.cat([-half.flip(0), torch.zeros(1, dtype=torch.float64), half]).float().to(device)
        )
    return torch.logspace(-OCTAVES, 0, 256, base=2.0, dtype=torch.float64).float().to(device)


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))
