"""Speed against a known rival, both measured in one run on the same models and work, as ratios.

Sampling: transformers' `generate`, every row its own prompt. Training: one forward and backward pass of the transformers model
over padded rows with full logits. Both do the work of one round of a crew of one: 24 problems, 12 samples each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig

from motley.config import PeerConfig, Warm
from motley.engines import Completion, TorchEngine
from motley.learning.batches import ToScore, micro_batches
from motley.learning.warm import warm_start
from motley.policies import Policy, initial_policy
from motley.policies.forward import score
from motley.policies.tiny import SHAPES
from motley.records import Sampling
from motley.tasks import draw_problems, load_task

NUM_PROBLEMS = 24
NUM_SAMPLES = 12
TOKEN_BUDGET = 16384

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
        flat = [(tuple(prompt), c) for prompt, row in zip(self.prompts, self.completions, strict=True) for c in row]
        return [ToScore(row=i, prompt=prompt, tokens=c.tokens) for i, (prompt, c) in enumerate(flat)]


def local_benchmark(repeats: int, show: Show) -> list[dict[str, Any]]:
    """A row per tiny model and half: tokens/s of the rival, of ours, and the ratio of the medians."""
    rows = []
    for number, name in enumerate(SHAPES):
        show(f"tiny:{name}", number, len(SHAPES))
        work = _work(f"tiny:{name}")
        engine = TorchEngine(work.policy)
        halves: list[tuple[str, Job, Job]] = [
            ("sampling", partial(_generate, work), partial(_sample, work, engine)),
            ("training", partial(_plain_step, work), partial(_packed_step, work)),
        ]
        for half, rival, ours in halves:
            rival_rate, our_rate = _compare(rival, ours, repeats)
            rows.append(
                {
                    "model": f"tiny:{name}",
                    "half": half,
                    "transformers": round(rival_rate),
                    "motley": round(our_rate),
                    "ratio": our_rate / rival_rate,
                }
            )
    return rows


def _work(model: str) -> Work:
    task = load_task("digits", {})
    policy = initial_policy(PeerConfig(name="bench", model=model), seed=0)
    # Half-trained, so that completions end as they do in training.
    warm_start(policy, task, Warm(accuracy=dict.fromkeys(task.kinds, 0.3)), seed=0)
    prompts = [policy.vocabulary.encode(p.prompt) for p in draw_problems(task, "bench", "train", NUM_PROBLEMS)]
    sampling = Sampling(max_tokens=8)
    return Work(policy, prompts, sampling, TorchEngine(policy).sample(prompts, NUM_SAMPLES, sampling, seed=0))


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


def _sample(work: Work, engine: TorchEngine, seed: int) -> int:
    engine.refresh()  # part of every round
    return sum(len(c.tokens) for row in engine.sample(work.prompts, NUM_SAMPLES, work.sampling, seed) for c in row)


def _generate(work: Work, seed: int) -> int:
    torch.manual_seed(seed)
    vocabulary = work.policy.vocabulary
    rows = [prompt for prompt in work.prompts for _ in range(NUM_SAMPLES)]
    tokens, mask = _padded(rows, vocabulary.pad_id, left=True)
    config = GenerationConfig(
        max_new_tokens=work.sampling.max_tokens,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        eos_token_id=vocabulary.end_id,
        pad_token_id=vocabulary.pad_id,
    )
    made = work.policy.base.generate(input_ids=tokens, attention_mask=mask, generation_config=config)
    return int((made[:, tokens.shape[1] :] != vocabulary.pad_id).sum())


def _packed_step(work: Work, seed: int) -> int:
    work.policy.model.zero_grad()
    for micro in micro_batches(work.sequences, TOKEN_BUDGET, work.policy.device):
        (-score(work.policy, micro.packed).logp_M.sum() / work.num_tokens).backward()
    return work.num_tokens


def _plain_step(work: Work, seed: int) -> int:
    work.policy.model.zero_grad()
    rows = [[*s.prompt, *s.tokens] for s in work.sequences]
    tokens_BT, mask_BT = _padded(rows, work.policy.vocabulary.pad_id, left=False)
    trained_BT = mask_BT.clone()
    for row, sequence in enumerate(work.sequences):
        trained_BT[row, : len(sequence.prompt)] = 0
    logits_BTV = work.policy.base(input_ids=tokens_BT, attention_mask=mask_BT).logits[:, :-1]
    logp_BT = torch.log_softmax(logits_BTV, -1).gather(2, tokens_BT[:, 1:, None]).squeeze(2)
    (-(logp_BT * trained_BT[:, 1:]).sum() / work.num_tokens).backward()
    return work.num_tokens


def _padded(rows: Sequence[Sequence[int]], pad: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(row) for row in rows)
    fill = lambda row, value: [value] * (longest - len(row))
    place = lambda row, real, value: [*fill(row, value), *real] if left else [*real, *fill(row, value)]
    return torch.tensor([place(r, r, pad) for r in rows]), torch.tensor([place(r, [1] * len(r), 0) for r in rows])
