"""The forward in few kernels against the plain one: log-probs and gradients of every architecture
it knows.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from architectures import ARCHITECTURES, TRAINS, own_code_policy
from compute.devices import INTERPRETED, needs_gpu
from fakes import POLICIES, ragged_sequences
from marks import slow
from motley.compute import fused, scoring
from motley.compute.decoder import Decoder
from motley.compute.scoring import score
from motley.compute.support import why_unknown
from motley.config import TrainPart
from motley.learning.batches import ToScore, micro_batches
from motley.models.policy import Policy, frozen_copy, with_trained_part

KNOWN = [kind for kind in ARCHITECTURES if not why_unknown(own_code_policy(kind).base)]
TRAINED = {
    **TRAINS,
    "layers": TrainPart(layers="last:1"),
    "queries": TrainPart(layers="model.layers.0.self_attn.q_proj"),
}
HALF = [torch.float16, torch.bfloat16]

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="needs TRITON_INTERPRET=1, which a machine with a GPU does not set"
)


def a_policy(kind: str, train: str = "full") -> Policy:
    return POLICIES[kind]() if kind in POLICIES else own_code_policy(kind, TRAINED[train])


def weighted(values: Tensor, seed: int = 0) -> Tensor:
    """A sum in which every value has a weight of its own."""
    return (
        values
        * torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)).to(values.device)
    ).sum()


def few_sequences() -> list[ToScore]:
    """The interpreter is slow."""
    return [s for s in ragged_sequences(temperatures=(1.0, 0.7)) if len(s.prompt) != 3][:3]


def packed_states(policy: Policy, by_kernels: bool, checkpointed: bool = False) -> Tensor:
    """In float32 both ways, on one row of packed tokens."""
    (micro,) = micro_batches(few_sequences(), 10**6, policy.device)
    decoder = Decoder.of(policy.base)
    if by_kernels:
        return fused.fused_states(
            decoder, micro.packed.to(policy.device), torch.float32, checkpointed
        )
    return scoring.plain_states(decoder, micro.packed.to(policy.device), checkpointed)


def gradients(policy: Policy, total: Tensor) -> dict[str, Tensor | None]:
    policy.model.zero_grad()
    total.backward()
    return {name: p.grad for name, p in policy.model.named_parameters()}


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("kind", "train", "checkpointed"),
    [
        *(slow(kind, train, False) for kind in KNOWN for train in TRAINS if kind != "qwen2"),
        *(("qwen2", train, False) for train in TRAINS),
        slow("grouped", "full", False),
        slow("four bits", "lora", False),
        slow("four bits", "lora", True),
        slow("qwen2", "layers", False),
        slow("qwen2", "queries", False),
        ("qwen2", "full", True),
        slow("gemma3", "lora", True),
    ],
)
def test_in_float32_it_gives_the_plain_states_and_gradients(
    kind: str, train: str, checkpointed: bool
) -> None:
    policy = a_policy(kind, train)
    expected, found = (
        packed_states(policy, by_kernels=False),
        packed_states(policy, by_kernels=True, checkpointed=checkpointed),
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    theirs = gradients(policy, weighted(expected))
    ours = gradients(policy, weighted(found))
    trained = {name for name, _ in policy.trained()}
    for name, value in theirs.items():
        assert (value is None) == (ours[name] is None), name
        assert value is None or name in trained
        if value is not None:
            close = 3e-5 * max(1.0, float(value.abs().max()))
            torch.testing.assert_close(
                ours[name], value, rtol=1e-4, atol=close, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert any(value is not None and value.abs().max() > 1e-2 for value in theirs.values())


@interpreted
def test_a_forward_casts_its_weights_once_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, casts = own_code_policy("qwen2"), []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, given: casts.append(len(given)))
    fused.cast_layers(Decoder.of(policy.base), torch.float16)
    assert casts == [2 * (7 + 3)]  # seven projections and three biases of two layers


@interpreted
def test_weights_of_one_input_are_stacked_unless_they_need_no_copy() -> None:
    full, lora = (
        own_code_policy("llama with biases"),
        own_code_policy("llama with biases", TRAINS["lora"]),
    )
    for dtype, policy, weights in (
        (torch.float16, full, 1),
        (torch.float32, full, 3),
        (torch.float32, lora, 3),
        (torch.float16, lora, 1),
    ):
        decoder = Decoder.of(policy.base)
        layer, cast = decoder.layers[0], fused.cast_layers(decoder, dtype)[0]
        (qkv,) = cast.qkv
        assert len(qkv.weights) == weights
        assert torch.equal(
            torch.cat(qkv.weights), torch.cat([one.weight for one in layer.qkv]).to(dtype)
        )
        assert torch.equal(qkv.bias, torch.cat([one.bias for one in layer.qkv]).to(dtype))
        assert {
            one.dtype for one in (qkv.bias, *(a.A for each in cast.down.adapters for a in each))
        } == {dtype}
        assert qkv.weights[0] is layer.qkv[0].weight or weights == 1
        assert qkv.weights[0].requires_grad == (policy is full)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("train", ["full", "lora", "layers"])
@pytest.mark.parametrize("kind", ["qwen3", "llama with biases", "gemma3"])
def test_a_frozen_copy_gives_the_log_probs_of_the_policy_in_half_the_memory(
    kind: str, train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "runs_kernels", lambda device: True)
    policy = dataclasses.replace(own_code_policy(kind, TRAINED[train]), dtype=torch.bfloat16)
    copied = frozen_copy(policy)
    (micro,) = micro_batches(few_sequences(), 10**6, policy.device)
    with torch.no_grad():
        ours, theirs = (score(one, micro.packed).logp_M for one in (policy, copied))
    assert torch.equal(ours, theirs)
    trained = {name for name, _ in policy.trained() if "mlp" in name and "lora" not in name}
    kept = dict(copied.model.named_parameters())
    assert {kept[name].dtype for name in trained} <= {torch.bfloat16}
    assert bool(trained) == (train != "lora")


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["qwen3", *map(slow, ["llama with biases", "gemma3"])])
def test_in_a_half_type_it_stays_near_float32(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "runs_kernels", lambda device: True)
    policy = own_code_policy(kind, TRAINS["lora"])
    (micro,) = micro_batches(few_sequences(), 10**6, policy.device)
    expected = score(policy, micro.packed).logp_M
    theirs = gradients(policy, weighted(expected))
    found = score(dataclasses.replace(policy, dtype=dtype), micro.packed).logp_M
    assert found.grad_fn.name() == "_ScoreBackward"
    ours = gradients(policy, weighted(found))
    assert (
        0
        < float((found - expected).detach().abs().mean())
        < (0.01 if dtype == torch.float16 else 0.1)
    )
    for name, _ in policy.trained():
        assert torch.cosine_similarity(ours[name].flatten(), theirs[name].flatten(), 0) > (
            0.999 if dtype == torch.float16 else 0.98
        ), name


@pytest.mark.slow
@interpreted
def test_the_step_keeps_no_activation_that_it_can_make_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """act(gate)·up is as wide as half of gate_up, which is kept."""
    policy, made = own_code_policy("qwen2"), []
    gated = fused.kernels.gated
    monkeypatch.setattr(
        fused.kernels, "gated", lambda *given: made.append(gated(*given)) or made[-1]
    )
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.data_ptr()) or t, lambda t: t
    ):
        packed_states(policy, by_kernels=True)
    assert len(made) == 2
    assert not {one.data_ptr() for one in made} & set(kept)


# On a GPU


def sized_policy(kind: str, train: str, dtype: torch.dtype) -> Policy:
    """Wide enough for tiles, narrow enough for a second; windows longer than the sequences."""
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 5000,
    }
    config = ARCHITECTURES[kind](
        **sizes, head_dim=64, max_position_embeddings=512, initializer_range=0.06
    )
    if getattr(config, "sliding_window", None):
        config.sliding_window = 512
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = type(own_code_policy(kind).base)(config).float().eval().cuda()
        base = dataclasses.replace(own_code_policy(kind), model=model, dtype=dtype)
        policy = with_trained_part(base, TRAINED[train], 0)
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if parameter.ndim == 1 or "lora_B" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    policy.model.cuda()
    return policy


def sized_sequences() -> list[ToScore]:
    generator = torch.Generator().manual_seed(0)
    tokens = lambda count: tuple(torch.randint(1, 5000, (count,), generator=generator).tolist())
    prompts = [tokens(count) for count in (1, 30, 130, 77)]
    lengths = [(prompt, length) for prompt in prompts for length in (1, 2, 64, 129, 200)]
    return [
        ToScore(row=i, prompt=p, tokens=tokens(n), temperature=(1.0, 0.7)[i % 2])
        for i, (p, n) in enumerate(lengths)
    ]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("train", ["full", "lora", "layers"])
@pytest.mark.parametrize("kind", KNOWN)
def test_on_a_gpu_it_is_as_near_to_float32_as_the_plain_step(
    kind: str, train: str, dtype: torch.dtype, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = sized_policy(kind, train, dtype)
    policy.gradient_checkpointing = checkpointed
    (micro,) = micro_batches(sized_sequences(), 10**6, policy.device)
    logp, entropy, gradient = {}, {}, {}
    for way, arithmetic in (("exact", torch.float32), ("plain", dtype), ("fused", dtype)):
        with monkeypatch.context() as patch:
            if way != "fused":
                patch.setattr(scoring, "runs_kernels", lambda device: False)
            chosen = dataclasses.replace(
                policy, dtype=arithmetic, model=copy.deepcopy(policy.model)
            )
            if way == "exact":
                chosen.model.float()
            scores = score(chosen, micro.packed)
            assert (scores.logp_M.grad_fn.name() == "_ScoreBackward") == (way == "fused")
            logp[way], entropy[way] = scores.logp_M.detach(), scores.entropy_M
            gradient[way] = gradients(chosen, 1024 * weighted(scores.logp_M) / len(scores.logp_M))
    away = {way: float((logp[way] - logp["exact"]).abs().mean()) for way in ("plain", "fused")}
    assert 0 < away["fused"] < 1.5 * away["plain"] + 1e-4, away
    torch.testing.assert_close(
        entropy["fused"], entropy["exact"], rtol=0, atol=0.02 if dtype == torch.float16 else 0.15
    )
    for name, exact in gradient["exact"].items():
        ours, theirs = gradient["fused"][name], gradient["plain"][name]
        assert (ours is None) == (exact is None), name
        if exact is not None:
            error = {
                way: float((value.float() - exact).norm() / exact.norm())
                for way, value in (("fused", ours), ("plain", theirs))
            }
            assert error["fused"] < 1.5 * error["plain"] + 2e-3, (name, error)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", HALF)
def test_on_a_gpu_windows_shorter_than_the_sequences_are_kept(dtype: torch.dtype) -> None:
    policy = sized_policy("mistral", "full", torch.float32)
    policy.base.config.sliding_window = 40
    (micro,) = micro_batches(sized_sequences(), 10**6, policy.device)
    with torch.no_grad():
        expected = score(policy, micro.packed).logp_M
        found = score(dataclasses.replace(policy, dtype=dtype), micro.packed).logp_M
        policy.base.config.sliding_window = 512
        unlike = score(policy, micro.packed).logp_M
    assert float((found - expected).abs().mean()) < (0.01 if dtype == torch.float16 else 0.06)
    assert float((unlike - expected).abs().mean()) > 0.1


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_same_forward_gives_the_same_numbers() -> None:
    policy = sized_policy("qwen3", "full", torch.bfloat16)
    (micro,) = micro_batches(sized_sequences(), 10**6, policy.device)
    first, second = (score(policy, micro.packed).logp_M for _ in range(2))
    assert torch.equal(first, second)
