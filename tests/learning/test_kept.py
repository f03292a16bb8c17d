"""Own successes of earlier steps in a step: their gradient, and that nothing else of it changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fakes import candidate, group, reference_logp, rollout, tiny_policy
from motley.config import Learning, Teach, Trust
from motley.learning.inner import inner_parts
from motley.learning.learner import KeptReport, Learner, StepReport
from motley.learning.meetings import Lesson
from motley.learning.select import Candidate
from motley.learning.sequences import StepPlan, nothing_withheld
from motley.models.policy import Policy
from motley.objectives import OBJECTIVES, Objective, objective
from motley.records import Problem, Rollout

from .test_learner import weights
from .test_rescue import lesson_of, likelihood_step
from .test_senders_of_a_step import poisoned

KEEP = 16.0


def problem_of(slot: int) -> Problem:
    return Problem(kind="sort", prompt=f"sort {41 + slot}=", answer="14")


def of(peer: str, rewards: Sequence[float], slot: int, round: int = 9) -> Candidate:
    """Answers of three tokens each."""
    rollouts = [
        rollout([3 + (slot + number) % 24, 6, 1], reward, -0.7)
        for number, reward in enumerate(rewards)
    ]
    made = group(peer=peer, round=round, slot=slot, rollouts=rollouts, problem=problem_of(slot))
    return candidate(made, own=peer == "me", position=10 + slot, problem=problem_of(slot))


@cache
def as_it_stands() -> Policy:
    return tiny_policy()


def moved_by(one: Rollout, slot: int, drift: Sequence[float]) -> Rollout:
    """The same as sampled when its tokens were so much likelier, in nats, than they now are."""
    policy = as_it_stands()
    logp_T = reference_logp(policy, policy.prompts.ids(problem_of(slot)), one.tokens).tolist()
    logq = tuple(logp + more for logp, more in zip(logp_T, drift, strict=True))
    return msgspec.structs.replace(one, logprobs=logq)


def success(slot: int, drift: Sequence[float] = (0.5, -0.5, 0.01)) -> Candidate:
    """An own group of an earlier round with one success. As it stands, its first and its last token
    have become less likely.
    """
    made = of("me", [1.0, 0.0], slot, round=1)
    first = moved_by(made.group.rollouts[0], slot, drift)
    rollouts = (first, made.group.rollouts[1])
    return replace(made, group=msgspec.structs.replace(made.group, rollouts=rollouts))


def row_of(name: str = "uplift/kept", keep: float = KEEP) -> Objective:
    return objective(*name.split("/"), settings={"keep": keep, "held": "all"})


def a_learner(
    remembered: Sequence[Candidate],
    row: Objective | None = None,
    rules: Learning = Learning(grad_clip=1e9),
    trust: Trust = Trust(),
    teach: Teach = Teach(rescue=1.0),
    lr: float = 1.0,
) -> Learner:
    """One that is reminded of these in its next step, which is plain gradient descent."""
    policy = tiny_policy()
    learner = Learner(policy, row or row_of(), rules, lr, trust, teach)
    learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=lr)  # type: ignore[assignment]
    learner.memory.take_in(remembered)
    return learner


def stepped(
    taken: Sequence[Candidate],
    remembered: Sequence[Candidate] = (),
    name: str = "uplift/kept",
    lessons: Sequence[Lesson] = (),
    keep: float = KEEP,
    **how: Any,
) -> tuple[torch.Tensor, StepReport]:
    """How far a plain gradient step goes, by its learning rate, which a row may change."""
    hooks = {key: how.pop(key) for key in ("audited", "withheld") if key in how}
    learner = a_learner(remembered, row_of(name, keep), **how)
    before = trained(learner)
    report = learner.step(taken, lessons=lessons, **hooks)
    return (trained(learner) - before) / learner.optimiser.param_groups[0]["lr"], report


def trained(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for _, p in learner.policy.trained()])


def fallen_step(remembered: Sequence[Candidate]) -> torch.Tensor:
    """The gradient of the sum over successes of the mean over tokens of log p where p < q."""
    policy = tiny_policy()
    for one in remembered:
        first = one.group.rollouts[0]
        logp_T = reference_logp(policy, policy.prompts.ids(one.problem), first.tokens)
        fell_T = logp_T.detach() < torch.tensor(first.logprobs)
        assert 0 < int(fell_T.sum()) < len(fell_T), "a test of all or none would pass too easily"
        (fell_T * logp_T).mean().backward()
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for _, p in policy.trained()]
    )


@cache
def successes() -> list[Candidate]:
    return [success(20), success(21, (-0.5, 0.3, -0.02))]


@cache
def many() -> list[Candidate]:
    return [success(20 + slot) for slot in range(7)]


SILENT = [of("me", [0, 0, 0], 1), of("other", [0, 0, 0, 0], 2)]
SPEAKING = [of("me", [1, 0, 0], 1), of("other", [1, 0, 0.5, 0], 2)]


# The gradient


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("keep", [KEEP, 0.5])
@pytest.mark.parametrize("name", ["uplift/kept", "nois"])
def test_only_fallen_tokens_of_own_successes_are_pushed_also_where_all_else_is_silent(
    name: str, keep: float, budget: int
) -> None:
    rules = Learning(grad_clip=1e9, token_budget=budget)
    moved, report = stepped(SILENT, successes(), name, keep=keep, rules=rules)
    # three own and four foreign answers, and what is kept
    expected = keep * fallen_step(successes()) / 9
    assert torch.allclose(moved, expected, rtol=1e-4, atol=1e-6)
    assert moved.abs().max() > 1e-3
    assert (report.num_sequences, report.num_scored, report.num_tokens) == (9, 2, 6)


@pytest.mark.parametrize("name", [*sorted(OBJECTIVES), "uplift/kept"])
def test_what_is_kept_adds_the_same_to_the_step_of_every_row(name: str) -> None:
    """Up to the row's reduction; all else of the step is as it was but for the denominator."""
    kept, _ = stepped(SPEAKING, successes(), name)
    plain, before = stepped(SPEAKING, [], name)
    assert before.kept is None
    assert plain.abs().max() > 1e-5
    # without it there are two sequences less, of as many tokens as each of the others
    left = kept * 9 / 7 - plain
    scale = {"dr_grpo": 3 / 16, "topr": 3.0}.get(name, 1.0)
    expected = KEEP * fallen_step(successes()) * scale / 7
    assert torch.allclose(left, expected, rtol=1e-3, atol=1e-5)


def test_lessons_and_what_is_kept_stand_beside_each_other() -> None:
    """Each at its own weight, and by its own loss."""
    theirs = of("other", [1, 0], 0)
    lesson = lesson_of(theirs)
    moved, report = stepped(SILENT, successes(), lessons=[lesson], teach=Teach(rescue=0.5))
    expected = (0.5 * likelihood_step(lesson) + KEEP * fallen_step(successes())) / 10
    assert torch.allclose(moved, expected, rtol=1e-4, atol=1e-6)
    assert report.kept is not None
    assert (report.num_sequences, report.num_scored, report.kept.sequences) == (10, 3, 2)
    assert [(one.sender, one.is_lesson) for one in report.trace] == [("other", True)]


def test_what_has_not_fallen_moves_nothing() -> None:
    moved, report = stepped(SILENT, [success(20, (-0.1, -0.1, -0.1))])
    assert moved.abs().max() == 0
    assert report.kept == KeptReport(sequences=1, tokens=3, fallen=0.0)


# What is remembered, and when


def test_a_row_that_keeps_nothing_remembers_nothing() -> None:
    learner = a_learner([], objective("uplift", "both"))
    for _ in range(2):
        assert learner.step(SPEAKING).kept is None
    assert learner.memory.by_kind == {}
    moved, report = stepped(SPEAKING, successes(), "uplift/both", keep=0.0)
    plain, before = stepped(SPEAKING, [], "uplift/both", keep=0.0)
    assert torch.equal(moved, plain)
    assert report == before


def test_a_step_is_reminded_of_what_was_remembered_before_it() -> None:
    learner = a_learner([], rules=Learning(), lr=1e-3)
    first = learner.step(SPEAKING)
    assert first.kept is None
    (remembered,) = learner.memory.by_kind["sort"]
    assert remembered.candidate.group.id == "me.9.1"
    again = [of("me", [1, 1, 0], 3), of("other", [1, 0, 0.5, 0], 4)]
    second = learner.step(again)
    assert second.kept is not None
    assert (second.kept.sequences, second.num_sequences) == (1, 8)
    assert sorted(one.candidate.group.id for one in learner.memory.by_kind["sort"]) == [
        "me.9.1",
        "me.9.3",
        "me.9.3",
    ]


def test_the_first_step_is_that_of_the_row_that_keeps_nothing() -> None:
    kept, plain = stepped(SPEAKING), stepped(SPEAKING, name="uplift/both", keep=0.0)
    assert torch.equal(kept[0], plain[0])
    assert kept[1] == plain[1]


def test_a_step_without_foreign_rollouts_is_not_reminded() -> None:
    moved, report = stepped(SPEAKING[:1], successes())
    plain, _ = stepped(SPEAKING[:1])
    assert torch.equal(moved, plain)
    assert report.kept is None


def test_every_step_is_reminded_of_others() -> None:
    learner = a_learner([success(20 + slot) for slot in range(12)], rules=Learning(), lr=1e-3)
    plans = []
    made = learner._plan
    learner._plan = lambda *what, **how: plans.append(made(*what, **how)) or plans[-1]  # type: ignore[method-assign,func-returns-value]
    for _ in range(3):
        learner.step(SPEAKING[1:])
    drawn = [
        tuple(one.group.id for one in plan.batch.candidate_B[plan.batch.first_kept :])
        for plan in plans
    ]
    assert [len(some) for some in drawn] == [2, 2, 2]
    assert len({*drawn}) == 3


# What is said of it


def test_the_report_has_how_many_and_how_much_of_them_has_fallen() -> None:
    _, report = stepped(SPEAKING, successes())
    assert report.kept is not None
    assert (report.kept.sequences, report.kept.tokens) == (2, 6)
    assert report.kept.fallen == pytest.approx(3 / 6)


def test_what_is_kept_is_nobodys_answer() -> None:
    """Not in what is said of senders, fates, traces, ages and audits."""
    audited = frozenset(c.position for c in SPEAKING)
    _, kept = stepped(SPEAKING, successes(), audited=audited)
    _, plain = stepped(SPEAKING, audited=audited)
    for peer, before in plain.senders.items():
        after = kept.senders[peer]
        assert after.pull == pytest.approx(before.pull * 7 / 9, rel=1e-5)
        assert msgspec.structs.replace(after, pull=before.pull) == before
    assert kept.senders.keys() == plain.senders.keys() == {"me", "other"}
    assert kept.fates == plain.fates
    assert kept.ages == plain.ages
    assert kept.log_ratios.keys() == plain.log_ratios.keys() == audited
    assert len(kept.trace) == len(plain.trace) > 0
    for after, before in zip(kept.trace, plain.trace, strict=True):
        assert (after.position, after.number) == (before.position, before.number)
        np.testing.assert_allclose(after.push, before.push * 7 / 9, rtol=1e-4)


def test_of_silent_answers_no_pull_is_measured_though_something_is_kept() -> None:
    _, kept = stepped(SILENT, successes())
    _, plain = stepped(SILENT)
    assert kept.senders == plain.senders
    assert (kept.fates, kept.trace) == (plain.fates, ())


def test_who_has_no_answers_in_a_step_is_no_sender_of_it() -> None:
    _, report = stepped(SPEAKING[1:], successes())
    assert report.kept is not None
    assert report.kept.sequences == 2
    assert [*report.senders] == ["other"]


def test_what_is_kept_lets_no_stranger_pull_harder() -> None:
    """The bound on a stranger is by the own pull, of answers alone."""
    strangers = [of("loud", [1, 0, 0, 0], 2), of("loud", [0, 1, 0, 0], 4), of("quiet", [1, 0.9], 3)]
    how: dict[str, Any] = {"name": "dr_grpo", "trust": Trust(grad_share=1.0)}
    _, plain = stepped([SPEAKING[0], *strangers], **how)
    _, kept = stepped([SPEAKING[0], *strangers], successes(), **how)
    assert kept.kept is not None
    scales = [report.senders["loud"].grad_scale for report in (plain, kept)]
    assert scales[0] is not None
    assert scales[0] < 0.9
    assert scales[1] == pytest.approx(scales[0], rel=1e-5)


def test_a_bound_on_a_stranger_does_not_bound_what_is_kept() -> None:
    strangers = [of("loud", [1, 0, 0, 0], 2), of("loud", [0, 1, 0, 0], 4), of("quiet", [1, 0.9], 3)]
    how: dict[str, Any] = {"name": "dr_grpo", "trust": Trust(grad_share=1.0)}
    plain, _ = stepped(strangers, **how)
    kept, report = stepped(strangers, successes(), **how)
    assert float(report.senders["loud"].grad_scale or 1) < 0.9
    left = kept * 12 / 10 - plain
    expected = KEEP * fallen_step(successes()) * 3 / 16 / 10
    assert torch.allclose(left, expected, rtol=1e-3, atol=1e-5)


# Who is blamed


@pytest.mark.parametrize("own", [True, False])
def test_a_step_that_one_sender_makes_infinite_is_taken_without_it_and_with_what_is_kept(
    own: bool,
) -> None:
    honest = SPEAKING if own else SPEAKING[1:]
    bad = poisoned([of("x", [1.0, 0.0], 3)], "x")
    moved, report = stepped([*honest, *bad], successes())
    expected, plain = stepped(honest, successes())
    assert report.blamed == ("x",)
    assert report.kept == plain.kept
    assert torch.equal(moved, expected)


# Several steps of a round


def plan_of(learner: Learner, taken: Sequence[Candidate]) -> StepPlan:
    kept = learner.memory.reminders(taken, 0)
    return learner._plan(taken, nothing_withheld, kept=kept)


def round_of(num_foreign: int) -> list[Candidate]:
    own = [of("me", [1, 0, 0], slot) for slot in range(2)]
    return [*own, *(of("other", [1, 0, 0.5, 0], 2 + slot) for slot in range(num_foreign))]


@pytest.mark.parametrize(("num_foreign", "num_kept"), [(5, 7), (1, 2)])
@pytest.mark.parametrize("groups_per_step", [1, 2, 3])
def test_what_is_kept_is_in_one_step_of_an_epoch_and_makes_no_steps(
    groups_per_step: int, num_foreign: int, num_kept: int
) -> None:
    learner = a_learner(many())
    plan = plan_of(learner, round_of(num_foreign))
    kept = [*range(plan.batch.first_kept, len(plan.batch.sequences))]
    assert len(kept) == num_kept
    rules = Learning(epochs=2, groups_per_step=groups_per_step)
    parts = inner_parts(plan, rules, 0, 0)
    plain = inner_parts(plan_of(a_learner([]), round_of(num_foreign)), rules, 0, 0)
    assert [part.factor for part in parts] == [part.factor for part in plain]
    for part, before in zip(parts, plain, strict=True):
        rows = [s.row for s in part.todo]
        assert [row for row in rows if row not in kept] == [s.row for s in before.todo]
    half = len(parts) // 2
    for epoch in (parts[:half], parts[half:]):
        counts = [sum(s.row in kept for s in part.todo) for part in epoch]
        assert max(counts) - min(counts) <= 1
        rows = Counter(s.row for part in epoch for s in part.todo)
        assert {*rows.values()} == {1}
        assert rows.keys() == {s.row for s in plan.todo}


def test_the_gradients_of_the_parts_add_up_to_that_of_the_batch() -> None:
    learner = a_learner(many())
    gradient = lambda: torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
            for _, p in learner.policy.trained()
        ]
    )
    plan = plan_of(learner, round_of(5))
    learner._backward(plan)
    whole, total = gradient(), torch.zeros(())
    for part in inner_parts(plan, Learning(groups_per_step=3), 0, 0):
        share = torch.full((len(plan.batch.senders),), part.factor)
        learner._backward(replace(plan, todo=part.todo), share)
        total = total + gradient() / part.factor
    assert float(whole.norm()) > 1e-3
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-6)


def test_a_round_of_several_steps_learns_what_is_kept() -> None:
    rules = Learning(grad_clip=1e9, epochs=2, groups_per_step=1)
    kept, report = stepped(SPEAKING, successes(), rules=rules, lr=1e-2)
    plain, before = stepped(SPEAKING, rules=rules, lr=1e-2)
    assert report.inner is not None
    assert before.inner is not None
    assert report.inner.steps == before.inner.steps == 4
    assert report.kept == KeptReport(sequences=2, tokens=6, fallen=0.5)
    assert (kept - plain).abs().max() > 1e-2


def test_epochs_of_silent_answers_learn_what_is_kept_and_stop_where_it_has_risen_again() -> None:
    """In every step it is the present policy that decides what has fallen."""
    made = of("me", [1.0], 20, round=1)
    short = msgspec.structs.replace(made.group.rollouts[0], tokens=(9,), logprobs=(0.0,))
    short = moved_by(short, 20, [1e-4])
    remembered = replace(made, group=msgspec.structs.replace(made.group, rollouts=(short,)))
    once, _ = stepped(SILENT, [remembered], lr=1e-4)
    rules = Learning(grad_clip=1e9, epochs=3)
    thrice, report = stepped(SILENT, [remembered], lr=1e-4, rules=rules)
    assert report.inner is not None
    assert report.inner.steps == 3
    assert once.abs().max() > 1e-3
    assert torch.allclose(thrice, once, rtol=1e-4, atol=1e-6)
    far = replace(
        remembered,
        group=msgspec.structs.replace(made.group, rollouts=(moved_by(short, 20, [5.0]),)),
    )
    assert torch.allclose(stepped(SILENT, [far], lr=1e-4)[0], once, rtol=1e-4, atol=1e-6)
    assert stepped(SILENT, [far], lr=1e-4, rules=rules)[0].norm() > 2 * once.norm()


def test_a_round_that_is_reminded_is_the_same_every_time() -> None:
    made: list[tuple[StepReport, torch.Tensor]] = []
    for _ in range(2):
        learner = a_learner(many(), rules=Learning(groups_per_step=2), lr=1e-2)
        made.append((learner.step(round_of(2)), weights(learner.policy)))
    assert made[0][0] == made[1][0]
    assert torch.equal(made[0][1], made[1][1])
