"""What a suite found, a row per attack and defence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from motley.attacks.attack import Attack
from motley.attacks.fuzzing import NAME, WANTS, Fooled
from motley.attacks.suite import AttackTrial
from motley.study.statistics import Estimate, interval

Cell = str | float | None


@dataclass(frozen=True, slots=True)
class AttackRow:
    """Estimates are over seeds; what is lost is paired by seed with the crew without the attack."""

    attack: str
    wants: str
    defended: bool | None = None  # None: not mounted
    success: Estimate | None = None
    without: Estimate | None = None  # the same measure where nobody attacks
    accuracy: Estimate | None = None
    lost: Estimate | None = None
    detected: tuple[int | None, ...] = ()  # round, per seed
    false_alarms: float | None = None
    note: str = ""

    def cells(self) -> dict[str, Cell]:
        """For a table."""
        return {
            "attack": self.attack,
            "defences": {None: "", True: "on", False: "off"}[self.defended],
            "success": _percent(self.success),
            "without attack": _percent(self.without),
            "accuracy": _percent(self.accuracy),
            "accuracy lost": _percent(self.lost),
            "detected in round": self._rounds(),
            "false alarms": None if self.false_alarms is None else f"{self.false_alarms:.1%}",
            "note": self.note,
        }

    def _rounds(self) -> str:
        return ", ".join("never" if r is None else str(r) for r in self.detected)

    def plain(self) -> dict[str, object]:
        """For JSON."""
        estimates = {
            name: {"mean": value.mean, "half_width": _number(value.half_width)}
            for name, value in (
                ("success", self.success),
                ("without_attack", self.without),
                ("accuracy", self.accuracy),
                ("accuracy_lost", self.lost),
            )
            if value is not None
        }
        return {
            "attack": self.attack,
            "wants": self.wants,
            "defended": self.defended,
            **estimates,
            "detected_in_round": list(self.detected),
            "false_alarms": self.false_alarms,
            "note": self.note,
        }


def _percent(value: Estimate | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value


def rows_of(attack: Attack, trials: Sequence[AttackTrial]) -> list[AttackRow]:
    """Without defences, then with them, as far as there are trials."""
    return [
        _row(attack, own, [t for t in trials if not t.attack and t.defended == defended])
        for defended in (False, True)
        if (own := [t for t in trials if t.attack == attack.name and t.defended == defended])
    ]


def _row(attack: Attack, own: Sequence[AttackTrial], free: Sequence[AttackTrial]) -> AttackRow:
    beside = {t.seed: t for t in free if t.crew == own[0].crew}
    stopped = [f"seed {t.seed} stopped {t.stopped}" for t in own if t.stopped]
    return AttackRow(
        attack=attack.name,
        wants=attack.wants,
        defended=own[0].defended,
        success=interval([t.success[attack.name] for t in own]),
        without=interval([beside[t.seed].success[attack.name] for t in own]),
        accuracy=interval([t.accuracy for t in own]),
        lost=interval([beside[t.seed].accuracy - t.accuracy for t in own]),
        detected=tuple(t.detected for t in own),
        false_alarms=float(np.mean([t.false_alarms for t in own])),
        note="; ".join(stopped),
    )


def unmounted_row(attack: Attack, reason: str) -> AttackRow:
    return AttackRow(attack=attack.name, wants=attack.wants, note=f"not mounted: {reason}")


def fuzz_row(found: Sequence[Fooled]) -> AttackRow:
    said = [f"{one.text!r} for {one.answer!r}" for one in found[:3]]
    note = f"{len(found)} found, such as {', '.join(said)}" if found else "none found"
    return AttackRow(attack=NAME, wants=WANTS, success=interval([float(bool(found))]), note=note)
