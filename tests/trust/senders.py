"""Simulated senders for the audit: small random language models, honest or not, and a receiver.

    python tests/trust/senders.py --senders 2000

Draws senders of many kinds, each audited over some thousand tokens, and prints how many honest ones
were taken for liars, and after how many tokens liars were caught.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motley.records import Group, Origin, Rollout, Sampling
from motley.trust.audit import Audit

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """A sender: how large its vocabulary is, how sure it is, how unlike the receiver, how noisy."""

    vocabulary: int
    sharpness: float
    apart: float  # spread of the receiver's logits around the sender's
    sampling: Sampling
    noise: float = 0.0  # scale of the engine's error in a log-prob, with heavy tails
    lie: float = 0.0  # nats taken off every reported log-prob
    length: int = 12
    group: int = 8


class SimulatedSender:
    """A bigram model whose logits also hang on the place and the problem."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.kind, self.rng = kind, np.random.default_rng(seed)
        size, rng = kind.vocabulary, self.rng
        self._after = kind.sharpness * rng.standard_normal((size, size))
        self._at = kind.sharpness * rng.standard_normal((kind.length, size))
        self._off = kind.apart * rng.standard_normal((size, size))

    def group(self, number: int) -> tuple[Group, list[Floats]]:
        """A group, and the receiver's log-ratios of its tokens."""
        kind, rng = self.kind, self.rng
        problem = kind.sharpness * rng.standard_normal(kind.vocabulary)
        last = np.zeros(kind.group, dtype=int)
        tokens, logq, ratio = [], [], []
        for place in range(kind.length):
            logits = self._after[last] + self._at[place] + problem
            drawn, reported, full = _draw(logits, kind.sampling, rng)
            own = _log_softmax((logits + self._off[last]) / kind.sampling.temperature)
            said = reported if kind.sampling.logprobs == "sampled" else full
            said = np.minimum(said + _noise(kind, said, rng) - kind.lie, 0.0)
            said = np.round(said * 1700) / 1700  # as on the wire
            tokens.append(drawn)
            logq.append(said)
            ratio.append(own[np.arange(kind.group), drawn] - said)
            last = drawn
        rollouts = tuple(
            Rollout(tokens=tuple(t), logprobs=tuple(q), reward=0.0, ending="length")
            for t, q in zip(np.array(tokens).T.tolist(), np.array(logq).T.tolist(), strict=True)
        )
        origin = Origin(peer="s", model="m", vocabulary="v", version=0, sampling=kind.sampling)
        group = Group(
            crew="c",
            problem="p",
            round=number,
            slot=0,
            origin=origin,
            rollouts=rollouts,
            created_s=0.0,
        )
        return group, list(np.array(ratio).T)


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _draw(
    logits: Floats, sampling: Sampling, rng: np.random.Generator
) -> tuple[NDArray[np.int_], Floats, Floats]:
    """Tokens, their log-probs as drawn, and under the full softmax."""
    full = _log_softmax(logits / sampling.temperature)
    order = np.argsort(-full, axis=1)
    ranked = np.take_along_axis(full, order, 1)
    before = np.cumsum(np.exp(ranked), axis=1) - np.exp(ranked)
    kept = before < sampling.top_p
    if sampling.top_k:
        kept &= np.arange(full.shape[1]) < sampling.top_k
    cut = _log_softmax(np.where(kept, ranked, -np.inf))
    place = (rng.random((len(full), 1)) > np.cumsum(np.exp(cut), axis=1)).sum(1)
    rows, place = np.arange(len(full)), np.minimum(place, kept.sum(1) - 1)
    drawn = order[rows, place]
    return drawn, cut[rows, place], full[rows, drawn]


def _noise(kind: Kind, logq: Floats, rng: np.random.Generator) -> Floats:
    """As between engine and trainer in bfloat16: mean size `noise`, one in 1,000 ten times that.

    Sure tokens have less: a logit's error moves log q by (1 - q) of itself.
    """
    if not kind.noise:
        return np.zeros_like(logq)
    return kind.noise * rng.standard_t(4, logq.shape) / 0.94 * (1 - np.exp(logq)) * 1.5


def audited(kind: Kind, seed: int, most_tokens: int, alpha: float) -> int | None:
    """After how many tokens a sender was caught; None: not within so many."""
    sender = SimulatedSender(kind, seed)
    audit = Audit(kind.sampling, kind.vocabulary, alpha)
    for number in range(most_tokens // (kind.length * kind.group)):
        group, ratios = sender.group(number)
        audit.hear(group)
        audit.compare("s", ratios)
        if audit.lie("s"):
            return (number + 1) * kind.length * kind.group
    return None


def honest_kind(rng: np.random.Generator) -> Kind:
    """One of many: models near and far, temperatures, truncation, conventions, engine noise."""
    sampling = Sampling(
        temperature=float(rng.choice([0.6, 0.7, 1.0, 1.2])),
        top_k=int(rng.choice([0, 0, 5, 20])),
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.95])),
        max_tokens=16,
        logprobs=str(rng.choice(["sampled", "sampled", "full"])),  # type: ignore[arg-type]
    )
    return Kind(
        vocabulary=int(rng.choice([16, 40, 200])),
        sharpness=float(rng.choice([0.5, 1.0, 2.0, 3.0])),
        apart=float(rng.choice([0.0, 0.1, 0.5, 2.0])),
        sampling=sampling,
        noise=float(rng.choice([0.0, 0.002, 0.016])),
        length=int(rng.choice([3, 8, 20])),
        group=int(rng.choice([4, 8, 12])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--senders", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first sender")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--alpha", type=float, default=1e-2)
    parser.add_argument("--liars", type=int, default=20)
    asked = parser.parse_args()
    alarms, start = 0, time.monotonic()
    for number in range(asked.senders):
        kind = honest_kind(np.random.default_rng(asked.first + number))
        caught = audited(kind, asked.first + number, asked.tokens, asked.alpha)
        if caught is not None:
            alarms += 1
            print(f"false alarm: {kind} after {caught} tokens", file=sys.stderr)
        if number % 100 == 99:
            took = time.monotonic() - start
            left = took / (number + 1) * (asked.senders - number - 1)
            print(f"{number + 1} senders, {alarms} alarms, {left:.0f} s left", file=sys.stderr)
    table: dict[str, object] = {
        "honest": asked.senders,
        "tokens_each": asked.tokens,
        "alpha": asked.alpha,
        "false_alarms": alarms,
    }
    for lie, most in ((0.05, 10_000), (0.5, 1_000), (-0.5, 10_000)):
        for apart in (0.0, 0.1, 0.5):
            kind = Kind(40, 1.0, apart, Sampling(max_tokens=16), noise=0.002, lie=lie)
            found = [audited(kind, seed, most, asked.alpha) for seed in range(asked.liars)]
            times = sorted(t for t in found if t is not None)
            table[f"lie {lie} nat, receiver {apart} apart"] = {
                "caught": len(times),
                "of": asked.liars,
                "within": most,
                "median_tokens": times[len(times) // 2] if times else None,
            }
    print(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
