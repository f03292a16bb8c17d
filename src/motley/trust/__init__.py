"""Who and what is believed. Imports without torch."""

from motley.trust.admission import (
    MAX_REWARD,
    Admission,
    Admitted,
    Refusal,
    Rules,
    known,
    read_hub,
    stamp_of,
)
from motley.trust.identity import Identity, nkey_of, verifies

__all__ = [
    "MAX_REWARD",
    "Admission",
    "Admitted",
    "Identity",
    "Refusal",
    "Rules",
    "known",
    "nkey_of",
    "read_hub",
    "stamp_of",
    "verifies",
]
