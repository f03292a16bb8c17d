"""A crew in one process, some of whose peers are hostile.

Owns the order of a round, which is the worst for the honest: hostile peers publish last, and have
read everything. They do not learn, and nobody waits for them: a round is closed with what is there.
Knows attacks by what they forge; knows none of them.
"""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from motley.attacks.attack import Evidence, HonestAnswer, Mounted, Scene
from motley.config import CrewConfig, PeerConfig
from motley.exchange import MemoryLog, decode, unpack
from motley.learning.waiting import Wait
from motley.models.policy import Policy
from motley.peers.peer import Peer
from motley.records import Group, Problem
from motley.runs.building import build_peer
from motley.runs.checking import is_mixed
from motley.runs.folder import Run
from motley.runs.local import found_log, one_process_outbox
from motley.tasks import evaluation_set

SAMPLES = 2  # of every held-out problem


@dataclass(frozen=True, slots=True)
class Parts:
    """Who is who, in a crew of this file."""

    config: CrewConfig
    hostile: tuple[str, ...]
    twin: bool = False  # the first hostile peer begins with the first honest one's weights

    @property
    def honest(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.config.peer if p.name not in self.hostile)


@dataclass(slots=True)
class Alarms:
    """What honest peers held against whom."""

    detected: int = 0  # the first round in which a hostile peer was refused or muted
    false: int = 0  # sender-rounds in which an honest peer was
    sender_rounds: int = 0
    _known: Counter[tuple[str, str]] = field(default_factory=Counter)  # (reader, sender)

    def note(self, round: int, reader: Peer, parts: Parts) -> None:
        held = held_against(reader)
        for sender in parts.config.authors:
            if sender == reader.me.name:
                continue
            more = held[sender] > self._known[reader.me.name, sender]
            more = more or reader.scrutiny.is_muted(sender)
            self._known[reader.me.name, sender] = held[sender]
            if sender not in parts.hostile:
                self.sender_rounds += 1
                self.false += more
            elif more and not self.detected:
                self.detected = round

    @property
    def false_share(self) -> float:
        return self.false / self.sender_rounds if self.sender_rounds else 0.0


def held_against(reader: Peer) -> Counter[str]:
    """Per sender, how often this reader refused something of it."""
    counts: Counter[str] = Counter()
    for (sender, _), times in reader.admission.refused.items():
        counts[sender] += times
    return counts


class AttackedCrew:
    """`rounds()` trains; `evidence()` says what became of the honest peers.

    `mounted` None: everyone is honest, and those called hostile are only not looked at.
    """

    def __init__(self, parts: Parts, mounted: Mounted | None, folder: Path) -> None:
        self.parts, self.mounted, self.alarms = parts, mounted, Alarms()
        self._run = Run(parts.config, folder, mixed=is_mixed(parts.config))
        self._log = MemoryLog()
        self._hub = found_log(parts.config, self._log, self._run.task)
        self._peers = {me.name: self._built(me, folder) for me in self._in_order()}
        self._likeness = _copy_of(self._peers[parts.honest[0]].learner.policy)
        self.finished_rounds = 0
        self._groups: Counter[str] = Counter()  # learned from, by sender
        self._published: set[str] = set()  # ids of hostile groups
        self._round_began = 0  # position in the log

    def _in_order(self) -> list[PeerConfig]:
        """The honest first: a twin's weights are another's."""
        parts = self.parts
        return [parts.config.named(name) for name in (*parts.honest, *parts.hostile)]

    def _built(self, me: PeerConfig, folder: Path) -> Peer:
        parts, config = self.parts, self.parts.config
        if parts.twin and me.name == parts.hostile[0]:
            model = folder / "start" / parts.honest[0]
            shutil.copytree(model, folder / "start" / me.name)
        return build_peer(self._run, me, self._log, one_process_outbox(config, me.name), self._hub)

    @property
    def learners(self) -> list[str]:
        """Everyone who plays by the rules."""
        return [*self.parts.honest, *(() if self.mounted else self.parts.hostile)]

    def rounds(self) -> Iterator[int]:
        """Train; yields how many rounds are finished."""
        for number in range(1, self.parts.config.crew.rounds + 1):
            self._round_began = len(self._log)
            for name in self.learners:
                peer = self._peers[name]
                if peer.may_sample():
                    peer.half.sample()
                peer.publish()
            if self.mounted:
                for name in self.parts.hostile:
                    self._strike(self._peers[name], self.mounted)
            for name in self.learners:
                self._learn(self._peers[name])
            for name in self.parts.honest:
                self.alarms.note(number, self._peers[name], self.parts)
            self.finished_rounds = number
            yield number

    def _learn(self, peer: Peer) -> None:
        peer.receive()
        result = peer.learn(closed=True)
        if isinstance(result, Wait) or result.report is None:
            return
        if peer.me.name in self.parts.honest:
            for sender, metrics in result.report.senders.items():
                self._groups[sender] += metrics.groups

    def _strike(self, peer: Peer, mounted: Mounted) -> None:
        """A hostile peer's turn: sample, forge, publish what it has not published before."""
        drawn = peer.half.draw()
        # it does not train, and says that it does
        current = [_of_version(group, drawn.round) for group in drawn.groups if not group.branch]
        forged = mounted.forge(current, self._scene(peer, drawn.round))
        new = [group for group in forged if group.id not in self._published]
        self._published.update(group.id for group in new)
        peer.half.keep(drawn._replace(groups=new))
        peer.publish()
        # what it learned in secret samples from the next round on
        peer.half.engine.refresh()

    def _scene(self, peer: Peer, round: int) -> Scene:
        half = peer.half
        return Scene(
            me=peer.me.name,
            accomplices=self.parts.hostile,
            round=round,
            policy=peer.learner.policy,
            likeness=self._likeness,
            problems=lambda number: half.problems(peer.me.name, number),
            records=self._groups_of_this_round,
        )

    def _groups_of_this_round(self) -> list[Group]:
        entries = self._log.read(self._round_began, limit=len(self._log))
        contents = [decode(unpack(entry.record).body)[1] for entry in entries]
        return [c for c in contents if isinstance(c, Group) and not c.branch]

    # What became of it

    def evidence(self) -> Evidence:
        config = self.parts.config
        problems = evaluation_set(self._run.task, "heldout", config.evaluate.problems)
        answers = {name: self.ask(name, problems) for name in self.parts.honest}
        hostile = sum(self._groups[name] for name in self.parts.hostile)
        return Evidence(answers, hostile / max(1, self._groups.total()), self.ask)

    def ask(self, name: str, problems: Sequence[Problem]) -> list[HonestAnswer]:
        """Have a peer answer as it samples in training."""
        peer, sampling = self._peers[name], self.parts.config.sampling
        policy = peer.learner.policy
        prompts = [policy.prompts.ids(problem) for problem in problems]
        made = peer.half.engine.sample(prompts, SAMPLES, sampling, seed=0)
        asked = [p for p, row in zip(problems, made, strict=True) for _ in row]
        tokens = [completion.tokens for row in made for completion in row]
        texts = policy.vocabulary.decode_all(tokens)
        rewards = self._run.task.score(asked, texts)
        return [HonestAnswer(*one) for one in zip(asked, tokens, texts, rewards, strict=True)]


def _of_version(group: Group, version: int) -> Group:
    origin = msgspec.structs.replace(group.origin, version=version)
    return msgspec.structs.replace(group, origin=origin)


def _copy_of(policy: Policy) -> Policy:
    """A copy that trains no further."""
    return replace(policy, model=copy.deepcopy(policy.model))
