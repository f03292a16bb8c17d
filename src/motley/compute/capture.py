"""Capturing CUDA graphs: what every capture must do, whoever replays what it captured.

Owns the order of it: one capture at a time in a process, on a stream of its own, after a run for
nothing. Knows no model; which work is worth a graph is decided by `graphs` for training and by
`engines.graphs` for sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from motley.compute.packed import send
from motley.models.devices import is_out_of_memory

# one thread at a time may capture a CUDA graph, and nobody may wait for the device meanwhile
CAPTURING = Lock()
Capture = Callable[[torch.cuda.CUDAGraph], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Recording:
    """Work as a graph: `given` is what it reads, `made` what it writes."""

    graph: torch.cuda.CUDAGraph
    given: tuple[Tensor, ...]
    made: Tensor | None

    def replay(self, *given: Tensor) -> Tensor | None:
        for old, new in zip(self.given, given, strict=True):
            send(new, old)
        self.graph.replay()
        return self.made


class GraphMemory:
    """Where one owner captures its graphs: a stream, and the memory that all of them share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None  # whose workspaces no other graph uses
        self._pool: Any = None

    @contextmanager
    def capturing(self, work: Callable[[], object]) -> Iterator[Capture]:
        """Do the work for nothing, so that kernels are compiled and workspaces made; then capture.

        with memory.capturing(work) as capture, capture(graph):
            work()
        """
        self._side = self._side or torch.cuda.Stream(self._device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream(self._device)
        try:
            with CAPTURING:
                # what other streams keep is of no use to this one, and would be there twice
                torch.cuda.empty_cache()
                self._side.wait_stream(here)
                with torch.cuda.stream(self._side):
                    work()
                torch.cuda.synchronize(self._device)
                yield partial(
                    torch.cuda.graph,
                    pool=self._pool,
                    stream=self._side,
                    capture_error_mode="thread_local",
                )
        finally:
            torch.cuda.set_stream(here)  # a capture that failed does not leave its own

    def record(self, given: tuple[Tensor, ...], work: Callable[..., Tensor | None]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        with self.capturing(partial(work, *given)) as capture, capture(graph):
            made = work(*given)
        return Recording(graph, given, made)

    def forget(self) -> None:
        """Share no memory with the graphs so far, which are gone."""
        self._pool = None


def lacks_memory_to_capture(error: RuntimeError) -> bool:
    """Running out of memory also makes a capture fail, which then is what is said."""
    return is_out_of_memory(error) or "captur" in str(error)
