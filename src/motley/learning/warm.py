"""Supervised warm start on a task's own answers, so that a fresh model has something to build on.

Cached; deterministic by seed.

How good a model is on a kind is the mean probability it gives to the whole right answer: the
expected accuracy of sampled answers, without sampling any.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from motley.compute.graphs import Score, scorer
from motley.compute.scoring import score
from motley.config import Warm
from motley.files import cache_folder, whole
from motley.learning.batches import ToScore, micro_batches
from motley.learning.descent import LossScale, adam
from motley.learning.fitting import check_supported, explained_memory, fitting_budget
from motley.models.policy import Policy, load_tensors, save_tensors
from motley.records import Problem
from motley.tasks import Task, ready_problems

RECIPE = 3  # raise when a change here changes the weights it makes
CHECK_EVERY = 3
CHECK_PROBLEMS = 48

Progress = Callable[[int, dict[str, float]], None]  # (steps so far, accuracy per kind)


def check_warm(task: Task, warm: Warm) -> None:
    unknown = sorted(set(warm.of_kinds) - set(task.kinds))
    if unknown:
        raise ValueError(
            f"warm names kinds the task does not have: {', '.join(unknown)}; it has "
            f"{', '.join(task.kinds)}"
        )
    for problem in ready_problems(task, "train"):
        if problem.kind in warm.of_kinds and not problem.answer:
            raise ValueError(
                "warm teaches the answers that the problems bring, and "
                f"{problem.prompt[:40]!r} has none; give every row one, or leave warm out"
            )


def warm_start(
    policy: Policy, task: Task, warm: Warm, seed: int, progress: Progress | None = None
) -> None:
    """Train until every kind has its accuracy, or for the steps named.

    The cached result of the same recipe is taken instead.
    """
    check_warm(task, warm)
    path = _cache_path(
        [
            RECIPE,
            policy.fingerprint,
            policy.vocabulary.fingerprint,
            task.fingerprint,
            # how problems are put
            [(answer.prompt, answer.tokens) for answer in _answers(policy, _checks(task, warm))],
            _start_hash(policy),
            [policy.device.type, str(policy.dtype)],
            msgspec.to_builtins(warm),
            seed,
            str(torch.__version__),
        ]
    )
    if path.exists():
        try:
            policy.model.load_state_dict(load_tensors(path), strict=False)
        except ValueError:  # torn by a crash of the machine: it is made again
            path.unlink()
        else:
            return
    check_supported(policy)
    budget = fitting_budget(policy)
    with explained_memory(budget):
        _train(policy, task, warm, seed, budget, progress)
    with whole(path) as partial:
        save_tensors({name: p.detach() for name, p in policy.model.named_parameters()}, partial)


def expected_accuracy(policy: Policy, problems: list[Problem], budget: int = 0) -> dict[str, float]:
    """Per kind, the mean probability of sampling exactly the right answer."""
    by_kind: dict[str, list[float]] = {}
    with torch.no_grad():
        for micro in micro_batches(
            _answers(policy, problems), budget or fitting_budget(policy), policy.device
        ):
            probability_B = micro.unpack(score(policy, micro.packed).logp_M).sum(1).exp()
            for row, probability in zip(micro.row_B.tolist(), probability_B.tolist(), strict=True):
                by_kind.setdefault(problems[row].kind, []).append(probability)
    return {kind: sum(values) / len(values) for kind, values in by_kind.items()}


def _train(
    policy: Policy, task: Task, warm: Warm, seed: int, budget: int, progress: Progress | None
) -> None:
    rng = random.Random(f"warm/{seed}")
    checks = _checks(task, warm)
    teaching = _Teaching(
        policy,
        scorer(policy),
        adam(policy.model.parameters(), warm.lr),
        LossScale(policy.dtype),
        budget,
    )
    accuracy = dict.fromkeys(warm.of_kinds, 0.0)
    for step in range((warm.steps or warm.max_steps) + 1):
        if step % CHECK_EVERY == 0 or step == warm.steps:
            accuracy = expected_accuracy(policy, checks, budget)
            if progress:
                progress(step, accuracy)
        lacking = [
            kind
            for kind in warm.of_kinds
            if warm.steps or not accuracy[kind] >= warm.accuracy[kind]
        ]
        if not lacking or step == warm.steps > 0:
            return
        problems = [task.draw(rng, "train", rng.choice(lacking)) for _ in range(warm.batch)]
        _supervised_step(teaching, _answers(policy, problems))
    reached = ", ".join(
        f"{kind} {value:.2f} of {warm.accuracy[kind]:.2f}" for kind, value in accuracy.items()
    )
    raise ValueError(
        f"warm start did not reach its targets in max_steps={warm.max_steps}: {reached}; lower "
        "the targets or raise max_steps"
    )


class _Teaching(NamedTuple):
    policy: Policy
    score: Score
    optimiser: torch.optim.Optimizer
    scale: LossScale
    budget: int


def _supervised_step(teaching: _Teaching, answers: list[ToScore]) -> None:
    """One step towards the answers' tokens, each of equal weight."""
    grad_norm = _gradient_norm(teaching, answers)
    while not math.isfinite(grad_norm) and teaching.scale.shrink():
        grad_norm = _gradient_norm(teaching, answers)
    if not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"the gradient norm of the warm start is {grad_norm}; lower its lr: 1e-4 or less for "
            "pretrained models"
        )
    teaching.optimiser.step()
    teaching.scale.grow()


def _gradient_norm(teaching: _Teaching, answers: list[ToScore]) -> float:
    teaching.optimiser.zero_grad()
    teaching.score.begin()
    num_tokens = sum(len(answer.tokens) for answer in answers)
    for micro in micro_batches(answers, teaching.budget, teaching.policy.device):
        teaching.scale.backward(-teaching.score(micro.packed).logp_M.sum() / num_tokens)
    return float(teaching.scale.clip(list(teaching.policy.model.parameters()), 1.0))


def _answers(policy: Policy, problems: list[Problem]) -> list[ToScore]:
    prompts = policy.prompts
    return [
        ToScore(row=i, prompt=prompts.ids(p), tokens=prompts.answer_ids(p))
        for i, p in enumerate(problems)
    ]


def _checks(task: Task, warm: Warm) -> list[Problem]:
    return [
        task.draw(random.Random(f"warm-check/{i}"), "train", kind)
        for kind in warm.of_kinds
        for i in range(CHECK_PROBLEMS)
    ]


def _start_hash(policy: Policy) -> str:
    """Of the values a warm start begins with."""
    digest = hashlib.sha256()
    for _, parameter in policy.model.named_parameters():
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _cache_path(recipe: list[object]) -> Path:
    name = hashlib.sha256(msgspec.json.encode(recipe, order="sorted")).hexdigest()[:24]
    return cache_folder() / "warm" / f"{name}.safetensors"
