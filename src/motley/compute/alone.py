"""Scoring one sequence after the other, by a model's own forward to the logits.

For models that packing would compute wrongly: those that carry a state from token to token, mask
their attention in a way of their own, or change their logits behind the last projection. Slower:
a prompt is computed again for each of its completions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from motley.compute.logprobs import Scores
from motley.compute.packed import Packed
from motley.models.policy import Policy
from motley.models.precision import apart, nearly, spread, spread_ids

BEFORE, BEHIND = (5, 6, 7, 8), (3, 4, 10)


class _Sequence(NamedTuple):
    token_1T: Tensor  # a prompt and the inputs of one completion
    target_M: Tensor  # predicted by the last tokens
    temperature_M: Tensor


def score_alone(policy: Policy, packed: Packed) -> Scores:
    """What `scoring.score` does.

    Of a sequence only its scores are kept: it is computed again for the gradient, so that memory
    holds one at a time.
    """
    policy.base.eval()
    scored = []
    with torch.autocast(
        policy.device.type, dtype=policy.dtype, enabled=policy.dtype != torch.float32
    ):
        for one in _sequences(packed):
            logp_M, entropy_M = checkpoint(_scored, policy.base, *one, use_reentrant=False)
            scored.append((logp_M, entropy_M))
    logp_M, entropy_M = (torch.cat(parts) for parts in zip(*scored, strict=True))
    return Scores(logp_M, entropy_M)


def logits_alone(policy: Policy, packed: Packed) -> Iterator[Tensor]:
    """What `scoring.target_logits` does: those of one sequence after the other."""
    policy.base.eval()
    for one in _sequences(packed):
        with torch.autocast(
            policy.device.type, dtype=policy.dtype, enabled=policy.dtype != torch.float32
        ):
            logits_MV = own_logits(policy.base, one.token_1T, len(one.target_M))
        yield logits_MV


def _scored(
    model: PreTrainedModel, token_1T: Tensor, target_M: Tensor, temperature_M: Tensor
) -> tuple[Tensor, Tensor]:
    logits_MV = own_logits(model, token_1T, len(target_M)) / temperature_M[:, None]
    logp_MV = torch.log_softmax(logits_MV, -1)
    entropy_M = -(logp_MV.detach().exp() * logp_MV.detach()).sum(-1)
    return logp_MV.gather(1, target_M[:, None]).squeeze(1), entropy_M


def own_logits(model: PreTrainedModel, token_1T: Tensor, count: int) -> Tensor:
    """[count, V] in float32, of the last tokens, by the model's own forward."""
    # most models project only the tokens asked for; the others project all
    output = model(input_ids=token_1T, use_cache=False, logits_to_keep=count)
    logits_TV: Tensor = output.logits[0, -count:]
    return logits_TV.float()


@torch.no_grad()
def looks_ahead(policy: Policy) -> bool:
    """Whether what a model says of a token depends on the tokens behind it."""
    before, behind = (spread_ids(ids, policy.vocabulary.size) for ids in (BEFORE, BEHIND))
    logits_TV = _logits(policy, (*before, *behind))[: len(before)]
    alone_TV = _logits(policy, before)
    fault = apart(logits_TV.log_softmax(-1), alone_TV.log_softmax(-1), alone_TV)
    return not nearly(fault, policy.dtype) and not math.isnan(fault)


@torch.no_grad()
def spread_of(policy: Policy, ids: Sequence[int]) -> float:
    return spread(_logits(policy, ids))


@torch.no_grad()
def fault_of(policy: Policy, prompt: Sequence[int], tokens: Sequence[int], logp_T: Tensor) -> float:
    """How far log-probs of a completion are from the model's own, by `apart`."""
    logits_TV = _logits(policy, (*prompt, *tokens[:-1]))[-len(tokens) :]
    target_T = torch.tensor(tokens, device=policy.device)
    own_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None]).squeeze(1)
    return apart(own_T, logp_T.to(policy.device), logits_TV)


def _logits(policy: Policy, ids: Sequence[int]) -> Tensor:
    policy.base.eval()
    with torch.autocast(
        policy.device.type, dtype=policy.dtype, enabled=policy.dtype != torch.float32
    ):
        return own_logits(policy.base, torch.tensor([list(ids)], device=policy.device), len(ids))


def _sequences(packed: Packed) -> Iterator[_Sequence]:
    """The sequences that were packed, in the order of their targets.

    Of a prompt with several completions every one has a target that the prompt's last token
    predicts. A prompt with one may hold its inputs, too, and predict them all.
    """
    start_S = packed.own.start_S.tolist()
    count = len(packed.prompts.start_S) - 1
    of_prompt_B = packed.of_prompt_B.tolist()
    by_prompt_P = torch.bincount(
        torch.bucketize(packed.predictor_M, packed.own.start_S.long(), right=True) - 1,
        minlength=count,
    ).tolist()
    first = 0
    for place, prompt in enumerate(of_prompt_B, start=count):
        inputs = slice(start_S[place], start_S[place + 1])
        alone = of_prompt_B.count(prompt) == 1
        last = first + inputs.stop - inputs.start + (by_prompt_P[prompt] if alone else 1)
        yield _Sequence(
            torch.cat(
                [packed.token_N[start_S[prompt] : start_S[prompt + 1]], packed.token_N[inputs]]
            )[None],
            packed.target_M[first:last],
            packed.temperature_M[first:last],
        )
        first = last
