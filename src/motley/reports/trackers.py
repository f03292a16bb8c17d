"""Metrics for trackio, wandb and TensorBoard: `report = ["tensorboard"]` of [crew]. Knows metrics
lines only; training never depends on it.

metrics.jsonl is the truth, and a reporter has what it has: one that is opened on a run that goes on
is first told everything that stands there, and what it had of that run before is replaced. So no
round is there twice and none goes backwards, wherever a run was cut. All of it stays in the run
folder unless the environment says otherwise (WANDB_MODE, TRACKIO_DIR, TRACKIO_SPACE_ID,
TRACKIO_SERVER_URL).

RUN/tensorboard/    tensorboard --logdir RUN/tensorboard
RUN/wandb/          wandb sync RUN/wandb/offline-run-*
RUN/trackio/        TRACKIO_DIR=RUN/trackio trackio show --project motley
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from motley.config import REPORTERS, CrewConfig
from motley.reports.series import Scalars, scalars_of
from motley.runs.metrics import LearnerLine, MetricsLine, SampleAnswer, read_metrics

PROJECT = "motley"
TIMEOUT_S = 30  # of a server that does not answer
COLUMNS = ["kind", "reward", "prompt", "answer"]


def _cells(answer: SampleAnswer) -> list[object]:
    return [answer.kind, answer.reward, answer.prompt, answer.answer]


class Reporter(Protocol):
    def log(self, lines: Sequence[MetricsLine]) -> None: ...

    def close(self) -> None: ...


class Reports:
    """A run's reporters, opened with its first line.

    Told of lines once they are in metrics.jsonl; can be told again after `close`. `names`: instead
    of those that the crew file names.
    """

    def __init__(
        self, config: CrewConfig, folder: Path, names: Sequence[str] | None = None
    ) -> None:
        chosen = config.crew.report if names is None else names
        crew = msgspec.structs.replace(config.crew, report=tuple(chosen))
        self._config, self._folder = msgspec.structs.replace(config, crew=crew), folder
        self._open: list[Reporter] | None = None

    def log(self, lines: Sequence[MetricsLine]) -> None:
        if not self._config.crew.report or not lines:
            return
        if self._open is None:
            self._open = open_reporters(self._config, self._folder)
            lines = read_metrics(self._folder)
        for reporter in self._open:
            reporter.log(lines)

    def close(self) -> None:
        for reporter in self._open or ():
            reporter.close()
        self._open = None


def open_reporters(config: CrewConfig, folder: Path) -> list[Reporter]:
    """The reporters a crew names, empty and guarded.

    One that fails, now or later, says so once and is left out. So is one that is not installed.
    """
    return [_Guarded(name, config, folder) for name in dict.fromkeys(config.crew.report)]


def _open(name: str, config: CrewConfig, folder: Path) -> Reporter:
    if not _installed(name):
        raise ModuleNotFoundError(
            f"it is not installed; install it with pip install {name}, or remove it from report"
        )
    return OPENERS[name](config, folder)


def _installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    # without one it is a folder that a reporter left here, not the package
    return spec is not None and spec.origin is not None


# Metrics lines by round


class RoundReport(NamedTuple):
    """What a tracker is told of a round: numbers by name, and answers by peer."""

    round: int
    scalars: Scalars
    answers: dict[str, list[SampleAnswer]]


def rounds_of(lines: Sequence[MetricsLine], everything: bool = False) -> Iterator[RoundReport]:
    """Neighbouring lines of one round, of different peers, are one; a round with nothing to tell is
    left out.
    """
    for number, some in groupby(lines, key=lambda line: line.round):
        told = RoundReport(number, {}, {})
        for line in some:
            told.scalars.update(scalars_of(line, everything))
            if isinstance(line, LearnerLine) and line.samples:
                told.answers[line.peer] = line.samples
        if told.scalars or told.answers:
            yield told


def answers_text(answers: Sequence[SampleAnswer]) -> str:
    """As a table of Markdown, which TensorBoard shows."""
    plain = lambda text: html.escape(text).replace("|", "\\|").replace("\n", "<br>")
    rows = [
        f"| {plain(a.kind)} | {a.reward:g} | {plain(a.prompt)} | {plain(a.answer)} |"
        for a in answers
    ]
    return "\n".join(["| kind | reward | prompt | answer |", "|---|---|---|---|", *rows])


# Reporters


class _Guarded:
    """Stands between training and a reporter."""

    def __init__(self, name: str, config: CrewConfig, folder: Path) -> None:
        self._name = name
        self._reporter: Reporter | None = None
        self._try(lambda: setattr(self, "_reporter", _open(name, config, folder)))

    def log(self, lines: Sequence[MetricsLine]) -> None:
        if self._reporter:
            self._try(lambda: self._reporter.log(lines) if self._reporter else None)

    def close(self) -> None:
        if self._reporter:
            self._try(self._reporter.close)
        self._reporter = None

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a stranger's package; whatever it raises, hours of training must not end with it
            self._reporter = None
            warnings.warn(
                f"{self._name} failed and is told nothing more: {error}; metrics.jsonl has "
                "everything",
                stacklevel=2,
            )


class _TensorBoard:
    def __init__(self, config: CrewConfig, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._all = config.crew.report_all

    def log(self, lines: Sequence[MetricsLine]) -> None:
        for told in rounds_of(lines, self._all):
            for name, value in told.scalars.items():
                self._writer.add_scalar(name, value, told.round)
            for peer, answers in told.answers.items():
                self._writer.add_text(f"{peer}/samples", answers_text(answers), told.round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of its own each time it is opened, with all rounds in it.

    What was not synced of an earlier one is removed.
    """

    def __init__(self, config: CrewConfig, folder: Path) -> None:
        for old in (folder / "wandb").glob("offline-run-*"):
            if not any(old.glob("*.synced")):
                shutil.rmtree(old)
        mode = os.environ.get("WANDB_MODE", "offline")
        # its statistics would go to its makers even then
        unasked = {"WANDB_ERROR_REPORTING": "false"} if mode == "offline" else {}
        with _environment(WANDB_MODE=mode, **unasked):
            self._wandb = wandb = importlib.import_module("wandb")
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=folder.resolve().name,
                dir=folder,
                config=msgspec.to_builtins(config),
                mode=mode,
                reinit="create_new",
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    init_timeout=TIMEOUT_S,
                ),
            )
        self._all = config.crew.report_all
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")  # wandb's own step only counts calls

    def log(self, lines: Sequence[MetricsLine]) -> None:
        for told in rounds_of(lines, self._all):
            tables = {
                f"{peer}/samples": self._wandb.Table(COLUMNS, [_cells(a) for a in answers])
                for peer, answers in told.answers.items()
            }
            self._run.log({"round": told.round, **told.scalars, **tables})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """In RUN/trackio, or where the environment says.

    A process has one place: a second run in it is written where the first one is.
    """

    def __init__(self, config: CrewConfig, folder: Path) -> None:
        own = folder.resolve() / "trackio"
        self._trackio = trackio = _import_trackio(own)
        name, online = (
            folder.resolve().name,
            bool(os.environ.keys() & {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"}),
        )
        if own == trackio.utils.TRACKIO_DIR and not online:
            with suppress(ValueError):  # there is no database yet
                for old in trackio.Api().runs(PROJECT):
                    if old.name == name:
                        old.delete()
        with redirect_stdout(io.StringIO()), _asking_nobody(unless=online):
            self._run = trackio.init(
                project=PROJECT,
                name=name,
                config=msgspec.to_builtins(config),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._all = config.crew.report_all

    def log(self, lines: Sequence[MetricsLine]) -> None:
        for told in rounds_of(lines, self._all):
            texts = {
                f"{peer}/samples": self._trackio.Markdown(answers_text(answers))
                for peer, answers in told.answers.items()
                if hasattr(self._trackio, "Markdown")  # not in the first versions
            }
            self._run.log({**told.scalars, **texts}, step=told.round)

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()


def _import_trackio(own: Path) -> Any:
    """trackio reads where its database is when it is imported, and never again."""
    with _environment(TRACKIO_DIR=os.environ.get("TRACKIO_DIR", str(own))):
        return importlib.import_module("trackio")


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _asking_nobody(unless: bool) -> Iterator[None]:
    """trackio asks Hugging Face whose token is here, even for a database that stays here."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = (
        constants.HF_HUB_OFFLINE,
        constants.HF_HUB_OFFLINE or not unless,
    )
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# Each writes to the folder of its name in the run's.
OPENERS: dict[str, Callable[[CrewConfig, Path], Reporter]] = {
    "trackio": _Trackio,
    "wandb": _Wandb,
    "tensorboard": _TensorBoard,
}
assert tuple(OPENERS) == REPORTERS, "a crew file may name exactly these"
