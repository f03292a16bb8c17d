"""RewardCheck: the rewards that a sender claims, held to those that the reader computes.

Owns what is told to people, once each. How an answer becomes a text, and a text a reward, is the
reader's (`peers/rescoring.py`).
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from motley.records import Group, Rollout
from motley.trust.rules import Refusal
from motley.trust.steadiness import Differing, Steadiness, first_differing

_log = logging.getLogger("motley")


class RewardClaim(NamedTuple):
    """Rollouts of a group, and how their rewards are computed here."""

    group: Group
    rollouts: Sequence[Rollout]  # those that the reader can read
    score: Callable[[], Sequence[float]]
    shown: Callable[[Rollout], str]


def in_short(text: str) -> str:
    """A stranger's text without anything that a terminal would obey."""
    return ascii(text if len(text) <= 120 else f"{text[:80]} ... {text[-40:]}")


def visible(text: str) -> str:
    """A text with its line breaks. What else a terminal would obey is spelt: \\x1b."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]
        for letter in text
    )


@dataclass(slots=True)
class RewardCheck:
    _said: set[str] = field(default_factory=set)  # what users were told of rewards, once each

    def check(self, claim: RewardClaim, steadiness: Steadiness | None) -> None:
        """Refuse a group whose rewards come out differently here."""
        try:
            rights = [float(reward) for reward in claim.score()]
            differing = first_differing(claim.rollouts, rights)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a reward function is a user's, and what it is given here is a stranger's; a panic of a tokenizer is no Exception
            self._say(
                f"{type(error).__name__} {getattr(error, 'name', '')}",
                f"group {claim.group.id} is refused: {error}\n{_traceback(error)}",
            )
            raise Refusal(
                "unscorable", f"the reward function failed on it: {type(error).__name__}: {error}"
            ) from None
        if differing:
            self._refuse(claim, differing, steadiness)
        # a sender's word would count here for as much as it likes, and each such answer costs time
        if undecided := [number for number, right in enumerate(rights) if math.isnan(right)]:
            raise Refusal(
                "undecided",
                f"rollout {claim.group.rollouts.index(claim.rollouts[undecided[0]])} takes longer "
                "to score than an answer may",
            )

    def _refuse(
        self, claim: RewardClaim, differing: Differing, steadiness: Steadiness | None
    ) -> None:
        group = claim.group
        detail = (
            f"rollout {group.rollouts.index(differing.rollout)} claims a reward of "
            f"{differing.rollout.reward}; computed here it is {differing.right}"
        )
        blame = partial(
            self._say,
            "differs",
            f"group {group.id} is refused: {detail}, for {claim.shown(differing.rollout)}; where a "
            "reward comes out differently each time, as of a judge, set crew.check_rewards = "
            f"false; otherwise {group.origin.peer} lies, or scores with another program",
        )
        steadiness.doubt(blame) if steadiness else blame()
        raise Refusal("reward", detail)

    def _say(self, what: str, text: str) -> None:
        """Tell whoever runs this, once.

        By a log and not as a warning, which could be made an exception: a stranger decides when.
        """
        if what not in self._said:
            self._said.add(what)
            _log.warning(visible(text))  # an error, and a line of a traceback, quote what was said


def _traceback(error: BaseException) -> str:
    details: str = getattr(error, "details", "")
    return details or "".join(traceback.format_exception(error)).rstrip()
