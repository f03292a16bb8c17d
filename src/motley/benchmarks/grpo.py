"""One whole GRPO step, ours and TRL's: sample, score, learn, and have the new weights ready to
sample with.

Both do the same work: the same model, prompts, group size, lengths, reward, learning rate and
clipping, one optimiser step on all completions, no penalty. TRL samples with `generate`. It
recomputes no activations (its default would), unless memory does not hold them.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import statistics
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import torch
from peft import LoraConfig
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from motley.benchmarks.setups import Setup
from motley.benchmarks.timing import LEARNER_WARMS, Cost, cost, peak_gib, start_peak, wait
from motley.clock import RealClock
from motley.config import Learning, Lora
from motley.engines import Completion, torch_engine
from motley.learning.learner import Learner
from motley.learning.select import Candidate
from motley.models.devices import is_out_of_memory
from motley.models.policy import Policy
from motley.objectives import objective
from motley.records import Group, Origin, Problem, Rollout, Sampling
from motley.tasks.extras import install

logger = logging.getLogger(__name__)
LR = 1e-6
GRAD_CLIP = 1.0
NAME = "bench"
NO_TRL = f"not measured: {install('bench')}"


Reward = Callable[[str, str], float]  # of a prompt and what was answered


def checksum(prompt: str, text: str) -> float:
    """Hardly the same for two texts, so that every sequence has an advantage.

    None can be left out of the training.
    """
    return zlib.crc32(text.encode()) / 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one step."""

    texts: list[str]  # a prompt each
    num_samples: int
    max_tokens: int
    may_end: bool = False  # completions may be shorter
    reward: Reward = checksum

    @property
    def num_sequences(self) -> int:
        return len(self.texts) * self.num_samples


class OurStep:
    """What a peer alone does in a round, without its log."""

    def __init__(self, policy: Policy, work: StepWork, setup: Setup = Setup()) -> None:
        """`setup`: what the policy was built with."""
        self._policy, self._work = policy, work
        self._problems = [Problem(prompt=text) for text in work.texts]
        self._prompts = [policy.prompts.ids(problem) for problem in self._problems]
        self._engine = torch_engine(policy)
        rules = Learning(lr=LR, grad_clip=GRAD_CLIP, token_budget=setup.token_budget)
        self._learner = Learner(policy, objective("grpo"), rules, LR, upkeep=setup.upkeep)
        self.sampling_s: list[float] = []
        self.num_trained = 0  # sequences of the last step
        self.num_tokens = 0  # sampled in it

    def __call__(self) -> None:
        sampling = Sampling(max_tokens=self._work.max_tokens)
        start = time.perf_counter()
        made = self._engine.sample(
            self._prompts, self._work.num_samples, sampling, seed=self._policy.version
        )
        self.sampling_s.append(time.perf_counter() - start)
        report = self._learner.step(
            candidates(self._policy, self._problems, made, sampling, self._work.reward)
        )
        self.num_trained = report.num_scored
        self.num_tokens = sum(len(c.tokens) for group in made for c in group)
        self._engine.refresh()


def candidates(
    policy: Policy,
    problems: Sequence[Problem],
    made: Sequence[Sequence[Completion]],
    sampling: Sampling,
    reward: Reward = checksum,
) -> list[Candidate]:
    """Sampled completions, scored, as a learner gets them."""
    origin = Origin(
        peer=NAME,
        model=policy.fingerprint,
        vocabulary=policy.vocabulary.fingerprint,
        version=policy.version,
        sampling=sampling,
    )
    texts = iter(
        policy.vocabulary.decode_all(c.tokens for completions in made for c in completions)
    )
    measured = []
    for slot, (problem, completions) in enumerate(zip(problems, made, strict=True)):
        rollouts = tuple(
            Rollout(
                tokens=c.tokens,
                logprobs=c.logprobs,
                reward=reward(problem.prompt, next(texts)),
                ending=c.ending,
            )
            for c in completions
        )
        group = Group(
            crew=NAME,
            problem=problem.id,
            round=policy.version,
            slot=slot,
            origin=origin,
            rollouts=rollouts,
            created_s=RealClock().now_s(),
        )
        measured.append(
            Candidate(
                group=group,
                problem=problem,
                own=True,
                stranger=False,
                family=group.id,
                since=policy.version,
                position=slot,
            )
        )
    return measured


@dataclass(frozen=True, slots=True)
class OurCost:
    step: Cost
    sampling_s: float
    num_trained: int  # sequences


def our_cost(
    policy: Policy,
    work: StepWork,
    repeats: int,
    setup: Setup = Setup(),
    warms: int = LEARNER_WARMS,
) -> OurCost:
    step = OurStep(policy, work, setup)
    measured = cost(step, policy.device, repeats, warming=warms)
    return OurCost(measured, statistics.median(step.sampling_s[warms:]), step.num_trained)


def has_trl() -> bool:
    return importlib.util.find_spec("trl") is not None


@dataclass(frozen=True, slots=True)
class TrlSetup:
    """How TRL takes its steps."""

    weights: torch.dtype = torch.float32  # what it keeps them in
    rows: int = 0  # completions in one of its micro-batches; 0: all
    recomputes: bool = False
    optimizer: str = ""  # its name for one; its own choice otherwise
    lora: Lora | None = None  # None: it trains the whole model

    def __str__(self) -> str:
        words = [f"TRL, {str(self.weights).removeprefix('torch.')} weights"]
        if self.lora:
            words.append(f"LoRA of rank {self.lora.rank}")
        if self.rows:
            words.append(f"{self.rows} rows")
        if self.recomputes:
            words.append("recomputing")
        return ", ".join([*words, *([self.optimizer] if self.optimizer else [])])


LEAST_ROWS = 8  # with fewer, recomputing with more is quicker


def trl_setups(first: TrlSetup) -> Iterator[TrlSetup]:
    """Ways that take less and less memory, the quickest first: fewer rows, then recomputing with
    all, and at last moments in 8 bits, if that is installed.
    """
    halves = [first.rows >> times for times in range(first.rows.bit_length())]
    enough = [rows for rows in halves if rows >= LEAST_ROWS] or halves[:1]
    for rows in enough:
        yield replace(first, rows=rows)
    for rows in halves:
        yield replace(first, rows=rows, recomputes=True)
    if first.lora is None and importlib.util.find_spec("bitsandbytes"):
        for rows in halves:
            yield replace(first, rows=rows, recomputes=True, optimizer="adamw_bnb_8bit")


def best_trl_cost(
    build: Callable[[], Policy], work: StepWork, repeats: int, first: TrlSetup
) -> tuple[Cost, TrlSetup]:
    """TRL's in the quickest way that memory holds, and which one that is."""
    for setup in trl_setups(first):
        try:
            return trl_cost(build(), work, repeats, setup), setup
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            logger.info("%s: memory does not hold it", setup)
    raise RuntimeError("out of memory in every way")


def trl_cost(
    policy: Policy,
    work: StepWork,
    repeats: int,
    setup: TrlSetup = TrlSetup(),
    between: Callable[[], object] = lambda: None,
) -> Cost:
    """TRL's, with this policy's model, after a step that warms up.

    `between`: done after each step, untimed.
    """
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    clock = _Clock(policy.device, between)
    with tempfile.TemporaryDirectory() as folder, _quietly():
        policy.vocabulary.save(Path(folder))
        trainer = trl.GRPOTrainer(
            model=policy.base.to(setup.weights),
            reward_funcs=_reward_of_all(work.reward),
            args=trl.GRPOConfig(**_trl_settings(policy, work, repeats, folder, setup)),
            train_dataset=datasets.Dataset.from_dict({"prompt": work.texts}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[clock],
            peft_config=_peft_config(setup.lora) if setup.lora else None,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return Cost(statistics.median(clock.seconds[1:]), clock.peak_gib)


def _peft_config(lora: Lora) -> LoraConfig:
    """Of the same adapters as ours."""
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,
        target_modules=list(lora.targets) or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def _trl_settings(
    policy: Policy, work: StepWork, repeats: int, folder: str, setup: TrlSetup
) -> dict[str, Any]:
    rows = setup.rows or work.num_sequences
    if work.num_sequences % rows:
        raise ValueError(
            f"trl_rows={rows} does not divide the {work.num_sequences} completions of a step; use "
            f"{math.gcd(rows, work.num_sequences)}"
        )
    return {
        **({"optim": setup.optimizer} if setup.optimizer else {}),
        "output_dir": folder,
        "use_cpu": policy.device.type == "cpu",
        "bf16": policy.dtype != torch.float32,  # its own choice of a half type
        "gradient_checkpointing": setup.recomputes,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": work.num_sequences // rows,
        "num_generations": work.num_samples,
        "max_completion_length": work.max_tokens,
        "generation_kwargs": None if work.may_end else {"min_new_tokens": work.max_tokens},
        "max_steps": 1 + repeats,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": GRAD_CLIP,
        "loss_type": "grpo",
        "beta": 0.0,
        "num_iterations": 1,
        "temperature": 1.0,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def _reward_of_all(reward: Reward) -> Callable[..., list[float]]:
    def rewards(
        prompts: Sequence[str], completions: Sequence[str], **others: object
    ) -> list[float]:
        return [reward(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]

    return rewards


class _Clock(TrainerCallback):
    """Times each optimiser step, the sampling for it included; the first is only to warm up."""

    def __init__(self, device: torch.device, between: Callable[[], object]) -> None:
        self._device = device
        self._between = between
        self._start_s = 0.0
        self.seconds: list[float] = []
        self.peak_gib: float | None = None

    def on_step_begin(self, *arguments: object, **others: object) -> None:
        if len(self.seconds) == 1:
            start_peak(self._device)
        wait(self._device)
        self._start_s = time.perf_counter()

    def on_step_end(self, *arguments: object, **others: object) -> None:
        wait(self._device)
        self.seconds.append(time.perf_counter() - self._start_s)
        self.peak_gib = peak_gib(self._device)
        self._between()


@contextmanager
def _quietly() -> Iterator[None]:
    """Without TRL's warnings, and without the word it sends to its makers about every trainer."""
    constants: Any = huggingface_hub.constants
    before = constants.HF_HUB_DISABLE_TELEMETRY
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = before
