"""Gradients at a checkpoint: fresh problems, answered by every peer, and what each row's step makes
of the answers.

Owns the sampling, the steps and how a large gradient is made small; `estimators.py` has what is
computed of them. The run's folder is only read.

A gradient is what a real step leaves behind at a learning rate of 0, not clipped, nothing withheld.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motley.clock import RealClock
from motley.config import CrewConfig, PeerConfig, Trust, read_config
from motley.engines import torch_engine
from motley.learning.learner import Learner
from motley.learning.readings import Reading
from motley.learning.select import Candidate
from motley.learning.senders import SenderMetrics
from motley.learning.success import Skills, Success
from motley.learning.translating import ForeignGroup, Translator
from motley.models.policy import Policy
from motley.objectives import Objective, objective
from motley.objectives.advantages import LeaveOneOut
from motley.objectives.reductions import SequenceSum
from motley.objectives.surrogates import Reinforce
from motley.peers.sampling import Asked, SamplerHalf
from motley.records import Group, Problem
from motley.runs.building import policies_after
from motley.runs.local import one_process_outbox
from motley.spelling import Tokenwise
from motley.study.arms import parse_arms
from motley.study.estimators import (
    EstimatorLine,
    Vectors,
    compare,
    keep_estimators,
    read_estimators,
)
from motley.study.plans import FEWEST_BATCHES, EstimatorPlan
from motley.tasks import Task, draw_problems, load_task

# The gradient of the expected reward, without bias: the baseline of a sequence is made of others.
REFERENCE = Objective(advantage=LeaveOneOut(), surrogate=Reinforce(), reduction=SequenceSum())
USUAL_ROWS = "nois grpo tis ftis gepo uplift"
MOST_EXACT = 2**21  # values of a gradient that is kept whole
PROJECTED = 65521  # a prime: no width of a matrix divides it, so that columns do not pile up
CHUNK = 256 * PROJECTED  # values that get their signs at once

Sample = tuple[Group, Problem]
SampledBatches = list[list[Sample]]
Batches = list[list[Candidate]]
Vector = NDArray[np.float32]  # a gradient
Progress = Callable[[str, int, int], None]  # (what, steps done, steps in all)


@dataclass(frozen=True, slots=True)
class ProbeSize:
    """How much is sampled: so many batches of so many groups, by every peer."""

    batches: int = 32
    groups: int = 0  # 0: as many as a step of the crew has

    def __post_init__(self) -> None:
        if self.batches < FEWEST_BATCHES:
            raise ValueError(
                f"batches={self.batches} say nothing of their own error; use at least "
                f"{FEWEST_BATCHES}, 32 is usual"
            )


def rows_of(text: str) -> dict[str, Objective]:
    """Rows as arms are written, such as "tis:C=4 uplift/relative"; by their labels."""
    rows = {}
    for arm in parse_arms(text):
        row = objective(arm.objective, arm.variant, arm.settings)
        if arm.changes:
            raise ValueError(
                f"row {arm.label!r} sets {arm.changes[0]}; a gradient has settings of the "
                "objective only, such as tis:C=4"
            )
        if row.penalty.needs_reference:
            raise ValueError(
                f"row {arm.label!r} pulls toward the policy it began with, which is no estimate "
                "of the reward's gradient; leave it out, or set beta=0"
            )
        rows[arm.label] = row
    return rows


def measure(
    folder: Path,
    round: int,
    rows: dict[str, Objective],
    size: ProbeSize = ProbeSize(),
    progress: Progress = lambda what, done, total: None,
) -> list[EstimatorLine]:
    """Every row on every sender's samples, for every receiver of a run."""
    config = _vertical(read_config(folder / "config.toml"))
    task = load_task(config.crew.task, config.task)
    policies = policies_after(folder, round)
    size = ProbeSize(size.batches, size.groups or config.crew.problems_per_round)
    problems = [
        draw_problems(task, f"estimators/{config.crew.seed}/{number}", "train", size.groups)
        for number in range(size.batches)
    ]
    sampled = {}
    for number, (name, policy) in enumerate(policies.items()):
        progress(f"sampling by {name}", number, len(policies))
        sampled[name] = _sampled(config, config.named(name), task, policy, problems)
    total = size.batches * len(policies) * (1 + len(rows) * len(policies))
    done, lines = 0, []
    for name, policy in policies.items():
        probe = Probe(config, round, name, policy, _received(sampled, policies, name))

        def step(what: str) -> None:
            nonlocal done
            done += 1
            progress(what, done, total)

        lines += probe.lines(rows, step)
    return lines


def measure_if_due(folder: Path, asked: EstimatorPlan, round: int) -> None:
    """Measure a run on its way, just saved after a round; once, if it was stopped there before."""
    config = read_config(folder / "config.toml")
    known = {line.round for line in read_estimators(folder)}
    due = asked.due(config.crew.rounds, config.learning.checkpoint_every)
    if round not in due or round in known or len(config.students) < 2:
        return
    size = ProbeSize(asked.batches, asked.groups)
    keep_estimators(folder, measure(folder, round, rows_of(asked.rows), size))


def _vertical(config: CrewConfig) -> CrewConfig:
    """Groups are whole and of one sender, however the crew makes them."""
    crew = msgspec.structs.replace(config.crew, layout="vertical")
    authors = len(config.authors)
    fitting = math.ceil(crew.problems_per_round / authors) * authors
    crew = msgspec.structs.replace(crew, problems_per_round=fitting)
    return msgspec.structs.replace(config, crew=crew)


def _sampled(
    config: CrewConfig,
    me: PeerConfig,
    task: Task,
    policy: Policy,
    problems: Sequence[Sequence[Problem]],
) -> SampledBatches:
    """A peer's answers to the problems of every batch."""
    outbox, weather = one_process_outbox(config, me.name), config.weather(me.name)
    half = SamplerHalf(config, me, task, policy, torch_engine(policy), outbox, RealClock(), weather)
    batches = []
    for number, some in enumerate(problems):
        # a round that no run has, so that nothing is drawn with the seeds of its samples
        place = config.crew.rounds + 1 + number
        prompts = [policy.prompts.ids(problem) for problem in some]
        asked = Asked(place, list(some), prompts, policy.version)
        groups = half.drawn(half.answered(asked)).groups
        batches.append(list(zip(groups, some, strict=True)))
    return batches


def _received(
    sampled: dict[str, SampledBatches], policies: dict[str, Policy], receiver: str
) -> dict[str, Batches]:
    """By sender, as a receiver learns from it; its own are no stranger's."""
    return {
        name: _candidates(batches, policies[name], policies[receiver], name == receiver)
        for name, batches in sampled.items()
    }


def _candidates(sampled: SampledBatches, sender: Policy, receiver: Policy, own: bool) -> Batches:
    read = _reading_of(sender, receiver, sampled[0][0][0].origin.sampling.max_tokens)
    return [
        [
            Candidate(
                group=group,
                problem=problem,
                own=own,
                stranger=not own,
                family=group.id,
                since=receiver.version,
                position=number * len(batch) + slot,
                reading=reading,
            )
            for slot, (problem, (group, reading)) in enumerate(
                zip([p for _, p in batch], read(batch), strict=True)
            )
        ]
        for number, batch in enumerate(sampled)
    ]


def _reading_of(
    sender: Policy, receiver: Policy, max_tokens: int
) -> Callable[[list[Sample]], list[tuple[Group, Reading | Tokenwise]]]:
    """How a receiver reads groups: as they are, or in its own tokens."""
    if sender.vocabulary.fingerprint == receiver.vocabulary.fingerprint:
        return lambda batch: [(group, Tokenwise()) for group, _ in batch]
    translator = Translator(receiver.prompts, max_tokens, receiver.max_positions)
    spelling = sender.vocabulary.spelling
    return lambda batch: [
        (made.group, made.reading)
        for made in translator.translate_all([ForeignGroup(*one, spelling) for one in batch])
    ]


@dataclass(slots=True)
class Probe:
    """A receiver at a checkpoint, and everybody's samples."""

    config: CrewConfig
    round: int
    name: str
    policy: Policy
    senders: dict[str, Batches]
    token_budget: int = 0

    def lines(self, rows: dict[str, Objective], step: Callable[[str], None]) -> list[EstimatorLine]:
        own = self.senders[self.name]
        reference, _ = self.gradients("reference", self.learner(REFERENCE), own, step)
        lines = []
        for row, how in rows.items():
            learner = self.learner(how)
            on_own, heard = self.gradients(row, learner, own, step)
            lines.append(self._line(row, self.name, on_own, on_own, reference, heard))
            for sender in [name for name in self.senders if name != self.name]:
                vectors, heard = self.gradients(row, learner, self.senders[sender], step)
                lines.append(self._line(row, sender, vectors, on_own, reference, heard))
        return lines

    def _line(
        self,
        row: str,
        sender: str,
        vectors: Vectors,
        own: Vectors,
        reference: Vectors,
        heard: Sequence[SenderMetrics],
    ) -> EstimatorLine:
        compared = compare(vectors, own, reference)
        values = sum(p.numel() for _, p in self.policy.trained())
        return EstimatorLine(
            round=self.round,
            receiver=self.name,
            sender=sender,
            row=row,
            bias=_known(compared.bias.value),
            bias_error=_known(compared.bias.error),
            cosine=_known(compared.cosine.value),
            cosine_error=_known(compared.cosine.error),
            variance=_known(compared.variance),
            ess=_mean([one.number("ess") for one in heard]),
            weight=_mean([one.number("weight") for one in heard]),
            reference_error=_known(compared.reference_error),
            batches=len(vectors),
            groups=len(self.senders[sender][0]),
            values=values,
            projected=0 if values <= MOST_EXACT else PROJECTED,
        )

    def gradients(
        self, row: str, learner: Learner, batches: Batches, step: Callable[[str], None]
    ) -> tuple[Vectors, list[SenderMetrics]]:
        """A gradient per batch, and what the step said of its sender."""
        success, skills = self._success, self._skills
        parameters = [p for _, p in self.policy.trained()]
        vectors: list[Vector] = []
        heard: list[SenderMetrics] = []
        for batch in batches:
            # a batch is not to be judged by what another was
            learner.success.by_kind, learner.memory.by_kind = dict(success.by_kind), {}
            learner.skills.means = {peer: [*means] for peer, means in skills.means.items()}
            report = learner.step(batch)
            self.policy.version = self.round
            if report.blamed:
                raise FloatingPointError(
                    f"row {row} is no number on samples of {report.blamed[0]} for {self.name} "
                    f"at round {self.round}; leave the row out with --rows"
                )
            vectors.append(vector_of(parameters))
            heard += report.senders.values()
            step(f"{self.name}: {row}")
        self.token_budget = learner.token_budget
        return np.stack(vectors), heard

    def learner(self, row: Objective) -> Learner:
        """One whose steps change nothing."""
        rules = msgspec.structs.replace(
            self.config.learning,
            grad_clip=math.inf,
            weight_decay=0.0,
            epochs=1,
            groups_per_step=0,
            token_budget=self.token_budget or self.config.learning.token_budget,
        )
        return Learner(self.policy, row, rules, 0.0, Trust(grad_share=0.0))

    @property
    def _success(self) -> Success:
        success = Success(0.0)
        success.update([c for batch in self.senders[self.name] for c in batch])
        return success

    @property
    def _skills(self) -> Skills:
        skills = Skills()
        skills.update([c for batches in self.senders.values() for batch in batches for c in batch])
        return skills


def vector_of(parameters: Sequence[Tensor]) -> Vector:
    """The gradient that parameters hold, in one row; of large ones a projection.

    Value i is multiplied by a random sign and added to number i mod PROJECTED. Products of two
    such rows are, over signs, those of the gradients. The signs are always the same.
    """
    if sum(p.numel() for p in parameters) <= MOST_EXACT:
        return torch.cat([_gradient(p) for p in parameters]).cpu().numpy()
    total = torch.zeros(PROJECTED, device=parameters[0].device)
    place = 0
    for parameter in parameters:
        for part in _gradient(parameter).split(CHUNK):
            generator = torch.Generator(part.device).manual_seed(place)
            bits = torch.randint(
                0, 2, part.shape, generator=generator, device=part.device, dtype=torch.int8
            )
            signed = torch.where(bits == 1, part, -part)
            short = -len(signed) % PROJECTED
            folded = torch.nn.functional.pad(signed, (0, short)).view(-1, PROJECTED).sum(0)
            total += folded.roll(place % PROJECTED)
            place += len(part)
    return total.cpu().numpy()


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), device=parameter.device)
    return parameter.grad.detach().float().reshape(-1)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
