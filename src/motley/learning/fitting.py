"""Fitting a policy to this machine: how many tokens one micro-batch may hold, and whether its
architecture is computed rightly.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from motley.compute.alone import fault_of, looks_ahead, spread_of
from motley.compute.packed import Packed
from motley.compute.scoring import score
from motley.config import Learning
from motley.learning.batches import ToScore, micro_batches
from motley.learning.descent import Upkeep, moment_bytes
from motley.models.devices import is_out_of_memory
from motley.models.four_bits import num_values
from motley.models.policy import Policy
from motley.models.precision import nearly, spread_ids
from motley.models.returning import check_numbers

MOST_TOKENS = 1 << 16
LEAST_TOKENS = 1 << 10
TINY_TOKENS = 1 << 14  # the same on every machine, so that a tiny crew's numbers are too
TINY_PARAMETERS = 10_000_000
SHARE = 0.4  # of the free memory: others use it too
ENOUGH_TOKENS = 1 << 13  # in a micro-batch: with fewer, products are small for a large GPU
PROBE_LENGTH = 256
LEAK = 100  # how many times more a leak between sequences counts than rounding
MEMORY = Path("/proc/meminfo")


def fitting_budget(policy: Policy, upkeep: Upkeep = Upkeep()) -> int:
    """Packed tokens of one micro-batch that memory surely holds, from what a small one needs.

    A power of two. `upkeep`: what a step will need beside them.
    """
    if num_values(policy.model) < TINY_PARAMETERS:
        return TINY_TOKENS
    budget = LEAST_TOKENS
    try:
        per_token = _bytes_per_token(policy)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return budget
    trained = [p for _, p in policy.trained()]
    later = sum(p.nbytes for p in trained) + moment_bytes([p.shape for p in trained], upkeep)
    room = SHARE * (free_bytes(policy.device) - later)
    while budget < MOST_TOKENS and 2 * budget * per_token <= room:
        budget *= 2
    return budget


def must_recompute(policy: Policy, upkeep: Upkeep, rules: Learning) -> bool:
    """Whether layers are walked through again for the gradient: where memory does not hold what
    they would keep of a micro-batch of `token_budget`, or of enough tokens.
    """
    kept = replace(policy, gradient_checkpointing=False)
    return fitting_budget(kept, upkeep) < (rules.token_budget or ENOUGH_TOKENS)


def _bytes_per_token(policy: Policy) -> float:
    """What a training step keeps per token: measured on a GPU, by the model's sizes elsewhere."""
    layers, hidden = policy.config.num_hidden_layers, policy.config.hidden_size
    # GPT-2 names none
    layer = 10 * hidden + 4 * (getattr(policy.config, "intermediate_size", None) or 4 * hidden)
    by_sizes = 4.0 * (layers * hidden + layer if policy.gradient_checkpointing else layers * layer)
    if policy.device.type != "cuda":
        return by_sizes
    sizes = (2 * PROBE_LENGTH, 8 * PROBE_LENGTH)
    few, many = (_peak_bytes(policy, num_tokens) for num_tokens in sizes)
    return max((many - few) / (sizes[1] - sizes[0]), by_sizes / 8)


def _peak_bytes(policy: Policy, num_tokens: int) -> int:
    row = tuple(range(1, PROBE_LENGTH))
    sequences = [
        ToScore(row=i, prompt=(1 + i,), tokens=row) for i in range(num_tokens // PROBE_LENGTH)
    ]
    torch.cuda.reset_peak_memory_stats(policy.device)
    for micro in micro_batches(sequences, num_tokens, policy.device):
        score(policy, micro.packed).logp_M.mean().backward()
    policy.model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(policy.device)


def free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if MEMORY.exists():  # Linux, with what a full page cache would give back
        return 1024.0 * next(
            int(line.split()[1])
            for line in MEMORY.read_text().splitlines()
            if line.startswith("MemAvailable")
        )
    # a Mac does not say what is free
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_finite(policy: Policy) -> None:
    """Refuse weights without log-probs or gradient, before anything is kept of them."""
    end = policy.vocabulary.end_id
    (micro,) = micro_batches(
        [ToScore(row=0, prompt=(end, 1), tokens=(2, 1, end))], 8, policy.device
    )
    is_finite = policy.remote.is_finite if policy.remote else _is_finite_here
    if not is_finite(policy, micro.packed):
        raise FloatingPointError(
            f"the weights of version {policy.version} give log-probs that are no numbers, and "
            "were not saved; lower lr in the run's "
            "config.toml and go on with --resume from the checkpoint before"
        )


def _is_finite_here(policy: Policy, packed: Packed) -> bool:
    """Whether these tokens have log-probs and a gradient that are numbers."""
    logp_M = score(policy, packed).logp_M
    gradient = torch.autograd.grad(
        logp_M.sum(), [p for _, p in policy.trained()], allow_unused=True
    )
    return all(
        bool(torch.isfinite(value).all()) for value in (logp_M, *gradient) if value is not None
    )


@contextmanager
def explained_memory(budget: int) -> Iterator[None]:
    """Running out of memory as one line that says what helps."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise too_large(budget) from error


def halved(budget: int) -> int:
    """A budget that ran out of memory, halved, with word of it."""
    warnings.warn(
        f"out of memory with {budget} tokens in a micro-batch; going on with {budget // 2}. "
        f"To keep it so, set learning.token_budget = {budget // 2}",
        stacklevel=3,
    )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return budget // 2


def too_large(budget: int) -> ValueError:
    return ValueError(
        f"out of memory with {budget} tokens in a micro-batch; set learning.token_budget = "
        f"{max(1, budget // 2)} or lower, "
        "gradient_checkpointing = true or train = { lora = { rank = 16 } } for "
        "the peer, or lower max_tokens; motley fit says what each of them takes"
    )


def check_supported(policy: Policy) -> None:
    """Refuse an architecture whose log-probs are computed otherwise than by its own forward.

    One that packing would compute wrongly is computed one sequence at a time from here on.
    """
    if not torch.is_grad_enabled():
        raise ValueError(
            "gradients are switched off in torch, and nothing can be learned without; train "
            "outside of torch.no_grad(), and leave out torch.set_grad_enabled(False)"
        )
    reason = _scoring_fault(policy)
    if reason and not policy.one_by_one:
        policy.one_by_one = True
        reason = _scoring_fault(policy)
    if reason:
        check_numbers((name, p.detach()) for name, p in policy.model.named_parameters())
        raise ValueError(
            f"architecture {policy.config.model_type!r} is not supported: {reason}; models like "
            "Llama, Qwen, Gemma 3, Mistral and GPT-2 are"
        )


# a few short rows, two of which begin alike, and others of the same shape for all but the last
_Rows = list[tuple[tuple[int, ...], tuple[int, ...]]]
_ROWS: _Rows = [
    ((5, 6, 7), (3, 4, 10)),
    ((5, 6, 7), (3, 11, 12)),
    ((5, 6, 7), (4, 4, 11)),
    ((8, 9), (5, 4, 12)),
]
_OTHER_ROWS: _Rows = [
    ((10, 11, 4), (6, 8, 9)),
    ((10, 11, 4), (6, 5, 7)),
    ((10, 11, 4), (8, 8, 5)),
    ((8, 9), (5, 4, 12)),
]


def _scoring_fault(policy: Policy) -> str:
    """Why rows are scored wrongly or without a gradient; nothing where they are not."""
    try:
        rows, other_rows = (_spread(rows, policy) for rows in (_ROWS, _OTHER_ROWS))
        logp = _scored(policy, rows)
        torch.autograd.grad(
            torch.cat(logp).sum(), [p for _, p in policy.trained()], allow_unused=True
        )
        if looks_ahead(policy):
            return "what it says of a token depends on the tokens behind it"
        faults = [
            fault_of(policy, *row, logp_T.detach()) for row, logp_T in zip(rows, logp, strict=True)
        ]
        with torch.no_grad():
            leak = (_scored(policy, other_rows)[-1] - logp[-1]).abs().max()
        spread = spread_of(policy, rows[-1][0])
    except (ValueError, TypeError, RuntimeError, AttributeError, AssertionError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        said, *_ = str(error).splitlines() or [type(error).__name__]
        return f"its code does not run here ({said})"
    fault = float(torch.tensor(faults).max())  # not a number where one is not
    if not nearly(fault, policy.dtype):
        return f"its log-probs differ by {fault:.2g} from those of its own forward"
    # the same sums as before, so that much less than rounding may differ; in half types experts
    # round otherwise beside other tokens
    factor = LEAK if policy.dtype == torch.float32 else 1
    if not nearly(factor * float(leak) / spread, policy.dtype):
        return "what it says of a sequence depends on the sequences beside it"
    return ""


def _spread(rows: _Rows, policy: Policy) -> _Rows:
    size = policy.vocabulary.size
    return [(spread_ids(prompt, size), spread_ids(tokens, size)) for prompt, tokens in rows]


def _scored(policy: Policy, rows: _Rows) -> list[Tensor]:
    """Log-probs of each row's tokens, all rows packed together."""
    sequences = [
        ToScore(row=i, prompt=prompt, tokens=tokens) for i, (prompt, tokens) in enumerate(rows)
    ]
    (micro,) = micro_batches(sequences, 1 << 10, policy.device)
    logp_BT = micro.unpack(score(policy, micro.packed).logp_M)
    place_of = {row: place for place, row in enumerate(micro.row_B.tolist())}
    return [logp_BT[place_of[i], : len(tokens)] for i, (_, tokens) in enumerate(rows)]
