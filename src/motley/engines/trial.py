"""Which engine samples from a model by its own code: the fastest whose log-probs are those of the
model's own forward, tried out on a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from motley.compute.alone import fault_of
from motley.engines.engine import Engine
from motley.engines.even import EvenEngine
from motley.engines.plain import PlainEngine
from motley.models.devices import is_out_of_memory
from motley.models.policy import Policy
from motley.models.precision import nearly, spread_ids
from motley.models.sources import quiet
from motley.records import Sampling

PROMPTS = ((5, 6, 7), (8, 9, 10, 11, 4))  # of two lengths, so that one would be padded
FEW = Sampling(max_tokens=4)
# what models raise that do not know a cache, a mask or a position that others do
_UNFIT = (ValueError, TypeError, RuntimeError, AttributeError, IndexError, KeyError)


def own_code_engine(policy: Policy) -> Engine:
    """Refuse a model that none of them samples from rightly."""
    ways: list[Callable[[], Engine]] = [
        lambda: PlainEngine(policy),
        lambda: EvenEngine(policy, caches=True),
        lambda: EvenEngine(policy, caches=False),
    ]
    why = ""
    for one_by_one in dict.fromkeys((policy.one_by_one, True)):
        policy.one_by_one = one_by_one
        for way in ways if one_by_one else ways[:1]:
            with quiet():  # about what a model does not use
                engine = way()
                why = _fault(engine, policy)
            if not why:
                return engine
    raise ValueError(
        f"architecture {policy.config.model_type!r} is not supported: no engine samples from it "
        f"({why}); use another model, or an engine of its own such as vllm"
    )


def _fault(engine: Engine, policy: Policy) -> str:
    """Why an engine does not sample what the model's own forward says; nothing where it does."""
    try:
        prompts = [spread_ids(ids, policy.vocabulary.size) for ids in PROMPTS]
        made = engine.sample(prompts, 2, FEW, seed=0)
        fault = max(
            fault_of(policy, prompt, one.tokens, torch.tensor(one.logprobs))
            for prompt, samples in zip(prompts, made, strict=True)
            for one in samples
        )
    except _UNFIT as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        said, *_ = str(error).splitlines() or [type(error).__name__]
        return said
    return "" if nearly(fault, policy.dtype) else f"its log-probs differ by {fault:.2g}"
