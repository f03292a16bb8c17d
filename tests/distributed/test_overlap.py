"""Sampling beside a step, without a hub: what is sampled, in which order things happen, and when it
is done at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fakes import spread_crew, write_task
from motley.config import EnginePart, OpenAI, Vllm
from motley.distributed import overlap
from motley.distributed.overlap import Overlap, is_right, pays, shortage
from motley.engines import TorchEngine, torch_engine
from motley.engines.engine import Completion
from motley.exchange import Mark, MemoryLog
from motley.learning.learner import StepReport
from motley.learning.waiting import Take
from motley.models.policy import Policy
from motley.peers.peer import Peer
from motley.records import Group, Sampling
from peers.test_peer import groups_on, peers_of

PATIENCE_S = 120.0
GIB = 2**30


class Scripted(TorchEngine):
    """Does what a test says before it samples, and notes what happens."""

    before: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.events: list[str] = []

    def refresh(self) -> None:
        super().refresh()
        self.events.append("refreshed")

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        self.before()
        made = super().sample(prompts, num_samples, sampling, seed)
        self.events.append(f"sampled in {threading.current_thread().name.split('_')[0]}")
        return made


class Stage:
    """A peer that has sampled a round and is about to take a step, with another round to be sampled
    beside it.
    """

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        engine: Callable[[Policy], Any] = Scripted,
        **settings: Any,
    ) -> None:
        self.log, self.said = MemoryLog(), list[str]()
        config = spread_crew(folder, ("full",), pace="async", lossless=True, **settings)
        config = msgspec.structs.replace(
            config, peer=(msgspec.structs.replace(config.peer[0], device=device),)
        )
        (self.peer,) = peers_of(config, self.log)
        self.peer.half.engine = self.engine = engine(self.peer.learner.policy)
        self.overlap = Overlap(config, self.peer.half, self.said.append)
        self.peer.half.sample()
        self.chosen = self.next_step()
        if isinstance(self.engine, Scripted):
            self.engine.events.clear()

    def next_step(self) -> Take:
        self.peer.publish()
        self.peer.receive()
        chosen = self.peer.choose()
        assert isinstance(chosen, Take)
        assert chosen.groups
        return chosen

    def step(self, refresh: bool = False) -> StepReport | None:
        report = self.peer.step(self.chosen, refresh=refresh)
        self.engine.events.append("stepped")
        return report

    def sampled(
        self, round: int
    ) -> list[tuple[int, tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]]:
        found = [group for group in groups_in(self.peer) if group.round == round]
        return [
            (
                g.origin.version,
                tuple(r.tokens for r in g.rollouts),
                tuple(r.logprobs for r in g.rollouts),
            )
            for g in found
        ]


def groups_in(peer: Peer) -> list[Group]:
    """What it has sampled so far."""
    peer.publish()
    return groups_on(peer.log)


@pytest.fixture
def stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(overlap, "pays", lambda half: True)
    made = Stage(folder)
    made.overlap.observe()
    assert not made.overlap.on
    made.overlap.observe()
    assert made.overlap.on
    yield made
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sampling")]


# What is sampled, and when


def test_a_step_and_sampling_go_on_at_once(stage: Stage) -> None:
    meeting = threading.Barrier(2)
    stage.engine.before = lambda: meeting.wait(PATIENCE_S)

    def step() -> StepReport | None:
        meeting.wait(PATIENCE_S)
        return stage.step()

    both = stage.overlap.both(step)
    assert both.report is not None
    assert both.sampled is not None
    assert stage.peer.half.sampled_rounds == 2


@pytest.mark.parametrize("first", ["the step", "sampling"])
def test_what_is_sampled_has_the_version_and_the_weights_of_before_the_step(
    first: str, stage: Stage
) -> None:
    half, stepped = stage.peer.half, threading.Event()
    alone = half.drawn(half.answered(half.ask()))
    stage.engine.events.clear()
    stage.engine.before = lambda: stepped.wait(PATIENCE_S if first == "the step" else 0)

    def step() -> StepReport | None:
        report = stage.step()
        stepped.set()
        return report

    both = stage.overlap.both(step)
    assert stage.peer.learner.policy.version == 1
    assert both.sampled == alone.sampled
    assert both.sampled.version == 0
    as_made = [
        (0, tuple(r.tokens for r in g.rollouts), tuple(r.logprobs for r in g.rollouts))
        for g in alone.groups
    ]
    assert stage.sampled(1) == as_made
    stage.engine.before = lambda: None
    assert half.draw().sampled.version == 1
    stage.peer.half.sample()
    assert [version for version, _, _ in stage.sampled(2)] == [1, 1]


def test_a_step_beside_sampling_makes_the_same_weights(stage: Stage, tmp_path: Path) -> None:
    stage.overlap.both(stage.step)
    alone = Stage(tmp_path)
    alone.step(refresh=True)
    ours, theirs = (dict(s.peer.learner.policy.model.named_parameters()) for s in (stage, alone))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    made = [s.engine.sample([[5, 6]], 4, s.peer.config.sampling, 3) for s in (stage, alone)]
    assert made[0] == made[1]  # both engines have the new weights


def test_the_engine_takes_new_weights_only_when_both_have_ended(stage: Stage) -> None:
    stepped = threading.Event()
    stage.engine.before = lambda: stepped.wait(PATIENCE_S)

    def step() -> StepReport | None:
        report = stage.step()
        stepped.set()
        return report

    stage.overlap.both(step)
    assert stage.engine.events == ["stepped", "sampled in sampling", "refreshed"]


def test_rewards_are_computed_and_groups_kept_in_the_main_thread(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward function may be one that works nowhere else, such as one that sets an alarm; and it
    is not beside another of its calls.
    """
    threads, score = [], stage.peer.half.task.score
    monkeypatch.setattr(
        stage.peer.half.task,
        "score",
        lambda *given: threads.append(threading.current_thread()) or score(*given),
    )
    put = stage.peer.half.outbox.put
    monkeypatch.setattr(
        stage.peer.half.outbox,
        "put",
        lambda *given, **named: threads.append(threading.current_thread()) or put(*given, **named),
    )
    stage.overlap.both(stage.step)
    assert threads == [threading.main_thread()] * 2


def test_the_seconds_of_both_less_those_at_once_are_those_that_passed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step takes 2 s, sampling beside it 3, rewards and outbox 0.5, refreshing 0.25."""
    took = iter([2.0, 0.5, 0.25])
    in_main = lambda work: (work(), next(took))
    in_either = lambda work, clock: (
        in_main(work) if threading.current_thread() is threading.main_thread() else (work(), 3.0)
    )
    monkeypatch.setattr(overlap, "timed", in_either)
    timing = stage.overlap.both(stage.step).timing
    assert (timing.sample_s, timing.learn_s, timing.overlap_s) == (3.5, 2.25, 2.0)
    assert timing.sample_s + timing.learn_s - timing.overlap_s == max(2.0, 3.0) + 0.5 + 0.25


GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    ],
)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_round_after_round_beside_steps_is_as_it_would_be_alone(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whatever engine the device has.

    On a GPU this also shows that what is kept between rounds is safe to use in two streams.
    """
    if device == "cpu":
        monkeypatch.setattr(overlap, "pays", lambda half: True)
    write_task(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    stage = Stage(tmp_path, device, torch_engine, rounds=20)
    half, policy = stage.peer.half, stage.peer.learner.policy
    for _ in range(2):
        stage.peer.step(stage.chosen)
        stage.overlap.observe()
        stage.peer.half.sample()
        stage.chosen = stage.next_step()
    assert stage.overlap.on
    for version in range(2, 11):
        alone = half.drawn(half.answered(half.ask()))
        both = stage.overlap.both(lambda: stage.peer.step(stage.chosen, refresh=False))
        assert (policy.version, half.version) == (version + 1, version + 1)
        assert both.sampled == alone.sampled
        assert both.timing.overlap_s > 0
        found = [
            r
            for group in groups_in(stage.peer)
            if group.round == alone.round
            for r in group.rollouts
        ]
        made = [r for group in alone.groups for r in group.rollouts]
        assert [r.tokens for r in found] == [r.tokens for r in made]
        assert [x for r in found for x in r.logprobs] == pytest.approx(
            [x for r in made for x in r.logprobs], abs=1e-5
        )
        stage.chosen = stage.next_step()
    assert stage.said == []


# Failures


def fail_with(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def out_of_memory_of_an_engine() -> ValueError:
    error = ValueError(
        "out of memory with 4 samples of 5 tokens of a prompt; lower group_size or max_tokens"
    )
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    return error


@pytest.mark.parametrize(
    "error",
    [ValueError("a strange answer"), ConnectionError("no server"), RuntimeError("CUDA error")],
    ids=repr,
)
def test_a_failure_of_sampling_is_raised_when_the_step_is_taken(
    error: Exception, stage: Stage
) -> None:
    stage.engine.before = fail_with(error)
    with pytest.raises(type(error), match=str(error)):
        stage.overlap.both(stage.step)
    assert stage.engine.events == ["stepped"]
    assert stage.peer.learner.policy.version == 1
    half = stage.peer.half
    assert (half.sampled_rounds, half.outbox.note_of(Mark("round", 1))) == (1, None)
    assert stage.peer.half.version == 0  # what the engine still has


def test_logprobs_that_are_no_numbers_are_an_error_that_names_the_version_that_sampled(
    stage: Stage,
) -> None:
    nan = lambda c: Completion(c.tokens, (float("nan"),) * len(c.tokens), c.ending)
    answers = stage.engine.sample
    stage.engine.sample = lambda *given: [[nan(c) for c in row] for row in answers(*given)]  # type: ignore[method-assign]
    with pytest.raises(
        FloatingPointError, match=r"full0 samples with log-probs that are no numbers at version 0"
    ):
        stage.overlap.both(stage.step)
    assert stage.peer.half.sampled_rounds == 1


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), out_of_memory_of_an_engine()],
    ids=["torch", "engine"],
)
def test_without_memory_for_both_they_take_turns_for_good_and_nothing_is_lost(
    error: Exception, stage: Stage
) -> None:
    stage.engine.before = fail_with(error)
    both = stage.overlap.both(stage.step)
    assert both.report is not None
    assert (both.sampled, both.timing.sample_s, both.timing.overlap_s) == (
        None,
        pytest.approx(0, abs=1e-3),
        0.0,
    )
    assert stage.said == [
        "sampling and learning at once: memory ran out; they take turns from here on"
    ]
    assert not stage.overlap.on
    stage.overlap.observe()
    assert not stage.overlap.on
    assert stage.engine.events == ["stepped", "refreshed"]
    stage.engine.before = lambda: None
    assert stage.peer.half.sample().version == 1  # the round of before, in turn
    assert [version for version, _, _ in stage.sampled(1)] == [1, 1]


def test_memory_that_ran_out_and_was_made_do_with_ends_it_too(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine samples in parts then, and a learner halves its budget: neither says so to
    anyone.
    """
    counts = iter([3, 4])
    monkeypatch.setattr(overlap, "_times_full", lambda device: next(counts))
    both = stage.overlap.both(stage.step)
    assert both.sampled is not None
    assert not stage.overlap.on
    assert len(stage.said) == 1


def test_a_step_that_fails_waits_for_sampling_and_keeps_nothing(stage: Stage) -> None:
    with pytest.raises(FloatingPointError, match="gradient"):
        stage.overlap.both(fail_with(FloatingPointError("gradient norm is nan")))
    assert stage.engine.events == ["sampled in sampling"]
    half = stage.peer.half
    assert (half.sampled_rounds, half.outbox.note_of(Mark("round", 1))) == (1, None)


# On a GPU


class FakeStream:
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def wait_stream(self, other: str) -> None:
        self.events.append(f"waits for {other}")

    def synchronize(self) -> None:
        self.events.append("synchronised")


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_gpu_sampling_has_a_stream_of_its_own_that_is_empty_before_weights_change(
    fails: bool, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = stage.engine.events

    @contextmanager
    def stream(entered: FakeStream) -> Iterator[None]:
        events.append(f"stream of {threading.current_thread().name.split('_')[0]}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the main stream")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    stage.overlap._stream = FakeStream(events)  # type: ignore[assignment]
    if fails:
        stage.engine.before = fail_with(torch.OutOfMemoryError("CUDA out of memory"))

    def step() -> StepReport | None:
        # before anything of the step is asked of it
        assert events[0] == "waits for the main stream"
        return stage.step()

    stage.overlap.both(step)
    assert events[-2:] == ["synchronised", "refreshed"]
    assert "stream of sampling" in events
    assert ("sampled in sampling" in events) == (not fails)


def test_memory_is_judged_by_what_a_turn_takes_when_the_optimiser_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    events: list[str] = []
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: events.append("from here on")
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: events.append("stream"))
    monkeypatch.setattr(overlap, "shortage", lambda device: events.append("judged") or "")
    fresh = Stage(tmp_path)
    fresh.overlap._device = torch.device("cuda")
    assert events == []
    for _ in range(4):
        fresh.overlap.observe()
    assert events == ["from here on", "judged", "stream"]


@pytest.mark.parametrize(
    ("allocated", "peak", "free", "reserved", "words"),
    [
        (10, 20, 0, 40, ""),
        (10, 20, 5, 35, ""),
        (10, 20, 5, 34, "would need up to 40.0 GiB on cuda:0, which has room for 39.0"),
        (10, 50, 80, 50, ""),
        (10, 50, 30, 50, "would need up to 130.0 GiB on cuda:0, which has room for 80.0"),
        (10, 10, 0, 10, ""),  # a server samples, and takes nothing here
    ],
)
def test_memory_must_hold_three_times_what_the_larger_of_the_two_took(
    allocated: int, peak: int, free: int, reserved: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved * GIB)
    assert shortage(torch.device("cuda:0")) == words
    assert shortage(torch.device("cpu")) == ""


def test_where_memory_holds_no_two_it_never_begins_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    monkeypatch.setattr(overlap, "shortage", lambda device: "would need more")
    fresh = Stage(tmp_path)
    for _ in range(3):
        fresh.overlap.observe()
    assert not fresh.overlap.on
    assert fresh.said == [
        "sampling and learning at once: would need more; they take turns from here on"
    ]


# When


def peer_of(folder: Path, engine: Any = None, **settings: Any) -> Peer:
    config = spread_crew(folder, ("full",), **({"pace": "async"} | settings))
    (peer,) = peers_of(config, MemoryLog())
    peer.half.engine = engine or Scripted(peer.learner.policy)
    return peer


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        ({}, True),
        ({"pace": "lockstep"}, False),
        ({"learning": "max_age = 0"}, False),
        ({"learning": 'max_age = 0\nstale = "pace"'}, True),
        ({"learning": "max_age = 0\nmax_age_s = 60.0"}, True),
    ],
)
def test_it_is_right_where_what_is_a_version_old_is_learned_from(
    settings: dict[str, Any], right: bool, stage: Stage, tmp_path: Path
) -> None:
    peer = peer_of(tmp_path, **settings)
    assert is_right(peer.config, peer.half) == right


def test_it_is_not_right_with_the_learners_own_weights_or_without_a_learner_or_a_sampler(
    stage: Stage, tmp_path: Path
) -> None:
    peer = peer_of(tmp_path)
    me, live = peer.me, TorchEngine(peer.learner.policy)
    live.keeps_snapshot = False  # type: ignore[attr-defined]
    assert is_right(peer.config, peer.half)
    for engine, role in (
        (live, "peer"),
        (peer.half.engine, "sampler"),
        (peer.half.engine, "learner"),
    ):
        peer.half.engine = engine
        peer.half.me = msgspec.structs.replace(
            me, role=role, **({"model": "", "follows": "x"} if role == "sampler" else {})
        )
        assert not is_right(peer.config, peer.half)


class Elsewhere:
    """A half whose policy computes on some device."""

    def __init__(self, half: Any, device: str, engine: Any) -> None:
        self.me = msgspec.structs.replace(half.me, engine=engine)
        self.policy = type("Placed", (), {"device": torch.device(device)})


@pytest.mark.parametrize(
    ("device", "engine", "pays_off"),
    [
        ("cpu", "torch", False),
        ("mps", "torch", False),
        ("cuda", "torch", True),
        ("cuda:1", EnginePart(vllm=Vllm()), True),
        ("cpu", EnginePart(vllm=Vllm()), False),  # it has the same cores
        ("cpu", EnginePart(openai=OpenAI(url="http://elsewhere/v1")), True),
        ("cuda", EnginePart(openai=OpenAI(url="http://elsewhere/v1")), True),
    ],
)
def test_it_pays_where_the_two_do_not_fight_for_the_same_cores(
    device: str, engine: Any, pays_off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pays(Elsewhere(peer_of(tmp_path).half, device, engine)) == pays_off  # type: ignore[arg-type]
