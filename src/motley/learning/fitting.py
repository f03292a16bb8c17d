"""Fitting a policy to this machine: how many tokens one micro-batch may hold, and whether its architecture is computed rightly."""

from __future__ import annotations

import os
import warnings

import torch

from motley.learning.batches import ToScore, micro_batches
from motley.policies import Policy
from motley.policies.forward import is_plain_llama, score

MOST_TOKENS = 1 << 16
LEAST_TOKENS = 1 << 10
TINY_TOKENS = 1 << 14  # the same on every machine, so that a tiny crew's numbers are too
TINY_PARAMETERS = 10_000_000
SHARE = 0.4  # of the free memory: others use it too
PROBE_LENGTH = 256
CLOSE = 1e-2  # nat


def fitting_budget(policy: Policy) -> int:
    """Packed tokens of one micro-batch that memory surely holds, from what a small one needs. A power of two."""
    if sum(p.numel() for p in policy.model.parameters()) < TINY_PARAMETERS:
        return TINY_TOKENS
    per_token = _bytes_per_token(policy)
    budget = LEAST_TOKENS
    while budget < MOST_TOKENS and 2 * budget * per_token <= SHARE * _free_bytes(policy.device):
        budget *= 2
    return budget


def _bytes_per_token(policy: Policy) -> float:
    """What a training step keeps for one token: measured on a GPU, by the model's sizes elsewhere."""
    layers, hidden = policy.config.num_hidden_layers, policy.config.hidden_size
    layer = 10 * hidden + 4 * (getattr(policy.config, "intermediate_size", None) or 4 * hidden)  # GPT-2 names none
    by_sizes = 4.0 * (layers * hidden + layer if policy.gradient_checkpointing else layers * layer)
    if policy.device.type != "cuda":
        return by_sizes
    sizes = (2 * PROBE_LENGTH, 8 * PROBE_LENGTH)
    few, many = (_peak_bytes(policy, num_tokens) for num_tokens in sizes)
    return max((many - few) / (sizes[1] - sizes[0]), by_sizes / 8)


def _peak_bytes(policy: Policy, num_tokens: int) -> int:
    row = tuple(range(1, PROBE_LENGTH))
    sequences = [ToScore(row=i, prompt=(1 + i,), tokens=row) for i in range(num_tokens // PROBE_LENGTH)]
    torch.cuda.reset_peak_memory_stats(policy.device)
    for micro in micro_batches(sequences, num_tokens, policy.device):
        score(policy, micro.packed).logp_M.mean().backward()
    policy.model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(policy.device)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # a Mac does not say what is free
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error) or "can't allocate memory" in str(error)


def halved(budget: int) -> int:
    """A budget that ran out of memory, halved, with word of it."""
    warnings.warn(
        f"out of memory with {budget} tokens in a micro-batch; going on with {budget // 2}. "
        f"To keep it so, set token_budget = {budget // 2} under [learning]",
        stacklevel=3,
    )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return budget // 2


def too_large(budget: int) -> ValueError:
    return ValueError(
        f"out of memory with {budget} tokens in a micro-batch, which was halved once already; set token_budget = {budget // 2} or lower "
        "under [learning], gradient_checkpointing = true or train = { lora = { rank = 16 } } for the peer, or lower max_tokens"
    )


@torch.no_grad()
def check_supported(policy: Policy) -> None:
    """Refuse an architecture whose log-probs come out otherwise over packed tokens than by its own forward, row by row."""
    if is_plain_llama(policy.base):
        return
    prompts = [(5, 6, 7), (8, 9)]
    sequences = [ToScore(row=i, prompt=p, tokens=(3 + i, 4, 10 + i)) for i, p in enumerate([prompts[0], prompts[0], prompts[1]])]
    try:
        (micro,) = micro_batches(sequences, 1 << 10, policy.device)
        packed_BT = micro.unpack(score(policy, micro.packed).logp_M)
        for row_T, row in zip(packed_BT, micro.row_B.tolist(), strict=True):
            sequence = sequences[row]
            ids = torch.tensor([[*sequence.prompt, *sequence.tokens]], device=policy.device)
            with torch.autocast(policy.device.type, dtype=policy.dtype, enabled=policy.dtype != torch.float32):
                logits_TV = policy.base(input_ids=ids, use_cache=False).logits[0, len(sequence.prompt) - 1 : -1]
            logp_TV = torch.log_softmax(logits_TV.float(), -1)
            own_T = logp_TV.gather(1, ids[0, len(sequence.prompt) :, None]).squeeze(1)
            fault = float((own_T - row_T[: len(own_T)]).abs().max())
            if not fault <= (CLOSE if policy.dtype == torch.float32 else 30 * CLOSE):
                raise ValueError(f"its log-probs differ by {fault:.2g} between packed rows and its own forward")
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"architecture {policy.config.model_type!r} is not supported: {error}; models like Llama, Qwen, Gemma, Mistral and GPT-2 are"
        ) from error
