"""Admission: the one boundary where a bad record becomes a named, counted refusal.

It is never an exception beyond here.

Cheap checks first: size and decompression, header, sender, signature, chain, values, assignment,
and last the reward, computed again here. Knows records, rosters and assignments; knows no model.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from motley.exchange import Entry, Header, Sealed, WireError, unpack
from motley.records import HUB, Charter, Content, Group, Problem, Rollout, Roster, Stamp, Weights
from motley.trust.chain import Chain, ChainState
from motley.trust.identity import verifies

LOGPROB_RANGE = (-64.0, 1e-3)
MAX_REWARD = 1e6  # far inside float32, in which advantages are computed
REWARD_TOLERANCE = 1e-5  # relative above 1: rewards travel as float32
MAX_KEPT = 256

Assignment = Callable[[str, int], list[Problem]]  # (peer, round) -> the problems it must answer
Score = Callable[[Problem, Sequence[Rollout]], list[float]]


@dataclass(frozen=True, slots=True)
class Rules:
    """What every group of a crew must meet."""

    crew: str
    vocabulary: str
    vocabulary_size: int
    end_ids: tuple[int, ...]
    rollouts_per_group: int
    max_tokens: int
    rounds: int | None  # None: samplers go on for as long as their learner does
    learners: frozenset[str] = frozenset()  # who may publish weights


class RefusedRecord(msgspec.Struct, frozen=True):
    """Why the record at a position of the log was not admitted.

    The record itself is still there to look at.
    """

    position: int
    id: str
    sender: str
    reason: str
    detail: str


class Admitted(NamedTuple):
    """A group that may be learned from, with the problem that it answers."""

    group: Group
    problem: Problem
    hash: bytes  # of its record


# What became of a record: a group, a learner's weights, a word of the hub's, or a refusal.
Verdict = Admitted | Weights | Charter | Roster | RefusedRecord


class ReasonCount(NamedTuple):
    """How often something of a sender's was not taken, in a checkpoint."""

    sender: str
    reason: str
    times: int

    @staticmethod
    def rows(counts: Counter[tuple[str, str]]) -> list[ReasonCount]:
        return [
            ReasonCount(sender, reason, times) for (sender, reason), times in sorted(counts.items())
        ]

    @staticmethod
    def counter(rows: Sequence[ReasonCount]) -> Counter[tuple[str, str]]:
        return Counter({(row.sender, row.reason): row.times for row in rows})


class AdmissionState(msgspec.Struct, frozen=True, kw_only=True):
    """An admission in a checkpoint; keys are hexadecimal."""

    keys: dict[str, str]
    revoked: list[str]
    roster: int
    chains: dict[str, ChainState]  # by key
    refused: list[ReasonCount]
    kept: list[RefusedRecord]


class _Refused(Exception):  # noqa: N818 - the way out of a check, seen by `admit` alone
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(slots=True)
class Admission:
    rules: Rules
    hub: bytes  # the key whose rosters count
    assignment: Assignment
    score: Score | None  # None: rewards are taken on trust
    keys: dict[str, bytes] = field(default_factory=dict)  # peer -> key, by the newest roster
    revoked: frozenset[str] = frozenset()
    roster: int = 0  # its number
    chains: dict[bytes, Chain] = field(default_factory=dict)  # by key
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # (sender, reason) -> count
    kept: deque[RefusedRecord] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))  # the newest
    undecided: int = 0  # rewards that were taken on trust, since this machine was too slow

    def admit(self, entry: Entry) -> Verdict:
        """Judge a record. What the hub says is taken in; a refusal is counted and kept."""
        try:
            sealed = unpack(entry.record)
            header = Header.of(sealed.body)
            self._check_sender(entry, header, sealed)
            return self._judged(header.content(), sealed.hash)
        except (WireError, _Refused) as error:
            return self.refuse(entry, error.reason, str(error))

    def _judged(self, content: Content, hash: bytes) -> Verdict:
        match content:
            case Group():
                return self._admitted(content, hash)
            case Weights():
                return self._weights(content)
            case Roster() if content.number >= self.roster:
                self.roster = content.number
                self.keys, self.revoked = dict(content.keys), frozenset(content.revoked)
        return content

    def refuse(self, entry: Entry, reason: str, detail: str) -> RefusedRecord:
        """Count a record under its sender, and keep why it is refused."""
        # The log lets a peer write under its own name only, so that the name is right even where
        # the record cannot be read.
        name = entry.id.split(".", 1)[0]
        sender = name if name in self.keys or name in self.revoked or name == HUB else "unknown"
        self.refused[sender, reason] += 1
        refused = RefusedRecord(entry.position, entry.id[:200], sender, reason, detail[:500])
        self.kept.append(refused)
        return refused

    def _check_sender(self, entry: Entry, header: Header, sealed: Sealed) -> None:
        if header.crew != self.rules.crew:
            raise _Refused(
                "crew", f"record is of crew {header.crew[:80]!r}, not {self.rules.crew!r}"
            )
        if header.id != entry.id:
            raise _Refused("subject", f"record {header.id[:80]!r} stands under {entry.id[:80]!r}")
        if header.sender in self.revoked:
            raise _Refused("revoked", f"{header.sender} was shut out by the hub")
        key = self.hub if header.sender == HUB else self.keys.get(header.sender)
        if key is None or (header.sender == HUB) != header.is_of_hub:
            raise _Refused("sender", f"no peer {header.sender[:80]!r} is on the roster")
        if header.stamp.key != key:
            raise _Refused(
                "key", f"record names another key than the roster has for {header.sender}"
            )
        if not verifies(key, sealed.signature, sealed.signed):
            raise _Refused("signature", "signature does not fit the record")
        fault = self.chains.setdefault(key, Chain()).add(header.stamp, sealed.hash)
        if fault:
            raise _Refused(
                fault, f"record {header.stamp.counter} of {header.sender} is a {fault} in its chain"
            )

    @property
    def missing(self) -> dict[str, int]:
        """Per peer: records its chain says exist, and the log has not shown."""
        return {
            peer: len(chain.missing)
            for peer, key in self.keys.items()
            if (chain := self.chains.get(key)) and chain.missing
        }

    def _weights(self, weights: Weights) -> Weights:
        if weights.peer not in self.rules.learners:
            raise _Refused("role", f"{weights.peer} is no learner, and publishes weights")
        return weights

    def _admitted(self, group: Group, hash: bytes) -> Admitted:
        self._check_values(group)
        if not 0 <= group.round < (2**31 if self.rules.rounds is None else self.rules.rounds):
            raise _Refused("assignment", f"the crew has no round {group.round}")
        problems = self.assignment(group.origin.peer, group.round)
        if not 0 <= group.slot < len(problems) or problems[group.slot].id != group.problem:
            raise _Refused(
                "assignment",
                f"problem {group.problem[:80]} is not what {group.origin.peer} was given in "
                f"round {group.round}",
            )
        problem = problems[group.slot]
        self._check_rewards(problem, group.rollouts)
        return Admitted(group, problem, hash)

    def _check_values(self, group: Group) -> None:
        rules, sampling = self.rules, group.origin.sampling
        if group.origin.vocabulary != rules.vocabulary:
            raise _Refused(
                "vocabulary",
                f"vocabulary {group.origin.vocabulary[:80]!r} is not the crew's "
                f"{rules.vocabulary!r}",
            )
        if sampling.temperature == 0 or sampling.max_tokens != rules.max_tokens:
            raise _Refused(
                "sampling",
                f"sampled at temperature {sampling.temperature} with at most "
                f"{sampling.max_tokens} tokens",
            )
        if len(group.rollouts) != rules.rollouts_per_group:
            raise _Refused(
                "group_size", f"{len(group.rollouts)} rollouts, not {rules.rollouts_per_group}"
            )
        for number, rollout in enumerate(group.rollouts):
            fault = self._rollout_fault(rollout)
            if fault:
                raise _Refused(fault, f"rollout {number} has a bad {fault}")

    def _rollout_fault(self, rollout: Rollout) -> str:
        if not 1 <= len(rollout.tokens) <= self.rules.max_tokens:
            return "length"
        if max(rollout.tokens) >= self.rules.vocabulary_size:  # the wire has no negative ids
            return "token"
        num_ends = sum(map(rollout.tokens.count, self.rules.end_ids))
        if num_ends != (rollout.ending == "stop") or (
            num_ends and rollout.tokens[-1] not in self.rules.end_ids
        ):
            return "ending"
        low, high = LOGPROB_RANGE
        if not all(low <= logprob <= high for logprob in rollout.logprobs):  # NaN fails both
            return "logprob"
        return "" if abs(rollout.reward) <= MAX_REWARD else "reward"  # NaN fails

    def _check_rewards(self, problem: Problem, rollouts: Sequence[Rollout]) -> None:
        if self.score is None:
            return
        try:
            pairs = list(zip(rollouts, self.score(problem, rollouts), strict=True))
        except Exception as error:  # noqa: BLE001 - a reward function is a user's, and what it is given here is a stranger's
            raise _Refused(
                "unscorable", f"the reward function failed on it: {type(error).__name__}: {error}"
            ) from None
        for number, (rollout, right) in enumerate(pairs):
            if math.isnan(right):  # this machine could not find out: the sender's word counts
                self.undecided += 1
                continue
            if not abs(rollout.reward - right) <= REWARD_TOLERANCE * max(1.0, abs(right)):
                raise _Refused(
                    "reward",
                    f"rollout {number} claims a reward of {rollout.reward}; computed here it is "
                    f"{right}",
                )

    # For checkpoints

    def state(self) -> AdmissionState:
        return AdmissionState(
            keys={peer: key.hex() for peer, key in self.keys.items()},
            revoked=sorted(self.revoked),
            roster=self.roster,
            chains={key.hex(): chain.state() for key, chain in sorted(self.chains.items())},
            refused=ReasonCount.rows(self.refused),
            kept=list(self.kept),
        )

    def load_state(self, state: AdmissionState) -> None:
        self.keys = {peer: bytes.fromhex(key) for peer, key in state.keys.items()}
        self.revoked = frozenset(state.revoked)
        self.roster = state.roster
        self.chains = {
            bytes.fromhex(key): Chain.from_state(chain) for key, chain in state.chains.items()
        }
        self.refused = ReasonCount.counter(state.refused)
        self.kept = deque(state.kept, maxlen=MAX_KEPT)


def stamp_of(entry: Entry) -> tuple[Stamp, bytes]:
    """A record's place in its publisher's chain, as it says, and its hash."""
    sealed = unpack(entry.record)
    return Header.of(sealed.body).stamp, sealed.hash


def read_hub(entries: Sequence[Entry], crew: str, hub: bytes) -> tuple[Charter, Roster]:
    """Read the charter and the newest roster; every record must bear the hub's signature."""
    charter: Charter | None = None
    roster: Roster | None = None
    for entry in entries:
        sealed = unpack(entry.record)
        header = Header.of(sealed.body)
        if (
            header.stamp.key != hub
            or header.crew != crew
            or not verifies(hub, sealed.signature, sealed.signed)
        ):
            raise ValueError(
                f"record {entry.id} of the log is not signed by the hub of the invitation; is it "
                f"another crew {crew!r}?"
            )
        content = header.content()
        charter = content if isinstance(content, Charter) else charter
        if isinstance(content, Roster) and (roster is None or content.number >= roster.number):
            roster = content
    if charter is None or roster is None:
        raise ValueError(
            f"the log has no charter of crew {crew!r}; is --crew right, and the hub started?"
        )
    return charter, roster


def known(entry: Entry) -> tuple[Content, bytes]:
    """A record that was admitted before, and its hash; not checked again."""
    sealed = unpack(entry.record)
    return Header.of(sealed.body).content(), sealed.hash
