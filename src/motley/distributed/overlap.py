"""Overlap: a peer samples its next round while it takes a step.

Owns when it does, and the thread beside.

Only who takes part in an async crew from a process of its own does. In lockstep the next round is
sampled with the weights that the step makes; crews in one process and simulations are to be the
same every time. And only where the two do not fight for the same cores: on a CUDA GPU, or with a
server that someone else runs. On a CPU, or with a vLLM server beside the peer on the same CPU, each
would only slow the other down.

| thread | does | touches |
|---|---|---|
| the main one | the step; then groups, outbox, `refresh` | all but the engine |
| beside | `Engine.sample`, then rewards | the engine, and what no step changes of the policy |

Both begin together, and nothing else happens before both have ended: no thread outlives a step.
What is sampled is of the engine's version, one behind what the step makes. A kill loses no more
than what is being sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from motley.clock import timed
from motley.config import CrewConfig, EnginePart
from motley.learning.learner import StepReport
from motley.learning.pace import pace_of
from motley.models.devices import is_out_of_memory
from motley.peers.sampling import Answered, Sampled, SamplerHalf
from motley.runs.metrics import Timing

TakeStep = Callable[..., StepReport | None]


class Both(NamedTuple):
    """A step, and the round that was sampled beside it."""

    report: StepReport | None
    sampled: Sampled | None  # None: memory did not hold it
    timing: Timing


class Overlap:
    """Begins when turns have shown what memory both take; ends for good when it runs out."""

    def __init__(self, config: CrewConfig, half: SamplerHalf, say: Callable[[str], None]) -> None:
        self.on = False
        self._half, self._device, self._say = half, half.policy.device, say
        self._wanted = is_right(config, half) and pays(half)
        self._measures = False  # the optimiser has the memory that it takes with its first step
        self._stream: torch.cuda.Stream | None = None

    def observe(self) -> None:
        """A round was sampled and a step taken, in turn.

        The first time memory is not yet what it will be; the second time decides.
        """
        if not self._wanted or self.on:
            return
        if not self._measures:
            self._measures = True
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
        elif reason := shortage(self._device):
            self._end(reason)
        else:
            self.on = True
            if self._device.type == "cuda":
                # one for good: what one stream has freed is not at once another's
                self._stream = torch.cuda.Stream(self._device)

    def both(self, step: TakeStep) -> Both:
        """Take a step that leaves the engine its weights, and sample the next round beside it; then
        the engine takes the new ones.

        What sampling fails with is raised once the step is taken. For want of memory it does not
        fail: the round is sampled in turn.
        """
        half, asked, before = self._half, self._half.ask(), _times_full(self._device)
        clock = half.clock
        with ThreadPoolExecutor(1, thread_name_prefix="sampling") as beside:
            sample = self._on_own_stream(lambda: half.answered(asked))
            sampling = beside.submit(timed, sample, clock)
            report, learn_s = timed(step, clock)
        if self._stream:
            self._stream.synchronize()  # the engine's weights may change from here on
        error = sampling.exception()
        if error and not _is_full(error):
            raise error
        if error or _times_full(self._device) > before:
            self._end("memory ran out")
        answers, sample_s = (None, 0.0) if error else sampling.result()
        sampled, keep_s = timed(lambda: half.keep(half.drawn(answers)) if answers else None, clock)
        _, refresh_s = timed(half.refresh, clock)
        timing = Timing(sample_s + keep_s, learn_s + refresh_s, overlap_s=min(sample_s, learn_s))
        return Both(report, sampled, timing)

    def _on_own_stream(self, sample: Callable[[], Answered]) -> Callable[[], Answered]:
        """On a GPU work of two threads goes on at once in two streams only.

        The new one begins behind what was asked of the old so far.
        """
        stream = self._stream
        if stream is None:
            return sample
        stream.wait_stream(torch.cuda.current_stream(self._device))

        def on_stream() -> Answered:
            with torch.cuda.stream(stream):
                return sample()

        return on_stream

    def _end(self, reason: str) -> None:
        self.on = self._wanted = False
        self._say(f"sampling and learning at once: {reason}; they take turns from here on")


def is_right(config: CrewConfig, half: SamplerHalf) -> bool:
    """Whether what is sampled beside a step would be what it says it is, and of use.

    With the learner's own weights, which the step changes under way, it would be of no version.
    Where nothing older than the present version is learned from, it would all be dropped.
    """
    return pace_of(config).samples_beside and half.me.role == "peer" and half.engine.keeps_snapshot


def pays(half: SamplerHalf) -> bool:
    """Whether the two compute on different things, or on a GPU, which has room for both."""
    engine = half.me.engine
    return half.policy.device.type == "cuda" or (
        isinstance(engine, EnginePart) and engine.openai is not None
    )


def shortage(device: torch.device) -> str:
    """What memory lacks to sample and learn at once; empty if nothing.

    Above what always lies there, each has taken no more than the peak of both, in turn; at once
    they take no more than twice that, and graphs of training steps, which are captured later, as
    much again.
    """
    if device.type != "cuda":
        return ""
    always, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    needed = always + 3 * (peak - always)
    room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return (
        ""
        if needed <= room
        else (
            f"would need up to {needed / 2**30:.1f} GiB on {device}, which has room for "
            f"{room / 2**30:.1f}"
        )
    )


def _times_full(device: torch.device) -> int:
    """How often memory ran out so far, also where whoever asked for it went on with less."""
    return torch.cuda.memory_stats(device)["num_ooms"] if device.type == "cuda" else 0


def _is_full(error: BaseException) -> bool:
    """Whether memory ran out, or an engine says that it did."""
    return any(
        isinstance(e, RuntimeError) and is_out_of_memory(e) for e in (error, error.__cause__)
    )
