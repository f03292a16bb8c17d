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

import math
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
from motley.compute.packed import send
from motley.engines.engine import Completion
from motley.engines.pages import Pages
from motley.engines.room import PAGE, Room, RoomSize, pages_of, pages_that_fit
from motley.engines.sampling import PromptIds, SampledRows, sample_rows
from motley.engines.steps import Steps
from motley.models.policy import Policy
from motley.records import Sampling

BUCKETS = sorted(
    {size * step for size in (2**i for i in range(20)) for step in (2, 3)} | {1}
)  # lanes of a graph: 1, 2, 3, 4, 6, 8, 12, ...
STEPS_BETWEEN_LOOKS = 4  # at which rows have ended
PREFILL_TOKENS = 1 << 15  # at once, padding included
PREFILL_KEYS = 1 << 17  # that those tokens look at, with what all prompts begin with
PIECE_TOKENS = 1 << 12  # of a prompt that is longer than that
# of prompts that a graph reads: more keep a GPU busy for longer than they take to launch
CAPTURED_TOKENS = 1 << 13
PROMPT_STEP = 64  # room for prompts is made in these
PADDED_STEP = 16  # prompts are padded to these, so that few graphs read them
KEPT_SHARE = 0.25  # of the device's memory: more room than this is given back after sampling
FREE_SHARE = 0.8  # of what is free: most room for keys and values of rows
EXPECTED_MORE = 1.25  # of what rows took in the last call: what they are expected to take
SHARED_LEAST = 64  # tokens that all prompts begin with, which are then read once
SHARED_SHARE = 0.25  # of the longest prompt that they must be
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

    def piece(self, tokens: slice) -> _Padded:
        """Some of their tokens; which is the last says nothing if it is not among them."""
        token_PT = self.token_PT[:, tokens]
        last_P = (self.last_P - (tokens.start or 0)).clamp(0, token_PT.shape[1] - 1)
        return _Padded(token_PT, self.place_P, last_P)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        return self.token_PT.to(device), self.place_P.to(device), self.last_P.to(device)


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
        return (~self._there()).nonzero().squeeze(1)

    def ended(self) -> Tensor:
        return self._there().nonzero().squeeze(1)

    def _there(self) -> Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.ended_R


class _Graphs:
    """Steps and readings as graphs, by what is fixed in them; all of one room, and gone with it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = GraphMemory(device)
        self.steps: dict[tuple[int, Sampling], Recording] = {}  # by lanes and how they draw
        # by the shape of padded prompts, and how many tokens stand before them
        self.readers: dict[tuple[torch.Size, int], Recording] = {}
        self._seen: set[tuple[torch.Size, int]] = set()  # such shapes that came
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

    def reader(self, padded: _Padded, start: int, work: Callable[..., Tensor]) -> Recording | None:
        """A graph for prompts of a shape that has come before.

        None: one does not pay, or there is no memory for it.
        """
        size, shape = padded.token_PT.numel(), (padded.token_PT.shape, start)
        if shape in self.readers:
            return self.readers[shape]
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        if not self.reads or size > CAPTURED_TOKENS or len(self.readers) == MOST_READERS:
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
        self._mean_tokens: float | None = None  # of the rows of the last call
        self._first_prompt: Sequence[int] = ()  # whose keys and values are at the first place

    def refresh(self) -> None:
        self._first_prompt = ()
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
        if self._room is not None and self._room.nbytes > kept_bytes(self._device):
            self._forget()
        return made

    def _rows(self, sampling: Sampling, prompts: PromptIds, uniform_BT: Tensor) -> SampledRows:
        rows, tokens = uniform_BT.shape
        try:
            room = self._make_room(
                RoomSize(len(prompts), max(len(p) for p in prompts), rows, tokens)
            )
            room.place(prompts, uniform_BT, self.limits(rows, tokens))
            logits_PV = self._read(room, prompts)
            go_on = self._go_on if room.hand_out(rows, tokens) else self._take_turns
            go_on(room, logits_PV, sampling, rows)
        except RuntimeError:  # out of memory, perhaps: what follows may need what there is
            self._forget()
            raise
        self._mean_tokens = float(room.count_R[:rows].double().mean())
        return SampledRows(
            room.token_RT[:rows, :tokens].clone(),
            room.logp_RT[:rows, :tokens].clone(),
            room.count_R[:rows].clone(),
        )

    def limits(self, rows: int, tokens: int) -> Tensor:
        """Most tokens of each row. A benchmark has its own."""
        return torch.full((rows,), tokens, device=self._device)

    def _make_room(self, size: RoomSize) -> Room:
        """The room there is, or a larger one, so that calls of different shapes share it."""
        size = size._replace(prompt_tokens=_up(size.prompt_tokens, PROMPT_STEP))
        if self._room is not None and self._room.size.holds(size):
            return self._room
        both = size if self._room is None else RoomSize(*map(max, self._room.size, size))
        self._forget()
        try:
            self._room = self._new_room(both)
            return self._room
        except torch.OutOfMemoryError:
            if both == size:
                raise
        self._room = self._new_room(size)
        return self._room

    def _new_room(self, size: RoomSize) -> Room:
        """With as many pages as rows can need, or as there is memory for."""
        steps, device = self._steps, self._device
        layers, heads = len(steps.decoder.layers), steps.decoder.heads
        token_bytes = 2 * layers * heads.keys * heads.size * steps.dtype.itemsize
        expected, usable = self._expected_pages(size.tokens), FREE_SHARE * free_bytes(device)
        pages = pages_that_fit(size, token_bytes, expected, kept_bytes(device), usable)
        return Room(size, pages, steps.decoder, steps.dtype, device)

    def _expected_pages(self, tokens: int) -> float:
        """Of a row that may have so many tokens, at its end."""
        most = pages_of(tokens)
        if self._mean_tokens is None:
            return most
        return min(EXPECTED_MORE * self._mean_tokens / PAGE + 1, most)

    def _forget(self) -> None:
        self._graphs.drop()
        self._room, self._first_prompt = None, ()

    def _read(self, room: Room, prompts: PromptIds) -> Tensor:
        """Logits [P, V] behind each prompt, each read once; what all begin with is read once."""
        vocabulary_size = len(self._steps.weights.head)
        logits_PV = torch.empty(len(prompts), vocabulary_size, device=self._device)
        before, self._first_prompt = self._first_prompt, ()  # until all is read
        shared = self._read_shared(room, prompts, before)
        order = sorted(range(len(prompts)), key=lambda p: len(prompts[p]))
        while order:
            longest = _up(len(prompts[order[-1]]) - shared, PADDED_STEP)
            count = min(PREFILL_TOKENS // longest, PREFILL_KEYS // (shared + longest))
            count = max(1, count)
            order, now = order[:-count], order[-count:]
            rest = _Padded.of([prompts[p][shared:] for p in now], now)
            logits_PV[torch.tensor(now, device=self._device)] = self._prefill(room, rest, shared)
        self._first_prompt = tuple(prompts[0])
        return logits_PV

    def _read_shared(self, room: Room, prompts: PromptIds, before: Sequence[int]) -> int:
        """How many tokens all prompts begin with, whose keys and values are at every place then.

        Few beside the rest do not pay. What stood at the first place `before`, with the same
        weights, is not read again.
        """
        shared = _num_alike(min(prompts, key=tuple), max(prompts, key=tuple))
        shared = min(shared, min(len(p) for p in prompts) - 1) // PADDED_STEP * PADDED_STEP
        longest = max(len(p) for p in prompts)
        if len(prompts) == 1 or shared < max(SHARED_LEAST, SHARED_SHARE * longest):
            return 0
        first = prompts[0]
        known = min(_num_alike(before, first), shared) // PADDED_STEP * PADDED_STEP
        if known < shared:
            self._prefill(room, _Padded.of([first[known:shared]], [0]), known)
        places = room.prompt_L2PHTd[:, :, : len(prompts), :, :shared]
        places[:, :, 1:] = places[:, :, :1]
        return shared

    def _prefill(self, room: Room, padded: _Padded, start: int) -> Tensor:
        """Logits [P, V] behind each prompt; its keys and values go to its place.

        `start`: how many tokens stand before. One prompt that is too long is read in pieces.
        """
        pieces = padded.token_PT.shape[1] > PREFILL_TOKENS
        while pieces and padded.token_PT.shape[1] > PIECE_TOKENS:
            piece = padded.piece(slice(PIECE_TOKENS))
            self._steps.read(room, *piece.on(self._device), start=start)
            start += PIECE_TOKENS
            padded = padded.piece(slice(PIECE_TOKENS, None))
        read = partial(self._steps.read, room, start=start)
        reader = self._graphs.reader(padded, start, read)
        normed_PD = read(*padded.on(self._device)) if reader is None else reader.replay(*padded)
        assert normed_PD is not None
        return self._steps.logits(normed_PD)

    def _begin(self, room: Room, logits_PV: Tensor, row_B: Tensor, sampling: Sampling) -> None:
        """Draw the first token of these rows."""
        self._steps.draw(room, logits_PV, room.prompt_R[row_B], row_B, sampling)

    def _go_on(self, room: Room, logits_PV: Tensor, sampling: Sampling, rows: int) -> None:
        """Begin all rows, and step until every one has ended or has all its tokens.

        Rows leave some steps after they ended, so that nobody waits for a look.
        """
        self._begin(room, logits_PV, torch.arange(rows, device=self._device), sampling)
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

    def _take_turns(self, room: Room, logits_PV: Tensor, sampling: Sampling, rows: int) -> None:
        """The same where not all rows have room: others begin as some end."""
        size, count = room.size, STEPS_BETWEEN_LOOKS
        pages = Pages(
            rows,
            size.row_pages,
            room.own_L2GHTd.shape[2],
            room.page,
            self._expected_pages(sampling.max_tokens),
        )
        look: _Look | None = None
        while True:
            if look is not None:
                pages.end(look.ended().tolist())
            pages.grow(count)
            begun = torch.tensor(pages.begin(count + 1), dtype=torch.int64)
            if not pages.running:
                return
            if pages.changed():
                send(torch.from_numpy(pages.table_RJ), room.page_RJ[:rows])
            if len(begun):
                row_B = torch.empty_like(begun, device=self._device)
                send(begun, row_B)
                room.begin(row_B)
                self._begin(room, logits_PV, row_B, sampling)
            look = _Look.at(room.ended_R[:rows])
            self._step(room, torch.tensor(pages.running), sampling, count)

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


def kept_bytes(device: torch.device) -> float:
    """Most room that is kept between calls."""
    if device.type != "cuda":
        return math.inf
    return KEPT_SHARE * torch.cuda.mem_get_info(device)[1]


def free_bytes(device: torch.device) -> float:
    """What the device has left. What torch holds for graphs is theirs, though it is not in use."""
    if device.type != "cuda":
        return math.inf
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _up(length: int, step: int) -> int:
    return -(-length // step) * step
