"""`motley join` tells trackers of the peer's own lines, and may run under torchrun."""

from __future__ import annotations

import importlib
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hubs import AtWork, local_place
from motley.cli import app
from motley.config import parse_config
from motley.distributed.hub import Hub
from motley.reports import trackers

CREW = """
[crew]
name = "one"
task = "digits"
rounds = 2
group_size = 4
problems_per_round = 2
objective = "alone"
report = ["wandb"]
[task]
kinds = ["compare"]
levels = [2]
[sampling]
max_tokens = 2
[evaluate]
every = 1
problems = 4
[[peer]]
name = "a"
model = "tiny:0.3m"
"""


def joined(folder: Path, *arguments: str) -> str:
    place = local_place()
    hub = Hub.open(parse_config(CREW), folder / "hub", place)
    hub.start()
    invitation = hub.register.invitations()["a"].split()[-1]
    command = ["join", place.url, "--crew", "one", "--invite", invitation, *arguments]
    try:
        with AtWork(hub):
            result = CliRunner().invoke(app, [*command, "--out", str(folder / "a")])
    finally:
        hub.close()
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.mark.slow
@pytest.mark.skipif(not trackers._installed("tensorboard"), reason="tensorboard is not installed")
def test_a_peer_that_joins_reports_its_own_lines_and_answers(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        joined(tmp_path, "--report", "tensorboard")
        found = EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("a/heldout")] == [0, 1, 2]
    assert {"a/reward", "a/seconds", "a/foreign"} <= set(found.Tags()["scalars"])
    assert [event.step for event in found.Tensors("a/samples/text_summary")] == [1, 2]
    assert not (tmp_path / "a" / "wandb").exists()


@pytest.mark.slow
def test_a_tracker_of_the_crew_files_that_is_not_here_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_installed", lambda name: False)
    with pytest.warns(UserWarning, match="wandb failed .* not installed") as said:
        assert "finished" in joined(tmp_path)
    assert len(said) == 1


def test_a_tracker_that_is_not_known_is_refused_before_anything_is_asked() -> None:
    result = CliRunner().invoke(app, ["join", "nats://x:1", "--crew", "one", "--report", "mlflow"])
    assert result.exit_code == 2
    assert "--report mlflow: use trackio, wandb, tensorboard or none" in result.stderr


@pytest.fixture
def keyboard() -> Iterator[None]:
    """Ctrl-C is heard, also where the tests run in the background of a shell that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("keyboard")
def test_one_ctrl_c_is_enough_while_a_peer_is_on_its_way_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it did not heed that it was asked to stop")

    monkeypatch.setattr(importlib.import_module("motley.distributed.join"), "join", asked)
    command = ["join", "nats://x:1", "--crew", "one", "--invite", "i", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 130, (result.output, result.exception)
    assert "come back with the same line" in result.output


def test_train_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    result = CliRunner().invoke(app, ["train", "crew.toml"])
    assert result.exit_code == 2
    assert "torchrun started 8 processes" in result.stderr
    assert "motley hub CREW.toml" in result.stderr
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "torchrun" not in CliRunner().invoke(app, ["train", "crew.toml"]).stderr
