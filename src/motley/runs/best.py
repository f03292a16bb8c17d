"""The best model that a peer had, by held-out rewards.

RUN/best/PEER/round-N/model   an ordinary model folder, whole and hashed as checkpoints are
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from motley.learning.checkpoint import (
    CheckpointError,
    checkpoints,
    load_manifest,
    save_checkpoint,
)
from motley.models.policy import Policy
from motley.runs.stopping import Best


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
