"""SamplerMember: a sampler in a process of its own, at a hub.

It never waits for anyone once it has weights.

It can be killed at any moment. What was sampled is in the outbox, the weights are in the learner's
blobs and their manifests on the log: it needs no checkpoint, and loses at most the batch it was
making.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec

from motley.config import CrewConfig
from motley.exchange import LogError
from motley.exchange.nats import NatsLog
from motley.membership import Joining
from motley.metrics import SamplerLine, Timing
from motley.records import Group
from motley.run import timed
from motley.seat import Seat
from motley.trust import known


class SamplerMember(Seat):
    def __init__(self, joining: Joining, config: CrewConfig, log: NatsLog, held: ExitStack) -> None:
        super().__init__(joining, config, log, held)
        blobs = self._blobs_of(self.me.follows)
        self.sampler = self._run.build_sampler(
            self.me, log, self.outbox, blobs, joining.membership.hub
        )
        self._admission = self.sampler.admission
        beside = ThreadPoolExecutor(1, thread_name_prefix="weights")
        held.callback(beside.shutdown, wait=False, cancel_futures=True)
        self.sampler.submit = beside.submit
        self.sampler.half.sampled_rounds = self.outbox.last_round + 1
        last = self._mend_outbox()
        # with a lost outbox, what the log has is not sampled again
        if last and isinstance(group := known(last)[0], Group):
            self.sampler.half.sampled_rounds = max(self.finished_rounds, group.round + 1)
        if self.finished_rounds:
            self._say(f"going on after round {self.finished_rounds}")
        self._start_courier()
        self._held = held.pop_all()

    @property
    def finished(self) -> bool:
        return self.sampler.finished

    @property
    def finished_rounds(self) -> int:
        return self.sampler.half.sampled_rounds

    def save(self) -> None:
        """Everything that must last is in the outbox already."""

    def _turn(self) -> SamplerLine | None:
        sampler = self.sampler
        self._look()
        if self.finished or not sampler.may_sample():
            return None
        self._beat("sampling")
        sampled, sample_s = timed(sampler.half.sample)
        self._courier.wake()
        timing = Timing(sample_s, sampled_tokens_per_s=sampled.num_tokens / sample_s)
        line = msgspec.structs.replace(self._run.sampler_line(sampler, sampled), timing=timing)
        self._run.write([line])
        return line

    def _look(self) -> None:
        """See what is new.

        Without the hub it goes on with the weights it has, as far as the staleness window will
        still take it.
        """
        first = self.sampler.follower.version < 0
        try:
            self.sampler.receive()
            self.sampler.renew()
        except LogError:
            if first or not self._may_sample_unheard():
                raise
        if first and self.sampler.follower.version >= 0:
            self._check_engine(self.sampler.half)

    def _last_lines(self) -> Iterator[SamplerLine]:
        self._say(f"{self.me.follows} has taken its last step, or was shut out")
        yield from ()

    def _waits_for(self) -> str:
        if self.sampler.follower.version < 0:
            return f"waiting for the first weights of {self.me.follows}"
        return f"waiting for {self.me.follows} to catch up"
