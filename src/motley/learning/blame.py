"""Blame: whose fault it is that a step is not finite.

A stranger is left out and named. Only what the peer did itself stops it, in words that say so.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import NamedTuple


class Blame(NamedTuple):
    """A gradient cannot be stepped along because of some strangers' sequences."""

    senders: tuple[str, ...]


class OwnFault(NamedTuple):
    """It is the peer's own."""

    words: str


def blame(
    norm_of: dict[str, float], strangers: Set[str], weights_are_finite: bool
) -> Blame | OwnFault:
    """Judge by the norm of the gradient that each sender's sequences give alone."""
    if not weights_are_finite:
        return OwnFault("The peer's own weights are no longer numbers")
    guilty = [peer for peer, norm in norm_of.items() if not math.isfinite(norm)]
    if not guilty and strangers:  # each is finite, and their sum is not
        guilty = [max(strangers, key=lambda peer: norm_of[peer])]
    if not set(guilty) <= strangers or not guilty:
        return OwnFault("The peer's own sequences make it so")
    if len(guilty) == len(norm_of) > 1:
        return OwnFault("Every sender's sequences make it so, so it is the peer's own model")
    return Blame(tuple(guilty))
