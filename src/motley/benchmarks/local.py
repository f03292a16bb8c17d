"""Speed against known rivals, both measured in one run on the same models and work, as ratios.

Sampling: transformers' `generate`, every row its own prompt. Training: one forward and backward
pass of the transformers model over padded rows with full logits. A whole step: TRL's GRPO. All do
the work of one round of a crew of one: 24 problems, 12 samples each. A pretrained model does a
smaller whole step. What rewards and reports take of a round has no rival: it is a share.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from motley.benchmarks import grpo, rivals
from motley.benchmarks.bench import Row
from motley.benchmarks.models import SMOLLM2, Texts, build, flat
from motley.benchmarks.rounds import round_cost
from motley.benchmarks.timing import seconds
from motley.compute.scoring import score
from motley.config import PeerConfig, Warm
from motley.engines import Completion, Engine, torch_engine
from motley.learning.batches import ToScore, micro_batches
from motley.learning.warm import warm_start
from motley.models.opening import initial_policy
from motley.models.policy import Policy
from motley.models.sources import find
from motley.models.tiny import SHAPES
from motley.records import Sampling
from motley.tasks import draw_problems, load_task

NUM_PROBLEMS = 24
NUM_SAMPLES = 12
MAX_TOKENS = 8
TOKEN_BUDGET = 16384
STEP_SHAPES = ("0.3m", "4m")  # the tiny models whose whole step is measured
MOST_BESIDE = 0.02  # of a round
NOT_HERE = f"not measured: motley models fetch {SMOLLM2}"

Show = Callable[[str, int, int], None]  # (what, done, total)
Job = Callable[[int], int]  # seed -> tokens done


@dataclass(frozen=True, slots=True)
class Work:
    """One round: prompts, how they are sampled, and completions to learn from."""

    policy: Policy
    prompts: list[list[int]]
    sampling: Sampling
    completions: list[list[Completion]]

    @property
    def num_tokens(self) -> int:
        return sum(len(c.tokens) for row in self.completions for c in row)

    @property
    def sequences(self) -> list[ToScore]:
        rows = [
            (tuple(prompt), c)
            for prompt, row in zip(self.prompts, self.completions, strict=True)
            for c in row
        ]
        return [
            ToScore(row=i, prompt=prompt, tokens=c.tokens) for i, (prompt, c) in enumerate(rows)
        ]


def local_benchmark(repeats: int, show: Show) -> list[Row]:
    """A row per model and half, or whole step: tokens/s of rival and ours, ratio of medians."""
    jobs: list[tuple[str, Callable[[], list[Row]]]] = [
        (f"tiny:{name}", partial(_halves, f"tiny:{name}", repeats)) for name in SHAPES
    ]
    jobs += [
        (f"tiny:{name}, whole step", partial(_tiny_step, f"tiny:{name}", min(repeats, 5)))
        for name in STEP_SHAPES
        if name in SHAPES
    ]
    jobs += [(f"{SMOLLM2}, whole step", partial(_real_step, repeats))]
    jobs += [
        (f"tiny:{name}, rewards and reports", partial(_beside, f"tiny:{name}", repeats))
        for name in STEP_SHAPES
        if name in SHAPES
    ]
    rows: list[Row] = []
    for number, (what, measure) in enumerate(jobs):
        show(what, number, len(jobs))
        rows += measure()
    return rows


def _halves(model: str, repeats: int) -> list[Row]:
    work = _work(model)
    halves: list[tuple[str, str, Job, Job]] = [
        (
            "sampling",
            "generate",
            partial(_generate, work),
            partial(_sample, work, torch_engine(work.policy)),
        ),
        ("training", "padded rows", partial(_plain_step, work), partial(_packed_step, work)),
    ]
    return [
        _row(model, half, against, *_compare(rival, ours, repeats))
        for half, against, rival, ours in halves
    ]


def _row(
    model: str, half: str, against: str, rival: float | None, ours: float | None, note: str = ""
) -> Row:
    """Rates in completion tokens per second."""
    return {
        "model": model,
        "half": half,
        "against": against,
        "rival": None if rival is None else round(rival, 1),
        "motley": None if ours is None else round(ours, 1),
        "ratio": None if rival is None or ours is None else ours / rival,
        "note": note,
    }


def _tiny_step(model: str, repeats: int) -> list[Row]:
    """With the task's own reward, and with one that leaves no sequence without an advantage."""
    task = load_task("digits", {})
    problems = {p.prompt: p for p in draw_problems(task, "bench", "train", NUM_PROBLEMS)}
    own: grpo.Reward = lambda prompt, text: task.score([problems[prompt]], [text])[0]
    work = grpo.StepWork(
        texts=list(problems),
        num_samples=NUM_SAMPLES,
        max_tokens=MAX_TOKENS,
        may_end=True,
        reward=own,
    )
    works = {"whole step": work, "whole step, all train": replace(work, reward=grpo.checksum)}
    return [
        _step(model, half, each, lambda: _half_trained(model), repeats)
        for half, each in works.items()
    ]


def _real_step(repeats: int) -> list[Row]:
    """Small, since a pretrained model takes seconds for it.

    Prompts and groups are as on a GPU, completions shorter.
    """
    try:
        find(SMOLLM2)
    except ValueError:
        return [_row(SMOLLM2, "whole step, all train", "TRL", None, None, NOT_HERE)]
    work = grpo.StepWork(
        texts=Texts.draw(build(SMOLLM2).vocabulary, 2, 96).texts, num_samples=8, max_tokens=32
    )
    return [_step(SMOLLM2, "whole step, all train", work, lambda: build(SMOLLM2), min(repeats, 3))]


def _step(
    model: str, half: str, work: grpo.StepWork, policy: Callable[[], Policy], repeats: int
) -> Row:
    """In turn, as all else here. `policy`: gives one that shares nothing with the last."""
    step = grpo.OurStep(policy(), work)
    step()
    ours_s: list[float] = []
    ours = lambda: ours_s.append(seconds(step, torch.device("cpu")))
    rival_s = (
        grpo.trl_cost(policy(), work, repeats, between=ours).seconds if grpo.has_trl() else None
    )
    while len(ours_s) < repeats:
        ours()
    tokens, note = (
        step.num_tokens,
        f"{step.num_trained} of {work.num_sequences} sequences train" if rival_s else grpo.NO_TRL,
    )
    return _row(
        model,
        half,
        "TRL",
        tokens / rival_s if rival_s else None,
        tokens / statistics.median(ours_s),
        note,
    )


def _beside(model: str, repeats: int) -> list[Row]:
    """What a round is beside sampling and learning, as a share of it."""
    cost = round_cost(model, (NUM_PROBLEMS, NUM_SAMPLES, MAX_TOKENS), repeats)
    note = (
        f"of a round of {cost.round_s:.3f} s: rewards {cost.rewards:.2%}, reports "
        f"{cost.reports:.2%}; to be under {MOST_BESIDE:.0%}"
    )
    row = _row(model, "rewards and reports", "a round", None, None, note)
    return [row | {"ratio": cost.beside}]


def _half_trained(model: str) -> Policy:
    """So that completions end as they do in training."""
    task = load_task("digits", {})
    policy = initial_policy(PeerConfig(name="bench", model=model, device="cpu"), seed=0)
    warm_start(policy, task, Warm(accuracy=dict.fromkeys(task.kinds, 0.3)), seed=0)
    return policy


def _work(model: str) -> Work:
    policy = _half_trained(model)
    problems = draw_problems(load_task("digits", {}), "bench", "train", NUM_PROBLEMS)
    prompts = [policy.vocabulary.encode(p.prompt) for p in problems]
    sampling = Sampling(max_tokens=MAX_TOKENS)
    return Work(
        policy,
        prompts,
        sampling,
        torch_engine(policy).sample(prompts, NUM_SAMPLES, sampling, seed=0),
    )


def _compare(rival: Job, ours: Job, repeats: int) -> tuple[float, float]:
    """Median tokens/s of both, measured in turn so that the machine's moods fall on both."""
    rates: tuple[list[float], list[float]] = ([], [])
    rival(0), ours(0)
    for seed in range(repeats):
        for side, work in enumerate((rival, ours)):
            start = time.perf_counter()
            tokens = work(seed)
            rates[side].append(tokens / (time.perf_counter() - start))
    return statistics.median(rates[0]), statistics.median(rates[1])


def _sample(work: Work, engine: Engine, seed: int) -> int:
    engine.refresh()  # part of every round
    return sum(
        len(c.tokens)
        for row in engine.sample(work.prompts, NUM_SAMPLES, work.sampling, seed)
        for c in row
    )


def _generate(work: Work, seed: int) -> int:
    torch.manual_seed(seed)
    vocabulary = work.policy.vocabulary
    rows = flat(work.prompts, NUM_SAMPLES)
    made_BT = rivals.generate(
        work.policy.base, rows, work.sampling.max_tokens, vocabulary.pad_id, vocabulary.end_id
    )
    return int((made_BT != vocabulary.pad_id).sum())


def _packed_step(work: Work, seed: int) -> int:
    work.policy.model.zero_grad()
    for micro in micro_batches(work.sequences, TOKEN_BUDGET, work.policy.device):
        (-score(work.policy, micro.packed).logp_M.sum() / work.num_tokens).backward()
    return work.num_tokens


def _plain_step(work: Work, seed: int) -> int:
    work.policy.model.zero_grad()
    rows = rivals.PaddedRows.of(work.sequences, work.policy.vocabulary.pad_id, work.policy.device)
    (-rows.logp(work.policy.base).sum() / work.num_tokens).backward()
    return work.num_tokens
