from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from benchmarks.small import SMALL
from motley.benchmarks import grpo, models, whole_steps
from motley.benchmarks.bench import Bench
from motley.benchmarks.grpo import TrlSetup, best_trl_cost, trl_setups
from motley.benchmarks.models import build, words_of
from motley.benchmarks.setups import Setup, setup_of
from motley.benchmarks.timing import Cost, Machine
from motley.config import Lora
from motley.models.policy import Policy

RANDOM = "random-7b"
WORDS = "tiny:0.3m"
LORA = "train.lora.rank=2"
FEW = dataclasses.replace(SMALL, warms=1, problems=2, samples=2, new_tokens=4, trl_rows=2)
on_a_slow_cpu = pytest.mark.filterwarnings("ignore:bfloat16 is not faster")


@pytest.fixture(autouse=True)
def small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen 2 with biases, heads of its own and more ids than the borrowed vocabulary has words."""
    shape = Qwen2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=500,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    monkeypatch.setitem(models.SHAPES, RANDOM, shape)


def random_policy(settings: str = "default") -> Policy:
    return build(RANDOM, "cpu", setup_of(settings), WORDS)


def bench(*learn: str, **more: Any) -> Bench:
    setups = tuple(map(setup_of, learn))
    return Bench(
        Machine(1e9, 1e9),
        torch.device("cpu"),
        "auto",
        FEW,
        setups=setups,
        vocabulary=WORDS,
        **more,
    )


def dtypes(policy: Policy, part: str) -> set[torch.dtype]:
    return {p.dtype for name, p in policy.model.named_parameters() if part in name}


def rows_of(asked: Bench) -> list[dict[str, Any]]:
    return list(whole_steps._grpo(asked, RANDOM))


def test_random_models_are_the_same_at_every_call_and_borrow_their_words() -> None:
    one, other = random_policy(), random_policy()
    for mine, its in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert mine is not its
    weight = one.base.get_output_embeddings().weight
    assert len(weight) == 500 > one.vocabulary.size == words_of(WORDS).size
    assert 0.01 < float(weight.detach().std()) < 0.04
    assert dtypes(one, "") == {torch.float32}
    with pytest.raises(ValueError, match="--vocabulary random-7b has no words of its own; name a"):
        words_of(RANDOM, RANDOM)


@pytest.mark.slow
@on_a_slow_cpu
def test_what_is_kept_in_bfloat16_is_made_so() -> None:
    full = random_policy("masters=bfloat16 dtype=bfloat16")
    assert dtypes(full, "embed_tokens") == dtypes(full, "lm_head") == {torch.bfloat16}
    assert dtypes(full, "q_proj.weight") == {torch.bfloat16}
    assert dtypes(full, "norm") == dtypes(full, "bias") == {torch.float32}
    assert full.base.model.rotary_emb.inv_freq.dtype == torch.float32
    adapted = random_policy(f"{LORA} dtype=bfloat16")
    assert dtypes(adapted, "base_layer.weight") == {torch.bfloat16}
    assert dtypes(adapted, "embed_tokens") == dtypes(adapted, "lm_head") == {torch.float32}
    assert dtypes(adapted, "lora_") == dtypes(adapted, "base_layer.bias") == {torch.float32}
    assert {name.split(".")[-3] for name, _ in adapted.trained()} == {"lora_A", "lora_B"}


def test_shapes_have_the_values_that_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    made = {}
    for name, config in models.SHAPES.items():
        with torch.device("meta"):
            empty = models.AutoModelForCausalLM.from_config(config)
        made[name] = sum(p.numel() for p in empty.parameters()) / 1e9
    billions = {"random-360m": 0.36, "random-1.4b": 1.44, "random-1.5b": 1.54, RANDOM: 7.62}
    assert made == pytest.approx(billions, rel=0.01)


@pytest.mark.slow
@on_a_slow_cpu
@pytest.mark.parametrize(
    "settings",
    [
        "masters=bfloat16 dtype=bfloat16 optimizer=adamw8bit learning.token_budget=16",
        f"{LORA} dtype=bfloat16 gradient_checkpointing=true",
        "gradient_checkpointing=auto",
        "optimizer=adafactor",
    ],
)
def test_a_step_learns_in_every_setup(settings: str) -> None:
    setup = setup_of(settings)
    asked = bench(settings)
    policy = asked.build(RANDOM, setup)
    before = {name: p.detach().clone() for name, p in policy.trained()}
    texts = models.Texts.draw(policy.vocabulary, 2, 6).texts
    step = grpo.OurStep(policy, grpo.StepWork(texts=texts, num_samples=3, max_tokens=8), setup)
    for _ in range(4):  # one of which moves a bfloat16
        step()
    assert step.num_trained == 6
    assert any(not torch.equal(p, before[name]) for name, p in policy.trained())
    budget = step._learner.token_budget
    assert budget == (setup.token_budget or budget)
    assert step._learner.optimiser_rules.lr == grpo.LR


@pytest.mark.slow
def test_setups_stand_beside_each_other_and_trl_trains_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[TrlSetup] = []

    def trl_cost(policy: Policy, work: grpo.StepWork, repeats: int, setup: TrlSetup) -> Cost:
        asked.append(setup)
        return Cost(100.0, 3.0)

    monkeypatch.setattr(grpo, "has_trl", lambda: True)
    monkeypatch.setattr(grpo, "trl_cost", trl_cost)
    rows = rows_of(bench("default", "learning.token_budget=16", LORA))
    assert [(row["learn"], row["against"]) for row in rows] == [
        ("default", "TRL, float32 weights, 2 rows"),
        ("learning.token_budget=16", "TRL, float32 weights, 2 rows"),
        (LORA, "TRL, float32 weights, LoRA of rank 2, 2 rows"),
    ]
    assert [setup.lora for setup in asked] == [None, Lora(rank=2)]
    assert all(row["ratio"] == pytest.approx(100.0 / row["seconds"]) for row in rows)
    rows = rows_of(bench("default", rivals=("none",)))
    assert [(row["against"], row["trl_s"], row["note"]) for row in rows] == [("", None, "")]


@pytest.mark.slow
def test_a_setup_that_memory_does_not_hold_leaves_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = grpo.our_cost

    def refusing(policy: Policy, work: Any, repeats: int, setup: Setup, warms: int) -> grpo.OurCost:
        if setup.token_budget:
            raise ValueError("out of memory with 16 tokens in a micro-batch; set\nmore")
        return ours(policy, work, repeats, setup, warms)

    monkeypatch.setattr(grpo, "our_cost", refusing)
    first, second = rows_of(bench("learning.token_budget=16", "default", rivals=("none",)))
    assert first["note"] == (
        "ours not measured: out of memory with 16 tokens in a micro-batch; set"
    )
    assert first["seconds"] is first["peak_gib"] is None
    assert second["seconds"] > 0
    monkeypatch.setattr(grpo, "our_cost", raising(lambda: ValueError("a fault")))
    with pytest.raises(ValueError, match="a fault"):
        rows_of(bench("default", rivals=("none",)))


def raising(error: Callable[[], Exception]) -> Callable[..., Any]:
    def raised(*arguments: Any, **named: Any) -> Any:
        raise error()

    return raised


def test_trl_takes_less_memory_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo.importlib.util, "find_spec", lambda name: None)
    first = TrlSetup(rows=32, weights=torch.bfloat16)
    assert [(one.rows, one.recomputes) for one in trl_setups(first)] == [
        *((32, False), (16, False), (8, False)),
        *((32, True), (16, True), (8, True), (4, True), (2, True), (1, True)),
    ]
    monkeypatch.setattr(grpo.importlib.util, "find_spec", lambda name: object())
    *_, last = trl_setups(first)
    assert str(last) == "TRL, bfloat16 weights, 1 rows, recomputing, adamw_bnb_8bit"
    assert not any(one.optimizer for one in trl_setups(dataclasses.replace(first, lora=Lora())))


def test_trl_is_measured_in_the_first_setup_that_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trl_cost(policy: Policy, work: Any, repeats: int, setup: TrlSetup) -> Cost:
        if not setup.recomputes or setup.rows > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Cost(1.0, 2.0)

    monkeypatch.setattr(grpo, "trl_cost", trl_cost)
    work = grpo.StepWork(texts=["1"], num_samples=32, max_tokens=2)
    cost, setup = best_trl_cost(random_policy, work, 1, TrlSetup(rows=32))
    assert (cost, setup.rows, setup.recomputes) == (Cost(1.0, 2.0), 8, True)
    monkeypatch.setattr(grpo, "trl_cost", raising(lambda: RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        best_trl_cost(random_policy, work, 1, TrlSetup(rows=32))
    monkeypatch.setattr(grpo, "trl_cost", raising(lambda: torch.OutOfMemoryError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory in every way"):
        best_trl_cost(random_policy, work, 1, TrlSetup(rows=4))


@pytest.mark.slow
@on_a_slow_cpu
@pytest.mark.parametrize(
    "setup",
    [
        TrlSetup(weights=torch.bfloat16, rows=2, lora=Lora(rank=2)),
        TrlSetup(weights=torch.bfloat16, rows=2, lora=Lora(rank=2), recomputes=True),
        TrlSetup(weights=torch.bfloat16, rows=2, recomputes=True),
    ],
)
def test_trl_takes_steps_of_random_models(setup: TrlSetup) -> None:
    pytest.importorskip("trl")
    policy = random_policy("masters=bfloat16 dtype=bfloat16")
    texts = models.Texts.draw(policy.vocabulary, 2, 6).texts
    work = grpo.StepWork(texts=texts, num_samples=2, max_tokens=4)
    assert grpo.trl_cost(policy, work, 1, setup).seconds > 0
