"""Who and what is believed. Imports without torch."""

from motley.trust.admission import (
    Admission,
    AdmissionState,
    Admitted,
    ReasonCount,
    RefusedRecord,
    Verdict,
    known,
    read_hub,
    stamp_of,
)
from motley.trust.admitted import AdmittedGroups, GroupPlace
from motley.trust.identity import Identity, nkey_of, verifies
from motley.trust.rewards import visible
from motley.trust.rules import Rules
from motley.trust.tables import Tables
from motley.trust.values import MAX_REWARD

__all__ = [
    "MAX_REWARD",
    "Admission",
    "AdmissionState",
    "Admitted",
    "AdmittedGroups",
    "GroupPlace",
    "Identity",
    "ReasonCount",
    "RefusedRecord",
    "Rules",
    "Tables",
    "Verdict",
    "known",
    "nkey_of",
    "read_hub",
    "stamp_of",
    "verifies",
    "visible",
]
