"""The engine for models that padding would disturb: one prompt after the other, its samples as rows
of one length.

A model that carries a state from token to token would carry it through padding, too. Rows that have
ended run on with the others, since states cannot be taken out of every cache; what they draw is not
used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from motley.engines.plain import PlainEngine
from motley.engines.sampling import PromptIds, SampledRows, draw
from motley.models.policy import Policy
from motley.records import Sampling

CACHES = ("past_key_values", "cache_params")  # what models call their caches


class EvenEngine(PlainEngine):
    def __init__(self, policy: Policy, caches: bool) -> None:
        """`caches`: by the model's own cache; otherwise every token computes the row anew."""
        super().__init__(policy)
        self.caches = caches

    def _rows(self, sampling: Sampling, prompts: PromptIds, uniform_BT: Tensor) -> SampledRows:
        num_samples = len(uniform_BT) // len(prompts)
        parts = [
            self._of_prompt(sampling, prompt, uniform_ST)
            for prompt, uniform_ST in zip(prompts, uniform_BT.split(num_samples), strict=True)
        ]
        return SampledRows(
            torch.cat([part.token_BT for part in parts]),
            torch.cat([part.logp_BT for part in parts]),
            torch.cat([part.length_B for part in parts]),
        )

    def _of_prompt(
        self, sampling: Sampling, prompt: Sequence[int], uniform_ST: Tensor
    ) -> SampledRows:
        device, rows = uniform_ST.device, len(uniform_ST)
        row_ST = torch.tensor([list(prompt)], device=device).expand(rows, -1)
        token_ST = torch.zeros(uniform_ST.shape, dtype=torch.int64, device=device)
        logp_ST = torch.zeros(uniform_ST.shape, device=device)
        length_S = torch.full((rows,), sampling.max_tokens, device=device)
        end_ids = torch.tensor(self._policy.vocabulary.end_ids, device=device)
        runs_S = torch.ones(rows, dtype=torch.bool, device=device)
        cache: dict[str, object] = {}
        for step in range(sampling.max_tokens):
            output = self._policy.base(
                input_ids=row_ST[:, -1:] if cache else row_ST,
                use_cache=self.caches,
                logits_to_keep=1,
                **cache,
            )
            if self.caches:
                cache = {name: output[name] for name in CACHES if name in output}
                if not cache:
                    raise ValueError("it gives no cache back")
            token_S, logp_S = draw(
                output.logits[:, -1].float(),
                torch.arange(rows, device=device),
                sampling,
                uniform_ST[:, step],
            )
            token_ST[:, step], logp_ST[:, step] = token_S, logp_S
            ends_S = runs_S & torch.isin(token_S, end_ids)
            length_S[ends_S] = step + 1
            runs_S &= ~ends_S
            if not bool(runs_S.any()):
                break
            row_ST = torch.cat([row_ST, token_S[:, None]], 1)
        return SampledRows(token_ST, logp_ST, length_S)
