"""motley new: a crew file for the models and data that are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_cli import error, motley
from motley.config import read_config
from motley.runs.drafting import Draft, DraftData, DraftModel
from motley.runs.metrics import read_metrics


def sums(path: Path, names: str = "question,solution", count: int = 50) -> Path:
    rows = [f"sum {n}+3=,{n + 3}" for n in range(10, 10 + count)]
    path.write_text("\n".join([names, *rows]) + "\n")
    return path


def words(path: Path) -> Path:
    lines = [{"problem": f"What is {n} and 3?", "label": str(n + 3)} for n in range(10, 60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def model_folder(path: Path, chat: bool) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}' if chat else "{}")
    return path


def test_without_options_it_is_an_example_of_tiny_models(tmp_path: Path) -> None:
    out = tmp_path / "crew.toml"
    assert f"motley train {out}" in motley("new", "--out", out).stdout
    config = read_config(out)
    assert [peer.model for peer in config.peer] == ["tiny:0.3m", "tiny:deep", "tiny:1m"]
    assert config.crew.task == "digits"
    assert all(peer.warm for peer in config.peer)


def test_every_line_has_its_reason(tmp_path: Path) -> None:
    out = tmp_path / "crew.toml"
    motley("new", "--data", sums(tmp_path / "p.csv"), "--out", out)
    lines = out.read_text().splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if " = " in line and not line.startswith("#"):
            assert "  # " in line or before.startswith("# "), line
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.slow
def test_what_it_writes_for_tiny_models_trains(tmp_path: Path) -> None:
    out = tmp_path / "crew.toml"
    data = sums(tmp_path / "problems.csv")
    said = motley("new", "--data", data, "--model", "tiny:0.3m", "--model", "tiny:1m:lora4",
                  "--out", out).stdout  # fmt: skip
    assert "prompt is question" in said
    config = read_config(out)
    assert config.task["fields"] == {"prompt": "question", "answer": "solution"}
    assert config.sampling.max_tokens == 3
    assert config.crew.problems_per_round % 2 == 0
    motley("train", out, "--set", "crew.rounds=1", "--set", "evaluate.problems=2",
           "--set", "peer.*.warm.steps=5", "--out", tmp_path / "run", "-q")  # fmt: skip
    assert [line.round for line in read_metrics(tmp_path / "run")] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("vocabulary", "num_digits", "max_tokens"),
    [("words", 40, 2), ("bytes", 40, 6), ("words", 55, 2), ("bytes", 55, None)],
)
def test_a_tiny_model_of_bytes_has_longer_prompts_and_answers(
    vocabulary: str, num_digits: int, max_tokens: int | None, tmp_path: Path
) -> None:
    """None: they do not fit its positions."""
    first = 10 ** (num_digits - 1)
    rows = [{"prompt": f"reverse {first + n}=", "answer": "sort "} for n in range(20)]
    (tmp_path / "p.json").write_text(json.dumps(rows))
    command = ["new", "--data", tmp_path / "p.json", "--model", f"tiny:0.3m/{vocabulary}"]
    command += ["--out", tmp_path / "crew.toml"]
    if max_tokens is None:
        assert "of up to 70 tokens do not fit the 64 positions" in error(*command)
        return
    motley(*command)
    assert read_config(tmp_path / "crew.toml").sampling.max_tokens == max_tokens


def test_chat_adapters_and_paths_beside_the_crew_file(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "models" / "mine", chat=True)
    out = tmp_path / "crews" / "crew.toml"
    motley("new", "--model", folder, "--model", "org/Some-Instruct:lora16",
           "--model", "org/Some-Instruct:last2", "--data", words(tmp_path / "p.jsonl"),
           "--field", "answer=label", "--out", out)  # fmt: skip
    config = read_config(out)
    assert config.prompt.style == "chat"
    assert config.task["form"] == "boxed"
    assert config.task["fields"] == {"prompt": "problem", "answer": "label"}
    assert config.crew.problems_per_round % 3 == 0
    mine, adapter, layers = config.peer
    assert mine.model == str(folder)
    assert adapter.lr > config.learning.lr == 1e-5
    assert not isinstance(adapter.train, str)
    assert adapter.train.lora
    assert adapter.train.lora.rank == 16
    assert not isinstance(layers.train, str)
    assert layers.train.layers == "last:2"
    assert len({peer.name for peer in config.peer}) == 3


def test_a_base_model_and_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(Path("base"), chat=False)
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    said = motley("new", "--model", "./base", "--data", "p.jsonl", "--reward", "mine:score", "-q")
    assert "warning: there is no mine.py beside crew.toml yet" in said.stderr
    config = read_config(Path("crew.toml"))
    assert config.prompt.style == "plain"
    assert config.task["reward"] == "mine:score"
    assert (config.crew.objective, len(config.peer)) == ("alone", 1)
    assert 'model = "./base"' in Path("crew.toml").read_text()
    assert 'task = "file:p.jsonl"' in Path("crew.toml").read_text()


def test_kinds_are_taken_where_each_has_some_to_hold_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"sum {n}+3=", "answer": f"{n + 3}", "type": "ab"[n % 2]} for n in range(99)]
    (tmp_path / "many.json").write_text(json.dumps(rows))
    (tmp_path / "few.json").write_text(json.dumps(rows[:6]))
    assert DraftData.of(tmp_path / "many.json", {}, False).kinds == ("a", "b")
    assert DraftData.of(tmp_path / "few.json", {}, False).kinds == ("all",)


def test_gsm8k_is_known_by_its_rows(tmp_path: Path) -> None:
    lines = [{"question": f"{n}?", "answer": f"so\n#### {n}"} for n in range(20)]
    (tmp_path / "g.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DraftData.of(tmp_path / "g.jsonl", {}, False)
    text = Draft(tmp_path / "crew.toml", (DraftModel.of("org/x-it"),), data).text()
    assert 'task = "gsm8k"' in text


def test_nonsense_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "crew.toml"
    there = {path.name for path in tmp_path.iterdir()}
    one = sums(tmp_path / "one.csv", count=1)
    other = sums(tmp_path / "other.csv", names="question,remark")
    text = words(tmp_path / "p.jsonl")
    wrong = [
        (["--data", one], "has 1 problems; at least 2 are needed"),
        (["--data", other], "no field looks like the answer; its fields are question, remark"),
        (["--data", other, "--field", "answer=x"], "one of the fields of"),
        (["--data", other, "--field", "answer"], "is not NAME=FIELD"),
        (["--data", text, "--field", "answer=label"], "tiny models speak digits"),
        (["--data", tmp_path / "none.csv"], "cannot read problems from"),
        (["--data", tmp_path / "none.txt"], "cannot tell the format"),
        (["--model", "./none"], "there is no model folder ./none"),
        (["--model", "tiny:9m"], "model 'tiny:9m' is not known"),
        (["--model", "smollm2"], "did you mean smollm2-135m?"),
        (["--model", "tiny:1m", "--model", "org/x"], "name tiny models only, or none"),
        (["--reward", "mine:score"], "give them with --data"),
        (["--data", text, "--reward", "mine"], "is not module:function"),
    ]
    for options, words_of in wrong:
        assert words_of in error("new", "--out", out, *options), options
    assert not out.exists()
    assert there == set()


def test_new_counts_rows_as_check_does(tmp_path: Path) -> None:
    for name, rows, place in (
        ("p.csv", "prompt,answer\nsort 21=,12\nsort 31=,x\n", "p.csv:3"),
        ("p.jsonl", '{"prompt": "x", "answer": "1"}\n' * 2, "p.jsonl:1"),
        ("p.json", '[{"prompt": "sort 21=", "answer": "1"}, {"prompt": "x", "answer": "1"}]',
         "p.json row 2"),
    ):  # fmt: skip
        (tmp_path / name).write_text(rows)
        said = error("new", "--data", tmp_path / name, "--out", tmp_path / "crew.toml")
        assert f"{tmp_path / place}: tiny models" in said


def test_nothing_is_written_over_unless_it_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "crew.toml"
    out.write_text("mine")
    assert "exists; choose another file with --out, or give --force" in error("new", "--out", out)
    assert out.read_text() == "mine"
    motley("new", "--out", out, "--force")
    assert read_config(out)
