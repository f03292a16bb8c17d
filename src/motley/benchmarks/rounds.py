"""What a round of a crew costs beside sampling and learning: rewards, and reports of it."""

from __future__ import annotations

import statistics
import tempfile
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from motley.clock import RealClock, timed
from motley.config import CrewConfig, parse_config
from motley.runs.local import LocalCrew
from motley.runs.metrics import Timing

UNCOUNTED = 2  # rounds at first, in which memory is taken

_CREW = """
[crew]
name = "bench"
task = "digits"
objective = "grpo"
rounds = {rounds}
group_size = {samples}
problems_per_round = {problems}
[sampling]
max_tokens = {tokens}
[learning]
checkpoint_every = {rounds}
[evaluate]
every = {rounds}
problems = 1
[[peer]]
name = "bench"
model = "{model}"
device = "cpu"
"""


class RoundCost(NamedTuple):
    """Medians over rounds, as shares of a round's time by the clock."""

    round_s: float
    rewards: float  # waiting for them
    reports: float  # neither sampling nor learning: metrics, and what drives the crew

    @property
    def beside(self) -> float:
        return self.rewards + self.reports


def round_cost(model: str, sizes: tuple[int, int, int], repeats: int) -> RoundCost:
    """Of a crew of one; `sizes` are problems, samples of each, and tokens.

    Evaluation and checkpoints come with the last round, which is not counted.
    """
    problems, samples, tokens = sizes
    text = _CREW.format(
        rounds=UNCOUNTED + repeats + 1,
        samples=samples,
        problems=problems,
        tokens=tokens,
        model=model,
    )
    return _measured(parse_config(text), repeats)


def _measured(config: CrewConfig, repeats: int) -> RoundCost:
    clock, costs = RealClock(), []
    with tempfile.TemporaryDirectory() as folder:
        rounds = LocalCrew.start(config, Path(folder) / "run").rounds()
        for _ in islice(rounds, UNCOUNTED):
            pass
        for _ in range(repeats):
            lines, round_s = timed(lambda: next(rounds), clock)
            costs.append(_cost(lines[0].timing, round_s))
    return RoundCost(*map(statistics.median, zip(*costs, strict=True)))


def _cost(timing: Timing | None, round_s: float) -> RoundCost:
    assert timing
    assert timing.learn_s is not None
    rewards_s = timing.reward_s or 0.0
    reports_s = round_s - timing.sample_s - timing.learn_s
    return RoundCost(round_s, rewards_s / round_s, reports_s / round_s)
