"""Publications: a learner's versions on their way into its outbox, for the samplers that follow it.

Owns which version is published and when. What a publication is made of is the `Publisher`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from motley.exchange import Mark
from motley.learning.waiting import Waiting
from motley.peers.sampling import SamplerHalf
from motley.weights.publisher import Publisher, by_hash


@dataclass(slots=True)
class Publications:
    half: SamplerHalf  # whose policy is published, through whose outbox
    waiting: Waiting  # what paced samplers are told of
    published: int = -1  # the newest version known to be on the log
    publisher: Publisher = field(init=False)

    def __post_init__(self) -> None:
        channel = self.half.config.weights
        self.publisher = Publisher(
            self.half.policy, channel.precision, channel.anchor_every, channel.deltas
        )

    def publish(self) -> None:
        """Put the present version in the outbox, if it is one to publish.

        One that was published before a crash is not published again.

        While one is on its way the next ones are left out: samplers want the newest, not a queue of
        all. So ask again when the way is free: paced samplers wait for the news that there is
        little left to learn from.
        """
        if not self._is_due():
            return
        half, version = self.half, self.half.policy.version
        mark = Mark("version", version)
        # also of one that is out already: the next change is against it
        made = self.publisher.make()
        if half.outbox.note_of(mark) is not None or version <= self.published:
            return
        now_s = half.clock.now_s()
        record = made.record(
            half.config.crew.name,
            half.me.name,
            version,
            half.config.weights.precision,
            self.waiting.backlog,
            now_s,
        )
        due_s = half.weather.sent(f"weights.{version}", now_s)
        blobs = by_hash(made.blobs | self.publisher.unstored)
        half.outbox.put([record], mark, due_s=due_s, blobs=blobs)
        self.publisher.unstored = {}

    def _is_due(self) -> bool:
        version, config = self.half.policy.version, self.half.config
        if self.publisher.version == version:
            return False
        is_last = version == config.crew.rounds
        return is_last or not (version % config.weights.every or len(self.half.outbox))
