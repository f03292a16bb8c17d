"""Admission: the one boundary where a bad record becomes a named, counted refusal.

It is never an exception beyond here.

Cheap checks first: the id, size and decompression, header, sender, signature, chain; then values
(`values.py`), assignment, copies (`copies.py`), and last the reward, computed again here. What the
crew's figures rule out is refused before it is decompressed (`rules.py`). Knows records, rosters
and assignments; knows no model.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from motley.exchange import (
    BranchHeader,
    Entry,
    GroupHeader,
    Header,
    Limits,
    Sealed,
    WireError,
    stands_under,
    unpack,
)
from motley.records import (
    HUB,
    Charter,
    Content,
    Group,
    Problem,
    Rollout,
    Roster,
    Stamp,
    Table,
    Weights,
)
from motley.spelling import Spelling
from motley.trust.chain import Chain, ChainState, SparseChain
from motley.trust.copies import Copies, GroupMarks, Marked
from motley.trust.identity import verifies
from motley.trust.rewards import RewardCheck, RewardClaim, in_short, visible
from motley.trust.rules import Refusal, Rules
from motley.trust.steadiness import Score, Steadiness
from motley.trust.tables import Tables
from motley.trust.values import check_branch, check_header, check_rollouts, check_time

MAX_KEPT = 256
MAX_LATELY = 4096  # refusals between two steps of which the position is kept
# Refused in a row, of one sender: from here on its refusals are counted only, and of its records
# one in so many is read to the end. The first that is admitted ends it.
MAX_IN_A_ROW = 1000
READ_ONE_IN = 16
# Faults of authentic records that others cause, too: by copies, or by delays.
BY_OTHERS = frozenset({"replay", "gap"})

Assignment = Callable[[str, int], list[Problem]]  # (peer, round) -> the problems it must answer
ScoreTexts = Callable[[Problem, Sequence[str]], list[float]]


class RefusedRecord(msgspec.Struct, frozen=True):
    """Why the record at a position of the log was not admitted.

    The record itself is still there to look at.
    """

    position: int
    id: str
    sender: str
    reason: str
    detail: str
    signed: bool = False  # its sender made it so: nobody else can have


class Admitted(NamedTuple):
    """A group that may be learned from, with the problem that it answers."""

    group: Group
    problem: Problem
    hash: bytes  # of its record
    spelling: Spelling | None = None  # of its sender's tokens; None: they are the reader's own


# What became of a record: a group, a sender's table, a learner's weights, a word of the hub's, or
# a refusal.
Verdict = Admitted | Table | Weights | Charter | Roster | RefusedRecord


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


class AdmissionState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An admission in a checkpoint; keys are hexadecimal."""

    keys: dict[str, str]
    revoked: list[str]
    roster: int
    chains: dict[str, ChainState]  # by key
    refused: list[ReasonCount]
    kept: list[RefusedRecord]
    in_a_row: dict[str, int] = {}
    signed_in_a_row: dict[str, int] = {}
    copies: list[GroupMarks] = []
    tables: list[int] = []  # where they stand in the log


@dataclass(slots=True)
class Admission:
    rules: Rules
    hub: bytes  # the key whose rosters count
    assignment: Assignment
    score: Score | None  # None: rewards are taken on trust
    me: str = ""  # whose own rewards are not computed again: it signed them
    shown: Callable[[Rollout], str] = lambda rollout: f"{len(rollout.tokens)} tokens"
    steadiness: Steadiness | None = None  # None: whether a reward is steady is not asked
    score_texts: ScoreTexts | None = None  # of senders with another vocabulary
    tables: Tables = field(default_factory=Tables)
    # of whom every record is read here; of others those of some rounds
    reads_all_of: Callable[[str], bool] = lambda name: True
    keys: dict[str, bytes] = field(default_factory=dict)  # peer -> key, by the newest roster
    revoked: frozenset[str] = frozenset()
    roster: int = 0  # its number
    chains: dict[bytes, Chain | SparseChain] = field(default_factory=dict)  # by key
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # (sender, reason) -> count
    kept: deque[RefusedRecord] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))  # the newest
    lately: dict[int, str] = field(default_factory=dict)  # position -> reason, since the last step
    in_a_row: Counter[str] = field(default_factory=Counter)  # sender -> refused without a break
    # the same of what the sender did sign: what others write under its name does not count
    signed_in_a_row: Counter[str] = field(default_factory=Counter)
    copies: Copies = field(default_factory=Copies)
    rewards: RewardCheck = field(default_factory=RewardCheck)

    def admit(self, entry: Entry) -> Verdict:
        """Judge a record. What the hub says is taken in; a refusal is counted and kept."""
        try:
            limits = self._limits_of(entry.id)
            sealed = unpack(entry.record, limits)
            header = Header.of(sealed.body, limits)
            self._check_sender(entry, header, sealed)
        except (WireError, Refusal) as error:
            return self.refuse(entry, error.reason, str(error))
        sender, hash = header.sender, sealed.hash
        try:
            self._check_chain(header.stamp, hash, sender)
            self._check_flood(sender)
            verdict = self._judged(header, limits, hash, entry.position)
        except (WireError, Refusal) as error:
            return self.refuse(entry, error.reason, str(error), error.reason not in BY_OTHERS)
        del self.in_a_row[sender], self.signed_in_a_row[sender]
        return verdict

    def _judged(self, header: Header, limits: Limits, hash: bytes, position: int) -> Verdict:
        if isinstance(header.fields, GroupHeader):
            return self._admitted(header, header.fields, limits, hash)
        content = header.content()
        if isinstance(content, Weights):
            check_time(content.created_s)
        if isinstance(content, Table):
            self.tables.add(header.stamp.key, content, position)
        if isinstance(content, Roster) and content.number >= self.roster:
            self._take_in(content)
        assert not isinstance(content, Group)
        return content

    def _take_in(self, roster: Roster) -> None:
        for name, key in roster.keys.items():
            if self.keys.get(name) != key:  # whoever has it now begins anew
                del self.in_a_row[name], self.signed_in_a_row[name]
        self.roster = roster.number
        self.keys, self.revoked = dict(roster.keys), frozenset(roster.revoked)

    def refuse(self, entry: Entry, reason: str, detail: str, signed: bool = False) -> RefusedRecord:
        """Count a record under its sender, and keep why it is refused."""
        # The log lets a peer write under its own name only, so that the name is right even where
        # the record cannot be read.
        name = entry.id.split(".", 1)[0]
        sender = name if name in self.keys or name in self.revoked or name == HUB else "unknown"
        self.refused[sender, reason] += 1
        self.in_a_row[sender] += 1
        if signed:
            self.signed_in_a_row[sender] += 1
        # both may be a stranger's words, for people to read
        id, detail = (visible(text).replace("\n", " ") for text in (entry.id[:200], detail[:500]))
        refused = RefusedRecord(entry.position, id, sender, reason, detail, signed)
        if self.in_a_row[sender] <= MAX_IN_A_ROW:
            self.kept.append(refused)
        if len(self.lately) < MAX_LATELY:
            self.lately[entry.position] = reason
        return refused

    def _limits_of(self, id: str) -> Limits:
        """How large the record of an id may be, if this crew can have one under it."""
        name, _, place = id.partition(".")
        if name in self.revoked:
            raise Refusal("revoked", f"{name} was shut out by the hub")
        if name != HUB and name not in self.keys:
            raise Refusal("sender", f"no peer {name[:80]!r} is on the roster")
        return self._rules_of(name)[0].limits_of(name, place)

    def _rules_of(self, name: str) -> tuple[Rules, Spelling | None]:
        """What a sender's groups must meet, by its own table if it has another vocabulary; and what
        its tokens stand for then.
        """
        key = self.keys.get(name) if self.rules.mixed else None
        table = self.tables.of(key) if key else None
        if table is None or table.vocabulary == self.rules.vocabulary:
            return self.rules, None
        return table.rules(self.rules), table.spelling

    def _check_sender(self, entry: Entry, header: Header, sealed: Sealed) -> None:
        if header.crew != self.rules.crew:
            raise Refusal(
                "crew", f"record is of crew {header.crew[:80]!r}, not {self.rules.crew!r}"
            )
        if not stands_under(entry.id, header.id, entry.record):
            raise Refusal("subject", f"record {header.id[:80]!r} stands under {entry.id[:80]!r}")
        key = self.hub if header.sender == HUB else self.keys.get(header.sender)
        if key is None or (header.sender == HUB) != header.is_of_hub:
            raise Refusal("sender", f"no peer {header.sender[:80]!r} is on the roster")
        if header.stamp.key != key:
            raise Refusal(
                "key", f"record names another key than the roster has for {header.sender}"
            )
        if not verifies(key, sealed.signature, sealed.signed):
            raise Refusal("signature", "signature does not fit the record")

    def _check_chain(self, stamp: Stamp, hash: bytes, sender: str) -> None:
        whole = sender == HUB or self.reads_all_of(sender)
        chain = self.chains.setdefault(stamp.key, Chain() if whole else SparseChain())
        if fault := chain.add(stamp, hash):
            raise Refusal(fault, f"record {stamp.counter} of {sender} is a {fault} in its chain")

    def _check_flood(self, sender: str) -> None:
        in_a_row = self.signed_in_a_row[sender]
        if sender != HUB and in_a_row >= MAX_IN_A_ROW and in_a_row % READ_ONE_IN:
            raise Refusal(
                "flood",
                f"{in_a_row} records of {sender} were refused in a row; one in {READ_ONE_IN} is "
                "read",
            )

    @property
    def missing(self) -> dict[str, int]:
        """Per peer: records its chain says exist, and the log has not shown."""
        chains = {key: c for key, c in self.chains.items() if isinstance(c, Chain) and c.missing}
        if not chains:
            return {}
        return {peer: len(chains[key].missing) for peer, key in self.keys.items() if key in chains}

    def _admitted(
        self, header: Header, fields: GroupHeader, limits: Limits, hash: bytes
    ) -> Admitted:
        rules, spelling = self._rules_of(fields.peer)
        origin = check_header(rules, fields)
        check_branch(rules, fields)
        arrays = header.arrays(limits)
        check_rollouts(rules, arrays, fields.num_before)
        if isinstance(fields, BranchHeader):
            # Nobody but its author learns from it: what it claims of rewards concerns no other.
            problem = self._problem_of(fields, fields.met_round, fields.met_slot)
            return Admitted(fields.group(origin, arrays), problem, hash, spelling)
        problem = self._problem_of(fields, fields.round, fields.slot)
        marked = Marked.of(fields.problem, arrays)
        self._check_copies(fields, marked)
        group = fields.group(origin, arrays)
        if self.score is not None and fields.peer != self.me:
            self.rewards.check(self._claim(problem, group, spelling), self.steadiness)
        elif self.steadiness and fields.peer == self.me:
            self.steadiness.own(problem, group)
        self.copies.add(fields.peer, fields.id, marked, len(self.keys))
        return Admitted(group, problem, hash, spelling)

    def _problem_of(self, fields: GroupHeader, round: int, slot: int) -> Problem:
        problems = self.assignment(fields.peer, round)
        if not 0 <= slot < len(problems) or problems[slot].id != fields.problem:
            raise Refusal(
                "assignment",
                f"problem {fields.problem[:80]!r} is not what {fields.peer} was given in round "
                f"{round}",
            )
        return problems[slot]

    def _check_copies(self, fields: GroupHeader, marked: Marked) -> None:
        """Samplers with the same weights can foresee each other's rollouts, since seeds are public:
        one could have another's refused as copies. So they are not compared.
        """
        if not self.rules.reports_what_was_drawn:
            return
        sender, students = fields.peer, self.rules.students
        student = students.get(sender, sender)
        source = self.copies.source_of(
            fields.id,
            marked,
            lambda other: other != sender and students.get(other, other) == student,
        )
        if source:
            raise Refusal("copied", f"it repeats rollouts of {source}")

    def _claim(self, problem: Problem, group: Group, spelling: Spelling | None) -> RewardClaim:
        """The rewards to be computed again: all, or of another vocabulary those of readable text.

        What cannot be read is not learned from, so what it claims is not held against its sender.
        """
        score, score_texts = self.score, self.score_texts
        if spelling is None:
            assert score
            return RewardClaim(
                group, group.rollouts, lambda: score(problem, group.rollouts), self.shown
            )
        assert score_texts, "a reader of several vocabularies scores texts"
        texts = _texts(group.rollouts, spelling, self.rules.max_tokens)
        return RewardClaim(
            group,
            list(texts),
            lambda: score_texts(problem, list(texts.values())) if texts else [],
            lambda rollout: in_short(texts[rollout]),
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
            in_a_row=dict(sorted(self.in_a_row.items())),
            signed_in_a_row=dict(sorted(self.signed_in_a_row.items())),
            copies=self.copies.state(),
            tables=self.tables.positions,
        )

    def load_state(self, state: AdmissionState) -> None:
        """Go on from a checkpoint. Tables are read again from the log, by whoever has it."""
        self.keys = {peer: bytes.fromhex(key) for peer, key in state.keys.items()}
        self.revoked = frozenset(state.revoked)
        self.roster = state.roster
        sparse = {key for name, key in self.keys.items() if not self.reads_all_of(name)}
        self.chains = {
            key: (SparseChain if key in sparse else Chain).from_state(state.chains[key.hex()])
            for key in map(bytes.fromhex, state.chains)
        }
        self.refused = ReasonCount.counter(state.refused)
        self.kept = deque(state.kept, maxlen=MAX_KEPT)
        self.in_a_row = Counter(state.in_a_row)
        self.signed_in_a_row = Counter(state.signed_in_a_row)
        self.copies = Copies.from_state(state.copies)


def _texts(rollouts: Sequence[Rollout], spelling: Spelling, max_tokens: int) -> dict[Rollout, str]:
    """Of those that can be read, but for the token that ended them."""
    texts = {}
    for rollout in rollouts:
        ids = rollout.tokens[:-1] if rollout.ending == "stop" else rollout.tokens
        text = spelling.read(ids, max_tokens)
        if text is not None:
            texts[rollout] = text.decode(errors="replace")
    return texts


def stamp_of(entry: Entry) -> tuple[Stamp, bytes]:
    """A record's place in its publisher's chain, as it says, and its hash."""
    sealed = unpack(entry.record)
    return Header.of(sealed.body).stamp, sealed.hash


def read_hub(entries: Sequence[Entry], crew: str, hub: bytes) -> tuple[Charter, Roster]:
    """Read the charter and the newest roster; what the hub did not sign is passed over."""
    charter: Charter | None = None
    roster: Roster | None = None
    strange = ""  # who may write there can have been first
    for entry in entries:
        header = _header_by_hub(entry, crew, hub)
        if header is None:
            strange = entry.id
            continue
        content = header.content()
        charter = content if isinstance(content, Charter) else charter
        if isinstance(content, Roster) and (roster is None or content.number >= roster.number):
            roster = content
    if strange and (charter is None or roster is None):
        raise ValueError(
            f"record {strange[:80]} of the log is not signed by the hub of the invitation; is it "
            f"another crew {crew!r}?"
        )
    if charter is None or roster is None:
        raise ValueError(
            f"the log has no charter of crew {crew!r}; is --crew right, and the hub started?"
        )
    return charter, roster


def _header_by_hub(entry: Entry, crew: str, hub: bytes) -> Header | None:
    """The header of what the hub of a crew wrote; None for a stranger's record."""
    try:
        sealed = unpack(entry.record)
        header = Header.of(sealed.body)
    except WireError:
        return None
    own = header.stamp.key == hub and header.crew == crew and header.is_of_hub
    return header if own and verifies(hub, sealed.signature, sealed.signed) else None


def known(entry: Entry) -> tuple[Content, bytes]:
    """A record that was admitted before, and its hash; not checked again."""
    sealed = unpack(entry.record)
    return Header.of(sealed.body).content(), sealed.hash
