"""A model and what of it trains."""

from __future__ import annotations

import hashlib

from motley.config import PeerConfig
from motley.policies.policy import Policy, choose_trained
from motley.policies.tiny import tiny_model, tiny_vocabulary

__all__ = ["Policy", "check_model", "choose_trained", "initial_policy"]


def check_model(spec: str) -> None:
    """Refuse a model spec that cannot be loaded, before anything is."""
    if not spec.startswith("tiny:"):
        raise ValueError(f"model {spec!r} is not known; use tiny:0.3m, tiny:1m, tiny:4m or tiny:deep")
    tiny_model(spec.removeprefix("tiny:"), seed=0)


def initial_policy(peer: PeerConfig, seed: int) -> Policy:
    """The untrained policy of a peer, whole model trainable; `choose_trained` comes after its warm start."""
    check_model(peer.model)
    return Policy(tiny_model(peer.model.removeprefix("tiny:"), peer_seed(peer.name, seed)), tiny_vocabulary())


def peer_seed(name: str, seed: int) -> int:
    """A peer's own number from the crew's seed: the same on every machine, different for every peer."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")
