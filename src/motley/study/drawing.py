"""Crews that nobody chose: kinds, sizes, skills and number of peers are drawn by a seed.

What wins on the crew it was tuned on is not yet a method. A seed written down before the first run
gives crews that no tuning saw.
"""

from __future__ import annotations

import random

from motley.config import Crew, CrewConfig, Evaluate, Learning, PeerConfig, Warm
from motley.records import Sampling

# Kinds that tiny models learn in minutes, and the lengths at which they do.
FAMILIES = (
    (("reverse", "sort", "increment", "compare"), (3, 4)),
    (("sum", "difference", "chain", "compare"), (2,)),
)
MODELS = ("tiny:0.3m", "tiny:1m", "tiny:deep")
STRONG, WEAK = (0.5, 0.75), (0.01, 0.02, 0.05)  # how often sampled answers are right at the start
STRONG_SHARE = 0.4
PROBLEMS = 24  # what 2, 3 and 4 peers share evenly


def drawn_crews(number: int, seed: int) -> list[CrewConfig]:
    """As many crews, each by a draw of its own: more of them leave the first as they are."""
    return [_drawn(random.Random(f"{seed}/{i}"), f"drawn_{seed}_{i}") for i in range(number)]


def _drawn(rng: random.Random, name: str) -> CrewConfig:
    kinds, levels = rng.choice(FAMILIES)
    chosen = rng.sample(kinds, rng.choice((2, 3)))
    level = rng.choice(levels)
    peers = [_peer(rng, f"peer{i}", chosen) for i in range(rng.choice((2, 3, 4)))]
    return CrewConfig(
        crew=Crew(
            name=name,
            task="digits",
            objective="ftis",
            rounds=100,
            problems_per_round=PROBLEMS,
            group_size=12,
        ),
        task={"kinds": chosen, "levels": [level]},
        sampling=Sampling(max_tokens=8),
        learning=Learning(lr=rng.choice((1e-4, 2e-4)), checkpoint_every=100),
        evaluate=Evaluate(every=10, problems=200),
        peer=tuple(peers),
    )


def _peer(rng: random.Random, name: str, kinds: list[str]) -> PeerConfig:
    skill = {
        kind: rng.choice(STRONG if rng.random() < STRONG_SHARE else WEAK) for kind in sorted(kinds)
    }
    return PeerConfig(name=name, model=rng.choice(MODELS), warm=Warm(accuracy=skill))
