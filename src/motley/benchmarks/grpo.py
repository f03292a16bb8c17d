"""One whole GRPO step, ours and TRL's: sample, score, learn, and have the new weights ready to
sample with.

Both do the same work: the same model, prompts, group size, lengths, reward, learning rate and
clipping, one optimiser step on all completions, no penalty. TRL samples with `generate`, and
recomputes no activations (its default would).
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import torch
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from motley.benchmarks.timing import LEARNER_WARMS, Cost, cost, peak_gib, start_peak, wait
from motley.clock import RealClock
from motley.config import Learning
from motley.engines import Completion, torch_engine
from motley.learning.learner import Learner
from motley.learning.select import Candidate
from motley.models.policy import Policy
from motley.objectives import objective
from motley.records import Group, Origin, Problem, Rollout, Sampling
from motley.tasks.extras import install

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
    trl_rows: int = 0  # completions in one of TRL's micro-batches; 0: all
    reward: Reward = checksum

    @property
    def num_sequences(self) -> int:
        return len(self.texts) * self.num_samples


class OurStep:
    """What a peer alone does in a round, without its log."""

    def __init__(self, policy: Policy, work: StepWork) -> None:
        self._policy, self._work = policy, work
        self._problems = [Problem(prompt=text) for text in work.texts]
        self._prompts = [policy.prompts.ids(problem) for problem in self._problems]
        self._engine = torch_engine(policy)
        self._learner = Learner(policy, objective("grpo"), Learning(lr=LR, grad_clip=GRAD_CLIP), LR)
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


def our_cost(policy: Policy, work: StepWork, repeats: int) -> OurCost:
    step = OurStep(policy, work)
    measured = cost(step, policy.device, repeats, warming=LEARNER_WARMS)
    return OurCost(measured, statistics.median(step.sampling_s[LEARNER_WARMS:]), step.num_trained)


def has_trl() -> bool:
    return importlib.util.find_spec("trl") is not None


def trl_cost(
    policy: Policy,
    work: StepWork,
    repeats: int,
    weights: torch.dtype = torch.float32,
    between: Callable[[], object] = lambda: None,
) -> Cost:
    """TRL's, with this policy's model, after a step that warms up.

    `weights`: what TRL keeps the weights in; ours are float32. `between`: done after each step,
    untimed.
    """
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    clock = _Clock(policy.device, between)
    with tempfile.TemporaryDirectory() as folder, _quietly():
        policy.vocabulary.save(Path(folder))
        trainer = trl.GRPOTrainer(
            model=policy.base.to(weights),
            reward_funcs=_reward_of_all(work.reward),
            args=trl.GRPOConfig(**_trl_settings(policy, work, repeats, folder)),
            train_dataset=datasets.Dataset.from_dict({"prompt": work.texts}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return Cost(statistics.median(clock.seconds[1:]), clock.peak_gib)


def _trl_settings(policy: Policy, work: StepWork, repeats: int, folder: str) -> dict[str, Any]:
    rows = work.trl_rows or work.num_sequences
    if work.num_sequences % rows:
        raise ValueError(
            f"trl_rows={rows} does not divide the {work.num_sequences} completions of a step"
        )
    return {
        "output_dir": folder,
        "use_cpu": policy.device.type == "cpu",
        "bf16": policy.dtype != torch.float32,  # its own choice of a half type
        "gradient_checkpointing": False,
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
