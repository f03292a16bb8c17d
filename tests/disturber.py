"""A member with a valid key that means ill: it puts on the log whatever its honest crewmates must
refuse, and says of itself what is not so, for as long as the crew lasts.

Nothing that it publishes may be learned from, so that the others must end as if it had never come.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from fakes import entry
from motley.distributed.join import join
from motley.distributed.participant import Participant
from motley.exchange import Entry, LogError, unpack
from motley.exchange.nats.log import Names
from motley.exchange.nats.presence import Beat
from motley.records import FIRST_PREVIOUS, Backlog, Blob, Group, Weights
from motley.trust import Identity

EVERY_S = 0.05


def run_hostile(folder: Path, url: str, name: str) -> None:
    """The life of its process, until there is FOLDER/over."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))  # the reward module
    invitation = (folder / f"{name}.invitation").read_text()
    member = join(url, "spread", invitation, folder / name)
    attacker = Hostile(member, random.Random(time.time_ns()))
    while not (folder / "over").exists():
        with suppress(LogError, OSError, TimeoutError):
            attacker.strike()
        time.sleep(EVERY_S)


class Hostile:
    def __init__(self, member: Participant, rng: random.Random) -> None:
        self._station, self._rng = member.station, rng
        self._half: Any = member.role.peer.half  # type: ignore[attr-defined]
        self._identity = Identity.kept_at(self._station.folder / "peer.key")
        # a process of its own that was killed left records behind
        last = self._station.mend_outbox()
        self._counter, self._previous = self._station.outbox.head if last else (0, FIRST_PREVIOUS)
        self._made = 0

    @property
    def name(self) -> str:
        return self._station.me.name

    def strike(self) -> None:
        attacks: list[Callable[[], None]] = [
            self._garbage,
            self._garbage_under_a_good_id,
            self._later_round,
            self._fork,
            self._strange_key,
            self._weights,
            self._false_presence,
            self._flood,
        ]
        self._rng.choice(attacks)()

    def _garbage(self) -> None:
        self._send(Entry(0, self._strange_id(), self._rng.randbytes(self._rng.randrange(4096))))

    def _garbage_under_a_good_id(self) -> None:
        rounds, slots = self._station.config.crew.rounds, self._station.config.problems_per_peer
        round, slot = self._rng.randrange(rounds), self._rng.randrange(slots)
        self._send(Entry(0, f"{self.name}.{round}.{slot}", self._rng.randbytes(100)))

    def _flood(self) -> None:
        for _ in range(20):
            self._garbage()

    def _later_round(self) -> None:
        self._put(self._false_group())

    def _false_group(self) -> Group:
        """Its problem and answers are right, and its rewards are not."""
        self._half.sampled_rounds = self._rng.randrange(self._station.config.crew.rounds)
        made: Group = self._rng.choice(self._half.draw().groups)
        better = tuple(msgspec.structs.replace(r, reward=r.reward + 1) for r in made.rollouts)
        return msgspec.structs.replace(made, rollouts=better)

    def _fork(self) -> None:
        made = entry(self._false_group(), self._identity, self._counter, b"\1" * 32)
        self._send(made)

    def _strange_key(self) -> None:
        self._send(entry(self._false_group(), Identity.new(), self._counter, self._previous))

    def _weights(self) -> None:
        version = self._rng.randrange(2**31)
        blob = Blob(sha256="0" * 64, num_bytes=2**40, raw_bytes=2**40)
        self._put(
            Weights(
                crew="spread",
                peer=self.name,
                version=version,
                precision="bfloat16",
                base=version - 1,
                base_state=b"\0" * 32,
                state=b"\0" * 32,
                blobs=(blob,),
                frozen=(),
                backlog=Backlog(waiting=(), oldest_s=0.0),
                created_s=0.0,
            )
        )

    def _false_presence(self) -> None:
        state = self._rng.choice(["finished", "left", "sampling", "learning"])
        self._station.presence.say(Beat(state, self._rng.randrange(10**9), 10**9))

    def _strange_id(self) -> str:
        self._made += 1
        return f"{self.name}.{self._rng.randrange(10**6)}.x{self._made}"

    def _put(self, content: Group | Weights) -> None:
        made = entry(content, self._identity, self._counter, self._previous)
        self._send(made)
        self._counter, self._previous = self._counter + 1, unpack(made.record).hash

    def _send(self, made: Entry) -> None:
        subject = Names("spread").record(made.id)
        self._station.log.connection.call(lambda client: client.publish(subject, made.record), 5)
