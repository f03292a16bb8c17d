"""What one writes of a peer becomes a [[peer]] of a crew file."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig

from motley.api.peer import Peer, names_of
from motley.tasks import load_task

DIGITS = load_task("digits", {"kinds": ["sort", "reverse"], "levels": [2]})


def table(peer: Peer) -> dict[str, Any]:
    return peer.table("ann", lambda model, tokenizer, name: f"/stored/{name}", DIGITS)


def test_only_what_was_said_is_written() -> None:
    assert table(Peer("tiny:1m")) == {
        "name": "ann",
        "model": "tiny:1m",
        "device": "auto",
        "dtype": "auto",
        "engine": "torch",
        "optimizer": "adamw",
        "masters": "float32",
        "role": "peer",
        "train": "full",
    }


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
