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

import importlib
import importlib.util
import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from motley.config import REPORTERS, CrewConfig
from motley.runs.curves import leaves
from motley.runs.metrics import MetricsLine, read_metrics
from motley.tasks.extras import install

Scalars = dict[str, float]

PROJECT = "motley"


class Reporter(Protocol):
    def log(self, lines: Sequence[MetricsLine]) -> None: ...

    def close(self) -> None: ...


class Reports:
    """A run's reporters, opened with its first line.

    Told of lines once they are in metrics.jsonl; can be told again after `close`.
    """

    def __init__(self, config: CrewConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._open: list[Reporter] | None = None

    def log(self, lines: Sequence[MetricsLine]) -> None:
        if not self._config.crew.report:
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


def check_reporters(config: CrewConfig) -> None:
    """Refuse, before anything is trained, a reporter whose package is not installed."""
    missing = [name for name in config.crew.report if not _installed(name)]
    if missing:
        raise ValueError(
            f"report names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed; "
            f"install with: {install('report')}; or remove it from report"
        )


def open_reporters(config: CrewConfig, folder: Path) -> list[Reporter]:
    """The reporters a crew names, empty and guarded.

    One that fails, now or later, says so once and is left out.
    """
    check_reporters(config)
    return [_Guarded(name, config, folder) for name in dict.fromkeys(config.crew.report)]


def _installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    # without one it is a folder that a reporter left here, not the package
    return spec is not None and spec.origin is not None


# Metrics lines as numbers with names


def scalars_of(line: MetricsLine) -> Scalars:
    """The numbers of a line by their path.

    >>> scalars_of(LearnerLine(round=1, peer="small", heldout={"sort": 0.5}))
    {'small/heldout/sort': 0.5}
    """
    return {f"{line.peer}/{key}": value for key, value in leaves(msgspec.to_builtins(line))}


def steps_of(lines: Sequence[MetricsLine]) -> Iterator[tuple[int, Scalars]]:
    """Round and numbers; neighbouring lines of one round, of different peers, are one step."""
    number, scalars = -1, Scalars()
    for line in lines:
        if line.round != number and scalars:
            yield number, scalars
            scalars = Scalars()
        number = line.round
        scalars |= scalars_of(line)
    if scalars:
        yield number, scalars


# Reporters


class _Guarded:
    """Stands between training and a reporter."""

    def __init__(self, name: str, config: CrewConfig, folder: Path) -> None:
        self._name = name
        self._reporter: Reporter | None = None
        self._try(lambda: setattr(self, "_reporter", OPENERS[name](config, folder)))

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

    def log(self, lines: Sequence[MetricsLine]) -> None:
        for number, scalars in steps_of(lines):
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, number)
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
            wandb = importlib.import_module("wandb")
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=folder.resolve().name,
                dir=folder,
                config=msgspec.to_builtins(config),
                mode=mode,
                reinit="create_new",
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True
                ),
            )
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")  # wandb's own step only counts calls

    def log(self, lines: Sequence[MetricsLine]) -> None:
        for number, scalars in steps_of(lines):
            self._run.log({"round": number, **scalars})

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

    def log(self, lines: Sequence[MetricsLine]) -> None:
        for number, scalars in steps_of(lines):
            self._run.log(scalars, step=number)

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
