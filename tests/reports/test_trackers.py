"""Reporters have what metrics.jsonl has, on this machine, and cannot stop a run."""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motley.config import REPORTERS, CrewConfig, parse_config
from motley.learning.senders import Distribution, SenderMetrics
from motley.reports import trackers
from motley.reports.series import scalars_of
from motley.reports.trackers import (
    OPENERS,
    Reports,
    answers_text,
    open_reporters,
    rounds_of,
)
from motley.runs.metrics import (
    LearnerLine,
    MetricsLine,
    SampleAnswer,
    SamplerLine,
    Timing,
    append_lines,
)

CREW = """
[crew]
name = "pair"
task = "digits"
rounds = 2
group_size = 4
problems_per_round = 4
objective = "ftis"
report = REPORT
report_all = true
[[peer]]
name = "small"
model = "tiny:0.3m"
[[peer]]
name = "deep"
model = "tiny:deep"
"""

needs = lambda package: pytest.mark.skipif(
    not trackers._installed(package),
    reason=f"{package} is not installed; pip install 'motley-rl[report]'",
)


def crew(*reporters: str) -> CrewConfig:
    return parse_config(CREW.replace("REPORT", msgspec.json.encode(reporters).decode()))


def line(round: int, peer: str = "small", **more: Any) -> LearnerLine:
    return LearnerLine(round=round, peer=peer, **more)


SENDER_KEYS: dict[str, Any] = {
    "groups": 2,
    "reward": 0.5,
    "accuracy": 0.5,
    "tokens": 4.0,
    "truncated": 0.0,
    "age": 0.0,
    "silent_groups": 0,
}


def sender(**more: Any) -> SenderMetrics:
    return SenderMetrics(**SENDER_KEYS, **more)


class Run:
    """A run folder as Run keeps it: lines are written, then reported."""

    def __init__(self, folder: Path, *reporters: str) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self.path.touch()
        self.reports = Reports(crew(*reporters), folder)

    def write(self, *lines: MetricsLine) -> None:
        append_lines(self.path, lines)
        self.reports.log(lines)

    def cut(self, num_lines: int) -> None:
        self.path.write_bytes(
            b"".join(self.path.read_bytes().splitlines(keepends=True)[:num_lines])
        )


# Lines as numbers


def test_numbers_are_named_by_their_path() -> None:
    told = line(
        3,
        version=3,
        reward=0.5,
        heldout={"sort": 0.25},
        senders={
            "deep": sender(kl_k3=0.1, weight=Distribution(1.0, 2.0, 0.5, 0.9, 1.9), tau_after=None)
        },
        refused={"unknown": {"corrupt": 2}},
        ages={0: 4},
        without=["deep"],
    )
    assert scalars_of(told, everything=True) == {
        "small/version": 3,
        "small/reward": 0.5,
        "small/heldout/sort": 0.25,
        **{f"small/senders/deep/{key}": value for key, value in SENDER_KEYS.items()},
        "small/senders/deep/kl_k3": 0.1,
        "small/senders/deep/weight/mean": 1.0,
        "small/senders/deep/weight/max": 2.0,
        "small/senders/deep/weight/q05": 0.5,
        "small/senders/deep/weight/q50": 0.9,
        "small/senders/deep/weight/q95": 1.9,
        "small/refused/unknown/corrupt": 2,
        "small/ages/0": 4,
    }


FOREIGN = {"kl_k3": 0.3, "entropy": 0.6, "filtered_negative": 0.5}
OWN = {"kl_k3": 0.0, "entropy": 0.2, "filtered_negative": 0.0}
FULL = line(
    3,
    version=3,
    reward=0.5,
    grad_norm=0.75,
    loss=-0.1,
    heldout={"sort": 0.25, "sum": 0.75},
    senders={
        "small": sender(**OWN),
        "deep": SenderMetrics(**SENDER_KEYS | {"groups": 6, "silent_groups": 4}, **FOREIGN),
    },
    refused={"deep": {"corrupt": 2, "reward": 1}},
    timing=Timing(2.0, 1.0, 5.0, 5.0, 0.5),
    samples=[SampleAnswer("sort", "3 1 |", "1 3\n", 1.0)],
)


def test_by_default_a_tracker_is_told_the_few_numbers_that_one_watches() -> None:
    assert scalars_of(FULL) == pytest.approx(
        {
            "small/reward": 0.5,
            "small/heldout": 0.5,
            "small/heldout/sort": 0.25,
            "small/heldout/sum": 0.75,
            "small/entropy": (2 * 0.2 + 6 * 0.6) / 8,
            "small/kl": 0.3,  # of others: the own is 0 by construction
            "small/grad_norm": 0.75,
            "small/tokens": 4.0,
            "small/truncated": 0.0,
            "small/filtered": 0.5,
            "small/silent": 4 / 8,
            "small/foreign": 6 / 8,
            "small/refused": 3,
            "small/seconds": 2.5,
        }
    )


def test_a_peer_alone_has_the_kl_of_its_own_samples_and_nothing_foreign() -> None:
    found = scalars_of(line(1, senders={"small": sender(**OWN)}))
    assert (found["small/kl"], found["small/foreign"]) == (0.0, 0.0)
    assert "small/filtered" not in found
    assert scalars_of(line(1)) == {}


def test_a_sampler_has_numbers_of_its_own() -> None:
    told = SamplerLine(
        round=1, peer="s", version=0, reward=0.5, sampled_tokens=96, timing=Timing(2.0)
    )
    assert scalars_of(told) == {"s/reward": 0.5, "s/tokens": 96, "s/seconds": 2.0}


def test_the_lines_of_a_round_are_told_together() -> None:
    lines = [
        line(0, "small", version=1),
        line(0, "deep", version=2),
        line(1, "small", version=3),
        line(2, "small", without=["deep"]),  # no number
        FULL,
    ]
    told = list(rounds_of(lines, everything=True))
    assert [one.round for one in told] == [0, 1, 3]
    assert told[0].scalars == {"small/version": 1, "deep/version": 2}
    assert told[0].answers == {}
    assert told[2].answers == {"small": FULL.samples}
    assert list(rounds_of([])) == []


def test_answers_cannot_break_the_table_that_shows_them() -> None:
    hostile = SampleAnswer("k", "a | b\n<script>", "x\ny", -2.5)
    row = answers_text([hostile]).splitlines()[2]
    assert row == "| k | -2.5 | a \\| b<br>&lt;script&gt; | x<br>y |"


# What is there


def test_a_package_that_is_missing_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = Run(tmp_path, "trackio")
    with pytest.warns(
        UserWarning, match=r"trackio failed .*: it is not installed; .* pip install trackio, or"
    ):
        run.write(line(0))
    run.write(line(1))  # a second warning would be an error here
    run.reports.close()


def test_a_folder_of_the_same_name_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    run = Run(tmp_path / "run", "trackio")
    with pytest.warns(UserWarning, match="it is not installed"):
        run.write(line(0))


def test_a_peer_may_name_trackers_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: None
) -> None:
    opened: list[str] = []
    for name in REPORTERS:
        monkeypatch.setitem(OPENERS, name, lambda *_, name=name: opened.append(name) or Fake())
    append_lines(tmp_path / "metrics.jsonl", [line(0)])
    for names in (None, ["trackio"], []):
        Reports(crew("wandb"), tmp_path, names).log([line(0)])
    assert opened == ["wandb", "trackio"]


def test_every_reporter_of_a_crew_file_is_known() -> None:
    assert crew("trackio", "wandb", "tensorboard").crew.report == REPORTERS == tuple(OPENERS)


@pytest.mark.slow
def test_checking_imports_no_reporter() -> None:
    code = (
        "import sys, motley.reports.trackers\nprint([n for n in ('torch', 'tensorboard', 'wandb', "
        "'trackio') if n in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_without_a_report_nothing_is_made(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.write(line(0, reward=1.0))
    run.reports.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


# Failing


class Fake:
    """Keeps what it is told; fails from a given call on."""

    def __init__(self, fails_at: int = 10**9) -> None:
        self.lines: list[MetricsLine] = []
        self.closed, self.calls, self.fails_at = 0, 0, fails_at

    def log(self, lines: Sequence[MetricsLine]) -> None:
        self.calls += 1
        if self.calls >= self.fails_at:
            raise RuntimeError("the server is gone")
        self.lines += lines

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_installed", lambda name: True)


@pytest.mark.usefixtures("installed")
def test_a_reporter_that_fails_says_so_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = Fake(fails_at=2), Fake()
    monkeypatch.setitem(OPENERS, "wandb", lambda config, folder: bad)
    monkeypatch.setitem(OPENERS, "tensorboard", lambda config, folder: good)
    run = Run(tmp_path, "wandb", "tensorboard")
    run.write(line(0))
    with pytest.warns(
        UserWarning,
        match=(
            r"wandb failed and is told nothing more: the server is gone; metrics\.jsonl has "
            r"everything"
        ),
    ):
        run.write(line(1))
    run.write(line(2))  # a second warning would be an error here
    run.reports.close()
    assert (bad.calls, bad.closed) == (2, 0)
    assert [told.round for told in good.lines] == [0, 1, 2]
    assert good.closed == 1


@pytest.mark.usefixtures("installed")
def test_a_reporter_that_cannot_be_opened_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: CrewConfig, folder: Path) -> Fake:
        raise OSError("no such account")

    monkeypatch.setitem(OPENERS, "wandb", refuse)
    run = Run(tmp_path, "wandb")
    with pytest.warns(UserWarning, match="no such account"):
        run.write(line(0))
    run.write(line(1))
    run.reports.close()


@pytest.mark.usefixtures("installed")
def test_a_run_that_goes_on_is_told_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Fake] = []
    monkeypatch.setitem(
        OPENERS, "wandb", lambda config, folder: opened.append(Fake()) or opened[-1]
    )
    first = Run(tmp_path, "wandb")
    for number in range(4):
        first.write(line(number, reward=0.0))
    again = Run(tmp_path, "wandb")
    again.cut(2)  # to the newest checkpoint
    again.write(line(2, reward=1.0))
    again.write(line(3, reward=1.0))
    assert [told.round for told in opened[1].lines] == [0, 1, 2, 3]
    assert [told.reward for told in opened[1].lines] == [0.0, 0.0, 1.0, 1.0]


# Real ones


def write_twice(folder: Path, reporter: str) -> None:
    """Rounds 0 to 3; then cut back to 2 rounds, and on, in a reporter that is opened anew."""
    first = Run(folder, reporter)
    for number in range(4):
        first.write(
            line(number, reward=0.5, senders={"deep": sender(kl_k3=0.1, tau_after=None)}),
            line(number, "deep", reward=0.25),
        )
    first.reports.close()
    again = Run(folder, reporter)
    again.cut(4)
    for number in (2, 3, 4):
        said = [SampleAnswer("sort", "3 1", f"answer {number}", 1.0)] if number == 4 else None
        again.write(
            line(number, reward=1.0 + number, samples=said), line(number, "deep", reward=0.75)
        )
    again.reports.close()


REWARDS = [0.5, 0.5, 3.0, 4.0, 5.0]


@needs("tensorboard")
def test_tensorboard_files_have_every_number_once(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        write_twice(tmp_path / "run", "tensorboard")
        found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert set(found.Tags()["scalars"]) == {
        "small/reward",
        "deep/reward",
        *(f"small/senders/deep/{key}" for key in SENDER_KEYS),
        "small/senders/deep/kl_k3",
    }
    assert [(event.step, event.value) for event in found.Scalars("small/reward")] == list(
        enumerate(REWARDS)
    )
    assert [event.step for event in found.Scalars("small/senders/deep/kl_k3")] == [0, 1]
    (said,) = found.Tensors("small/samples/text_summary")
    assert said.step == 4
    assert b"answer 4" in said.tensor_proto.string_val[0]


def in_a_process(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """With no way to ask anybody: no network, no keyboard, no account."""
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("WANDB", "TRACKIO", "HF_"))
    }
    places = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    plain |= {"HOME": str(folder), "PYTHONPATH": places, **environment}
    command = [sys.executable, "-W", "error::UserWarning", "-c", code, str(folder / "run")]
    return subprocess.run(
        command,
        env=plain,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


GUARDED = """
import os, socket, sys
from pathlib import Path

def told(name, real):
    def call(*arguments, **named):
        if not (isinstance(arguments[0], socket.socket) and arguments[0].family == socket.AF_UNIX):
            # also where the reporter is kept from printing
            os.write(1, f"ASKED {name} {arguments}".encode())
        return real(*arguments, **named)
    return call

socket.socket.connect = told("connect", socket.socket.connect)
socket.getaddrinfo = told("getaddrinfo", socket.getaddrinfo)
from reports.test_trackers import write_twice
write_twice(Path(sys.argv[1]), "REPORTER")
"""


@pytest.mark.slow
@needs("wandb")
def test_wandb_stays_on_this_machine_and_is_silent(tmp_path: Path) -> None:
    done = in_a_process(GUARDED.replace("REPORTER", "wandb"), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    runs = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(runs) == 1, "the run that was cut is replaced"
    content = next(runs[0].glob("run-*.wandb")).read_bytes()
    tables = list(runs[0].rglob("*.table.json"))
    assert len(tables) == 1
    assert "answer 4" in tables[0].read_text()
    for text in (b"small/reward", b"deep/reward", b"small/senders/deep/kl_k3", b"tiny:0.3m"):
        assert text in content


@pytest.mark.slow
@needs("wandb")
def test_wandb_history_has_every_round_once(tmp_path: Path) -> None:
    done = in_a_process(GUARDED.replace("REPORTER", "wandb"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [reward for _, reward in wandb_history(tmp_path / "run")] == REWARDS
    assert [number for number, _ in wandb_history(tmp_path / "run")] == [0, 1, 2, 3, 4]


def wandb_history(folder: Path) -> list[tuple[int, float]]:
    """Round and reward of every row in wandb's own file."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for content in wandb_records(next(folder.glob("wandb/offline-run-*/run-*.wandb")).read_bytes()):
        record = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): msgspec.json.decode(item.value_json)
                for item in record.history.item
            }
            rows.append((row["round"], row["small/reward"]))
    return rows


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The file is a header of 7 bytes, then blocks of 32 KiB; a record is in parts, each with
    checksum, size and place, 7 bytes too.
    """
    position, record = 7, b""
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        size, place = struct.unpack("<HB", content[position + 4 : position + 7])
        record += content[position + 7 : position + 7 + size]
        position += 7 + size
        if place in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
@needs("wandb")
def test_wandb_mode_of_the_environment_counts(tmp_path: Path) -> None:
    done = in_a_process(GUARDED.replace("REPORTER", "wandb"), tmp_path, WANDB_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "run").glob("wandb/offline-run-*"))


TRACKIO_ROWS = """
import msgspec
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("motley", "run")
print(msgspec.json.encode([[row["step"], row["small/reward"]] for row in rows]).decode())
"""


@needs("trackio")
def test_trackio_stays_on_this_machine_and_has_every_round_once(tmp_path: Path) -> None:
    done = in_a_process(
        GUARDED.replace("REPORTER", "trackio") + TRACKIO_ROWS, tmp_path, HF_TOKEN="hf_" + "x" * 34
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert msgspec.json.decode(done.stdout) == [
        [number, reward] for number, reward in enumerate(REWARDS)
    ]
    assert (tmp_path / "run" / "trackio" / "motley.db").exists()


def test_open_reporters_opens_each_name_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: None
) -> None:
    opened: list[Path] = []
    monkeypatch.setitem(OPENERS, "wandb", lambda config, folder: opened.append(folder) or Fake())
    assert len(open_reporters(crew("wandb", "wandb"), tmp_path)) == 1
    assert opened == [tmp_path]
