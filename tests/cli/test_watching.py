"""motley watch and --watch, as a user meets them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from hubs import PATIENCE_S
from motley.cli import app, watching


def motley(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    return folder


def test_nothing_to_watch_says_what_to_do(here: Path) -> None:
    said = motley("watch", code=2).stderr
    assert "there is nothing to watch; give a run folder, the name of a crew" in said
    assert "motley demo --watch makes a run" in said
    a_run(here / "runs" / "demo-007")
    assert "such as motley watch runs/demo-007" in motley("watch", code=2).stderr
    assert "nothing to watch at 'nobody'" in motley("watch", "nobody", code=2).stderr


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    missing = lambda name, *more: None if name == "uvicorn" else there(name, *more)
    monkeypatch.setattr(importlib.util, "find_spec", missing)


@pytest.mark.usefixtures("without_extra")
def test_without_the_extra_it_says_how_to_install_it(here: Path) -> None:
    for command in (["watch", "x"], ["demo", "--watch"]):
        said = motley(*command, code=2).stderr
        assert "needs the package uvicorn, which is not installed" in said
        assert "pip install 'motley-rl[watch]'" in said
    assert not list((here / "runs").glob("*"))  # nothing was begun


def test_a_port_that_is_taken_is_refused_and_the_next_free_one_is_found(here: Path) -> None:
    taken = watching._listen("127.0.0.1", 0)
    try:
        port = taken.getsockname()[1]
        said = motley("watch", a_run(here / "run"), "--port", port, "--no-open", code=2).stderr
        assert f"the page cannot listen on 127.0.0.1:{port}" in said
        assert "choose another --port" in said
    finally:
        taken.close()
    first, second = watching._listen("127.0.0.1", None), watching._listen("127.0.0.1", None)
    with first, second:
        assert first.getsockname()[1] < second.getsockname()[1] < watching.PORT + watching.TRIED


def test_other_addresses_take_a_token() -> None:
    assert watching._access("127.0.0.1", with_token=False).token == ""
    assert watching._access("127.0.0.1", with_token=True).token
    for host in ("0.0.0.0", "::", "192.0.2.1", "box.example"):
        access = watching._access(host, with_token=False)
        assert len(access.token) >= 32
        assert watching._address(host, 7117, access).endswith(f":7117/?token={access.token}")
    assert watching._address("::1", 7117, watching._access("::1", False)) == "http://[::1]:7117/"


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "motley", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        for file in (process.stdin, process.stdout, process.stderr):
            assert file
            file.close()


def address_in(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = process.stdout.readline()
    match = re.search(r"http://\S+", line)
    assert match, line
    return match[0]


@pytest.mark.slow
def test_a_page_is_served_until_ctrl_c(here: Path) -> None:
    run = a_run(here / "run")
    with started("watch", run, "--port", 0, "--no-open") as process:
        address = address_in(process)
        with urllib.request.urlopen(f"{address}api/runs", timeout=PATIENCE_S) as answer:
            assert [one["place"] for one in json.load(answer)] == [str(run)]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_page_beside_a_command_stands_back_and_ends_with_it(here: Path) -> None:
    with started("watch", here / "comes-later", "--beside") as process:
        with urllib.request.urlopen(f"{address_in(process)}api/runs", timeout=PATIENCE_S) as answer:
            assert [one["id"] for one in json.load(answer)] == ["comes-later"]
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
        assert process.stdin
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    assert [*here.iterdir()] == []  # it wrote nothing


@pytest.mark.slow
def test_a_page_that_does_not_come_up_does_not_stop_training(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run").write_text("no folder")
    with watching.page_beside(here / "run", wanted=True):
        trained = True
    assert trained
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: the page did not come up, and training goes on without it" in said
    assert "there is nothing to watch at" in said


class FakePage:
    """A page whose user presses Ctrl-C as soon as it is waited for."""

    address, is_up = "http://127.0.0.1:7117/", True

    def __init__(self, folder: Path) -> None:
        self.process, self.waited, self.closed = self, 0, 0
        FakePage.last = self

    last: FakePage

    def wait(self) -> None:
        self.waited += 1
        raise KeyboardInterrupt

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("at_terminal", [True, False])
def test_the_page_stays_after_training_at_a_terminal_only(
    at_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watching, "_Page", FakePage)
    monkeypatch.setattr(watching, "console", Console(force_terminal=at_terminal))
    monkeypatch.setattr(watching, "_open", lambda address: None)
    with watching.page_beside(Path("runs/x"), wanted=True):
        pass
    said = capsys.readouterr().err
    assert (FakePage.last.waited, FakePage.last.closed) == (int(at_terminal), 1)
    assert ("until Ctrl-C" in said) == at_terminal
    assert said.endswith("open the page again with: motley watch runs/x\n")


def test_a_run_that_is_stopped_closes_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_Page", FakePage)
    monkeypatch.setattr(watching, "console", Console(force_terminal=True))
    monkeypatch.setattr(watching, "_open", lambda address: None)
    with pytest.raises(typer.Exit), watching.page_beside(Path("runs/x"), wanted=True):
        raise typer.Exit(130)
    assert (FakePage.last.waited, FakePage.last.closed) == (0, 1)


def test_the_browser_is_opened_where_there_is_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(watching.webbrowser, "open", opened.append)
    monkeypatch.setattr(watching.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    watching._open("http://a/")
    assert opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    watching._open("http://b/", no_open=True)
    watching._open("http://c/")
    assert opened == ["http://c/"]
