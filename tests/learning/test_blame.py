from __future__ import annotations

from math import inf, nan

import pytest

from motley.learning.blame import Blame, OwnFault, blame


@pytest.mark.parametrize(
    ("norm_of", "strangers", "guilty"),
    [
        ({"me": 1.0, "a": nan, "b": 2.0}, {"a", "b"}, ("a",)),
        ({"me": 1.0, "a": nan, "b": inf}, {"a", "b"}, ("a", "b")),
        ({"a": inf}, {"a"}, ("a",)),  # alone in the step
        ({"me": 1e38, "a": 3e38, "b": 2e38}, {"a", "b"}, ("a",)),  # only their sum is too large
    ],
)
def test_strangers_whose_gradient_is_no_number_are_named(
    norm_of: dict[str, float], strangers: set[str], guilty: tuple[str, ...]
) -> None:
    assert blame(norm_of, strangers, weights_are_finite=True) == Blame(guilty)


@pytest.mark.parametrize(
    ("norm_of", "strangers", "fine", "words"),
    [
        ({"me": nan, "a": 1.0}, {"a"}, True, "own sequences"),
        ({"me": nan, "a": nan}, {"a"}, True, "own sequences"),
        ({"me": 3e38}, set(), True, "own sequences"),
        ({"a": nan, "b": nan}, {"a", "b"}, True, "the peer's own model"),
        ({"a": nan, "b": 1.0}, {"a", "b"}, False, "own weights are no longer numbers"),
    ],
)
def test_what_the_peer_did_itself_is_blamed_on_nobody(
    norm_of: dict[str, float], strangers: set[str], fine: bool, words: str
) -> None:
    found = blame(norm_of, strangers, fine)
    assert isinstance(found, OwnFault)
    assert words in found.words
