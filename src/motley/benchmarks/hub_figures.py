"""What a trial of a hub shows: what is on the log against what everyone made and took in, how far
readers were behind, and what it cost whom.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from motley.benchmarks.bench import Row
from motley.benchmarks.hub import HubTrial, Read
from motley.benchmarks.hub_peers import REST, Account, PeerSample, Sample
from motley.exchange import Entry
from motley.learning.hearing import Lots
from motley.records import HUB
from motley.trust import stamp_of

COSTS = {  # by kind of thread
    "turn": "sampling, learning, judging what is read, coming back",
    "nats": "the connection: reading the log, presence, looking for news",
    "presence": "presence: signing and checking",
    "courier": "sending",
    REST: "the benchmark's own",
}


class Lag(NamedTuple):
    """How far a reader is behind the log."""

    records: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Of all records and all readers; what is wrong is not 0."""

    published: int  # in the chains of all peers
    on_log: int
    lost: int  # in a chain, and not on the log
    doubled: int  # on the log more than once
    unsent: int  # of who left, in its outbox: on the log all the same, or counted as lost
    to_hear: int  # (group, reader) pairs
    missed: int  # of these: not taken in
    refused: int  # of what was read; what comes a second time is
    passed_by: int  # groups that a reader is not to hear, counted by all readers
    passed_by_wrongly: int  # more or fewer than the log has
    behind: int  # readers that have not read to the end, of those who stayed

    @property
    def hold(self) -> bool:
        wrong = (self.lost, self.doubled, self.missed, self.refused)
        return not any((*wrong, self.passed_by_wrongly, self.behind))


def accounts_of(trial: HubTrial) -> list[Account]:
    return [account for life in trial.lives for account in life.accounts.values()]


def checks_of(trial: HubTrial) -> Checks:
    """Hold what everyone says against what the log has."""
    accounts = accounts_of(trial)
    by_peers = [read.entry for read in trial.reads if _sender(read.entry) != HUB]
    places = Counter((_sender(entry), stamp_of(entry)[0].counter) for entry in by_peers)
    made = {(one.peer, number) for one in accounts for number in range(one.published)}
    end = trial.reads[-1].entry.position
    stayed = [one for one in accounts if one.peer not in trial.parts.leave]
    return Checks(
        published=len(made),
        on_log=len(by_peers),
        lost=len(made - places.keys()),
        doubled=len(by_peers) - len(places),
        unsent=sum(one.unsent for one in accounts),
        to_hear=sum(one.heard for one in accounts),
        missed=sum(one.missed for one in accounts),
        refused=sum(one.refused for one in accounts),
        passed_by=sum(one.passed_by for one in accounts),
        passed_by_wrongly=sum(abs(one.passed_by_twice) for one in accounts),
        behind=trial.plan.peers - len(accounts) + sum(one.cursor != end for one in stayed),
    )


def _sender(entry: Entry) -> str:
    return entry.id.split(".", 1)[0]


def check_rows(checks: Checks) -> list[Row]:
    said = {
        "records published": checks.published,
        "records on the log": checks.on_log,
        "lost": checks.lost,
        "doubled": checks.doubled,
        "not confirmed yet when their peers left": checks.unsent,
        "groups that readers are to hear": checks.to_hear,
        "not taken in": checks.missed,
        "refused, such as a second time": checks.refused,
        "groups that readers pass by": checks.passed_by,
        "passed by too often or not at all": checks.passed_by_wrongly,
        "readers not at the end of the log": checks.behind,
    }
    return [{"check": name, "count": count} for name, count in said.items()]


# Figures


def figure_rows(trial: HubTrial) -> list[Row]:
    accounts = accounts_of(trial)
    rounds = sum(one.rounds for one in accounts)
    seconds = [took_s for one in accounts for took_s in one.round_s]
    lags = lags_of(trial)
    wall_s = trial.over_s - trial.go_s
    rows: list[Row] = [
        {
            "figure": "until all had joined, s a peer",
            "value": round(trial.join_s / _first(trial), 2),
        },
        {"figure": "all rounds, s", "value": round(wall_s, 1)},
        {"figure": "a peer's round, s, median", "value": round(median(seconds), 2)},
        {"figure": "a peer's round, s, 99 %", "value": round(rank(seconds, 0.99), 2)},
        *_lag_rows("records", [lag.records for lag in lags]),
        *_lag_rows("s", [lag.seconds for lag in lags]),
        *_traffic_rows(trial, rounds),
        {"figure": "server: peak MiB", "value": round(trial.server.peak_mib)},
        {"figure": "server: cores in use", "value": round(trial.server.cpu_s / wall_s, 3)},
        {
            "figure": "server: processor, ms a peer's round",
            "value": round(1e3 * trial.server.cpu_s / rounds, 1),
        },
        *_cost_rows(trial, rounds, wall_s),
    ]
    return rows


def _first(trial: HubTrial) -> int:
    return trial.plan.peers - len(trial.parts.late)


def _lag_rows(unit: str, lags: Sequence[float]) -> list[Row]:
    """Of all moments at which a peer that takes part was looked at."""
    shares = {"median": 0.5, "99 %": 0.99, "most": 1.0}
    return [
        {"figure": f"behind the log, {unit}, {name}", "value": round(rank(lags, share), 2)}
        for name, share in shares.items()
    ]


def rank(values: Sequence[float], share: float) -> float:
    """The value that so much of all are not above: of 1..100 and .99, 99."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def sent_to(trial: HubTrial) -> dict[str, list[Read]]:
    """Of all that came on the log, what each peer is sent of it."""
    names = [peer.name for peer in trial.config.peer]
    if not trial.hub.register.state.lots:
        return dict.fromkeys(names, trial.reads)
    lots = Lots(trial.config)
    lot_of = {read.entry.id: lots.of_group(read.entry.id) for read in trial.reads}
    return {
        name: [
            read
            for read in trial.reads
            if lot_of[read.entry.id] in (None, lots.of(name)) or _sender(read.entry) == name
        ]
        for name in names
    }


def lags_of(trial: HubTrial) -> list[Lag]:
    reads = sent_to(trial)
    samples = [sample.peers for life in trial.lives for sample in life.samples]
    return [_lag(one, reads[name]) for peers in samples for name, one in peers.items()]


def _lag(one: PeerSample, reads: Sequence[Read]) -> Lag:
    """Of what had come by then, what the peer had not read, and since when the first was there."""
    there = bisect_right(reads, one.at_s, key=lambda read: read.at_s)
    read = bisect_right(reads, one.cursor, key=lambda read: read.entry.position)
    if read >= there:
        return Lag(0, 0.0)
    return Lag(there - read, one.at_s - reads[read].at_s)


def _traffic_rows(trial: HubTrial, rounds: int) -> list[Row]:
    sent = received = messages = 0
    for life in trial.lives:
        for name in life.job.invitations:
            seen = _seen(life.samples, name)
            if seen:
                sent += max(0, seen[-1].sent_bytes - seen[0].sent_bytes)
                received += max(0, seen[-1].received_bytes - seen[0].received_bytes)
                messages += max(0, seen[-1].received_messages - seen[0].received_messages)
    since = [
        read.entry for reads in sent_to(trial).values() for read in reads if read.at_s >= trial.go_s
    ]
    return [
        {"figure": "sent, KiB a peer's round", "value": round(sent / rounds / 1024, 1)},
        {"figure": "received, KiB a peer's round", "value": round(received / rounds / 1024, 1)},
        {
            "figure": "of it records, KiB",
            "value": round(sum(len(entry.record) for entry in since) / rounds / 1024, 1),
        },
        {"figure": "messages received in a peer's round", "value": round(messages / rounds)},
        {"figure": "of them records", "value": round(len(since) / rounds)},
    ]


def _seen(samples: Sequence[Sample], name: str) -> list[PeerSample]:
    """Of a peer while it was connected."""
    there = [sample.peers[name] for sample in samples if name in sample.peers]
    return [one for one in there if one.received_messages]


def _cost_rows(trial: HubTrial, rounds: int, wall_s: float) -> list[Row]:
    used = used_s(trial)
    rows: list[Row] = [
        {
            "figure": f"peers: {words}, ms a peer's round",
            "value": round(1e3 * used[kind] / rounds, 1),
        }
        for kind, words in COSTS.items()
    ]
    cores = sum(used.values()) / wall_s
    return [
        *rows,
        {"figure": "peers: cores in use", "value": round(cores, 2)},
        {"figure": "hub and benchmark: cores in use", "value": round(trial.hub_s / wall_s, 2)},
        {"figure": "most of the processor goes to", "value": limit_of(trial)},
    ]


def used_s(trial: HubTrial) -> dict[str, float]:
    """Of the processor, by kind of thread, from the go on."""
    return {kind: trial.after[kind] - trial.before[kind] for kind in COSTS}


def limit_of(trial: HubTrial) -> str:
    used = {COSTS[kind]: spent_s for kind, spent_s in used_s(trial).items()}
    used["the server"] = trial.server.cpu_s
    return max(used, key=lambda name: used[name])
