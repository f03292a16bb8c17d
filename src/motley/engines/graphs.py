"""The built-in engine on a GPU: a decoding step is one CUDA graph, so that it costs what it
computes and not what it takes to launch. So is the reading of few prompts, once as many of the same
length have come before.

Differs from transformers' `generate` with a static cache: keys and values of a prompt are kept once
for all its samples, grouped heads read them once, tokens are drawn inside the graph, and rows that
have ended leave by an index: nothing is copied, the next step runs the graph of a smaller bucket.
Weights are a snapshot that is refreshed in place, so graphs live as long as the room for keys and
values does.

On a CPU the same steps run without graphs, under Triton's interpreter: for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from motley.compute.capture import GraphMemory, Recording, lacks_memory_to_capture
from motley.compute.decoder import Decoder
from motley.engines.engine import Completion
from motley.engines.room import Room, RoomSize
from motley.engines.sampling import PromptIds, SampledRows, sample_rows
from motley.engines.steps import Steps
from motley.models.policy import Policy
from motley.records import Sampling

BUCKETS = sorted(
    {size * step for size in (2**i for i in range(20)) for step in (2, 3)} | {1}
)  # lanes of a graph: 1, 2, 3, 4, 6, 8, 12, ...
STEPS_BETWEEN_LOOKS = 4  # at which rows have ended
PREFILL_TOKENS = 1 << 15  # at once, padding included
# of prompts that a graph reads: more keep a GPU busy for longer than they take to launch
CAPTURED_TOKENS = 1 << 13
PROMPT_STEP = 64  # room for prompts is made in these
PADDED_STEP = 16  # prompts are padded to these, so that few graphs read them
KEPT_SHARE = 0.25  # of the device's memory: more room than this is given back after sampling
MOST_GRAPHS = 64
MOST_READERS = 8  # graphs that read prompts: others are read without


class _Padded(NamedTuple):
    """Prompts to read, still on the CPU. Padding is on the right, where nobody looks."""

    token_PT: Tensor
    place_P: Tensor  # in the room
    last_P: Tensor

    @classmethod
    def of(cls, prompts: PromptIds, places: list[int]) -> _Padded:
        token_PT = np.zeros(
            (len(prompts), _up(max(len(p) for p in prompts), PADDED_STEP)), np.int64
        )
        for row, prompt in zip(token_PT, prompts, strict=True):
            row[: len(prompt)] = prompt
        return cls(
            torch.from_numpy(token_PT),
            torch.tensor(places),
            torch.tensor([len(p) - 1 for p in prompts]),
        )

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(each.to(device) for each in self)


class _Look(NamedTuple):
    """Which rows have ended, on its way to the CPU."""

    ended_R: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def at(cls, ended_R: Tensor) -> _Look:
        if not ended_R.is_cuda:
            return cls(ended_R.clone(), None)
        on_cpu = ended_R.to("cpu", non_blocking=True)
        return cls(on_cpu, torch.cuda.current_stream(ended_R.device).record_event())

    def going_on(self) -> Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
        return (~self.ended_R).nonzero().squeeze(1)


class _Graphs:
    """Steps and readings as graphs, by what is fixed in them; all of one room, and gone with it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = GraphMemory(device)
        self.steps: dict[tuple[int, Sampling], Recording] = {}  # by lanes and how they draw
        self.readers: dict[torch.Size, Recording] = {}  # by the shape of padded prompts
        self._seen: set[torch.Size] = set()  # such shapes that came
        self.reads = device.type == "cuda"

    def step(
        self, lanes: int, nobody: int, sampling: Sampling, work: Callable[[Tensor], None]
    ) -> Recording:
        """A graph of so many lanes, captured while they work for `nobody`."""
        key = (lanes, msgspec.structs.replace(sampling, max_tokens=1))
        if key not in self.steps:
            nobody_B = torch.full((lanes,), nobody, device=self._device)
            self.steps[key] = self.record((nobody_B,), work)
        return self.steps[key]

    def reader(self, padded: _Padded, work: Callable[..., Tensor]) -> Recording | None:
        """A graph for prompts of a shape that has come before.

        None: one does not pay, or there is no memory for it.
        """
        shape = padded.token_PT.shape
        if shape in self.readers:
            return self.readers[shape]
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        if not self.reads or shape.numel() > CAPTURED_TOKENS or len(self.readers) == MOST_READERS:
            return None
        try:
            self.readers[shape] = self.record(padded.on(self._device), work)
        except RuntimeError as error:
            if not lacks_memory_to_capture(error):
                raise
            self.reads = False
            self.drop()
        return self.readers.get(shape)

    def record(self, given: tuple[Tensor, ...], work: Callable[..., Tensor | None]) -> Recording:
        if len(self.steps) >= MOST_GRAPHS:
            self.drop()
        return self._memory.record(given, work)

    def drop(self) -> None:
        if self._device.type == "cuda":
            # their kernels may still write where others are about to
            torch.cuda.current_stream(self._device).synchronize()
        self.steps.clear()
        self.readers.clear()
        self._seen.clear()
        self._memory.forget()


class GraphEngine:
    keeps_snapshot = True

    def __init__(self, policy: Policy, decoder: Decoder | None = None) -> None:
        """`decoder`: the policy's, where its weights come and go; otherwise it is read here."""
        self._policy, self._device = policy, policy.device
        self._steps = Steps(policy, decoder)
        self._graphs = _Graphs(self._device)
        self._room: Room | None = None

    def refresh(self) -> None:
        self._steps.refresh()

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        first: int = 0,
    ) -> list[list[Completion]]:
        rows = partial(self._rows, sampling)
        # where Triton starts its kernels
        with torch.cuda.device_of(self._steps.weights.head):
            made = sample_rows(rows, self._policy, prompts, num_samples, sampling, seed, first)
        if (
            self._room is not None
            and self._device.type == "cuda"
            and self._room.nbytes > KEPT_SHARE * torch.cuda.mem_get_info(self._device)[1]
        ):
            self._forget()
        return made

    def _rows(self, sampling: Sampling, prompts: PromptIds, uniform_BT: Tensor) -> SampledRows:
        try:
            room = self._make_room(
                RoomSize(len(prompts), max(len(p) for p in prompts), *uniform_BT.shape)
            )
            room.place(prompts, uniform_BT)
            self._begin(room, prompts, sampling, len(uniform_BT))
            self._go_on(room, sampling, len(uniform_BT))
        except RuntimeError:  # out of memory, perhaps: what follows may need what there is
            self._forget()
            raise
        rows, tokens = uniform_BT.shape
        return SampledRows(
            room.token_RT[:rows, :tokens].clone(),
            room.logp_RT[:rows, :tokens].clone(),
            room.count_R[:rows].clone(),
        )

    def _make_room(self, size: RoomSize) -> Room:
        """The room there is, or a larger one, so that calls of different shapes share it."""
        size = size._replace(prompt_tokens=_up(size.prompt_tokens, PROMPT_STEP))
        if self._room is not None and self._room.size.holds(size):
            return self._room
        both = size if self._room is None else RoomSize(*map(max, self._room.size, size))
        self._forget()
        make = partial(
            Room, decoder=self._steps.decoder, dtype=self._steps.dtype, device=self._device
        )
        try:
            self._room = make(both)
        except torch.OutOfMemoryError:
            self._room = make(size)
        return self._room

    def _forget(self) -> None:
        self._graphs.drop()
        self._room = None

    def _begin(self, room: Room, prompts: PromptIds, sampling: Sampling, rows: int) -> None:
        """Read the prompts, each once, and draw the first token of every row."""
        vocabulary_size = len(self._steps.weights.head)
        logits_PV = torch.empty(len(prompts), vocabulary_size, device=self._device)
        order = sorted(range(len(prompts)), key=lambda p: len(prompts[p]))
        while order:
            longest = _up(len(prompts[order[-1]]), PADDED_STEP)
            count = max(1, PREFILL_TOKENS // longest)
            order, now = order[:-count], order[-count:]
            logits_PV[torch.tensor(now, device=self._device)] = self._prefill(
                room, _Padded.of([prompts[p] for p in now], now)
            )
        row_B = torch.arange(rows, device=self._device)
        self._steps.draw(room, logits_PV, room.prompt_R[row_B], row_B, sampling)

    def _prefill(self, room: Room, padded: _Padded) -> Tensor:
        """Logits [P, V] behind each prompt; its keys and values go to its place."""
        read = partial(self._steps.read, room)
        reader = self._graphs.reader(padded, read)
        normed_PD = read(*padded.on(self._device)) if reader is None else reader.replay(*padded)
        assert normed_PD is not None
        return self._steps.logits(normed_PD)

    def _go_on(self, room: Room, sampling: Sampling, rows: int) -> None:
        """Step until every row has ended or has all its tokens.

        Rows leave some steps after they ended, so that nobody waits for a look.
        """
        done = 1
        look = _Look.at(room.ended_R[:rows])
        while done < sampling.max_tokens:
            row_b = look.going_on()
            if len(row_b) == 0:
                return
            look = _Look.at(room.ended_R[:rows])
            count = min(STEPS_BETWEEN_LOOKS, sampling.max_tokens - done)
            self._step(room, row_b, sampling, count)
            done += count

    def _step(self, room: Room, row_b: Tensor, sampling: Sampling, count: int) -> None:
        """So many steps of these rows, by a graph of at least as many lanes."""
        if self._device.type != "cuda":
            for _ in range(count):
                self._steps.step(room, row_b, sampling)
            return
        lanes, nobody = next(size for size in BUCKETS if size >= len(row_b)), room.size.rows
        row_B = F.pad(row_b, (0, lanes - len(row_b)), value=nobody)
        recorded = self._graphs.step(
            lanes, nobody, sampling, lambda row_B: self._steps.step(room, row_B, sampling)
        )
        recorded.replay(row_B)
        for _ in range(count - 1):
            recorded.graph.replay()


def _up(length: int, step: int) -> int:
    return -(-length // step) * step
