"""A step from own groups by tokens and from groups of another vocabulary by spans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed

import numpy as np
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from fakes import PROBLEM, candidate, group, reference_logp, rollout, tiny_policy
from motley.config import Learning, Teach
from motley.learning.learner import Learner
from motley.learning.meetings import Meetings
from motley.learning.readings import BySpans, Reading
from motley.learning.select import Candidate
from motley.learning.translating import Translation, Translator
from motley.models.policy import Policy
from motley.objectives import OBJECTIVES, objective
from motley.records import Group, Rollout
from motley.spelling import Spelling

from .test_learner import step, weights
from .test_translating import SENDER, sent


def read(policy: Policy, made: Group, spelling: Spelling, position: int) -> Candidate:
    told = Translator(policy.prompts, 16, policy.max_positions).translate(made, PROBLEM, spelling)
    assert isinstance(told, Translation)
    return changed(candidate(told.group, position=position), reading=told.reading)


def own_group(position: int = 9) -> Candidate:
    rollouts = [
        rollout((11, 12, 1), 1.0, -0.9),
        rollout((12, 1), 0.0, -1.2),
        rollout((13, 14, 15, 1), 0.5, -0.7),
    ]
    made = group(peer="me", slot=1, rollouts=rollouts)
    return candidate(made, own=True, position=position)


def foreign_rollouts() -> list[Rollout]:
    return [
        sent(b"12", b"7", b"34", b"9", reward=1.0, seed=1),
        sent(b"12", b"9", reward=0.0, seed=2),
        sent(b"4+", b"8", b"5", reward=0.5, ending="length", seed=3),
        sent(b"8", b"12", reward=0.0, ending="length", seed=4),
    ]


def foreign_group(policy: Policy, *more: Rollout, position: int = 5) -> Candidate:
    rollouts = [*foreign_rollouts(), *more]
    return read(policy, group(peer="other", rollouts=rollouts), SENDER, position)


TEXT_ONLY = sent(b"1", b"2", reward=1.0, canonical=False)
NOT_CUT = sent(b"1!", reward=1.0)
UNREAD = sent(b"9", len(SENDER) - 1, b"1", reward=1.0)


@pytest.mark.parametrize("name", ["ftis", "grpo", "gepo", "gmpo", "m2po", "uplift", "hacpo"])
def test_the_own_vocabulary_read_as_anothers_changes_nothing(name: str) -> None:
    """Of digits every token is a span by itself, so that all is as if nothing was read."""
    policy = tiny_policy()
    made = group(
        peer="other",
        rollouts=[
            rollout((11, 12, 1), 1.0, -0.9),
            rollout((12, 1), 0.0, -1.2),
            rollout((13, 14, 15, 1), 0.5, -0.7),
        ],
    )
    again = read(policy, made, policy.vocabulary.spelling, 5)
    assert again.group == made
    plain, report = step(objective(name), [candidate(made, position=5), own_group()])
    spans, by_spans = step(objective(name), [again, own_group()])
    assert torch.equal(plain, spans)
    metrics = replace(
        by_spans.senders["other"], span_bytes=UNSET, span_tokens=UNSET, text_only=UNSET, uncut=UNSET
    )
    assert metrics == report.senders["other"]
    assert by_spans.senders["me"] == report.senders["me"]


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_row_takes_a_step_from_another_vocabulary(name: str) -> None:
    policy = tiny_policy()
    before = weights(policy).clone()
    foreign = foreign_group(policy, TEXT_ONLY, NOT_CUT, UNREAD)
    after, report = step(objective(name), [foreign, own_group()], policy)
    assert bool(after.isfinite().all())
    assert (after - before).abs().max() > 0
    assert report.fates[5][4:] == "tux"
    assert set(report.fates[5][:4]) <= set("lsf")
    assert report.num_sequences == 9  # all but what cannot be read


@pytest.mark.parametrize("name", ["ftis", "gepo", "gmpo", "dppo", "m2po", "vcpo"])
def test_the_token_budget_does_not_change_where_a_step_leads(name: str) -> None:
    made: list[torch.Tensor] = []
    for budget in (0, 20):
        policy = tiny_policy()
        foreign = foreign_group(policy, TEXT_ONLY, NOT_CUT)
        after, _ = step(objective(name), [foreign, own_group()], policy, token_budget=budget)
        made.append(after)
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=1e-6)


def test_what_cannot_be_compared_is_not_scored_and_counts_in_its_groups_baseline() -> None:
    policy = tiny_policy()
    foreign = foreign_group(policy, TEXT_ONLY, NOT_CUT)
    learner = Learner(policy, objective("nois"), Learning(), lr=1e-3)
    plan = learner._planner.plan([foreign], lambda candidate, number: None)
    assert [s.row for s in plan.todo] == [0, 1, 2, 3]
    rewards = np.array([1.0, 0.0, 0.5, 0.0, 1.0, 1.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(plan.terms.advantage_B.numpy(), expected, rtol=1e-6)
    assert plan.terms.num_sequences == 6
    assert not any(s.tokens for s in plan.batch.sequences[5:])


def test_with_a_penalty_on_every_sequence_they_are_still_not_scored() -> None:
    policy = tiny_policy()
    foreign = foreign_group(policy, TEXT_ONLY, NOT_CUT)
    _, report = step(objective("gepo", settings={"beta": 0.1}), [foreign, own_group()], policy)
    assert report.num_scored == 4 + 3
    assert report.fates[5] == "lllltu"


def test_log_ratios_of_an_audited_group_are_those_of_its_spans() -> None:
    policy = tiny_policy()
    for rewards in (None, 1.0):  # learned from, and silent
        foreign = foreign_group(policy, TEXT_ONLY, NOT_CUT)
        if rewards is not None:
            same = tuple(replace(r, reward=rewards) for r in foreign.group.rollouts)
            foreign = changed(foreign, group=replace(foreign.group, rollouts=same))
        learner = Learner(tiny_policy(), objective("ftis"), Learning(), lr=1e-3)
        report = learner.step([foreign, own_group()], audited=frozenset({5}))
        prompt = policy.prompts.ids(PROBLEM)
        assert isinstance(foreign.reading, Reading)
        compared = [
            (number, its)
            for number, its in enumerate(foreign.reading.rollouts)
            if isinstance(its, BySpans)
        ]
        assert len(report.log_ratios[5]) == len(compared) == 4
        for got, (number, its) in zip(report.log_ratios[5], compared, strict=True):
            mine, theirs = foreign.group.rollouts[number], foreign_rollouts()[number]
            logp = reference_logp(policy, prompt, mine.tokens).detach().double().numpy()
            sums = its.spans.sums(logp) - _sent_sums(theirs, its)
            if its.spans.is_open:
                sums[-1] = min(0.0, sums[-1])
            np.testing.assert_allclose(got, sums, atol=1e-5)


def _sent_sums(theirs: Rollout, its: BySpans) -> np.ndarray:
    ends = np.cumsum(its.spans.num_sent_S)
    return np.add.reduceat(np.array(theirs.logprobs), ends - its.spans.num_sent_S)


def test_metrics_tell_how_a_sender_of_another_vocabulary_was_read() -> None:
    policy = tiny_policy()
    foreign = foreign_group(policy, TEXT_ONLY, NOT_CUT, UNREAD)
    _, report = step(objective("ftis"), [foreign, own_group()], policy)
    other, own = report.senders["other"], report.senders["me"]
    assert own.span_bytes is own.span_tokens is own.text_only is own.uncut is UNSET
    # 127|349|end, 129|end, 4+|8|5, 8|12: behind 5 and 12 tokens go on, so they never closed
    assert other.span_tokens == pytest.approx((7 + 4 + 4 + 3) / (3 + 2 + 3 + 2))
    assert other.span_bytes == pytest.approx((6 + 3 + 3 + 1) / (6 + 3 + 4 + 3))
    assert (other.text_only, other.uncut) == (pytest.approx(1 / 7), pytest.approx(2 / 7))
    # nats per token of the receiver's, of sums over spans
    ratios = [reference_ratio(r.tokens, r.logprobs) for r in foreign.group.rollouts[:4]]
    open_excess = max(0.0, ratios[2][-1]) + max(0.0, sum(ratios[3][1:]))
    expected = -(sum(map(sum, ratios)) - open_excess) / 18
    assert other.kl_k1 == pytest.approx(expected, rel=1e-4)


def reference_ratio(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> list[float]:
    policy = tiny_policy()
    logp = reference_logp(policy, policy.prompts.ids(PROBLEM), tokens)
    return (logp.detach().double().numpy() - np.array(logprobs)).tolist()


@pytest.mark.parametrize(
    ("success", "letters"), [(TEXT_ONLY, "ssssr"), (NOT_CUT, ""), (UNREAD, "")]
)
def test_a_lesson_is_of_what_has_tokens(success: Rollout, letters: str) -> None:
    policy = tiny_policy()
    failed = [replace(r, reward=0.0) for r in foreign_rollouts()]
    foreign = read(policy, group(peer="other", rollouts=[*failed, success]), SENDER, 5)
    own = group(peer="me", rollouts=[rollout(reward=0.0), rollout((12, 1), reward=0.0)])
    meetings = Meetings(num_met=1, least_success=1.0, seed=0)
    met = meetings.meet([foreign, candidate(own, own=True, position=9)], 0)
    assert bool(met.lessons) == bool(letters)
    if not met.lessons:
        return
    (lesson,) = met.lessons
    assert policy.vocabulary.spelling.bytes_of(lesson.tokens[:-1]) == b"12"
    learner = Learner(policy, objective("alone"), Learning(), 1e-3, teach=Teach(rescue=0.5))
    before = weights(policy).clone()
    report = learner.step([candidate(own, own=True, position=9)], lessons=met.lessons)
    assert report.num_scored == 1
    assert (weights(policy) - before).abs().max() > 0


def test_several_steps_of_a_round_keep_spans() -> None:
    def epochs(foreign: Callable[[Policy], Candidate]) -> torch.Tensor:
        policy = tiny_policy()
        learner = Learner(policy, objective("ftis"), Learning(epochs=2), lr=1e-3)
        learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=0.1)
        learner.step([foreign(policy), own_group()])
        return weights(policy)

    as_tokens = lambda policy: changed(foreign_group(policy), reading=own_group().reading)
    by_spans = epochs(foreign_group)
    assert bool(by_spans.isfinite().all())
    # what would be taken for single tokens leads elsewhere
    assert (by_spans - epochs(as_tokens)).abs().max() > 1e-6
