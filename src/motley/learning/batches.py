"""From completions to packed micro-batches: the only padding and packing code.

A micro-batch holds whole prompts with as many of their completions as fit a budget of packed tokens. Completions are cut apart
from their prompt's others only where one prompt's set is larger than the budget, and then at even places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from motley.policies.packed import Packed, Spans

HARDLY = 0.05  # of a group's tokens: what its prompt may add when every completion has one of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class ToScore:
    """One completion to score: which row of the training batch it is, its prompt and its tokens."""

    row: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    temperature: float = 1.0
    group: int = 0  # completions of one prompt in different groups are split apart from each other


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`row_B[i]` is the row of the training batch that stands at place i of this micro-batch."""

    packed: Packed
    row_B: Tensor
    mask_BT: Tensor  # bool, True = a completion token

    def unpack(self, value_M: Tensor) -> Tensor:
        """Values per target token as a [B, T] table, zero outside the mask."""
        table = torch.zeros(self.mask_BT.numel(), dtype=value_M.dtype, device=value_M.device)
        return table.index_copy(0, self.packed.place_M, value_M).view(self.mask_BT.shape)


def micro_batches(sequences: Sequence[ToScore], token_budget: int, device: torch.device) -> list[MicroBatch]:
    """Cut sequences into micro-batches of at most `token_budget` packed tokens, alike lengths together."""
    units = [part for same in _by_prompt(sequences) for part in _split(same, token_budget)]
    units.sort(key=lambda unit: (len(unit[0].prompt), max(len(s.tokens) for s in unit)))
    batches: list[list[list[ToScore]]] = []
    room = 0
    for unit in units:
        size = _packed_tokens(unit)
        if not batches or size > room:
            batches.append([])
            room = token_budget
        batches[-1].append(unit)
        room -= size
    return [_pack(batch, device) for batch in batches]


def _by_prompt(sequences: Sequence[ToScore]) -> list[list[ToScore]]:
    found: dict[tuple[int, tuple[int, ...]], list[ToScore]] = {}
    for sequence in sequences:
        found.setdefault((sequence.group, sequence.prompt), []).append(sequence)
    return list(found.values())


def _packed_tokens(unit: Sequence[ToScore]) -> int:
    return len(unit[0].prompt) + sum(len(s.tokens) - 1 for s in unit)


def _split(unit: list[ToScore], token_budget: int) -> list[list[ToScore]]:
    """Halve at an even place until each part fits; one pair is never parted, however long."""
    if _packed_tokens(unit) <= token_budget or len(unit) <= 2:
        return [unit]
    middle = max(2, len(unit) // 4 * 2)
    return _split(unit[:middle], token_budget) + _split(unit[middle:], token_budget)


def _pack(units: list[list[ToScore]], device: torch.device) -> MicroBatch:
    if joins_alone(device):
        units = [part for unit in units for part in (_each_alone(unit) if _is_hardly_shared(unit) else [unit])]
    alone = [joins_alone(device) and len(unit) == 1 for unit in units]
    prompts = [unit[0].prompt + unit[0].tokens[:-1] if joined else unit[0].prompt for unit, joined in zip(units, alone, strict=True)]
    rows = [sequence for unit in units for sequence in unit]
    prompt_length_P = torch.tensor([len(p) for p in prompts])
    target_length_B = torch.tensor([len(s.tokens) for s in rows])
    of_prompt_B = torch.arange(len(units)).repeat_interleave(torch.tensor([len(unit) for unit in units]))
    joined_B = torch.tensor(alone)[of_prompt_B]
    input_length_B = torch.where(joined_B, 0, target_length_B - 1)
    own = Spans.of(torch.cat([prompt_length_P, input_length_B]))
    answer_length_P = torch.zeros_like(prompt_length_P).index_add(0, of_prompt_B, input_length_B)

    # The first target is predicted by the prompt's last token, each later one by the completion token before it.
    first_B = own.start_S[of_prompt_B].long() + torch.tensor([len(s.prompt) for s in rows]) - 1
    second_B = torch.where(joined_B, first_B + 1, own.start_S[len(units) : -1].long())
    step_T = torch.arange(int(target_length_B.max()))
    mask_BT = step_T < target_length_B[:, None]
    predictor_BT = torch.where(step_T == 0, first_B[:, None], second_B[:, None] + step_T - 1)
    packed = Packed(
        token_N=torch.cat([_flat(prompts), _flat([s.tokens[:-1] for u, one in zip(units, alone, strict=True) if not one for s in u])]),
        position_N=torch.cat(
            [
                _count_up(prompt_length_P),
                _count_up(input_length_B) + prompt_length_P[of_prompt_B].repeat_interleave(input_length_B),
            ]
        ),
        own=own,
        prompts=Spans.of(prompt_length_P),
        answers=Spans.of(answer_length_P),
        longest=int((prompt_length_P[of_prompt_B] + input_length_B).max()),
        of_prompt_B=of_prompt_B,
        predictor_M=predictor_BT[mask_BT],
        target_M=_flat([s.tokens for s in rows]),
        temperature_M=torch.tensor([s.temperature for s in rows]).repeat_interleave(target_length_B),
        place_M=mask_BT.flatten().nonzero().squeeze(1),
    )
    return MicroBatch(packed.to(device), torch.tensor([s.row for s in rows]), mask_BT.to(device))


def joins_alone(device: torch.device) -> bool:
    """Whether a prompt and its only completion are laid down as one stretch: flash attention then has one piece to attend to, not two."""
    return device.type == "cuda"


def _is_hardly_shared(unit: list[ToScore]) -> bool:
    """Whether a prompt of its own for every completion would cost next to nothing."""
    return (len(unit) - 1) * len(unit[0].prompt) < HARDLY * sum(len(s.tokens) for s in unit)


def _each_alone(unit: list[ToScore]) -> list[list[ToScore]]:
    return [[sequence] for sequence in unit]


def _flat(tokens: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.from_numpy(np.fromiter(chain.from_iterable(tokens), np.int64))


def _count_up(length_B: Tensor) -> Tensor:
    """0..length-1 for each row, end to end."""
    start_B = length_B.cumsum(0) - length_B
    return torch.arange(int(length_B.sum())) - start_B.repeat_interleave(length_B)
