"""Merged: the tokens of a packed micro-batch, those behind the same tokens computed once.

Owns which tokens are one, and the padded rows that attention sees them in. Knows no model.

Short stretches (completions of one prompt, and prompts) share a row, and within it what they begin
with alike. Samples of a sure model hardly differ, so that most of their tokens are merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from motley.policies.packed import Packed, Rows, bias_of, index_rows

ROW_TOKENS = 64  # that short stretches fill a row with: a row costs more than what of it is masked


@dataclass(frozen=True, kw_only=True)
class Merged:
    """N counts merged tokens."""

    token_N: Tensor
    position_N: Tensor
    predictor_M: Tensor  # index into N of the position that predicts target m
    longest: int  # a prompt and a completion of it, in tokens
    rows: tuple[Rows, ...]  # of the prompts, and of the completions if one has an input

    @classmethod
    def of(cls, packed: Packed) -> Merged:
        device, token_N = packed.token_N.device, packed.token_N.tolist()
        start_S, count = packed.own.start_S.tolist(), len(packed.prompts.start_S) - 1
        stretches = [token_N[first:last] for first, last in pairwise(start_S)]
        prompts, answers = _Trees(), _Trees()
        # since one mask for all would be as wide as the longest
        alone = packed.prompts.longest > ROW_TOKENS
        prompts.fill(
            (place if alone else 0, stretch) for place, stretch in enumerate(stretches[:count])
        )
        answers.fill(zip(packed.of_prompt_B.tolist(), stretches[count:], strict=True))
        place = torch.tensor(
            prompts.place + [len(prompts.kept) + place for place in answers.place], device=device
        )
        kept = torch.tensor(
            prompts.kept + [len(prompts.place) + kept for kept in answers.kept], device=device
        )
        start_P = packed.prompts.start_S.long()
        prompt_PT, real_PT = index_rows(start_P[:-1], start_P.diff())
        rows = [prompts.laid(0, device)]
        if answers.kept:
            of_B = torch.tensor([row.of for row in answers.rows], device=device)
            rows.append(
                _behind(
                    answers.laid(len(prompts.kept), device), place[prompt_PT[of_B]], real_PT[of_B]
                )
            )
        return cls(
            token_N=packed.token_N[kept],
            position_N=packed.position_N[kept],
            predictor_M=place[packed.predictor_M],
            longest=packed.longest,
            rows=tuple(rows),
        )


@dataclass(slots=True)
class _Tree:
    """A tree of tokens: -1 is what stands before all of them."""

    of: int
    first: int  # merged tokens in the rows before
    parents: list[int] = field(default_factory=list)
    # (token before, what follows) -> where
    follows: dict[tuple[int, int], int] = field(default_factory=dict)

    def path(self, stretch: list[int]) -> list[int]:
        """As far as the stretch is in the row already."""
        path, last = [], -1
        for token in stretch:
            if (last, token) not in self.follows:
                break
            last = self.follows[last, token]
            path.append(last)
        return path

    def add(self, last: int, token: int) -> int:
        where = self.follows[last, token] = len(self.parents)
        self.parents.append(last)
        return where


@dataclass(slots=True)
class _Trees:
    rows: list[_Tree] = field(default_factory=list)
    place: list[int] = field(default_factory=list)  # of each token, among the merged ones
    # of each merged token, the first of those it stands for
    kept: list[int] = field(default_factory=list)

    def fill(self, stretches: Iterable[tuple[int, list[int]]]) -> None:
        """`stretches`: with whom each may share a row, and its tokens."""
        row = _Tree(-1, 0)
        for of, stretch in stretches:
            path = row.path(stretch)
            more = len(stretch) - len(path)
            if of != row.of or (row.parents and more and len(row.parents) + more > ROW_TOKENS):
                row, path = _Tree(of, len(self.kept)), []
                self.rows.append(row)
            for token in stretch[len(path) :]:
                self.kept.append(len(self.place) + len(path))
                path.append(row.add(path[-1] if path else -1, token))
            self.place += [row.first + place for place in path]

    def laid(self, first: int, device: torch.device) -> Rows:
        """Rows whose tokens stand from `first` on."""
        start_B = torch.tensor([first + row.first for row in self.rows], device=device)
        query_BT, real_BT = index_rows(
            start_B, torch.tensor([len(row.parents) for row in self.rows], device=device)
        )
        flat = real_BT.flatten().nonzero().squeeze(1)
        if all(
            parent == place - 1 for row in self.rows for place, parent in enumerate(row.parents)
        ):
            return Rows(query_BT, flat, query_BT, None)
        return Rows(
            query_BT,
            flat,
            query_BT,
            bias_of(torch.from_numpy(self._visible(query_BT.shape[1])).to(device)),
        )

    def _visible(self, steps: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.bool]]:
        """[B, T, T], True where a token is on another's path.

        Padding sees itself, so that no row is empty.
        """
        visible_BTT = np.broadcast_to(
            np.eye(steps, dtype=bool), (len(self.rows), steps, steps)
        ).copy()
        for row, visible_TT in zip(self.rows, visible_BTT, strict=True):
            for place, parent in enumerate(row.parents):
                if parent >= 0:
                    visible_TT[place] |= visible_TT[parent]
        return visible_BTT


def _behind(rows: Rows, before_BK: Tensor, real_BK: Tensor) -> Rows:
    """Rows of which every token sees what stands before its row, too."""
    steps = rows.query_BT.shape[1]
    own_B1TT = (
        bias_of(torch.ones(1, steps, steps, dtype=torch.bool, device=real_BK.device).tril())
        if rows.bias_B1TK is None
        else rows.bias_B1TK
    )
    bias_B1TK = torch.cat(
        [
            bias_of(real_BK[:, None]).expand(-1, -1, steps, -1),
            own_B1TT.expand(len(real_BK), -1, -1, -1),
        ],
        3,
    )
    return Rows(rows.query_BT, rows.flat, torch.cat([before_BK, rows.query_BT], 1), bias_B1TK)
