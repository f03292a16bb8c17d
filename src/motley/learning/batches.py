"""From completions to packed micro-batches: the only padding and packing code.

A micro-batch holds whole prompts with as many of their completions as fit a budget of packed tokens. Completions are cut apart
from their prompt's others only where one prompt's set is larger than the budget, and then at even places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motley.policies.forward import Packed


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
    prompts = [unit[0].prompt for unit in units]
    rows = [(p, sequence) for p, unit in enumerate(units) for sequence in unit]
    prompt_length_P = torch.tensor([len(p) for p in prompts])
    input_length_B = torch.tensor([len(s.tokens) - 1 for _, s in rows])
    of_prompt_B = torch.tensor([p for p, _ in rows])

    prompt_start_P = prompt_length_P.cumsum(0) - prompt_length_P
    row_start_B = prompt_length_P.sum() + input_length_B.cumsum(0) - input_length_B
    prompt_PT, in_prompt_PT = _index_rows(prompt_start_P, prompt_length_P)
    row_BT, in_row_BT = _index_rows(row_start_B, input_length_B)

    key_BK = torch.cat([prompt_PT[of_prompt_B], row_BT], 1)
    steps = row_BT.shape[1]
    causal_TT = torch.ones(steps, steps, dtype=torch.bool).tril()
    visible_BTK = torch.cat([in_prompt_PT[of_prompt_B][:, None, :].expand(-1, steps, -1), causal_TT[None].expand(len(rows), -1, -1)], 2)

    # The first target is predicted by the prompt's last token, each later one by the completion token before it.
    last_prompt_B = (prompt_start_P + prompt_length_P - 1)[of_prompt_B]
    predictor_BT = torch.cat([last_prompt_B[:, None], row_BT], 1)
    mask_BT = torch.cat([torch.ones(len(rows), 1, dtype=torch.bool), in_row_BT], 1)
    temperature_B = torch.tensor([s.temperature for _, s in rows])
    packed = Packed(
        token_N=torch.tensor([t for p in prompts for t in p] + [t for _, s in rows for t in s.tokens[:-1]]),
        position_N=torch.cat(
            [
                _count_up(prompt_length_P),
                _count_up(input_length_B) + prompt_length_P[of_prompt_B].repeat_interleave(input_length_B),
            ]
        ),
        prompt_PT=prompt_PT,
        prompt_flat=in_prompt_PT.flatten().nonzero().squeeze(1),
        row_BT=row_BT,
        row_flat=in_row_BT.flatten().nonzero().squeeze(1),
        key_BK=key_BK,
        visible_B1TK=visible_BTK[:, None],
        predictor_M=predictor_BT[mask_BT],
        target_M=torch.tensor([t for _, s in rows for t in s.tokens]),
        temperature_M=temperature_B.repeat_interleave(input_length_B + 1),
        place_M=mask_BT.flatten().nonzero().squeeze(1),
    )
    return MicroBatch(packed.to(device), torch.tensor([s.row for _, s in rows]), mask_BT.to(device))


def _index_rows(start_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Packed indices of each row, padded on the right with 0, and which of them are real."""
    offset_T = torch.arange(int(length_B.max()))
    real_BT = offset_T < length_B[:, None]
    return torch.where(real_BT, start_B[:, None] + offset_T, 0), real_BT


def _count_up(length_B: Tensor) -> Tensor:
    """0..length-1 for each row, end to end."""
    start_B = length_B.cumsum(0) - length_B
    return torch.arange(int(length_B.sum())) - start_B.repeat_interleave(length_B)
