"""What a learner's weights cost its samplers: bytes of a whole version and of a change, on real
trainings of a tiny model.

All trainings begin with the same warm model. Every version is published, fetched and loaded by a
sampler; `bit_exact` says that the sampler's values were the learner's at each of them. How many
values change is the learning rate's doing: Adam moves a weight by about lr, and a bfloat16 near
0.02 has neighbours 1e-4 away.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch

from motley.benchmarks.bench import Row
from motley.config import Crew, CrewConfig, Evaluate, Learning, Lora, PeerConfig, TrainPart, Warm
from motley.models.opening import initial_policy
from motley.models.policy import Policy, with_trained_part
from motley.records import Backlog, Blob, Sampling, Weights
from motley.runs.local import LocalCrew
from motley.weights.encoding import State, encode_change, encode_whole, state_hash, trained_state
from motley.weights.follower import Follower
from motley.weights.publisher import Publisher, by_hash

MODEL = "tiny:1m"
NAME = "bench"
KINDS = ("sort", "reverse")
ROUNDS = 20
ANCHOR_EVERY = 8

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Training:
    what: str
    train: TrainPart | None  # None: everything
    lr: float

    @property
    def learner(self) -> PeerConfig:
        return PeerConfig(
            name=NAME,
            model=MODEL,
            train=self.train or "full",
            warm=Warm(accuracy=dict.fromkeys(KINDS, 0.3)),
        )


@dataclass(frozen=True, slots=True)
class VersionStep:
    """From one version to the next."""

    whole_bytes: int
    delta_bytes: int
    changed: float  # share of the values
    exact: bool


LORA = TrainPart(lora=Lora(rank=8))
TRAININGS = (
    Training("full", None, 1e-4),
    Training("full", None, 1e-5),
    Training("full", None, 1e-6),
    Training("lora rank 8", LORA, 1e-4),
)


def weights_benchmark(progress: Show) -> list[Row]:
    """A row per training: mean bytes of a version, whole and as a change, and the share of bfloat16
    values that a step changed.
    """
    rows = []
    for training in TRAININGS:
        progress(f"{training.what} at lr {training.lr:g}")
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_row(training, LocalCrew.start(_crew(training), Path(folder) / "run")))
    return rows


def _crew(training: Training) -> CrewConfig:
    return CrewConfig(
        crew=Crew(
            name=NAME,
            task="digits",
            objective="alone",
            rounds=ROUNDS,
            group_size=8,
            problems_per_round=16,
        ),
        task={"kinds": list(KINDS), "levels": [4]},
        sampling=Sampling(max_tokens=8),
        learning=Learning(lr=training.lr, checkpoint_every=ROUNDS),
        evaluate=Evaluate(every=ROUNDS, problems=8),
        peer=(training.learner,),
    )


def _row(training: Training, crew: LocalCrew) -> Row:
    steps = list(_steps(training, crew))
    whole_bytes, delta_bytes = (
        mean(s.whole_bytes for s in steps),
        mean(s.delta_bytes for s in steps),
    )
    return {
        "model": MODEL,
        "what": training.what,
        "lr": training.lr,
        "parameters": sum(p.numel() for _, p in crew.peers[0].learner.policy.trained()),
        "whole_bytes": round(whole_bytes),
        "delta_bytes": round(delta_bytes),
        "ratio": delta_bytes / whole_bytes,
        "changed": mean(s.changed for s in steps),
        "bit_exact": all(s.exact for s in steps),
    }


def _steps(training: Training, crew: LocalCrew) -> Iterator[VersionStep]:
    policy = crew.peers[0].learner.policy
    wire = _Wire(policy, _untrained(training))
    wire.is_exact_after_publishing()
    before = trained_state(policy, "bfloat16")
    for _ in crew.rounds():
        after = trained_state(policy, "bfloat16")
        whole, delta = (
            sum(map(len, blobs)) for blobs in (encode_whole(after), encode_change(before, after))
        )
        yield VersionStep(whole, delta, _changed(before, after), wire.is_exact_after_publishing())
        before = after


def _untrained(training: Training) -> Policy:
    """A sampler's policy, which shares nothing with the learner's but its form."""
    policy = initial_policy(training.learner, seed=1)
    return with_trained_part(policy, training.learner.train, seed=1)


def _changed(before: State, after: State) -> float:
    differing = sum(
        int((before[name].view(torch.int16) != value.view(torch.int16)).sum())
        for name, value in after.items()
    )
    return differing / sum(value.numel() for value in after.values())


class _Wire:
    """A learner and a sampler with nothing between them but blobs and manifests."""

    def __init__(self, learner: Policy, sampler: Policy) -> None:
        self._learner, self._sampler = learner, sampler
        self._publisher, self._follower = (
            Publisher(learner, "bfloat16", ANCHOR_EVERY, deltas=True),
            Follower(sampler),
        )
        self._known: list[Weights] = []
        self._store: dict[str, bytes] = {}

    def is_exact_after_publishing(self) -> bool:
        """Publish a version and follow it; whether the sampler's values are the same to the bit."""
        made = self._publisher.make()
        self._store |= by_hash(made.blobs | self._publisher.unstored)
        nothing = Backlog(waiting=(), oldest_s=0.0)
        self._known.append(
            made.record(NAME, NAME, self._learner.version, "bfloat16", nothing, created_s=0.0)
        )
        self._follower.apply(self._follower.plan(self._known), self._fetch)
        sent, loaded = (
            state_hash(trained_state(policy, "bfloat16"))
            for policy in (self._learner, self._sampler)
        )
        return self._follower.version == self._learner.version and sent == loaded

    def _fetch(self, blob: Blob) -> bytes | None:
        return self._store.get(blob.sha256)
