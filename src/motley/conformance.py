"""Does the engine report the log-probs the trainer computes, and what do they mean?

The questions behind every importance ratio.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from motley.config import CrewConfig
from motley.engines import Completion
from motley.engines.drawing import truncate
from motley.exchange import MemoryLog, Outbox, Signer
from motley.learning.batches import MicroBatch, ToScore, micro_batches
from motley.policies.forward import predicting_states
from motley.policies.logprobs import LOGITS_AT_ONCE, project
from motley.records import Sampling
from motley.run import Run, check_config
from motley.sampler import SamplerHalf
from motley.tasks import check_task, draw_problems, load_task

TOLERANCE = 1e-4  # largest difference where engine and trainer both compute in float32
# mean difference elsewhere: what bfloat16 makes of thirty layers, and of an adapter that a server
# merges into it
ROUNDED = 0.03
# share of tokens that the trainer's truncation may leave out: those at its very edge
OUTSIDE = 0.01
NUM_PROBLEMS = 32
NUM_SAMPLES = 4
FEW_PROBLEMS = 8  # where a model is large
LARGE_PARAMETERS = 10_000_000
MAX_TOKENS = 64

# What a log-prob may be of. "raw" is what many servers give: the full softmax at temperature 1,
# whatever the tokens were drawn with.
MEANINGS = ("sampled", "full", "raw")


class Difference(NamedTuple):
    """|engine - trainer| over the log-probs of sampled tokens."""

    largest: float
    mean: float
    rare: float = 0.0  # the 99.9th percentile
    # share of tokens that could not have been drawn, by the trainer; not among the others
    outside: float = 0.0
    exact: bool = True  # both in float32
    # something was truncated: a rounding may decide what, so that one token may differ by much
    cut: bool = False

    @property
    def fault(self) -> str:
        if self.outside > OUTSIDE:
            return f"{self.outside:.1%} of the tokens are outside what the trainer could draw"
        if self.exact and self.cut:
            return "" if self.mean <= TOLERANCE else f"differs by more than {TOLERANCE} on average"
        if self.exact:
            return "" if self.largest <= TOLERANCE else f"differs by more than {TOLERANCE}"
        return "" if self.mean <= ROUNDED else f"differs by more than {ROUNDED} on average"


def check_crew(config: CrewConfig) -> list[dict[str, Any]]:
    """One row for the task, and for each peer one per way of sampling: the crew's, then others that
    tell conventions apart.
    """
    check_config(config)
    faults = check_task(load_task(config.crew.task, config.task))
    rows = [_row(f"task {config.crew.task}", "", None, "", "; ".join(faults))]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder))
        for me in config.students:
            half = run.build(
                me, MemoryLog(), Outbox(None, Signer(bytes(32), lambda message: b"")), bytes(32)
            ).half
            where = (
                f"{me.name}: engine against trainer, {half.policy.device.type} "
                f"{str(half.policy.dtype).removeprefix('torch.')}"
            )
            with _disturbed_adapters(half):
                rows += [_way(half, where, sampling) for sampling in _ways(config.sampling)]
            close = getattr(half.engine, "close", None)
            if close:
                close()
    return rows


def _ways(own: Sampling) -> list[Sampling]:
    sharper = msgspec.structs.replace(own, temperature=0.7, top_k=0, top_p=1.0)
    return list(
        dict.fromkeys(
            [
                own,
                sharper,
                msgspec.structs.replace(sharper, top_k=20),
                msgspec.structs.replace(sharper, top_p=0.9),
            ]
        )
    )


def _way(half: SamplerHalf, where: str, sampling: Sampling) -> dict[str, Any]:
    name = (
        f"T={sampling.temperature:g}"
        + f" top_k={sampling.top_k}" * bool(sampling.top_k)
        + f" top_p={sampling.top_p:g}" * (sampling.top_p < 1)
    )
    try:
        found = differences(half, sampling)
    except ValueError as error:  # an engine that cannot report this says so
        return _row(where, name, None, "", str(error))
    declared = found[sampling.logprobs]
    closest = min(one.mean for one in found.values())
    fits = [
        meaning
        for meaning in MEANINGS
        if not found[meaning].fault and found[meaning].mean <= max(2 * closest, TOLERANCE)
    ]
    fault = declared.fault or ("" if sampling.logprobs in fits else "another meaning fits better")
    fault = (
        fault
        and f"{fault}, declared {sampling.logprobs!r}; what fits: {', '.join(fits) or 'nothing'}"
    )
    return _row(
        where,
        name,
        declared,
        "any" if len(fits) == len(MEANINGS) else ", ".join(fits) or "none",
        fault,
    )


def _row(
    what: str, sampling: str, found: Difference | None, fits: str, fault: str
) -> dict[str, Any]:
    return {
        "what": what,
        "sampling": sampling,
        "fits": fits,
        "largest_difference": found.largest if found else None,
        "99.9 %": found.rare if found else None,
        "mean_difference": found.mean if found else None,
        "result": fault or "ok",
    }


def check_engine(half: SamplerHalf) -> Difference:
    """Measure one peer as a trainer sees it, under the full softmax with nothing truncated.

    It is left as it was.
    """
    sampling = half.config.sampling
    full = msgspec.structs.replace(sampling, top_k=0, top_p=1.0, logprobs="full")
    with _disturbed_adapters(half):
        return differences(half, full)["full"]


@contextmanager
def _disturbed_adapters(half: SamplerHalf) -> Iterator[None]:
    """A fresh LoRA adapter changes nothing; give it something to merge, so that the check can
    fail.
    """
    kept = [(p, p.detach().clone()) for name, p in half.policy.trained() if "lora_B" in name]
    with torch.no_grad():
        for parameter, _ in kept:
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.02
            )
        half.engine.refresh()
        try:
            yield
        finally:
            for parameter, value in kept:
                parameter.copy_(value)
            half.engine.refresh()


@torch.no_grad()
def differences(half: SamplerHalf, sampling: Sampling) -> dict[str, Difference]:
    """What the engine reports for sampled tokens, against every meaning the trainer can give it."""
    policy = half.policy
    sampling = msgspec.structs.replace(sampling, max_tokens=min(MAX_TOKENS, sampling.max_tokens))
    large = sum(p.numel() for p in policy.model.parameters()) > LARGE_PARAMETERS
    problems = draw_problems(half.task, "check", "train", FEW_PROBLEMS if large else NUM_PROBLEMS)
    prompts = [policy.prompts.ids(p) for p in problems]
    made = half.engine.sample(prompts, NUM_SAMPLES, sampling, seed=0)
    flat = [(prompt, c) for prompt, row in zip(prompts, made, strict=True) for c in row]
    sequences = [ToScore(row=i, prompt=p, tokens=c.tokens) for i, (p, c) in enumerate(flat)]
    found: dict[str, list[Tensor]] = {meaning: [] for meaning in MEANINGS}
    for micro in micro_batches(sequences, half.config.learning.token_budget or 4096, policy.device):
        reported_M = _reported(micro, [c for _, c in flat])
        for meaning, logp_M in _trainer_says(half, micro, sampling).items():
            found[meaning].append(logp_M - reported_M)
    exact, cut = (
        policy.dtype == torch.float32 and half.me.engine == "torch",
        bool(sampling.top_k) or sampling.top_p < 1,
    )
    return {
        meaning: _summary(torch.cat(parts))._replace(exact=exact, cut=cut)
        for meaning, parts in found.items()
    }


def _reported(micro: MicroBatch, completions: Sequence[Completion]) -> Tensor:
    return torch.tensor(
        [logprob for row in micro.row_B.tolist() for logprob in completions[row].logprobs]
    )


def _trainer_says(half: SamplerHalf, micro: MicroBatch, sampling: Sampling) -> dict[str, Tensor]:
    packed, head = micro.packed.to(half.policy.device), half.policy.base.get_output_embeddings()
    hidden_MD = predicting_states(half.policy, packed)
    rows = max(1, LOGITS_AT_ONCE // head.out_features)
    found: dict[str, list[Tensor]] = {meaning: [] for meaning in MEANINGS}
    for hidden, target in zip(hidden_MD.split(rows), packed.target_M.split(rows), strict=True):
        raw_MV = torch.log_softmax(project(hidden, head), -1)
        full_MV = torch.log_softmax(raw_MV / sampling.temperature, -1)
        for meaning, table in (
            ("sampled", truncate(full_MV, sampling)),
            ("full", full_MV),
            ("raw", raw_MV),
        ):
            found[meaning].append(table.gather(1, target[:, None]).squeeze(1).cpu())
    return {meaning: torch.cat(parts) for meaning, parts in found.items()}


def _summary(difference_M: Tensor) -> Difference:
    inside_M = difference_M.abs()[difference_M != -torch.inf]
    if not len(inside_M):
        return Difference(float("nan"), float("nan"), outside=1.0)
    return Difference(
        largest=float(inside_M.max()),
        mean=float(inside_M.mean()),
        rare=float(inside_M.quantile(0.999)) if len(inside_M) < 2**24 else float("nan"),
        outside=1 - len(inside_M) / len(difference_M),
    )
