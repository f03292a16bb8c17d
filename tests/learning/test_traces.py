"""What a step made of every token: the values, and the files that keep them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace as changed
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from fakes import reference_distribution, reference_logp, spread_crew, tiny_policy
from motley.archive import open_log
from motley.config import Evaluate, Learning, Teach, Trust
from motley.learning import traces
from motley.learning.fates import read_fates
from motley.learning.learner import Learner
from motley.learning.meetings import Lesson
from motley.learning.select import Candidate
from motley.learning.traces import (
    RolloutTrace,
    StepTrace,
    TraceFiles,
    read_trace,
    traced_rounds,
)
from motley.models.policy import Policy
from motley.objectives import objective
from motley.records import Rollout, Sampling
from motley.runs.local import LocalCrew
from motley.runs.replay import KeptLog, Replay

from .test_rescue import lesson_of
from .test_rescue import of as met
from .test_senders_of_a_step import crew, loud
from .test_spans_of_a_step import (
    NOT_CUT,
    TEXT_ONLY,
    UNREAD,
    foreign_group,
    foreign_rollouts,
    own_group,
    read,
)
from .test_translating import SENDER

# Values


def traced(
    candidates: list[Candidate],
    row: str = "ftis",
    settings: dict[str, Any] | None = None,
    rules: Learning = Learning(grad_clip=1e9),
    lessons: list[Lesson] | None = None,
    trust: Trust = Trust(),
    **how: Any,
) -> tuple[tuple[RolloutTrace, ...], torch.Tensor]:
    """The trace of a plain gradient step, and how far it went by its learning rate."""
    policy = tiny_policy()
    made = objective(row, settings=settings or {})
    learner = Learner(policy, made, rules, 1.0, trust, Teach(rescue=0.5))
    learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=1.0)
    before = trained(policy).clone()
    report = learner.step(candidates, lessons=lessons or [], **how)
    moved = (trained(policy) - before) / learner.optimiser.param_groups[0]["lr"]
    return report.trace, moved


def trained(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for _, p in policy.trained()])


def near(candidate: Candidate) -> Candidate:
    """The same, as if its sender were almost the learner: some ratios are beyond a clip of 0.2."""
    policy, rng = tiny_policy(), np.random.default_rng(candidate.position)
    prompt = policy.prompts.ids(candidate.problem)

    def reported(one: Rollout) -> Rollout:
        logp_T = reference_logp(policy, prompt, one.tokens).detach().double().numpy()
        noise_T = rng.normal(scale=0.2, size=len(logp_T))
        return replace(one, logprobs=tuple((logp_T + noise_T).tolist()))

    rollouts = tuple(map(reported, candidate.group.rollouts))
    return changed(candidate, group=replace(candidate.group, rollouts=rollouts))


def tokens_of(trace: RolloutTrace, candidates: list[Candidate]) -> tuple[int, ...]:
    """The learner's cut, by who sent the group and its number there."""
    if trace.tokens is not None:
        return trace.tokens
    (group,) = [c.group for c in candidates if c.position == trace.position]
    return group.rollouts[trace.number].tokens


def led_by(rollouts: tuple[RolloutTrace, ...], candidates: list[Candidate]) -> torch.Tensor:
    """The gradient of the sum of push·log p, with transformers' own log-probs."""
    policy = tiny_policy()
    problem_of = {c.position: c.problem for c in candidates}
    for trace in rollouts:
        prompt = policy.prompts.ids(problem_of[trace.position])
        logp_T = reference_logp(policy, prompt, tokens_of(trace, candidates))
        (logp_T * torch.from_numpy(trace.push)).sum().backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for _, p in policy.trained()]
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ("ftis", {}),
        ("ftis", {"g": -1.0}),
        ("ftis", {"beta": 0.3}),
        ("grpo", {}),
        ("gepo", {"beta": 0.2, "toward": "code"}),
        ("m2po", {}),
        ("hacpo", {}),
    ],
)
def test_a_step_leads_where_the_pushes_of_its_trace_point(
    row: str, settings: dict[str, Any]
) -> None:
    candidates = [*crew("me", "a", "b"), foreign_group(tiny_policy(), position=8)]
    rollouts, moved = traced(candidates, row, settings)
    assert len(rollouts) == 3 * 4 + 4
    torch.testing.assert_close(led_by(rollouts, candidates), moved, rtol=1e-3, atol=1e-6)
    assert moved.abs().max() > 1e-4


def test_what_is_left_of_a_loud_stranger_is_in_its_pushes() -> None:
    candidates = [*crew("me", "a", "b"), loud("x", 3)]
    bounded, moved = traced(candidates, "dr_grpo", trust=Trust(grad_share=2))
    free, _ = traced(candidates, "dr_grpo", trust=Trust(grad_share=0))
    torch.testing.assert_close(led_by(bounded, candidates), moved, rtol=1e-3, atol=1e-6)
    for less, all_of_it in zip(bounded, free, strict=True):
        assert (less.scale < 0.5) == (less.sender == "x")
        assert all_of_it.scale == 1
        np.testing.assert_allclose(less.push, less.scale * all_of_it.push, rtol=1e-5)


def test_lessons_come_last_and_push_beside_the_objective() -> None:
    mine, theirs = met("me", [1, 0, 0], 1), met("other", [1, 0, 0.5], 2)
    rollouts, moved = traced([mine], "alone", lessons=[lesson_of(theirs)])
    assert [one.is_lesson for one in rollouts] == [False] * 3 + [True]
    lesson = rollouts[-1]
    assert (lesson.position, lesson.number, lesson.sender) == (2, 0, "other")
    np.testing.assert_allclose(lesson.push, 0.5 / (4 * 3), rtol=1e-6)  # rescue / (B·T)
    torch.testing.assert_close(led_by(rollouts, [mine, theirs]), moved, rtol=1e-3, atol=1e-6)


def test_values_of_truncated_importance_are_those_of_its_formula() -> None:
    """push = A·min(rho, C) / (B·T), from float64 log-probs; nothing where the filter drops it."""
    candidates, policy = [*map(near, crew("me", "a"))], tiny_policy()
    rollouts, _ = traced(candidates, "ftis", {"C": 1.1, "g": 0.02})
    assert {one.kept for one in rollouts} == {True, False}
    for trace, (c, number) in zip(
        rollouts, [(c, n) for c in candidates for n in range(4)], strict=True
    ):
        sent, prompt = c.group.rollouts[number], policy.prompts.ids(c.problem)
        assert (trace.position, trace.number, trace.sender) == (
            c.position, number, c.group.origin.peer
        )  # fmt: skip
        assert trace.tokens is trace.spans is None
        logp_TV = reference_distribution(policy, prompt, sent.tokens).detach().double().numpy()
        d_T = logp_TV[range(len(sent.tokens)), sent.tokens] - np.array(sent.logprobs)
        rewards = np.array([r.reward for r in c.group.rollouts])
        advantage = (sent.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        kl = float((np.exp(-d_T) - 1 + d_T).mean())
        kept = bool(advantage > 0 or kl < 0.02)
        weight_T = np.minimum(np.exp(d_T), 1.1)
        assert trace.advantage == pytest.approx(advantage, rel=1e-5)
        assert (trace.kept, trace.filter_kl) == (kept, pytest.approx(kl, rel=1e-4))
        np.testing.assert_allclose(trace.log_ratio, d_T, atol=1e-5)
        np.testing.assert_allclose(trace.free, np.exp(d_T), rtol=1e-4)
        np.testing.assert_allclose(trace.weight, weight_T, rtol=1e-4)
        np.testing.assert_allclose(trace.used_weight, kept * weight_T, rtol=1e-4)
        np.testing.assert_allclose(trace.entropy, -(np.exp(logp_TV) * logp_TV).sum(1), rtol=1e-4)
        push_T = kept * advantage * weight_T / (8 * len(d_T))
        np.testing.assert_allclose(trace.push, push_T, rtol=1e-4)


@pytest.mark.parametrize(
    ("row", "denominator"),
    [
        ("ftis", lambda num_tokens, length: 12 * length),
        ("gspo", lambda num_tokens, length: 12 * length),
        ("dapo", lambda num_tokens, length: num_tokens),
        ("dr_grpo", lambda num_tokens, length: 12 * Sampling().max_tokens),
        ("rloo", lambda num_tokens, length: 12),
    ],
)
def test_a_push_is_advantage_times_weight_over_the_rows_denominator(
    row: str, denominator: Callable[[int, int], int]
) -> None:
    rollouts, _ = traced([*map(near, crew("me", "a", "b"))], row)
    num_tokens = sum(len(one.push) for one in rollouts)
    for one in rollouts:
        expected = one.advantage * one.weight / denominator(num_tokens, len(one.push))
        np.testing.assert_allclose(one.push, expected, rtol=1e-5)


def test_pushes_of_a_clipped_ratio_are_finite_differences_of_its_loss() -> None:
    """-(1/B) sum of (1/T) sum of max(min(rho·A, clip(rho)·A), 3·A where a stranger's A < 0)."""
    rollouts, _ = traced([*map(near, crew("me", "a"))], "grpo")

    def loss(trace: RolloutTrace, d_T: np.ndarray) -> float:
        a, rho_T = trace.advantage, np.exp(d_T)
        value_T = np.minimum(rho_T * a, rho_T.clip(0.8, 1.2) * a)
        if a < 0 and trace.sender != "me":
            value_T = np.maximum(value_T, 3 * a)
        return float(-value_T.mean() / 8)

    def difference(trace: RolloutTrace, place: int) -> float:
        step_T = 1e-5 * np.eye(len(trace.push))[place]
        d_T = trace.log_ratio.astype(np.float64)
        return (loss(trace, d_T + step_T) - loss(trace, d_T - step_T)) / 2e-5

    pushes = np.concatenate([one.push for one in rollouts])
    slopes = [difference(one, place) for one in rollouts for place in range(len(one.push))]
    np.testing.assert_allclose(pushes, -np.array(slopes), atol=1e-6)
    assert (pushes > 0).any()
    assert (pushes < 0).any()
    assert (pushes == 0).any()  # beyond the clip


def test_of_a_filtered_sequence_only_the_penalty_pushes() -> None:
    for beta in (0.0, 0.5):
        rollouts, _ = traced(crew("me", "a"), "ftis", {"g": 0.0, "beta": beta})
        dropped = [one for one in rollouts if not one.kept]
        assert dropped
        assert all(one.weight.any() and not one.used_weight.any() for one in dropped)
        assert all(bool(one.push.any()) == bool(beta) for one in dropped)


def test_withheld_tokens_are_not_pushed() -> None:
    (candidate,) = crew("a")
    mask = lambda c, number: np.arange(len(c.group.rollouts[number].tokens)) == 1
    rollouts, _ = traced([candidate], "tis", withheld=mask)
    for trace in rollouts:
        held = np.arange(len(trace.push)) == 1
        assert (trace.push[~held] != 0).all()
        assert (trace.push[held] == 0).all() == (trace.advantage > 0)


def test_what_is_not_scored_has_no_trace() -> None:
    silent = met("me", [1, 1, 1], 5)
    rollouts, _ = traced([silent, *crew("a")])
    assert {one.position for one in rollouts} == {1}


def test_a_rollout_of_another_vocabulary_is_traced_by_its_own_number_and_by_spans() -> None:
    policy = tiny_policy()
    sent = [UNREAD, *foreign_rollouts(), TEXT_ONLY, NOT_CUT]
    foreign = read(policy, replace(foreign_group(policy).group, rollouts=tuple(sent)), SENDER, 5)
    rollouts, _ = traced([foreign, own_group()])
    theirs = [one for one in rollouts if one.sender == "other"]
    assert [one.number for one in theirs] == [1, 2, 3, 4]  # not UNREAD, TEXT_ONLY, NOT_CUT
    # 127|349|end, 129|end, 4+|8|5, 8|12, digit by digit
    assert [one.spans for one in theirs] == [(0, 3, 6), (0, 3), (0, 2, 3), (0, 1)]
    for trace in theirs:
        assert trace.tokens is not None
        assert len(trace.tokens) == len(trace.log_ratio) == len(trace.push)
        logp_T = reference_logp(policy, policy.prompts.ids(foreign.problem), trace.tokens).detach()
        assert trace.spans is not None
        starts = [*trace.spans, len(trace.tokens)]
        for first, end in pairwise(starts):
            assert np.ptp(trace.log_ratio[first:end]) == 0
        if trace.number == 2:  # 129 of two tokens of the sender's, then its end
            q = np.array(sent[2].logprobs)
            log_ratio = [float(logp_T[:3].sum()) - q[:2].sum(), float(logp_T[3]) - q[2]]
            np.testing.assert_allclose(trace.log_ratio[[0, 3]], log_ratio, atol=1e-5)
    assert all(one.tokens is one.spans is None for one in rollouts if one.sender == "me")


def test_of_several_steps_the_trace_is_that_of_the_look_before_the_first() -> None:
    candidates = crew("me", "a", "b")
    once, _ = traced(candidates)
    often, _ = traced(candidates, rules=Learning(grad_clip=1e9, epochs=2, groups_per_step=2))
    for first, look in zip(once, often, strict=True):
        for name in ("log_ratio", "weight", "free", "entropy", "push"):
            np.testing.assert_allclose(getattr(look, name), getattr(first, name), atol=1e-6)


# Files


def a_rollout(length: int = 3, position: int = 4, **values: Any) -> RolloutTrace:
    rng = np.random.default_rng(position)
    random = lambda: rng.normal(size=length).astype(np.float32)
    plain: dict[str, Any] = {
        "number": 1, "sender": "deep", "advantage": -0.7, "kept": True, "filter_kl": 0.25,
        "tokens": None, "spans": None, "log_ratio": random(), "weight": random(),
        "free": random(), "entropy": random(), "push": random() * 1e-7,
    }  # fmt: skip
    return RolloutTrace(position=position, **plain | values)


def a_trace(round: int, peer: str = "a", *rollouts: RolloutTrace) -> StepTrace:
    return StepTrace(round=round, peer=peer, version=round, rollouts=rollouts or (a_rollout(),))


def trace_files(run: Path, most_bytes: int = 2**20) -> TraceFiles:
    return TraceFiles(run / "groups" / "traces", most_bytes)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = a_trace(
        7,
        "a",
        a_rollout(4, 1, scale=0.5, is_lesson=True, kept=False),
        a_rollout(1, 2),
        a_rollout(3, 3, tokens=(5, 6, 1), spans=(0, 2)),
    )
    trace_files(tmp_path).write(written)
    got = read_trace(tmp_path, "a", 7)
    assert got is not None
    assert (got.round, got.peer, got.version, len(got.rollouts)) == (7, "a", 7, 3)
    columns = ("log_ratio", "weight", "free", "entropy", "push")
    for one, other in zip(got.rollouts, written.rollouts, strict=True):
        for name in RolloutTrace.__struct_fields__:
            if name not in columns:
                assert getattr(one, name) == getattr(other, name)
        for name in columns:
            value, expected = getattr(one, name), getattr(other, name)
            assert value.dtype == np.float32
            np.testing.assert_allclose(value, expected, rtol=0 if name == "push" else 6e-4)


def test_what_float16_does_not_hold_is_the_nearest_that_it_does(tmp_path: Path) -> None:
    value = np.array([1e30, -1e30, math.inf, 1e-30, -1e-30, 0.0, math.nan], np.float32)
    rollout = a_rollout(7, free=value, push=value)
    trace_files(tmp_path).write(a_trace(1, "a", rollout))
    got = read_trace(tmp_path, "a", 1)
    assert got is not None
    (one,) = got.rollouts
    largest, smallest = 65504, 2.0**-24
    expected = [largest, -largest, largest, smallest, -smallest, 0, math.nan]
    np.testing.assert_array_equal(one.free, np.array(expected, np.float32))
    np.testing.assert_array_equal(one.push, value)


def test_a_file_that_is_torn_spoilt_or_anothers_reads_as_none(tmp_path: Path) -> None:
    trace_files(tmp_path).write(a_trace(1, "a", a_rollout(300)))
    path = tmp_path / "groups" / "traces" / "a" / "000001.zst"
    whole = path.read_bytes()
    assert read_trace(tmp_path, "a", 1) is not None
    spoilt = [whole[:size] for size in (0, 1, 4, 11, len(whole) // 2, len(whole) - 1)]
    spoilt += [
        whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :]
        for place in range(0, len(whole), 37)
    ]
    for content in (*spoilt, b"no frame"):
        path.write_bytes(content)
        assert read_trace(tmp_path, "a", 1) is None
    path.with_name("000002.zst").write_bytes(whole)
    assert read_trace(tmp_path, "a", 2) is None  # it says that it is of round 1
    assert read_trace(tmp_path, "a", 3) is None


def test_a_file_that_would_not_fit_in_memory_is_not_decompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_files(tmp_path).write(a_trace(1))
    monkeypatch.setattr(traces, "MOST_BYTES", 100)
    assert read_trace(tmp_path, "a", 1) is None


def test_only_names_of_peers_are_looked_for(tmp_path: Path) -> None:
    trace_files(tmp_path).write(a_trace(1))
    assert traced_rounds(tmp_path, "a") == [1]
    for name in ("../traces/a", "a/../a", ".", "", "a/", str(tmp_path)):
        assert traced_rounds(tmp_path, name) == []
        assert read_trace(tmp_path, name, 1) is None


def test_a_peer_of_several_processes_has_its_traces_in_its_own_folder(tmp_path: Path) -> None:
    trace_files(tmp_path / "peers" / "a").write(a_trace(3))
    trace_files(tmp_path).write(a_trace(2, "b"))
    assert (traced_rounds(tmp_path, "a"), traced_rounds(tmp_path, "b")) == ([3], [2])
    assert read_trace(tmp_path, "a", 3) is not None


def test_steps_after_a_checkpoint_are_taken_back_of_one_peer_only(tmp_path: Path) -> None:
    before = trace_files(tmp_path)
    for round in range(1, 6):
        before.write(a_trace(round))
        before.write(a_trace(round, "b"))
    after = trace_files(tmp_path)  # the run goes on in another process
    after.cut("a", 3)
    assert traced_rounds(tmp_path, "a") == [1, 2, 3]
    assert traced_rounds(tmp_path, "b") == [1, 2, 3, 4, 5]
    after.write(a_trace(4))
    assert traced_rounds(tmp_path, "a") == [1, 2, 3, 4]


# Bounds


def size_of(run: Path, peer: str = "a") -> int:
    return sum(path.stat().st_size for path in (run / "groups" / "traces" / peer).iterdir())


@pytest.mark.slow
def test_files_stay_below_the_bound_and_spread_over_the_run(tmp_path: Path) -> None:
    trace_files(tmp_path).write(a_trace(1))
    bound = 50 * size_of(tmp_path) + 100
    for round in range(1, 1001):
        if round % 300 == 1:  # and where a run goes on
            files = trace_files(tmp_path, bound)
        files.write(a_trace(round))
        if round % 50 == 0:
            assert size_of(tmp_path) <= bound
    kept = traced_rounds(tmp_path, "a")
    assert 45 <= len(kept) <= 50
    assert kept[-20:] == [*range(981, 1001)]
    older = kept[:-20]
    # every 64th of the oldest, every 32nd of the others
    assert all(round % 32 == 0 for round in older)
    assert max(np.diff([0, *older, 981])) <= 64


def test_the_number_of_files_is_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "MOST_FILES", 30)
    files = trace_files(tmp_path)
    for round in range(1, 101):
        files.write(a_trace(round))
    assert len(traced_rounds(tmp_path, "a")) == 30
    assert traced_rounds(tmp_path, "a")[-20:] == [*range(81, 101)]


def test_a_step_larger_than_the_bound_is_not_written_and_drops_nothing(tmp_path: Path) -> None:
    large = a_trace(3, "a", a_rollout(200))
    trace_files(tmp_path / "other").write(large)
    bound = size_of(tmp_path / "other")
    files = trace_files(tmp_path, bound)
    files.write(a_trace(1))
    files.write(a_trace(2, "a", a_rollout(201)))
    assert traced_rounds(tmp_path, "a") == [1]
    files.write(large)  # alone
    assert (traced_rounds(tmp_path, "a"), size_of(tmp_path)) == ([3], bound)


def test_a_bound_that_was_lowered_holds_from_the_next_step_on(tmp_path: Path) -> None:
    files = trace_files(tmp_path)
    for round in range(1, 41):
        files.write(a_trace(round))
    bound = size_of(tmp_path) // 8
    trace_files(tmp_path, bound).write(a_trace(41))
    assert size_of(tmp_path) <= bound
    assert traced_rounds(tmp_path, "a") == [*range(37, 42)]


def test_without_room_or_rollouts_nothing_is_written(tmp_path: Path) -> None:
    trace_files(tmp_path, 0).write(a_trace(1))
    trace_files(tmp_path).write(StepTrace(round=1, peer="a", version=1, rollouts=()))
    assert not (tmp_path / "groups").exists()


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="traces=-1 must not be negative; give MiB a peer, or 0"):
        Evaluate(traces=-1)


def test_traces_are_read_without_torch() -> None:
    code = "import sys, motley.learning.traces\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Runs


def trained_crew(task: Path, folder: Path, traces: int = 64, stop_after: int = 0) -> Path:
    """Four rounds of two peers, of which the last two are done again after a stop."""
    config = spread_crew(task, rounds=4, learning="checkpoint_every = 2")
    config = replace(config, evaluate=replace(config.evaluate, traces=traces))
    for lines in LocalCrew.start(config, folder).rounds():
        if lines[0].round == stop_after:
            break
    if stop_after:
        for _ in LocalCrew.resume(folder).rounds():
            pass
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def run(task: Path) -> Path:
    return trained_crew(task, task / "run")


@pytest.mark.slow
def test_the_traces_of_a_crew_agree_with_its_fates(run: Path) -> None:
    fates = [*read_fates(run / "groups" / "fates.jsonl")]
    assert len(fates) == 8
    for told in fates:
        trace = read_trace(run, told.peer, told.round)
        assert trace is not None
        assert trace.version == told.round
        letters = {
            (position, number): letter
            for position, group in told.groups.items()
            for number, letter in enumerate(group)
        }
        spoke = {place: letter for place, letter in letters.items() if letter != "s"}
        assert {(one.position, one.number) for one in trace.rollouts} == spoke.keys()
        assert {one.sender for one in trace.rollouts} == {"full0", "full1"}
        for one in trace.rollouts:
            assert one.kept == (spoke[one.position, one.number] != "f")
            assert one.advantage != 0
            assert np.isfinite(np.concatenate([one.log_ratio, one.entropy, one.push])).all()
            assert bool(one.push.any()) == one.kept


@pytest.mark.slow
def test_a_resumed_run_has_the_traces_of_one_that_was_not_stopped(run: Path, task: Path) -> None:
    stopped = trained_crew(task, task / "stopped", stop_after=3)
    traces = content_of(stopped / "groups" / "traces")
    assert traces == content_of(run / "groups" / "traces")
    assert len(traces) == 8


@pytest.mark.slow
def test_nothing_else_of_a_run_depends_on_its_traces(run: Path, task: Path) -> None:
    bare = trained_crew(task, task / "bare", traces=0)
    assert not (bare / "groups" / "traces").exists()
    fates = "groups/fates.jsonl"
    assert (bare / fates).read_bytes() == (run / fates).read_bytes()
    weights = [content_of(folder / "checkpoints") for folder in (run, bare)]
    models = [
        {name: content for name, content in each.items() if name.endswith("safetensors")}
        for each in weights
    ]
    assert models[0] == models[1] != {}


@pytest.mark.slow
def test_steps_that_are_taken_again_are_traced_again(run: Path, tmp_path: Path) -> None:
    with open_log(run) as archive:
        log, hub = KeptLog(archive.entries()), archive.hub
    for after in (0, 2):
        out = tmp_path / f"after-{after}"
        Replay(run, log, hub, ["full1"], after, out).run()
        same = [
            content_of(out / "groups" / "traces").get(name) == content
            for name, content in content_of(run / "groups" / "traces").items()
            if name.startswith("full0")
        ]
        assert same == [round <= after for round in (1, 2, 3, 4)]
        trace = read_trace(out, "full0", 4)
        assert trace is not None
        assert {one.sender for one in trace.rollouts} == {"full0"}
