"""Rescoring: a stranger's rewards, computed again by the reader. Owns how tokens become text for
it; what is compared with what is admission's (`trust/admission.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from motley.peers.sampling import SamplerHalf, rules_of
from motley.records import Problem, Rollout
from motley.trust import Admission
from motley.trust.rewards import in_short
from motley.trust.steadiness import Steadiness


@dataclass(frozen=True, slots=True)
class Rescoring:
    half: SamplerHalf

    def __call__(self, problem: Problem, rollouts: Sequence[Rollout]) -> list[float]:
        """Rewards as found here. What another peer of this process found is not found again."""
        return self.of_texts(problem, self._texts(rollouts))

    def of_texts(self, problem: Problem, texts: Sequence[str]) -> list[float]:
        """The same of answers in another vocabulary, which were read by its table."""
        return self.half.scorer.group(problem, texts)

    def anew(self, problem: Problem, rollouts: Sequence[Rollout]) -> list[float]:
        """Rewards as they are found now, whatever was found before."""
        return self.half.scorer.score([problem] * len(rollouts), self._texts(rollouts))

    def shown(self, rollout: Rollout) -> str:
        """What it says, short and without anything that a terminal would obey."""
        (text,) = self._texts([rollout])
        return in_short(text)

    def _texts(self, rollouts: Sequence[Rollout]) -> list[str]:
        return self.half.texts(r.tokens for r in rollouts)


def admission_of(half: SamplerHalf, hub: bytes, reads_all_of: Callable[[str], bool]) -> Admission:
    """How a peer judges records; rewards of others by computing them again, unless the crew file
    says otherwise.
    """
    again, checked = Rescoring(half), half.config.crew.check_rewards
    return Admission(
        rules_of(half),
        hub,
        lru_cache(maxsize=256)(half.problems),
        again if checked else None,
        half.me.name,
        again.shown,
        Steadiness(again.anew, again.shown) if checked and half.me.role != "learner" else None,
        again.of_texts,
        half.tables,
        reads_all_of,
    )
