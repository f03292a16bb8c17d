"""What a user's code sets for all of torch is put back behind it.

Owns no call. Does not import torch: a task needs none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Modes:
    """Whether there are gradients, which is a thread's own, and the default dtype, which is
    everyone's: of calls that run at once, the first keeps it and the last puts it back. One call
    may be loading a model meanwhile, with the model's dtype as the default.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._dtype: Any = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        torch = _torch()
        learns = torch.is_grad_enabled() if torch else True
        with self._lock:
            if not self._calls:
                self._dtype = torch.get_default_dtype() if torch else None
            self._calls += 1
        try:
            yield
        finally:
            torch = _torch()  # the user's code may be who imported it
            if torch:
                torch.set_grad_enabled(learns)
            with self._lock:
                self._calls -= 1
                if torch and not self._calls:
                    torch.set_default_dtype(self._dtype or torch.float32)


def _torch() -> Any:
    return sys.modules.get("torch")
