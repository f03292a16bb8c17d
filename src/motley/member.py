"""Member: a peer or a learner in a process of its own, in a crew whose log is on a hub.

Owns joining, the journal and checkpoints.

It can be killed at any moment. What was sampled is in the outbox, what was learned from is in the
journal, the rest is in the newest checkpoint; the log has everything else, and the same steps are
taken again from the same groups.

| it waits for | in | until |
|---|---|---|
| the hub | learning, hearing from others | it is back; sampling goes on within the window |
| crewmates' groups | lockstep | all are there, the deadline, or nobody awaited there |
| enough groups | async | enough, or everyone has sampled the last round |
| its own sampling | learning | it is done; see `overlap.py` |
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from motley.config import (
    CrewConfig,
    EnginePart,
    parse_config,
    read_config,
    with_files_in,
    write_config,
)
from motley.exchange import LogError
from motley.exchange.arriving import ArrivingLog
from motley.exchange.connection import NotAdmittedError
from motley.exchange.nats import NatsLog
from motley.files import hold, replace, sync
from motley.hub import Say
from motley.learning.checkpoint import checkpoints, load_manifest, save_checkpoint, save_training
from motley.learning.journal import Journal, WrittenStep
from motley.learning.learner import StepReport
from motley.learning.pace import Turns
from motley.learning.waiting import Wait
from motley.membership import ADMISSION_S, Joining, patiently
from motley.overlap import Overlap, TakeStep
from motley.peer_state import PeerState
from motley.records import HUB, Charter, Weights
from motley.run import MetricsLine, Timing, WarmProgress, by_sender, check_config, timed
from motley.sampler import Sampled
from motley.sampler_member import SamplerMember
from motley.seat import WAIT_S, Seat
from motley.tasks import load_task
from motley.trust import known, read_hub
from motley.trust.invitation import Invitation

# Joining


class Brings(NamedTuple):
    """What a peer has of its own, where the crew file's word for it does not hold on this machine.

    Its engine is never the crew file's: that names programs and servers, and who wrote it is
    another.
    """

    data: Path | None = None  # the folder with the crew's problem files
    model: str = ""
    device: str = ""
    # None: the one it came with before, or torch
    engine: Literal["torch"] | EnginePart | None = None


def join(
    url: str,
    crew: str,
    invite: str,
    folder: Path,
    say: Say = lambda text: None,
    brings: Brings = Brings(),
    progress: WarmProgress | None = None,
) -> Member | SamplerMember:
    """Take part in a crew, or take part again: enrol if need be, agree on the rules, check the
    engine, go on where it was left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        lock = hold(folder / "member.lock")
        if lock is None:
            raise ValueError(
                f"{Invitation.read(invite).peer} is already running in {folder}; stop it first"
            )
        held.callback(os.close, lock)
        joining = Joining.begin(url, crew, invite, folder, say)
        # then the address is right, and the hub is only away
        came_before = (folder / "config.toml").exists()
        connection = patiently(joining.enter, say) if came_before else joining.enter()
        held.callback(connection.close)
        joining.keep()
        log = patiently(lambda: NatsLog(connection, crew), say)
        config = _agree(joining, log, brings)
        if config.named(joining.membership.peer).role == "sampler":
            return SamplerMember(joining, config, log, held)
        return Member(joining, config, log, progress, held)


def _listed(joining: Joining, log: NatsLog) -> Charter:
    """The charter of a crew whose roster has this peer.

    On a server without users of its own nobody has asked for that yet.
    """
    member, stop = joining.membership, time.monotonic() + ADMISSION_S
    while True:
        charter, roster = read_hub(
            patiently(lambda: log.records_of(HUB), joining.say), member.crew, member.hub
        )
        if roster.keys.get(member.peer) == joining.identity.public:
            return charter
        try:
            patiently(joining.enrol, joining.say)
        except (
            NotAdmittedError
        ):  # the invitation is used up: the hub knows the key, and its roster is on the way
            if time.monotonic() > stop:
                raise
        time.sleep(WAIT_S)


def _agree(joining: Joining, log: NatsLog, brings: Brings) -> CrewConfig:
    """The crew's rules, as its hub signed them, a task on this machine that asks the same, and what
    this peer brings.
    """
    folder, me = joining.folder, joining.membership.peer
    charter = _listed(joining, log)
    config = with_files_in(parse_config(charter.config, source="the crew's charter"), brings.data)
    path = folder / "config.toml"
    config = _with_own(config, read_config(path) if path.exists() else None, me, brings)
    check_config(config, mine=config.student_of(me))
    if load_task(config.crew.task, config.task).fingerprint != charter.task:
        raise ValueError(
            f"task {config.crew.task} asks other problems here than at the hub; "
            "give the folder with the crew's own problem files with --data, or use the same "
            "version of Motley"
        )
    if not path.exists():
        write_config(config, path)
    elif read_config(path) != config:
        raise ValueError(
            f"{folder} holds a run of other settings; choose another folder with --out, or delete "
            "it"
        )
    return config


def _with_own(config: CrewConfig, before: CrewConfig | None, me: str, brings: Brings) -> CrewConfig:
    """The crew with this peer's model, device and engine as it brings them; where it does not say,
    as it said when it came first.
    """
    if brings.model and config.named(me).role == "sampler":
        raise ValueError(
            f"{me} is a sampler and has the model of {config.named(me).follows}; remove --model"
        )
    known = (
        msgspec.structs.replace(config.named(me), engine="torch")
        if before is None
        else before.named(me)
    )
    own = {
        "model": brings.model or known.model,
        "device": brings.device or known.device,
        "engine": brings.engine or known.engine,
    }
    return msgspec.structs.replace(
        config,
        peer=tuple(msgspec.structs.replace(p, **own) if p.name == me else p for p in config.peer),
    )


# Taking part


class MemberState(msgspec.Struct, frozen=True, kw_only=True):
    """A member in a checkpoint."""

    metrics_bytes: int
    over: bool
    peer: PeerState


class Member(Seat):
    def __init__(
        self,
        joining: Joining,
        config: CrewConfig,
        log: NatsLog,
        progress: WarmProgress | None,
        held: ExitStack,
    ) -> None:
        super().__init__(joining, config, log, held)
        weather = config.weather(self.me.name, joining.membership.joined_s)
        self._seen = log if weather.link.instant else ArrivingLog(log, weather, self._run.clock)
        self.peer = self._run.build(
            self.me, self._seen, self.outbox, joining.membership.hub, progress
        )
        self._admission = self.peer.admission
        self._blobs = self._blobs_of(self.me.name) if self.peer.weights else None
        self._check_engine(self.peer.half)
        # async: there is nothing more to come, though fewer steps were taken than there are rounds
        self._over = False
        self._journal = Journal(self.folder / "journal.jsonl")
        self._start_or_restore()
        last = self._mend_outbox()
        if last and isinstance(content := known(last)[0], Weights):
            self._check_reach(content.version)
            if self.peer.weights:
                self.peer.weights.published = content.version
        self.peer.publish_weights()
        self._start_courier(self._blobs)
        self._sampled = self._sampled_before()
        self._sample_s = 0.0
        self._overlap = Overlap(config, self.peer.half, self._say)
        self._ahead = False  # the next turn's round was sampled beside the last step
        self._idle = False  # nothing on the log could be learned from
        self._without: list[str] = []  # who was not waited for
        self._waits_since = time.monotonic()  # for crewmates, while connected
        self._held = held.pop_all()

    @property
    def finished_rounds(self) -> int:
        return self.peer.learned_rounds

    @property
    def finished(self) -> bool:
        peer, rounds = self.peer, self.config.crew.rounds
        if peer.learned_rounds >= rounds or self._over:
            return True
        if self.me.role == "learner":
            return not peer.crewmates  # everyone was shut out; others go on for as long as it does
        if not peer.pace.may_run_dry or peer.half.sampled_rounds < rounds or not self._idle:
            return False
        return self._closed() or all(
            peer.admitted.complete[name] >= rounds or self._has_ended(name)
            for name in peer.crewmates
        )

    def _has_ended(self, name: str) -> bool:
        """A sampler makes as many rounds as its learner's steps take, and then says so."""
        heard = self.presence.heard.get(name)
        return (
            self.config.named(name).role == "sampler"
            and heard is not None
            and heard.state == "finished"
        )

    def _waits_for(self) -> str:
        if not self.peer.pace.awaits_others:
            return f"waiting for groups: {len(self.peer.waiting)} are there"
        awaited, refused = self.peer.awaited(), by_sender(self.peer.admission.refused)
        said = [
            f"round {self.peer.learned_rounds + 1}: waiting for {', '.join(awaited)} for "
            f"{time.monotonic() - self._waits_since:.0f} s"
        ]
        why = {
            name: f"{sum(counts.values())} records of {name} were refused: {', '.join(counts)}"
            for name, counts in refused.items()
        }
        return "; ".join(said + [why[name] for name in awaited if name in why])

    def save(self) -> None:
        sync(self._run.metrics)
        peer = self.peer
        state = MemberState(
            metrics_bytes=self._run.metrics.stat().st_size, over=self._over, peer=peer.state()
        )
        root = self.folder / "checkpoints"
        save_checkpoint(
            root,
            peer.learned_rounds,
            state,
            lambda f: save_training(peer.learner.policy, peer.learner.optimiser, f / peer.me.name),
        )
        self._journal.forget_before(int(checkpoints(root)[0].name.removeprefix("round-")))
        self._keep_refusals()
        self._tidy_blobs()

    # Starting

    def _check_reach(self, version: int) -> None:
        """Versions are published once for ever: a learner that lost its folder cannot make them
        again, other than they were.
        """
        reach = max(self.peer.learner.policy.version, self._journal.reach)
        if version > reach:
            raise ValueError(
                f"the log has version {version} of {self.me.name}, and {self.folder} reaches "
                f"{reach} only; "
                "come back with the folder it learned in (--out), or begin the crew anew under "
                "another name"
            )

    def _start_or_restore(self) -> None:
        found = checkpoints(self.folder / "checkpoints")
        if not found:
            self._run.cut_metrics(0, self.folder)
            self._run.write(
                [{"round": 0, "peer": self.peer.me.name, **self._run.accuracies(self.peer)}]
            )
            self.save()
            return
        state = load_manifest(found[-1], MemberState)
        self._run.cut_metrics(state.metrics_bytes, found[-1])
        if isinstance(self._seen, ArrivingLog):
            self._seen.here = max(state.peer.cursor, self._journal.cursor)
        patiently(lambda: self._run.restore(self.peer, found[-1], state.peer), self._say)
        self._over = state.over
        self._say(f"going on after round {self.peer.learned_rounds}")

    def _sampled_before(self) -> Sampled | None:
        """What was sampled of a lockstep round that was not learned from before the stop."""
        peer = self.peer
        if not peer.pace.has_sampled(Turns(peer.half.sampled_rounds, peer.learned_rounds)):
            return None
        return peer.half.sampled_in(peer.learned_rounds)

    # One turn

    def _turn(self) -> MetricsLine | None:
        """Sample if it is time to, learn if it can; where they overlap, the other way round.

        The metrics line of a finished round.
        """
        peer = self.peer
        done = self._journal.of(peer.learned_rounds)
        heard = self._receive_to(done.cursor) if done else self._try_to_receive()
        beside = done is None and heard and self._may_sample_beside()
        step = self._choose(done) if beside else None
        if step is None:
            beside = False
            sampled = self._sample(replayed=done is not None)
            if done is None and (sampled or not heard):
                peer.receive()
            step = self._choose(done)
        if step is None:
            peer.publish_weights()
            self._courier.wake()
            if done:
                raise ValueError(
                    f"the log does not hold what round {peer.learned_rounds + 1} was learned from "
                    "before the restart"
                )
            return None
        self._beat("learning")
        report, timing = self._learn(step, beside)
        peer.publish_weights()
        self._courier.wake()
        return self._round_is_over(report, timing)

    def _choose(self, done: WrittenStep | None) -> TakeStep | None:
        """The next step, written down, if there is enough for it.

        `done`: the same as before a crash.
        """
        peer = self.peer
        closed = done.closed if done else self._closed()
        self._without = peer.awaited() if closed else []
        chosen = peer.choose(closed, again=done.positions if done else ())
        self._idle = isinstance(chosen, Wait)
        if isinstance(chosen, Wait):
            return None
        written = WrittenStep.of(peer.learned_rounds, peer.cursor, closed, chosen.groups)
        self._journal.add(written)
        return partial(peer.step, chosen, done is not None)

    def _learn(self, step: TakeStep, beside: bool) -> tuple[StepReport | None, Timing]:
        """Take the step, and sample beside it if asked to."""
        if beside:
            both = self._overlap.both(partial(step, refresh=False))
            self._sampled, self._ahead = both.sampled, both.sampled is not None
            return both.report, both.timing
        report, learn_s = timed(step)
        if self._sampled and self._sampled.fresh:
            self._overlap.observe()
        return report, Timing(self._sample_s, learn_s)

    def _try_to_receive(self) -> bool:
        """Whether the log could be read; if not, but sampling may go on without it, that is no
        error yet.
        """
        try:
            self.peer.receive()
        except LogError:
            self._waits_since = time.monotonic()  # who cannot be heard is not late
            if not self._may_sample_unheard():
                raise
            return False
        return True

    def _receive_to(self, position: int) -> bool:
        while self.peer.cursor < position:
            before = self.peer.cursor
            self.peer.receive(until=position)
            if self.peer.cursor == before:
                raise ValueError(
                    f"the log ends at {before}, and this peer had read to {position}; is it "
                    "another log?"
                )
        return True

    def _sample(self, replayed: bool) -> bool:
        """Sample the next round if it is time to; whether something was sampled."""
        peer = self.peer
        if self._ahead or not peer.may_sample(replayed):
            self._ahead = False
            return False
        if self._is_past(peer.half.sampled_rounds, replayed):
            peer.half.sampled_rounds += 1
            self._sampled = None
            return False
        self._beat("sampling")
        self._sampled, self._sample_s = timed(peer.half.sample)
        self._courier.wake()
        self._waits_since = time.monotonic()
        return True

    def _may_sample_beside(self) -> bool:
        """Whether to sample the next round beside a step.

        What is to be learned from in that step counts as waiting, as it does in turn.
        """
        half = self.peer.half
        round, may = half.sampled_rounds, self._overlap.on and self.peer.may_sample()
        return may and half.sampled_in(round) is None and not self._is_past(round, replayed=False)

    def _is_past(self, round: int, replayed: bool) -> bool:
        """Nobody would use what is sampled now: it is on the log already, or the crew went on
        without this peer.
        """
        peer = self.peer
        if peer.half.outbox.note_of(round) is not None:
            return False
        if peer.admitted.complete[peer.me.name] > round:
            return True
        return self.config.crew.deadline_s > 0 and (
            replayed or any(c.group.round > round for c in peer.waiting)
        )

    def _closed(self) -> bool:
        """Whether to go on with what is there.

        Never while the hub cannot be reached: then it is we who are missing.
        """
        deadline_s = self.config.crew.deadline_s
        if deadline_s == 0 or self.log.connection.trouble:
            return False
        if time.monotonic() - self._waits_since >= deadline_s:
            return True
        if not self.peer.pace.awaits_others:
            return False
        awaited = self.peer.awaited()
        if any(
            c.group.round > self.peer.learned_rounds
            for c in self.peer.waiting
            if c.group.origin.peer not in awaited
        ):
            return True  # the crew has closed this round long ago
        heard = self.presence.heard
        return self.peer.me.name not in awaited and all(
            name in heard and heard[name].gone for name in awaited
        )

    def _round_is_over(self, report: StepReport | None, timing: Timing) -> MetricsLine:
        peer = self.peer
        line = self._run.line(peer, peer.learned_rounds, self._sampled, report, timing)
        if self._without:
            line["without"] = self._without
        self._sampled, self._sample_s = None, 0.0
        self._waits_since = time.monotonic()
        self._run.write([line])
        if (
            peer.learned_rounds == self.config.crew.rounds
            or peer.learned_rounds % self.config.learning.checkpoint_every == 0
        ):
            self.save()
        return line

    def _last_lines(self) -> Iterator[MetricsLine]:
        if self.finished_rounds >= self.config.crew.rounds or self._over:
            return
        line = {
            "round": self.config.crew.rounds,
            "peer": self.peer.me.name,
            "version": self.peer.learner.policy.version,
        }
        line |= self._run.accuracies(self.peer)
        self._run.write([line])
        self._over = True
        self.save()
        yield line

    def _keep_refusals(self) -> None:
        """The newest refusals, for people to look at; their records are on the log."""
        content = b"".join(
            msgspec.json.encode(refusal) + b"\n" for refusal in self.peer.admission.kept
        )
        replace(self.folder / "refused.jsonl", content)

    def _tidy_blobs(self) -> None:
        """Have the store forget versions that no sampler can need, once this process knows what
        they are.
        """
        publisher = self.peer.weights.publisher if self.peer.weights else None
        # the first of this process may never have been stored
        if publisher and self._blobs and publisher.num_anchors > 2:
            with suppress(LogError):  # at the next checkpoint, then
                self._blobs.keep_only(publisher.needed())
