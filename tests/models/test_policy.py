from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from fakes import POLICIES, lora_policy, reference_logp, tiny_policy
from motley.config import Lora, PeerConfig, Prompt, TrainPart
from motley.models.opening import check_peer, initial_policy
from motley.models.policy import Policy
from motley.models.tiny import SHAPES, tiny_model, tiny_vocabulary
from motley.records import Problem
from motley.tasks import load_task

PROMPT, TOKENS = (5, 12, 13), (14, 15, 1)


@pytest.mark.parametrize("kind", POLICIES)
def test_a_saved_policy_loads_into_a_fresh_one(kind: str, tmp_path: Path) -> None:
    saved, other = POLICIES[kind](seed=1), POLICIES[kind](seed=1)
    with torch.no_grad():
        for _, parameter in other.trained():
            parameter.add_(0.5)
    saved.save(tmp_path)
    other.load(tmp_path)
    for (name, ours), (_, theirs) in zip(other.trained(), saved.trained(), strict=True):
        assert torch.equal(ours, theirs), name
    assert torch.equal(reference_logp(other, PROMPT, TOKENS), reference_logp(saved, PROMPT, TOKENS))


def test_a_saved_policy_is_an_ordinary_transformers_folder(tmp_path: Path) -> None:
    policy = tiny_policy(seed=2)
    policy.save(tmp_path)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    loaded = Policy(model, policy.vocabulary)
    torch.testing.assert_close(
        reference_logp(loaded, PROMPT, TOKENS),
        reference_logp(policy, PROMPT, TOKENS),
        rtol=0,
        atol=1e-6,
    )
    assert tokenizer("reverse 12=", add_special_tokens=False)[
        "input_ids"
    ] == policy.vocabulary.encode("reverse 12=")
    assert tokenizer.eos_token_id == policy.vocabulary.end_id


@pytest.mark.slow
def test_a_saved_lora_policy_is_an_ordinary_adapter_folder(tmp_path: Path) -> None:
    base = tiny_policy(seed=3)
    base.save(tmp_path / "base")
    policy = lora_policy(seed=3)
    policy.base.load_state_dict(base.base.state_dict(), strict=False)
    policy.model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    policy.save(tmp_path / "adapter")
    loaded = Policy(
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"), policy.vocabulary
    )
    torch.testing.assert_close(
        reference_logp(loaded, PROMPT, TOKENS),
        reference_logp(policy, PROMPT, TOKENS),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("layers", "trained"),
    [
        ("last:1", {"model.layers.2"}),
        ("last:2", {"model.layers.1", "model.layers.2"}),
        ("first:1", {"model.layers.0"}),
        ("model.norm, model.layers.1.mlp", {"model.norm", "model.layers.1"}),
    ],
)
def test_only_the_chosen_layers_train(layers: str, trained: set[str]) -> None:
    names = [name for name, _ in tiny_policy(TrainPart(layers=layers)).trained()]
    assert {".".join(name.split(".")[: 3 if "layers" in name else 2]) for name in names} == trained


@pytest.mark.parametrize("layers", ["first:0", "last:0", "nothing"])
def test_layers_that_match_nothing_are_refused(layers: str) -> None:
    with pytest.raises(ValueError, match=rf"train layers='{layers}' .*; use "):
        tiny_policy(TrainPart(layers=layers))


def test_lora_trains_its_adapters_only_and_starts_as_the_base_model() -> None:
    plain, adapted = (
        tiny_policy(seed=4),
        tiny_policy(TrainPart(lora=Lora(rank=2, targets=("q_proj", "up_proj"))), seed=4),
    )
    assert {name.split(".")[-4] for name, _ in adapted.trained()} == {"q_proj", "up_proj"}
    assert all("lora_" in name for name, _ in adapted.trained())
    assert torch.equal(
        reference_logp(plain, PROMPT, TOKENS), reference_logp(adapted, PROMPT, TOKENS)
    )


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_rng_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = (lora_policy(seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    value = lambda policy: torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    assert torch.equal(value(first), value(second))
    assert not torch.equal(value(first), value(other))


@pytest.mark.slow
def test_the_fingerprint_names_the_architecture_not_the_weights() -> None:
    fingerprints = {
        Policy(tiny_model(name, seed=0), tiny_vocabulary()).fingerprint for name in SHAPES
    }
    assert len(fingerprints) == len(SHAPES)
    assert (
        tiny_policy(seed=1).fingerprint
        == tiny_policy(seed=2).fingerprint
        == lora_policy().fingerprint
    )


def test_an_unknown_model_is_refused_with_those_that_exist() -> None:
    task = load_task("digits", {})
    with pytest.raises(ValueError, match=r"is not known; use tiny:0\.3m, tiny:1m"):
        check_peer(
            PeerConfig(name="a", model="tiny:9b"),
            Prompt(),
            task,
            [Problem(prompt="sort 21=", answer="12")],
            max_tokens=4,
        )


def test_peers_of_different_names_start_differently() -> None:
    first, second = (
        initial_policy(PeerConfig(name=name, model="tiny:0.3m"), seed=0) for name in "ab"
    )
    assert not torch.equal(next(first.model.parameters()), next(second.model.parameters()))


def test_an_adapter_on_layers_that_are_not_there_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"lora targets name 'c_attn', which no layer is called; it has q_proj, k"
    ):
        tiny_policy(TrainPart(lora=Lora(targets=("q_proj", "c_attn"))))


def test_an_adapter_on_the_embeddings_is_refused() -> None:
    with pytest.raises(
        ValueError, match="lora targets name embed_tokens, which is no linear layer; leave it out"
    ):
        tiny_policy(TrainPart(lora=Lora(targets=("q_proj", "embed_tokens"))))
