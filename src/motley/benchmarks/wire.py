"""What the wire costs and bears: bytes per token and rounding on a real model's rollouts, admission
on one core, the log's throughput.

The rollouts are SmolLM2-135M-Instruct's answers to GSM8K problems at temperature 1
(tests/make_rollouts.py), kept with their log-probs as float32 in `rollouts.log`.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from pathlib import Path

import msgspec

from motley.benchmarks.bench import Row
from motley.exchange import Entry, MemoryLog, Outbox, Sealed, Signer, decode, encode, pack, unpack
from motley.exchange.nats.accounts import peer_user
from motley.exchange.nats.connection import Connection, Login
from motley.exchange.nats.log import NatsLog, create_stream
from motley.exchange.nats.server import Server, free_port
from motley.exchange.sections import encode_sections, varint_bytes
from motley.exchange.wire import MAX_BODY_BYTES
from motley.models.tiny import tiny_vocabulary
from motley.records import Group, Origin, Problem, Rollout, Sampling, Stamp
from motley.tasks import assign, load_task
from motley.trust import Admission, Admitted, Identity, Rules
from motley.trust.steadiness import Score

FTIS_BYTES = 8  # per token: the paper's 4-byte id and 4-byte log-prob
CREW = "bench"
PEER = "peer"
NUM_RECORDS = 2000  # appended to the stream
MEASURED_S = 3.0

Show = Callable[[str], None]


def wire_benchmark(show: Show) -> list[Row]:
    """A row per figure: what, value, unit, and what it must reach."""
    groups = real_groups()
    show("size and rounding")
    rows = [*size_rows(groups)]
    show("admission")
    rows += admission_rows(groups)
    show("stream")
    return rows + stream_rows(groups)


def real_groups() -> list[Group]:
    with as_file(files("motley") / "benchmarks" / "rollouts.log") as path:
        contents = [
            decode(unpack(entry.record).body)[1] for entry in MemoryLog.copy_of(path).read(0)
        ]
    return [content for content in contents if isinstance(content, Group)]


def size_rows(groups: Sequence[Group]) -> list[Row]:
    num_tokens = sum(len(r.tokens) for g in groups for r in g.rollouts)
    sizes = {lossless: _size(groups, lossless) for lossless in (False, True)}
    contents = (decode(unpack(entry.record).body)[1] for entry in log_of(groups).read(0))
    read = [content for content in contents if isinstance(content, Group)]
    return [
        _row(
            "real rollouts",
            len(groups) * len(groups[0].rollouts),
            f"of {num_tokens} tokens, mean log-prob {_mean_logprob(groups):.2f}",
        ),
        _row(
            f"record, groups of {len(groups[0].rollouts)}",
            sizes[False] / num_tokens,
            "bytes per token",
            "<= 2",
        ),
        _row(
            f"record, groups of {len(groups[0].rollouts) // 2}",
            _size(_halves(groups)) / num_tokens,
            "bytes per token",
        ),
        _row("record, log-probs as float32", sizes[True] / num_tokens, "bytes per token"),
        _row(
            "ids and log-probs as 4 bytes each",
            FTIS_BYTES * num_tokens / sizes[False],
            "times the record",
        ),
        _row(
            "largest error of an importance ratio",
            _largest_ratio_error(groups, read),
            "",
            "<= 3e-4",
        ),
    ]


def _mean_logprob(groups: Sequence[Group]) -> float:
    logprobs = [logprob for g in groups for r in g.rollouts for logprob in r.logprobs]
    return sum(logprobs) / len(logprobs)


def _size(groups: Sequence[Group], lossless: bool = False) -> int:
    return sum(len(entry.record) for entry in log_of(groups, lossless).read(0))


def _halves(groups: Sequence[Group]) -> list[Group]:
    """Every group as two, at two slots."""
    half = len(groups[0].rollouts) // 2
    parts = [(slot, g) for g in groups for slot in (0, 1)]
    return [
        msgspec.structs.replace(g, slot=slot, rollouts=g.rollouts[slot * half : (slot + 1) * half])
        for slot, g in parts
    ]


def _largest_ratio_error(sent: Sequence[Group], received: Sequence[Group]) -> float:
    pairs = [
        (a, b)
        for before, after in zip(sent, received, strict=True)
        for x, y in zip(before.rollouts, after.rollouts, strict=True)
        for a, b in zip(x.logprobs, y.logprobs, strict=True)
    ]
    return max(math.expm1(abs(a - b)) for a, b in pairs)


def admission_rows(groups: Sequence[Group]) -> list[Row]:
    """One core, from bytes to an admitted group.

    Digits: a whole round's groups of a tiny model, their rewards computed again.
    """
    first = groups[0].origin
    largest = max(token for g in groups for r in g.rollouts for token in r.tokens)
    rules = _rules(groups, first.vocabulary, largest + 1, _end_id(groups))
    problems = {g.round: [Problem(prompt="", columns={"id": g.problem})] for g in groups}
    known = [msgspec.structs.replace(g, problem=problems[g.round][0].id) for g in groups]
    real = _rollouts_per_s(known, lambda: _admission(rules, lambda peer, round: problems[round]))

    digits, task = _digits_groups(), load_task("digits", {})
    vocabulary = tiny_vocabulary()
    rules = _rules(digits, vocabulary.fingerprint, vocabulary.size, vocabulary.end_id)
    score = lambda problem, rollouts: task.score(
        [problem] * len(rollouts), vocabulary.decode_all(r.tokens for r in rollouts)
    )
    scored = _rollouts_per_s(
        digits,
        lambda: _admission(rules, lambda peer, round: assign(task, 0, peer, round, 1), score),
    )
    return [
        _row("admitted, real rollouts, no reward function", real, "rollouts/s", ">= 10000"),
        _row("admitted, digits with rewards computed again", scored, "rollouts/s", ">= 10000"),
        _row("dearest refused record", 1000 * _dearest_refusal_s(known), "ms", "<= 20"),
    ]


def _rollouts_per_s(groups: Sequence[Group], fresh: Callable[[], Admission]) -> float:
    entries = log_of(groups).read(0)
    num_rollouts, took = 0, 0.0
    while took < MEASURED_S:
        admission = fresh()
        start = time.process_time()
        verdicts = [admission.admit(entry) for entry in entries]
        took += time.process_time() - start
        if not all(isinstance(verdict, Admitted) for verdict in verdicts):
            raise ValueError(f"the benchmark's own records were refused: {dict(admission.refused)}")
        num_rollouts += sum(len(g.rollouts) for g in groups)
    return num_rollouts / took


def _dearest_refusal_s(groups: Sequence[Group]) -> float:
    """Of records that a peer signed to cost its readers time, in a crew of these groups."""
    first = groups[0]
    rules = _rules(groups, first.origin.vocabulary, 2**17, _end_id(groups))
    problem = Problem(prompt="", columns={"id": first.problem})
    # the last check of all refuses it
    score = lambda problem, rollouts: [1.0] * len(rollouts)
    longest, took = _longest_group(rules, first, problem), []
    for body in hostile_bodies(rules, longest):
        record = pack(_identity().sign(Sealed(b"", body).signed), body)
        admission = _admission(rules, lambda peer, round: [problem], score)
        start = time.perf_counter()
        verdict = admission.admit(Entry(1, longest.id, record))
        took.append(time.perf_counter() - start)
        if isinstance(verdict, Admitted):
            raise ValueError("a hostile record of the benchmark was admitted")
    return max(took)


def _longest_group(rules: Rules, like: Group, problem: Problem) -> Group:
    """As many tokens as the crew allows, each of three bytes and a log-prob of 16 bits."""
    tokens = tuple(2**14 + place % 2**15 for place in range(rules.max_tokens))
    rollouts = tuple(
        Rollout(
            tokens=(2**16 + number, *tokens[1:]),
            logprobs=(-11.0,) * rules.max_tokens,
            reward=0.0,
            ending="length",
        )
        for number in range(rules.rollouts_per_group)
    )
    return msgspec.structs.replace(like, rollouts=rollouts, problem=problem.id)


def hostile_bodies(rules: Rules, longest: Group) -> list[bytes]:
    """A whole group to the last token; one of impossible log-probs; and what compresses well: zeros
    where numbers are due, within what the crew allows and far beyond.
    """
    stamp = Stamp(key=_identity().public)
    body = encode(longest, stamp)
    head = body[: len(body) - len(b"".join(encode_sections("", longest.rollouts, False).parts))]
    rollouts = [
        msgspec.structs.replace(r, logprobs=(-38.0,) * len(r.tokens)) for r in longest.rollouts
    ]
    unlikely = encode(msgspec.structs.replace(longest, rollouts=tuple(rollouts)), stamp)
    most = rules.group_limits.body_bytes
    lengths = bytes(5 * rules.rollouts_per_group) + varint_bytes(
        [rules.max_tokens] * rules.rollouts_per_group
    )
    zeros = head + lengths
    return [body, unlikely, zeros.ljust(most, b"\0"), zeros.ljust(MAX_BODY_BYTES, b"\0")]


def _admission(
    rules: Rules, assignment: Callable[[str, int], list[Problem]], score: Score | None = None
) -> Admission:
    identity = _identity()
    admission = Admission(rules, bytes(32), assignment, score)
    admission.keys = {PEER: identity.public}
    return admission


def _digits_groups() -> list[Group]:
    """Answers as a tiny model gives them: half of 8 are right."""
    task, vocabulary = load_task("digits", {}), tiny_vocabulary()
    groups = []
    for round in range(200):
        (problem,) = assign(task, 0, PEER, round, 1)
        answers = [
            problem.answer if number % 2 else problem.answer[::-1] + "0" for number in range(8)
        ]
        rewards = task.score([problem] * 8, answers)
        tokens = [(*vocabulary.encode(answer), vocabulary.end_id) for answer in answers]
        rollouts = tuple(
            Rollout(tokens=t, logprobs=(-0.25,) * len(t), reward=r, ending="stop")
            for t, r in zip(tokens, rewards, strict=True)
        )
        origin = Origin(
            peer=PEER,
            model="tiny",
            vocabulary=vocabulary.fingerprint,
            version=round,
            sampling=Sampling(max_tokens=16),
        )
        groups.append(
            Group(
                crew=CREW,
                problem=problem.id,
                round=round,
                slot=0,
                origin=origin,
                rollouts=rollouts,
                created_s=0.0,
            )
        )
    return groups


def stream_rows(groups: Sequence[Group]) -> list[Row]:
    """A real server on loopback that syncs every record to the disk before it confirms."""
    records = [entry.record for entry in log_of(groups).read(0)]
    numbered = [
        (f"{PEER}.{number}.0", records[number % len(records)]) for number in range(NUM_RECORDS)
    ]
    mean_bytes = sum(len(record) for _, record in numbered) / len(numbered)
    hub, peer = Identity.new(), _identity()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(CREW, Path(folder), "127.0.0.1", free_port())
        server.configure(hub.nkey, [peer_user(CREW, PEER, peer.nkey)])
        server.start()
        url = f"nats://127.0.0.1:{server.port}"
        owner = Connection(Login(url, "hub", hub.nkey_seed))
        create_stream(owner, CREW)
        connection = Connection(Login(url, PEER, peer.nkey_seed))
        try:
            log = NatsLog(connection, CREW)
            one_by_one = numbered[: NUM_RECORDS // 10]
            alone_s = _append_s(log, one_by_one, 1)
            rest = numbered[len(one_by_one) :]
            together_s = _append_s(log, rest, 256)
            read_s = _read_s(log)
        finally:
            connection.close()
            owner.close()
            server.stop()
    return [
        _row(
            "appended one at a time, each synced",
            len(one_by_one) / alone_s,
            f"records/s of {mean_bytes:.0f} bytes",
        ),
        _row(
            "appended 256 in flight, each synced",
            len(rest) / together_s,
            f"records/s of {mean_bytes:.0f} bytes",
        ),
        _row("read", NUM_RECORDS / read_s, f"records/s of {mean_bytes:.0f} bytes"),
    ]


def _append_s(log: NatsLog, records: Sequence[tuple[str, bytes]], in_flight: int) -> float:
    start = time.perf_counter()
    for at in range(0, len(records), in_flight):
        log.append(records[at : at + in_flight])
    return time.perf_counter() - start


def _read_s(log: NatsLog) -> float:
    start = time.perf_counter()
    entries: list[Entry] = []
    while page := log.read(entries[-1].position if entries else 0):
        entries += page
    assert len(entries) == NUM_RECORDS
    return time.perf_counter() - start


def log_of(groups: Sequence[Group], lossless: bool = False) -> MemoryLog:
    """The groups as a peer of the benchmark's crew would publish them, one a round."""
    identity, log = _identity(), MemoryLog()
    outbox = Outbox(None, Signer(identity.public, identity.sign), lossless)
    outbox.put(groups)
    outbox.deliver(log)
    return log


def _identity() -> Identity:
    return Identity.of(b"benchmark".ljust(32, b"\0"))


def _rules(groups: Sequence[Group], vocabulary: str, size: int, end_id: int) -> Rules:
    return Rules(
        crew=CREW,
        vocabulary=vocabulary,
        vocabulary_size=size,
        end_ids=(end_id,),
        rollouts_per_group=len(groups[0].rollouts),
        sampling=groups[0].origin.sampling,
        slots=1,
        rounds=max(g.round for g in groups) + 1,
    )


def _end_id(groups: Sequence[Group]) -> int:
    return next(r.tokens[-1] for g in groups for r in g.rollouts if r.ending == "stop")


def _row(what: str, value: float, unit: str, target: str = "") -> Row:
    return {"what": what, "value": value, "unit": unit, "target": target}
