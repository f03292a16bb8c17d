"""Pages: which rows run, and which pages of the room each of them has.

For calls whose rows would not all fit if each were as long as it may be. Most end sooner, so rows
are begun by what rows have taken so far. One gets a page when it has filled its last, and gives all
back when it ends; then another begins. Where all grow longer than expected and no page is left, the
row that began last gives way and begins again later: its random numbers are its own, so it draws
the same.

Knows no model and no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np


class Pages:
    def __init__(
        self, num_rows: int, row_pages: int, num_pages: int, page: int, expected: float
    ) -> None:
        """The last page is nobody's. `expected`: pages of a row at its end, as far as is known."""
        if num_pages <= row_pages:
            raise ValueError(f"{num_pages} pages do not hold a row of {row_pages} and nobody's")
        self.nobodys = num_pages - 1
        self.table_RJ = np.full((num_rows, row_pages), self.nobodys, np.int32)
        self.running: list[int] = []  # in the order in which they began
        self._waiting = deque(range(num_rows))
        self._free = list(range(num_pages - 1))
        self._held_R = np.zeros(num_rows, np.int64)  # pages
        self._tokens_R = np.zeros(num_rows, np.int64)  # at most, of rows that run
        self._is_new = False
        self._page, self._expected = page, min(max(expected, 1.0), row_pages)

    def changed(self) -> bool:
        """Whether the table is another than when this was asked before."""
        was, self._is_new = self._is_new, False
        return was

    def end(self, rows: Iterable[int]) -> None:
        """These have ended, as a look has shown; those that do not run are passed over."""
        ended = set(rows).intersection(self.running)
        for row in ended:
            self._give_back(row)
        self.running = [row for row in self.running if row not in ended]

    def grow(self, tokens: int) -> None:
        """Room for so many tokens more of each row that runs, or for those that began first."""
        for row in list(self.running):
            if self._held_R[row] == 0:  # it has given way
                continue
            self._tokens_R[row] += tokens
            while self._held_R[row] < self._pages_of(row):
                if not self._free:
                    self._give_way()
                if self._held_R[row] == 0:
                    break
                if self._free:
                    self._give(row)

    def begin(self, tokens: int) -> list[int]:
        """Rows that begin now, with room for so many tokens."""
        begun: list[int] = []
        taken = float(np.maximum(self._held_R[self.running], self._expected).sum())
        while self._waiting and len(self._free) >= -(-tokens // self._page):
            if self.running and taken + self._expected > self.nobodys:
                break
            row = self._waiting.popleft()
            self.running.append(row)
            begun.append(row)
            self._tokens_R[row] = tokens
            while self._held_R[row] < self._pages_of(row):
                self._give(row)
            taken += self._expected
        return begun

    def _pages_of(self, row: int) -> int:
        """What its tokens need, of which it has no more than a full row."""
        return min(-(-int(self._tokens_R[row]) // self._page), self.table_RJ.shape[1])

    def _give(self, row: int) -> None:
        self._is_new = True
        self.table_RJ[row, self._held_R[row]] = self._free.pop()
        self._held_R[row] += 1

    def _give_back(self, row: int) -> None:
        held = int(self._held_R[row])
        self._free.extend(self.table_RJ[row, :held].tolist())
        self.table_RJ[row] = self.nobodys
        self._is_new = True
        self._held_R[row] = self._tokens_R[row] = 0

    def _give_way(self) -> None:
        """The row that began last begins again later. Rows are longer than was expected."""
        self._expected = min(1.25 * self._expected + 1, self.table_RJ.shape[1])
        row = self.running.pop()
        self._give_back(row)
        self._waiting.appendleft(row)
