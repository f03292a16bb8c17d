"""Rows against TRL's own loss code, in float64: losses and gradients of random batches.

TRL's method runs as it is installed, on a stand-in for its trainer with TRL's own defaults. Where
TRL has a piece of code inside a longer method, that piece is cut out of it and run.

A row that is added needs an entry in MATCHES: the row, and the TRL settings that should equal it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from motley.objectives import LossBatch, Objective, Samples, objective
from motley.objectives.advantages import Standardised

pytestmark = pytest.mark.slow  # TRL takes long to import

NUM_BATCHES = 60
NUM_GROUPS, GROUP_SIZE, LONGEST, MAX_LENGTH = 4, 5, 9, 12
FARTHEST = 9.0  # of a log ratio


@dataclass(frozen=True, kw_only=True)
class Match:
    """A row, and the attributes of TRL's trainer and configuration that should equal it.

    `old`: what TRL's old policy is here. "sampler": whoever sampled. "start": the learner at the
    start of the round, with the sampler as what TRL calls vLLM.
    """

    row: Objective
    trl: dict[str, Any]
    old: Literal["sampler", "start"] = "sampler"
    strangers: bool = False
    penalty: bool = True  # whether the penalty equals TRL's too,
    penalty_times_ratio: bool = True  # and also times the ratio
    rounding: float = 1e-9  # relative


def published(name: str, variant: str = "", **settings: float | str) -> Objective:
    """TRL has no bound for strangers; what it calls delta is for everyone."""
    return objective(name, variant, {"dual_clip": inf} | settings)


def corrected(variant: str, mode: str, C: float) -> Match:
    """What TRL does about an engine whose log-probs are not the trainer's. Its penalty's ratio is R
    then, ours that to the sampler.
    """
    return Match(
        row=published("tis", variant, C=C),
        trl={
            "loss_type": "grpo",
            "use_vllm": True,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": C,
        },
        old="start",
        penalty_times_ratio=False,
    )


GRPO: dict[str, Any] = {"loss_type": "grpo"}

MATCHES: dict[str, Match] = {
    "grpo": Match(row=published("grpo"), trl=GRPO),
    "grpo-wide": Match(
        row=published("grpo", clip_low=0.1, clip_high=0.5),
        trl=GRPO | {"epsilon": 0.1, "epsilon_high": 0.5},
    ),
    "grpo-delta": Match(row=published("grpo", delta=3.0), trl=GRPO | {"delta": 3.0}),
    "grpo-strangers": Match(
        row=objective("grpo", settings={"dual_clip": 3.0}),
        trl=GRPO | {"delta": 3.0},
        strangers=True,
        penalty=False,  # ours is bounded for strangers, TRL's for nobody
    ),
    "grpo-batch_std": Match(
        row=published("grpo", "batch_std"),
        trl=GRPO | {"scale_rewards": "batch"},
        rounding=1e-6,  # TRL has n / (n - 1) in float32
    ),
    "dr_grpo": Match(
        row=published("dr_grpo"), trl={"loss_type": "dr_grpo", "scale_rewards": "none"}
    ),
    # no Beta density in it: not our row of that name
    "trl-bnpo": Match(row=published("dapo", clip_high=0.2), trl={"loss_type": "bnpo"}),
    "dapo": Match(row=published("dapo"), trl={"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": Match(row=published("gspo"), trl=GRPO | {"importance_sampling_level": "sequence"}),
    "cispo": Match(row=published("cispo"), trl={"loss_type": "cispo", "epsilon_high": 5.0}),
    "sapo": Match(row=published("sapo"), trl={"loss_type": "sapo"}),
    "fvis-k1": Match(
        row=published("fvis", kl="k1", g=0.3), trl=GRPO | {"off_policy_mask_threshold": 0.3}
    ),
    "alone": Match(row=published("alone"), trl=GRPO, old="start", penalty_times_ratio=False),
    "tis": corrected("", "token_truncate", C=2.0),
    "tis-token_mask": corrected("token_mask", "token_mask", C=3.0),
    "tis-sequence": corrected("sequence", "sequence_truncate", C=3.0),
    "tis-sequence_mask": corrected("sequence_mask", "sequence_mask", C=3.0),
    # with vLLM, and all else as TRL has it
    "tis-trl": Match(
        row=published("tis", "trl"), trl={"use_vllm": True}, old="start", penalty_times_ratio=False
    ),
}


# TRL, as it is installed


@lru_cache
def trainer_module() -> ModuleType:
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'motley-rl[bench]'")
    from trl.trainer import grpo_trainer

    return grpo_trainer


@lru_cache
def defaults() -> dict[str, Any]:
    return {
        f.name: f.default if f.default is not dataclasses.MISSING else None
        for f in dataclasses.fields(trainer_module().GRPOConfig)
    }


class OneProcess:
    num_processes = 1
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value


def stand_in(settings: dict[str, Any], logp_BT: Tensor) -> Any:
    """What TRL's methods read of their trainer."""
    unknown = settings.keys() - defaults().keys()
    assert not unknown, f"TRL has no setting {unknown}"
    args = SimpleNamespace(**(defaults() | settings))
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    args.steps_per_generation = 1
    known = vars(args) | {
        "args": args,
        "model": SimpleNamespace(training=True),
        "accelerator": OneProcess(),
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "current_gradient_accumulation_steps": 1,
        "epsilon_low": args.epsilon,
        "epsilon_high": high,
        "max_completion_length": MAX_LENGTH,
        "get_off_policy_mask": trainer_module().GRPOTrainer.get_off_policy_mask,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (
            logp_BT,
            torch.zeros_like(logp_BT),
            None,
        ),
    }
    return SimpleNamespace(**known)


@lru_cache
def piece(condition: str) -> Any:
    """The `if` of TRL's scoring of completions that has this condition, as code."""
    method = trainer_module().GRPOTrainer._generate_and_score_completions
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == condition
    ]
    assert found, f"TRL's code has changed: no `if {condition}` in {method.__qualname__}"
    module = ast.Module([max(found, key=lambda node: len(ast.unparse(node)))], [])
    return compile(module, method.__qualname__, "exec")


def trl_advantages(trainer: Any, reward_B: Tensor) -> Tensor:
    known = {
        "self": trainer,
        "rewards_per_func": reward_B[:, None],
        "unscorable_mask": torch.zeros(len(reward_B), dtype=torch.bool),
        "num_generations": GROUP_SIZE,
        "device": "cpu",
    }
    trainer.reward_weights = torch.ones(1, dtype=reward_B.dtype)
    trainer.multi_objective_aggregation = "sum_then_normalize"
    exec(
        piece("self.multi_objective_aggregation == 'sum_then_normalize'"),
        vars(trainer_module()),
        known,
    )
    return known["advantages"]


def trl_ratio(trainer: Any, old_BT: Tensor, sampling_BT: Tensor, mask_BT: Tensor) -> Tensor:
    known = {
        "self": trainer,
        "old_per_token_logps": old_BT,
        "sampling_per_token_logps": sampling_BT,
        "completion_mask": mask_BT.long(),
        "tool_mask": None,
    }
    exec(
        piece("self.use_vllm and self.vllm_importance_sampling_correction"),
        vars(trainer_module()),
        known,
    )
    return known["vllm_importance_sampling_ratio"]


# Random batches


@dataclass(frozen=True)
class Drawn:
    """A batch of groups of one size, in float64."""

    reward_B: Tensor
    mask_BT: Tensor
    logp_BT: Tensor
    logq_BT: Tensor
    start_BT: Tensor
    ref_BT: Tensor
    group_B: Tensor = field(
        default_factory=lambda: torch.arange(NUM_GROUPS).repeat_interleave(GROUP_SIZE)
    )

    @property
    def length_B(self) -> Tensor:
        return self.mask_BT.sum(1)


def drawn(seed: int) -> Drawn:
    """Lengths from 1 on, a silent group in some, and log ratios of all sizes up to FARTHEST."""
    g = torch.Generator().manual_seed(seed)
    num, rand = NUM_GROUPS * GROUP_SIZE, lambda *n: torch.rand(*n, generator=g).double()
    drift = lambda far: far * (2 * rand(num, LONGEST) - 1) * rand(num, LONGEST) ** 3
    reward_B = (rand(num) < 0.5).double() if seed % 3 else (4 * rand(num)).round() / 4
    if seed % 4 == 0:
        reward_B[:GROUP_SIZE] = 1.0
    length_B = 1 + (rand(num) * LONGEST).long()
    length_B[0], length_B[1] = 1, LONGEST
    logq_BT = -3 * rand(num, LONGEST)
    start_BT = logq_BT + drift(FARTHEST)
    start_BT[0, 0], start_BT[1, 1] = logq_BT[0, 0] + FARTHEST, logq_BT[1, 1] - FARTHEST
    return Drawn(
        reward_B=reward_B,
        mask_BT=torch.arange(LONGEST) < length_B[:, None],
        logp_BT=start_BT + drift(1.0),
        logq_BT=logq_BT,
        start_BT=start_BT,
        ref_BT=start_BT + drift(4.0),
    )


Value = tuple[Tensor, Tensor]  # a loss and its gradient


def samples_of(match: Match, batch: Drawn) -> Samples:
    own_B = torch.full_like(batch.group_B, not match.strangers, dtype=torch.bool)
    masked_BT = torch.where(batch.mask_BT, batch.logq_BT, 0.0)
    return Samples(
        reward_B=batch.reward_B,
        group_B=batch.group_B,
        sender_B=torch.zeros_like(batch.group_B),
        own_B=own_B,
        stranger_B=~own_B,
        success_B=torch.zeros_like(batch.reward_B),
        skill_B=torch.ones_like(batch.reward_B),
        length_B=batch.length_B,
        ended_B=torch.ones_like(own_B),
        logq_mean_B=masked_BT.sum(1) / batch.length_B,
        max_length=MAX_LENGTH,
    )


def ours(match: Match, row: Objective, batch: Drawn) -> Value:
    samples = samples_of(match, batch)
    terms = row.prepare(samples)
    advantage_B = row.advantage(samples)
    torch.testing.assert_close(terms.advantage_B.double(), advantage_B, rtol=1e-6, atol=1e-7)
    logp_BT = batch.logp_BT.clone().requires_grad_()
    output = row.loss(
        LossBatch(
            logp_learner_BT=logp_BT,
            logp_sampler_BT=batch.logq_BT,
            mask_BT=batch.mask_BT,
            ended_B=samples.ended_B,
            terms=replace(terms, advantage_B=advantage_B),  # before it is stored as float32
            logp_start_BT=batch.start_BT if match.old == "start" else None,
            logp_ref_BT=batch.ref_BT,
        )
    )
    (gradient_BT,) = torch.autograd.grad(output.loss, logp_BT)
    return output.loss.detach(), gradient_BT


def inputs_of(batch: Drawn) -> dict[str, Tensor]:
    """What TRL knows of tokens. Nothing computes their log-probs: the stand-in has them."""
    token_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.long)
    return {
        "prompt_ids": token_BT[:, :1],
        "prompt_mask": torch.ones_like(token_BT[:, :1]),
        "completion_ids": token_BT,
        "completion_mask": batch.mask_BT.long(),
    }


def theirs(match: Match, settings: dict[str, Any], batch: Drawn) -> Value:
    logp_BT = batch.logp_BT.clone().requires_grad_()
    trainer = stand_in(match.trl | settings, logp_BT)
    old_BT = batch.logq_BT if match.old == "sampler" else batch.start_BT
    inputs = inputs_of(batch) | {
        "advantages": trl_advantages(trainer, batch.reward_B),
        "old_per_token_logps": old_BT,
        "ref_per_token_logps": batch.ref_BT,
        "num_items_in_batch": batch.mask_BT.sum().double(),
    }
    if trainer.use_vllm:
        inputs["sampling_per_token_logps"] = batch.logq_BT
        inputs["importance_sampling_ratio"] = trl_ratio(
            trainer, old_BT, batch.logq_BT, batch.mask_BT
        )
    loss = trainer_module().GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient_BT,) = torch.autograd.grad(loss, logp_BT)
    return loss.detach(), gradient_BT


def agree(match: Match, row: Objective, settings: dict[str, Any]) -> None:
    bites, rounding = 0, {"rtol": match.rounding, "atol": 1e-12}
    for seed in range(NUM_BATCHES):
        batch = drawn(seed)
        (loss, gradient_BT), (expected, expected_BT) = (
            ours(match, row, batch),
            theirs(match, settings, batch),
        )
        torch.testing.assert_close(loss, expected, **rounding)
        torch.testing.assert_close(gradient_BT, expected_BT, **rounding)
        bites += int((gradient_BT[batch.mask_BT] != 0).sum())
    assert bites > 20 * NUM_BATCHES, "rows without a gradient would pass"


@pytest.mark.parametrize("name", MATCHES)
def test_row_equals_trls_own_loss(name: str) -> None:
    agree(MATCHES[name], MATCHES[name].row, {"beta": 0.0})


PENALISED = [(name, False) for name, match in MATCHES.items() if match.penalty] + [
    (name, True) for name, match in MATCHES.items() if match.penalty and match.penalty_times_ratio
]


@pytest.mark.parametrize(("name", "times_ratio"), PENALISED)
def test_row_with_a_reference_equals_trls_own_loss(name: str, times_ratio: bool) -> None:
    match = MATCHES[name]
    beta_times = "ratio" if times_ratio else "one"
    pull: dict[str, float | str] = {"beta": 0.04, "toward": "reference", "beta_times": beta_times}
    settings = {"beta": 0.04, "use_bias_correction_kl": times_ratio}
    agree(match, match.row.with_settings(pull), settings)
    with pytest.raises(AssertionError):
        agree(match, match.row.with_settings(pull | {"beta": 0.041}), settings)


def test_rloo_equals_the_loss_of_trls_trainer_of_that_name() -> None:
    trainer_module()
    from trl.trainer.rloo_trainer import RLOOTrainer

    match = Match(row=published("rloo"), trl={})
    for seed in range(NUM_BATCHES):
        batch = drawn(seed)
        logp_BT = batch.logp_BT.clone().requires_grad_()
        inputs = inputs_of(batch) | {
            "advantages": match.row.advantage(samples_of(match, batch)),
            "old_logps": torch.where(batch.mask_BT, batch.logq_BT, 0.0).sum(1),
        }
        expected = RLOOTrainer._compute_loss(stand_in({}, logp_BT), None, inputs)
        (expected_BT,) = torch.autograd.grad(expected, logp_BT)
        loss, gradient_BT = ours(match, match.row, batch)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradient_BT, expected_BT, rtol=1e-9, atol=1e-12)


def test_clips_bind_in_the_batches_that_are_drawn() -> None:
    clipped = longest = 0
    for seed in range(NUM_BATCHES):
        batch = drawn(seed)
        d_BT = (batch.start_BT - batch.logq_BT)[batch.mask_BT]
        assert float(d_BT.abs().max()) <= FARTHEST + 1e-9
        longest += int((d_BT.abs() > FARTHEST - 1e-6).sum())
        clipped += int(((d_BT > 0.2) | (d_BT < -0.2)).sum())
        assert len(set(batch.length_B.tolist())) > 3
    assert longest > NUM_BATCHES
    assert clipped > 10 * NUM_BATCHES


def test_trls_bnpo_is_not_our_row_of_that_name() -> None:
    batch, match = drawn(1), MATCHES["trl-bnpo"]
    found, expected = ours(match, published("bnpo"), batch), theirs(match, {"beta": 0.0}, batch)
    assert not torch.allclose(found[1], expected[1])
    assert match.row == replace(published("bnpo"), advantage=Standardised())
