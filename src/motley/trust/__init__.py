"""Who and what is believed. Imports without torch."""

from motley.trust.admission import MAX_REWARD, Admission, Rules

__all__ = ["MAX_REWARD", "Admission", "Rules"]
