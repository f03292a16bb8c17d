"""Notes: what micro-batches came out with, on its way from the device to the rows of a step.

Waits for a GPU only where a note is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from motley.compute.logprobs import Scores
from motley.learning.batches import MicroBatch
from motley.learning.diagnostics import Floats, Row, ScoredRow
from motley.learning.readings import RolloutSpans
from motley.objectives import LossBatch, LossOutput
from motley.objectives.ratios import k3


class Note(NamedTuple):
    """What a micro-batch came out with."""

    arrived: torch.cuda.Event | None
    row_B: list[int]
    table_KBT: Tensor  # log ratio, weight, free weight, sampler's log-prob, entropy, dloss
    keep_B: Tensor
    kl_B: Tensor
    loss: Tensor
    # what has moved since the round began: tokens clipped, sum of k3, tokens; none in a first pass
    moved_K: Tensor
    ref_K: Tensor  # what has moved since the run began: sum of k3, tokens; none without a reference


class Overheard(NamedTuple):
    """The log ratios of a micro-batch that nothing is learned from, still on the device.

    Of spans each token has its share.
    """

    row_B: list[int]
    log_ratio_BT: Tensor

    def by_row(self) -> dict[int, Floats]:
        """Padded on the right."""
        return dict(zip(self.row_B, self.log_ratio_BT.double().cpu().numpy(), strict=True))


def compared(log_ratio_T: Floats, spans: RolloutSpans | None) -> Floats:
    """What is compared of a sequence: its tokens, or its spans."""
    return log_ratio_T if spans is None else spans.sums(log_ratio_T)


def note(
    micro: MicroBatch,
    scores: Scores,
    loss_batch: LossBatch,
    output: LossOutput,
    dloss_BT: Tensor,  # with respect to log-probs
) -> Note:
    tables = (
        loss_batch.shared_log_ratio_BT,
        output.weight_BT,
        output.free_BT,
        loss_batch.logp_sampler_BT,
        micro.unpack(scores.entropy_M),
        dloss_BT,
    )
    kept = (
        torch.stack([table.detach() for table in tables]),
        output.keep_B,
        output.kl_B,
        output.loss.detach(),
        _moved(loss_batch, output),
        _moved_since_the_start(loss_batch),
    )
    on_cpu = [one.to("cpu", non_blocking=one.is_cuda) for one in kept]
    device = scores.logp_M.device
    arrived = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    return Note(arrived, micro.row_B.tolist(), *on_cpu)


def _moved(batch: LossBatch, output: LossOutput) -> Tensor:
    if batch.logp_start_BT is None:
        return batch.logp_sampler_BT.new_empty(0)
    clipped_BT = batch.mask_BT & (output.factor_BT == 0)
    counts = [clipped_BT.sum(), k3(batch.moved_BT.detach()).sum(), batch.mask_BT.sum()]
    return torch.stack([count.float() for count in counts])


def _moved_since_the_start(batch: LossBatch) -> Tensor:
    if batch.logp_ref_BT is None:
        return batch.logp_sampler_BT.new_empty(0)
    counts = [k3(batch.ref_log_ratio_BT.detach()).sum(), batch.mask_BT.sum()]
    return torch.stack([count.float() for count in counts])


def reference_kl(notes: Sequence[Note]) -> float | None:
    """Mean k3 over all tokens of some notes that have come; None without a reference."""
    counts = [one.ref_K for one in notes if len(one.ref_K)]
    if not counts:
        return None
    divergence, tokens = torch.stack(counts).sum(0).tolist()
    return float(divergence / tokens)


def note_scores(rows: list[Row], note: Note) -> None:
    """Write what was computed for each sequence of a micro-batch into its row."""
    if note.arrived:
        note.arrived.synchronize()
    log_ratio, weight, free, logq, entropy, dloss = note.table_KBT.double().numpy()
    push = -dloss
    length_B = np.array([rows[row].num_tokens for row in note.row_B])
    is_own_BT = np.arange(weight.shape[1]) < length_B[:, None]
    mean_weight_B, mean_logq_B = (
        np.where(is_own_BT, table, 0.0).sum(1) / length_B for table in (weight, logq)
    )
    for i, (row, keep, kl) in enumerate(
        zip(note.row_B, note.keep_B.tolist(), note.kl_B.tolist(), strict=True)
    ):
        own = slice(rows[row].num_tokens)
        rows[row].scored = ScoredRow(
            keep=keep,
            kl=kl,
            log_ratio=compared(log_ratio[i, own], rows[row].spans),
            weight=weight[i, own],
            mean_weight=float(mean_weight_B[i]),
            free=free[i, own],
            logq=float(mean_logq_B[i]),
            entropy=entropy[i, own],
            push=push[i, own],
        )
