"""Sampling. One protocol, one declared log-prob convention."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from motley.compute.decoder import Decoder
from motley.compute.support import runs_kernels, why_unknown
from motley.config import EnginePart
from motley.engines.branches import TorchEngine
from motley.engines.engine import Completion, Engine
from motley.engines.plain import PlainEngine
from motley.engines.trial import own_code_engine
from motley.models.policy import Policy

if TYPE_CHECKING:
    from motley.engines.graphs import GraphEngine

__all__ = ["Completion", "Engine", "PlainEngine", "TorchEngine", "open_engine", "torch_engine"]


def torch_engine(policy: Policy) -> Engine:
    """The built-in engine, the fastest one that computes this model on its device."""
    reason = why_unknown(policy.base)
    if reason or policy.one_by_one:
        if policy.device.type == "cuda":
            warnings.warn(
                f"sampling by the model's own code, which is several times slower, since "
                f"{reason or 'it is computed one sequence at a time'}",
                stacklevel=2,
            )
        return own_code_engine(policy)
    return known_engine(policy)


def known_engine(policy: Policy, decoder: Decoder | None = None) -> TorchEngine | GraphEngine:
    """That of a model with a forward of our own.

    `decoder`: the policy's, where its weights come and go.
    """
    if runs_kernels(policy.device):
        from motley.engines.graphs import GraphEngine

        return GraphEngine(policy, decoder)
    return TorchEngine(policy, decoder)


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
