"""Column: numbers of many things, one behind the other, that only grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LEAST = 1024


class Column:
    """A growing array. `values` is a view: it stays right for what was there when it was taken."""

    def __init__(self, kind: DTypeLike) -> None:
        self._room = np.zeros(LEAST, kind)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def values(self) -> NDArray[Any]:
        return self._room[: self._size]

    def extend(self, more: Sequence[float] | NDArray[Any]) -> None:
        size = self._size + len(more)
        if size > len(self._room):
            self._room = np.concatenate([self.values, np.zeros(size, self._room.dtype)])
        self._room[self._size : size] = more
        self._size = size

    def add_at(self, place: int, amount: int) -> None:
        """Count something at a place, however far behind the end it is."""
        if place >= self._size:
            self.extend(np.zeros(place + 1 - self._size))
        self._room[place] += amount
