"""Stopping: when a crew is over before its last round.

It goes by held-out rewards, as lines of metrics have them: what is on the disk decides, so a
resumed run decides the same. Imports without torch, for those who only read.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from motley.config import Evaluate
from motley.runs.metrics import ByKind, FirstLine, MetricsLine, mean


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """When a model was the best, and how good: its mean over kinds of held-out rewards."""

    round: int
    heldout: float


@dataclass(slots=True)
class _Record:
    best: Best
    since: int = 0  # evaluations that were no better


class Stopping:
    """Hears every line of everyone who learns here, in order."""

    def __init__(self, rules: Evaluate) -> None:
        self._rules = rules
        self._records: dict[str, _Record] = {}

    def hear(self, line: MetricsLine | FirstLine) -> None:
        heldout: ByKind | None = getattr(line, "heldout", None)
        if not heldout:
            return
        now = Best(round=line.round, heldout=mean(heldout))
        record = self._records.setdefault(line.peer, _Record(now))
        if now.heldout > record.best.heldout:
            record.best, record.since = now, 0
        elif now.round > record.best.round:
            record.since += 1

    @property
    def reason(self) -> str:
        """Why there is nothing more to wait for, of anyone; empty while there is."""
        words = [self._words(peer, record) for peer, record in self._records.items()]
        return "; ".join(words) if words and all(words) else ""

    def _words(self, peer: str, record: _Record) -> str:
        rules, best = self._rules, record.best
        if rules.stop_at is not None and best.heldout >= rules.stop_at:
            return (
                f"{peer} had {best.heldout:.3g} on held-out problems after round {best.round} "
                f"(stop_at = {rules.stop_at:g})"
            )
        if 0 < rules.stop_after <= record.since:
            return (
                f"{peer} was no better than the {best.heldout:.3g} of round {best.round} in "
                f"{record.since} evaluations (stop_after = {rules.stop_after})"
            )
        return ""
