"""Speed on a GPU against known rivals and against what the machine could do at best, all measured
in one run.

What each section measures and how: docs/performance.md. All work is sized by `Sizes`, so that the
whole of it runs on a CPU in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from motley.benchmarks import sampling, training, whole_steps
from motley.benchmarks.bench import Bench, Job, Row, Sizes, rivals_of
from motley.benchmarks.models import RANDOM_360M, SMOLLM2, build
from motley.benchmarks.setups import DEFAULT, setup_of
from motley.benchmarks.timing import clear, measure_machine

MODELS = (SMOLLM2, RANDOM_360M)

Show = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True, slots=True)
class BenchSection:
    title: str
    jobs: Callable[[Bench, str], list[Job]]  # of one model
    every_model: bool = True  # False: only of the first


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWork:
    """What to measure, as a command line says it."""

    device: str = "cuda"
    models: Sequence[str] = MODELS
    dtype: str = "auto"
    sizes: Sizes = Sizes()
    sections: Sequence[str] = ()  # none: all
    vllm: str = ""  # the interpreter that has it
    learn: Sequence[str] = ()  # setups of our whole steps
    trl: Sequence[str] = ()  # what TRL keeps its weights in
    vocabulary: str = SMOLLM2  # that random models borrow


def gpu_benchmark(show: Show, work: GpuWork = GpuWork()) -> list[Row]:
    """The rows of all sections, or of those named.

    Each has its section's name, then that section's columns.
    """
    unknown = [name for name in work.sections if name not in SECTIONS]
    if unknown:
        raise ValueError(f"section {unknown[0]!r} is not known; choose from {', '.join(SECTIONS)}")
    show("the machine", 0, 1)
    return list(measure(show, open_bench(work), work.models, work.sections or tuple(SECTIONS)))


def measure(
    show: Show, bench: Bench, models: Sequence[str], sections: Sequence[str]
) -> Iterator[Row]:
    """Each row as soon as it is there."""
    jobs = [
        (name, model, job)
        for name in sections
        for model in (models if SECTIONS[name].every_model else models[:1])
        for job in SECTIONS[name].jobs(bench, model)
    ]
    for number, (name, model, job) in enumerate(jobs):
        show(f"{name}, {model}", number, len(jobs))
        clear(bench.device)
        for row in job():
            yield {"section": name, **row}


def open_bench(work: GpuWork) -> Bench:
    """With the machine measured, in the arithmetic of the first model."""
    setups, rivals = (
        tuple(setup_of(text, work.dtype) for text in work.learn),
        rivals_of(work.trl),
    )
    first = setups[0] if setups else setup_of(DEFAULT, work.dtype)
    policy = build(work.models[0], work.device, first, work.vocabulary)
    device, dtype, sizes = policy.device, policy.dtype, work.sizes
    del policy
    clear(device)
    return Bench(
        measure_machine(device, dtype, sizes.copied_bytes, sizes.product),
        device,
        work.dtype,
        sizes,
        work.vllm,
        setups,
        rivals,
        work.vocabulary,
    )


def _machine_jobs(bench: Bench, model: str) -> list[Job]:
    return [partial(_machine, bench)]


def _machine(bench: Bench) -> list[Row]:
    return [
        {"what": "memory, by a copy", "value": bench.machine.bytes_per_s / 1e9, "unit": "GB/s"},
        {
            "what": "products of matrices",
            "value": bench.machine.flops_per_s / 1e12,
            "unit": "TFLOP/s",
        },
    ]


SECTIONS: dict[str, BenchSection] = {
    "machine": BenchSection("the machine", _machine_jobs, every_model=False),
    "decode": BenchSection(
        "one token of every sequence, against transformers' generate", sampling.decode_jobs
    ),
    "context": BenchSection(
        "one token of every sequence, at longer contexts", sampling.context_jobs
    ),
    "memory": BenchSection(
        "more sequences than memory holds", sampling.memory_jobs, every_model=False
    ),
    "call": BenchSection(
        "a whole call of the sampler, against transformers' generate and vLLM", sampling.call_jobs
    ),
    "ragged": BenchSection(
        "a call whose answers are of very different length", sampling.ragged_jobs
    ),
    "training": BenchSection(
        "a training step, against padded rows with full logits", training.training_jobs
    ),
    "logprobs": BenchSection("log-probs", training.logprob_jobs),
    "grpo": BenchSection("a whole GRPO step, against TRL", whole_steps.grpo_jobs),
}
