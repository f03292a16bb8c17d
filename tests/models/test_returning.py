"""What is saved comes back, to the bit: by transformers' own names, or it is refused at once."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from fakes import TRAIN, spread_crew, tiny_policy, write_task
from families import family_crew, family_model, write_family
from motley.config import Lora, PeerConfig, TrainPart
from motley.learning.checkpoint import load_training, save_training
from motley.learning.descent import adam
from motley.models.opening import initial_policy, saved_policy
from motley.models.policy import MADE_OF, TRAINED, MadeOf, Policy, with_trained_part
from motley.models.returning import check_part_returns, check_returns
from motley.models.sources import keep_layers, read_folder
from motley.models.tiny import tiny_vocabulary
from motley.runs.building import trained_policies
from motley.runs.local import LocalCrew
from motley.weights.encoding import decode_whole, encode_whole, take_state, trained_state

# transformers saves their weights by other names than they have in memory, or in other parts
RENAMED = ["gpt_neox", "olmoe", "granitemoe", "mixtral", "qwen3_moe", "jamba"]
LAST = TrainPart(layers="last:1")


def policy_of(kind: str, seed: int = 0, train: str | TrainPart = "full") -> Policy:
    return with_trained_part(Policy(family_model(kind, seed), tiny_vocabulary()), train, seed)


def assert_same_state(one: Policy, other: Policy) -> None:
    ours, theirs = one.base.state_dict(), other.base.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("kind", RENAMED)
def test_a_model_whose_weights_are_renamed_on_disk_comes_back(kind: str, tmp_path: Path) -> None:
    saved, other = policy_of(kind, seed=1), policy_of(kind, seed=2)
    saved.save(tmp_path)
    other.load(tmp_path)
    assert_same_state(saved, other)
    check_returns(saved, tmp_path / "again")


@pytest.mark.parametrize("kind", ["gpt_neox", "qwen3_moe"])
def test_a_sampler_takes_such_weights_from_the_log(kind: str) -> None:
    learner, sampler = policy_of(kind, seed=1), policy_of(kind, seed=2)
    take_state(sampler, decode_whole(encode_whole(trained_state(learner, "float32"))))
    assert_same_state(learner, sampler)


@pytest.mark.parametrize("train", ["full", TrainPart(lora=Lora(rank=2)), LAST])
def test_nothing_is_asked_of_a_network(
    train: str | TrainPart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*given: object) -> None:
        raise AssertionError("a network was asked")

    monkeypatch.setattr(socket.socket, "connect", offline)
    monkeypatch.setattr(socket, "getaddrinfo", offline)
    write_family("mixtral", tmp_path / "model")
    policy = initial_policy(PeerConfig(name="a", model=str(tmp_path / "model")), 0)
    check_returns(policy, tmp_path / "whole")
    policy = with_trained_part(policy, train, 0)
    policy.save(tmp_path / "saved")
    policy.load(tmp_path / "saved")
    assert_same_state(policy, saved_policy(tmp_path / "saved"))


# Refusals


def refusal(policy: Policy, folder: Path) -> str:
    with pytest.raises(ValueError, match="does not come back from disk") as caught:
        check_returns(policy, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_tensor_that_is_not_saved_is_named(tmp_path: Path) -> None:
    policy = policy_of("llama")
    policy.base._keys_to_ignore_on_save = {"model.norm.weight"}
    said = refusal(policy, tmp_path)
    assert "cannot be read" in said
    assert "model.norm.weight" in said
    assert said.endswith("or train = { lora = { rank = 8 } } writes adapters only")


def test_a_tensor_that_is_rounded_on_disk_is_named(tmp_path: Path) -> None:
    policy = policy_of("llama")
    save = policy.base.save_pretrained

    def rounded(folder: Path) -> None:
        state = policy.base.state_dict()
        name = "model.layers.1.mlp.up_proj.weight"
        save(folder, state_dict=state | {name: state[name].bfloat16().float()})

    policy.base.save_pretrained = rounded
    assert "1 tensors differ, such as model.layers.1.mlp.up_proj.weight;" in refusal(
        policy, tmp_path
    )


def test_a_weight_that_is_no_number_is_named_and_no_fault_of_the_architecture(
    tmp_path: Path,
) -> None:
    policy = policy_of("llama")
    policy.base.state_dict()["model.norm.weight"][0] = torch.nan
    with pytest.raises(ValueError, match=r"^model\.norm\.weight of the model holds numbers that"):
        check_returns(policy, tmp_path / "model")


def test_a_model_that_its_configuration_does_not_describe_is_refused(tmp_path: Path) -> None:
    policy = policy_of("llama")
    policy.base.config.rms_norm_eps = 1.0  # its norms were made with another
    assert "its weights do, and its log-probs differ by" in refusal(policy, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_two_processors_round_differently_is_not_held_against_a_model(tmp_path: Path) -> None:
    """Of loud layers, whose log-probs differ between CPU and GPU by more than is called close."""
    policy = policy_of("llama")
    with torch.no_grad():
        for _, parameter in policy.trained():
            parameter.mul_(8)
    policy.model.cuda()
    check_returns(policy, tmp_path)


def test_a_model_is_compared_by_its_own_weights_once(tmp_path: Path) -> None:
    """What was read is used for its shape alone, so that no second copy need fit the device."""
    policy = policy_of("llama")
    seen: list[int] = []
    forward = torch.nn.Linear.forward

    def watched(layer: torch.nn.Linear, given: torch.Tensor) -> torch.Tensor:
        seen.append(layer.weight.data_ptr())
        return forward(layer, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", watched)
        check_returns(policy, tmp_path)
    assert set(seen) <= {p.data_ptr() for p in policy.model.parameters()}
    assert len(seen) == 2 * len(set(seen))


def test_a_run_whose_model_would_not_come_back_is_refused_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Jamba cut to two layers, every second one would be an attention layer by its
    configuration, and neither is.
    """
    write_task(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = family_model("jamba", sizes={"num_hidden_layers": 5})
    model.save_pretrained(tmp_path / "model")
    tiny_vocabulary().save(tmp_path / "model")
    config = family_crew(tmp_path / "model", tmp_path, "keep_layers = 2")
    with pytest.raises(ValueError, match=r"'jamba' does not come back .* leave keep_layers out"):
        LocalCrew.start(config, tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert not list((tmp_path / "run" / "start").iterdir())


def unless_in(folder: str, exists: Callable[[Path], bool]) -> Callable[[Path], bool]:
    def looked_up(path: Path) -> bool:
        if path.parent.name == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    return looked_up


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("other", ["nothing", "shape", "generation", "version", "cache", "home"])
def test_what_came_back_once_is_not_tried_again(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    write_task(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tried: list[Path] = []
    monkeypatch.setattr("motley.runs.building.check_returns", lambda _, place: tried.append(place))

    def start(name: str, **sizes: float) -> None:
        model = family_model("llama", sizes=sizes)
        if other == "generation" and tried:
            model.generation_config.update(do_sample=True, top_k=7)
        model.save_pretrained(tmp_path / name)
        tiny_vocabulary().save(tmp_path / name)
        LocalCrew.start(family_crew(tmp_path / name, tmp_path), tmp_path / f"{name}-run")

    start("one")
    assert len(tried) == 1
    if other == "version":
        monkeypatch.setattr("motley.models.returning.TRIAL", "returns/1/transformers-0")
    if other == "cache":  # one that can be neither written nor looked into
        monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "one-run" / "config.toml"))
        monkeypatch.setattr(Path, "exists", unless_in("returned", Path.exists))
    if other == "home":  # nor is there a place for one
        monkeypatch.delenv("MOTLEY_CACHE")
        monkeypatch.setattr(Path, "home", homeless)
    start("two", **({"rms_norm_eps": 1e-3} if other == "shape" else {}))
    assert len(tried) == (1 if other == "nothing" else 2)


def test_a_model_whose_settings_transformers_does_not_write_comes_back(tmp_path: Path) -> None:
    """Older models on the hub have a temperature and are not to be sampled."""
    folder = write_family("llama", tmp_path / "model")
    settings = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    policy = Policy(read_folder(folder), tiny_vocabulary())
    check_returns(policy, tmp_path / "again")
    back = read_folder(tmp_path / "again").generation_config
    assert (back.do_sample, back.temperature, back.top_p) == (True, 0.6, 0.9)


def test_cut_layers_come_back_as_what_they_were(tmp_path: Path) -> None:
    """Which of them are rotated stands in a list of the configuration."""
    sizes = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}
    policy = Policy(family_model("smollm3", sizes=sizes), tiny_vocabulary())
    keep_layers(policy.base, 2)
    assert policy.base.config.no_rope_layers == [1, 0]
    check_returns(policy, tmp_path)


# Parts


PARTS = {"lora": TrainPart(lora=Lora(rank=2)), "layers": LAST}


@pytest.mark.parametrize("train", PARTS)
@pytest.mark.parametrize("kind", ["llama", *RENAMED])
def test_a_part_comes_back_too(kind: str, train: str, tmp_path: Path) -> None:
    saved, other = (policy_of(kind, 1, PARTS[train]) for _ in range(2))
    with torch.no_grad():
        for _, parameter in saved.trained():
            parameter.add_(torch.randn_like(parameter))
    check_part_returns(saved, tmp_path / "tried")
    saved.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert_same_state(saved, other)


def test_a_part_that_does_not_come_back_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of("llama", train=LAST)
    monkeypatch.setattr(Policy, "load", lambda policy, folder: None)
    with pytest.raises(ValueError, match=r"tensors differ, such as model\.layers\.1\."):
        check_part_returns(policy, tmp_path)


def test_a_checkpoint_of_layers_holds_them_and_their_moments_only(tmp_path: Path) -> None:
    policy = tiny_policy(LAST)
    trained = dict(policy.trained())
    optimiser = adam(list(trained.values()), 1e-3)
    sum(p.sum() for p in trained.values()).backward()
    optimiser.step()
    save_training(policy, optimiser, tmp_path / "one")
    assert load_file(tmp_path / "one" / "model" / TRAINED).keys() == trained.keys()
    moments = load_file(tmp_path / "one" / "optimiser.safetensors")
    assert {name.rpartition("/")[0] for name in moments} == trained.keys()
    weights = sum(4 * p.numel() for p in policy.model.parameters())
    written = sum(path.stat().st_size for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert written < 0.99 * weights + 12 * sum(p.numel() for p in trained.values())
    assert not list((tmp_path / "one").rglob("model*.safetensors"))
    again = tiny_policy(LAST)
    load_training(again, adam([p for _, p in again.trained()], 1e-3), tmp_path / "one")
    assert_same_state(policy, again)


def test_a_model_with_tensors_that_never_train_is_saved_whole(tmp_path: Path) -> None:
    policy = policy_of("ernie4_5_moe")
    assert not all(p.requires_grad for p in policy.model.parameters())
    policy.save(tmp_path)
    assert (tmp_path / "config.json").exists()
    other = policy_of("ernie4_5_moe", seed=1)
    other.load(tmp_path)
    assert_same_state(policy, other)


def test_whole_models_of_earlier_checkpoints_still_load_where_layers_train(tmp_path: Path) -> None:
    earlier, now = tiny_policy(seed=1), tiny_policy(LAST, seed=2)
    earlier.save(tmp_path)
    now.load(tmp_path)
    assert_same_state(earlier, now)


def test_layers_of_another_choice_or_another_base_are_refused(tmp_path: Path) -> None:
    policy = dataclasses.replace(tiny_policy(LAST, seed=1), made_of=MadeOf(model="./mine"))
    policy.save(tmp_path)
    with pytest.raises(ValueError, match=r"holds another model: it lacks \['model\.layers\.0\."):
        tiny_policy(TrainPart(layers="first:1"), seed=1).load(tmp_path)
    with pytest.raises(ValueError, match=r"not those that .*; put the model \./mine back as it"):
        tiny_policy(LAST, seed=2).load(tmp_path)


def test_adapters_of_another_shape_are_refused(tmp_path: Path) -> None:
    few = TrainPart(lora=Lora(rank=2, targets=("q_proj",)))
    policy_of("llama", train=few).save(tmp_path)
    with pytest.raises(ValueError, match="holds another model: it lacks"):
        policy_of("llama", train=PARTS["lora"]).load(tmp_path)


@pytest.fixture
def crew_of_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one round; a peer whose layers train, and one with an adapter."""
    write_task(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"last", "lora"} <= TRAIN.keys()
    for _ in LocalCrew.start(
        spread_crew(tmp_path, ("last", "lora"), rounds=1), tmp_path / "run"
    ).rounds():
        pass
    return tmp_path / "run"


@pytest.mark.slow
def test_the_folder_of_a_part_is_a_model_wherever_the_run_is(
    crew_of_parts: Path, tmp_path: Path
) -> None:
    moved = crew_of_parts.rename(tmp_path / "elsewhere")
    for name, policy in trained_policies(moved).items():
        folder = moved / "checkpoints" / "round-000001" / name / "model"
        made_of = msgspec.json.decode((folder / MADE_OF).read_bytes(), type=MadeOf)
        assert made_of.model == f"../../../../start/{name}"
        ids = torch.tensor([[5, 6, 7]])
        found, expected = (
            one.model(input_ids=ids).logits for one in (saved_policy(folder), policy)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_part_of_a_model_elsewhere_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_family("mixtral", tmp_path / "model")
    config = family_crew(tmp_path / "model", tmp_path, 'train = { layers = "last:1" }')
    LocalCrew.start(config, tmp_path / "run")
    assert not list((tmp_path / "run" / "start").iterdir())
    folder = tmp_path / "run" / "checkpoints" / "round-000000" / "it" / "model"
    policy = saved_policy(folder)
    assert policy.made_of.model == str(tmp_path / "model")
