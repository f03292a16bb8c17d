"""Rules: what every record of a crew must meet, and how large an honest one can be.

Knows the crew's figures; knows no record's bytes, no key and no model. A reader that does not have
a sender's vocabulary holds its groups to what is true of any.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from motley.config import CrewConfig
from motley.exchange import Limits
from motley.exchange.headers import MAX_ENDS
from motley.exchange.sections import STEPS_PER_NAT
from motley.records import HUB, Sampling
from motley.spelling.table import MAX_ENCODED_BYTES

# A sampler draws from at most W tokens, so that E_q[1 / (W q)] <= 1 at every token, whatever came
# before. The product of 1 / (W q) over a rollout is then a supermartingale, and by Ville's
# inequality it ever reaches e^30 in one honest rollout of 10^13.
MOST_SURPRISE_NATS = 30.0
LOGPROB_RANGE = (-64.0, 1e-3)  # whatever the vocabulary
ROUNDING_NATS = 0.5 / STEPS_PER_NAT  # of a log-prob on the wire

MOST_IDS = 2**35  # of any vocabulary: a varint has no more
MAX_ROUNDS = 2**31  # of samplers that go on for as long as their learner does

# of a group: all its fields with texts of 255 characters for each name, and of 200 for the model
_HEADER_BYTES = 4096
# of what has no sections: a learner's weights, with twice 4,096 blobs and a backlog; a charter; a
# roster of thousands
_PLAIN_BYTES = 2**20
# of a table: that of the largest vocabulary, with its end tokens
_TABLE_BYTES = _HEADER_BYTES + MAX_ENCODED_BYTES + 5 * MAX_ENDS

_NUMBER = r"(-?(?:0|[1-9][0-9]{0,18}))"
_TAG = r"(?:\.[0-9a-f]{16})?"  # where somebody else took the id first
_GROUP = re.compile(rf"{_NUMBER}\.{_NUMBER}{_TAG}", re.ASCII)
_TABLE = re.compile(rf"table{_TAG}", re.ASCII)
_WEIGHTS = re.compile(rf"weights\.{_NUMBER}{_TAG}", re.ASCII)
_OF_HUB = re.compile(rf"(?:charter|roster\.{_NUMBER}){_TAG}", re.ASCII)


class Refusal(Exception):  # noqa: N818 - the way out of a check, seen by `Admission.admit` alone
    """A record is not admitted. `reason` is one word to count by."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What every group of a crew must meet."""

    crew: str
    vocabulary: str = ""  # none: any, of which nothing is known
    vocabulary_size: int = MOST_IDS
    end_ids: tuple[int, ...] = ()
    rollouts_per_group: int
    sampling: Sampling
    slots: int  # groups of a peer in a round
    rounds: int | None  # None: samplers go on for as long as their learner does
    steps: int = MAX_ROUNDS - 1  # of a learner: no version is later
    learners: frozenset[str] = frozenset()  # who may publish weights
    # whose weights a peer samples with, where they are not its own
    students: Mapping[str, str] = field(default_factory=dict)
    met_slots: int = 0  # those of a round that all peers have alike
    branches: int = 0  # further groups of a peer in a round, of continuations
    mixed: bool = False  # whether peers may have other vocabularies, and publish their tables

    @staticmethod
    def of(config: CrewConfig, mixed: bool) -> Rules:
        """Those of a crew, whatever the vocabulary."""
        return Rules(
            crew=config.crew.name,
            rollouts_per_group=config.rollouts_per_group,
            sampling=config.sampling,
            slots=config.problems_per_peer,
            rounds=None if config.has_roles else config.crew.rounds,
            steps=config.crew.rounds,
            learners=frozenset(p.name for p in config.peer if p.role == "learner"),
            students={p.name: config.student_of(p.name) for p in config.peer},
            met_slots=config.num_met,
            branches=config.num_branches,
            mixed=mixed,
        )

    def with_vocabulary(self, name: str, size: int, end_ids: tuple[int, ...]) -> Rules:
        """The same for a sender of this vocabulary."""
        return replace(self, vocabulary=name, vocabulary_size=size, end_ids=end_ids)

    def going_on(self, rounds: int) -> Rules:
        """The same of a crew that goes on, for so many rounds if these are more."""
        longer = None if self.rounds is None else max(self.rounds, rounds)
        return replace(self, rounds=longer, steps=max(self.steps, rounds))

    @property
    def max_tokens(self) -> int:
        return self.sampling.max_tokens

    @property
    def num_choices(self) -> int:
        """The tokens that one is drawn from, at most."""
        if self.sampling.top_k and self.sampling.logprobs == "sampled":
            return min(self.sampling.top_k, self.vocabulary_size)
        return self.vocabulary_size

    @property
    def reports_what_was_drawn(self) -> bool:
        """Whether a log-prob is that of the distribution the token was drawn from."""
        sampling = self.sampling
        return sampling.logprobs == "sampled" or (sampling.top_k == 0 and sampling.top_p == 1)

    @property
    def least_logprob(self) -> float:
        """Of a token: no honest sampler reports less."""
        return max(LOGPROB_RANGE[0], -math.log(self.num_choices) - MOST_SURPRISE_NATS)

    @property
    def group_limits(self) -> Limits:
        """The largest record of a group that an honest peer of this crew can make."""
        token_bytes = -(-max(1, (self.vocabulary_size - 1).bit_length()) // 7)
        rollout_bytes = 4 + 1 + 5 + self.max_tokens * (token_bytes + 4)
        header_bytes = _HEADER_BYTES + (5 * self.max_tokens if self.branches else 0)
        body_bytes = 5 + header_bytes + self.rollouts_per_group * rollout_bytes
        return _limits(body_bytes, header_bytes, self.max_tokens)

    def limits_of(self, name: str, place: str) -> Limits:
        """How large the record may be that stands under the id NAME.PLACE, if there can be one."""
        if name == HUB:
            if not _OF_HUB.fullmatch(place):
                raise Refusal("subject", f"a hub has no record {place[:80]!r}")
            return _limits(_PLAIN_BYTES, _PLAIN_BYTES, 0)
        if found := _WEIGHTS.fullmatch(place):
            if name not in self.learners:
                raise Refusal("role", f"{name} is no learner, and publishes weights")
            self.check_version(int(found[1]))
            return _limits(_PLAIN_BYTES, _PLAIN_BYTES, 0)
        if _TABLE.fullmatch(place):
            self._check_publishes_table(name)
            return _limits(_TABLE_BYTES, _TABLE_BYTES, 0)
        if found := _GROUP.fullmatch(place):
            self._check_place(int(found[1]), int(found[2]))
            return self.group_limits
        raise Refusal("subject", f"no record of {name} has the id {place[:80]!r}")

    def check_version(self, version: int) -> None:
        if not 0 <= version <= self.steps:
            raise Refusal("version", f"there is no version {version}; the last is {self.steps}")

    def _check_publishes_table(self, name: str) -> None:
        if not self.mixed:
            raise Refusal("table", "the crew has one vocabulary, and needs no table of it")
        if name in self.learners:
            raise Refusal("role", f"{name} is a learner that publishes no groups, and has a table")

    def _check_place(self, round: int, slot: int) -> None:
        rounds = MAX_ROUNDS if self.rounds is None else self.rounds
        slots = self.slots + self.branches
        if not (0 <= round < rounds and 0 <= slot < slots):
            raise Refusal(
                "assignment",
                f"the crew has no slot {slot} of round {round}; expected below {slots} and "
                f"{rounds}",
            )


def _limits(body_bytes: int, header_bytes: int, rollout_tokens: int) -> Limits:
    """The record: zstd adds a head, and three bytes a block to what it cannot compress."""
    most = Limits()
    return Limits(
        min(most.record_bytes, 1024 + body_bytes + body_bytes // 128),
        min(most.body_bytes, body_bytes),
        header_bytes,
        rollout_tokens,
    )
