"""A model and what of it trains."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from peft import PeftModel
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from motley.config import PeerConfig
from motley.policies.policy import Policy, choose_trained
from motley.policies.tiny import MAX_POSITIONS, check_tiny, tiny_model, tiny_vocabulary
from motley.policies.vocabulary import Vocabulary
from motley.records import Problem

__all__ = ["Policy", "check_peer", "choose_trained", "initial_policy", "peer_seed", "saved_policy"]


def check_peer(peer: PeerConfig, problems: list[Problem], max_tokens: int) -> None:
    """Refuse, before anything is trained, a model that is not known, a part of it that is not there, or problems it cannot hold."""
    if not peer.model.startswith("tiny:"):
        raise ValueError(f"peer {peer.name}: model {peer.model!r} is not known; use tiny:0.3m, tiny:1m, tiny:4m or tiny:deep")
    check_tiny(peer.model.removeprefix("tiny:"))
    if not isinstance(peer.train, str):
        choose_trained(initial_policy(peer, seed=0).base, peer.train, seed=0)
    vocabulary = tiny_vocabulary()
    longest = max(len(vocabulary.encode(p.prompt)) for p in problems)
    if longest + max_tokens > MAX_POSITIONS:
        raise ValueError(
            f"peer {peer.name}: prompts of {longest} tokens and max_tokens={max_tokens} do not fit the {MAX_POSITIONS} positions "
            f"of {peer.model}; lower max_tokens or shorten the prompts"
        )
    answer = max((p.answer for p in problems), key=len)
    needed = len(vocabulary.encode(answer)) + 1
    if needed > max_tokens:
        raise ValueError(
            f"max_tokens={max_tokens} is too short for answers such as {answer!r}; use at least {needed}, the end token included"
        )


def initial_policy(peer: PeerConfig, seed: int) -> Policy:
    """The untrained policy of a peer, whole model trainable; `choose_trained` comes after its warm start."""
    return Policy(tiny_model(peer.model.removeprefix("tiny:"), peer_seed(peer.name, seed)), tiny_vocabulary())


def saved_policy(folder: Path) -> Policy:
    """A policy from a folder that a checkpoint wrote: a whole model, or an adapter beside its base."""
    if not (folder / "tokenizer.json").exists():
        raise ValueError(f"{folder} is no model folder: it has no tokenizer.json; give a run folder, or RUN/checkpoints/round-N/PEER/model")
    vocabulary = Vocabulary(Tokenizer.from_file(str(folder / "tokenizer.json")))
    if (folder / "config.json").exists():
        return Policy(LlamaForCausalLM.from_pretrained(folder), vocabulary)
    base = LlamaForCausalLM.from_pretrained(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])
    return Policy(PeftModel.from_pretrained(base, folder), vocabulary)


def peer_seed(name: str, seed: int) -> int:
    """A peer's own number from the crew's seed: the same on every machine, different for every peer."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")
