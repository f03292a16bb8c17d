"""From completions to packed micro-batches: the only padding and packing code.

A micro-batch holds whole prompts with as many of their completions as fit a budget of packed
tokens. Completions are cut apart from their prompt's others only where one prompt's set is larger
than the budget, and then at even places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motley.compute.packed import Packed, Spans

Ids = NDArray[np.int64]

# of a group's tokens: what its prompt may add when every completion has one of its own
HARDLY = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ToScore:
    """One completion to score: which row of the training batch it is, its prompt and its tokens."""

    row: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    temperature: float = 1.0
    group: int = 0  # completions of one prompt in different groups are split apart from each other


Unit = list[ToScore]  # completions of one prompt that stay together


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`row_B[i]` is the row of the training batch that stands at place i of this micro-batch.

    Tables are on the device, tokens not yet.
    """

    packed: Packed
    row_B: Tensor
    mask_BT: Tensor  # bool, True = a completion token
    place_M: Tensor  # flat index of target m in a [B, T] table

    def unpack(self, value_M: Tensor) -> Tensor:
        """Values per target token as a [B, T] table, zero outside the mask."""
        table = torch.zeros(self.mask_BT.numel(), dtype=value_M.dtype, device=value_M.device)
        return table.index_copy(0, self.place_M, value_M).view(self.mask_BT.shape)

    def pack(self, value_BT: Tensor) -> Tensor:
        """The values of the mask, one per target token."""
        return value_BT.reshape(-1)[self.place_M]


def micro_batches(
    sequences: Sequence[ToScore], token_budget: int, device: torch.device, width: int = 1
) -> list[MicroBatch]:
    """Cut sequences into micro-batches of at most `token_budget` packed tokens and about the same
    size, alike lengths together.

    `width`: how many are computed at a time; their number is a multiple of it, where it can be.
    """
    units = [part for same in _by_prompt(sequences) for part in _split(same, token_budget)]
    units.sort(key=lambda unit: (len(unit[0].prompt), max(len(s.tokens) for s in unit)))
    return [_pack(batch, device) for batch in _cut(units, token_budget, width)]


Item = TypeVar("Item")


def waves(micros: Sequence[Item], width: int) -> Iterator[Sequence[Item]]:
    """As many at a time as are computed at once."""
    return (micros[i : i + width] for i in range(0, len(micros), width))


def _cut(units: Sequence[Unit], token_budget: int, width: int) -> list[list[Unit]]:
    """As few micro-batches as taking in turn what fits makes, up to the next multiple of `width`.

    Of about the same size where that makes no more.
    """
    full = _taken_in_turn(units, token_budget, math.inf)
    count = max(1, -(-len(full) // width) * width)
    even = _taken_in_turn(units, token_budget, sum(map(_packed_tokens, units)) / count)
    return even if len(even) <= count else full


def _taken_in_turn(units: Sequence[Unit], token_budget: int, share: float) -> list[list[Unit]]:
    """`share`: the tokens after which a micro-batch may be full."""
    batches: list[list[Unit]] = []
    taken = room = 0
    for unit in units:
        size = _packed_tokens(unit)
        if not batches or size > room or taken >= share * len(batches):
            batches.append([])
            room = token_budget
        batches[-1].append(unit)
        taken, room = taken + size, room - size
    return batches


def _by_prompt(sequences: Sequence[ToScore]) -> list[Unit]:
    units: dict[tuple[int, tuple[int, ...]], Unit] = {}
    for sequence in sequences:
        units.setdefault((sequence.group, sequence.prompt), []).append(sequence)
    return list(units.values())


def _packed_tokens(unit: Sequence[ToScore]) -> int:
    return len(unit[0].prompt) + sum(len(s.tokens) - 1 for s in unit)


def _split(unit: Unit, token_budget: int) -> list[Unit]:
    """Halve at an even place until each part fits; one pair is never parted, however long."""
    if _packed_tokens(unit) <= token_budget or len(unit) <= 2:
        return [unit]
    middle = max(2, len(unit) // 4 * 2)
    return _split(unit[:middle], token_budget) + _split(unit[middle:], token_budget)


def _pack(units: list[Unit], device: torch.device) -> MicroBatch:
    """Lay prompts end to end, then the inputs of their completions.

    Prompt 4 with completion (2, 1), and prompt (5, 6) with completions (7, 8, 1) and (9, 1):

        token_N      4 | 5 6 | 2 | 7 8 | 9   a completion's last token is no input
        position_N   0 | 0 1 | 1 | 2 3 | 2
        of_prompt_B              0   1   1
        target_M     2 1 | 7 8 1 | 9 1
        predictor_M  0 3 | 2 4 5 | 2 6       token 6, at place 2, predicts 7 and 9
        place_M      0 1 | 3 4 5 | 6 7       in a table of 3 rows and 3 columns

    On a GPU 4 and 2 are one stretch, and that completion has no inputs: 4 2 | 5 6 | 7 8 | 9.
    In numpy, whose small operations are quicker than torch's.
    """
    if joins_alone(device):
        units = [part for unit in units for part in _each_alone_if_cheap(unit)]
    alone = [joins_alone(device) and len(unit) == 1 for unit in units]
    prompts = [
        unit[0].prompt + unit[0].tokens[:-1] if joined else unit[0].prompt
        for unit, joined in zip(units, alone, strict=True)
    ]
    rows = [sequence for unit in units for sequence in unit]
    prompt_length_P = np.array([len(p) for p in prompts])
    length_B = np.array([len(s.tokens) for s in rows])
    of_prompt_B = np.arange(len(units)).repeat([len(unit) for unit in units])
    joined_B = np.array(alone)[of_prompt_B]
    input_length_B = np.where(joined_B, 0, length_B - 1)
    own = _spans(np.concatenate([prompt_length_P, input_length_B]))
    start_S = own.start_S.numpy().astype(np.int64)
    first_B = start_S[of_prompt_B] + np.array([len(s.prompt) for s in rows]) - 1
    second_B = np.where(joined_B, first_B + 1, start_S[len(units) : -1])
    target_M = _flat([s.tokens for s in rows])
    is_input_M = _count_up(length_B) < input_length_B.repeat(length_B)
    before_B = prompt_length_P[of_prompt_B]
    temperature_B = np.array([s.temperature for s in rows], np.float32)
    mask_BT = np.arange(length_B.max()) < length_B[:, None]
    packed = Packed(
        token_N=torch.from_numpy(np.concatenate([_flat(prompts), target_M[is_input_M]])),
        position_N=torch.from_numpy(_positions(prompt_length_P, before_B, input_length_B)),
        own=own,
        prompts=_spans(prompt_length_P),
        answers=_spans(np.bincount(of_prompt_B, input_length_B).astype(np.int64)),
        longest=int((before_B + input_length_B).max()),
        of_prompt_B=torch.from_numpy(of_prompt_B),
        predictor_M=torch.from_numpy(_predictors(first_B, second_B, length_B)),
        target_M=torch.from_numpy(target_M),
        temperature_M=torch.from_numpy(temperature_B.repeat(length_B)),
    )
    return MicroBatch(
        packed=packed,
        row_B=torch.tensor([s.row for s in rows]),
        mask_BT=torch.from_numpy(mask_BT).to(device),
        place_M=torch.from_numpy(np.flatnonzero(mask_BT)).to(device),
    )


def _spans(length_S: Ids) -> Spans:
    return Spans.of(torch.from_numpy(length_S))


def _positions(prompt_length_P: Ids, before_B: Ids, input_length_B: Ids) -> Ids:
    """Of prompts' tokens, then of completions', which count on from the prompt before them."""
    after_N = _count_up(input_length_B) + before_B.repeat(input_length_B)
    return np.concatenate([_count_up(prompt_length_P), after_N])


def _predictors(first_B: Ids, second_B: Ids, length_B: Ids) -> Ids:
    """Where each target is predicted: the first by the prompt's last token, every later one by the
    completion token before it.
    """
    step_M = _count_up(length_B)
    later_M = second_B.repeat(length_B) + step_M - 1
    return np.where(step_M == 0, first_B.repeat(length_B), later_M)


def joins_alone(device: torch.device) -> bool:
    """Whether a prompt and its only completion are laid down as one stretch: flash attention then
    has one piece to attend to, not two.
    """
    return device.type == "cuda"


def _each_alone_if_cheap(unit: Unit) -> list[Unit]:
    """Completions apart, where a prompt of its own for each would cost next to nothing."""
    added = (len(unit) - 1) * len(unit[0].prompt)
    cheap = added < HARDLY * sum(len(s.tokens) for s in unit)
    return [[sequence] for sequence in unit] if cheap else [unit]


def _flat(tokens: Sequence[tuple[int, ...]]) -> Ids:
    return np.fromiter(chain.from_iterable(tokens), np.int64, sum(map(len, tokens)))


def _count_up(length_B: Ids) -> Ids:
    """0..length-1 for each row, end to end."""
    start_B = length_B.cumsum() - length_B
    count_N: Ids = np.arange(length_B.sum()) - start_B.repeat(length_B)
    return count_N
