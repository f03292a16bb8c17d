from __future__ import annotations

import pytest

from fuzz import fuzz


@pytest.mark.slow
def test_changed_records_are_refused_by_name_and_never_raise() -> None:
    result = fuzz(8000)
    assert result.failures == []
    assert result.outcomes.total() == result.records == 8000
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
    assert every_way_out <= set(result.outcomes)


@pytest.mark.slow
def test_the_same_seed_makes_the_same_changes() -> None:
    first, second, other = fuzz(100, seed=1), fuzz(100, seed=1), fuzz(100, seed=2)
    assert (first.outcomes, first.kinds) == (second.outcomes, second.kinds)
    assert first.outcomes != other.outcomes
