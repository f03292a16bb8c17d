"""Study plans: what a study asks, and what it claims."""

from __future__ import annotations

from typing import Literal

import msgspec


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an arm is said to be against another, and by how much."""

    text: str
    arm: str
    against: str
    is_: Literal["better", "equivalent", "not worse"] = msgspec.field(name="is")
    margin: float = 0.0
    on: str = "mean"
