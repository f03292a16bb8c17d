"""Standing: how far a receiver trusts each sender by what it did; who is muted, and for how long.

A refused record that its sender signed is a strike. Strikes fade. Enough of them, or one proof,
mute a sender: for some rounds nothing of it is learned from. The second time it takes twice as
long. Nobody waits for a sender that was muted once, until it is pardoned. Knows names and reasons,
and decides for this receiver only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

STRIKES_TO_MUTE = 3.0
FADES = 0.8  # a round
LONGEST = 10  # times that a sentence is doubled
FOR_EVER = 2**62  # rounds
LEAST_SHOWN = 1.0  # powers of ten of evidence


class Sentence(msgspec.Struct, frozen=True):
    """Why a sender is muted, and up to which round."""

    reason: str
    until: int


class Suspicion(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is held against a sender, as a metrics line has it."""

    evidence: float  # powers of ten against its log-probs; 3 is one chance in a thousand
    strikes: float = 0.0
    muted: str = ""  # why
    until: int | None = None  # the round in which it is heard again

    @property
    def is_worth_showing(self) -> bool:
        return self.evidence >= LEAST_SHOWN or self.strikes > 0 or bool(self.muted)


class StandingState(msgspec.Struct, frozen=True, kw_only=True):
    """In a checkpoint."""

    strikes: dict[str, float] = {}
    muted: dict[str, Sentence] = {}
    times: dict[str, int] = {}


@dataclass(slots=True)
class Standing:
    rounds: int  # of the first sentence; 0: nobody is muted
    strikes: dict[str, float] = field(default_factory=dict)
    muted: dict[str, Sentence] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)  # each was muted

    def strike(self, sender: str, reason: str, now: int) -> bool:
        """Hold a refused record against the sender that signed it; whether that mutes it."""
        self.strikes[sender] = self.strikes.get(sender, 0.0) + 1
        if self.strikes[sender] < STRIKES_TO_MUTE:
            return False
        return self.mute(sender, reason, now)

    def mute(self, sender: str, reason: str, now: int) -> bool:
        """Learn nothing from a sender from round `now` on; whether that is news."""
        if not self.rounds or sender in self.muted:
            return False
        before = self.times.get(sender, 0)
        self.times[sender] = before + 1
        self.muted[sender] = Sentence(reason, now + self.rounds * 2 ** min(before, LONGEST))
        return True

    def shut_out(self, sender: str, reason: str) -> None:
        """Never learn from a sender, nor wait for it, unless it is pardoned."""
        self.times[sender] = self.times.get(sender, 0) + 1
        self.muted[sender] = Sentence(reason, FOR_EVER)

    def begin_round(self, now: int) -> list[str]:
        """Let strikes fade and sentences end; who may be heard again."""
        faded = {name: count * FADES for name, count in self.strikes.items()}
        self.strikes = {name: count for name, count in faded.items() if count >= 0.01}
        freed = [name for name, sentence in self.muted.items() if sentence.until <= now]
        for name in freed:
            del self.muted[name]
            self.strikes.pop(name, None)
        return freed

    def is_awaited(self, sender: str) -> bool:
        """Whether a round waits for a sender: for one that was muted, nobody does."""
        return sender not in self.times

    def pardon(self, sender: str) -> None:
        """Forget everything."""
        for kept in (self.strikes, self.muted, self.times):
            kept.pop(sender, None)

    # For checkpoints

    def state(self) -> StandingState:
        return StandingState(
            strikes=dict(sorted(self.strikes.items())),
            muted=dict(sorted(self.muted.items())),
            times=dict(sorted(self.times.items())),
        )

    def load_state(self, state: StandingState) -> None:
        self.strikes, self.muted = dict(state.strikes), dict(state.muted)
        self.times = dict(state.times)
