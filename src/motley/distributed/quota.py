"""Quota: how much a peer of a crew can have to write on its log, and how much each has written.

A stream's own limit is for all together. So the hub counts, and takes the right to write from who
goes beyond its quota, before there is no room for the others. Knows no server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from motley.clock import Clock, Deadline
from motley.config import CrewConfig, PeerConfig, config_text
from motley.exchange import Log
from motley.exchange.headers import MAX_BLOBS
from motley.exchange.nats.blobs import CHUNK_BYTES
from motley.exchange.wire import MAX_RECORD_BYTES
from motley.models.named import may_be_mixed

# Honest tokens take 2 bytes, lossless ones up to 9: no honest record comes near this.
TOKEN_BYTES = 16
ROLLOUT_BYTES = 64
RECORD_BYTES = 2**14  # of everything else in a record
BLOB_BYTES = 64  # in a record of weights, for each of its blobs
# A sampler goes on for as long as its learner does: so many times what the learner's steps take.
SAMPLERS_FOLD = 20
SPARE_RECORDS = 256
SPARE_TABLES = 2  # of a sender: its own, and once more after its folder was lost
COUNT_S = 0.1  # of counting at a time, so that who asks is answered meanwhile


class Quotas:
    """What the crew file says about sizes."""

    def __init__(self, config: CrewConfig) -> None:
        self._config = config
        self._mixed = may_be_mixed(peer.model for peer in config.students)

    def records(self, peer: PeerConfig) -> int:
        """How many records a peer may have: twice what it can need, and some.

        A table is as many as it is larger.
        """
        config, rounds = self._config, self._config.crew.rounds
        if peer.role == "sampler":
            needed = SAMPLERS_FOLD * rounds * config.crew.problems_per_round
        else:
            each = config.problems_per_peer + config.num_branches
            needed = rounds + 1 if peer.role == "learner" else rounds * each
        tables = SPARE_TABLES * -(-self.table_bytes(peer) // self.record_bytes(peer))
        return 2 * needed + SPARE_RECORDS + tables

    def record_bytes(self, peer: PeerConfig) -> int:
        """The most that one record of a peer can take, its table aside."""
        config = self._config
        if peer.role == "learner":
            size = 2 * MAX_BLOBS * BLOB_BYTES + BLOB_BYTES * len(config.peer)
        else:
            rollouts = config.rollouts_per_group
            prefix = TOKEN_BYTES * config.sampling.max_tokens if config.num_branches else 0
            size = prefix + rollouts * (ROLLOUT_BYTES + TOKEN_BYTES * config.sampling.max_tokens)
        return min(RECORD_BYTES + size, MAX_RECORD_BYTES)

    def table_bytes(self, peer: PeerConfig) -> int:
        """The most that the table of a peer's vocabulary can take; 0: nobody needs one."""
        return MAX_RECORD_BYTES if self._mixed and peer.role != "learner" else 0

    def message_bytes(self, peer: PeerConfig) -> int:
        """The most that one message of a peer can take: a record, or a chunk of its weights."""
        record = max(self.record_bytes(peer), self.table_bytes(peer))
        return max(record, CHUNK_BYTES) if peer.role == "learner" else record

    @property
    def largest_bytes(self) -> int:
        """The largest record of anybody, the hub's charter and rosters among them."""
        peers = self._config.peer
        largest = (*map(self.record_bytes, peers), *map(self.table_bytes, peers))
        return min(max(self._hub_bytes, *largest), MAX_RECORD_BYTES)

    @property
    def _hub_bytes(self) -> int:
        """The most that a charter or a roster can take."""
        text = len(config_text(self._config).encode())
        return RECORD_BYTES + 2 * text + 128 * len(self._config.peer)

    @property
    def room_bytes(self) -> int:
        """What the log must have room for, were everyone to use its quota to the last byte."""
        peers = self._config.peer
        ordinary = max(self._hub_bytes, *map(self.record_bytes, peers))
        hub = SPARE_RECORDS * min(ordinary, MAX_RECORD_BYTES)
        return hub + sum(self.records(peer) * self.record_bytes(peer) for peer in peers)

    @property
    def sizes(self) -> dict[str, int]:
        """Of everyone's ordinary records, at most."""
        return {peer.name: self.record_bytes(peer) for peer in self._config.peer}

    @property
    def store_bytes(self) -> int:
        """The most that a learner's store may hold."""
        return int(self._config.weights.max_gib * 2**30)


class Scales:
    """How much everyone has written, from the log itself: nobody's word counts.

    `sizes`: bytes of a peer's ordinary records. One that is larger counts as several, so that who
    may publish a table cannot fill the log with records as large.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self.records: Counter[str] = Counter()
        self._position = 0

    def weigh(self, log: Log, clock: Clock, most_s: float = COUNT_S) -> bool:
        """Count what came since; whether all is counted."""
        deadline = Deadline(clock, most_s)
        while page := log.read(self._position):
            for entry in page:
                # under no id of a record's, and written by somebody all the same
                name = entry.id.removeprefix("=").split(".", 1)[0]
                size = self._sizes.get(name, len(entry.record) or 1)
                self.records[name] += max(1, -(-len(entry.record) // size))
            self._position = page[-1].position
            if deadline.passed:
                return False
        return True
