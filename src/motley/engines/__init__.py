"""Sampling. One protocol, one declared log-prob convention."""

from __future__ import annotations

from pathlib import Path

from motley.config import EnginePart
from motley.engines.engine import Completion, Engine
from motley.engines.plain import PlainEngine
from motley.engines.torch import TorchEngine
from motley.policies.forward import is_plain_llama
from motley.policies.policy import Policy

__all__ = ["Completion", "Engine", "PlainEngine", "TorchEngine", "open_engine", "torch_engine"]


def torch_engine(policy: Policy) -> Engine:
    """The built-in engine: the fast one where it knows the architecture."""
    return TorchEngine(policy) if is_plain_llama(policy.base) else PlainEngine(policy)


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
