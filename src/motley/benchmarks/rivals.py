"""The known ways that ours is measured against: transformers' `generate`, its model's forward over
padded rows with full logits, and vLLM in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from motley.benchmarks import vllm_side
from motley.benchmarks.timing import clear
from motley.config import Vllm
from motley.engines.vllm import server_environment, write_model
from motley.learning.batches import ToScore
from motley.models.policy import Policy

VLLM_SHARE = 0.6  # of the GPU's memory
# its engine in its caller's process: between two of them every step costs messages
IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def generator(policy: Policy) -> PreTrainedModel:
    """The policy's own model with weights in the dtype of the arithmetic: for `generate` quicker
    than to round them at every step.
    """
    return policy.base.to(policy.dtype).eval()


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    max_tokens: int,
    pad_id: int,
    end_id: int | None = None,
) -> Tensor:
    """One sampled completion [B, T] of each row. Without `end_id` all have max_tokens tokens."""
    tokens_BT, mask_BT = padded(rows, pad_id, left=True, device=model.device)
    config = GenerationConfig(
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens if end_id is None else None,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        eos_token_id=pad_id if end_id is None else end_id,
        pad_token_id=pad_id,
    )
    made_BT: Tensor = model.generate(
        input_ids=tokens_BT, attention_mask=mask_BT, generation_config=config
    )
    return made_BT[:, tokens_BT.shape[1] :]


@dataclass(frozen=True, slots=True)
class VllmTook:
    """Seconds of one call of vLLM's."""

    tokens_only: float
    with_logprobs: float  # of the tokens drawn, which ours always gives


def vllm_took(
    python: str,
    policy: Policy,
    rows: Sequence[Sequence[int]],
    limits: Sequence[int],
    repeats: int,
) -> VllmTook:
    """One sampled completion of each row, of exactly so many tokens, by this interpreter's vLLM.

    The policy leaves the GPU for it.
    """
    environment = server_environment(policy, Vllm(python=python), os.environ) | IN_ONE_PROCESS
    device = policy.device
    with tempfile.TemporaryDirectory() as folder:
        write_model(policy, Path(folder))
        policy.model.to("cpu")
        clear(device)
        answer = Path(folder) / "answer.json"
        asked = {
            "model": folder,
            "dtype": str(policy.dtype).removeprefix("torch."),
            "positions": max(len(row) + limit for row, limit in zip(rows, limits, strict=True)),
            "memory_share": VLLM_SHARE,
            "prompts": [list(row) for row in rows],
            "limits": list(limits),
            "repeats": repeats,
            "answer": str(answer),
        }
        ran = subprocess.run(
            [python, vllm_side.__file__],
            input=json.dumps(asked),
            env=environment,
            capture_output=True,
            text=True,
        )
        if not answer.exists():
            said = (ran.stderr or ran.stdout).strip().splitlines()
            raise ValueError(f"vLLM by {python}: {said[-1] if said else 'it said nothing'}")
        made = json.loads(answer.read_text())
    if made["tokens"] != sum(limits):
        raise ValueError(f"vLLM made {made['tokens']} tokens and not {sum(limits)}")
    return VllmTook(made["seconds"], made["logprobs_seconds"])


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Prompts and completions side by side, a row each."""

    token_BT: Tensor
    mask_BT: Tensor  # 1 = no padding
    trained_BT: Tensor  # bool, True = a completion token

    @classmethod
    def of(cls, sequences: Sequence[ToScore], pad_id: int, device: torch.device) -> PaddedRows:
        token_BT, mask_BT = padded(
            [[*s.prompt, *s.tokens] for s in sequences], pad_id, left=False, device=device
        )
        prompt_B1 = torch.tensor([[len(s.prompt)] for s in sequences], device=device)
        trained_BT = mask_BT.bool() & (torch.arange(token_BT.shape[1], device=device) >= prompt_B1)
        return cls(token_BT, mask_BT, trained_BT)

    def logp(self, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Tensor:
        """[M], of completion tokens in the order of the rows; all logits exist at once."""
        with torch.autocast(self.token_BT.device.type, dtype=dtype, enabled=dtype != torch.float32):
            logits_BTV = model(
                input_ids=self.token_BT, attention_mask=self.mask_BT, use_cache=False
            ).logits[:, :-1]
            logp_BT = (
                torch.log_softmax(logits_BTV, -1, dtype=torch.float32)
                .gather(2, self.token_BT[:, 1:, None])
                .squeeze(2)
            )
        return logp_BT[self.trained_BT[:, 1:]]


def plain_dtype(policy: Policy) -> torch.dtype:
    """bfloat16 wherever ours rounds: float16 would need a loss scale."""
    return torch.float32 if policy.dtype == torch.float32 else torch.bfloat16


class PlainStep:
    """A whole training step: forward, backward, clipped gradient, Adam."""

    def __init__(
        self, policy: Policy, sequences: Sequence[ToScore], lr: float, grad_clip: float
    ) -> None:
        self._model, self._dtype = policy.base, plain_dtype(policy)
        self._rows = PaddedRows.of(sequences, policy.vocabulary.pad_id, policy.device)
        self._grad_clip = grad_clip
        self._optimiser = torch.optim.Adam(self._model.parameters(), lr=lr)

    def __call__(self) -> None:
        self._optimiser.zero_grad()
        (-self._rows.logp(self._model, self._dtype).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._grad_clip)
        self._optimiser.step()


def padded(
    rows: Sequence[Sequence[int]], pad_id: int, left: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows of ids as a table, and 1 where it is no padding."""
    longest = max(len(row) for row in rows)
    fill = lambda row, value: [value] * (longest - len(row))
    place = lambda row, real, value: (
        [*fill(row, value), *real] if left else [*real, *fill(row, value)]
    )
    tokens = torch.tensor([place(r, r, pad_id) for r in rows], device=device)
    return tokens, torch.tensor([place(r, [1] * len(r), 0) for r in rows], device=device)
