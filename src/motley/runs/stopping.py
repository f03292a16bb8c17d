"""Stopping: when a crew is over before its last round, and the best model that a peer had.

Both go by held-out rewards, as lines of metrics have them: what is on the disk decides, so a
resumed run decides the same.

RUN/best/PEER/round-N/model   an ordinary model folder, whole and hashed as checkpoints are
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from motley.config import Evaluate
from motley.learning.checkpoint import (
    CheckpointError,
    checkpoints,
    load_manifest,
    save_checkpoint,
)
from motley.models.policy import Policy
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


# The best model


def keep_best(root: Path, policy: Policy, now: Best) -> None:
    """Keep a model in place of the one that was the best; no other is better than that."""
    kept = checkpoints(root)
    with suppress(CheckpointError):  # a damaged one is no best
        if kept and load_manifest(kept[-1], Best).heldout >= now.heldout:
            return
    newest = save_checkpoint(root, now.round, now, lambda folder: policy.save(folder / "model"))
    for old in checkpoints(root):
        if old != newest:
            shutil.rmtree(old)


def best_checkpoint(folder: Path, peer: str) -> Path:
    """Where a peer's best model is, in its own run folder."""
    kept = checkpoints(folder / "best" / peer)
    if not kept:
        raise ValueError(
            f"{folder} has no best checkpoint of {peer}; it is kept where evaluate.stop_after "
            "or evaluate.stop_at is set; leave --best out for the newest one"
        )
    return kept[-1]
