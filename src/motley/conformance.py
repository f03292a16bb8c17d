"""Does the engine report the log-probs the trainer computes? The question behind every importance ratio."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from motley.config import CrewConfig
from motley.exchange import MemoryLog, Outbox, Signer
from motley.learning.batches import ToScore, micro_batches
from motley.policies.forward import score
from motley.records import Sampling
from motley.run import Run, check_config
from motley.sampler import SamplerHalf
from motley.tasks import check_task, draw_problems, load_task

TOLERANCE = 1e-4  # largest difference in float32
NUM_PROBLEMS = 32
NUM_SAMPLES = 4


class Difference(NamedTuple):
    """|engine - trainer| over the log-probs of sampled tokens."""

    largest: float
    mean: float

    @property
    def fault(self) -> str:
        return "" if self.largest <= TOLERANCE else f"differs by more than {TOLERANCE}"


def check_crew(config: CrewConfig) -> list[dict[str, Any]]:
    """One row for the task and one per peer."""
    check_config(config)
    faults = check_task(load_task(config.crew.task, config.task))
    rows: list[dict[str, Any]] = [
        {"what": f"task {config.crew.task}", "largest_difference": "", "mean_difference": "", "result": "; ".join(faults) or "ok"}
    ]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder))
        for me in config.students:
            found = check_engine(run.build(me, MemoryLog(), Outbox(None, Signer(bytes(32), lambda message: b"")), bytes(32)).half)
            rows.append(
                {
                    "what": f"{me.name}: engine against trainer",
                    "largest_difference": found.largest,
                    "mean_difference": found.mean,
                    "result": found.fault or "ok",
                }
            )
    return rows


def check_engine(half: SamplerHalf) -> Difference:
    """Measure one peer, which is left as it was."""
    with _disturbed_adapters(half):
        difference = logprob_difference(half)
    return Difference(float(difference.max()), float(difference.mean()))


@contextmanager
def _disturbed_adapters(half: SamplerHalf) -> Iterator[None]:
    """A fresh LoRA adapter changes nothing; give it something to merge, so that the check can fail."""
    kept = [(p, p.detach().clone()) for name, p in half.policy.trained() if "lora_B" in name]
    with torch.no_grad():
        for parameter, _ in kept:
            parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
        half.engine.refresh()
        try:
            yield
        finally:
            for parameter, value in kept:
                parameter.copy_(value)
            half.engine.refresh()


@torch.no_grad()
def logprob_difference(half: SamplerHalf) -> torch.Tensor:
    """|engine - trainer| of the log-prob of each sampled token. A trainer scores under the full softmax, so nothing is truncated."""
    policy = half.policy
    sampling = half.config.sampling
    full = Sampling(temperature=sampling.temperature, max_tokens=sampling.max_tokens, logprobs="full")
    prompts = [tuple(policy.vocabulary.encode(p.prompt)) for p in draw_problems(half.task, "check", "train", NUM_PROBLEMS)]
    completions = half.engine.sample(prompts, NUM_SAMPLES, full, seed=0)
    flat = [(prompt, c) for prompt, row in zip(prompts, completions, strict=True) for c in row]
    sequences = [ToScore(row=i, prompt=p, tokens=c.tokens, temperature=full.temperature) for i, (p, c) in enumerate(flat)]
    differences = []
    for micro in micro_batches(sequences, half.config.learning.token_budget, policy.device):
        reported = torch.tensor([logprob for row in micro.row_B.tolist() for logprob in flat[row][1].logprobs])
        differences.append((score(policy.base, micro.packed).logp_M.cpu() - reported).abs())
    return torch.cat(differences)
