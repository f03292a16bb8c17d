"""A run folder as a long run of a large crew leaves it, made without training: for measuring how
quickly such a run can be looked at.

Its files have the form and the size of real ones: every peer learns from all others in every round.
Values are drawn, and follow no model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from motley.config import Crew, CrewConfig, Evaluate, PeerConfig, write_config
from motley.exchange import Head, MemoryLog, Sealed, pack
from motley.exchange.wire import encode_parts
from motley.files import writing
from motley.learning.senders import Distribution, SenderMetrics, Spread
from motley.learning.traces import RolloutTrace, StepTrace, TraceFiles
from motley.models.tiny import tiny_vocabulary
from motley.records import FIRST_PREVIOUS, Group, Origin, Problem, Rollout, Sampling, Stamp
from motley.runs.local import found_log, one_process_identity
from motley.runs.metrics import FirstLine, LearnerLine, Sign, Timing
from motley.tasks import Task, assign, load_task
from motley.trust.standing import Suspicion

GROUP_SIZE = 4
EVALUATE_EVERY = 10
NUM_STAGES = 100  # of training, each with numbers of its own
TRACED_ROUNDS = 20  # the newest
STARTED_S = 1.75e9  # when the run began, in seconds since 1970
ROUND_S = 20.0
FATES = ("llll", "lslf", "ssss", "lfwl")

Show = Callable[[str, int, int], None]  # what, done, of how many


def make_large_run(
    folder: Path,
    rounds: int,
    peers: int,
    seed: int = 0,
    show: Show = lambda what, done, total: None,
) -> None:
    """Write config.toml, metrics.jsonl and groups/ of a finished lockstep run, one group of each
    peer in every round. The same seed gives the same bytes.
    """
    (folder / "groups").mkdir(parents=True)
    config = _config(rounds, peers, seed)
    write_config(config, folder / "config.toml")
    rng = random.Random(seed)
    _write_metrics(folder / "metrics.jsonl", config, rng, show)
    _write_log(folder / "groups" / "log.bin", config, rng, show)
    _write_fates(folder / "groups" / "fates.jsonl", config, show)
    _write_traces(folder, config, rng)


def _config(rounds: int, peers: int, seed: int) -> CrewConfig:
    return CrewConfig(
        crew=Crew(
            name="large",
            task="digits",
            rounds=rounds,
            group_size=GROUP_SIZE,
            problems_per_round=peers,
            objective="ftis",
            seed=seed,
        ),
        peer=tuple(PeerConfig(name=f"peer{n:02d}", model="tiny:0.3m") for n in range(peers)),
        sampling=Sampling(max_tokens=8),
        evaluate=Evaluate(every=EVALUATE_EVERY),
    )


# Metrics


def _write_metrics(path: Path, config: CrewConfig, rng: random.Random, show: Show) -> None:
    """What came from whom is drawn once for each stage, since it is nearly all of a file."""
    names, rounds = [peer.name for peer in config.peer], config.crew.rounds
    stages = [
        msgspec.json.encode({name: _sender(rng, stage / NUM_STAGES) for name in names})
        for stage in range(min(NUM_STAGES, rounds))
    ]
    encoder = msgspec.json.Encoder()
    with writing(path), path.open("wb") as file:
        for name in names:
            first = FirstLine(round=0, peer=name, heldout=_heldout(rng, 0.0))
            file.write(encoder.encode(first) + b"\n")
        for number in range(1, rounds + 1):
            senders = stages[(number - 1) * len(stages) // rounds]
            for name in names:
                line = _line(config, rng, number, name, senders)
                file.write(encoder.encode(line) + b"\n")
            show("writing metrics", number, rounds)


def _line(
    config: CrewConfig, rng: random.Random, number: int, peer: str, senders: bytes
) -> LearnerLine:
    share, last = number / config.crew.rounds, config.peer[-1].name
    is_suspected = number % 200 < 20 and peer != last  # comes and goes
    suspicion = Suspicion(evidence=1 + (number % 200) / 8, strikes=0.8 ** (number % 7))
    return LearnerLine(
        round=number,
        peer=peer,
        version=number,
        reward=_rising(rng, share),
        loss=rng.gauss(0, 0.1),
        grad_norm=rng.lognormvariate(0, 0.3),
        lr=1e-4,
        num_sequences=GROUP_SIZE * len(config.peer),
        num_scored=3 * len(config.peer),
        num_tokens=15 * len(config.peer),
        ages={0: len(config.peer)},
        senders=msgspec.Raw(senders),  # type: ignore[arg-type]  # encoded already
        waiting=0,
        refused={last: {"reward": number // 50, "copied": number // 90}} if number > 50 else {},
        dropped={last: {"muted": number // 40}} if number > 40 else {},
        heldout=_heldout(rng, share) if number % EVALUATE_EVERY == 0 else None,
        timing=Timing(0.2 + rng.random() / 10, 0.7 + rng.random() / 10, 4000.0, 3000.0),
        suspects={last: suspicion} if is_suspected else None,
        warnings=[Sign("filtered", f"the objective discards all of {last}", [last])]
        if number % 2000 == 20
        else None,
    )


def _sender(rng: random.Random, share: float) -> SenderMetrics:
    spread = {key: rng.lognormvariate(0, 0.5) for key in Distribution.__struct_fields__}
    far = (1 - share) * rng.random()
    return SenderMetrics(
        groups=1,
        sequences=GROUP_SIZE,
        reward=_rising(rng, share),
        accuracy=_rising(rng, share),
        tokens=5 + rng.random(),
        truncated=rng.random() / 50,
        age=0.0,
        silent_groups=0,
        kl_k1=far * rng.random(),
        kl_k3=far,
        kl_reverse=far * rng.random(),
        ratio=Distribution(**spread),
        weight=Distribution(**spread),
        weight_var=rng.random(),
        free_weight=Spread(**spread, var=rng.random()),
        clipped=rng.random(),
        estimation_error=rng.random(),
        flatness=rng.random(),
        ess=1 - far,
        filter_kl=Distribution(**spread),
        filtered_positive=0.0,
        filtered_negative=rng.random(),
        tau_before=rng.random(),
        tau_after=rng.random(),
        entropy=1 - share,
        withheld=rng.random(),
        pull=rng.random(),
        grad_scale=1.0,
    )


def _rising(rng: random.Random, share: float) -> float:
    return min(1.0, max(0.0, 0.2 + 0.7 * math.sqrt(share) + rng.gauss(0, 0.05)))


def _heldout(rng: random.Random, share: float) -> dict[str, float]:
    return {kind: _rising(rng, share) for kind in ("reverse", "sort", "increment")}


# The log


def _write_log(path: Path, config: CrewConfig, rng: random.Random, show: Show) -> None:
    """Charter, roster, and a signed group of each peer in every round."""
    log, task = MemoryLog(path), load_task(config.crew.task, config.task)
    found_log(config, log, task)
    writers = [_Writer(config, peer.name, task) for peer in config.peer]
    pool = [_rollouts(rng) for _ in range(64)]
    for number in range(1, config.crew.rounds + 1):
        log.append([writer.record(number, rng.choice(pool)) for writer in writers])
        show("writing groups", number, config.crew.rounds)


class _Writer:
    """Chains and signs the groups of one peer."""

    def __init__(self, config: CrewConfig, peer: str, task: Task) -> None:
        self._config, self._task = config, task
        self._identity = one_process_identity(config, peer)
        self._head = Head(0, FIRST_PREVIOUS)
        self._origin = Origin(
            peer=peer,
            model="tiny:0.3m",
            vocabulary=tiny_vocabulary().fingerprint,
            version=0,
            sampling=config.sampling,
        )

    def record(self, number: int, rollouts: tuple[Rollout, ...]) -> tuple[str, bytes]:
        """Id and bytes of the group of a round."""
        group = Group(
            crew=self._config.crew.name,
            problem=self._problem(number).id,
            round=number - 1,
            slot=0,
            origin=msgspec.structs.replace(self._origin, version=number - 1),
            rollouts=rollouts,
            created_s=STARTED_S + number * ROUND_S,
        )
        key, (counter, previous) = self._identity.public, self._head
        parts = encode_parts(group, Stamp(key=key, counter=counter, previous=previous))
        sealed = Sealed(b"", b"".join(parts))
        self._head = Head(counter + 1, sealed.hash)
        return group.id, pack(self._identity.sign(sealed.signed), *parts)

    def _problem(self, number: int) -> Problem:
        seed, name = self._config.crew.seed, self._origin.peer
        return assign(self._task, seed, name, number - 1, 1)[0]


def _rollouts(rng: random.Random) -> tuple[Rollout, ...]:
    vocabulary = tiny_vocabulary()
    return tuple(
        Rollout(
            tokens=(*vocabulary.encode(f"{rng.randrange(10**4):04d}"), vocabulary.end_id),
            logprobs=tuple(-rng.expovariate(2.0) for _ in range(5)),
            reward=float(rng.random() < 0.5),
            ending="stop",
        )
        for _ in range(GROUP_SIZE)
    )


def _positions(config: CrewConfig, number: int) -> Iterator[int]:
    """Of a round's groups in the log, behind the charter and the roster."""
    first = 3 + (number - 1) * len(config.peer)
    yield from range(first, first + len(config.peer))


# What became of it


def _write_fates(path: Path, config: CrewConfig, show: Show) -> None:
    """The lines of a round differ in who learned only, so that most of it is encoded once."""
    with writing(path), path.open("wb") as file:
        for number in range(1, config.crew.rounds + 1):
            places = list(_positions(config, number))
            letters = {place: FATES[place % len(FATES)] for place in places}
            groups = msgspec.json.encode(letters).decode()
            file.writelines(
                f'{{"round":{number},"peer":"{peer.name}","cursor":{places[-1]},'
                f'"groups":{groups}}}\n'.encode()
                for peer in config.peer
            )
            show("writing fates", number, config.crew.rounds)


def _write_traces(folder: Path, config: CrewConfig, rng: random.Random) -> None:
    files = TraceFiles(folder / "groups" / "traces", config.evaluate.most_trace_bytes)
    values = np.random.default_rng(rng.randrange(2**32))
    names, last = [peer.name for peer in config.peer], config.crew.rounds
    for number in range(max(1, last + 1 - TRACED_ROUNDS), last + 1):
        for peer in names:
            rollouts = tuple(
                _trace(position, sender, slot, values)
                for position, sender in zip(_positions(config, number), names, strict=True)
                for slot in range(GROUP_SIZE)
            )
            files.write(StepTrace(round=number, peer=peer, version=number, rollouts=rollouts))


def _trace(position: int, sender: str, number: int, values: np.random.Generator) -> RolloutTrace:
    log_ratio = values.normal(0, 0.5, 5).astype(np.float32)
    free = np.exp(log_ratio)
    weight = np.minimum(free, 1)
    return RolloutTrace(
        position=position,
        number=number,
        sender=sender,
        advantage=float(values.normal()),
        kept=bool(values.random() < 0.9),
        filter_kl=float(values.exponential()),
        tokens=None,
        spans=None,
        log_ratio=log_ratio,
        weight=weight,
        free=free,
        entropy=values.random(5, np.float32),
        push=weight * np.float32(0.01),
    )
