from __future__ import annotations

import errno
import html
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from motley.benchmarks import asking, local
from motley.cli import app
from motley.cli.common import plain_errors
from motley.runs.local import LocalCrew
from motley.runs.metrics import LearnerLine, read_metrics

CREW = """
[crew]
name = "pair"
task = "digits"
rounds = 2
group_size = 4
problems_per_round = 4
objective = "ftis"
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
[[peer]]
name = "b"
model = "tiny:0.3m"
train = { lora = { rank = 2 } }
"""


def motley(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def as_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    return json.loads(motley(*arguments, "--json", code=code).stdout)


def error(*arguments: object) -> str:
    """The one line a mistake is answered with."""
    result = motley(*arguments, code=2)
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr.strip()


@pytest.fixture
def crew_file(tmp_path: Path) -> Path:
    (tmp_path / "crew.toml").write_text(CREW)
    return tmp_path / "crew.toml"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "crew.toml").write_text(CREW)
    motley("train", folder / "crew.toml", "--out", folder / "run", "--seed", 3)
    return folder / "run"


def test_train_leaves_a_run_and_says_where(trained: Path, crew_file: Path) -> None:
    out = motley("train", crew_file, "--rounds", 1, "--out", crew_file.parent / "run").stdout
    assert "held-out accuracy: before → after" in out
    assert f"run folder: {crew_file.parent / 'run'}" in out
    assert [line.round for line in read_metrics(crew_file.parent / "run")] == [0, 0, 1, 1]
    assert [line.round for line in read_metrics(trained)] == [0, 0, 1, 1, 2, 2]
    assert (trained / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (trained / "curves.html").read_text()
    assert "seed = 3" in (trained / "config.toml").read_text()


@pytest.mark.slow
def test_runs_without_a_folder_of_their_own_are_numbered(
    crew_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(crew_file.parent)
    for number in (1, 2):
        motley("train", crew_file, "--rounds", 1)
        assert (Path("runs") / f"pair-00{number}" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_resume_goes_on_with_a_run(trained: Path) -> None:
    before = (trained / "metrics.jsonl").read_bytes()
    out = motley("train", "--resume", trained).stdout
    assert f"run folder: {trained}" in out
    assert (trained / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_alone_also_trains_every_peer_by_itself(crew_file: Path) -> None:
    run = crew_file.parent / "run"
    out = motley("train", crew_file, "--rounds", 1, "--alone", "--out", run).stdout
    assert "(alone)" in out
    assert [
        line.num_sequences
        for line in read_metrics(run / "alone" / "b")
        if line.num_sequences is not None
    ] == [16]


@pytest.mark.slow
def test_eval_of_a_run_and_of_one_of_its_peers(trained: Path) -> None:
    rows = as_json("eval", trained, "--problems", 6, "--samples", 2)["rows"]
    assert [(row["peer"], row["kind"], row["problems"]) for row in rows] == [
        ("a", "compare", 6),
        ("b", "compare", 6),
    ]
    for row in rows:
        assert 0 <= row["avg@2"] <= row["pass@2"] <= 1
        assert 0 < row["constant"] <= 1
    (only,) = as_json("eval", trained, "--problems", 6, "--samples", 2, "--peer", "b")["rows"]
    assert only == rows[1]
    assert [
        row["problems"]
        for row in as_json("eval", trained, "--problems", 2, "--samples", 1, "--split", "ood")[
            "rows"
        ]
    ] == [2, 2]


def test_eval_of_a_model(crew_file: Path) -> None:
    rows = as_json("eval", "tiny:1m", "--problems", 3, "--samples", 2)["rows"]
    assert [row["kind"] for row in rows] == ["reverse", "sort", "increment", "all"]
    assert [row["problems"] for row in rows] == [3, 3, 3, 9]


@pytest.mark.slow
def test_check_compares_engine_and_trainer(crew_file: Path) -> None:
    rows = as_json("check", crew_file)["rows"]
    assert [row["result"] for row in rows] == ["ok"] * 9
    assert [row["what"].split()[0] for row in rows] == ["task", *["a:"] * 4, *["b:"] * 4]
    assert all(0 < row["mean_difference"] <= row["99 %"] < 1e-4 for row in rows[1:])


@pytest.mark.slow
def test_check_of_a_task_with_a_fault_fails(tmp_path: Path) -> None:
    lines = [{"prompt": f"sort {n}=", "answer": "1"} for n in range(10, 60)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "praise.py").write_text(
        "def praise(prompts, completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    text = CREW.replace('"digits"', '"praise:praise"').replace(
        'kinds = ["compare"]\nlevels = [2]', f'file = "{tmp_path / "p.jsonl"}"'
    )
    (tmp_path / "crew.toml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        rows = as_json("check", tmp_path / "crew.toml", code=1)["rows"]
    assert "own answers have a mean reward of 1, mere words 1" in rows[0]["result"]


def test_a_bad_crew_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(CREW.replace("group_size", "group_sise"))
    for command in (["train", path], ["check", path], ["study", path, "--arms", "ftis"]):
        assert "did you mean group_size?" in error(*command)
    assert "cannot read crew file" in error("train", tmp_path / "none.toml")


def test_bad_options_are_one_line(crew_file: Path, trained: Path) -> None:
    assert "give a crew file to start, or --resume RUN to go on; not both" in error("train")
    assert "not both" in error("train", crew_file, "--resume", trained)
    for rounds in (-1, 0):
        assert f"rounds={rounds} trains nothing" in error("train", crew_file, "--rounds", rounds)
    assert "rounds=0 trains nothing" in error("sim", crew_file, "--rounds", 0)
    assert "rounds=0 trains nothing" in error("attack", crew_file, "--rounds", 0)
    assert "objective 'ftsi' is not known" in error(
        "train", crew_file, "--objective", "ftsi", "--out", crew_file.parent / "run"
    )
    assert "has no variant 'x'" in error(
        "train", crew_file, "--objective", "ftis/x", "--out", crew_file.parent / "run"
    )
    assert "has no peer 'c'; it has a, b" in error("eval", trained, "--peer", "c")
    assert "there is no model folder ./gpt" in error("eval", "./gpt")
    assert "is not empty" in error("train", crew_file, "--out", trained)
    assert "is no model folder" in error("eval", crew_file.parent)


def test_brackets_in_an_error_are_shown(crew_file: Path) -> None:
    crew_file.write_text(CREW.replace("levels = [2]", "levels = [99]"))
    assert "[task] of 'digits'" in error("check", crew_file)


def test_a_path_with_brackets_can_stand_in_an_error(tmp_path: Path) -> None:
    assert "none.toml" in error("check", "runs[/x]/none.toml")


def test_a_place_that_cannot_be_written_to_is_named_with_the_remedy(crew_file: Path) -> None:
    file = crew_file.parent / "afile"
    file.touch()
    assert error("train", crew_file, "--out", file) == (
        f"error: {file}: Not a directory; check the name, or give another place"
    )


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/runs/a"),
            "/runs/a: No space left on device; make room there, and run the same command again",
        ),
        (
            OSError(errno.EACCES, "Permission denied", b"/runs/a"),
            "/runs/a: Permission denied; give yourself the rights to it, or give another place",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "/runs/a"),
            "/runs/a: Read-only file system; check the name, or give another place",
        ),
        (
            OSError(errno.EMFILE, "Too many open files", "/runs/a"),
            "/runs/a: Too many open files; try again, or give another place",
        ),
        (
            OSError(errno.ECONNREFUSED, "Connection refused"),
            f"[Errno {errno.ECONNREFUSED}] Connection refused",
        ),
        (OSError("the hub cannot be reached"), "the hub cannot be reached"),
    ],
)
def test_what_a_system_refuses_is_said_in_words(
    raised: OSError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), plain_errors():
        raise raised
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.slow
def test_study_prints_a_table_and_does_not_run_twice(crew_file: Path) -> None:
    out = crew_file.parent / "study"
    crew_file.write_text(CREW.replace("rounds = 2", "rounds = 1"))
    command = [
        "study",
        crew_file,
        "--arms",
        "alone ftis:C=3",
        "--seeds",
        2,
        "--jobs",
        1,
        "--out",
        out,
    ]
    printed = motley(*command).stdout
    tables, _, foot = printed.partition("\n\n## ")
    parts = tables.split("\n\n")
    titles = [part.removeprefix("### ") for part in parts[::2]]
    assert titles == [
        "The crew at a glance",
        "Against alone",
        "Against alone, out of distribution",
        "What each peer paid",
        "Every peer",
        "What was found",
    ]
    short, against, far, paid, scores, said = parts[1::2]
    assert [line.split("|")[1].strip() for line in short.splitlines()] == [
        "arm",
        "---",
        "alone",
        "ftis:C=3",
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in scores.splitlines()]
    assert [(row[0], row[1]) for row in rows[2:]] == [
        (peer, arm) for peer in "ab" for arm in ("start", "alone", "ftis:C=3")
    ]
    assert all("| within ±.030: p (Holm) |" in table for table in (against, far))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in paid.splitlines()]
    assert [row[0] for row in rows[2:]] == ["all", "all", "a", "a", "b", "b"]
    tokens = rows[0].index("tokens sampled")
    assert all(row[tokens] for row in rows)
    assert "ftis:C=3" in said.splitlines()[0]
    assert foot.index("Weights before and after") < foot.index("## How to read this")
    assert "warning: 2 seeds" in foot
    assert "report: " in foot
    page = (out / "report.html").read_text()
    assert "Warning: 2 seeds" in page
    assert said.splitlines()[0].removeprefix("- ") in html.unescape(page)
    assert len((out / "outcomes.csv").read_text().splitlines()) == 1 + 2 * 2 * 2
    assert len((out / "comparisons.csv").read_text().splitlines()) == 1 + 3 * 2
    assert len((out / "results.jsonl").read_text().splitlines()) == 2 * 2 * 2
    kept = (out / "outcomes.jsonl").read_bytes()
    assert len(kept.splitlines()) == 2 * 2 * 2
    lines = as_json(*command)["lines"]
    assert [line["arm"] for line in lines] == ["start", "alone", "ftis:C=3"] * 2
    assert (out / "outcomes.jsonl").read_bytes() == kept


def test_bench_prints_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"model": "tiny:1m", "half": "sampling", "ratio": 3.0}]
    monkeypatch.setattr(
        local, "local_benchmark", lambda repeats, show: show("tiny:1m", 0, 1) or rows * repeats
    )
    assert as_json("bench", "local", "--repeats", 2)["rows"] == rows * 2
    table = motley("bench", "local", "--repeats", 1).stdout
    assert all(word in table for word in ("tiny:1m", "sampling", "3.000"))


def test_bench_watch_makes_a_run_as_large_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        asking,
        "watch_benchmark",
        lambda show, rounds, peers: [{"what": "open", "value": rounds * peers}],
    )
    assert as_json("bench", "watch", "--rounds", 30, "--peers", 3)["rows"][0]["value"] == 90
    assert "200000" in motley("bench", "watch").stdout  # 10,000 rounds of 20 peers


@pytest.mark.slow
def test_bench_gpu_is_one_object_or_a_table_per_section() -> None:
    only = ("--only", "machine", "--only", "training")
    few = ("copied_bytes=1048576", "product=64", "repeats=1", "rows=8", "row_tokens=20")
    sizes = [word for one in few for word in ("--size", one)]
    arguments = ("bench", "gpu", "--device", "cpu", "--model", "tiny:0.3m", *sizes)
    found = as_json(*arguments, *only)
    assert [row["section"] for row in found["rows"]] == ["machine", "machine", "training"]
    tables = motley(*arguments, *only).stdout
    assert all(
        word in tables
        for word in (
            "the machine",
            "GB/s",
            "against padded rows with full logits",
            "plain tokens per s",
        )
    )
    assert "section 'x' is not known; choose from machine" in error(*arguments, "--only", "x")


def test_bench_gpu_refuses_sizes_and_settings_that_it_does_not_know() -> None:
    arguments = ("bench", "gpu", "--device", "cpu", "--model", "tiny:0.3m")
    said = error(*arguments, "--size", "problem=3")
    assert "--size 'problem=3' is no size; write KEY=NUMBER" in said
    said = error(*arguments, "--learn", "master=bfloat16")
    assert "'master=bfloat16' is none of its settings" in said
    said = error(*arguments, "--trl", "float16")
    assert "--trl float16 is not known; choose from none, float32, bfloat16" in said


@pytest.mark.slow
def test_bench_gpu_has_a_row_for_each_way_to_learn() -> None:
    few = ("copied_bytes=1048576", "product=64", "repeats=1", "warms=1", "prompt=6", "new_tokens=5")
    sizes = [word for one in (*few, "problems=2", "samples=2") for word in ("--size", one)]
    lean = "optimizer=adamw8bit learning.token_budget=64"
    ways = ("--learn", "default", "--learn", lean, "--trl", "none")
    found = as_json(
        *("bench", "gpu", "--device", "cpu", "--model", "tiny:0.3m"),
        *("--only", "grpo", *ways, *sizes),
    )
    assert [row["learn"] for row in found["rows"]] == ["default", lean]
    assert all(row["seconds"] > 0 and row["trl_s"] is None for row in found["rows"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_gpu_without_one_says_so() -> None:
    assert "torch finds no CUDA GPU here" in error("bench", "gpu", "--model", "tiny:0.3m")


@pytest.mark.slow
def test_ctrl_c_finishes_the_round_saves_and_says_how_to_go_on(
    crew_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LocalCrew.rounds

    def interrupted(crew: LocalCrew) -> Iterator[list[LearnerLine]]:
        for lines in whole(crew):
            os.kill(os.getpid(), signal.SIGINT)
            yield lines

    monkeypatch.setattr(LocalCrew, "rounds", interrupted)
    run = tmp_path / "run"
    out = motley("train", crew_file, "--rounds", 3, "--out", run, code=130).stdout
    assert "stopping after this round" in out
    assert f"go on with: motley train --resume {run}" in out
    assert max(line.round for line in read_metrics(run)) == 1
    monkeypatch.undo()
    assert "--resume goes on with the run's own objective, seed" in error(
        "train", "--resume", run, "--seed", 5
    )
    assert "before → after" in motley("train", "--resume", run).stdout
    assert max(line.round for line in read_metrics(run)) == 3


@pytest.mark.slow
def test_a_second_ctrl_c_says_how_to_go_on_too(
    crew_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(crew: LocalCrew) -> Iterator[list[LearnerLine]]:
        raise KeyboardInterrupt
        yield []

    monkeypatch.setattr(LocalCrew, "rounds", torn)
    assert (
        "go on with: motley train --resume"
        in motley("train", crew_file, "--out", tmp_path / "run", code=130).stdout
    )


@pytest.mark.slow
def test_an_error_in_the_middle_says_how_to_go_on(
    crew_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(crew: LocalCrew) -> Iterator[list[LearnerLine]]:
        raise ValueError("the reward is no number")
        yield []

    monkeypatch.setattr(LocalCrew, "rounds", failing)
    run = tmp_path / "run"
    said = error("train", crew_file, "--out", run)
    assert said == f"error: the reward is no number; go on with: motley train --resume {run}"
    assert "go on with" not in error("train", tmp_path / "no.toml")


@pytest.mark.slow
def test_eval_of_a_saved_model_folder(trained: Path) -> None:
    newest = sorted((trained / "checkpoints").glob("round-*"))[-1]
    run = {
        row["peer"]: row["greedy"]
        for row in as_json("eval", trained, "--problems", 6, "--samples", 1)["rows"]
    }
    for peer in ("a", "b"):  # a whole model, and an adapter beside its base
        arguments = ("--problems", 6, "--samples", 1, "--split", "ood")
        (saved,) = [
            row
            for row in as_json("eval", newest / peer / "model", *arguments)["rows"]
            if row["kind"] == "all"
        ]
        assert saved["problems"] == 18
    assert run.keys() == {"a", "b"}
    assert "is no model folder" in error("eval", trained / "groups")


def test_arms_of_a_study_are_named_once(crew_file: Path) -> None:
    assert "name at least one arm, none twice" in error("study", crew_file, "--arms", "ftis ftis")
    assert "crew files need --arms" in error("study", crew_file)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("max_tokens = 2", "max_tokens = 1", "max_tokens=1 is too short for answers such as"),
        ("max_tokens = 2", "max_tokens = 60", "do not fit the 64 positions"),
        ('model = "tiny:0.3m"\ntrain', 'model = "tiny:7b"\ntrain', "model 'tiny:7b' is not known"),
        ("lora = { rank = 2 }", 'layers = "nothing"', "matches no parameter"),
        ("lora = { rank = 2 }", 'layers = "last:99"', "asks for more layers than the model has"),
        ("lora = { rank = 2 }", 'lora = { targets = ["lm_head"] }', "lm_head"),
        ("max_tokens = 2", "max_tokens = 2\nlr = 1e-4", "it belongs under [learning]"),
    ],
)
def test_what_cannot_work_is_said_before_any_training(
    old: str, new: str, words: str, tmp_path: Path
) -> None:
    assert old in CREW
    path = tmp_path / "crew.toml"
    path.write_text(CREW.replace(old, new))
    assert words in error("train", path, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_problem_files_are_found_beside_the_crew_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": f"sort {n}=", "answer": str(n % 10)} for n in range(10, 60)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = CREW.replace('"digits"', '"file:p.jsonl"').replace(
        '[task]\nkinds = ["compare"]\nlevels = [2]\n', ""
    )
    (tmp_path / "crew.toml").write_text(text)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = tmp_path / "run"
    motley("train", tmp_path / "crew.toml", "--rounds", 1, "--out", run)
    assert [
        row["kind"] for row in as_json("eval", run, "--problems", 2, "--samples", 1)["rows"]
    ] == ["all", "all"]
