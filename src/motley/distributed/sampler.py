"""The role of a sampler in a process of its own, at a hub.

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

from motley.clock import timed
from motley.distributed.participant import Station
from motley.exchange import LogError
from motley.exchange.nats.blobs import NatsBlobs
from motley.models.devices import device_name
from motley.peers.follower import Sampler
from motley.records import Group
from motley.runs.building import build_sampler
from motley.runs.lines import sampler_line
from motley.runs.metrics import SamplerLine, Timing
from motley.trust import known


def begin_sampling(station: Station, held: ExitStack) -> SamplerRole:
    """A sampler without weights, whose next round is the first that nobody has of it."""
    sampler = _build(station, held)
    station.witness.rely_on(sampler.admission)
    sampler.half.sampled_rounds = station.outbox.last_round + 1
    mended = station.mend_outbox()
    # with a lost outbox, what the log has is not sampled again
    if mended and isinstance(group := known(mended.last)[0], Group):
        sampler.half.sampled_rounds = max(sampler.half.sampled_rounds, group.round + 1)
    if sampler.half.sampled_rounds:
        station.say(f"going on after round {sampler.half.sampled_rounds}")
    return SamplerRole(station, sampler)


def _build(station: Station, held: ExitStack) -> Sampler:
    """One that fetches weights in a thread of its own."""
    me, log = station.me, station.log
    blobs = NatsBlobs(log.connection, station.config.crew.name, me.follows)
    hub = station.joining.membership.hub
    sampler = build_sampler(station.run, me, log, station.outbox, blobs, hub)
    beside = ThreadPoolExecutor(1, thread_name_prefix="weights")
    held.callback(beside.shutdown, wait=False, cancel_futures=True)
    sampler.submit = beside.submit
    return sampler


class SamplerRole:
    def __init__(self, station: Station, sampler: Sampler) -> None:
        self.station, self.sampler = station, sampler

    @property
    def finished(self) -> bool:
        return self.sampler.finished

    @property
    def finished_rounds(self) -> int:
        return self.sampler.half.sampled_rounds

    def save(self) -> None:
        """Everything that must last is in the outbox already."""

    def turn(self) -> SamplerLine | None:
        sampler, station = self.sampler, self.station
        self._look()
        if self.finished or not sampler.may_sample():
            return None
        station.tell("sampling", self.finished_rounds)
        sampled, sample_s = timed(sampler.half.sample, station.clock)
        station.courier.wake()
        rate, device = sampled.num_tokens / sample_s, device_name(sampler.half.policy.device)
        timing = Timing(sample_s, sampled_tokens_per_s=rate, device=device)
        line = msgspec.structs.replace(sampler_line(sampler, sampled), timing=timing)
        station.run.write([line])
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
            if first or not self.station.may_sample_unheard():
                raise
        if first and self.sampler.follower.version >= 0:
            self.station.check_engine(self.sampler.half)

    def last_lines(self) -> Iterator[SamplerLine]:
        follows = self.station.me.follows
        self.station.say(f"{follows} has taken its last step, or was shut out")
        yield from ()

    @property
    def stuck(self) -> str:
        return ""

    def waits_for(self) -> str:
        follows = self.station.me.follows
        if self.sampler.follower.version < 0:
            return f"waiting for the first weights of {follows}"
        return f"waiting for {follows} to catch up"
