"""A run as one reads it in Python: how it went, how good its models are, and the models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from motley.api.given import as_path, as_written, check_names, well_called
from motley.api.tables import Curves, Row, Table
from motley.archive.rollouts import LoggedRollout, RolloutFilter, read_rollouts
from motley.config import read_config
from motley.engines import Engine, torch_engine
from motley.models.prompts import Prompts
from motley.records import Sampling
from motley.reports.display import skills_at
from motley.reports.export import Dtype, export_model
from motley.reports.plots import choose, plot, read_run
from motley.runs.building import trained_policies
from motley.runs.evaluation import evaluate
from motley.runs.folder import newest_checkpoint, peer_folder
from motley.runs.metrics import LearnerLine, learner_lines, mean, read_metrics
from motley.tasks import Split, Task, load_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Round:
    """What every peer has to say of a round; docs/metrics.md has every field of a line."""

    number: int
    lines: Sequence[LearnerLine]

    def __getitem__(self, peer: str) -> LearnerLine:
        try:
            return next(line for line in self.lines if line.peer == peer)
        except StopIteration:
            known = ", ".join(line.peer for line in self.lines)
            raise KeyError(f"no peer {peer!r} in round {self.number}; there are {known}") from None

    @property
    def rewards(self) -> dict[str, float | None]:
        """Mean reward of what each peer sampled."""
        return {line.peer: line.reward for line in self.lines}

    @property
    def heldout(self) -> dict[str, float]:
        """Mean over kinds on held-out problems, where this round was evaluated."""
        return {line.peer: mean(line.heldout) for line in self.lines if line.heldout}


@well_called
class Run:
    """A run folder: of `crew.train()`, `motley train`, `motley sim` or `motley join`.

    `task`: where it was given as Python objects that a folder cannot hold.
    """

    def __init__(self, folder: str | Path, task: Task | None = None) -> None:
        self.folder = as_path(folder, "the run folder")
        newest_checkpoint(self.folder)  # it is one
        self.config = read_config(self.folder / "config.toml")
        self._task = task

    @property
    def task(self) -> Task:
        if self._task is None:
            self._task = load_task(self.config.crew.task, self.config.task)
        return self._task

    @property
    def peers(self) -> list[str]:
        """Who learns."""
        return [peer.name for peer in self.config.students]

    def lines(self) -> list[LearnerLine]:
        """Every line of metrics, as it is."""
        return learner_lines(read_metrics(self.folder))

    def summary(self) -> Table:
        """Held-out skills of every peer, before and after."""
        lines = self.lines()
        before, after = skills_at(lines, last=False), skills_at(lines, last=True)
        rows: list[Row] = [
            {"peer": peer, "kind": kind, "before": before[peer][kind], "after": value}
            for peer, skills in after.items()
            for kind, value in skills.items()
        ]
        return Table(rows, f"{self.folder.name}: held-out, before and after")

    def curves(self) -> Curves:
        """Every number of metrics.jsonl by round, peer and key (docs/metrics.md)."""
        run = read_run(self.folder)
        rows = [point._asdict() for points in run.series.values() for point in points]
        return Curves(rows, lambda keys: plot([run], choose([run], keys).keys))

    def rollouts(self, **wanted: Any) -> Table:
        """What was sampled: prompt, completion, reward, and what each learner made of it.

        `wanted`: the fields of `RolloutFilter`, such as sender="ann", kind="sort",
        rounds=(3, 7), rewards=(0, 0.5), reason="filtered".
        """
        rows = [_rollout_row(one) for one in read_rollouts(self.folder, _filter(wanted))]
        return Table(rows, f"{self.folder.name}: rollouts")

    def evaluate(self, split: Split = "heldout", *, problems: int = 200, samples: int = 8) -> Table:
        """How good every peer is at the newest checkpoint, with standard errors."""
        check_counts(problems, samples)
        policies = trained_policies(self.folder, self.task)
        asked = [(name, torch_engine(p), p.prompts) for name, p in policies.items()]
        return accuracies(asked, self.task, split, self.config.sampling, problems, samples)

    def model(self, peer: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A peer's trained model and its tokenizer, for plain transformers."""
        self._known(peer)
        # no reward is needed, and perhaps none can be had
        task = self._task or load_task(self.config.crew.task, self.config.task, scores=False)
        policy = trained_policies(self.folder, task)[peer]
        return policy.model, policy.vocabulary.tokenizer

    def export(
        self, peer: str, out: str | Path, *, merge: bool = False, dtype: Dtype = "float32"
    ) -> Path:
        """Write a peer's model as an ordinary Hugging Face or PEFT folder, with a model card."""
        self._known(peer)
        if dtype not in get_args(Dtype):
            raise ValueError(f"dtype={dtype!r} is not known; use {', '.join(get_args(Dtype))}")
        return export_model(self.folder, peer, as_path(out, "out"), merge, dtype)

    def _known(self, peer: str) -> None:
        if peer not in self.peers or not peer_folder(self.folder, peer).exists():
            raise ValueError(
                f"{self.folder} has no peer {peer!r} that learns; it has {', '.join(self.peers)}"
            )

    def __repr__(self) -> str:
        return f"<motley.Run {self.folder}>\n{self.summary()!r}"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()


def accuracies(
    asked: Iterable[tuple[str, Engine, Prompts]],
    task: Task,
    split: Split,
    sampling: Sampling,
    problems: int,
    samples: int,
) -> Table:
    """By peer and kind."""
    if split not in task.splits:
        raise ValueError(f"split {split!r} is not in this task; it has {', '.join(task.splits)}")
    rows = [
        {"peer": name, **line.row()}
        for name, engine, prompts in asked
        for line in evaluate(engine, prompts, task, split, sampling, int(problems), int(samples))
    ]
    return Table(rows, f"on {split} problems")


def check_counts(problems: int, samples: int) -> None:
    """Refuse counts with which nothing can be measured."""
    whole = isinstance(problems, Integral) and isinstance(samples, Integral)
    if not whole or problems < 2 or samples < 1:
        raise ValueError(
            f"problems={problems!r} and samples={samples!r} measure nothing; use whole numbers of "
            "at least 2 and 1"
        )


def _filter(wanted: Mapping[str, Any]) -> RolloutFilter:
    check_names("rollouts()", wanted, [field.name for field in fields(RolloutFilter)])
    wanted = dict(wanted)
    for name in {"rounds", "rewards"} & wanted.keys():
        match as_written(wanted[name], name):
            case [int() | float() as least, int() | float() as most]:
                wanted[name] = (least, most)
            case other:
                raise ValueError(
                    f"{name}={other!r}; expected the least and the most, such as {name}=(0, 1)"
                )
    try:
        grep = re.compile(wanted.get("grep") or "")
    except (TypeError, re.error) as error:
        raise ValueError(
            f"grep={wanted['grep']!r} ({error}); expected a regular expression"
        ) from None
    return RolloutFilter(**{**wanted, "grep": grep})


def _rollout_row(rollout: LoggedRollout) -> Row:
    return {
        "round": rollout.round,
        "sender": rollout.sender,
        "kind": rollout.kind,
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "answer": rollout.answer,
        "reward": rollout.reward,
        "ending": rollout.ending,
        **{f"for {learner}": fate for learner, fate in rollout.fates.items()},
    }
