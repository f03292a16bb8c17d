"""Supervised warm start on a task's own answers, so that a fresh model has something to build on. Cached; deterministic by seed.

How good a model is on a kind is the mean probability it gives to the whole right answer: the expected accuracy of sampled
answers, without sampling any.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from motley.config import Warm
from motley.learning.batches import ToScore, micro_batches
from motley.policies import Policy
from motley.policies.forward import score
from motley.policies.policy import load_tensors, save_tensors
from motley.records import Problem
from motley.tasks import Task

RECIPE = 1  # raise when a change here changes the weights it makes
CHECK_EVERY = 3
CHECK_PROBLEMS = 48
TOKEN_BUDGET = 1 << 20

Progress = Callable[[int, dict[str, float]], None]  # (steps so far, accuracy per kind)


def check_warm(task: Task, warm: Warm) -> None:
    unknown = sorted(warm.accuracy.keys() - set(task.kinds))
    if unknown:
        raise ValueError(f"warm names kinds the task does not have: {', '.join(unknown)}; it has {', '.join(task.kinds)}")


def warm_start(policy: Policy, task: Task, warm: Warm, seed: int, progress: Progress | None = None) -> None:
    """Train until every kind named has its accuracy, or take the cached result of the same recipe."""
    check_warm(task, warm)
    path = _cache_path(
        [
            RECIPE,
            policy.fingerprint,
            policy.vocabulary.fingerprint,
            task.fingerprint,
            msgspec.to_builtins(warm),
            seed,
            str(torch.__version__),
        ]
    )
    if path.exists():
        policy.model.load_state_dict(load_tensors(path), strict=False)
        return
    _train(policy, task, warm, seed, progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    save_tensors({name: p.detach() for name, p in policy.model.named_parameters()}, partial)
    partial.rename(path)


def expected_accuracy(policy: Policy, problems: list[Problem]) -> dict[str, float]:
    """Per kind, the mean probability of sampling exactly the right answer."""
    by_kind: dict[str, list[float]] = {}
    with torch.no_grad():
        for micro in micro_batches(_answers(policy, problems), TOKEN_BUDGET, policy.device):
            probability_B = micro.unpack(score(policy.base, micro.packed).logp_M).sum(1).exp()
            for row, probability in zip(micro.row_B.tolist(), probability_B.tolist(), strict=True):
                by_kind.setdefault(problems[row].kind, []).append(probability)
    return {kind: sum(values) / len(values) for kind, values in by_kind.items()}


def _train(policy: Policy, task: Task, warm: Warm, seed: int, progress: Progress | None) -> None:
    rng = random.Random(f"warm/{seed}")
    checks = [task.draw(random.Random(f"warm-check/{i}"), "train", kind) for kind in warm.accuracy for i in range(CHECK_PROBLEMS)]
    optimiser = torch.optim.Adam(policy.model.parameters(), lr=warm.lr)
    accuracy = dict.fromkeys(warm.accuracy, 0.0)
    for step in range(warm.max_steps + 1):
        if step % CHECK_EVERY == 0:
            accuracy = expected_accuracy(policy, checks)
            if progress:
                progress(step, accuracy)
            if all(accuracy[kind] >= target for kind, target in warm.accuracy.items()):
                return
        lacking = [kind for kind, target in warm.accuracy.items() if accuracy[kind] < target]
        problems = [task.draw(rng, "train", rng.choice(lacking)) for _ in range(warm.batch)]
        optimiser.zero_grad()
        for micro in micro_batches(_answers(policy, problems), TOKEN_BUDGET, policy.device):
            (-score(policy.base, micro.packed).logp_M.mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimiser.step()
    reached = ", ".join(f"{kind} {value:.2f} of {warm.accuracy[kind]:.2f}" for kind, value in accuracy.items())
    raise ValueError(f"warm start did not reach its targets in max_steps={warm.max_steps}: {reached}; lower the targets or raise max_steps")


def _answers(policy: Policy, problems: list[Problem]) -> list[ToScore]:
    vocabulary = policy.vocabulary
    return [
        ToScore(row=i, prompt=tuple(vocabulary.encode(p.prompt)), tokens=(*vocabulary.encode(p.answer), vocabulary.end_id))
        for i, p in enumerate(problems)
    ]


def _cache_path(recipe: list[Any]) -> Path:
    root = Path(os.environ.get("MOTLEY_CACHE") or Path.home() / ".cache" / "motley")
    name = hashlib.sha256(msgspec.json.encode(recipe, order="sorted")).hexdigest()[:24]
    return root / "warm" / f"{name}.safetensors"
