"""The sampling sections of the GPU benchmark: our engine, `generate`, and the machine's limits."""

from __future__ import annotations

import math
import random
import warnings
from functools import partial

import torch
from torch import Tensor

from motley.benchmarks import rivals
from motley.benchmarks.bench import Bench, Job, Row, Sizes
from motley.benchmarks.models import Texts, cache_bytes, flat, num_parameters
from motley.benchmarks.timing import (
    Cost,
    clear,
    cost,
    cost_per_token,
    peak_gib,
    seconds,
    start_peak,
)
from motley.compute.support import runs_kernels
from motley.engines import Completion, torch_engine
from motley.records import Sampling


def decode_jobs(bench: Bench, model: str) -> list[Job]:
    return [partial(_decode, bench, model, sequences) for sequences in bench.sizes.sequences]


def _decode(bench: Bench, model: str, sequences: int) -> list[Row]:
    prompt = bench.sizes.prompt
    ours, floor_s = (
        _our_token(bench, model, prompt, sequences),
        _floor_s(bench, model, prompt, sequences),
    )
    clear(bench.device)
    rival = (
        _generate_token(bench, model, prompt, sequences)
        if sequences <= bench.sizes.generate_sequences
        else None
    )
    return [
        {
            "model": model,
            "sequences": sequences,
            "ms_per_step": 1e3 * ours.seconds,
            "tokens_per_s": round(sequences / ours.seconds),
            "generate_ms": 1e3 * rival.seconds if rival else None,
            "ratio": rival.seconds / ours.seconds if rival else None,
            "floor_ms": 1e3 * floor_s,
            "of_floor": floor_s / ours.seconds,
            "peak_gib": ours.peak_gib,
            "generate_peak_gib": rival.peak_gib if rival else None,
        }
    ]


def _our_token(bench: Bench, model: str, prompt: int, sequences: int) -> Cost:
    """One token of each sequence, every sequence with a prompt of its own."""
    sizes, policy = bench.sizes, bench.build(model)
    prompts, engine = Texts.draw(policy.vocabulary, sequences, prompt).ids, torch_engine(policy)
    make = lambda count: engine.sample(prompts, 1, Sampling(max_tokens=count), seed=0)
    return cost_per_token(make, sizes.few_tokens, sizes.new_tokens, bench.device, sizes.repeats)


def _generate_token(bench: Bench, model: str, prompt: int, sequences: int) -> Cost:
    sizes, policy = bench.sizes, bench.build(model)
    rows, its_model, pad_id = (
        Texts.draw(policy.vocabulary, sequences, prompt).ids,
        rivals.generator(policy),
        policy.vocabulary.pad_id,
    )
    make = lambda count: rivals.generate(its_model, rows, count, pad_id)
    return cost_per_token(
        make, sizes.few_tokens, sizes.generate_tokens, bench.device, sizes.repeats
    )


def _floor_s(bench: Bench, model: str, prompt: int, sequences: int) -> float:
    """Weights and the keys and values so far must be read once, and multiplied with, for one token
    of each sequence.
    """
    policy = bench.build(model)
    parameters = num_parameters(policy)
    # on average over the steps
    context = prompt + (bench.sizes.few_tokens + bench.sizes.new_tokens) / 2
    num_bytes = parameters * policy.dtype.itemsize + sequences * context * cache_bytes(policy)
    return bench.machine.floor_s(num_bytes, 2.0 * parameters * sequences)


def context_jobs(bench: Bench, model: str) -> list[Job]:
    return [partial(_context, bench, model, context) for context in bench.sizes.contexts]


def _context(bench: Bench, model: str, context: int) -> list[Row]:
    """`context`: of a sequence at its end."""
    prompt, sequences = context - bench.sizes.new_tokens, bench.sizes.context_sequences
    ours, floor_s = (
        _our_token(bench, model, prompt, sequences),
        _floor_s(bench, model, prompt, sequences),
    )
    return [
        {
            "model": model,
            "context": context,
            "sequences": sequences,
            "ms_per_step": 1e3 * ours.seconds,
            "tokens_per_s": round(sequences / ours.seconds),
            "floor_ms": 1e3 * floor_s,
            "of_floor": floor_s / ours.seconds,
            "peak_gib": ours.peak_gib,
        }
    ]


def memory_jobs(bench: Bench, model: str) -> list[Job]:
    return [partial(_memory, bench, model, sequences) for sequences in bench.sizes.full_sequences]


def _memory(bench: Bench, model: str, sequences: int) -> list[Row]:
    """More sequences than memory holds must come back all the same.

    `said`: what the engine warned of meanwhile.
    """
    sizes, policy = bench.sizes, bench.build(model)
    context = max(sizes.contexts)
    prompts, engine = (
        Texts.draw(policy.vocabulary, sequences, context - sizes.full_tokens).ids,
        torch_engine(policy),
    )
    made: list[list[Completion]] = []
    start_peak(bench.device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        took_s = seconds(
            lambda: made.extend(
                engine.sample(prompts, 1, Sampling(max_tokens=sizes.full_tokens), seed=0)
            ),
            bench.device,
        )
    return [
        {
            "model": model,
            "context": context,
            "sequences": sequences,
            "returned": sum(len(c.tokens) == sizes.full_tokens for row in made for c in row),
            "seconds": took_s,
            "tokens_per_s": round(sequences * context / took_s),  # those of the prompts too
            "peak_gib": peak_gib(bench.device),
            "said": "; ".join(dict.fromkeys(str(warning.message) for warning in said)),
        }
    ]


def call_jobs(bench: Bench, model: str) -> list[Job]:
    return [partial(_call, bench, model)]


def _call(bench: Bench, model: str) -> list[Row]:
    sizes = bench.sizes
    ours = _our_call(bench, model)
    clear(bench.device)
    rival = _generate_call(bench, model)
    clear(bench.device)
    num_rows = sizes.problems * sizes.samples
    return [
        {
            "model": model,
            "prompts": sizes.problems,
            "samples": sizes.samples,
            "tokens": sizes.new_tokens,
            "seconds": ours.seconds,
            "tokens_per_s": round(num_rows * sizes.new_tokens / ours.seconds),
            "generate_s": rival.seconds,
            "ratio": rival.seconds / ours.seconds,
            "peak_gib": ours.peak_gib,
            "generate_peak_gib": rival.peak_gib,
            **_vllm(bench, model, [sizes.new_tokens] * num_rows, ours.seconds),
        }
    ]


def _vllm(bench: Bench, model: str, limits: list[int], ours_s: float) -> Row:
    """How long vLLM takes for the same call, where its interpreter is given."""
    if not bench.vllm:
        return _no_vllm("")
    sizes, policy = bench.sizes, bench.build(model)
    rows = flat(Texts.draw(policy.vocabulary, sizes.problems, sizes.prompt).ids, sizes.samples)
    try:
        took = rivals.vllm_took(bench.vllm, policy, rows, limits, sizes.repeats)
    except (OSError, ValueError) as error:
        return _no_vllm(f"not measured: {error}")
    return {
        "vllm_s": took.tokens_only,
        "vllm_ratio": took.tokens_only / ours_s,
        "vllm_logprobs_s": took.with_logprobs,
        "vllm_logprobs_ratio": took.with_logprobs / ours_s,
        "note": "",
    }


def _no_vllm(note: str) -> Row:
    columns = ("vllm_s", "vllm_ratio", "vllm_logprobs_s", "vllm_logprobs_ratio")
    return dict.fromkeys(columns) | {"note": note}


def ragged_jobs(bench: Bench, model: str) -> list[Job]:
    return [partial(_ragged, bench, model)]


def _ragged(bench: Bench, model: str) -> list[Row]:
    """A call whose answers are of very different length."""
    sizes = bench.sizes
    limits = ragged_limits(sizes)
    row: Row = {
        "model": model,
        "prompts": sizes.problems,
        "samples": sizes.samples,
        "longest": max(limits),
        "tokens": sum(limits),
    }
    ours = _our_ragged(bench, model, limits)
    if ours is None:
        return [
            row
            | {"seconds": None, "tokens_per_s": None, "peak_gib": None}
            | _no_vllm("not measured: this device has no kernels of ours")
        ]
    clear(bench.device)
    row |= {
        "seconds": ours.seconds,
        "tokens_per_s": round(sum(limits) / ours.seconds),
        "peak_gib": ours.peak_gib,
    }
    return [row | _vllm(bench, model, limits, ours.seconds)]


def ragged_limits(sizes: Sizes) -> list[int]:
    """How long each answer is, drawn once for all sides."""
    draw = random.Random(0)
    median = math.log(sizes.ragged_median)
    drawn = [
        round(draw.lognormvariate(median, sizes.ragged_spread))
        for _ in range(sizes.problems * sizes.samples)
    ]
    return [min(max(one, sizes.ragged_shortest), sizes.ragged_longest) for one in drawn]


def _our_ragged(bench: Bench, model: str, limits: list[int]) -> Cost | None:
    sizes, policy = bench.sizes, bench.build(model)
    if not runs_kernels(policy.device):
        return None
    from motley.engines.graphs import GraphEngine

    class Ragged(GraphEngine):
        def limits(self, rows: int, tokens: int) -> Tensor:
            if rows != len(limits):
                raise ValueError(f"memory does not hold the {len(limits)} answers at once")
            return torch.tensor(limits, device=self._device)

    prompts = Texts.draw(policy.vocabulary, sizes.problems, sizes.prompt).ids
    engine, sampling = Ragged(policy), Sampling(max_tokens=sizes.ragged_longest)
    return cost(
        lambda: engine.sample(prompts, sizes.samples, sampling, 0), bench.device, sizes.repeats
    )


def _our_call(bench: Bench, model: str) -> Cost:
    sizes, policy = bench.sizes, bench.build(model)
    prompts, engine = (
        Texts.draw(policy.vocabulary, sizes.problems, sizes.prompt).ids,
        torch_engine(policy),
    )
    return cost(
        lambda: engine.sample(prompts, sizes.samples, Sampling(max_tokens=sizes.new_tokens), 0),
        bench.device,
        sizes.repeats,
    )


def _generate_call(bench: Bench, model: str) -> Cost:
    """Once, since it takes long and always alike."""
    sizes, policy = bench.sizes, bench.build(model)
    rows = flat(Texts.draw(policy.vocabulary, sizes.problems, sizes.prompt).ids, sizes.samples)
    its_model, pad_id = rivals.generator(policy), policy.vocabulary.pad_id
    return cost(lambda: rivals.generate(its_model, rows, sizes.new_tokens, pad_id), bench.device, 1)
