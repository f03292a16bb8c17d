"""The section of whole GRPO steps: ours in each setup that is asked for, and TRL's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from motley.benchmarks import grpo
from motley.benchmarks.bench import Bench, Job, Rival, Row
from motley.benchmarks.models import Texts, words_of
from motley.benchmarks.setups import DEFAULT, Setup, setup_of
from motley.benchmarks.timing import Cost, clear
from motley.config import Lora
from motley.models.devices import is_out_of_memory
from motley.models.policy import Policy

logger = logging.getLogger(__name__)


def grpo_jobs(bench: Bench, model: str) -> list[Job]:
    return [partial(_grpo, bench, model)]


class _Ours(NamedTuple):
    """What ours takes in a setup, or why it was not measured."""

    setup: Setup
    rounds: bool  # it computes in a half type
    cost: grpo.OurCost | None
    note: str = ""


class _Trl(NamedTuple):
    """The same of TRL."""

    setup: grpo.TrlSetup
    cost: Cost | None
    note: str = ""


def _grpo(bench: Bench, model: str) -> Iterator[Row]:
    """Ours in each setup, and each against TRL that trains as much of the model."""
    sizes = bench.sizes
    texts = Texts.draw(words_of(model, bench.vocabulary), sizes.problems, sizes.prompt)
    work = grpo.StepWork(texts=texts.texts, num_samples=sizes.samples, max_tokens=sizes.new_tokens)
    ours = [_try_ours(bench, model, work, setup) for setup in bench.setups or (bench.usual,)]
    rivals: dict[Lora | None, list[_Trl | None]] = {}
    for one in ours:
        lora = one.setup.lora
        if lora not in rivals:
            asked = _rivals(bench, lora, any(each.rounds for each in ours))
            rivals[lora] = [_try_trl(bench, model, work, first) for first in asked] or [None]
        yield from (_grpo_row(model, work, one, rival) for rival in rivals[lora])


def _rivals(bench: Bench, lora: Lora | None, rounds: bool) -> list[grpo.TrlSetup]:
    """With float32 weights, as ours are kept unless told otherwise; where ours rounds, with rounded
    ones too.
    """
    usual: tuple[Rival, ...] = ("float32", "bfloat16") if rounds else ("float32",)
    return [
        grpo.TrlSetup(
            weights=getattr(torch, weights),
            rows=min(bench.sizes.trl_rows, bench.sizes.problems * bench.sizes.samples),
            lora=lora,
        )
        for weights in bench.rivals or usual
        if weights != "none"
    ]


def _grpo_row(model: str, work: grpo.StepWork, one: _Ours, rival: _Trl | None) -> Row:
    ours, theirs = one.cost, rival.cost if rival else None
    return {
        "model": model,
        "learn": one.setup.name,
        "sequences": work.num_sequences,
        "trained": ours.num_trained if ours else None,
        "tokens": work.max_tokens,
        "against": str(rival.setup) if rival else "",
        "seconds": ours.step.seconds if ours else None,
        "sampling_s": ours.sampling_s if ours else None,
        "trl_s": theirs.seconds if theirs else None,
        "ratio": theirs.seconds / ours.step.seconds if theirs and ours else None,
        "peak_gib": ours.step.peak_gib if ours else None,
        "trl_peak_gib": theirs.peak_gib if theirs else None,
        "note": "; ".join(filter(None, [one.note, rival.note if rival else ""])),
    }


def _try_ours(bench: Bench, model: str, work: grpo.StepWork, setup: Setup) -> _Ours:
    """Memory may not hold a setup; the others still count."""
    clear(bench.device)
    sizes, rounds = bench.sizes, bench.device.type == "cuda"
    try:
        policy = bench.build(model, setup)
        rounds = policy.dtype != torch.float32
        clear(bench.device)  # of what a model needs only while it is made
        made = grpo.our_cost(policy, work, sizes.repeats, setup, sizes.warms)
    except (ValueError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _Ours(setup, rounds, None, f"ours not measured: {_first_line(error)}")
    logger.info("%s, %s: %s", model, setup.name, made)
    return _Ours(setup, rounds, made)


def _try_trl(bench: Bench, model: str, work: grpo.StepWork, first: grpo.TrlSetup) -> _Trl:
    """What TRL takes in its best setup, or why it was not measured.

    It may refuse a machine, or run out of memory; the rest still counts.
    """
    if not grpo.has_trl():
        return _Trl(first, None, grpo.NO_TRL)
    half = first.weights == torch.bfloat16
    of_trl = setup_of("masters=bfloat16 dtype=bfloat16" if half else DEFAULT, bench.dtype)

    def fresh() -> Policy:
        clear(bench.device)
        return bench.build(model, of_trl)

    try:
        made, setup = grpo.best_trl_cost(fresh, work, bench.sizes.repeats, first)
    except (ValueError, RuntimeError) as error:
        return _Trl(first, None, f"not measured: {_first_line(error)}")
    logger.info("%s, %s: %s", model, setup, made)
    return _Trl(setup, made)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
