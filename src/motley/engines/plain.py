"""The engine for any transformers model: its own forward and its own cache, one row per sample, our
way of drawing.

Slower than `TorchEngine`, which has a forward of our own. Samples that have ended are taken out of
the batch at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache

from motley.compute.scoring import prepare
from motley.engines.engine import Completion
from motley.engines.sampling import PromptIds, SampledRows, draw, sample_rows
from motley.models.policy import Policy
from motley.records import Sampling


class PlainEngine:
    keeps_snapshot = False

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        prepare(policy)

    def refresh(self) -> None:
        """Nothing to take: the policy's own weights are used."""

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        policy = self._policy
        policy.model.eval()
        with torch.autocast(
            policy.device.type, dtype=policy.dtype, enabled=policy.dtype != torch.float32
        ):
            return sample_rows(
                partial(self._rows, sampling), policy, prompts, num_samples, sampling, seed
            )

    def _rows(self, sampling: Sampling, prompts: PromptIds, uniform_BT: Tensor) -> SampledRows:
        """Draw tokens until every sample has ended; `row_b` says which still run."""
        device, longest, num_samples = (
            uniform_BT.device,
            max(len(p) for p in prompts),
            len(uniform_BT) // len(prompts),
        )
        pad = self._policy.vocabulary.pad_id
        token_PT = torch.tensor(
            [[pad] * (longest - len(p)) + list(p) for p in prompts], device=device
        )
        real_PT = torch.arange(longest, device=device) >= torch.tensor(
            [[longest - len(p)] for p in prompts], device=device
        )
        cache = DynamicCache(config=self._policy.config)
        logits_bV = self._forward(token_PT, real_PT, cache).repeat_interleave(num_samples, 0)
        cache.batch_repeat_interleave(num_samples)
        real_bT = real_PT.repeat_interleave(num_samples, 0)
        token_BT = torch.zeros(uniform_BT.shape, dtype=torch.int64, device=device)
        logp_BT = torch.zeros(uniform_BT.shape, device=device)
        length_B = torch.full((len(uniform_BT),), sampling.max_tokens, device=device)
        row_b = torch.arange(len(uniform_BT), device=device)
        end_ids = torch.tensor(self._policy.vocabulary.end_ids, device=device)
        for step in range(sampling.max_tokens):
            token_b, logp_b = draw(
                logits_bV,
                torch.arange(len(row_b), device=device),
                sampling,
                uniform_BT[row_b, step],
            )
            token_BT[row_b, step], logp_BT[row_b, step] = token_b, logp_b
            runs_b = ~torch.isin(token_b, end_ids)
            length_B[row_b[~runs_b]] = step + 1
            if step + 1 == sampling.max_tokens or not bool(runs_b.any()):
                break
            if not bool(runs_b.all()):
                row_b, token_b, real_bT = row_b[runs_b], token_b[runs_b], real_bT[runs_b]
                cache.batch_select_indices(runs_b.nonzero().squeeze(1))
            real_bT = torch.cat([real_bT, torch.ones_like(real_bT[:, :1])], 1)
            logits_bV = self._forward(token_b[:, None], real_bT, cache)
        return SampledRows(token_BT, logp_BT, length_B)

    def _forward(self, token_bT: Tensor, real_bK: Tensor, cache: DynamicCache) -> Tensor:
        """Logits [b, V] after the last token; `real_bK` says which positions are no padding."""
        position_bK = (real_bK.cumsum(1) - 1).clamp(min=0)
        model = self._policy.base
        computed = model if self._policy.one_by_one else model.base_model
        output = computed(
            input_ids=token_bT,
            attention_mask=real_bK.long(),
            position_ids=position_bK[:, -token_bT.shape[1] :],
            past_key_values=cache,
            use_cache=True,
        )
        if self._policy.one_by_one:  # the logits may be more than a projection
            own_bV: Tensor = output.logits[:, -1].float()
            return own_bV
        with torch.autocast(token_bT.device.type, enabled=False):
            logits_bV: Tensor = model.get_output_embeddings()(output[0][:, -1].float())
        return logits_bV
