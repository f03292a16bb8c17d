from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
import zstandard
from safetensors.torch import save

from fakes import (
    four_bit_policy,
    grouped_query_policy,
    lora_policy,
    reference_logp,
    tiny_policy,
)
from marks import slow
from motley.config import TrainPart
from motley.models.policy import Policy
from motley.records import NO_BASE, Backlog, Blob, Weights
from motley.weights.encoding import (
    State,
    describe,
    encode_whole,
    frozen_state,
    state_hash,
    take_state,
    trained_state,
)
from motley.weights.follower import MAX_MISSES, Follower
from motley.weights.publisher import Made, Publisher, by_hash

POLICIES = {
    "full": tiny_policy,
    "lora": lora_policy,
    "layers": lambda seed=0: tiny_policy(TrainPart(layers="last:1"), seed),
    "grouped": grouped_query_policy,
    "four bits": four_bit_policy,
}
PROMPT, TOKENS = (5, 12, 13), (14, 15, 1)


class Learner:
    """Trains a policy by Adam on tokens drawn by version; keeps what it published."""

    def __init__(
        self,
        kind: str = "grouped",
        lr: float = 1e-4,
        precision: Any = "bfloat16",
        anchor_every: int = 5,
        deltas: bool = True,
    ):
        self.policy: Policy = POLICIES[kind](seed=1)
        self.precision = precision
        self.publisher = Publisher(self.policy, precision, anchor_every, deltas)
        self.optimiser = torch.optim.Adam([p for _, p in self.policy.trained()], lr=lr)
        self.store: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.known: list[Weights] = []
        self.state_at: dict[int, State] = {}

    def learn(self, steps: int = 1) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.policy.version)
            tokens = torch.randint(
                3, self.policy.vocabulary.size, (7,), generator=generator
            ).tolist()
            self.optimiser.zero_grad()
            (-reference_logp(self.policy, tokens[:3], tokens[3:]).sum()).backward()
            self.optimiser.step()
            self.policy.version += 1

    def publish(self) -> Weights:
        made = self.publisher.make()
        self.store |= by_hash(made.blobs | self.publisher.unstored)
        manifest = manifest_of(made, self.policy.version, self.precision)
        self.known.append(manifest)
        self.state_at[manifest.version] = trained_state(self.policy, self.precision)
        return manifest

    def run(self, versions: int) -> list[Weights]:
        """Publish the present version and those after it."""
        self.publish()
        for _ in range(versions - 1):
            self.learn()
            self.publish()
        return self.known

    def fetch(self, blob: Blob) -> bytes | None:
        self.fetched.append(blob.sha256)
        return self.store.get(blob.sha256)

    def spoil(self, manifest: Weights) -> None:
        content = bytearray(self.store[manifest.blobs[0].sha256])
        content[len(content) // 2] ^= 1
        self.store[manifest.blobs[0].sha256] = bytes(content)

    def lose(self, manifest: Weights) -> bytes:
        return self.store.pop(manifest.blobs[0].sha256)


def manifest_of(made: Made, version: int, precision: Any = "bfloat16") -> Weights:
    return made.record(
        "crew", "learner", version, precision, Backlog(waiting=(), oldest_s=0.0), created_s=0.0
    )


def versions(plan: Sequence[Weights]) -> list[int]:
    return [manifest.version for manifest in plan]


def catch_up(
    follower: Follower, learner: Learner, known: Sequence[Weights] | None = None
) -> int | None:
    return follower.apply(follower.plan(learner.known if known is None else known), learner.fetch)


def content(policy: Policy) -> bytes:
    return state_hash(trained_state(policy, "float32") | frozen_state(policy))


def holds(follower: Follower, policy: Policy, learner: Learner, version: int) -> bool:
    """The sampler's policy is the learner's of that version, to the last bit of the precision
    sent.
    """
    return follower.version == policy.version == version and state_hash(
        trained_state(policy, learner.precision)
    ) == state_hash(learner.state_at[version])


# Following a training


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", slow("float32")])
@pytest.mark.parametrize("kind", POLICIES)
def test_a_follower_is_the_learner_to_the_last_bit_at_every_version(
    kind: str, precision: Any
) -> None:
    learner, sampler = Learner(kind, precision=precision), POLICIES[kind](seed=2)
    follower = Follower(sampler)
    for version in range(12):
        learner.publish()
        assert catch_up(follower, learner) is None
        assert holds(follower, sampler, learner, version)
        if precision == "float32":
            assert torch.equal(
                reference_logp(sampler, PROMPT, TOKENS),
                reference_logp(learner.policy, PROMPT, TOKENS),
            )
        learner.learn()
    assert [m.base for m in learner.known] == [
        NO_BASE,
        0,
        1,
        2,
        3,
        NO_BASE,
        5,
        6,
        7,
        8,
        NO_BASE,
        10,
    ]


def test_a_change_of_a_slow_training_is_smaller_than_the_whole() -> None:
    learner = Learner("full", lr=1e-6)
    whole, *changes = [sum(b.num_bytes for b in m.blobs) for m in learner.run(5)]
    assert all(change < 0.2 * whole for change in changes)


def test_a_sampler_that_comes_late_or_misses_versions_takes_the_shortest_way() -> None:
    learner, sampler = Learner(), grouped_query_policy(seed=2)
    known = learner.run(13)
    follower = Follower(sampler)
    assert versions(follower.plan(known)) == [10, 11, 12]
    assert versions(follower.plan(known[:10])) == [5, 6, 7, 8, 9]
    assert versions(follower.plan(known[6:10])) == []
    assert catch_up(follower, learner, known[:3]) is None
    assert holds(follower, sampler, learner, 2)
    assert versions(follower.plan(known[:5])) == [3, 4]
    assert versions(follower.plan([known[4]])) == []
    assert versions(follower.plan(known[:6])) == [5]
    assert versions(follower.plan([*known[:5], *known[6:]])) == [10, 11, 12]
    assert catch_up(follower, learner) is None
    assert holds(follower, sampler, learner, 12)
    assert follower.plan(known) == []
    assert follower.apply([], learner.fetch) is None


@pytest.mark.slow
def test_plans_do_not_depend_on_order_or_repetition() -> None:
    known = Learner().run(9)
    rng = random.Random(0)
    follower = Follower(grouped_query_policy())
    for _ in range(50):
        shuffled = rng.choices(known, k=4) + known
        rng.shuffle(shuffled)
        assert versions(follower.plan(shuffled)) == [5, 6, 7, 8]


@pytest.mark.slow
def test_any_subset_of_manifests_and_blobs_leads_to_a_state_the_learner_had() -> None:
    learner = Learner(anchor_every=4)
    learner.run(14)
    for seed in range(40):
        rng = random.Random(seed)
        sampler = grouped_query_policy(seed=2)
        follower = Follower(sampler)
        reached, seen = -1, []
        for manifest in learner.known:
            if rng.random() < 0.8:
                seen.append(manifest)
            blobs = {b.sha256 for m in seen if rng.random() < 0.9 for b in m.blobs}
            while plan := follower.plan(seen):
                if (
                    follower.apply(
                        plan,
                        lambda blob, there=blobs: (
                            learner.store[blob.sha256] if blob.sha256 in there else None
                        ),
                    )
                    is not None
                ):
                    break
            assert follower.version >= reached
            reached = follower.version
            assert reached == -1 or holds(follower, sampler, learner, reached)
        assert reached >= 0


# The publisher


def test_the_last_made_version_is_made_once() -> None:
    learner = Learner()
    assert learner.publisher.make() is learner.publisher.make()
    learner.learn()
    made = learner.publisher.make()
    assert made.base == 0
    assert learner.publisher.make() is made


def test_versions_that_are_not_published_are_in_the_next_change() -> None:
    learner, sampler = Learner(anchor_every=4), grouped_query_policy(seed=2)
    for _ in range(5):
        learner.publish()
        learner.learn(3)
    assert [(m.version, m.base) for m in learner.known] == [
        (0, NO_BASE),
        (3, 0),
        (6, NO_BASE),
        (9, NO_BASE),
        (12, NO_BASE),
    ]
    follower = Follower(sampler)
    assert catch_up(follower, learner, learner.known[:2]) is None
    assert holds(follower, sampler, learner, 3)


def test_a_step_that_changes_nothing_takes_no_blob() -> None:
    learner, sampler = Learner(), grouped_query_policy(seed=2)
    learner.publish()
    learner.policy.version += 1
    manifest = learner.publish()
    assert (manifest.base, manifest.blobs, manifest.state) == (0, (), manifest.base_state)
    follower = Follower(sampler)
    assert catch_up(follower, learner) is None
    assert holds(follower, sampler, learner, 1)


def test_without_deltas_every_version_is_whole() -> None:
    learner = Learner(deltas=False)
    assert {m.base for m in learner.run(4)} == {NO_BASE}
    assert learner.publisher.needed() == {b.sha256 for m in learner.known[-2:] for b in m.blobs}


def test_a_change_as_large_as_the_whole_is_not_made() -> None:
    learner = Learner()
    fresh = trained_state(learner.policy, "float32")
    take_state(learner.policy, {name: torch.zeros_like(value) for name, value in fresh.items()})
    learner.publish()
    take_state(learner.policy, fresh)
    learner.policy.version += 1
    assert learner.publish().base == NO_BASE
    learner.learn()
    assert learner.publish().base == 1


def test_a_policy_that_went_back_is_published_whole() -> None:
    learner = Learner()
    learner.run(3)
    learner.policy.version = 1
    assert learner.publisher.make().base == NO_BASE


def test_an_anchor_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="anchor_every=0 makes no anchor; use at least 1"):
        Publisher(grouped_query_policy(), "bfloat16", 0, True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "grouped"])
def test_what_is_since_the_last_but_one_anchor_is_needed(kind: str) -> None:
    learner = Learner(kind, anchor_every=3)
    first_needed = {0: 0, 1: 0, 2: 0, 3: 0, 5: 0, 6: 3, 8: 3, 9: 6}
    for version in range(10):
        learner.publish()
        if version in first_needed:
            needed = {
                b.sha256
                for m in learner.known[first_needed[version] :]
                for b in (*m.blobs, *m.frozen)
            }
            assert learner.publisher.needed() == needed, version
        learner.learn()


@pytest.mark.slow
def test_with_no_more_than_what_is_needed_anybody_can_follow() -> None:
    learner, first = Learner("lora", anchor_every=3), lora_policy(seed=2)
    steady = Follower(first)
    for version in range(11):
        learner.publish()
        learner.store = {name: learner.store[name] for name in learner.publisher.needed()}
        assert catch_up(steady, learner) is None
        late = lora_policy(seed=3)
        follower = Follower(late)
        assert catch_up(follower, learner) is None
        assert holds(follower, late, learner, version)
        assert holds(steady, first, learner, version)
        learner.learn()


# What never trains


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "layers", "four bits"])
def test_what_never_trains_is_encoded_and_loaded_once(kind: str) -> None:
    learner, sampler = Learner(kind), POLICIES[kind](seed=2)
    follower = Follower(sampler)
    for _ in range(7):
        learner.publish()
        assert catch_up(follower, learner) is None
        learner.learn()
    (frozen,) = {m.frozen for m in learner.known}
    assert frozen
    assert all(learner.fetched.count(blob.sha256) == 1 for blob in frozen)
    assert state_hash(frozen_state(sampler)) == state_hash(frozen_state(learner.policy))


def test_what_never_trains_must_be_all_there() -> None:
    learner, sampler = Learner("lora"), lora_policy(seed=2)
    manifest = learner.publish()
    before = content(sampler)
    part = dict(list(frozen_state(learner.policy).items())[1:])
    blobs = encode_whole(part)
    learner.store |= {d.sha256: c for d, c in zip(describe(blobs), blobs, strict=True)}
    follower = Follower(sampler)
    for frozen in ((), describe(blobs)):
        lacking = msgspec.structs.replace(manifest, frozen=frozen)
        assert catch_up(follower, learner, [lacking]) == 0
        assert lacking in follower.bad
    assert content(sampler) == before
    assert catch_up(follower, learner) is None


def test_frozen_values_that_come_late_are_tried_again() -> None:
    learner, sampler = Learner("lora"), lora_policy(seed=2)
    manifest = learner.publish()
    kept = learner.store.pop(manifest.frozen[0].sha256)
    follower, before = Follower(sampler), content(sampler)
    assert catch_up(follower, learner) == 0
    assert content(sampler) == before
    learner.store[manifest.frozen[0].sha256] = kept
    assert catch_up(follower, learner) is None
    assert holds(follower, sampler, learner, 0)


# Faults


def test_a_corrupt_change_is_passed_over_until_the_next_anchor() -> None:
    learner, sampler = Learner(), grouped_query_policy(seed=2)
    learner.run(5)
    follower = Follower(sampler)
    learner.spoil(learner.known[3])
    before = content(sampler)
    assert catch_up(follower, learner) == 3
    assert (follower.version, sampler.version, content(sampler)) == (-1, 0, before)
    assert follower.bad == {learner.known[3]}
    assert versions(follower.plan(learner.known)) == [0, 1, 2]
    assert catch_up(follower, learner) is None
    assert holds(follower, sampler, learner, 2)
    assert follower.plan(learner.known) == []
    learner.learn()
    learner.publish()
    assert catch_up(follower, learner) is None
    assert holds(follower, sampler, learner, 5)


def test_a_corrupt_anchor_is_passed_over_until_the_next() -> None:
    learner, sampler = Learner(anchor_every=3), grouped_query_policy(seed=2)
    learner.run(5)
    learner.spoil(learner.known[3])
    follower = Follower(sampler)
    assert catch_up(follower, learner) == 3
    assert catch_up(follower, learner) is None
    assert holds(follower, sampler, learner, 2)
    learner.learn(2)
    learner.publish()
    assert catch_up(follower, learner) is None
    assert holds(follower, sampler, learner, 6)


def test_a_missing_blob_is_tried_again_and_then_given_up() -> None:
    learner, sampler = Learner(), grouped_query_policy(seed=2)
    learner.run(3)
    follower = Follower(sampler)
    lost = learner.lose(learner.known[1])
    assert catch_up(follower, learner) == 1
    assert follower.bad == set()
    learner.store[learner.known[1].blobs[0].sha256] = lost
    assert catch_up(follower, learner) is None
    assert holds(follower, sampler, learner, 2)

    other = Follower(grouped_query_policy(seed=3))
    learner.lose(learner.known[1])
    for _ in range(MAX_MISSES):
        assert versions(other.plan(learner.known)) == [0, 1, 2]
        assert catch_up(other, learner) == 1
    assert other.bad == {learner.known[1]}
    assert versions(other.plan(learner.known)) == [0]


@pytest.mark.parametrize(
    "changed",
    [
        {"state": bytes(32)},
        {"state": b""},
        {"precision": "float32"},
        {"blobs": ()},
        {"blobs": (Blob(sha256="0" * 64, num_bytes=1, raw_bytes=2**60),)},
        {"blobs": (Blob(sha256="0" * 64, num_bytes=2**60, raw_bytes=1),)},
        {"frozen": (Blob(sha256="0" * 64, num_bytes=2**40, raw_bytes=1),)},
    ],
    ids=str,
)
@pytest.mark.parametrize("version", [0, 1])
def test_a_manifest_that_lies_is_bad_and_changes_nothing(
    version: int, changed: dict[str, Any]
) -> None:
    learner, sampler = Learner(), grouped_query_policy(seed=2)
    learner.run(2)
    lying = msgspec.structs.replace(learner.known[version], **changed)
    follower, before = Follower(sampler), content(sampler)
    known = [*learner.known[:version], lying]
    assert catch_up(follower, learner, known) == version
    assert (content(sampler), follower.version) == (before, -1)
    assert follower.bad == {lying}
    assert catch_up(follower, learner) is None


def test_a_blob_of_another_raw_size_is_refused() -> None:
    learner = Learner()
    manifest = learner.publish()
    (blob,) = manifest.blobs
    lying = msgspec.structs.replace(
        manifest, blobs=(msgspec.structs.replace(blob, raw_bytes=blob.raw_bytes - 1),)
    )
    follower = Follower(grouped_query_policy())
    assert catch_up(follower, learner, [lying]) == 0
    assert follower.bad == {lying}


def test_values_of_another_model_are_refused_though_their_hash_is_right() -> None:
    learner, sampler = Learner("full"), grouped_query_policy()
    learner.publish()
    follower, before = Follower(sampler), content(sampler)
    assert catch_up(follower, learner) == 0
    assert content(sampler) == before


def test_values_that_are_not_all_there_are_refused_though_their_hash_is_right() -> None:
    learner, sampler = Learner(), grouped_query_policy(seed=2)
    manifest = learner.publish()
    state = trained_state(learner.policy, "bfloat16")
    follower, before = Follower(sampler), content(sampler)
    for other in (
        dict(list(state.items())[1:]),
        state | {"lm_head.weight": state["lm_head.weight"].t().contiguous()},
    ):
        blobs = encode_whole(other)
        learner.store |= {blob.sha256: c for blob, c in zip(describe(blobs), blobs, strict=True)}
        wrong = msgspec.structs.replace(manifest, blobs=describe(blobs), state=state_hash(other))
        assert catch_up(follower, learner, [wrong]) == 0
        assert wrong in follower.bad
    assert content(sampler) == before
    assert catch_up(follower, learner) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused_though_their_hash_is_right(value: float) -> None:
    learner, sampler = Learner(), grouped_query_policy(seed=2)
    manifest = learner.publish()
    state = {k: v.clone() for k, v in trained_state(learner.policy, "bfloat16").items()}
    next(iter(state.values())).view(-1)[0] = value
    follower, before = Follower(sampler), content(sampler)
    blobs = encode_whole(state)
    learner.store |= {blob.sha256: c for blob, c in zip(describe(blobs), blobs, strict=True)}
    wrong = msgspec.structs.replace(manifest, blobs=describe(blobs), state=state_hash(state))
    assert catch_up(follower, learner, [wrong]) == 0
    assert wrong in follower.bad
    assert content(sampler) == before


def test_a_blob_that_is_no_file_of_weights_is_bad() -> None:
    learner, follower = Learner(), Follower(grouped_query_policy())
    manifest = learner.publish()
    for raw in (b"", b"pickle", save({"a": torch.zeros(3, dtype=torch.int32)})):
        blob = zstandard.ZstdCompressor().compress(raw)
        wrong = msgspec.structs.replace(manifest, blobs=describe([blob]))
        learner.store[wrong.blobs[0].sha256] = blob
        assert catch_up(follower, learner, [wrong]) == 0
        assert wrong in follower.bad


def test_chains_are_told_apart_by_their_states() -> None:
    """A learner that lost its last versions and made others of the same numbers: a change of theirs
    does not fit ours.
    """
    ours, theirs, sampler = Learner(lr=1e-4), Learner(lr=3e-4), grouped_query_policy(seed=2)
    ours.run(3), theirs.run(4)
    follower = Follower(sampler)
    assert catch_up(follower, ours) is None
    assert versions(follower.plan([theirs.known[3]])) == []
    assert versions(follower.plan([*theirs.known[1:], *ours.known[1:]])) == []
    plan = follower.plan([*ours.known, *theirs.known])
    assert plan == theirs.known
    assert follower.apply(plan, theirs.fetch) is None
    assert holds(follower, sampler, theirs, 3)


def test_manifests_that_stand_on_themselves_or_the_future_lead_nowhere() -> None:
    learner, follower = Learner(), Follower(grouped_query_policy())
    learner.run(2)
    change = learner.known[1]
    circle = msgspec.structs.replace(change, base=1, base_state=change.state)
    backwards = msgspec.structs.replace(change, base=7, base_state=change.state)
    before_all = msgspec.structs.replace(change, base=-2, base_state=b"")
    negative = msgspec.structs.replace(learner.known[0], version=-1)
    assert follower.plan([circle, backwards, before_all, negative]) == []
    assert catch_up(follower, learner) is None
    assert follower.plan([circle, backwards, before_all, negative]) == []


def test_a_plan_for_another_state_is_a_mistake_of_the_caller() -> None:
    learner, follower = Learner(), Follower(grouped_query_policy())
    learner.run(3)
    with pytest.raises(
        ValueError,
        match=r"learner.weights.2 stands on version 1, the plan is at -1; make a new plan",
    ):
        follower.apply(learner.known[2:], learner.fetch)
    assert follower.bad == set()
