"""Three honest peers and a hostile one with a valid key, on a real hub: nobody honest may stop, or
wait longer than the deadline and a little.

    python tests/hostile.py
    python tests/hostile.py --only cold --only bombs --pace async --objective uplift

A line is one thing that a valid key lets a peer do. The hostile peer does it in every round. Half
way the hub's owner shuts it out, and the honest ones must end their rounds. Prints a table, and
exits with 1 if a line is not ok.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ["OMP_NUM_THREADS"] = "1"

import msgspec
import zstandard

from fakes import spread_crew, write_task
from hubs import PATIENCE_S, local_place, run_hub
from motley.config import CrewConfig, parse_config, write_config
from motley.distributed.join import join
from motley.distributed.orders import give_order
from motley.distributed.participant import Participant
from motley.distributed.register import Order, Place
from motley.exchange import Entry, Sealed, decode, encode, pack, unpack
from motley.exchange.nats.names import Names
from motley.exchange.nats.presence import Beat
from motley.exchange.outbox import Head
from motley.exchange.sections import encode_sections, varints
from motley.exchange.wire import SCHEMA
from motley.files import replace
from motley.peers.sampling import SamplerHalf
from motley.records import Content, Group, Origin, Rollout, Stamp, Table
from motley.runs.metrics import LearnerLine
from motley.spelling import Spelling

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["motley.distributed.join", "hubs"])

ROUNDS = 6
DEADLINE_S = 5.0
GRACE_S = 10.0  # beyond the deadline
LIMIT_S = 120.0  # of a line, on a machine that is busy with something else
HOSTILE = "full3"
CREW = "spread"


# The hostile peer


@dataclass
class Intruder:
    """A peer that has joined, and now does as it likes."""

    participant: Participant
    half: SamplerHalf
    sent: int = 0  # of what is numbered
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def config(self) -> CrewConfig:
        return self.half.config

    @property
    def names(self) -> Names:
        return Names(self.config.crew.name)

    def groups(self, round: int, **origin: object) -> list[Group]:
        """Invented answers to the problems it was given, with their true rewards."""
        slots = range(self.config.problems_per_peer)
        return [self.group(round, slot, **origin) for slot in slots]

    def group(self, round: int, slot: int, **origin: object) -> Group:
        size = self.config.rollouts_per_group
        return self.of_rollouts(round, slot, [self.tokens() for _ in range(size)], **origin)

    def tokens(self) -> tuple[int, ...]:
        vocabulary = self.half.policy.vocabulary
        text = "".join(self.rng.choice("0123456789") for _ in range(self.rng.randrange(1, 5)))
        return (*vocabulary.encode(text), vocabulary.end_id)

    def of_rollouts(
        self, round: int, slot: int, completions: Sequence[tuple[int, ...]], **origin: object
    ) -> Group:
        half = self.half
        problem = half.problems(half.me.name, round)[slot]
        texts = half.texts(completions)
        rewards = half.task.score([problem] * len(texts), texts)
        ends = half.policy.vocabulary.end_ids
        made = {
            "peer": half.me.name,
            "model": half.policy.fingerprint,
            "vocabulary": half.policy.vocabulary.fingerprint,
            "version": round,
            "sampling": self.config.sampling,
        }
        return Group(
            crew=self.config.crew.name,
            problem=problem.id,
            round=round,
            slot=slot,
            origin=Origin(**made | origin),
            rollouts=tuple(
                Rollout(
                    tokens=tokens,
                    logprobs=(-2.5,) * len(tokens),
                    reward=reward,
                    ending="stop" if tokens[-1] in ends else "length",
                )
                for tokens, reward in zip(completions, rewards, strict=True)
            ),
            created_s=time.time(),
        )

    def send(self, contents: Sequence[Content]) -> None:
        self.half.outbox.put(contents)
        self.participant.station.courier.wake()

    def publish(self, subject: str, content: bytes, reply: str = "") -> None:
        """Past everything that keeps a peer to the rules."""
        connection = self.participant.station.log.connection
        connection.call(lambda client: client.publish(subject, content, reply=reply))

    def table(self, spelling: Spelling | None = None) -> Table:
        """Its own, or what it says is its own."""
        vocabulary = self.half.policy.vocabulary
        return Table(
            crew=self.config.crew.name,
            peer=HOSTILE,
            vocabulary=vocabulary.fingerprint,
            ends=vocabulary.end_ids,
            encoded=(spelling or vocabulary.spelling).encode(),
        )

    def sealed(self, body: bytes) -> bytes:
        return pack(self.participant.station.joining.identity.sign(Sealed(b"", body).signed), body)


Act = Callable[[Intruder, int], None]  # what it does in a round


def with_logprob(value: float) -> Act:
    def act(intruder: Intruder, round: int) -> None:
        intruder.send([claiming(group, value) for group in intruder.groups(round)])

    return act


def claiming(group: Group, logprob: float) -> Group:
    rollouts = tuple(
        msgspec.structs.replace(r, logprobs=(logprob,) * len(r.tokens)) for r in group.rollouts
    )
    return msgspec.structs.replace(group, rollouts=rollouts)


def cold(intruder: Intruder, round: int) -> None:
    sampling = msgspec.structs.replace(intruder.config.sampling, temperature=1e-40)
    intruder.send(intruder.groups(round, sampling=sampling))


def later(intruder: Intruder, round: int) -> None:
    """One group of a later round, and nothing of this one."""
    if round + 2 < ROUNDS and round % 2 == 0:
        intruder.send([intruder.group(round + 2, 0)])


def bombs(intruder: Intruder, round: int) -> None:
    """Records of less than a kilobyte with a million tokens each."""
    intruder.send(intruder.groups(round))
    wait_until(lambda: len(intruder.half.outbox) == 0)
    size = intruder.config.rollouts_per_group
    many = 2**20 // size
    rollout = Rollout(tokens=(0,) * many, logprobs=(0.0,) * many, reward=0.0, ending="length")
    sections = b"".join(encode_sections("bomb", [rollout] * size, lossless=False).parts)
    key, head = intruder.half.outbox.key, intruder.half.outbox.head
    records = []
    for number in range(40 // ROUNDS + 1):
        small = intruder.group(round, number % intruder.config.problems_per_peer)
        small = msgspec.structs.replace(small, slot=1000 + number)
        stamp = Stamp(key=key, counter=head.counter, previous=head.previous)
        body = encode(small, stamp)
        (length,), start = varints(body, 0, 1)
        body = body[: start + length] + sections
        records.append((small.id, intruder.sealed(body)))
        head = Head(head.counter + 1, Sealed(b"", body).hash)
    intruder.half.outbox.head = head
    intruder.participant.station.log.append(records)


def foreign_replies(intruder: Intruder, round: int) -> None:
    """Have the server send the whole log to where others listen."""
    intruder.send(intruder.groups(round))
    names = intruder.names
    asked = {"seq": 1, "batch": 1024, "max_bytes": 2**23, "next_by_subj": names.everything}
    others = [peer.name for peer in intruder.config.peer if peer.name != HOSTILE]
    targets = [
        *(f"_INBOX.{name}.{place}" for name in others for place in ("0.0", "x")),
        *(names.presence(name) for name in others),
        *(names.record(f"{name}.{round + 1}.0") for name in others),
    ]
    for target in targets * 10:
        intruder.publish(names.direct_get, json.dumps(asked).encode(), reply=target)


def presence_flood(intruder: Intruder, round: int) -> None:
    intruder.send(intruder.groups(round))
    for _ in range(20):
        intruder.publish(intruder.names.presence(HOSTILE), bytes(4 * 2**20))


def record_flood(intruder: Intruder, round: int) -> None:
    """Thousands of small records that are none."""
    intruder.send(intruder.groups(round))
    for _ in range(1000):
        intruder.sent += 1
        intruder.publish(
            intruder.names.record(f"{HOSTILE}.junk.{intruder.sent}"), bytes([SCHEMA]) + b"junk"
        )


def sampler_flood(intruder: Intruder, round: int) -> None:
    """Hundreds of good groups at once, so that much waits and the others are held up."""
    rounds = range(100 * round, 100 * (round + 1))
    intruder.send([g for number in rounds for g in intruder.groups(number, version=0)])


def invented(intruder: Intruder, round: int) -> None:
    intruder.send(intruder.groups(round))


def short_lengths(intruder: Intruder, round: int) -> None:
    """Answers of two tokens that are said to have run out of room."""
    size = intruder.config.rollouts_per_group
    slots = range(intruder.config.problems_per_peer)
    two = lambda: tuple(intruder.half.policy.vocabulary.encode(str(intruder.rng.randrange(10, 99))))
    intruder.send(
        [intruder.of_rollouts(round, slot, [two() for _ in range(size)]) for slot in slots]
    )


def special_tokens(intruder: Intruder, round: int) -> None:
    """Padding inside answers."""
    size, pad = intruder.config.rollouts_per_group, intruder.half.policy.vocabulary.pad_id
    made = [(pad, *intruder.tokens()[-3:]) for _ in range(size)]
    slots = range(intruder.config.problems_per_peer)
    intruder.send([intruder.of_rollouts(round, slot, made) for slot in slots])


def of_origin(**origin: object) -> Act:
    return lambda intruder, round: intruder.send(intruder.groups(round, **origin))


def from_the_future(intruder: Intruder, round: int) -> None:
    made = [msgspec.structs.replace(g, created_s=1e18) for g in intruder.groups(round)]
    intruder.send(made)


def copied(intruder: Intruder, round: int) -> None:
    """Another's rollouts under its own problems."""
    groups = [content for content in contents(intruder) if content.round == round]
    taken = groups[0].rollouts if groups else intruder.group(round, 0).rollouts
    made = [msgspec.structs.replace(g, rollouts=taken) for g in intruder.groups(round)]
    intruder.send(made)


def contents(intruder: Intruder) -> list[Group]:
    entries: list[Entry] = intruder.participant.station.log.read(0)
    made = [decode(unpack(entry.record).body)[1] for entry in entries]
    return [content for content in made if isinstance(content, Group)]


def silent(intruder: Intruder, round: int) -> None:
    """Is there, and never answers."""


def future_presence(intruder: Intruder, round: int) -> None:
    """Says that it is far ahead, in a word that no later one of its own can pass."""
    identity = intruder.participant.station.joining.identity
    subject = intruder.names.presence(HOSTILE)
    content = msgspec.json.encode(Beat("sampling", 10**9, session=2**62, number=2**62))
    signature = identity.sign(f"motley presence\n{subject}\n".encode() + content)
    intruder.publish(subject, signature + content)


def huge_frames(intruder: Intruder, round: int) -> None:
    """Frames that declare more than they hold, and bodies that are no records."""
    intruder.send(intruder.groups(round))
    signature = bytes(64)
    for body in (b"", bytes(8 * 2**20), b"\xff" * 1000):
        intruder.sent += 1
        frame = zstandard.ZstdCompressor().compress(body)
        record = bytes([SCHEMA]) + signature + frame
        intruder.publish(intruder.names.record(f"{HOSTILE}.frame.{intruder.sent}"), record)


def forked_chain(intruder: Intruder, round: int) -> None:
    """Another record in a place of its chain, and one far ahead."""
    intruder.send(intruder.groups(round))
    wait_until(lambda: len(intruder.half.outbox) == 0)
    key, head = intruder.half.outbox.key, intruder.half.outbox.head
    for counter in (head.counter - 1, 2**62):
        group = intruder.group(round, 0)
        body = encode(group, Stamp(key=key, counter=counter, previous=bytes(32)))
        intruder.participant.station.log.append([(group.id, intruder.sealed(body))])


def no_table(intruder: Intruder, round: int) -> None:
    """Groups of a vocabulary that nobody else knows."""
    intruder.send(intruder.groups(round))


def bad_tables(intruder: Intruder, round: int) -> None:
    """Tables that are none, in every round another one, and groups as if they were."""
    table, right = intruder.table(), intruder.table().encoded
    bad = [b"", right[:-1], right + b"x", b"\xff" * 4 + right[4:], right[:4] + b"\xff" * 2000]
    intruder.send([msgspec.structs.replace(table, encoded=bad[round % len(bad)])])
    wait_until(lambda: len(intruder.half.outbox) == 0)  # an id can be in an outbox once
    intruder.send(intruder.groups(round))


def second_tables(intruder: Intruder, round: int) -> None:
    """A right table and, in every round, another one behind it."""
    spelled = list(intruder.half.policy.vocabulary.spelling.token_bytes)
    shifted = tuple(spelled[-round:] + spelled[:-round])
    intruder.send([intruder.table(Spelling(shifted))])
    wait_until(lambda: len(intruder.half.outbox) == 0)
    intruder.send(intruder.groups(round))


def tables_of_others(intruder: Intruder, round: int) -> None:
    """Its table under the names of others."""
    if round == 0:
        intruder.send([intruder.table()])
    intruder.send(intruder.groups(round))
    for peer in intruder.config.peer:
        forged = msgspec.structs.replace(intruder.table(), peer=peer.name)
        body = encode(forged, Stamp(key=intruder.half.outbox.key))
        intruder.publish(intruder.names.record(f"{peer.name}.table"), intruder.sealed(body))


def huge_tables(intruder: Intruder, round: int) -> None:
    """The largest table there can be, and then records as large under every id there is."""
    if round == 0:
        rows = (
            *(b"%2047d" % number for number in range(2048)),
            *(None for _ in range(2**20 - 2048)),
        )
        intruder.send([intruder.table(Spelling(rows))])
    intruder.send(intruder.groups(round))
    for number in range(20):
        record = bytes([SCHEMA]) + intruder.rng.randbytes(4 * 2**20 - 100)
        intruder.publish(intruder.names.record(f"{HOSTILE}.table.{round}{number:015}"), record)


def lying_table(intruder: Intruder, round: int) -> None:
    """A table by which its tokens say other digits, with the rewards of those."""
    vocabulary = intruder.half.policy.vocabulary
    spelled = vocabulary.spelling.token_bytes
    lies = Spelling(tuple(b"123456" if one == b"1" else one for one in spelled))
    if round == 0:
        intruder.send([intruder.table(lies)])
    made = []
    for group in intruder.groups(round):
        problem = intruder.half.problem_of(group)
        texts = [lies.text_of(r.tokens[:-1]) for r in group.rollouts]
        rewards = intruder.half.task.score([problem] * len(texts), texts)
        rollouts = tuple(
            msgspec.structs.replace(rollout, reward=reward)
            for rollout, reward in zip(group.rollouts, rewards, strict=True)
        )
        made.append(msgspec.structs.replace(group, rollouts=rollouts))
    intruder.send(made)


@dataclass(frozen=True)
class Line:
    name: str
    act: Act
    roles: bool = False  # a learner and samplers, one of whom is hostile
    mixed: bool = False  # peers have three vocabularies


LINES = [
    Line("cold", cold),
    Line("q-55", with_logprob(-55.0)),
    Line("q-20", with_logprob(-20.0)),
    Line("later", later),
    Line("bombs", bombs),
    Line("foreign-replies", foreign_replies),
    Line("presence-flood", presence_flood),
    Line("record-flood", record_flood),
    Line("sampler-flood", sampler_flood, roles=True),
    Line("invented", invented),
    Line("short-lengths", short_lengths),
    Line("special-tokens", special_tokens),
    Line("model-3mb", of_origin(model="m" * 3_000_000)),
    Line("version-negative", of_origin(version=-5)),
    Line("version-huge", of_origin(version=2**62)),
    Line("created-1e18", from_the_future),
    Line("copied", copied),
    Line("silent", silent),
    Line("presence-future", future_presence),
    Line("frames", huge_frames),
    Line("chain", forked_chain),
    Line("no-table", no_table, mixed=True),
    Line("bad-tables", bad_tables, mixed=True),
    Line("second-tables", second_tables, mixed=True),
    Line("tables-of-others", tables_of_others, mixed=True),
    Line("huge-tables", huge_tables, mixed=True),
    Line("lying-table", lying_table, mixed=True),
    Line("table-unasked", second_tables),
]
BY_NAME = {line.name: line for line in LINES}


def run_hostile(folder: Path, url: str, line: str) -> None:
    """A process: join, then do the same thing in every round, whatever comes of it."""
    participant = joined(folder, url, HOSTILE)
    role = participant.role
    half = role.sampler.half if hasattr(role, "sampler") else role.peer.half
    intruder = Intruder(participant, half)
    for round in range(ROUNDS):
        try:
            BY_NAME[line].act(intruder, round)
        except Exception as error:  # noqa: BLE001 - shut out, or kept from it by the server
            (folder / "kept_back").write_text(f"{type(error).__name__}: {error}")
        wait_until(partial(has_begun, folder, round + 1))


def has_begun(folder: Path, round: int) -> bool:
    """Whether an honest peer has finished so many rounds."""
    lives = [read_life(path) for path in folder.glob("*.life")]
    return any(life.rounds >= round for life in lives) or (folder / "over").exists()


# The honest ones


class Life(msgspec.Struct):
    """What an honest peer has to say of its run."""

    rounds: int = 0
    longest_s: float = 0.0  # between two rounds
    at_s: float = 0.0  # when this was written, on a clock all processes share
    left_out: int = 0  # honest crewmates, counted in every round that was closed without them
    held: dict[str, int] = {}  # against the hostile peer: reason -> count
    stopped: str = ""
    finished: bool = False


def read_life(path: Path) -> Life:
    return msgspec.json.decode(path.read_bytes(), type=Life) if path.exists() else Life()


def joined(folder: Path, url: str, name: str) -> Participant:
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))  # the reward module
    return join(url, CREW, (folder / f"{name}.invitation").read_text(), folder / name)


def run_honest(folder: Path, url: str, name: str) -> None:
    """A process: take part to the end, and write down how it goes."""
    life, path = Life(), folder / f"{name}.life"
    try:
        participant = joined(folder, url, name)
        began_s = time.monotonic()
        for event in participant.rounds():
            if isinstance(event, str):
                continue
            life = after(life, event, began_s)
            replace(path, msgspec.json.encode(life))
        participant.close()
        life.finished = True
    except BaseException as error:  # noqa: BLE001 - whatever stops an honest peer is what is looked for
        life.stopped = f"{type(error).__name__}: {error}"
    replace(path, msgspec.json.encode(life))


def after(life: Life, line: msgspec.Struct, began_s: float) -> Life:
    now_s = time.monotonic()
    held, left_out = life.held, life.left_out
    if isinstance(line, LearnerLine):
        held = held | (line.refused or {}).get(HOSTILE, {}) | (line.dropped or {}).get(HOSTILE, {})
        suspicion = (line.suspects or {}).get(HOSTILE)
        if suspicion and suspicion.muted:
            held = held | {f"muted for {suspicion.muted}": 1}
        left_out += sum(name != HOSTILE for name in line.without or [])
    return msgspec.structs.replace(
        life,
        rounds=max(life.rounds, line.round),
        longest_s=max(life.longest_s, now_s - (life.at_s or began_s)),
        at_s=now_s,
        held=held,
        left_out=left_out,
    )


# A line


class Result(msgspec.Struct):
    line: str
    pace: str
    objective: str
    rounds: int  # finished by the slowest honest peer
    longest_s: float
    left_out: int
    held: dict[str, int]
    kept_back: str  # what the hostile peer met with
    seconds: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        return not self.fault


def crew_of(line: Line, folder: Path, pace: str, objective: str) -> CrewConfig:
    settings = {"rounds": ROUNDS, "deadline_s": DEADLINE_S, "objective": objective, "quorum": 2}
    if line.roles:
        return roles_crew(folder, objective)
    models: tuple[str, ...] = ()
    if line.mixed:
        models = ("tiny:0.3m", "tiny:0.3m/bytes", "tiny:0.3m", "tiny:0.3m/pairs")
        settings["group_size"] = 12  # of fewer, often less than two have no special token
        settings["task"] = "spread_reward:digits"
    return spread_crew(folder, ("full",) * 4, models=models, pace=pace, **settings)


def roles_crew(folder: Path, objective: str) -> CrewConfig:
    """A learner and three samplers that wait while much is waiting."""
    samplers = "".join(
        f'[[peer]]\nname = "{name}"\nrole = "sampler"\nfollows = "full0"\n'
        for name in ("full1", "full2", HOSTILE)
    )
    return parse_config(
        f'[crew]\nname = "{CREW}"\ntask = "spread_reward:spread"\nrounds = {ROUNDS}\n'
        f'group_size = 4\nproblems_per_round = 6\nobjective = "{objective}"\npace = "async"\n'
        f'[task]\nfile = "{folder / "problems.jsonl"}"\n[sampling]\nmax_tokens = 5\n'
        f'[learning]\nlr = 2e-3\nmax_age = 2\nstale = "pace"\n[evaluate]\nproblems = 2\n'
        f'[[peer]]\nname = "full0"\nrole = "learner"\nmodel = "tiny:0.3m"\n{samplers}'
    )


def run_line(line: Line, root: Path, pace: str, objective: str) -> Result:
    """Start everyone, shut the hostile peer out half way, and see the others to their end."""
    began_s = time.monotonic()
    config = crew_of(line, root, pace, objective)
    folder = root / f"{line.name}-{pace}-{objective}"
    folder.mkdir()
    write_config(config, folder / "crew.toml")
    write_task(folder)
    honest = [peer.name for peer in config.peer if peer.name != HOSTILE]
    place = local_place()
    children = start_all(folder, place, honest, line)
    try:
        fault = see_through(folder, honest, children)
    finally:
        (folder / "over").touch()
        children["hub"].join(PATIENCE_S)
        for child in children.values():
            if child.is_alive():
                child.kill()
    lives = [read_life(folder / f"{name}.life") for name in honest]
    learners = [life for life, name in zip(lives, honest, strict=True) if learns(config, name)]
    return Result(
        line=line.name,
        pace=config.crew.pace,
        objective=objective,
        rounds=min(life.rounds for life in learners),
        longest_s=max(life.longest_s for life in learners),
        left_out=sum(life.left_out for life in lives),
        held=max((life.held for life in lives), key=lambda held: sum(held.values())),
        kept_back=(folder / "kept_back").read_text() if (folder / "kept_back").exists() else "",
        seconds=time.monotonic() - began_s,
        fault=fault or fault_of(dict(zip(honest, lives, strict=True)), config),
    )


def learns(config: CrewConfig, name: str) -> bool:
    return config.named(name).role != "sampler"


Children = dict[str, multiprocessing.process.BaseProcess]


def start_all(folder: Path, place: Place, honest: Sequence[str], line: Line) -> Children:
    children: Children = {"hub": processes.Process(target=run_hub, args=(folder, place))}
    children["hub"].start()
    wait_until((folder / "open").exists, otherwise="the hub did not open")
    for name in honest:
        children[name] = processes.Process(target=run_honest, args=(folder, place.url, name))
    given = (folder, place.url, line.name)
    children[HOSTILE] = processes.Process(target=run_hostile, args=given)
    for name in (*honest, HOSTILE):
        children[name].start()
    return children


def see_through(folder: Path, honest: Sequence[str], children: Children) -> str:
    """To the end of the honest peers' rounds; what kept them from it."""
    began_s, first_s, revoked = time.monotonic(), 0.0, False
    while any(children[name].is_alive() for name in honest):
        lives = {name: read_life(folder / f"{name}.life") for name in honest}
        now_s = time.monotonic()
        if not first_s and any(life.at_s for life in lives.values()):
            first_s = now_s
        half_way = min(life.rounds for life in lives.values()) >= ROUNDS // 2
        if first_s and not revoked and (half_way or now_s > first_s + 3 * DEADLINE_S):
            give_order(folder / "hub", Order("revoke", HOSTILE))
            revoked = True
        if now_s > began_s + LIMIT_S:
            stuck = [f"{name} at round {life.rounds}" for name, life in lives.items()]
            return f"not over after {LIMIT_S:.0f} s: {', '.join(stuck)}"
        time.sleep(0.1)
    return ""


def fault_of(lives: dict[str, Life], config: CrewConfig) -> str:
    for name, life in lives.items():
        if life.stopped:
            return f"{name} stopped: {life.stopped}"
        if not life.finished:
            return f"{name} died in round {life.rounds + 1}"
        if learns(config, name) and life.rounds < ROUNDS:
            return f"{name} ended after round {life.rounds}"
        if learns(config, name) and life.longest_s > DEADLINE_S + GRACE_S:
            return f"{name} waited {life.longest_s:.0f} s"
    left_out = sum(life.left_out for life in lives.values())
    return f"{left_out} times a round was closed without an honest peer" if left_out else ""


def wait_until(condition: Callable[[], bool], otherwise: str = "") -> None:
    stop_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > stop_s:
            raise SystemExit(otherwise)
        time.sleep(0.02)


# The table


def shown(result: Result) -> str:
    held = ", ".join(f"{reason} {count}" for reason, count in sorted(result.held.items()))
    cells = (
        f"{result.line:16} {result.pace:8} {result.objective:8} {result.rounds:2}/{ROUNDS}",
        f"{result.longest_s:6.1f} s  {'ok' if result.ok else 'NO'}  {held or '-'}",
    )
    further = [result.kept_back and f"it met with {result.kept_back[:90]}", result.fault]
    return "\n    ".join(["  ".join(cells), *filter(None, further)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(BY_NAME), help="a line")
    parser.add_argument("--pace", action="append", choices=["lockstep", "async"])
    parser.add_argument("--objective", action="append")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    lines = [line for line in LINES if line.name in (wanted.only or BY_NAME)]
    paces, objectives = wanted.pace or ["lockstep"], wanted.objective or ["ftis"]
    results = []
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_task(root)
        sys.path.insert(0, str(root))
        if not wanted.json:
            print("line             pace     objective rounds  longest      held against it")
        for line, pace, objective in itertools.product(lines, paces, objectives):
            results.append(run_line(line, root, pace, objective))
            if not wanted.json:
                print(shown(results[-1]), flush=True)
    if wanted.json:
        print(json.dumps([msgspec.to_builtins(r) | {"ok": r.ok} for r in results]))
    sys.exit(0 if all(result.ok for result in results) else 1)


if __name__ == "__main__":
    main()
