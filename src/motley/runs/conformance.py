"""Does the engine report the log-probs the trainer computes, and what do they mean?

The questions behind every importance ratio.

Two honest float32 computations of one log-prob differ: they add in another order. How far one
token ends from the other hangs on the processor, the libraries and the token, so the largest
difference says little. The rule therefore looks at the mean and at the 99th percentile.
Both are allowed so much per layer, since every layer adds rounding of its own, and are divided by
the temperature, since it divides the logits and with them their error.

Measured on an Arm CPU without bfloat16, at temperatures 0.7, 1 and 1.3, whole models and adapters,
times temperature and per layer, in units of float32's epsilon:

    model                                         layers     mean      99 %
    tiny family                                   3 to 10    0.4..1.4  1.3..4.6
    random Qwen3, Gemma 3, GPT-2                  2 to 32    0.1..2.6  0.4..11
    SmolLM2-135M                                  30         2.3..5.3  12..22

What is allowed is five times the worst of these: 1.1e-5 on average and 4.3e-5 at the 99th
percentile for three layers, and 1e-4 and 4.3e-4 for thirty. A bfloat16 engine, another temperature,
an adapter or a step that an engine missed differ by a hundred times as much.
Where top-k or top-p cut something off, rounding may decide about a token at the very edge, and move
what stays by much. There the percentile decides alone: it leaves aside as many tokens as
may be at the edge.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from motley.compute.scoring import target_logits
from motley.config import CrewConfig
from motley.engines import Completion
from motley.engines.sampling import truncate
from motley.exchange import MemoryLog, Outbox, Signer
from motley.learning.batches import MicroBatch, ToScore, micro_batches
from motley.peers.sampling import SamplerHalf
from motley.records import Problem, Sampling
from motley.runs.building import build_peer
from motley.runs.checking import check_config, is_mixed
from motley.runs.folder import Run
from motley.runs.vocabularies import Crossing, Speaker, Spoken, crossings, is_large
from motley.tasks import draw_problems, examine_task, load_task, unsteady

EPSILON = torch.finfo(torch.float32).eps
# what engine and trainer may differ by where both compute in float32, per layer, at temperature 1
MEAN_PER_LAYER = 30 * EPSILON
RARE_PER_LAYER = 120 * EPSILON
RARE = 0.99  # the percentile that counts
# mean difference elsewhere: what bfloat16 makes of thirty layers, and of an adapter that a server
# merges into it
ROUNDED = 0.03
# share of tokens that the trainer's truncation may leave out: those at its very edge
OUTSIDE = 0.01
NUM_PROBLEMS = 32
NUM_SAMPLES = 4
FEW_PROBLEMS = 8  # where a model is large
MAX_TOKENS = 64

# What a log-prob may be of. "raw" is what many servers give: the full softmax at temperature 1,
# whatever the tokens were drawn with.
MEANINGS = ("sampled", "full", "raw")


class Bound(NamedTuple):
    """What |engine - trainer| may be."""

    mean: float
    rare: float  # the 99th percentile


class Difference(NamedTuple):
    """|engine - trainer| over the log-probs of sampled tokens."""

    mean: float
    rare: float  # the 99th percentile
    largest: float  # told, not judged
    # share of tokens that could not have been drawn, by the trainer; not among the others
    outside: float
    bound: Bound

    @property
    def fault(self) -> str:
        if self.outside > OUTSIDE:
            return f"{self.outside:.1%} of the tokens are outside what the trainer could draw"
        if not self.mean <= self.bound.mean:  # so that no number is a fault too
            return f"differs by more than {self.bound.mean:.1g} on average"
        if not self.rare <= self.bound.rare:
            return f"differs by more than {self.bound.rare:.1g} in one token of a hundred"
        return ""


def float32_bound(num_layers: int, temperature: float) -> Bound:
    """What two honest float32 computations stay below; see above."""
    scale = num_layers / temperature
    return Bound(mean=MEAN_PER_LAYER * scale, rare=RARE_PER_LAYER * scale)


def _bound(half: SamplerHalf, sampling: Sampling) -> Bound:
    if half.policy.dtype != torch.float32 or half.me.engine != "torch":
        return Bound(mean=ROUNDED, rare=math.inf)
    bound = _own_bound(half, sampling)
    is_cut = bool(sampling.top_k) or sampling.top_p < 1
    return bound._replace(mean=math.inf) if is_cut else bound


def _own_bound(half: SamplerHalf, sampling: Sampling) -> Bound:
    return float32_bound(half.policy.config.num_hidden_layers, sampling.temperature)


class CrewCheck(NamedTuple):
    """One row for the task, and for each peer one per way of sampling: the crew's own, then others
    that tell conventions apart. Where vocabularies differ, also what peers make of each other.
    """

    rows: list[dict[str, Any]]
    pairs: list[Crossing]


def check_crew(config: CrewConfig) -> CrewCheck:
    check_config(config)
    task = load_task(config.crew.task, config.task)
    faults, notes = examine_task(task)
    faults += unsteady(task) if config.crew.check_rewards else []
    rows = [_row(f"task {config.crew.task}", "", None, "", "; ".join(faults))]
    speakers: list[Speaker] = []
    mixed = is_mixed(config)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder), mixed=mixed)
        for me in config.students:
            half = build_peer(
                run,
                me,
                MemoryLog(),
                Outbox(None, Signer(bytes(32), lambda message: b"")),
                bytes(32),
            ).half
            where = (
                f"{me.name}: engine against trainer, {half.policy.device.type} "
                f"{str(half.policy.dtype).removeprefix('torch.')}"
            )
            with _disturbed_adapters(half):
                rows += [_way(half, where, sampling) for sampling in _ways(config.sampling)]
            if mixed:
                speakers.append(Speaker(me.name, half.policy, _answers(half)))
            close = getattr(half.engine, "close", None)
            if close:
                close()
    if notes:  # what is odd in the task, and may be meant
        rows = [{**row, "note": ""} for row in rows]
        rows[0]["note"] = "; ".join(notes)
    return CrewCheck(rows, crossings(speakers, config.sampling.temperature))


def _answers(half: SamplerHalf) -> list[Spoken]:
    """What a peer samples now, as the crew does."""
    problems, made = _sampled(half, half.config.sampling)
    return [Spoken(p, c) for p, row in zip(problems, made, strict=True) for c in row]


def _sampled(half: SamplerHalf, sampling: Sampling) -> tuple[list[Problem], list[list[Completion]]]:
    sampling = msgspec.structs.replace(sampling, max_tokens=min(MAX_TOKENS, sampling.max_tokens))
    num = FEW_PROBLEMS if is_large(half.policy) else NUM_PROBLEMS
    problems = draw_problems(half.task, "check", "train", num)
    prompts = [half.policy.prompts.ids(p) for p in problems]
    return problems, half.engine.sample(prompts, NUM_SAMPLES, sampling, seed=0)


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
        by_meaning = differences(half, sampling)
    except ValueError as error:  # an engine that cannot report this says so
        return _row(where, name, None, "", str(error))
    declared = by_meaning[sampling.logprobs]
    closest = min(difference.mean for difference in by_meaning.values())
    as_close = max(2 * closest, _own_bound(half, sampling).mean)
    fits = [
        meaning
        for meaning, difference in by_meaning.items()
        if not difference.fault and difference.mean <= as_close
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
    what: str, sampling: str, difference: Difference | None, fits: str, fault: str
) -> dict[str, Any]:
    return {
        "what": what,
        "sampling": sampling,
        "fits": fits,
        "mean_difference": difference.mean if difference else None,
        "99 %": difference.rare if difference else None,
        "largest_difference": difference.largest if difference else None,
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
    """Give a fresh LoRA adapter something to merge, so that the check can fail."""
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
    problems, made = _sampled(half, sampling)
    prompts = [policy.prompts.ids(p) for p in problems]
    flat = [(prompt, c) for prompt, row in zip(prompts, made, strict=True) for c in row]
    sequences = [ToScore(row=i, prompt=p, tokens=c.tokens) for i, (p, c) in enumerate(flat)]
    away: dict[str, list[Tensor]] = {meaning: [] for meaning in MEANINGS}
    for micro in micro_batches(sequences, half.config.learning.token_budget or 4096, policy.device):
        reported_M = _reported(micro, [c for _, c in flat])
        for meaning, logp_M in _trainer_says(half, micro, sampling).items():
            away[meaning].append(logp_M - reported_M)
    bound = _bound(half, sampling)
    return {meaning: _summary(torch.cat(parts), bound) for meaning, parts in away.items()}


def _reported(micro: MicroBatch, completions: Sequence[Completion]) -> Tensor:
    return torch.tensor(
        [logprob for row in micro.row_B.tolist() for logprob in completions[row].logprobs]
    )


def _trainer_says(half: SamplerHalf, micro: MicroBatch, sampling: Sampling) -> dict[str, Tensor]:
    tables: dict[str, list[Tensor]] = {meaning: [] for meaning in MEANINGS}
    target_M = micro.packed.to(half.policy.device).target_M
    first = 0
    for logits_MV in target_logits(half.policy, micro.packed):
        target = target_M[first : first + len(logits_MV)]
        first += len(target)
        raw_MV = torch.log_softmax(logits_MV, -1)
        full_MV = torch.log_softmax(raw_MV / sampling.temperature, -1)
        for meaning, table in (
            ("sampled", truncate(full_MV, sampling)),
            ("full", full_MV),
            ("raw", raw_MV),
        ):
            tables[meaning].append(table.gather(1, target[:, None]).squeeze(1).cpu())
    return {meaning: torch.cat(parts) for meaning, parts in tables.items()}


def _summary(difference_M: Tensor, bound: Bound) -> Difference:
    inside_M = difference_M.abs()[difference_M != -torch.inf]
    if not len(inside_M):
        return Difference(math.nan, math.nan, math.nan, outside=1.0, bound=bound)
    ordered_M = inside_M.sort().values  # torch's quantile refuses many values; nan comes last
    return Difference(
        mean=float(inside_M.mean()),
        rare=float(ordered_M[math.ceil(RARE * len(ordered_M)) - 1]),
        largest=float(ordered_M[-1]),
        outside=1 - len(inside_M) / len(difference_M),
        bound=bound,
    )
