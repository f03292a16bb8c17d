"""Drawing a token from logits, and the log-prob that is reported for it.

Owns what every engine of torch must do alike, random numbers and running out of memory included.
Knows no model: an engine hands in how it samples rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motley.engines.engine import Completion
from motley.models.devices import is_out_of_memory
from motley.models.policy import Policy
from motley.records import Sampling


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What was sampled, one row per sample; columns at or behind `length_B` mean nothing."""

    token_BT: Tensor
    logp_BT: Tensor
    length_B: Tensor

    def completions(self, end_ids: tuple[int, ...]) -> list[Completion]:
        return [
            Completion(
                tokens=tuple(tokens[:length]),
                logprobs=tuple(logprobs[:length]),
                ending="stop" if tokens[length - 1] in end_ids else "length",
            )
            for tokens, logprobs, length in zip(
                self.token_BT.tolist(), self.logp_BT.tolist(), self.length_B.tolist(), strict=True
            )
        ]


def _uniforms(num_rows: int, max_tokens: int, seed: int, device: torch.device) -> Tensor:
    """A row of random numbers for every sample, the same on every device.

    So a completion does not depend on its neighbours.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(num_rows, max_tokens, generator=generator, dtype=torch.float64)
    # Apple's GPUs have no float64
    return (drawn.float().clamp(max=1 - 2**-24) if device.type == "mps" else drawn).to(device)


PromptIds = Sequence[Sequence[int]]
# completions of prompts from their rows of random numbers, equally many of each
SampleRows = Callable[[PromptIds, Tensor], SampledRows]


def sample_rows(
    rows: SampleRows,
    policy: Policy,
    prompts: PromptIds,
    num_samples: int,
    sampling: Sampling,
    seed: int,
    first: int = 0,
) -> list[list[Completion]]:
    """What `Engine.sample` must do, for an engine that can do `rows`.

    `first`: how many prompts stand before these, and are sampled elsewhere.
    """
    longest = max(len(p) for p in prompts)
    if longest + sampling.max_tokens > policy.max_positions:
        raise ValueError(
            f"prompt of {longest} tokens and max_tokens={sampling.max_tokens} do not fit the "
            f"model's {policy.max_positions} "
            "positions; lower max_tokens or shorten the prompts"
        )
    before, total = first * num_samples, (first + len(prompts)) * num_samples
    uniform_BT = _uniforms(total, sampling.max_tokens, seed, policy.device)[before:]
    made = [
        c
        for part in _in_parts(rows, prompts, uniform_BT)
        for c in part.completions(policy.vocabulary.end_ids)
    ]
    return [made[i : i + num_samples] for i in range(0, len(made), num_samples)]


def _in_parts(rows: SampleRows, prompts: PromptIds, uniform_BT: Tensor) -> list[SampledRows]:
    """Sample all prompts at once; where memory does not hold them, in halves, which changes no
    completion.

    Samples of one prompt are parted too when it is alone.
    """
    try:
        return [rows(prompts, uniform_BT)]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if len(uniform_BT) == 1:
            longest = max(len(p) for p in prompts)
            raise ValueError(
                f"out of memory with one sample of {uniform_BT.shape[1]} tokens of a prompt of "
                f"{longest}; lower max_tokens"
            ) from error
    if uniform_BT.is_cuda:
        torch.cuda.empty_cache()
    warnings.warn(
        f"memory does not hold {len(uniform_BT)} samples of {uniform_BT.shape[1]} tokens at "
        "once; sampling in parts",
        stacklevel=2,
    )
    middle = len(prompts) // 2
    row = middle * len(uniform_BT) // len(prompts) if middle else len(uniform_BT) // 2
    return _in_parts(rows, prompts[: middle or 1], uniform_BT[:row]) + _in_parts(
        rows, prompts[middle:], uniform_BT[row:]
    )


def draw(
    logits_RV: Tensor, branch_B: Tensor, sampling: Sampling, uniform_B: Tensor
) -> tuple[Tensor, Tensor]:
    """One token per sample from the row of logits it stands at, and its log-prob under the declared
    convention.

    Temperature 0: the best token, and its log-prob at temperature 1.
    """
    if sampling.temperature == 0:
        best = torch.log_softmax(logits_RV, -1).max(-1)
        return best.indices[branch_B], best.values[branch_B]
    full_RV = torch.log_softmax(logits_RV / sampling.temperature, -1)
    sampled_RV = truncate(full_RV, sampling)
    # Inverse of the cumulative distribution, in float64 so that the tail of a large vocabulary is
    # not lost.
    cumulative_BV = sampled_RV.to(uniform_B.dtype).exp().cumsum(-1)[branch_B]
    total_B1 = cumulative_BV[:, -1:]
    # never behind the last
    threshold_B1 = torch.minimum(
        uniform_B[:, None] * total_B1, total_B1.nextafter(torch.zeros_like(total_B1))
    )
    # if no numbers
    token_B = (
        torch.searchsorted(cumulative_BV, threshold_B1, right=True)
        .clamp(max=logits_RV.shape[1] - 1)
        .squeeze(1)
    )
    reported_RV = sampled_RV if sampling.logprobs == "sampled" else full_RV
    return token_B, reported_RV[branch_B, token_B]


def truncate(logp_RV: Tensor, sampling: Sampling) -> Tensor:
    """Keep the top k, then the smallest set of them with probability top_p, and renormalise."""
    if sampling.top_k == 0 and sampling.top_p == 1:
        return logp_RV
    sorted_RV, order_RV = logp_RV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        sorted_RV[:, sampling.top_k :] = -torch.inf
        sorted_RV = torch.log_softmax(sorted_RV, -1)
    before_RV = sorted_RV.exp().cumsum(-1) - sorted_RV.exp()
    sorted_RV = sorted_RV.masked_fill(before_RV >= sampling.top_p, -torch.inf)
    return torch.log_softmax(torch.empty_like(logp_RV).scatter_(1, order_RV, sorted_RV), -1)
