"""reasoning_gym:NAME: problems made by a reasoning-gym dataset, scored by it.

Knows reasoning-gym; imports it when a task is loaded.

A problem carries its index alone: what the scorer needs is made again from it. A question belongs
to the held-out split by its hash, so no seed can train on it, however few questions the parameters
allow. The out-of-distribution split is the same dataset with other parameters; its indices lie
above all others, so an index says which of the two made it.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import math
import os
import random
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import msgspec

from motley.records import Problem
from motley.tasks import sandbox
from motley.tasks.answers import INSTRUCTIONS, Form, find_answer, wrap
from motley.tasks.extras import load
from motley.tasks.harmless import evaluates, is_harmless
from motley.tasks.task import QUESTION, UNDECIDED, Measure, Scoring, Split, is_heldout

HELDOUT_ONE_IN = 8
MAX_DRAWS = 10_000
# indices of a dataset without an end; some seed numpy with them, which takes 32 bits
SPAN = 1 << 30
KEPT_ENTRIES = 4096

# Datasets that go through sets in an order Python draws anew for every process (found with 0.1.25
# under two hash seeds). A crew whose peers disagree on the problems is none.
UNSTEADY = {
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
}
UNFIT = {
    "composite": 'use task = "mixture" with a table per dataset',
    "list_functions": "it makes some problems by chance, whatever the seed; use another",
}

Entry = dict[str, Any]


class GymConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    form: Form = "line"
    # reasoning-gym's own scores between 0 and 1; otherwise only a full score counts, as 1
    partial: bool = False
    ood: dict[str, Any] = {}  # parameters that differ in the out-of-distribution split


class GymTask:
    template = QUESTION

    def __init__(self, name: str, config: GymConfig, parameters: dict[str, Any]) -> None:
        self.kinds: tuple[str, ...] = (name,)
        self.splits: tuple[Split, ...] = (
            ("train", "heldout", "ood") if config.ood else ("train", "heldout")
        )
        self.measure: Measure = "reward" if config.partial else "accuracy"
        self.instruction = INSTRUCTIONS[config.form]
        self._config = config
        self._sources = [_Source(name, parameters)]
        if config.ood:
            self._sources.append(_Source(name, parameters | config.ood))
        for source in self._sources:
            self._check_form(source.entry(source.span - 1))
        self.scoring: Scoring = "each" if self._sources[0].waits else "in turn"
        version = importlib.metadata.version("reasoning_gym")
        self.fingerprint = f"reasoning_gym {version} {name} {sorted(parameters.items())} {config}"

    def kinds_of(self, split: Split) -> tuple[str, ...]:
        return self.kinds

    def draw(self, rng: random.Random, split: Split, kind: str) -> Problem:
        place = int(split == "ood")
        source = self._sources[place]
        for _ in range(MAX_DRAWS):
            index = rng.randrange(source.span)
            entry = source.entry(index)
            if split == "ood" or is_heldout(entry["question"], HELDOUT_ONE_IN) == (
                split == "heldout"
            ):
                self._check_form(entry)
                answer = "" if entry["answer"] is None else str(entry["answer"])
                return Problem(
                    kind=kind,
                    prompt=entry["question"],
                    answer=answer,
                    columns={"index": place * SPAN + index},
                )
        raise ValueError(
            f"reasoning_gym:{kind} has no {split} problem among {MAX_DRAWS} draws: its parameters "
            "allow too few questions; widen them"
        )

    def target(self, problem: Problem) -> str:
        if not problem.answer:
            raise ValueError(
                f"{problem.kind}: reasoning-gym gives no answer to {problem.prompt[:60]!r}; warm "
                "starts and shots need other kinds"
            )
        return wrap(problem.answer, self._config.form)

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        return [
            self._score(problem, completion)
            for problem, completion in zip(problems, completions, strict=True)
        ]

    def _check_form(self, entry: Entry) -> None:
        if (
            self._config.form == "line"
            and entry["answer"] is not None
            and "\n" in str(entry["answer"]).strip()
        ):
            raise ValueError(
                f'form="line" of reasoning_gym:{self.kinds[0]}: its answers span several lines; '
                'use form = "text" or "tags"'
            )

    def _score(self, problem: Problem, completion: str) -> float:
        answer = find_answer(completion, self._config.form)
        if not answer:
            return 0.0
        place, index = divmod(problem.columns["index"], SPAN)
        score = self._sources[place].score(answer, index, problem.prompt)
        if self._config.partial or math.isnan(score):
            return score
        return float(score >= 1.0)


class _Source:
    """One dataset of reasoning-gym under fixed parameters, its entries by index."""

    def __init__(self, name: str, parameters: dict[str, Any]) -> None:
        self._name, self._parameters = name, parameters
        self._dataset = _create(name, {"seed": 0, **parameters})
        self._evaluates = evaluates(type(self._dataset))
        self.waits = self._evaluates == "sympy"  # for another process
        self.entry = lru_cache(KEPT_ENTRIES)(self._make)
        self.span = self._find_span()

    def _make(self, index: int) -> Entry:
        entry: Entry = self._dataset[index]
        return entry

    def _find_span(self) -> int:
        """Most datasets have an entry for every index; a few lay out `size` of them beforehand."""
        try:
            self.entry(SPAN - 1)
        except IndexError:
            return len(self._dataset)
        return SPAN

    def score(self, answer: str, index: int, question: str) -> float:
        entry = self.entry(index)
        if entry["question"] != question:
            raise ValueError(
                f"reasoning_gym:{self._name} makes another question of index {index} here; use "
                "the same version and parameters"
            )
        if not is_harmless(answer, self._evaluates):
            return 0.0
        if self.waits:
            parameters = msgspec.json.encode(self._parameters, order="sorted").decode()
            reply = sandbox.call(
                "motley.tasks.gym:score_limited", self._name, parameters, index, answer
            )
            return UNDECIDED if reply.outcome == "undecided" else float(reply.value or 0.0)
        return self.score_harmless(answer, index)

    def score_harmless(self, answer: str, index: int) -> float:
        try:
            return float(self._dataset.score_answer(answer, self.entry(index)))
        except Exception:  # noqa: BLE001 - scorers expect a well-formed answer, and raise what they like at any other
            return 0.0


@cache
def _source(name: str, parameters: str) -> _Source:
    return _Source(name, msgspec.json.decode(parameters))


def score_limited(name: str, parameters: str, index: int, answer: str) -> Callable[[], float]:
    """Only for a limited process: sympy may never end to simplify what a stranger wrote."""
    source = _source(name, parameters)
    source.entry(index)  # made before the limit: some take longer than their scoring
    bombs = importlib.import_module("motley.tasks.bombs")

    def score() -> float:
        bombs.defuse()
        return source.score_harmless(answer, index)

    return score


def _create(name: str, parameters: dict[str, Any]) -> Any:
    load("reasoning_gym", f"task 'reasoning_gym:{name}'")
    factory = load("reasoning_gym.factory", f"task 'reasoning_gym:{name}'")
    if name not in factory.DATASETS:
        close = difflib.get_close_matches(name, factory.DATASETS, n=3)
        remedy = (
            f"did you mean {' or '.join(close)}?"
            if close
            else f"known: {', '.join(sorted(factory.DATASETS))}"
        )
        raise ValueError(f"reasoning-gym has no dataset {name!r}; {remedy}")
    if name in UNFIT:
        raise ValueError(f"reasoning_gym:{name} is not for crews: {UNFIT[name]}")
    if name in UNSTEADY and os.environ.get("PYTHONHASHSEED") != "0":
        raise ValueError(
            f"reasoning_gym:{name} makes other problems in every process; set PYTHONHASHSEED=0 "
            "for all peers of the crew, or use another"
        )
    own = [field.name for field in dataclasses.fields(factory.DATASETS[name][1])]
    known = f"known: {', '.join([*GymConfig.__struct_fields__, *own])}"
    unknown = sorted(parameters.keys() - set(own))
    if unknown:
        raise ValueError(
            f"[task] of 'reasoning_gym:{name}': unknown parameter {unknown[0]!r}; {known}"
        )
    try:
        return factory.create_dataset(name, **parameters)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"[task] of 'reasoning_gym:{name}': {error}; {known}") from None
