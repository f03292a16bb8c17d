"""What one writes of a peer becomes a [[peer]] of a crew file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from motley.api.peer import Peer, names_of
from motley.models.tiny import tiny_model
from motley.tasks import load_task

DIGITS = load_task("digits", {"kinds": ["sort", "reverse"], "levels": [2]})


def table(peer: Peer) -> dict[str, Any]:
    return peer.table("ann", lambda model, tokenizer, name: f"/stored/{name}", DIGITS)


def test_only_what_was_said_is_written() -> None:
    assert table(Peer("tiny:1m", dtype="auto")) == {"name": "ann", "model": "tiny:1m"}
    assert table(Peer("tiny:1m", device=0))["device"] == 0, "no zero that means something is lost"


def test_a_path_where_something_lies_is_no_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "m" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert table(Peer(Path("./m/llama")))["model"] == str(tmp_path / "m" / "llama")
    assert table(Peer(Path("tiny:1m")))["model"] == "tiny:1m"


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("lora", {"lora": {}}),
        ({"layers": "last:2"}, {"layers": "last:2"}),
        (
            LoraConfig(r=4, lora_alpha=16, target_modules=["v_proj", "q_proj"]),
            {"lora": {"rank": 4, "alpha": 16.0, "targets": ["q_proj", "v_proj"]}},
        ),
        (
            LoraConfig(r=4, target_modules="all-linear"),
            {"lora": {"rank": 4, "alpha": 8.0, "targets": []}},
        ),
    ],
)
def test_what_trains_is_said_in_many_ways(train: Any, expected: object) -> None:
    assert table(Peer("tiny:1m", train=train))["train"] == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_dropout": 0.1, "target_modules": ["q_proj"]}, "lora_dropout=0.1 is not supported"),
        ({"target_modules": ".*_proj"}, "is a pattern"),
    ],
)
def test_what_a_peer_cannot_do_of_a_lora_config_is_refused(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        table(Peer("tiny:1m", train=LoraConfig(**given)))


def test_a_number_warms_every_kind() -> None:
    warmed = table(Peer("tiny:1m", warm=0.3))["warm"]
    assert warmed == {"accuracy": {"sort": 0.3, "reverse": 0.3}}


def test_names_come_from_models_and_are_never_the_same() -> None:
    peers = [
        Peer("Qwen/Qwen2.5-0.5B"),
        Peer("tiny:1m"),
        Peer("./models/Qwen2.5-0.5B/"),
        Peer("/x/smol.gguf"),
        Peer("tiny:1m", name="ann"),
    ]
    assert names_of(peers) == ["qwen2-5-0-5b", "1m", "qwen2-5-0-5b-2", "smol", "ann"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train": "lora16"}, "train='lora16'; expected 'full', 'lora', {'lora': {'rank': 16}}"),
        ({"train": None}, "train=None; expected 'full'"),
        ({"train": ["lora"]}, r"train=\['lora'\]; expected 'full'"),
        ({"warm": True}, "warm=True; expected a share of right answers"),
        ({"warm": "0.3"}, "warm='0.3'; expected a share of right answers"),
        ({"model": 3}, "model is a int; expected a Hugging Face id"),
        ({"model": ["tiny:1m"]}, "model is a list; expected a Hugging Face id"),
        ({"model": tiny_model("0.3m", 0)}, "a model object needs its tokenizer"),
        ({"tokenizer": "gpt2"}, "tokenizer is for a model object; tiny:1m brings its own"),
    ],
)
def test_what_no_peer_can_be_is_refused_where_it_is_written(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Peer(**({"model": "tiny:1m"} | given))


def test_a_keyword_that_is_not_known_names_the_one_that_is_meant() -> None:
    with pytest.raises(TypeError, match="Peer has no 'nam'; did you mean name"):
        Peer("tiny:1m", nam="ann")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Peer has no 'learning_rate'; did you mean lr"):
        Peer("tiny:1m", learning_rate=1e-3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Peer takes only model without a name, and got 2 values"):
        Peer("tiny:1m", "ann")  # type: ignore[misc]
