"""What of a crew can be told to be wrong before any model loads."""

from __future__ import annotations

import warnings
from itertools import chain

import msgspec

from motley.compute.support import why_unknown
from motley.config import (
    CrewConfig,
    PeerConfig,
)
from motley.learning.warm import check_warm
from motley.models.devices import choose_device
from motley.models.named import is_tiny, may_be_mixed
from motley.models.opening import check_peer, vocabulary_of
from motley.models.sources import empty_model, find, read_shape
from motley.models.spelled import NoSpellingError
from motley.models.vocabulary import Vocabulary
from motley.objectives import Objective, objective
from motley.tasks import Task, evaluation_set, hardest_to_hold, load_task, ready_problems

NOBODY = ""  # a peer no crew has


def check_config(config: CrewConfig, mine: str | None = None, task: Task | None = None) -> None:
    """Look up every name a crew file uses, so that a mistake shows before any model loads.

    `mine`: the only peer whose model must be on this machine; what others bring is theirs. None:
    all of them. `task`: where it is at hand as an object.
    """
    task = task or load_task(config.crew.task, config.task)
    row = objective(config.crew.objective, config.crew.variant, config.objective)
    if mine in (None, NOBODY):  # who joins cannot change it
        _name_truncation(config, row)
    _check_success(config, task)
    problems = [p for split in task.splits for p in evaluation_set(task, split, per_kind=8)]
    by_split = [ready_problems(task, split) for split in task.splits]
    hardest = [p for ready in by_split for p in hardest_to_hold(ready)]
    ready = [*chain(*by_split)]
    vocabularies = {}
    checked: dict[bytes, Vocabulary] = {}  # a peer without its name: of many alike, one is enough
    for peer in config.students:
        if mine in (None, peer.name) or is_tiny(peer.model):
            alike = msgspec.json.encode(msgspec.structs.replace(peer, name="any"))
            if alike not in checked:
                _check_bits(peer)
                checked[alike] = check_peer(
                    peer, config.prompt, task, problems, config.sampling.max_tokens, hardest, ready
                )
            vocabularies[peer.name] = checked[alike]
        if mine in (None, peer.name):
            choose_device(peer.device, small=False)
        if peer.warm:
            check_warm(task, peer.warm)
    _check_vocabularies(vocabularies)


def _check_bits(peer: PeerConfig) -> None:
    """Refuse 4 bits for a model that runs its own code: nobody tried what that makes of them."""
    if not peer.bits or is_tiny(peer.model):
        return
    config = read_shape(find(peer.model))
    if reason := why_unknown(empty_model(config)):
        raise ValueError(
            f"peer {peer.name}: bits={peer.bits} is for models that Motley has a forward pass of "
            f"its own for, and {config.model_type!r} runs its own code: {reason}; leave bits out, "
            "or use a model like Llama, Qwen, Gemma 3 or Mistral"
        )


def _check_success(config: CrewConfig, task: Task) -> None:
    if config.teach.is_on and config.teach.success is None and task.measure == "reward":
        raise ValueError(
            f"[teach] must know a success, and task {config.crew.task} gives rewards of any size; "
            "write success = the least reward of a good answer under [teach]"
        )


def _name_truncation(config: CrewConfig, row: Objective) -> None:
    """Warn where a learner takes what truncation cut off for a policy that has moved."""
    sampling = config.sampling
    follows = [
        "ratios are below 1, so that clips may take tokens of failures out, and products over "
        "an answer vanish with its length"
    ] * row.weighs_own + [
        "what is kept of own successes is pushed on every token, as if all had become less likely"
    ] * (row.keeping.keep > 0)
    if not sampling.raises_logprobs or not follows:
        return
    cut = [f"top_k = {sampling.top_k}"] * (sampling.top_k > 0)
    cut += [f"top_p = {sampling.top_p:g}"] * (sampling.top_p < 1)
    warnings.warn(
        f"with {' and '.join(cut)} and logprobs = 'sampled' a learner finds its own new samples "
        f"less likely than they were drawn, by what was cut off. Under {config.crew.row} "
        f"{'; and '.join(follows)}. Set logprobs = 'full' under [sampling], or leave out top_k and "
        "top_p",
        stacklevel=2,
    )


def is_mixed(config: CrewConfig) -> bool:
    """Whether the peers of a crew have different vocabularies; all their models are here."""
    models = dict.fromkeys(peer.model for peer in config.students)
    if not may_be_mixed(models):
        return False
    return len({vocabulary_of(model, config.prompt).fingerprint for model in models}) > 1


def _check_vocabularies(vocabularies: dict[str, Vocabulary]) -> None:
    first: dict[str, str] = {}  # fingerprint -> the first peer that has it
    for name, vocabulary in vocabularies.items():
        other = first.setdefault(vocabulary.fingerprint, name)
        if set(vocabulary.end_ids) != set(vocabularies[other].end_ids):
            raise ValueError(
                f"peers {other} and {name} end their answers with different tokens, "
                f"{vocabularies[other].end_ids} and {vocabulary.end_ids}; "
                "give both models' generation_config.json the same eos_token_id"
            )
    if len(first) > 1:
        for name in first.values():
            check_spelled(name, vocabularies[name])


def check_spelled(name: str, vocabulary: Vocabulary) -> None:
    """Refuse a peer of a mixed crew whose tokens nobody else could read."""
    try:
        vocabulary.spelling  # noqa: B018 - whether there is one is all that is asked
    except NoSpellingError as error:
        raise ValueError(
            f"peer {name} shares a crew with models of other vocabularies, and {error}"
        ) from error
