"""Scoring with CUDA graphs: a micro-batch's forward and backward pass are one launch each, so that
a GPU does not wait for Python.

Graphs are of fixed sizes, so a micro-batch is filled up to the next of a few sizes with tokens that
nothing looks at and that look at nothing else. A size is captured when it has come twice. Owns
which sizes there are; how a graph is captured is in `capture`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from motley.compute.attention import flashes
from motley.compute.capture import GraphMemory, lacks_memory_to_capture
from motley.compute.decoder import Decoder, known_decoder
from motley.compute.logprobs import Scores
from motley.compute.packed import Packed, Spans, send
from motley.compute.scoring import is_fused, score
from motley.models.policy import Policy

FILLER = 128  # tokens of a stretch that fills up
MOST_GRAPHS = 32


class Score(Protocol):
    """Scores of one micro-batch after the other, or of several at once."""

    width: int  # how many

    @property
    def holds(self) -> bool:
        """Whether it holds memory that it could do without."""
        ...

    def begin(self) -> None:
        """Before a step, when nobody holds scores of the last one."""
        ...

    def forget(self) -> bool:
        """Give that memory back for good, since it ran out; whether there was any."""
        ...

    def __call__(self, packed: Packed) -> Scores: ...

    def together(self, wave: Sequence[Packed]) -> list[Scores]:
        """Of at most as many micro-batches as are computed at once."""
        ...


class Size(NamedTuple):
    """Of everything in a packed batch that a graph has fixed."""

    prompts: int
    rows: int
    prompt_tokens: int
    answer_tokens: int
    targets: int
    longest: int  # of a prompt and a completion
    longest_answers: int  # of all completions of a prompt

    @classmethod
    def of(cls, packed: Packed) -> Size:
        """The smallest that holds it.

        There is always a filling prompt, for the filling answers to belong to.
        """
        prompt_tokens, answer_tokens = _up(packed.prompts.total + 1), _up(packed.answers.total)
        prompts, stretches = len(packed.prompts.start_S) - 1, len(packed.own.start_S) - 1
        fillers = [
            -(-(full - used) // FILLER)
            for full, used in _filled(packed, prompt_tokens, answer_tokens)
        ]
        return cls(
            prompts=_power(prompts + fillers[0]),
            rows=_power(stretches - prompts + fillers[1]),
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            targets=_up(len(packed.target_M)),
            longest=_power(max(packed.longest, FILLER)),
            longest_answers=_power(
                max(packed.answers.longest, answer_tokens - packed.answers.total, 1)
            ),
        )


def _filled(
    packed: Packed, prompt_tokens: int, answer_tokens: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    return (prompt_tokens, packed.prompts.total), (answer_tokens, packed.answers.total)


def _up(number: int) -> int:
    """To the next of eight steps to the next power of two: at most an eighth more."""
    step = max(64, 1 << max(0, number.bit_length() - 4))
    return -(-number // step) * step


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def padded(packed: Packed, size: Size) -> Packed:
    """The same tokens and targets, filled up, on the CPU: many small operations take a GPU longer.

    Targets that are added come last, and are predicted by tokens that were added.
    """
    (prompt_tokens, prompt_used), (answer_tokens, answer_used) = _filled(
        packed, size.prompt_tokens, size.answer_tokens
    )
    shift = prompt_tokens - prompt_used
    count = len(packed.prompts.start_S) - 1
    starts = lambda *parts: torch.cat([*parts]).int()
    ends = lambda used, full: torch.tensor(
        [*range(used + FILLER, full, FILLER), *([full] * (full > used))], dtype=torch.int64
    )
    prompt_S = _filled_up(
        starts(packed.prompts.start_S, ends(prompt_used, prompt_tokens)), size.prompts + 1
    )
    row_S = starts(
        packed.own.start_S[count + 1 :] + shift,
        ends(prompt_tokens + answer_used, prompt_tokens + answer_tokens),
    )
    answer_S = starts(packed.answers.start_S, torch.tensor([answer_tokens]))

    def tokens(value_N: Tensor) -> Tensor:
        between, behind = value_N[:1].expand(shift), value_N[:1].expand(answer_tokens - answer_used)
        return torch.cat([value_N[:prompt_used], between, value_N[prompt_used:], behind])

    more = size.targets - len(packed.target_M)
    predictor_M = packed.predictor_M + shift * (packed.predictor_M >= prompt_used)
    added_M = prompt_used + torch.arange(more) % shift
    return replace(
        packed,
        token_N=tokens(packed.token_N),
        position_N=tokens(packed.position_N),
        own=Spans(
            _filled_up(torch.cat([prompt_S, row_S]), size.prompts + size.rows + 1),
            size.longest,
            prompt_tokens + answer_tokens,
        ),
        prompts=Spans(prompt_S, size.longest, prompt_tokens),
        answers=Spans(_filled_up(answer_S, size.prompts + 1), size.longest_answers, answer_tokens),
        longest=size.longest,
        predictor_M=torch.cat([predictor_M, added_M]),
        target_M=torch.cat([packed.target_M, packed.target_M.new_zeros(more)]),
        temperature_M=torch.cat([packed.temperature_M, packed.temperature_M.new_ones(more)]),
    )


def _filled_up(start_S: Tensor, length: int) -> Tensor:
    """With empty stretches at the end."""
    return torch.cat([start_S, start_S[-1:].expand(length - len(start_S))])


def scorer(policy: Policy) -> Score:
    """`scoring.score` for one micro-batch after the other: with graphs where they run."""
    decoder = None if policy.one_by_one else known_decoder(policy.base)
    if decoder is not None and is_fused(policy) and not policy.gradient_checkpointing:
        return CapturedScore(policy, decoder)
    return PlainScore(policy, decoder)


class PlainScore:
    holds, width = False, 1

    def __init__(self, policy: Policy, decoder: Decoder | None) -> None:
        self._policy, self._decoder = policy, decoder

    def begin(self) -> None:
        """Nothing to prepare."""

    def forget(self) -> bool:
        return False

    def __call__(self, packed: Packed) -> Scores:
        return score(self._policy, packed, self._decoder)

    def together(self, wave: Sequence[Packed]) -> list[Scores]:
        return [self(packed) for packed in wave]


class CapturedScore:
    """Scores must be differentiated before the next are asked for: graphs share the memory that
    lies between the two.
    """

    width = 1

    def __init__(self, policy: Policy, decoder: Decoder) -> None:
        self._policy, self._decoder = policy, decoder
        self._plain = PlainScore(policy, decoder)
        self._parameters = [p for _, p in policy.trained()]
        self._sums: list[Tensor] = []  # where graphs add up gradients
        # what autograd thinks the scores come from
        self._anchor = torch.zeros((), device=policy.device, requires_grad=True)
        # sizes that came, and a batch of those that came again
        self._seen: dict[Size, Packed | None] = {}
        self._graphs: dict[Size, _GraphPair] = {}
        self._memory = GraphMemory(policy.device)
        self._gave_up = False
        self.number = 0  # of the last forward pass

    @property
    def holds(self) -> bool:
        return bool(self._graphs)

    def forget(self) -> bool:
        held, self._gave_up = self.holds, self._gave_up or self.holds
        self._graphs.clear()
        self._seen.clear()
        self._memory.forget()
        torch.cuda.empty_cache()
        return held

    def begin(self) -> None:
        """Capture the sizes that came again.

        Not when they come: scores that someone holds bind the parameters to another stream.
        """
        for size, packed in list(self._seen.items()):
            if packed is not None and not self._gave_up:
                del self._seen[size]
                self._try_to_capture(packed, size)

    def __call__(self, packed: Packed) -> Scores:
        size = Size.of(packed)
        if self._gave_up or not torch.is_grad_enabled() or not self._fits(packed, size):
            return self._plain(packed)
        if size not in self._graphs:
            self._seen[size] = packed if size in self._seen else None
            return self._plain(packed)
        self.number += 1
        logp_M, entropy_M = _Replay.apply(
            self._anchor, self, self._graphs[size], padded(packed, size), len(packed.target_M)
        )
        return Scores(logp_M, entropy_M)

    def together(self, wave: Sequence[Packed]) -> list[Scores]:
        return [self(packed) for packed in wave]

    def _fits(self, packed: Packed, size: Size) -> bool:
        filled = replace(packed, longest=size.longest)
        return all(
            flashes(
                self._policy.dtype, self._decoder.heads.size, self._policy.device, filled, window
            )
            for window in self._decoder.windows
        )

    def _try_to_capture(self, packed: Packed, size: Size) -> None:
        if len(self._graphs) >= MOST_GRAPHS:
            self._graphs.clear()
            self._memory.forget()
        try:
            with torch.cuda.device(self._policy.device):
                self._graphs[size] = self._capture(padded(packed, size).to(self._policy.device))
        except RuntimeError as error:
            if not lacks_memory_to_capture(error):
                raise
            self._gave_up = True
            self.forget()
            said, *_ = str(error).splitlines()
            warnings.warn(
                f"training goes on without CUDA graphs, which is slower for small steps: {said}",
                stacklevel=2,
            )

    def _capture(self, packed: Packed) -> _GraphPair:
        self._sums = self._sums or [torch.zeros_like(p) for p in self._parameters]
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with self._memory.capturing(partial(self._both_ways, packed)) as capture:
            with capture(forward):
                scores = self._plain(packed)
            dlogp_M = torch.zeros_like(scores.logp_M)
            with capture(backward):
                self._add_gradients(scores.logp_M, dlogp_M)
        return _GraphPair(
            packed, scores.logp_M.detach(), scores.entropy_M, dlogp_M, forward, backward
        )

    def _both_ways(self, packed: Packed) -> None:
        """Forward and backward, adding nothing to the gradients."""
        logp_M = self._plain(packed).logp_M
        self._add_gradients(logp_M, torch.zeros_like(logp_M))

    def _add_gradients(self, logp_M: Tensor, dlogp_M: Tensor) -> None:
        made = torch.autograd.grad(logp_M, self._parameters, dlogp_M, allow_unused=True)
        pairs = [
            (total, one) for total, one in zip(self._sums, made, strict=True) if one is not None
        ]
        torch._foreach_add_([total for total, _ in pairs], [one for _, one in pairs])

    def take_gradients(self) -> None:
        """Have the parameters' gradients be where graphs add theirs."""
        fresh = [
            total for p, total in zip(self._parameters, self._sums, strict=True) if p.grad is None
        ]
        if fresh:
            torch._foreach_zero_(fresh)
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if parameter.grad is not None and parameter.grad is not total:
                total.copy_(parameter.grad)
            parameter.grad = total


class _GraphPair(NamedTuple):
    """A micro-batch's forward and backward pass, and where they read and write."""

    packed: Packed
    logp_M: Tensor
    entropy_M: Tensor
    dlogp_M: Tensor
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph

    def load(self, packed: Packed) -> None:
        for name in ("token_N", "position_N", "predictor_M", "target_M", "temperature_M"):
            send(getattr(packed, name), getattr(self.packed, name))
        for name in ("own", "prompts", "answers"):
            send(getattr(packed, name).start_S, getattr(self.packed, name).start_S)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        owner: CapturedScore,
        graph: _GraphPair,
        packed: Packed,
        targets: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.owner, ctx.graph, ctx.number = owner, graph, owner.number
        graph.load(packed)
        graph.forward.replay()
        logp_M, entropy_M = graph.logp_M[:targets].clone(), graph.entropy_M[:targets].clone()
        ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    def backward(ctx: Any, dlogp_M: Tensor, _: Tensor) -> tuple[None, ...]:
        if ctx.number != ctx.owner.number:
            raise RuntimeError(
                "these scores' memory was used for later ones; differentiate scores before asking "
                "for the next"
            )
        graph: _GraphPair = ctx.graph
        graph.dlogp_M.zero_()
        graph.dlogp_M[: len(dlogp_M)] = dlogp_M
        ctx.owner.take_gradients()
        graph.backward.replay()
        return None, None, None, None, None
