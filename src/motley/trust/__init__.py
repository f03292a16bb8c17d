"""Who and what is believed. Imports without torch."""

from motley.trust.admission import Admission, Rules

__all__ = ["Admission", "Rules"]
