"""What every command has in common: help, version, how much is said, and what is not imported."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import motley
from cli.test_cli import CREW, error
from cli.test_cli import motley as run
from marks import slow
from motley.cli import app
from motley.cli.shell import FIRST, console
from motley.tasks.extras import install

HEAVY = ("torch", "transformers", "matplotlib", "scipy", "peft", "datasets")

# runs the command line, then says what it imported and how long the processor worked
ASK = f"""
import sys, time, json
from motley.cli import app
try:
    app(sys.argv[1:], prog_name="motley")
except SystemExit as end:
    code = end.code
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.stderr.write("\\n" + json.dumps([code, heavy, time.process_time()]))
"""


def asked(*arguments: object) -> tuple[int, list[str], float]:
    command = [sys.executable, "-c", ASK, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code, heavy, seconds = json.loads(done.stderr.splitlines()[-1])
    return code or 0, heavy, seconds


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a log of a charter and a roster."""
    from motley.config import parse_config
    from motley.exchange import MemoryLog
    from motley.runs.local import found_log
    from motley.tasks import load_task

    folder, config = tmp_path_factory.mktemp("log"), parse_config(CREW)
    (folder / "groups").mkdir()
    task = load_task(config.crew.task, config.task)
    found_log(config, MemoryLog(folder / "groups" / "log.bin"), task)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "",
        "train -h",
        *map(slow, ("--version", "--help", "-h", "models list", "new -h", "hub --help")),
    ],
)
def test_what_needs_no_model_imports_nothing_heavy(words: str) -> None:
    code, heavy, seconds = asked(*words.split())
    assert (code, heavy) == (0, [])
    assert seconds < 10  # about 0.4 on a machine that does nothing else


@pytest.mark.slow
def test_a_log_is_read_and_a_crew_file_drafted_without_torch(
    log_folder: Path, tmp_path: Path
) -> None:
    assert asked("log", log_folder)[:2] == (0, [])
    rows = "".join(f"sum {n}+3=,{n + 3}\n" for n in range(10, 60))
    (tmp_path / "p.csv").write_text("question,answer\n" + rows)
    assert asked("new", "--data", tmp_path / "p.csv", "--out", tmp_path / "crew.toml")[:2] == (
        0,
        [],
    )


@pytest.mark.slow
def test_a_peer_is_shut_out_without_torch(tmp_path: Path) -> None:
    from motley.config import parse_config
    from motley.distributed.hub import Hub
    from motley.distributed.register import Place, read_state
    from motley.exchange.nats.server import free_port

    (tmp_path / "crew.toml").write_text(CREW)
    folder, port = tmp_path / "hub", free_port()
    place = Place(url=f"nats://127.0.0.1:{port}", host="127.0.0.1", port=port)
    Hub.open(parse_config(CREW), folder, place).close()
    order = ("hub", tmp_path / "crew.toml", "--revoke", "a", "--out", folder)
    assert asked(*order)[:2] == (0, [])
    assert read_state(folder).revoked == ["a"]


@pytest.mark.slow
def test_the_version_is_said() -> None:
    assert run("--version").stdout == f"motley {motley.__version__}\n"
    done = subprocess.run(
        [sys.executable, "-m", "motley", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"motley {motley.__version__}\n"


def test_the_bare_command_shows_the_five_commands_that_matter_first() -> None:
    out = run().stdout
    places = [out.index(f"motley {name}") for name in FIRST]
    assert places == sorted(places)
    whole = run("--help").stdout
    assert max(whole.index(f" {name} ") for name in FIRST) < whole.index(" hub ")


def commands() -> list[str]:
    names = [command.name or "" for command in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance
        names += [f"{group.name} {one.name}" for one in group.typer_instance.registered_commands]
    return names


@pytest.mark.parametrize("name", commands())
def test_every_command_has_a_short_help_and_says_one_sentence(name: str) -> None:
    out = run(*name.split(), "-h").stdout
    assert all(option in out for option in ("--quiet", "-q", "--verbose", "-v", "--help"))
    sentence = " ".join(out.split("╭")[0].split("\n", 2)[2].split())
    assert sentence.endswith(".")


READS_A_CREW = ("train", "demo", "sim", "hub", "study", "sweep", "check", "attack", "eval", "warm")


@pytest.mark.slow
@pytest.mark.parametrize("name", READS_A_CREW)
def test_every_command_that_reads_a_crew_file_takes_settings(name: str) -> None:
    assert "--set" in run(name, "-h").stdout


@pytest.mark.slow
def test_a_setting_counts_and_nonsense_is_one_line(tmp_path: Path) -> None:
    crew = tmp_path / "crew.toml"
    crew.write_text(CREW)
    wrong = {
        "learning.lrr=1": "unknown field `lrr` (in learning); did you mean lr?",
        "learnin.lr=1": "unknown field `learnin`; did you mean learning?",
        "rounds=3": "it belongs under [crew]",
        "learning.lr=fast": "Expected `float`, got `str` (in learning.lr)",
        "learning.lr": "is not KEY=VALUE",
        "=3": "is not KEY=VALUE",
        "learning.lr=": "nothing is no TOML value",
        "crew.processes=True": "TOML writes true and false",
        "peer.lr=1": "names no peer and key",
        "peer.c.lr=1": "there is no peer 'c'; the peers are a, b",
        "peer.a.model.size=2": "model is 'tiny:0.3m' and no table",
        "crew.group_size=1": "group_size=1 has no spread",
        "task.kinds=[": "is no TOML value",
    }
    for setting, words in wrong.items():
        assert words in error("train", crew, "--set", setting), setting
    for command in (["study", crew, "--arms", "ftis"], ["check", crew], ["sim", crew]):
        assert "did you mean lr?" in error(*command, "--set", "learning.lrr=1")


@pytest.mark.slow
def test_quiet_leaves_the_result_and_verbose_says_what_is_loaded(tmp_path: Path) -> None:
    crew = tmp_path / "crew.toml"
    crew.write_text(CREW)
    out = run("train", crew, "-q", "--set", "crew.rounds=1", "--out", tmp_path / "q")
    assert "round 1 of 1" not in out.output
    assert f"run folder: {tmp_path / 'q'}" in out.stdout
    loud = run("train", crew, "-v", "--rounds", 1, "--out", tmp_path / "v")
    assert "round 1 of 1" in loud.stdout
    assert f"read {crew}" in loud.stderr
    assert "b: tiny:0.3m from" in loud.stderr
    again = run("train", "--resume", tmp_path / "v", "--rounds", 2)
    assert "round 2 of 2" in again.stdout
    assert again.stderr == ""
    assert run("check", crew, "-q", "-v", code=2).stdout == ""


def test_quiet_and_verbose_may_stand_before_the_command_too(tmp_path: Path) -> None:
    crew = tmp_path / "crew.toml"
    crew.write_text("nothing of a crew")
    for before in ("-q", "--quiet"):
        assert run(before, "models", "list").stdout
        assert console.quiet
    run("-v", "models", "list")
    assert not console.quiet
    assert logging.getLogger("motley").level == logging.INFO
    for line in (("-q", "check", crew, "-v"), ("-v", "models", "list", "-q"), ("-q", "-v")):
        assert "exclude each other" in run(*line, code=2).stderr
    run("models", "list")
    assert (console.quiet, logging.getLogger("motley").level) == (False, logging.WARNING)


@pytest.mark.parametrize("loudness", ["-q", "-v"])
def test_a_warning_of_ours_is_one_line_without_its_place_in_the_code(
    loudness: str, tmp_path: Path
) -> None:
    rows = [{"prompt": f"sort {n}=", "answer": "1"} for n in (*range(30), 7)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "motley", "new", loudness, "--data", tmp_path / "p.jsonl"]
    command += ["--out", tmp_path / "crew.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (said,) = done.stderr.splitlines()
    assert said.startswith("warning: 1 prompts stand more than once, such as in ")


def test_a_warning_of_a_library_says_where_it_comes_from() -> None:
    code = "import warnings, motley.cli; warnings.warn_explicit('x', UserWarning, '/lib/a.py', 3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[0] == "/lib/a.py:3: UserWarning: x"


def test_one_place_says_how_extras_are_installed_from_anywhere() -> None:
    root = Path(motley.__file__).parent
    places = [path.name for path in root.rglob("*.py") if "motley-rl[" in path.read_text()]
    assert places == ["extras.py"]
    words = install("tasks")
    assert "pip install 'motley-rl[tasks]'" in words
    assert ".venv/bin/pip install -c constraints.txt -e '.[tasks]'" in words


@pytest.mark.slow
def test_completion_is_shown_and_nothing_is_installed_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    ask = [sys.executable, "-m", "motley"]
    for words in (["--show-completion"], ["--help"], ["models", "list"]):
        subprocess.run([*ask, *words], capture_output=True, check=words != ["--show-completion"])
    assert list(tmp_path.iterdir()) == []
    done = subprocess.run(
        ask,
        capture_output=True,
        text=True,
        check=False,
        env={
            "HOME": str(tmp_path),
            "PYTHONPATH": ":".join(sys.path),
            "_MOTLEY_COMPLETE": "complete_bash",
            "COMP_WORDS": "motley tr",
            "COMP_CWORD": "1",
        },
    )
    assert list(tmp_path.iterdir()) == []
    assert "train" in done.stdout
