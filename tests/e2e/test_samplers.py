"""One learner and two samplers as processes on a hub, killed at random (`python tests/samplers.py`
does it at length).
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from chaos import disturbed_run
from motley.run import read_metrics
from samplers import SAMPLERS, faults_of, roles_crew

pytestmark = pytest.mark.slow  # a process per peer

SEED = 5


def test_far_samplers_and_their_learner_survive_kills_and_lose_nothing_that_was_published(
    task: Path, tmp_path: Path
) -> None:
    rng, killed, runs = random.Random(SEED), Counter(), 0
    # a fast machine may be through before
    while not (killed["learner"] and any(killed[name] for name in SAMPLERS)):
        assert runs < 20, f"in {runs} runs only these were killed: {dict(killed)}"
        config = roles_crew(task, delay_s=0.5, rounds=12, seed=runs)
        folder = tmp_path / f"run{runs}"
        killed += disturbed_run(config, folder, rng, kills=5, timeout_s=600)
        assert faults_of(config, folder) == []
        runs += 1


def test_a_learner_with_checkpoints_on_the_way_and_a_window_in_seconds(
    task: Path, tmp_path: Path
) -> None:
    config = roles_crew(
        task, delay_s=0.3, rounds=10, checkpoint_every=3, learning="max_age_s = 60.0"
    )
    disturbed_run(config, tmp_path / "run", random.Random(SEED), kills=3, timeout_s=600)
    assert faults_of(config, tmp_path / "run") == []
    lines = read_metrics(tmp_path / "run" / "learner")
    assert (
        sum(sum(line["ages"].values()) for line in lines[1:]) == 10 * config.crew.problems_per_round
    )
