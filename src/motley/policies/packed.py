"""Packed: the tokens of a micro-batch laid end to end, without padding.

Owns where prompts and completions stand, and the padded rows for an attention that needs them.
Built on the CPU by learning.batches, read by the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Spans(NamedTuple):
    """Stretches of tokens, each beginning where the one before it ends. Some may be empty."""

    start_S: Tensor  # int32, one more than there are stretches
    longest: int
    total: int  # tokens

    @classmethod
    def of(cls, length_S: Tensor) -> Spans:
        start_S = torch.cat([length_S.new_zeros(1), length_S.cumsum(0)])
        return cls(start_S.int(), int(length_S.max()), int(start_S[-1]))

    def to(self, device: torch.device) -> Spans:
        return self._replace(start_S=_sent(self.start_S, device))


class Rows(NamedTuple):
    """Where packed tokens stand in padded rows, for an attention that needs them.

    Padding repeats index 0 and is not read back.
    """

    query_BT: Tensor  # index into N
    flat: Tensor  # where the packed tokens stand in query_BT, flattened
    key_BK: Tensor  # index into N of what a row may see
    # added to the products: 0 where a query sees a key, -inf elsewhere; None: causal
    bias_B1TK: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Prompts, then completions, laid end to end (N tokens), and what is predicted.

    Completions of a prompt follow each other.

    The last token of a completion is a target but never an input. Completions see their prompt, and
    themselves.
    """

    token_N: Tensor
    position_N: Tensor
    own: Spans  # each prompt, then the inputs of each completion
    prompts: Spans  # each prompt
    answers: Spans  # the inputs of all completions of each prompt, counted from the first one's
    longest: int  # a prompt and a completion of it, in tokens
    of_prompt_B: Tensor
    predictor_M: Tensor  # index into N of the position that predicts target m
    target_M: Tensor
    temperature_M: Tensor

    @cached_property
    def rows(self) -> tuple[Rows, ...]:
        """Of the prompts, and of the completions if one has an input."""
        start_S, count = self.own.start_S.long(), len(self.prompts.start_S) - 1
        length_S = start_S.diff()
        prompt_PT, in_prompt_PT = index_rows(start_S[:count], length_S[:count])
        row_BT, in_row_BT = index_rows(start_S[count:-1], length_S[count:])
        prompts = Rows(prompt_PT, in_prompt_PT.flatten().nonzero().squeeze(1), prompt_PT, None)
        steps = row_BT.shape[1]
        if not steps:
            return (prompts,)
        causal_TT = torch.ones(steps, steps, dtype=torch.bool, device=start_S.device).tril()
        visible_BTK = torch.cat(
            [
                in_prompt_PT[self.of_prompt_B][:, None, :].expand(-1, steps, -1),
                causal_TT[None].expand(len(row_BT), -1, -1),
            ],
            2,
        )
        completions = Rows(
            query_BT=row_BT,
            flat=in_row_BT.flatten().nonzero().squeeze(1),
            key_BK=torch.cat([prompt_PT[self.of_prompt_B], row_BT], 1),
            bias_B1TK=bias_of(visible_BTK),
        )
        return prompts, completions

    def to(self, device: torch.device) -> Packed:
        if self.token_N.device == device:
            return self
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Spans) else _sent(value, device)
            for name, value in given.items()
            if not isinstance(value, int)
        }
        return replace(self, **moved)


def send(value: Tensor, to: Tensor) -> None:
    """Copy into a tensor that is elsewhere.

    A GPU is not waited for, which it would be with memory that is not pinned.
    """
    pins = to.is_cuda and value.device.type == "cpu"
    to.copy_(value.pin_memory() if pins else value, non_blocking=pins)


def _sent(value: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_like(value, device=device)
    send(value, made)
    return made


def bias_of(visible_BTK: Tensor) -> Tensor:
    """[B, 1, T, K], 0 where a query sees a key and -inf elsewhere."""
    return torch.zeros(visible_BTK.shape, device=visible_BTK.device).masked_fill_(
        ~visible_BTK, -torch.inf
    )[:, None]


def index_rows(start_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Packed indices of each row, padded on the right with 0, and which of them are real."""
    offset_T = torch.arange(int(length_B.max()), device=start_B.device)
    real_BT = offset_T < length_B[:, None]
    return torch.where(real_BT, start_B[:, None] + offset_T, 0), real_BT
