"""A model and what of it trains."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path

import msgspec
import torch
from transformers import GenerationConfig, PretrainedConfig

from motley.config import Lora, PeerConfig, Prompt, TrainPart
from motley.models.devices import check_dtype, choose_device, choose_dtype
from motley.models.four_bits import hold_in_four_bits
from motley.models.named import MAX_POSITIONS, TINY, TinyParts
from motley.models.named import is_tiny as is_tiny
from motley.models.policy import (
    MADE_OF,
    TRAINED,
    MadeOf,
    Policy,
    choose_trained,
    positions_of,
    store_frozen,
    take_layers,
    with_saved_adapter,
)
from motley.models.precision import fits_float16
from motley.models.prompts import Prompts
from motley.models.sources import (
    ModelSource,
    empty_model,
    find,
    keep_layers,
    read_model,
    read_shape,
    read_tokenizer,
)
from motley.models.tiny import tiny_model, tiny_vocabulary
from motley.models.vocabulary import Vocabulary
from motley.records import Problem
from motley.tasks import Task


def check_peer(
    peer: PeerConfig,
    rules: Prompt,
    task: Task,
    problems: Sequence[Problem],
    max_tokens: int = 0,
    hardest: Sequence[Problem] = (),
    ready: Sequence[Problem] = (),
) -> Vocabulary:
    """Refuse, before any weights load, a model that is not there, a part of it that it has not, or
    problems it cannot hold.

    `max_tokens`: of a sampled answer; 0: nothing is sampled, and the problems' own answers must
    fit. `hardest`: prompts that must fit too; their answers must be spelled. `ready`: all there
    are, which are looked at where a tokenizer makes tokens that the model does not know.
    """
    vocabulary, max_positions = (
        _check_tiny(peer, rules) if is_tiny(peer.model) else _check_pretrained(peer, rules)
    )
    others = [*hardest, *(ready if vocabulary.is_larger_than_model else ())]
    try:
        prompts = Prompts.of(vocabulary, rules, task)
        asked = [(len(prompts.ids(p)), p.prompt) for p in (*problems, *others)]
        answers = [(len(prompts.answer_ids(p)), p) for p in problems if p.answer]
        for problem in others:
            if problem.answer:
                prompts.answer_ids(problem)
    except ValueError as error:
        raise ValueError(f"peer {peer.name}: {error}") from error
    longest, prompt = max(asked, key=itemgetter(0))
    room = max_tokens or max((size for size, _ in answers), default=0)
    if longest + room > max_positions:
        raise ValueError(
            f"peer {peer.name}: prompts of {longest} tokens, such as {prompt[:40]!r}, and "
            f"{f'max_tokens={max_tokens}' if max_tokens else f'answers of {room}'} "
            f"do not fit the {max_positions} positions of {peer.model}; lower max_tokens, or "
            "shorten such prompts or leave them out"
        )
    # Every bare answer must fit; of those with reasoning around them, which a model may keep
    # shorter, the shortest.
    bare = [(size, p) for size, p in answers if task.target(p) == p.answer]
    size, problem = (
        max(bare, key=itemgetter(0))
        if bare
        else min(answers, key=itemgetter(0), default=(0, problems[0]))
    )
    if max_tokens and size > max_tokens:
        raise ValueError(
            f"max_tokens={max_tokens} is too short for answers such as {problem.answer!r}; use at "
            f"least {size}, "
            f"{'' if bare else 'its shortest solution and '}the end token included"
        )
    return vocabulary


def _check_tiny(peer: PeerConfig, rules: Prompt) -> tuple[Vocabulary, int]:
    TinyParts.of(peer.model)
    if peer.keep_layers or not isinstance(peer.train, str):
        choose_trained(initial_policy(peer, seed=0).base, peer.train, seed=0)
    return _vocabulary(peer.model, rules.stop), MAX_POSITIONS


def _check_pretrained(peer: PeerConfig, rules: Prompt) -> tuple[Vocabulary, int]:
    config = read_shape(find(peer.model))
    vocabulary = _vocabulary(peer.model, rules.stop)
    if rules.style == "chat" and not vocabulary.has_chat:
        raise ValueError(
            f"peer {peer.name}: {peer.model} has no chat template; set prompt.style = "
            '"plain", or use an instruct model'
        )
    if peer.keep_layers or not isinstance(peer.train, str):
        model = empty_model(config)
        if peer.keep_layers:
            keep_layers(model, peer.keep_layers)
        choose_trained(model, peer.train, seed=0)
    return vocabulary, positions_of(config.get_text_config())


def initial_policy(
    peer: PeerConfig, seed: int, rules: Prompt = Prompt(), task: Task | None = None
) -> Policy:
    """A peer's untrained policy, all of it trainable; `with_trained_part` comes after warming.

    One that will be held in 4 bits may be too large for its device until then, so that it waits on
    the CPU; `placed` moves it.
    """
    small = is_tiny(peer.model)
    device = choose_device(peer.device, small)
    check_dtype(peer.dtype, device)
    vocabulary = _vocabulary(peer.model, rules.stop)
    if small:
        model = tiny_model(peer.model.removeprefix(TINY), peer_seed(peer.name, seed))
        lasting = peer.model
    else:
        source = find(peer.model)
        model, lasting = read_model(source), source.lasting
    if peer.keep_layers:
        keep_layers(model, peer.keep_layers)
    waits = bool(peer.bits)
    model = model if waits else model.to(device)
    return Policy(
        model,
        vocabulary,
        prompts=Prompts.of(vocabulary, rules, task) if task else Prompts(vocabulary),
        dtype=torch.float32
        if waits
        else choose_dtype(peer.dtype, device, small, lambda: fits_float16(model)),
        gradient_checkpointing=peer.gradient_checkpointing is True,
        made_of=MadeOf(model=lasting, keep_layers=peer.keep_layers),
    )


def placed(policy: Policy, peer: PeerConfig) -> Policy:
    """A policy whose model is in 4 bits by now, on its device and in its arithmetic."""
    small = is_tiny(peer.model)
    device = choose_device(peer.device, small)
    policy.model.to(device)
    dtype = choose_dtype(peer.dtype, device, small, lambda: fits_float16(policy.base))
    store_frozen(policy.model, dtype)
    return replace(policy, dtype=dtype)


def saved_policy(folder: Path, rules: Prompt = Prompt(), task: Task | None = None) -> Policy:
    """A policy from a model folder: a whole model, or a part that names what it was made of."""
    if not (folder / "tokenizer_config.json").exists():
        raise ValueError(
            f"{folder} is no model folder: it has no tokenizer; give a run folder, or "
            "RUN/checkpoints/round-N/PEER/model"
        )
    if (folder / "config.json").exists():
        return initial_policy(PeerConfig(name="model", model=str(folder)), 0, rules, task)
    adapted = (folder / "adapter_config.json").exists()
    if not adapted and not (folder / TRAINED).exists():
        raise ValueError(
            f"{folder} is no model folder: it has neither config.json nor adapter_config.json; "
            "give one that save_pretrained wrote"
        )
    made_of = _made_of(folder)
    peer = PeerConfig(name="model", model=made_of.model, keep_layers=made_of.keep_layers)
    if made_of.bits:
        peer = msgspec.structs.replace(peer, train=TrainPart(lora=Lora(bits=made_of.bits)))
    policy = replace(initial_policy(peer, 0, rules, task), made_of=made_of)
    if adapted:
        policy.model = with_saved_adapter(policy.base, folder)
    else:
        take_layers(policy.model, folder)
    if made_of.bits:
        hold_in_four_bits(policy.base)
        return placed(policy, peer)
    return policy


def _made_of(folder: Path) -> MadeOf:
    """What a part was trained on; an exported adapter may have it in its own folder."""
    if (folder / MADE_OF).exists():
        made_of = msgspec.json.decode((folder / MADE_OF).read_bytes(), type=MadeOf)
        beside = folder / made_of.model
    else:
        rules = json.loads((folder / "adapter_config.json").read_text())
        made_of = MadeOf(model=rules["base_model_name_or_path"])
        beside = folder / "base" if (folder / "base").exists() else folder / made_of.model
    return msgspec.structs.replace(made_of, model=str(beside)) if beside.exists() else made_of


@lru_cache(maxsize=8)
def _vocabulary(model: str, stop: str) -> Vocabulary:
    """A model's vocabulary; peers of one process with the same model share it."""
    if is_tiny(model):
        if stop:
            raise ValueError(
                f"stop={stop!r} is for models that write text; tiny models end their answers "
                "themselves: remove it"
            )
        return tiny_vocabulary(TinyParts.of(model).vocabulary)
    source = find(model)
    config = read_shape(source).get_text_config()
    return Vocabulary(
        read_tokenizer(source), ends=_ends(source, config), stop=stop, size=config.vocab_size
    )


def vocabulary_of(model: str, rules: Prompt) -> Vocabulary:
    """A model's vocabulary, without its weights."""
    return _vocabulary(model, rules.stop)


def _ends(source: ModelSource, config: PretrainedConfig) -> list[int]:
    """What ends an answer by the model's own word; chat models often name several tokens."""
    named = [config.eos_token_id]
    with suppress(OSError):  # a folder without generation_config.json
        if not source.gguf:
            named.append(GenerationConfig.from_pretrained(source.place).eos_token_id)
    return [
        end
        for ends in named
        for end in (ends if isinstance(ends, list) else [ends])
        if end is not None
    ]


def peer_seed(name: str, seed: int) -> int:
    """A peer's own number from the crew's seed, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")
