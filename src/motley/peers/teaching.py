"""Teaching: what a peer learns beside its objective, from others' successes on problems that it
failed itself.

Puts together what was met (`learning/meetings.py`) and the log, from which groups are read again
after a stop. Without [teach] in the crew file it remembers nothing and says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from motley.exchange import Log
from motley.learning.fates import SILENT, with_rescue
from motley.learning.learner import MetReport, StepReport
from motley.learning.meetings import Meetings, MeetingsState, Met
from motley.learning.select import Candidate
from motley.peers.sampling import SamplerHalf
from motley.peers.state import Arrival, waiting_again


@dataclass(slots=True)
class Teaching:
    half: SamplerHalf
    meetings: Meetings

    @property
    def _is_on(self) -> bool:
        return self.half.config.teach.is_on

    def meet(self, taken: Sequence[Candidate], version: int) -> Met:
        """Take in the groups of a step from this version."""
        return self.meetings.meet(taken, version) if self._is_on else Met(0, 0, [])

    def learned(self, taken: Sequence[Candidate]) -> list[Candidate]:
        """What the objective learns from: of "alone" it is own groups, others teach beside it."""
        own_only = self._is_on and self.half.config.crew.objective == "alone"
        return [c for c in taken if c.own or not own_only]

    def told(self, report: StepReport, met: Met, taken: Sequence[Candidate]) -> StepReport:
        """The report with what came of meetings."""
        if not self._is_on:
            return report
        fates = {c.position: SILENT * len(c.group.rollouts) for c in taken} | report.fates
        for lesson in met.lessons:
            if lesson.sender not in report.blamed:
                fates = with_rescue(fates, lesson.candidate.position, lesson.number)
        told = MetReport(
            problems=met.problems,
            failed=met.failed,
            rescued=len(met.lessons),
            rescued_tokens=sum(len(one.tokens) for one in met.lessons),
        )
        return replace(report, met=told, fates=fates)

    def leave_out(self, senders: Collection[str]) -> None:
        """Learn nothing more from these."""
        self.meetings.leave_out(senders)

    def load_state(self, state: MeetingsState, log: Log) -> None:
        arrivals = [Arrival(s.position, s.since, s.came_s) for s in state.successes]
        by_position = {c.position: c for c in waiting_again(arrivals, log, self.half)}
        self.meetings.load_state(state, [by_position[s.position] for s in state.successes])


def teaching_of(half: SamplerHalf) -> Teaching:
    """That of the peer which samples with this half."""
    crew, learning, teach = half.config.crew, half.config.learning, half.config.teach
    # in lockstep both halves of a meeting are in one step
    window = learning.max_age if crew.pace == "async" else 0
    return Teaching(half, Meetings(half.config.num_met, teach.least_success, crew.seed, window))
