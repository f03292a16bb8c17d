"""GroupWriter: one group of a log with all that is known of it, as the page gets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from motley.archive import LoggedRollout, RolloutReader, Seen
from motley.archive.rollouts import NOT_RECORDED
from motley.dashboard.answers import GroupText, RolloutText, TokenTrace
from motley.dashboard.fate_index import FateIndex
from motley.dashboard.formulas import TokenFacts
from motley.dashboard.reasons import fault_words
from motley.dashboard.records import RecordName
from motley.dashboard.token_traces import TraceReader, numbers
from motley.learning.traces import RolloutTrace
from motley.records import Group, Rollout

MAX_TRACED = 50_000  # tokens of an answer, over all learners: about 2 MB

Neighbours = tuple[int | None, int | None]


@dataclass(slots=True)
class GroupWriter:
    """Of one answer."""

    reader: RolloutReader
    fates: FateIndex
    traces: TraceReader
    vocabulary_of: Callable[[str], str]  # of a peer, by name
    num_traced: int = 0
    left_out: set[str] = field(default_factory=set)

    def text(
        self, seen: Seen, named: RecordName, neighbours: Neighbours, learner: str = ""
    ) -> GroupText:
        """`learner`: the only one whose traces are wanted; nothing: those of all."""
        group = seen.group
        told = [*self.reader.of_group(seen, group)] if group else []
        steps = self._steps(seen.position, learner)
        rollouts = [self._rollout(seen, group, one, steps) for one in told] if group else []
        origin = group.origin if group else None
        first = told[0] if told else None
        return GroupText(
            position=seen.position,
            id=seen.id,
            round=named.round + 1,
            slot=named.slot,
            sender=seen.sender,
            model=origin.model if origin else "",
            version=origin.version if origin else -1,
            created_s=group.created_s if group else None,
            temperature=origin.sampling.temperature if origin else 0.0,
            kind=first.kind if first else None,
            prompt=first.prompt if first else None,
            answer=first.answer if first else None,
            fault=seen.fault,
            fault_words=fault_words(seen.fault),
            rollouts=rollouts,
            before=neighbours[0],
            after=neighbours[1],
            left_out=sorted(self.left_out),
        )

    def facts(self, seen: Seen, number: int, learner: str, token: int) -> TokenFacts:
        """What is known of one token of one rollout. ValueError: there is no such token."""
        group = seen.group
        told = [*self.reader.of_group(seen, group, with_text=False)] if group else []
        if group is None or not 0 <= number < len(told):
            raise ValueError(
                f"the group at position {seen.position} has {len(told)} rollouts, and no number "
                f"{number}; choose one from 0 on"
            )
        rollout = group.rollouts[number]
        steps = self._steps(seen.position, learner)
        round = steps[0][1] if steps else None
        trace = self.traces.of(learner, round, seen.position, number) if round else None
        is_own_cut = trace is not None and trace.tokens is not None
        length = len(trace.push) if trace else len(rollout.tokens)
        if not 0 <= token < length:
            raise ValueError(
                f"rollout {number} of the group at position {seen.position} has {length} tokens "
                f"for {learner}, and no number {token}; choose one from 0 on"
            )
        return TokenFacts(
            token=token,
            learner=learner,
            sender=seen.sender,
            fate=told[number].fates.get(learner, NOT_RECORDED),
            logprob=None if is_own_cut else rollout.logprobs[token],
            rewards=[one.reward for one in group.rollouts],
            reward=rollout.reward,
            round=round,
            trace=trace,
        )

    def _steps(self, position: int, learner: str = "") -> list[tuple[str, int]]:
        """Learner and round of every step that took the group."""
        asked = [name for name in sorted(self.fates.learners) if learner in ("", name)]
        steps = [(name, self.fates.step_of(name, position)) for name in asked]
        return [(name, step.round) for name, step in steps if step and position in step.groups]

    def _rollout(
        self, seen: Seen, group: Group, told: LoggedRollout, steps: Sequence[tuple[str, int]]
    ) -> RolloutText:
        rollout = group.rollouts[told.number]
        traces: list[TokenTrace] = []
        for learner, round in steps:
            trace = self.traces.of(learner, round, seen.position, told.number)
            if trace is None:
                continue
            self.num_traced += len(trace.push)
            if self.num_traced > MAX_TRACED and self.num_traced > len(trace.push):
                self.left_out.add(learner)
                continue
            fate = told.fates.get(learner, "")
            traces.append(self._trace(seen, rollout, trace, learner, round, fate))
        return RolloutText(
            number=told.number,
            reward=told.reward,
            ending=told.ending,
            canonical=rollout.canonical,
            completion=told.completion,
            tokens=self.reader.texts.token_texts(seen, rollout),
            logprobs=numbers(np.array(rollout.logprobs)),
            fates=told.fates,
            traces=traces,
        )

    def _trace(
        self,
        seen: Seen,
        rollout: Rollout,
        trace: RolloutTrace,
        learner: str,
        round: int,
        fate: str,
    ) -> TokenTrace:
        return TokenTrace(
            learner=learner,
            round=round,
            fate=fate,
            advantage=trace.advantage,
            kept=trace.kept,
            filter_kl=numbers(np.array([trace.filter_kl]))[0],
            tokens=self._tokens(seen, rollout, trace, learner),
            spans=None if trace.spans is None else list(trace.spans),
            log_ratio=numbers(trace.log_ratio),
            weight=numbers(trace.used_weight),
            free=numbers(trace.free),
            entropy=numbers(trace.entropy),
            push=numbers(trace.push),
        )

    def _tokens(self, seen: Seen, rollout: Rollout, trace: RolloutTrace, learner: str) -> list[str]:
        if trace.tokens is None:
            return self.reader.texts.token_texts(seen, rollout)
        return self.reader.texts.pieces(self.vocabulary_of(learner), trace.tokens)
