"""A trained peer as a folder of its own: other tools load the very model that was trained, and the
card says how it came about.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

import motley.reports.export
from fakes import write_task
from marks import slow
from motley.cli import app
from motley.config import CrewConfig, Lora, TrainPart, parse_config
from motley.models.opening import saved_policy
from motley.reports.card import ExportedModel, card, hub_id, public_config
from motley.reports.export import export_model, learners_of
from motley.reports.scores import score_text
from motley.runs.building import trained_policies
from motley.runs.local import LocalCrew
from motley.runs.metrics import LearnerLine, read_metrics

CREW = """
[crew]
name = "trio"
task = "spread_reward:spread"
rounds = 2
group_size = 4
problems_per_round = 6
objective = "ftis"
seed = 5
[objective]
g = 0.5
[task]
file = "FOLDER/problems.jsonl"
ood = "FOLDER/problems.jsonl"
[sampling]
max_tokens = 5
temperature = 0.9
[learning]
lr = 2e-2
[evaluate]
every = 1
problems = 4
[[peer]]
name = "whole"
model = "tiny:0.3m"
[[peer]]
name = "thin"
model = "tiny:0.3m"
train = { lora = { rank = 2 } }
[[peer]]
name = "top"
model = "tiny:deep"
train = { layers = "last:1" }
"""
IDS = torch.tensor([[5, 12, 13, 14]])


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrewConfig]:
    """On a task where nearly every group has something to learn."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield parse_config(CREW.replace("FOLDER", str(folder)))


@pytest.fixture(scope="module")
def run(crew: CrewConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds."""
    folder = tmp_path_factory.mktemp("export") / "run"
    for _ in LocalCrew.start(crew, folder).rounds():
        pass
    return folder


@pytest.fixture(scope="module")
def trained(run: Path) -> dict[str, torch.Tensor]:
    """What every trained policy answers."""
    with torch.no_grad():
        found = {
            name: policy.model(input_ids=IDS).logits
            for name, policy in trained_policies(run).items()
        }
        start = AutoModelForCausalLM.from_pretrained(run / "start" / "thin")(input_ids=IDS).logits
    assert not torch.allclose(found["thin"], start, atol=1e-4), (
        "an adapter that changes nothing would test nothing"
    )
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Folders


@pytest.mark.parametrize("peer", ["whole", "top"])
def test_a_whole_model_is_an_ordinary_folder_with_the_trained_weights(
    peer: str, run: Path, trained: dict[str, Any], tmp_path: Path
) -> None:
    out = export_model(run, peer, tmp_path / "model")
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    } == names(out)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(out)), trained[peer], rtol=0, atol=1e-5
    )
    assert not any(str(run) in path.read_text() for path in out.glob("*.json"))
    assert AutoTokenizer.from_pretrained(out).encode("sort 12=") == AutoTokenizer.from_pretrained(
        run / "start" / peer
    ).encode("sort 12=")


@pytest.mark.slow
def test_answers_are_made_as_in_training(run: Path, tmp_path: Path) -> None:
    for merge in (False, True):
        out = export_model(run, "thin", tmp_path / str(merge), merge=merge)
        settings = GenerationConfig.from_pretrained(out)
        assert (settings.do_sample, settings.temperature, settings.top_k, settings.top_p) == (
            True,
            0.9,
            0,
            1.0,
        )
        assert settings.max_new_tokens == 5
        assert settings.eos_token_id == 1


def test_a_merged_adapter_is_one_ordinary_model(
    run: Path, trained: dict[str, Any], tmp_path: Path
) -> None:
    out = export_model(run, "thin", tmp_path / "merged", merge=True)
    assert not any(name.startswith("adapter") or name == "base" for name in names(out))
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(out)), trained["thin"], rtol=0, atol=1e-5
    )


@pytest.mark.slow
def test_an_adapter_whose_base_nobody_else_has_brings_it_along(
    run: Path, trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"  # the adapter of the checkpoint names a place that is no more
    shutil.copytree(run, moved)
    for path in moved.rglob("adapter_config.json"):
        assert str(run) in path.read_text()
    out = export_model(moved, "thin", tmp_path / "adapter")
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "base",
        "generation_config.json",
        "tokenizer.json",
    } < names(out)
    assert named_base(out) == str(out / "base")
    base = AutoModelForCausalLM.from_pretrained(out / "base")
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(base, out)), trained["thin"], rtol=0, atol=1e-5
    )
    monkeypatch.chdir(tmp_path.parent)  # PEFT looks for a path from wherever it is called
    torch.testing.assert_close(
        logits(AutoPeftModelForCausalLM.from_pretrained(out)), trained["thin"], rtol=0, atol=1e-5
    )
    elsewhere = out.rename(tmp_path / "elsewhere")  # it names a place that is no more
    torch.testing.assert_close(
        logits(saved_policy(elsewhere).model), trained["thin"], rtol=0, atol=1e-5
    )


def named_base(out: Path) -> str:
    return json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]


@pytest.mark.slow
def test_an_adapter_of_a_model_folder_names_it_and_plain_peft_finds_it(
    crew: CrewConfig, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = export_model(run, "whole", tmp_path / "own-base")
    monkeypatch.chdir(tmp_path)
    me = msgspec.structs.replace(crew.named("thin"), model="own-base")
    config = msgspec.structs.replace(crew.alone("thin"), peer=(me,))
    config = msgspec.structs.replace(config, crew=msgspec.structs.replace(config.crew, rounds=1))
    for _ in LocalCrew.start(config, tmp_path / "run").rounds():
        pass
    expected = logits(trained_policies(tmp_path / "run")["thin"].model)
    out = export_model(tmp_path / "run", "thin", tmp_path / "out")
    assert named_base(out) == str(base)
    assert "base" not in names(out)
    monkeypatch.chdir(tmp_path.parent)
    torch.testing.assert_close(
        logits(AutoPeftModelForCausalLM.from_pretrained(out)), expected, rtol=0, atol=1e-5
    )


def with_model(run: Path, model: str, folder: Path) -> Path:
    """The run as if peer thin had been made of another model, one that is not warmed."""
    shutil.copytree(run, folder)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(
        re.sub(r'(name = "thin"\nmodel = )"tiny:0.3m"', rf'\1"{model}"', text)
    )
    assert parse_config((folder / "config.toml").read_text()).named("thin").model == model
    return folder


def test_an_adapter_of_a_model_on_the_hub_names_it(run: Path, tmp_path: Path) -> None:
    out = export_model(
        with_model(run, "someone/model-1b", tmp_path / "run"), "thin", tmp_path / "adapter"
    )
    assert "base" not in names(out)
    assert (
        json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
        == "someone/model-1b"
    )
    text = (out / "README.md").read_text()
    assert 'base_model: "someone/model-1b"' in text
    assert 'from_pretrained("someone/model-1b")' in text


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_of_a_folder_that_only_this_machine_has(
    merge: bool, crew: CrewConfig, run: Path, tmp_path: Path
) -> None:
    base = export_model(run, "whole", tmp_path / "own-base")
    me = msgspec.structs.replace(crew.named("thin"), model=str(base), keep_layers=2)
    config = msgspec.structs.replace(crew.alone("thin"), peer=(me,))
    config = msgspec.structs.replace(config, crew=msgspec.structs.replace(config.crew, rounds=1))
    for _ in LocalCrew.start(config, tmp_path / "run").rounds():
        pass
    out = export_model(tmp_path / "run", "thin", tmp_path / "out", merge)
    model = AutoModelForCausalLM.from_pretrained(out if merge else out / "base")
    if not merge:
        model = PeftModel.from_pretrained(model, out)
    expected = logits(trained_policies(tmp_path / "run")["thin"].model)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    text = (out / "README.md").read_text()
    assert "- base model: own-base (only 2 of its layers)" in text
    assert str(tmp_path) not in text
    if merge:
        assert str(tmp_path) not in (out / "config.json").read_text()
    else:
        assert named_base(out) == str(out / "base")


@pytest.mark.parametrize(
    ("merge", "peer"), [(False, "whole"), slow(False, "thin"), slow(True, "thin")]
)
def test_weights_can_be_rounded(
    merge: bool, peer: str, run: Path, trained: dict[str, Any], tmp_path: Path
) -> None:
    out = export_model(run, peer, tmp_path / "small", merge, "bfloat16")
    adapter = peer == "thin" and not merge
    model = AutoModelForCausalLM.from_pretrained(out / "base" if adapter else out)
    assert model.dtype == torch.bfloat16
    if adapter:
        model = PeftModel.from_pretrained(model, out)
    difference = (logits(model.float()) - trained[peer]).abs().max()
    assert 0 < difference < 0.1


def test_the_run_is_only_read(run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    export_model(run, "thin", tmp_path / "out", merge=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


# The card


def text_of(run: Path, peer: str, folder: Path, merge: bool = False) -> str:
    return (export_model(run, peer, folder, merge) / "README.md").read_text()


def test_the_card_says_how_it_was_trained_and_with_whom(run: Path, tmp_path: Path) -> None:
    text = text_of(run, "thin", tmp_path / "thin")
    assert text.startswith('---\nbase_model: "tiny:0.3m"\nlibrary_name: "peft"\n')
    assert 'tags: ["motley", "reinforcement-learning"]' in text
    assert "peer `thin` of the crew `trio`, with `whole`, `top`, after round 2 of 2" in text
    for line in (
        "- trained: LoRA of rank 2, alpha 4, on every linear layer",
        '- task: spread_reward:spread with file="problems.jsonl", ood="problems.jsonl"',
        "- objective: ftis with g=0.5",
        "- rounds: 2 of 2; 2 optimiser steps",
        "- seed: 5",
        "- learning rate: 0.02, gradients clipped at 1.0",
    ):
        assert line in text.splitlines() or any(
            found.startswith(line) for found in text.splitlines()
        ), line
    assert "temperature=0.9" in text
    assert 'library_name: "transformers"' in text_of(run, "thin", tmp_path / "merged", merge=True)


def test_the_card_counts_what_was_learned_from_whom(run: Path, tmp_path: Path) -> None:
    lines = [
        line for line in read_metrics(run) if line.peer == "whole" and line.senders is not None
    ]
    counted = {
        name: sum(line.senders[name].groups for line in lines) for name in ("whole", "thin", "top")
    }
    rows = {
        row[1].strip("* "): row
        for row in (
            line.split(" | ") for line in text_of(run, "whole", tmp_path / "out").splitlines()
        )
        if len(row) == 9
        for row in [["", *[cell.strip("| ") for cell in row]]]
    }
    assert set(counted) <= rows.keys()
    for name, count in counted.items():
        assert rows[name][4] == str(count)
        assert rows[name][5] == f"{count / sum(counted.values()):.0%}"
    assert rows["top"][2:4] == ["tiny:deep", "layers last:1"]


def test_the_card_compares_rewards_before_and_after(run: Path, tmp_path: Path) -> None:
    measured = [
        line for line in read_metrics(run) if line.peer == "whole" and line.heldout is not None
    ]
    text = text_of(run, "whole", tmp_path / "out")
    for split in ("heldout", "ood"):
        for kind in ("reverse", "sort"):
            before, after = (getattr(line, split)[kind] for line in (measured[0], measured[-1]))
            scores = f"{score_text(before, 'reward')} | {score_text(after, 'reward')}"
            assert f"| {split} | {kind} | {scores} |\n" in text


def test_the_card_compares_accuracies_before_after_and_with_a_constant_answer() -> None:
    files = 'file = "FOLDER/problems.jsonl"\nood = "FOLDER/problems.jsonl"'
    digits = 'kinds = ["sort"]\nlevels = [3]'
    config = parse_config(
        CREW.replace("spread_reward:spread", "digits").replace(files, digits), source="here"
    )
    lines = [
        LearnerLine(round=n, peer="whole", heldout={"sort": a}) for n, a in ((0, 0.25), (2, 0.5))
    ]
    made = ExportedModel(
        folder="out", config=config, me=config.peer[0], lines=lines, adapter=False,
        own_base=False, dtype="float32",
    )  # fmt: skip
    assert re.search(r"\| heldout \| sort \| 25% \| 50% \| \d+% \|", card(made))


def test_lines_written_after_the_checkpoint_are_not_in_the_card(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(
            msgspec.json.encode(
                {"round": 3, "peer": "whole", "version": 3, "heldout": {"sort": 0.123}}
            )
            + b"\n"
        )
    assert "12%" not in text_of(tmp_path / "run", "whole", tmp_path / "out")


def test_the_crew_file_in_the_card_is_the_crew(run: Path, tmp_path: Path) -> None:
    toml = text_of(run, "whole", tmp_path / "out").split("```toml\n")[1].split("```")[0]
    config = parse_config((run / "config.toml").read_text())
    named = msgspec.structs.replace(
        config, task={"file": "problems.jsonl", "ood": "problems.jsonl"}
    )
    assert parse_config(toml) == named


@pytest.mark.parametrize(("peer", "merge"), [("whole", False), ("thin", False), ("thin", True)])
def test_the_code_in_the_card_works(
    peer: str, merge: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code = text_of(run, peer, tmp_path / "out", merge).split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(code, {"prompt": "sort 12="})
    assert capsys.readouterr().out.endswith("\n")


PLACES = """
[crew]
name = "far"
task = "file:/home/me/secret/sums.jsonl"
rounds = 1
group_size = 4
problems_per_round = 2
objective = "ftis"
[task]
heldout = "/home/me/secret/held.jsonl"
[[peer]]
name = "a"
model = "/home/me/models/mine"
engine = { openai = { url = "http://10.0.0.3:8000/v1" } }
[[peer]]
name = "b"
model = "~/files/other.gguf"
engine = { vllm = { python = "/opt/vllm/bin/python" } }
"""


def exported(config: CrewConfig, peer: str, **changes: Any) -> ExportedModel:
    facts = {
        "folder": "out",
        "config": config,
        "me": config.named(peer),
        "lines": [],
        "adapter": False,
        "own_base": False,
        "dtype": "float32",
    }
    return ExportedModel(**(facts | changes))


def test_no_place_of_this_machine_is_in_a_card() -> None:
    config = parse_config(PLACES)
    for text in (
        public_config(config),
        card(exported(config, "a")),
        card(exported(config, "b", adapter=True, own_base=True)),
    ):
        assert not re.search(r"/home|secret|~|10\.0\.0\.3|/opt", text)
    assert 'base_model: "mine"' in card(exported(config, "a"))
    assert 'base_model: "other.gguf"' in card(exported(config, "b"))
    assert 'task = "file:sums.jsonl"' in public_config(config)
    assert parse_config(public_config(config)).named("a").model == "mine"


def test_a_card_can_be_written_when_the_problems_are_gone() -> None:
    lines = [
        LearnerLine(round=0, peer="a", heldout={"all": 0.5}),
        LearnerLine(round=1, peer="a", heldout={"all": 0.75}),
    ]
    assert "| heldout | all | 50% | 75% |  |" in card(
        exported(parse_config(PLACES), "a", lines=lines)
    )


def test_refused_and_dropped_are_said() -> None:
    line = LearnerLine(
        round=1,
        peer="a",
        refused={"unknown": {"corrupt": 2}},
        dropped={"b": {"stale": 1, "late": 3}},
    )
    text = card(exported(parse_config(PLACES), "a", lines=[line]))
    assert "- refused of unknown: 2 corrupt\n- dropped of b: 1 stale, 3 late" in text


def test_ids_of_the_hub_are_told_from_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id("someone/model") == "someone/model"
    assert hub_id("gpt2") == "gpt2"
    for other in ("tiny:1m", "smollm2-135m", "a/b/c", "/abs", "~/mine", "x.gguf", "org/model"):
        assert hub_id(other) == ""


# Errors


def test_what_is_there_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_model(run, "whole", tmp_path / "out")  # empty: it may be
    with pytest.raises(
        ValueError, match=r"is already there and not an empty folder; choose another, or delete it"
    ):
        export_model(run, "whole", tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is already there"):
        export_model(run, "whole", tmp_path / "file")


@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_leaves_nothing(
    existing: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(facts: ExportedModel, folder: Path) -> None:
        assert (folder / "model.safetensors").exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    if existing:
        (tmp_path / "out").mkdir()
    monkeypatch.setattr(motley.reports.export, "_write_card", full)
    with pytest.raises(
        ValueError,
        match=r"out could not be written: No space left on device; nothing was left there",
    ):
        export_model(run, "whole", tmp_path / "out")
    assert names(tmp_path) == ({"out"} if existing else set())
    assert not existing or not names(tmp_path / "out")


def test_mistakes_are_answered_in_a_line(run: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ((run, "nobody"), "has no peer 'nobody' that learns; it has whole, thin, top"),
        ((tmp_path, "whole"), "is not a run folder: it has no config.toml"),
    ):
        with pytest.raises(ValueError, match=words):
            export_model(*arguments, tmp_path / "out")
    with pytest.raises(ValueError, match="peer whole trains no adapter"):
        export_model(run, "whole", tmp_path / "out", merge=True)
    assert names(tmp_path) == set()


def test_a_checkpoint_that_was_changed_is_not_exported(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    newest = (
        tmp_path / "run" / "checkpoints" / "round-000002" / "whole" / "model" / "model.safetensors"
    )
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="is missing or changed since it was saved"):
        export_model(tmp_path / "run", "whole", tmp_path / "out")


# The command


@pytest.mark.slow
def test_the_command_asks_for_a_peer_where_several_learn(run: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out")])
    assert said.exit_code == 2
    assert "has 3 peers that learn; choose one with --peer: whole, thin, top" in said.stderr
    done = CliRunner().invoke(
        app,
        [
            "export",
            str(run),
            str(tmp_path / "out"),
            "--peer",
            "thin",
            "--merge",
            "--dtype",
            "bfloat16",
        ],
    )
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_command_needs_no_peer_where_one_learns(crew: CrewConfig, tmp_path: Path) -> None:
    config = crew.alone("whole")
    config = msgspec.structs.replace(config, crew=msgspec.structs.replace(config.crew, rounds=1))
    for _ in LocalCrew.start(config, tmp_path / "run").rounds():
        pass
    assert learners_of(tmp_path / "run") == ["whole"]
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "in a crew of different" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_a_merged_adapter_beside_four_bits_is_what_trained(
    crew: CrewConfig, tmp_path: Path
) -> None:
    lora = Lora(rank=2, bits=4)
    thin = msgspec.structs.replace(crew.named("thin"), train=TrainPart(lora=lora))
    run = tmp_path / "run"
    for _ in LocalCrew.start(
        msgspec.structs.replace(crew, peer=(crew.peer[0], thin, crew.peer[2])), run
    ).rounds():
        pass
    (trained,) = [p for name, p in trained_policies(run).items() if name == "thin"]
    out = export_model(run, "thin", tmp_path / "merged", merge=True)
    expected = logits(trained.model)
    made = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(made), expected, rtol=0, atol=1e-5)
    beside = export_model(run, "thin", tmp_path / "adapter")
    adapted = AutoPeftModelForCausalLM.from_pretrained(beside)
    torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=1e-5)
    whole = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(run / "start" / "thin"), beside
    )
    assert not torch.allclose(logits(whole), expected, atol=1e-4)
    assert "beside linear layers held in 4 bits (NF4)" in (beside / "README.md").read_text()
