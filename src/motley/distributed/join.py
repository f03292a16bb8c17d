"""Joining a crew from a folder of one's own: be let in, agree on the rules, take up a role."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from motley.clock import Clock, Deadline, RealClock
from motley.config import (
    CrewConfig,
    EnginePart,
    OpenAI,
    PeerConfig,
    changes,
    check_changes,
    check_name,
    may_become,
    parse_config,
    read_config,
    with_files_in,
    write_config,
)
from motley.distributed import enrolment
from motley.distributed.enrolment import Joining
from motley.distributed.learner import begin_learning
from motley.distributed.participant import WAIT_S, Participant, Role, take_station
from motley.distributed.register import Say
from motley.distributed.sampler import begin_sampling
from motley.exchange.nats.connection import Connection, NotAdmittedError
from motley.exchange.nats.log import Listening, NatsLog
from motley.files import hold
from motley.learning.hearing import Lots
from motley.models.named import may_be_mixed
from motley.models.opening import vocabulary_of
from motley.peers.torchrun import Ranks
from motley.records import HUB, Charter
from motley.runs.building import WarmProgress
from motley.runs.checking import check_config, check_spelled, is_mixed
from motley.tasks import load_task
from motley.trust import read_hub
from motley.trust.invitation import Invitation


class Brings(NamedTuple):
    """What a peer has of its own, where the crew file's word for it does not hold on this machine.

    Its engine is never the crew file's, which names programs and servers and is another's; nor is
    its judge.
    """

    data: Path | None = None  # the folder with the crew's problem files and reward modules
    model: str = ""
    device: str = ""
    devices: int = 0
    # None: the one it came with before, or torch
    engine: Literal["torch"] | EnginePart | None = None
    judge: OpenAI | None = None  # never the crew file's either
    # as it goes on, where its owner is this machine; None: as the charter has it
    crew: CrewConfig | None = None
    ranks: Ranks | None = None  # its other devices' processes, where torchrun has started them


def join(
    url: str,
    crew: str,
    invite: str,
    folder: Path,
    say: Say = lambda text: None,
    brings: Brings = Brings(),
    progress: WarmProgress | None = None,
    clock: Clock = RealClock(),
) -> Participant:
    """Take part in a crew, or take part again.

    Enrol if need be, agree on the rules, check the engine, go on where it was left.
    """
    check_name("crew", crew)
    Invitation.read(invite)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        held.callback(os.close, _hold(folder, invite))
        joining = Joining.begin(url, crew, invite, folder, say, clock)
        # then the address is right, and the hub is only away
        came_before = (folder / "config.toml").exists()
        connection = joining.patiently(joining.enter) if came_before else joining.enter()
        held.callback(connection.close)
        joining.keep()
        agreed = _agree(joining, NatsLog(connection, crew), brings)
        log = agreed.log(connection, joining.membership.peer)
        station = take_station(joining, agreed.config, log, held, agreed.mixed)
        role: Role = (
            begin_sampling(station, held)
            if station.me.role == "sampler"
            else begin_learning(station, progress, held, brings.ranks)
        )
        # Not before: what the log has of this peer must be known before anything is sent.
        station.courier.start()
        return Participant(station, role, held.pop_all())


def _hold(folder: Path, invite: str) -> int:
    lock = hold(folder / "member.lock")
    if lock is None:
        raise ValueError(
            f"{Invitation.read(invite).peer} is already running in {folder}; stop it first"
        )
    return lock


# Agreeing on the rules


def _listed(joining: Joining, log: NatsLog) -> Charter:
    """The charter of a crew whose roster has this peer.

    On a server without users of its own nobody has asked for that yet.
    """
    membership, deadline = joining.membership, Deadline(joining.clock, enrolment.ADMISSION_S)
    while True:
        entries = joining.patiently(lambda: log.records_of(HUB))
        charter, roster = read_hub(entries, membership.crew, membership.hub)
        if roster.keys.get(membership.peer) == joining.identity.public:
            return charter
        try:
            joining.patiently(joining.enrol)
        except NotAdmittedError:
            # the invitation is used up: the hub knows the key, and its roster is on the way
            if deadline.passed:
                raise
        joining.clock.sleep_s(WAIT_S)


class Agreed(NamedTuple):
    """The crew's rules with what this peer brings."""

    config: CrewConfig
    mixed: bool  # peers may have different vocabularies
    lots: bool  # groups stand in lots

    def log(self, connection: Connection, peer: str) -> NatsLog:
        """All of it, or what concerns a peer."""
        crew = self.config.crew.name
        if not self.lots:
            return NatsLog(connection, crew)
        lots = Lots(self.config)
        listening = Listening(peer, lots.of(peer), tables=self.mixed)
        return NatsLog(connection, crew, lots.of_group, listening)


def _agree(joining: Joining, log: NatsLog, brings: Brings) -> Agreed:
    """The crew's rules as its hub signed them, with what this peer brings.

    The task on this machine must ask the same as at the hub.
    """
    folder, me = joining.folder, joining.membership.peer
    charter = _listed(joining, log)
    agreed = parse_config(charter.config, source="the crew's charter")
    if brings.crew:
        check_changes(changes(agreed, brings.crew), str(folder))
    config = brings.crew or with_files_in(agreed, brings.data)
    path = folder / "config.toml"
    before = read_config(path) if path.exists() else None
    config = _with_own(config, before, me, brings)
    if brings.ranks:
        brings.ranks.check(me, config.named(me).devices)
    check_config(config, mine=config.student_of(me))
    if load_task(config.crew.task, config.task).fingerprint != charter.task:
        raise ValueError(
            f"task {config.crew.task} asks other problems here than at the hub; "
            "give the folder with the crew's own problem files with --data, or use the same "
            "version of Motley"
        )
    if before is None or ((brings.crew or brings.devices) and may_become(before, config)):
        write_config(config, path)
    elif before != config:
        raise ValueError(
            f"{folder} holds a run of other settings; choose another folder with --out, or delete "
            "it"
        )
    own = config.named(config.student_of(me))
    return Agreed(config, _is_mixed(agreed, own, brings), charter.lots)


def _is_mixed(agreed: CrewConfig, own: PeerConfig, brings: Brings) -> bool:
    """Whether peers may have different vocabularies: by their names in the charter, which are the
    same for everyone. Where all models are on this machine, by what these have.
    """
    if brings.crew:
        return is_mixed(brings.crew)
    mixed = may_be_mixed(peer.model for peer in agreed.students)
    if mixed:
        check_spelled(own.name, vocabulary_of(own.model, agreed.prompt))
    return mixed


def _with_own(config: CrewConfig, before: CrewConfig | None, me: str, brings: Brings) -> CrewConfig:
    """The crew with this peer's model, devices, engine and judge as it brings them.

    Where it does not say: as it said when it came first.
    """
    if brings.model and config.named(me).role == "sampler":
        raise ValueError(
            f"{me} is a sampler and has the model of {config.named(me).follows}; remove --model"
        )
    known = (
        msgspec.structs.replace(config.named(me), engine="torch", judge=None)
        if before is None
        else before.named(me)
    )
    own = {
        "model": brings.model or known.model,
        "device": brings.device or known.device,
        "devices": brings.devices or known.devices,
        "engine": brings.engine or known.engine,
        "judge": brings.judge or known.judge,
    }
    return msgspec.structs.replace(
        config,
        peer=tuple(msgspec.structs.replace(p, **own) if p.name == me else p for p in config.peer),
    )
