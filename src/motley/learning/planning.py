"""Planner: from the groups and lessons of a step to what is scored, and with which terms.

Knows the objective and the prompts; knows no model and no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from motley.learning.meetings import Lesson
from motley.learning.memory import OwnSuccess
from motley.learning.select import Candidate
from motley.learning.sequences import (
    SkillOf,
    StepPlan,
    SuccessOf,
    Withheld,
    step_batch,
    step_plan,
)
from motley.models.prompts import Prompts
from motley.objectives import Objective, Terms


@dataclass(frozen=True, slots=True)
class Planner:
    objective: Objective
    prompts: Prompts
    success: SuccessOf
    skills: SkillOf
    rescue: float  # the weight of a lesson

    def plan(
        self,
        candidates: Sequence[Candidate],
        withheld: Withheld,
        audited: frozenset[int] = frozenset(),
        lessons: Sequence[Lesson] = (),
        kept: Sequence[OwnSuccess] = (),
    ) -> StepPlan:
        batch = step_batch(candidates, self.prompts, self.success, self.skills, lessons, kept)
        taken = batch.samples.first(batch.first_lesson)
        terms = self.objective.prepare(taken) if candidates else Terms.of_nothing(taken)
        silent_B = self.objective.silent(terms).tolist() if candidates else []
        terms = terms.with_lessons(batch.samples.first(batch.first_kept), self.rescue)
        terms = terms.with_lessons(batch.samples, self.objective.keeping.keep)
        return step_plan(batch, terms, silent_B, withheld, audited)
