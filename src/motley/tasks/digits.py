"""digits: problems over short digit strings, made on the fly, that tiny models can learn in seconds
to minutes.

Quick kinds (reverse, sort, increment) need no carrying; arithmetic kinds (sum, difference, product,
chain, compare) do. A level is a length: digits of the string or number, terms of a chain. A prompt
belongs to the held-out split by its hash, so no seed can train on it; the out-of-distribution split
is one level above the highest trained.

The whole completion is the answer, unless `form` says otherwise: "first" is what stands before the
first comma, "last" what stands behind the last one. Both leave room for other text, as the rewards
of most real tasks do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from motley.records import Problem
from motley.tasks.task import AS_IT_IS, Measure, Scoring, Split, is_heldout

HELDOUT_ONE_IN = 8
MAX_LEVEL = 9

Kind = Literal["reverse", "sort", "increment", "sum", "difference", "product", "chain", "compare"]


class DigitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kinds: tuple[Kind, ...] = ("reverse", "sort", "increment")
    levels: tuple[int, ...] = (4,)
    form: Literal["text", "first", "last"] = "text"  # where in a completion its answer is

    def __post_init__(self) -> None:
        if not self.kinds or len(set(self.kinds)) < len(self.kinds):
            raise ValueError(f"kinds={list(self.kinds)} must name at least one kind, none twice")
        if not self.levels or not all(2 <= level < MAX_LEVEL for level in self.levels):
            raise ValueError(
                f"levels={list(self.levels)} must be lengths from 2 to {MAX_LEVEL - 1}, such as "
                "[3, 4]"
            )


def _string(rng: random.Random, level: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(level))


def _number(rng: random.Random, level: int) -> int:
    return rng.randrange(10 ** (level - 1), 10**level)


def _reverse(rng: random.Random, level: int) -> tuple[str, str]:
    text = _string(rng, level)
    return text, text[::-1]


def _sort(rng: random.Random, level: int) -> tuple[str, str]:
    text = _string(rng, level)
    return text, "".join(sorted(text))


def _increment(rng: random.Random, level: int) -> tuple[str, str]:
    text = _string(rng, level)
    return text, "".join(str((int(c) + 1) % 10) for c in text)


def _sum(rng: random.Random, level: int) -> tuple[str, str]:
    a, b = _number(rng, level), _number(rng, level)
    return f"{a}+{b}", str(a + b)


def _difference(rng: random.Random, level: int) -> tuple[str, str]:
    a, b = _number(rng, level), _number(rng, level)
    return f"{a}-{b}", str(a - b)


def _product(rng: random.Random, level: int) -> tuple[str, str]:
    a, b = _number(rng, level), rng.randrange(2, 10)
    return f"{a}*{b}", str(a * b)


def _chain(rng: random.Random, level: int) -> tuple[str, str]:
    terms = [rng.randrange(1, 10)]
    text = str(terms[0])
    for _ in range(level - 1):
        sign = rng.choice((1, -1))
        terms.append(sign * rng.randrange(1, 10))
        text += f"{terms[-1]:+d}"
    return text, str(sum(terms))


def _compare(rng: random.Random, level: int) -> tuple[str, str]:
    a = _number(rng, level)
    b = rng.choice((a, _number(rng, level), a + rng.choice((-1, 1))))
    return f"{a},{b}", "<" if a < b else ">" if a > b else "="


_MAKE: dict[str, Callable[[random.Random, int], tuple[str, str]]] = {
    "reverse": _reverse,
    "sort": _sort,
    "increment": _increment,
    "sum": _sum,
    "difference": _difference,
    "product": _product,
    "chain": _chain,
    "compare": _compare,
}

WORDS = tuple(f"{kind} " for kind in _MAKE)
SYMBOLS = "0123456789+-*,<>="


class Digits:
    """>>> Digits(DigitsConfig()).draw(random.Random(0), "train", "reverse")  # prompt "reverse
    6604=", answer "4066"
    """

    splits: tuple[Split, ...] = ("train", "heldout", "ood")
    measure: Measure = "accuracy"
    template = AS_IT_IS
    instruction = ""
    scoring: Scoring = "in turn"

    def __init__(self, config: DigitsConfig) -> None:
        self.kinds: tuple[str, ...] = config.kinds
        asked = f"DigitsConfig(kinds={config.kinds!r}, levels={config.levels!r})"
        form = "" if config.form == "text" else f" {config.form}"
        self.fingerprint = f"digits {asked}{form}"
        self._levels = config.levels
        self._form = config.form

    def kinds_of(self, split: Split) -> tuple[str, ...]:
        return self.kinds

    def draw(self, rng: random.Random, split: Split, kind: str) -> Problem:
        level = max(self._levels) + 1 if split == "ood" else rng.choice(self._levels)
        while True:
            text, answer = _MAKE[kind](rng, level)
            prompt = f"{kind} {text}="
            if split == "ood" or is_heldout(prompt, HELDOUT_ONE_IN) == (split == "heldout"):
                return Problem(kind=kind, prompt=prompt, answer=answer)

    def target(self, problem: Problem) -> str:
        return problem.answer

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        return [
            float(self._found(completion) == problem.answer)
            for problem, completion in zip(problems, completions, strict=True)
        ]

    def _found(self, completion: str) -> str:
        match self._form:
            case "text":
                return completion
            case "first":
                return completion.partition(",")[0]
            case "last":
                return completion.rpartition(",")[2]
