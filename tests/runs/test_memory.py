"""What `motley fit` says of crews, without weights and without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config
from typer.testing import CliRunner

from motley.cli import app
from motley.config import CrewConfig, parse_config
from motley.models.tiny import tiny_vocabulary
from motley.runs.evaluation import AT_ONCE
from motley.runs.memory import PeerMemory, crew_memory, parse_memory
from motley.tasks import evaluation_set, load_task

GIB = 2**30
CREW = """
[crew]
name = "large"
task = "digits"
objective = "grpo"
rounds = 1
group_size = 8
problems_per_round = 64

[sampling]
max_tokens = 128

[[peer]]
name = "ann"
model = "{model}"
{keys}
"""
SHAPE_1400M = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 5632,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SHAPE_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that have a configuration and a tokenizer, and no weights."""
    made = {"1.4b": LlamaConfig(**SHAPE_1400M), "7b": Qwen2Config(**SHAPE_7B)}
    place = tmp_path_factory.mktemp("shapes")
    for name, config in made.items():
        config.architectures = ["LlamaForCausalLM" if name == "1.4b" else "Qwen2ForCausalLM"]
        config.save_pretrained(place / name)
        tiny_vocabulary().save(place / name)
    return {name: place / name for name in made}


def a_crew(model: Path | str, keys: str = "") -> CrewConfig:
    return parse_config(CREW.format(model=model, keys=keys))


def taken(model: Path | str, keys: str = "", memory: int = 139 * GIB) -> PeerMemory:
    (one,) = crew_memory(a_crew(model, keys), memory)
    return one


def test_most_of_a_model_of_1400m_are_activations(folders: dict[str, Path]) -> None:
    one = taken(folders["1.4b"])
    assert one.fits
    assert not one.changes
    assert one.takes["activations"] > one.takes.nbytes / 3
    fewer = taken(folders["1.4b"], "gradient_checkpointing = true")
    assert fewer.takes.nbytes < one.takes.nbytes


def test_seven_billion_in_full_do_not_fit_as_they_are_and_a_lora_does(
    folders: dict[str, Path],
) -> None:
    full = taken(folders["7b"])
    assert not full.fits
    assert full.changes[-1].fits
    assert full.changes[-1].gib * GIB < 139 * GIB
    assert taken(folders["7b"], "train = { lora = { rank = 16 } }").fits


def test_four_bits_let_seven_billion_train_on_a_gpu_that_a_lora_does_not_fit(
    folders: dict[str, Path],
) -> None:
    keys = "train = { lora = { rank = 16%s } }\ngradient_checkpointing = true"
    half, four = (taken(folders["7b"], keys % bits, memory=24 * GIB) for bits in ("", ", bits = 4"))
    assert not half.fits
    assert four.fits
    assert [change.change for change in half.changes][-1] == "bits = 4 in train = { lora = { … } }"
    assert half.changes[-1].fits
    assert half.changes[-1].gib * GIB < four.takes.nbytes  # beside what was told before it
    # 6.5 of 7.6 billion values, at 2 and at .5625 bytes
    saved = half.takes["weights"] - four.takes["weights"]
    assert saved == pytest.approx(6.525e9 * (2 - 0.5625), rel=0.01)


def test_changes_are_told_until_they_suffice_and_each_takes_less(folders: dict[str, Path]) -> None:
    one = taken(folders["1.4b"], memory=60 * GIB)
    assert not one.fits or one.token_budget < 1 << 15
    small = taken(folders["1.4b"], memory=30 * GIB)
    assert not small.fits
    sizes = [small.takes.nbytes / GIB, *(change.gib for change in small.changes)]
    assert sizes == sorted(sizes, reverse=True)
    assert [change.fits for change in small.changes[:-1]] == [False] * (len(small.changes) - 1)


def test_what_is_measured_takes_room_beside_what_learns(folders: dict[str, Path]) -> None:
    """Room is for the largest call: 64 problems x 8 of a round, or all that is asked at a time."""
    few, many, more = (
        taken(folders["1.4b"], f"[evaluate]\nproblems = {count}")  # of each of three kinds
        for count in (12, 80, 90)
    )
    token = 2 * 24 * 2048 * 2  # bytes: a key and a value in each layer
    assert len(evaluation_set(load_task("digits", {}), "heldout", 12)) == 36
    assert few.takes["keys and values"] < many.takes["keys and values"]
    # 240 prompts and not 64, padded to 64 tokens
    rise = many.takes["keys and values"] - few.takes["keys and values"]
    assert rise == (240 - 64) * 64 * token
    most = more.takes["keys and values"] - few.takes["keys and values"]
    assert most == (AT_ONCE - 64) * 64 * token


def test_a_tiny_peer_is_counted_on_the_cpu(tmp_path: Path) -> None:
    one = taken("tiny:0.3m")
    assert not one.device.is_gpu
    assert one.fits
    assert one.takes["CUDA"] == 0


def test_a_learner_has_room_for_what_it_is_measured_by_and_a_sampler_has_no_gradients(
    folders: dict[str, Path],
) -> None:
    text = CREW.format(model=folders["1.4b"], keys='role = "learner"').replace(
        'objective = "grpo"', 'objective = "grpo"\npace = "async"'
    )
    config = parse_config(text + '[[peer]]\nname = "bob"\nrole = "sampler"\nfollows = "ann"\n')
    ann, bob = crew_memory(config, 139 * GIB)
    assert min(ann.takes["keys and values"], ann.takes["gradients"]) > 0
    assert bob.takes["gradients"] == 0 < bob.takes["keys and values"]
    # of the learner 64 problems of each of three kinds, and of the sampler 64 x 8 completions
    token, answer = 2 * 24 * 2048 * 2, 128
    apart = bob.takes["keys and values"] - ann.takes["keys and values"]
    tables = (64 * 8 - 192) * answer * 20
    assert apart - tables == ((64 - 192) * 64 + (64 * 8 - 192) * answer) * token


@pytest.mark.parametrize(
    ("text", "expected"), [("139GiB", 139 * GIB), ("80 GB", 80 * 10**9), ("512MiB", 2**29)]
)
def test_sizes_are_read_with_their_unit(text: str, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["139", "big", "-3GiB", "0GiB", "3 gigs"])
def test_a_size_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 139GiB"):
        parse_memory(text)


def test_the_command_prints_one_object_and_fails_where_something_does_not_fit(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    crew = tmp_path / "crew.toml"
    crew.write_text(CREW.format(model=folders["7b"], keys=""))
    done = CliRunner().invoke(app, ["fit", str(crew), "--memory", "139GiB", "--json"])
    assert done.exit_code == 1
    told = json.loads(done.output)
    assert told["rows"][0]["result"] == "too large"
    assert {row["part"] for row in told["parts"]} >= {"weights", "optimiser", "activations"}
    assert told["changes"][-1]["fits"]
    done = CliRunner().invoke(app, ["fit", str(crew), "--memory", "139GiB", "--peer", "bob"])
    assert done.exit_code == 2
    assert "it has ann" in done.output


def test_a_gpu_that_is_not_here_must_be_named(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="--memory 80GiB"):
        crew_memory(a_crew(folders["1.4b"], 'device = "cuda"'))
