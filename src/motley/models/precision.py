"""Whether a model's values fit float16, which rounds eight times less than bfloat16 but holds
nothing above 65504; and whether two ways to compute a model give the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from motley.models.four_bits import FourBitLinear

ROWS, TOKENS = 4, 32
HEADROOM = 2  # training moves values, and other texts have others
CLOSE = 1e-2
HALF_CLOSE = 30 * CLOSE  # half types round the more


def apart(logp_T: Tensor, other_T: Tensor, logits_TV: Tensor) -> float:
    """How far two ways to compute log-probs are apart at most, in nat.

    Where a model finds all tokens about as likely, as one with fresh weights does, nothing could
    differ by much: it is then measured in parts of how far its log-probs are from each other.
    """
    return float((logp_T - other_T).abs().max()) / spread(logits_TV)


def spread_ids(ids: Iterable[int], size: int) -> tuple[int, ...]:
    """Some ids below 16, spread over a vocabulary.

    The first ones are often reserved and were never trained. There float32 itself is uncertain: by
    .02 nat for SmolLM2's, and by 3e-4 for others.
    """
    return tuple(id * max(1, size // 16) for id in ids)


def spread(logits_TV: Tensor) -> float:
    """How far a model's log-probs of tokens are from each other, in nat, and at most one."""
    return float(logits_TV.float().std(-1).mean().clamp(1e-9, 1))


def nearly(fault: float, dtype: torch.dtype) -> bool:
    """Whether a fault is rounding; one that is no number is not."""
    return fault <= (CLOSE if dtype == torch.float32 else HALF_CLOSE)


@torch.no_grad()
def fits_float16(model: PreTrainedModel) -> bool:
    """Whether random tokens stay well inside its range.

    Their log-probs must be nearer to float32's than with bfloat16.
    """
    size = model.get_input_embeddings().num_embeddings
    token_BT = torch.randint(size, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0)).to(
        model.device
    )
    largest: list[Tensor] = []
    watched = [
        part for part in model.modules() if isinstance(part, nn.Linear | Conv1D | FourBitLinear)
    ]
    hooks = [
        part.register_forward_hook(
            lambda _, given, out: largest.append(
                torch.maximum(given[0].abs().max(), out.abs().max())
            )
        )
        for part in watched
    ]
    exact_BT = _logp(model, token_BT, torch.float32)
    for hook in hooks:
        hook.remove()
    if not float(torch.stack(largest).max()) * HEADROOM < torch.finfo(torch.float16).max:
        return False
    away = {
        dtype: float((_logp(model, token_BT, dtype) - exact_BT).abs().mean())
        for dtype in (torch.float16, torch.bfloat16)
    }
    return away[torch.float16] < away[torch.bfloat16]  # not, if one is no number


def _logp(model: PreTrainedModel, token_BT: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(token_BT.device.type, dtype=dtype, enabled=dtype != torch.float32):
        output: Any = model(input_ids=token_BT, use_cache=False)
    return (
        torch.log_softmax(output.logits[:, :-1].float(), -1)
        .gather(2, token_BT[:, 1:, None])
        .squeeze(2)
    )
