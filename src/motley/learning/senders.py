"""What came from one sender of a step, as a metrics line has it. docs/metrics.md has every key.

Knows no formula; imports without torch, for those who only read.
"""

from __future__ import annotations

import msgspec

Number = float | None  # None: a mean over nothing, or what JSON has no number for
IfScored = float | None | msgspec.UnsetType  # unset: no sequence of the sender was scored


class Distribution(msgspec.Struct, frozen=True):
    mean: Number
    max: Number
    q05: Number
    q50: Number
    q95: Number


class Spread(Distribution, frozen=True):
    var: Number


class SenderMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What came from one sender, in the order of the keys of its JSON."""

    groups: int
    sequences: int | msgspec.UnsetType = msgspec.UNSET  # unset: in an old line
    reward: Number
    accuracy: Number
    tokens: Number
    truncated: Number
    age: Number
    silent_groups: int
    kl_k1: IfScored = msgspec.UNSET
    kl_k3: IfScored = msgspec.UNSET
    kl_reverse: IfScored = msgspec.UNSET
    ratio: Distribution | msgspec.UnsetType = msgspec.UNSET
    weight: Distribution | msgspec.UnsetType = msgspec.UNSET
    weight_var: IfScored = msgspec.UNSET
    free_weight: Spread | msgspec.UnsetType = msgspec.UNSET
    clipped: IfScored = msgspec.UNSET
    estimation_error: IfScored = msgspec.UNSET
    flatness: IfScored = msgspec.UNSET
    ess: IfScored = msgspec.UNSET
    filter_kl: Distribution | msgspec.UnsetType = msgspec.UNSET
    filtered_positive: IfScored = msgspec.UNSET
    filtered_negative: IfScored = msgspec.UNSET
    tau_before: IfScored = msgspec.UNSET
    tau_after: IfScored = msgspec.UNSET
    entropy: IfScored = msgspec.UNSET
    withheld: IfScored = msgspec.UNSET
    pull: IfScored = msgspec.UNSET
    grad_scale: IfScored = msgspec.UNSET
    # unset: the sender has the learner's own vocabulary
    span_bytes: IfScored = msgspec.UNSET
    span_tokens: IfScored = msgspec.UNSET
    text_only: IfScored = msgspec.UNSET
    uncut: IfScored = msgspec.UNSET

    def number(self, key: str) -> float | None:
        """The number under a key, of a distribution its mean; None where nothing was measured."""
        value: float | Distribution | msgspec.UnsetType | None = getattr(self, key)
        if isinstance(value, Distribution):
            return value.mean
        return None if isinstance(value, msgspec.UnsetType) else value
