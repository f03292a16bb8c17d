"""Sampling. One protocol, one declared log-prob convention."""

from __future__ import annotations

import warnings
from pathlib import Path

from motley.config import EnginePart
from motley.engines.engine import Completion, Engine
from motley.engines.plain import PlainEngine
from motley.engines.torch import TorchEngine
from motley.policies.policy import Policy
from motley.policies.support import runs_kernels, why_unknown

__all__ = ["Completion", "Engine", "PlainEngine", "TorchEngine", "open_engine", "torch_engine"]


def torch_engine(policy: Policy) -> Engine:
    """The built-in engine, the fastest one that computes this model on its device."""
    reason = why_unknown(policy.base)
    if reason:
        if policy.device.type == "cuda":
            warnings.warn(
                f"sampling by the model's own code, which is several times slower, since {reason}",
                stacklevel=2,
            )
        return PlainEngine(policy)
    if runs_kernels(policy.device):
        from motley.engines.graph import GraphEngine

        return GraphEngine(policy)
    return TorchEngine(policy)


def open_engine(policy: Policy, part: str | EnginePart, folder: Path) -> Engine:
    """The engine a peer asks for; what it must write goes under `folder`."""
    if isinstance(part, str):
        return torch_engine(policy)
    if part.openai is not None:
        from motley.engines.openai import OpenAIEngine

        return OpenAIEngine(policy, part.openai, folder)
    from motley.engines.vllm import VllmEngine

    assert part.vllm is not None
    return VllmEngine(policy, part.vllm, folder)
