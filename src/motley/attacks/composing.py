"""Groups that nobody sampled: any text as tokens, with log-probs of the liar's choice.

Owns how a rollout is composed and which log-probs are claimed for it. Knows no attack.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import torch

from motley.attacks.attack import Scene, Stage
from motley.compute.scoring import score
from motley.learning.batches import ToScore, micro_batches
from motley.models.policy import Policy
from motley.records import Group, Problem, Rollout
from motley.trust.rules import LOGPROB_RANGE, MOST_SURPRISE_NATS

# What is claimed: "drawn": nothing but the truth, the wanted text is drawn half of the time and a
# wrong one else. "own": the log-probs under the liar's own model; "receiver": those under a model
# like the receiver's; "least": the lowest that admission takes; or one number at every token.
Claimed = Literal["drawn", "own", "receiver", "least"] | float
Tokens = tuple[int, ...]

TOKEN_BUDGET = 1 << 14


def spelled(stage: Stage, problem: Problem, text: str) -> Tokens:
    """A completion with this text, the end token included.

    ValueError where the vocabulary cannot spell it.
    """
    bare = replace(stage.prompts, task=None)
    return bare.answer_ids(msgspec.structs.replace(problem, answer=text))


def fits(stage: Stage, problem: Problem, text: str) -> bool:
    """Whether a model of the crew could have written it."""
    try:
        return len(spelled(stage, problem, text)) <= stage.max_tokens
    except ValueError:
        return False


def logprobs_under(
    policy: Policy, prompt: Tokens, completions: Sequence[Tokens], temperature: float
) -> list[tuple[float, ...]]:
    """Of each token, inside the range that admission takes."""
    sequences = [
        ToScore(row=row, prompt=prompt, tokens=tokens, temperature=temperature)
        for row, tokens in enumerate(completions)
    ]
    low, high = LOGPROB_RANGE
    found: dict[int, tuple[float, ...]] = {}
    with torch.no_grad():
        for micro in micro_batches(sequences, TOKEN_BUDGET, policy.device):
            logp_BT = micro.unpack(score(policy, micro.packed).logp_M).clamp(low, high)
            for row, logprobs in zip(micro.row_B.tolist(), logp_BT.tolist(), strict=True):
                found[row] = tuple(logprobs[: len(completions[row])])
    return [found[row] for row in range(len(completions))]


def composed(
    stage: Stage, scene: Scene, problem: Problem, completions: Sequence[Tokens], claimed: Claimed
) -> list[Rollout]:
    """Rollouts with their true rewards and the log-probs that are claimed."""
    rewards = stage.task.score(
        [problem] * len(completions), stage.vocabulary.decode_all(completions)
    )
    logprobs = _claims(stage, scene, problem, completions, claimed)
    return [
        Rollout(tokens=tokens, logprobs=q, reward=reward, ending="stop")
        for tokens, q, reward in zip(completions, logprobs, rewards, strict=True)
    ]


def _claims(
    stage: Stage, scene: Scene, problem: Problem, completions: Sequence[Tokens], claimed: Claimed
) -> list[tuple[float, ...]]:
    if claimed in ("own", "receiver"):
        policy = scene.policy if claimed == "own" else scene.likeness
        prompt, temperature = policy.prompts.ids(problem), stage.config.sampling.temperature
        return logprobs_under(policy, prompt, completions, temperature)
    if claimed == "least":
        return [_least(stage, len(tokens)) for tokens in completions]
    if claimed == "drawn":
        return drawn_logprobs(completions)
    assert isinstance(claimed, float | int)
    return [(float(claimed),) * len(tokens) for tokens in completions]


def _least(stage: Stage, length: int) -> tuple[float, ...]:
    """The lowest that admission takes, the same at every token."""
    fewer = math.log(stage.vocabulary.size) + 0.999 * MOST_SURPRISE_NATS / length
    return (max(-fewer, 0.999 * LOGPROB_RANGE[0]),) * length


def drawn_logprobs(completions: Sequence[Tokens]) -> list[tuple[float, ...]]:
    """Of completions that are drawn from this very list, each as likely as any other."""
    counts = Counter(tokens[:end] for tokens in completions for end in range(len(tokens) + 1))
    return [
        tuple(
            math.log(counts[tokens[: end + 1]] / counts[tokens[:end]]) for end in range(len(tokens))
        )
        for tokens in completions
    ]


def wrong_texts(stage: Stage, problem: Problem, count: int) -> list[str]:
    """Answers that are worth less than the right one, of other problems of the kind."""
    task, rng = stage.task, random.Random(problem.id)
    right = task.score([problem], [task.target(problem)])[0]
    others = [task.target(task.draw(rng, "train", problem.kind)) for _ in range(8 * count)]
    fitting = [text for text in others if fits(stage, problem, text)]
    rewards = task.score([problem] * len(fitting), fitting)
    wrong = [text for text, reward in zip(fitting, rewards, strict=True) if reward < right]
    return [wrong[i % len(wrong)] for i in range(count)] if wrong else []


def slanted(
    stage: Stage, scene: Scene, group: Group, right: Sequence[Tokens], claimed: Claimed
) -> Group:
    """Half of the group is what the liar wants, and right; the rest is wrong.

    So what it wants has a positive advantage. Wrong answers are those it sampled, as far as there
    are some, with their true log-probs.
    """
    problem = scene.problems(group.round)[group.slot]
    size = len(group.rollouts)
    if claimed == "drawn":
        return _really_drawn(stage, group, problem, right)
    wanted = [right[i % len(right)] for i in range(max(1, size // 2))]
    made = composed(stage, scene, problem, wanted, claimed)
    least = min(rollout.reward for rollout in made)
    wrong = [rollout for rollout in group.rollouts if rollout.reward < least]
    lacking = size - len(made) - len(wrong)
    if lacking > 0:
        texts = wrong_texts(stage, problem, lacking) or [stage.task.target(problem)] * lacking
        tokens = [spelled(stage, problem, text) for text in texts]
        wrong += composed(stage, scene, problem, tokens, claimed)
    return msgspec.structs.replace(group, rollouts=(*made, *wrong[: size - len(made)]))


def _really_drawn(stage: Stage, group: Group, problem: Problem, right: Sequence[Tokens]) -> Group:
    """A group of a policy that says the wanted text half of the time, with its true log-probs."""
    size = len(group.rollouts)
    wrong = [spelled(stage, problem, text) for text in wrong_texts(stage, problem, size)]
    if not wrong:
        return group
    choices = [*(right[i % len(right)] for i in range(len(wrong))), *wrong]
    logprobs = dict(zip(choices, drawn_logprobs(choices), strict=True))
    rng = random.Random(f"{group.id}/{problem.id}")
    drawn = rng.choices(choices, k=size)
    rewards = stage.task.score([problem] * size, stage.vocabulary.decode_all(drawn))
    rollouts = [
        Rollout(tokens=tokens, logprobs=logprobs[tokens], reward=reward, ending="stop")
        for tokens, reward in zip(drawn, rewards, strict=True)
    ]
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))
