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
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from motley.engines import kernels
from motley.engines.drawing import Drawn, Prompts, sample_rows
from motley.engines.engine import Completion
from motley.engines.snapshot import Layer, Snapshot
from motley.policies.decoder import Decoder
from motley.policies.hardware import CAPTURING, lacks_memory_to_capture
from motley.policies.kernels import add_norm, gated, rotate
from motley.policies.packed import send
from motley.policies.policy import Policy
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


class _Size(NamedTuple):
    """What there must be room for."""

    prompts: int
    prompt_tokens: int
    rows: int
    tokens: int

    def holds(self, other: _Size) -> bool:
        return all(mine >= its for mine, its in zip(self, other, strict=True))


class _Room:
    """Keys and values of prompts and of rows, and where each row stands.

    The last row is nobody's: idle lanes work for it.
    """

    def __init__(
        self, size: _Size, decoder: Decoder, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size = size
        layers, heads, head_dim = len(decoder.blocks), decoder.kv_heads, decoder.head_dim
        rows = size.rows + 1
        empty = partial(torch.empty, device=device)
        self.prompt_L2PHTd = empty(
            layers, 2, size.prompts, heads, size.prompt_tokens, head_dim, dtype=dtype
        )
        self.own_L2RHTd = empty(layers, 2, rows, heads, size.tokens, head_dim, dtype=dtype)
        self.length_P = torch.ones(size.prompts, dtype=torch.int64, device=device)
        self.prompt_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.count_R = torch.ones(rows, dtype=torch.int64, device=device)  # tokens drawn
        self.ended_R = torch.ones(rows, dtype=torch.bool, device=device)
        self.last_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.uniform_RT = torch.zeros(rows, size.tokens, dtype=torch.float64, device=device)
        self.token_RT = torch.zeros(rows, size.tokens, dtype=torch.int64, device=device)
        self.logp_RT = torch.zeros(rows, size.tokens, device=device)
        with torch.no_grad():
            rotations = decoder.rotations(
                torch.arange(size.prompt_tokens + size.tokens, device=device)
            )
        self.rotations = {
            name: (cos[:, 0].contiguous(), sin[:, 0].contiguous())
            for name, (cos, sin) in rotations.items()
        }

    def place(self, prompts: Prompts, uniform_BT: Tensor) -> None:
        """Rows of new prompts, equally many of each, before their first token."""
        device, rows = uniform_BT.device, len(uniform_BT)
        self.length_P[: len(prompts)] = torch.tensor([len(p) for p in prompts], device=device)
        self.prompt_R[:rows] = torch.arange(rows, device=device) // (rows // len(prompts))
        self.count_R[:rows] = 0
        self.ended_R[:rows] = False
        self.uniform_RT[:rows, : uniform_BT.shape[1]] = uniform_BT

    def note(self, row_B: Tensor, token_B: Tensor, logp_B: Tensor, is_end_V: Tensor) -> None:
        """Write down what was drawn for these rows; one that has ended stays as it is."""
        count_B, ended_B = self.count_R[row_B], self.ended_R[row_B]
        place_B = count_B.clamp(max=self.size.tokens - 1)
        self.token_RT[row_B, place_B] = torch.where(ended_B, self.token_RT[row_B, place_B], token_B)
        self.logp_RT[row_B, place_B] = torch.where(ended_B, self.logp_RT[row_B, place_B], logp_B)
        self.last_R[row_B] = token_B
        self.count_R[row_B] = torch.where(ended_B, count_B, count_B + 1)
        self.ended_R[row_B] = ended_B | is_end_V[token_B]


class _Padded(NamedTuple):
    """Prompts to read, still on the CPU. Padding is on the right, where nobody looks."""

    token_PT: Tensor
    place_P: Tensor  # in the room
    last_P: Tensor

    @classmethod
    def of(cls, prompts: Prompts, places: list[int]) -> _Padded:
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


@dataclass(frozen=True, slots=True)
class _Graph:
    """`given` is what it reads, `made` what it writes."""

    graph: torch.cuda.CUDAGraph
    given: tuple[Tensor, ...]
    made: Tensor | None

    def replay(self, *given: Tensor) -> Tensor | None:
        for old, new in zip(self.given, given, strict=True):
            send(new, old)
        self.graph.replay()
        return self.made


class GraphEngine:
    keeps_snapshot = True

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._dtype = policy.dtype
        self._device = policy.device
        decoder = policy.decoder
        self._heads, self._kv_heads, self._head_dim, self._activation = (
            decoder.heads,
            decoder.kv_heads,
            decoder.head_dim,
            decoder.activation,
        )
        self._weights = Snapshot.of(decoder, self._dtype, self._dtype)
        ends = [end for end in policy.vocabulary.end_ids if end < len(self._weights.head)]
        self._is_end_V = torch.zeros(len(self._weights.head), dtype=torch.bool, device=self._device)
        self._is_end_V[ends] = True
        # whose workspaces no other graph uses
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._pool: Any = None
        self._room: _Room | None = None
        self._graphs: dict[tuple[int, Sampling], _Graph] = {}
        self._readers: dict[torch.Size, _Graph] = {}  # by the shape of padded prompts
        self._seen: set[torch.Size] = set()  # such shapes that came
        self._reads_by_graph = self._device.type == "cuda"

    def refresh(self) -> None:
        self._weights.refresh(self._policy.decoder)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        with torch.cuda.device_of(self._is_end_V):  # where Triton starts its kernels
            made = sample_rows(
                partial(self._rows, sampling), self._policy, prompts, num_samples, sampling, seed
            )
        if (
            self._room is not None
            and self._device.type == "cuda"
            and self._room_bytes() > KEPT_SHARE * torch.cuda.mem_get_info(self._device)[1]
        ):
            self._forget()
        return made

    def _rows(self, sampling: Sampling, prompts: Prompts, uniform_BT: Tensor) -> Drawn:
        try:
            room = self._make_room(
                _Size(len(prompts), max(len(p) for p in prompts), *uniform_BT.shape)
            )
            room.place(prompts, uniform_BT)
            self._begin(room, prompts, sampling, len(uniform_BT))
            self._go_on(room, sampling, len(uniform_BT))
        except RuntimeError:  # out of memory, perhaps: what follows may need what there is
            self._forget()
            raise
        rows, tokens = uniform_BT.shape
        return Drawn(
            room.token_RT[:rows, :tokens].clone(),
            room.logp_RT[:rows, :tokens].clone(),
            room.count_R[:rows].clone(),
        )

    # Room for keys and values

    def _make_room(self, size: _Size) -> _Room:
        """The room there is, or one that holds what that held too, so that calls of different
        shapes in turn share it.
        """
        size = size._replace(prompt_tokens=_up(size.prompt_tokens, PROMPT_STEP))
        if self._room is not None and self._room.size.holds(size):
            return self._room
        both = size if self._room is None else _Size(*map(max, self._room.size, size))
        self._forget()
        make = lambda size: _Room(size, self._policy.decoder, self._dtype, self._device)
        try:
            self._room = make(both)
        except torch.OutOfMemoryError:
            self._room = make(size)
        return self._room

    def _room_bytes(self) -> int:
        room = self._room
        return 0 if room is None else room.own_L2RHTd.nbytes + room.prompt_L2PHTd.nbytes

    def _forget(self) -> None:
        self._drop_graphs()
        self._room = None

    # Prompts

    def _begin(self, room: _Room, prompts: Prompts, sampling: Sampling, rows: int) -> None:
        """Run the prompts, each once, and draw the first token of every row."""
        logits_PV = torch.empty(len(prompts), len(self._weights.head), device=self._device)
        order = sorted(range(len(prompts)), key=lambda p: len(prompts[p]))
        while order:
            longest = _up(len(prompts[order[-1]]), PADDED_STEP)
            order, now = (
                order[: -max(1, PREFILL_TOKENS // longest)],
                order[-max(1, PREFILL_TOKENS // longest) :],
            )
            logits_PV[torch.tensor(now, device=self._device)] = self._prefill(
                room, [prompts[p] for p in now], now
            )
        row_B = torch.arange(rows, device=self._device)
        self._draw(room, logits_PV, room.prompt_R[row_B], row_B, sampling)

    def _prefill(self, room: _Room, prompts: Prompts, places: list[int]) -> Tensor:
        """Logits [P, V] behind each prompt; its keys and values go to its place."""
        padded = _Padded.of(prompts, places)
        reader = self._reader(room, padded)
        normed_PD = (
            self._read(room, *padded.on(self._device)) if reader is None else reader.replay(*padded)
        )
        assert normed_PD is not None
        return self._logits(normed_PD)

    def _reader(self, room: _Room, padded: _Padded) -> _Graph | None:
        """A graph for prompts of a shape that has come before.

        None: one does not pay, or there is no memory for it.
        """
        shape = padded.token_PT.shape
        if shape in self._readers:
            return self._readers[shape]
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        if (
            not self._reads_by_graph
            or shape.numel() > CAPTURED_TOKENS
            or len(self._readers) == MOST_READERS
        ):
            return None
        try:
            self._readers[shape] = self._capture(padded.on(self._device), partial(self._read, room))
        except RuntimeError as error:
            if not lacks_memory_to_capture(error):
                raise
            self._reads_by_graph = False
            self._drop_graphs()
        return self._readers.get(shape)

    def _read(self, room: _Room, token_PT: Tensor, place_P: Tensor, last_P: Tensor) -> Tensor:
        """The normed state [P, D] behind each prompt."""
        prompts, longest, weights = *token_PT.shape, self._weights
        hidden = F.embedding(token_PT.flatten(), weights.embedding)
        visible = {
            window: _visible(longest, window, self._device)
            for window in {layer.window for layer in weights.layers}
        }
        times = (prompts, 1)
        tables = {
            name: (cos[:longest].repeat(times), sin[:longest].repeat(times))
            for name, (cos, sin) in room.rotations.items()
        }
        step = _Step(hidden, weights.eps, self._dtype)
        for index, layer in enumerate(weights.layers):
            qkv = self._normed(
                layer.qkv(step.norm(layer.attention_norm)).unflatten(1, (-1, self._head_dim)), layer
            )
            cos, sin = tables[layer.rotation]
            rotated = rotate(qkv, cos, sin, self._heads + self._kv_heads, self._dtype)
            parts = rotated.unflatten(0, (prompts, longest)).split(
                (self._heads, self._kv_heads, self._kv_heads), 2
            )
            query, key, value = (part.transpose(1, 2) for part in parts)
            room.prompt_L2PHTd[index, 0, place_P, :, :longest] = key
            room.prompt_L2PHTd[index, 1, place_P, :, :longest] = value
            mask = visible[layer.window]
            grouped = self._heads != self._kv_heads
            mixed = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=grouped,
                scale=layer.scaling,
            )
            step.add(
                layer.out(mixed.transpose(1, 2).reshape(len(hidden), -1)), layer.after_attention
            )
            gate_up = layer.gate_up(step.norm(layer.mlp_norm))
            step.add(layer.down(gated(gate_up, self._activation)), layer.after_mlp)
        normed = step.norm(weights.norm).view(prompts, longest, -1)
        return normed[torch.arange(prompts, device=self._device), last_P]

    def _normed(self, qkv_NHd: Tensor, layer: Layer) -> Tensor:
        """With the norms of queries and keys, where a layer has them."""
        if layer.query_norm is None or layer.key_norm is None:
            return qkv_NHd
        query, key, value = qkv_NHd.float().split((self._heads, self._kv_heads, self._kv_heads), 1)
        norm = partial(F.rms_norm, normalized_shape=(self._head_dim,), eps=self._weights.eps)
        return torch.cat(
            [norm(query, weight=layer.query_norm), norm(key, weight=layer.key_norm), value], 1
        )

    # Steps

    def _go_on(self, room: _Room, sampling: Sampling, rows: int) -> None:
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
            steps = min(STEPS_BETWEEN_LOOKS, sampling.max_tokens - done)
            self._steps(room, row_b, sampling, steps)
            done += steps

    def _steps(self, room: _Room, row_b: Tensor, sampling: Sampling, steps: int) -> None:
        lanes = next(size for size in BUCKETS if size >= len(row_b))
        if self._device.type != "cuda":
            for _ in range(steps):
                self._step(room, row_b, sampling)
            return
        key = (lanes, msgspec.structs.replace(sampling, max_tokens=1))
        row_B = F.pad(row_b, (0, lanes - len(row_b)), value=room.size.rows)
        if key not in self._graphs:
            nobody_B = torch.full((lanes,), room.size.rows, device=self._device)
            self._graphs[key] = self._capture(
                (nobody_B,), lambda row_B: self._step(room, row_B, sampling)
            )
        self._graphs[key].replay(row_B)
        for _ in range(steps - 1):
            self._graphs[key].graph.replay()

    def _capture(self, given: tuple[Tensor, ...], work: Callable[..., Tensor | None]) -> _Graph:
        if len(self._graphs) >= MOST_GRAPHS:
            self._drop_graphs()
        assert self._side is not None
        graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream(self._device)
        try:
            with CAPTURING:
                self._side.wait_stream(here)
                with torch.cuda.stream(self._side):
                    work(*given)  # for nothing: kernels are compiled and workspaces made
                torch.cuda.synchronize(self._device)
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
                ):
                    made = work(*given)
        finally:
            torch.cuda.set_stream(here)  # a capture that failed does not leave its own
        return _Graph(graph, given, made)

    def _drop_graphs(self) -> None:
        if self._device.type == "cuda":
            # their kernels may still write where others are about to
            torch.cuda.current_stream(self._device).synchronize()
        self._graphs.clear()
        self._readers.clear()
        self._seen.clear()
        self._pool = None

    def _step(self, room: _Room, row_B: Tensor, sampling: Sampling) -> None:
        """One token more for each of these rows."""
        weights, lanes = self._weights, len(row_B)
        step = _Step(F.embedding(room.last_R[row_B], weights.embedding), weights.eps, self._dtype)
        for index, layer in enumerate(weights.layers):
            qkv = layer.qkv(step.norm(layer.attention_norm))
            mixed = qkv.new_empty(lanes, self._heads * self._head_dim)
            kernels.attend(
                qkv,
                mixed,
                room.prompt_L2PHTd[index],
                room.own_L2RHTd[index],
                row_B,
                room.count_R,
                room.prompt_R,
                room.length_P,
                *room.rotations[layer.rotation],
                layer.query_norm,
                layer.key_norm,
                self._heads,
                layer.scaling,
                layer.window,
                weights.eps,
            )
            step.add(layer.out(mixed), layer.after_attention)
            gate_up = layer.gate_up(step.norm(layer.mlp_norm))
            step.add(layer.down(gated(gate_up, self._activation)), layer.after_mlp)
        logits_BV = self._logits(step.norm(weights.norm))
        self._draw(room, logits_BV, torch.arange(lanes, device=self._device), row_B, sampling)

    def _logits(self, normed_BD: Tensor) -> Tensor:
        head = self._weights.head
        if head.dtype == torch.float32 or not head.is_cuda:
            return F.linear(normed_BD.float(), head.float())
        return torch.mm(normed_BD, head.T, out_dtype=torch.float32)

    def _draw(
        self, room: _Room, logits_RV: Tensor, source_B: Tensor, row_B: Tensor, sampling: Sampling
    ) -> None:
        uniform_B = room.uniform_RT[row_B, room.count_R[row_B].clamp(max=room.size.tokens - 1)]
        token_B, logp_B = kernels.draw(logits_RV, source_B, sampling, uniform_B)
        room.note(row_B, token_B, logp_B, self._is_end_V)


class _Step:
    """The hidden states of a step, and what is still to be added to them: done together with the
    norm that follows.
    """

    def __init__(self, hidden_BD: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._hidden_BD, self._eps, self._dtype = hidden_BD, eps, dtype
        self._x_BD: Tensor | None = None
        self._behind_D: Tensor | None = None

    def norm(self, scale_D: Tensor) -> Tensor:
        if self._x_BD is None:
            return F.rms_norm(self._hidden_BD, scale_D.shape, scale_D, self._eps).to(self._dtype)
        found = add_norm(self._hidden_BD, self._x_BD, self._behind_D, self._eps, scale_D, self._eps)
        self._hidden_BD = found.sum_ND
        return found.normed_ND

    def add(self, x_BD: Tensor, behind_D: Tensor | None) -> None:
        self._x_BD, self._behind_D = x_BD, behind_D


def _up(length: int, step: int) -> int:
    return -(-length // step) * step


def _visible(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[T, K] of a prompt, where a window leaves something out; None: everything behind."""
    if window is None or length <= window:
        return None
    place_T = torch.arange(length, device=device)
    back_TK = place_T[:, None] - place_T
    return (back_TK >= 0) & (back_TK < window)
