"""When a crew is over before its last round, and the best model of a peer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes import tiny_policy
from motley.config import Evaluate
from motley.learning.checkpoint import load_manifest
from motley.runs.best import best_checkpoint, keep_best
from motley.runs.metrics import FirstLine, LearnerLine, SamplerLine
from motley.runs.stopping import Best, Stopping


def heard(values: dict[str, list[float | None]], **rules: float) -> Stopping:
    """Evaluations of some peers, round by round; None: a round without one."""
    stopping = Stopping(Evaluate(**rules))  # type: ignore[arg-type]
    for round in range(max(map(len, values.values()))):
        for peer, measured in values.items():
            value = measured[round] if round < len(measured) else None
            heldout = None if value is None else {"sort": value - 0.1, "sum": value + 0.1}
            stopping.hear(LearnerLine(round=round, peer=peer, heldout=heldout))
    return stopping


def test_a_crew_goes_on_while_one_of_its_peers_does_better() -> None:
    assert heard({"a": [0.5, 0.4, 0.4], "b": [0.1, 0.2, 0.3]}, stop_after=2).reason == ""
    assert heard({"a": [0.5, 0.4, 0.4], "b": [0.1, 0.2, 0.3, 0.3]}, stop_after=2).reason == ""


def test_it_is_over_when_nobody_has_done_better_for_so_many_evaluations() -> None:
    reason = heard({"a": [0.5, 0.4, 0.4, 0.5], "b": [0.1, 0.3, 0.3, 0.2]}, stop_after=2).reason
    assert reason == (
        "a was no better than the 0.5 of round 0 in 3 evaluations (stop_after = 2); "
        "b was no better than the 0.3 of round 1 in 2 evaluations (stop_after = 2)"
    )


def test_who_does_better_again_is_waited_for_again() -> None:
    values = [0.5, 0.4, 0.4, 0.6]
    assert heard({"a": values[:3]}, stop_after=2).reason
    assert not heard({"a": values}, stop_after=2).reason


def test_rounds_without_an_evaluation_do_not_count() -> None:
    assert not heard({"a": [0.5, None, None, 0.4, None]}, stop_after=2).reason
    assert heard({"a": [0.5, None, None, 0.4, None, 0.4]}, stop_after=2).reason


def test_a_value_that_is_enough_stays_enough() -> None:
    stopping = heard({"a": [0.5, 0.9, 0.2], "b": [0.1, 0.2, 0.8]}, stop_at=0.8)
    assert stopping.reason == (
        "a had 0.9 on held-out problems after round 1 (stop_at = 0.8); "
        "b had 0.8 on held-out problems after round 2 (stop_at = 0.8)"
    )


def test_rewards_may_be_below_zero_and_either_rule_will_do() -> None:
    assert heard({"a": [-9.0, -3.0], "b": [-8.0, -2.0]}, stop_at=-4.0).reason
    assert not heard({"a": [-9.0, -5.0], "b": [-8.0, -2.0]}, stop_at=-4.0).reason
    assert heard({"a": [-9.0, -3.0], "b": [-8.0, -9.0]}, stop_at=-4.0, stop_after=1).reason


def test_without_a_rule_nothing_ever_stops() -> None:
    assert not heard({"a": [1.0, *[0.0] * 50]}).reason
    assert not Stopping(Evaluate(stop_after=1)).reason  # nobody was heard


def test_a_first_line_counts_and_a_samplers_does_not() -> None:
    stopping = Stopping(Evaluate(stop_at=0.5))
    stopping.hear(SamplerLine(round=1, peer="s", version=0, reward=1.0, sampled_tokens=3))
    assert not stopping.reason
    stopping.hear(FirstLine(round=0, peer="a", heldout={"sort": 0.5}))
    assert stopping.reason


# The best model


def kept(root: Path) -> list[str]:
    return [path.name for path in sorted(root.iterdir())]


def test_the_best_model_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    first, second = tiny_policy(seed=1), tiny_policy(seed=2)
    root = tmp_path / "best" / "a"
    keep_best(root, first, Best(round=10, heldout=0.5))
    keep_best(root, second, Best(round=20, heldout=0.5))  # no better
    assert kept(root) == ["round-000010"]
    keep_best(root, second, Best(round=30, heldout=0.6))
    assert kept(root) == ["round-000030"]
    found = best_checkpoint(tmp_path, "a")
    assert load_manifest(found, Best) == Best(round=30, heldout=0.6)
    third = tiny_policy(seed=3)
    third.load(found / "model")
    for (name, ours), (_, theirs) in zip(third.trained(), second.trained(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_better_one_of_an_earlier_round_takes_its_place_too(tmp_path: Path) -> None:
    keep_best(tmp_path, tiny_policy(), Best(round=30, heldout=0.5))
    keep_best(tmp_path, tiny_policy(), Best(round=20, heldout=0.6))
    assert kept(tmp_path) == ["round-000020"]


def test_a_damaged_best_is_replaced(tmp_path: Path) -> None:
    keep_best(tmp_path, tiny_policy(), Best(round=10, heldout=0.5))
    (tmp_path / "round-000010" / "model" / "config.json").write_text("{}")
    keep_best(tmp_path, tiny_policy(), Best(round=20, heldout=0.4))
    assert kept(tmp_path) == ["round-000020"]


def test_where_none_is_kept_the_error_says_what_keeps_one(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no best checkpoint of a; .*evaluate.stop_after or evaluate.stop_at"
    ):
        best_checkpoint(tmp_path, "a")
