"""The training sections of the GPU benchmark: a step against a plain one, and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from motley.benchmarks import grpo, rivals
from motley.benchmarks.bench import Bench, Job, Row
from motley.benchmarks.models import Texts, num_parameters
from motley.benchmarks.timing import LEARNER_WARMS, Cost, clear, cost
from motley.compute.scoring import score
from motley.config import Learning
from motley.engines import Completion, torch_engine
from motley.learning.batches import ToScore, micro_batches
from motley.learning.learner import Learner
from motley.models.policy import Policy
from motley.objectives import objective
from motley.records import Problem, Sampling

SCORED_AT_ONCE = 2**14  # tokens, where no gradient is wanted


def training_jobs(bench: Bench, model: str) -> list[Job]:
    return [partial(_training, bench, model)]


def _training(bench: Bench, model: str) -> list[Row]:
    """Both sides whole: forward, backward, clip, Adam; ours with its objective and metrics."""
    sizes = bench.sizes
    num_tokens = sizes.rows * sizes.row_tokens
    products_s = 6.0 * num_parameters(bench.build(model)) * num_tokens / bench.machine.flops_per_s
    ours = _our_training(bench, model)
    clear(bench.device)
    rival = _plain_training(bench, model)
    return [
        {
            "model": model,
            "rows": sizes.rows,
            "tokens": sizes.row_tokens,
            "tokens_per_s": round(num_tokens / ours.seconds),
            "plain_tokens_per_s": round(num_tokens / rival.seconds),
            "ratio": rival.seconds / ours.seconds,
            "of_product_rate": products_s / ours.seconds,
            "plain_of_product_rate": products_s / rival.seconds,
            "peak_gib": ours.peak_gib,
            "plain_peak_gib": rival.peak_gib,
        }
    ]


def _our_training(bench: Bench, model: str) -> Cost:
    policy = bench.build(model)
    learner = Learner(
        policy, objective("grpo"), Learning(lr=grpo.LR, grad_clip=grpo.GRAD_CLIP), grpo.LR
    )
    problems, made = _rows_to_learn(bench, policy)
    candidates = grpo.candidates(
        policy, problems, made, Sampling(max_tokens=bench.sizes.row_tokens)
    )
    return cost(
        lambda: learner.step(candidates), bench.device, bench.sizes.repeats, warming=LEARNER_WARMS
    )


def _plain_training(bench: Bench, model: str) -> Cost:
    policy = bench.build(model)
    step = rivals.PlainStep(
        policy, _to_score(policy, *_rows_to_learn(bench, policy)), grpo.LR, grpo.GRAD_CLIP
    )
    return cost(step, bench.device, bench.sizes.repeats)


def _rows_to_learn(bench: Bench, policy: Policy) -> tuple[list[Problem], list[list[Completion]]]:
    """Groups of completions that fill rows behind prompts of one token."""
    sizes = bench.sizes
    prompts = Texts.draw(policy.vocabulary, sizes.rows // sizes.samples, 1).texts
    ids = Texts.draw(policy.vocabulary, sizes.rows, sizes.row_tokens - 1, seed=1).ids
    made = [Completion(tokens, (-1.0,) * len(tokens), "length") for tokens in ids]
    return [Problem(prompt=text) for text in prompts], [
        made[i : i + sizes.samples] for i in range(0, len(made), sizes.samples)
    ]


def _to_score(
    policy: Policy, problems: Sequence[Problem], made: Sequence[Sequence[Completion]]
) -> list[ToScore]:
    rows = [
        (policy.prompts.ids(problem), c.tokens)
        for problem, group in zip(problems, made, strict=True)
        for c in group
    ]
    return [ToScore(row=i, prompt=prompt, tokens=tokens) for i, (prompt, tokens) in enumerate(rows)]


def logprob_jobs(bench: Bench, model: str) -> list[Job]:
    return [partial(_logp_of_trainers, bench, model), partial(_logp_of_engine, bench, model)]


@torch.no_grad()
def _logp_of_trainers(bench: Bench, model: str) -> list[Row]:
    """Ours and the plain step's, as they train, against the transformers model in float32."""
    policy = bench.build(model)
    sequences = _to_score(policy, *_rows_to_learn(bench, policy))
    rows = rivals.PaddedRows.of(sequences, policy.vocabulary.pad_id, bench.device)
    plain = rivals.plain_dtype(policy)
    exact_M, plain_M = (rows.logp(policy.base, dtype).cpu() for dtype in (torch.float32, plain))
    return [
        _difference(
            model,
            f"our trainer in {_name(policy.dtype)}, against float32",
            _our_logp(policy, sequences),
            exact_M,
        ),
        _difference(model, f"plain step in {_name(plain)}, against float32", plain_M, exact_M),
    ]


@torch.no_grad()
def _logp_of_engine(bench: Bench, model: str) -> list[Row]:
    """Of sampled tokens: what the trainer computes, against what the engine reported."""
    sizes, policy = bench.sizes, bench.build(model)
    texts = Texts.draw(policy.vocabulary, sizes.problems, sizes.prompt)
    made = torch_engine(policy).sample(
        texts.ids, sizes.samples, Sampling(max_tokens=sizes.new_tokens), seed=0
    )
    reported_M = torch.tensor([logprob for group in made for c in group for logprob in c.logprobs])
    ours_M = _our_logp(
        policy, _to_score(policy, [Problem(prompt=text) for text in texts.texts], made)
    )
    return [_difference(model, "our trainer against our engine", ours_M, reported_M)]


def _our_logp(policy: Policy, sequences: Sequence[ToScore]) -> Tensor:
    """[M], in the order of the sequences."""
    logp: dict[int, Tensor] = {}
    for micro in micro_batches(sequences, SCORED_AT_ONCE, policy.device):
        logp_BT = micro.unpack(score(policy, micro.packed).logp_M).cpu()
        logp |= {
            row: logp_BT[i, : len(sequences[row].tokens)]
            for i, row in enumerate(micro.row_B.tolist())
        }
    return torch.cat([logp[row] for row in range(len(sequences))])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _difference(model: str, what: str, logp_M: Tensor, against_M: Tensor) -> Row:
    difference_M = logp_M.double() - against_M.double()
    ordered_M = difference_M.abs().sort().values
    return {
        "model": model,
        "what": what,
        "tokens": len(ordered_M),
        "mean_difference": float(ordered_M.mean()),
        "99.9 %": float(ordered_M[int(0.999 * (len(ordered_M) - 1))]),
        "mean_ratio": float(difference_M.exp().mean()),
    }
