"""Teaching: what a peer learns beside its objective, from others' successes on problems that it
failed itself.

Puts together what was met (`learning/meetings.py`), what the sampler half continues
(`learning/prefixes.py`), and the log, from which groups are read again after a stop. Without
[teach] in the crew file it remembers nothing and says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from motley.config import Teach
from motley.exchange import Log
from motley.learning.fates import SILENT, with_rescue
from motley.learning.learner import MetReport, StepReport
from motley.learning.meetings import Lesson, Meetings, Met
from motley.learning.prefixes import PREFIXES, Continued, PrefixQueue, PrefixState, TriedPrefix
from motley.learning.select import Candidate
from motley.peers.sampling import SamplerHalf
from motley.peers.state import PeerState, Reader, remembered_again
from motley.trust import AdmittedGroups


@dataclass(slots=True)
class Teaching:
    reader: Reader
    meetings: Meetings
    unfit: int = 0  # successes of the last step that the model has no room to continue

    @property
    def half(self) -> SamplerHalf:
        return self.reader.half

    @property
    def _rules(self) -> Teach:
        return self.half.config.teach

    def is_due(self, round: int, admitted: AdmittedGroups) -> bool:
        """Whether own continuations of a round are still on their way to the log."""
        if self.half.prefixes is None:
            return False
        sampled = self.half.sampled_in(round)
        count = len(sampled.branches.places) if sampled and sampled.branches else 0
        return not admitted.has_branches(self.half.me.name, round, count)

    def meet(self, taken: Sequence[Candidate], version: int) -> Met:
        """Take in the groups of a step from this version, and give what it is to learn beside."""
        if not self._rules.is_on:
            return Met(0, 0, [])
        met = self.meetings.meet(taken, version)
        if self.half.prefixes:
            self._continue(self.half.prefixes, taken, met.lessons)
        return met if self._rules.rescue else replace(met, lessons=[])

    def _continue(
        self, prefixes: PrefixQueue, taken: Sequence[Candidate], lessons: Sequence[Lesson]
    ) -> None:
        prefixes.learned([self._outcome(c) for c in taken if c.group.branch])
        fits = [one for one in lessons if self._fits(one)]
        self.unfit = len(lessons) - len(fits)
        for lesson in fits:
            prefixes.add(_continued(lesson))

    def _outcome(self, candidate: Candidate) -> TriedPrefix:
        group, succeeded = candidate.group, len(self.meetings.successes_of(candidate))
        return TriedPrefix(
            group.problem, len(group.prefix), succeeded, len(group.rollouts) - succeeded
        )

    def _fits(self, lesson: Lesson) -> bool:
        """Whether the longest prefix leaves the engine its room for a whole answer, and is one
        itself: in another vocabulary a success may have more tokens than an answer may.
        """
        policy, prompt = self.half.policy, self.half.policy.prompts.ids(lesson.candidate.problem)
        most = self.half.config.sampling.max_tokens
        fits = len(prompt) + len(lesson.tokens) <= policy.max_positions - most
        return fits and len(lesson.tokens) <= most

    def learned(self, taken: Sequence[Candidate]) -> list[Candidate]:
        """What the objective learns from: of "alone" it is own groups, others teach beside it."""
        own_only = self._rules.is_on and self.half.config.crew.objective == "alone"
        return [c for c in taken if c.own or not own_only]

    def told(self, report: StepReport, met: Met, taken: Sequence[Candidate]) -> StepReport:
        """The report with what came of meetings."""
        if not self._rules.is_on:
            return report
        silent = {c.position: c.sent_letters(SILENT * len(c.group.rollouts)) for c in taken}
        fates = silent | report.fates
        for lesson in met.lessons:
            if lesson.sender not in report.blamed:
                number = lesson.candidate.sent_number(lesson.number)
                fates = with_rescue(fates, lesson.candidate.position, number)
        branched = [c.group for c in taken if c.group.branch]
        told = MetReport(
            problems=met.problems,
            failed=met.failed,
            rescued=len(met.lessons),
            rescued_tokens=sum(len(one.tokens) for one in met.lessons),
            branched=len(branched),
            branched_tokens=sum(len(r.tokens) for group in branched for r in group.rollouts),
            unfit=self.unfit,
        )
        return replace(report, met=told, fates=fates)

    def leave_out(self, senders: Collection[str]) -> None:
        """Learn nothing more from these."""
        self.meetings.leave_out(senders)

    def load_state(self, state: PeerState, log: Log) -> None:
        successes = state.meetings.successes
        self.meetings.load_state(state.meetings, remembered_again(successes, log, self.reader))
        if self.half.prefixes:
            self.half.prefixes.load_state(state.prefixes)

    @property
    def prefixes(self) -> PrefixState:
        return self.half.prefixes.state() if self.half.prefixes else PrefixState()


def _continued(lesson: Lesson) -> Continued:
    attempt, rollout = lesson.attempt, lesson.candidate.group.rollouts[lesson.number]
    tokens = rollout.tokens[:-1] if rollout.ending == "stop" else rollout.tokens
    return Continued(attempt.problem, attempt.round, attempt.slot, tokens, low=0, high=len(tokens))


def teaching_of(reader: Reader) -> Teaching:
    """That of the peer which reads so."""
    half = reader.half
    config, crew, teach = half.config, half.config.crew, half.config.teach
    # in lockstep both halves of a meeting are in one step
    window = config.learning.max_age if crew.pace == "async" else 0
    if config.num_branches:
        half.prefixes = PrefixQueue(PREFIXES[teach.branch], config.num_branches, crew.seed)
    return Teaching(reader, Meetings(config.num_met, teach.least_success, crew.seed, window))
