"""One learner and two samplers as processes on a hub, killed at random (`python tests/samplers.py`
does it at length).
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from chaos import disturbed_run
from motley.runs.metrics import read_metrics
from samplers import SAMPLERS, faults_of, roles_crew

pytestmark = pytest.mark.slow  # a process per peer

SEED = 5
MOST_RUNS = 20


def test_far_samplers_and_their_learner_survive_kills_and_lose_nothing_that_was_published(
    task: Path, tmp_path: Path
) -> None:
    rng, killed = random.Random(SEED), Counter[str]()
    for number in range(MOST_RUNS):  # a fast machine may be through before anybody is killed
        config = roles_crew(task, delay_s=0.5, rounds=12, seed=number)
        folder = tmp_path / f"run{number}"
        killed += disturbed_run(config, folder, rng, kills=5, timeout_s=600)
        assert faults_of(config, folder) == []
        if killed["learner"] and any(killed[name] for name in SAMPLERS):
            return
    raise AssertionError(f"killed in {MOST_RUNS} runs: {dict(killed)}")


def test_a_learner_with_checkpoints_on_the_way_a_window_in_seconds_and_a_reference(
    task: Path, tmp_path: Path
) -> None:
    rules = 'max_age_s = 60.0\n[objective]\nbeta = 0.005\ntoward = "reference"'
    config = roles_crew(task, delay_s=0.3, rounds=10, checkpoint_every=3, learning=rules)
    disturbed_run(config, tmp_path / "run", random.Random(SEED), kills=3, timeout_s=600)
    assert faults_of(config, tmp_path / "run") == []
    lines = read_metrics(tmp_path / "run" / "learner")
    assert sum(sum(line.ages.values()) for line in lines[1:]) == 10 * config.crew.problems_per_round
    assert lines[-1].reference_kl > 0
