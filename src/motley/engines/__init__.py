"""Sampling. One protocol, one declared log-prob convention."""

from motley.engines.engine import Completion, Engine
from motley.engines.torch import TorchEngine

__all__ = ["Completion", "Engine", "TorchEngine"]
