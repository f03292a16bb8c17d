"""Exact models of one distribution over texts, each with a vocabulary of its own.

A text is a Markov chain over letters that ends by itself. A vocabulary cuts it by its longest
token, again and again. The chance of a token then is that of its letters, and of no letters behind
it with which an earlier token would have been a longer one. That is computed exactly, so what a
token says of the letters behind it is in its probability, as it is in that of a trained model.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from motley.spelling import Spelling

END = b""  # the end token


class State(NamedTuple):
    """Between two tokens: the letter before, and what must not follow."""

    last: int
    barred: frozenset[bytes]


FIRST = State(-1, frozenset())


@dataclass
class Chain:
    """`chance[last][letter]` of letters; what is left of 1 is the chance to end there."""

    chance: dict[int, dict[int, float]]

    @staticmethod
    def drawn(letters: bytes, rng: np.random.Generator, end: float, spread: float) -> Chain:
        rows = {
            last: dict(
                zip(letters, rng.dirichlet([spread] * len(letters)) * (1 - end), strict=True)
            )
            for last in (*letters, -1)
        }
        rows[-1] = {letter: share / (1 - end) for letter, share in rows[-1].items()}
        return Chain(rows)

    def near(self, rng: np.random.Generator, apart: float) -> Chain:
        """Another chain with as much chance to end."""
        rows = {}
        for last, row in self.chance.items():
            moved = {c: p * math.exp(apart * rng.standard_normal()) for c, p in row.items()}
            scale = sum(row.values()) / sum(moved.values())
            rows[last] = {c: p * scale for c, p in moved.items()}
        return Chain(rows)

    def end(self, last: int) -> float:
        return max(0.0, 1.0 - sum(self.chance[last].values()))


@dataclass
class Model:
    """The chain as a model of tokens."""

    chain: Chain
    tokens: Sequence[bytes]
    _alive: dict[State, float] = field(default_factory=dict)
    _next: dict[State, dict[bytes, tuple[float, State]]] = field(default_factory=dict)
    _sums: dict[State, tuple[list[bytes], list[float]]] = field(default_factory=dict)

    @property
    def spelling(self) -> Spelling:
        return Spelling((*self.tokens, None))

    def ids(self, drawn: Sequence[bytes]) -> list[int]:
        """The end token is the row behind all others."""
        return [self.tokens.index(t) if t else len(self.tokens) for t in drawn]

    def alive(self, state: State) -> float:
        """The chance that nothing barred follows."""
        if state not in self._alive:
            last, barred = state
            row = self.chain.chance[last] if barred else {}
            self._alive[state] = (
                sum(
                    chance * self.alive(State(c, _behind(barred, c)))
                    for c, chance in row.items()
                    if bytes([c]) not in barred
                )
                + self.chain.end(last)
                if barred
                else 1.0
            )
        return self._alive[state]

    def next(self, state: State) -> dict[bytes, tuple[float, State]]:
        """The chance of each token, and where it leads."""
        if state not in self._next:
            whole = self.alive(state)
            moves = {END: (self.chain.end(state.last) / whole, FIRST)}
            for token in self.tokens:
                chance, after = self._spelled(state, token)
                if chance:
                    more = {t[len(token) :] for t in self.tokens if t.startswith(token)} - {b""}
                    after = State(after.last, after.barred | more)
                    moves[token] = (chance * self.alive(after) / whole, after)
            self._next[state] = moves
        return self._next[state]

    def _spelled(self, state: State, token: bytes) -> tuple[float, State]:
        chance = 1.0
        for c in token:
            if bytes([c]) in state.barred:
                return 0.0, state
            chance *= self.chain.chance[state.last].get(c, 0.0)
            state = State(c, _behind(state.barred, c))
        return chance, state

    def draw(self, rng: np.random.Generator, most: int) -> tuple[list[bytes], list[float]]:
        """Tokens and their log-probs, until the end token or `most` of them."""
        state, drawn, logprobs = FIRST, [], []
        for chance in rng.random(most):
            if state not in self._sums:
                moves = self.next(state)
                sums = list(accumulate(p for p, _ in moves.values()))
                self._sums[state] = (list(moves), sums)
            tokens, sums = self._sums[state]
            token = tokens[min(bisect(sums, chance), len(tokens) - 1)]
            probability, after = self.next(state)[token]
            drawn.append(token)
            logprobs.append(math.log(probability))
            state = after
            if token == END:
                break
        return drawn, logprobs

    def cut(self, text: bytes, ended: bool) -> list[bytes]:
        """The longest token, again and again."""
        longest = max(map(len, self.tokens))
        found, place = [], 0
        while place < len(text):
            sizes = range(min(longest, len(text) - place), 0, -1)
            size = next(s for s in sizes if text[place : place + s] in self.tokens)
            found.append(text[place : place + size])
            place += size
        return [*found, END] if ended else found

    def score(self, tokens: Sequence[bytes]) -> list[float]:
        state, logprobs = FIRST, []
        for token in tokens:
            chance, state = self.next(state).get(token, (0.0, state))
            logprobs.append(math.log(chance) if chance else -math.inf)
        return logprobs


def _behind(barred: frozenset[bytes], letter: int) -> frozenset[bytes]:
    return frozenset(text[1:] for text in barred if text[0] == letter and len(text) > 1)


@dataclass
class Samples:
    """Completions of a sender, and what a receiver makes of them."""

    sent: list[list[bytes]] = field(default_factory=list)
    scored: list[list[bytes]] = field(default_factory=list)
    sent_logprobs: list[float] = field(default_factory=list)
    scored_logprobs: list[float] = field(default_factory=list)

    @property
    def ended(self) -> list[bool]:
        return [END in tokens for tokens in self.sent]

    @staticmethod
    def drawn(
        sender: Model, receiver: Model, rng: np.random.Generator, num: int, most: int = 1000
    ) -> Samples:
        samples = Samples()
        for _ in range(num):
            tokens, logprobs = sender.draw(rng, most)
            scored = receiver.cut(b"".join(tokens), END in tokens)
            samples.sent.append(tokens)
            samples.scored.append(scored)
            samples.sent_logprobs += logprobs
            samples.scored_logprobs += receiver.score(scored)
        return samples
