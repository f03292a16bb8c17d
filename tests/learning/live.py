"""How many bytes of tensors live, and how many lived at once, while a `with` block runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts storages that operations make. `known`: tensors that were there before."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        for tensor in known:
            self._see(tensor, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self._see(one, one.untyped_storage().nbytes())
        return made

    def _see(self, tensor: torch.Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._sizes:
            return
        self._sizes[id(storage)] = nbytes
        weakref.finalize(storage, self._gone, id(storage))
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def _gone(self, number: int) -> None:
        self.now -= self._sizes.pop(number)
