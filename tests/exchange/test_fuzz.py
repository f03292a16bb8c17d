from __future__ import annotations

import json
import subprocess
import sys

import pytest

import fuzz


@pytest.mark.slow
def test_changed_records_are_refused_by_name_and_never_raise() -> None:
    # a process of its own: what it holds is then what admission holds, and no other test
    command = [sys.executable, fuzz.__file__, "--records", "8000", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    result = json.loads(ended.stdout)
    assert (result["failures"], ended.returncode) == ([], 0)
    assert sum(result["outcomes"].values()) == result["records"] == 8000
    every_way_out = {
        "admitted",
        "hub",
        "malformed",
        "corrupt",
        "truncated",
        "signature",
        "key",
        "fork",
        "revoked",
        "reward",
        "logprob",
        "size",
        "inflated",
        "sampling",
        "version",
        "time",
        "model",
        "group_size",
        "length",
        "ending",
        "subject",
        "sender",
        "assignment",
        "role",
        "copied",
        "vocabulary",
        "table",
    }
    assert every_way_out <= set(result["outcomes"])


@pytest.mark.slow
def test_the_same_seed_makes_the_same_changes() -> None:
    first, second, other = (fuzz.fuzz(100, seed) for seed in (1, 1, 2))
    assert (first.outcomes, first.kinds) == (second.outcomes, second.kinds)
    assert first.outcomes != other.outcomes
