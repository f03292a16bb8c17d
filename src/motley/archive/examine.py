"""Examiner: what can be said of each record of a log, and Tally: what that sums to.

Records are checked as far as the log itself allows: wire, place, key, signature, and the figures of
the crew's charter. These are held to by admission's own checks (trust/rules.py, trust/values.py):
nothing is read that is larger than a record of the crew can be. Which tokens there are is known of
senders whose table is on the log. Whether a group was assigned to its sender and its rewards are
right is for admission to say (trust/admission.py), which knows the task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from motley.config import parse_config
from motley.exchange import (
    Entry,
    GroupHeader,
    Header,
    Limits,
    Sealed,
    WireError,
    stands_under,
    unpack,
)
from motley.models.named import may_be_mixed
from motley.records import HUB, Charter, Content, Group, Roster, Stamp, Table, Weights
from motley.spelling import Spelling
from motley.trust import Rules, Tables, verifies
from motley.trust.rules import Refusal
from motley.trust.values import check_branch, check_header, check_rollouts, check_time

UNKNOWN = "unknown"  # the sender of a record whose name is not on the roster of that place
INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Seen:
    """A record as far as it can be read.

    One with a `fault` is believed by nobody, whatever it says.
    """

    position: int
    id: str
    sender: str
    num_bytes: int
    fault: str = ""
    stamp: Stamp | None = None
    content: Content | None = None
    spelling: Spelling | None = None  # of a group's tokens, by its sender's table on the log

    @property
    def kind(self) -> str:
        return type(self.content).__name__.lower() if self.content else ""

    @property
    def group(self) -> Group | None:
        return self.content if isinstance(self.content, Group) else None

    @property
    def num_tokens(self) -> int:
        return sum(len(r.tokens) for r in self.group.rollouts) if self.group else 0

    @property
    def reward(self) -> float | None:
        """The mean over the rollouts."""
        rollouts = self.group.rollouts if self.group else ()
        return sum(r.reward for r in rollouts) / len(rollouts) if rollouts else None


@dataclass(slots=True)
class Examiner:
    """Looks at records in the order of the log, and so knows whose key counts where."""

    crew: str
    hub: bytes  # the key whose charter and rosters count
    # how many the crew has by now: one that goes on may have more than its charter says
    rounds: Callable[[], int] = lambda: 0
    charter: Charter | None = None
    rules: Rules | None = None  # None: no charter was seen that can be read
    keys: dict[str, bytes] = field(default_factory=dict)
    revoked: frozenset[str] = frozenset()
    tables: Tables = field(default_factory=Tables)

    def look(self, entry: Entry) -> Seen:
        name, _, place = entry.id.partition(".")
        sender = name if name in self.keys or name in self.revoked or name == HUB else UNKNOWN
        fault, stamp, content = "revoked" if name in self.revoked else "", None, None
        try:
            rules = self._rules_of(name)
            limits = _limits(rules, sender, place)
            sealed = unpack(entry.record, limits)
            header = Header.of(sealed.body, limits)
            stamp = header.stamp
            fault = fault or self._fault(entry, header, sealed) or _fault_of_head(header, rules)
            content, fault_inside = _read(header, limits, rules)
            fault = fault or fault_inside
            if not fault:
                self._take_in(content, stamp, entry.position)
        except (WireError, Refusal) as error:
            fault = fault or error.reason
        size, spelling = len(entry.record), self._spelling(stamp, content)
        return Seen(entry.position, entry.id, sender, size, fault, stamp, content, spelling)

    def _spelling(self, stamp: Stamp | None, content: Content | None) -> Spelling | None:
        if stamp is None or not isinstance(content, Group):
            return None
        table = self.tables.of(stamp.key, content.origin.vocabulary)
        return table.spelling if table else None

    def _rules_of(self, name: str) -> Rules | None:
        """What records of a sender must meet, as far as it is known."""
        if self.rules is None:
            return None
        rules, key = self.rules.going_on(self.rounds()), self.keys.get(name)
        table = self.tables.of(key) if key else None
        return table.rules(rules) if table else rules

    def _fault(self, entry: Entry, header: Header, sealed: Sealed) -> str:
        """Of who says it, in the words of admission."""
        if header.crew != self.crew:
            return "crew"
        if not stands_under(entry.id, header.id, entry.record):
            return "subject"
        key = self.hub if header.sender == HUB else self.keys.get(header.sender)
        if not key:
            return "sender"
        if header.stamp.key != key:
            return "key"
        return "" if verifies(key, sealed.signature, sealed.signed) else "signature"

    def _take_in(self, content: Content, stamp: Stamp, position: int) -> None:
        if isinstance(content, Table):
            self.tables.add(stamp.key, content, position)
        elif isinstance(content, Charter):
            self.charter, self.rules = content, _rules_of_charter(content)
        elif isinstance(content, Roster):
            self.keys, self.revoked = dict(content.keys), frozenset(content.revoked)


def _rules_of_charter(charter: Charter) -> Rules | None:
    with suppress(ValueError):
        config = parse_config(charter.config, source="the crew's charter")
        return Rules.of(config, may_be_mixed(peer.model for peer in config.students))
    return None


def _limits(rules: Rules | None, sender: str, place: str) -> Limits:
    """How large a record under an id may be that is read. Of nobody's, as large as a group."""
    if rules is None:
        return Limits()
    return rules.group_limits if sender == UNKNOWN else rules.limits_of(sender, place)


def _reason(check: Callable[[], object]) -> str:
    """Why a check refuses; nothing if it does not."""
    try:
        check()
    except (WireError, Refusal) as error:
        return error.reason
    return ""


def _fault_of_head(header: Header, rules: Rules | None) -> str:
    """Of what a group says before its rollouts."""
    fields = header.fields
    if rules is None or not isinstance(fields, GroupHeader):
        return ""
    return _reason(partial(check_header, rules, fields)) or _reason(
        partial(check_branch, rules, fields)
    )


def _read(header: Header, limits: Limits, rules: Rules | None) -> tuple[Content, str]:
    """What a record holds, and what is wrong with that."""
    fields = header.fields
    if not isinstance(fields, GroupHeader):
        content = header.content()
        made = content.created_s if isinstance(content, Weights) else 0.0
        return content, _reason(partial(check_time, made))
    arrays = header.arrays(limits)
    group = fields.group(fields.origin(), arrays)
    if rules is None:
        return group, _range_fault(group)
    return group, _reason(partial(check_rollouts, rules, arrays, fields.num_before))


def _range_fault(content: Group) -> str:
    """Numbers that no round or version ever has, and that no table has room for."""
    sampling = content.origin.sampling
    numbers = (
        content.round,
        content.slot,
        content.origin.version,
        sampling.top_k,
        sampling.max_tokens,
    )
    return "" if all(number in INT64 for number in numbers) else "range"


@dataclass(slots=True)
class Tally:
    """What was sent. A record with a fault counts as such and in `num_bytes`, and nowhere else."""

    num_records: int = 0
    num_groups: int = 0
    num_rollouts: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    group_bytes: int = 0
    reward_sum: float = 0.0
    first_round: int | None = None
    last_round: int | None = None
    newest_s: float | None = None  # by the senders' clocks
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, seen: Seen) -> None:
        self.num_records += 1
        self.num_bytes += seen.num_bytes
        if seen.fault:
            self.faults[seen.fault] += 1
        elif seen.group:
            self._add_group(seen.group, seen)

    def _add_group(self, group: Group, seen: Seen) -> None:
        self.num_groups += 1
        self.num_rollouts += len(group.rollouts)
        self.num_tokens += seen.num_tokens
        self.group_bytes += seen.num_bytes
        self.reward_sum += sum(r.reward for r in group.rollouts)
        self.first_round = (
            group.round if self.first_round is None else min(self.first_round, group.round)
        )
        self.last_round = (
            group.round if self.last_round is None else max(self.last_round, group.round)
        )
        self.newest_s = (
            group.created_s if self.newest_s is None else max(self.newest_s, group.created_s)
        )

    @property
    def bytes_per_token(self) -> float | None:
        return self.group_bytes / self.num_tokens if self.num_tokens else None

    @property
    def reward(self) -> float | None:
        """The mean over all rollouts."""
        return self.reward_sum / self.num_rollouts if self.num_rollouts else None
