from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.small import SMALL
from compute.devices import needs_interpreter
from motley.benchmarks import grpo, sampling, training
from motley.benchmarks.bench import Bench, Sizes
from motley.benchmarks.gpu import SECTIONS, GpuWork, gpu_benchmark, measure
from motley.benchmarks.models import build
from motley.benchmarks.timing import Cost, Machine
from motley.compute.scoring import score
from motley.engines import Completion, torch_engine
from motley.models.policy import Policy
from motley.records import Sampling

MODEL = "tiny:0.3m"
COLUMNS = {
    "machine": "what value unit",
    "decode": (
        "model sequences ms_per_step tokens_per_s generate_ms ratio floor_ms of_floor peak_gib "
        "generate_peak_gib"
    ),
    "context": "model context sequences ms_per_step tokens_per_s floor_ms of_floor peak_gib",
    "memory": "model context sequences returned seconds tokens_per_s peak_gib said",
    "call": (
        "model prompts samples tokens seconds tokens_per_s generate_s ratio peak_gib "
        "generate_peak_gib vllm_s vllm_ratio vllm_logprobs_s vllm_logprobs_ratio note"
    ),
    "ragged": (
        "model prompts samples longest tokens seconds tokens_per_s peak_gib vllm_s vllm_ratio "
        "vllm_logprobs_s vllm_logprobs_ratio note"
    ),
    "training": (
        "model rows tokens tokens_per_s plain_tokens_per_s ratio of_product_rate "
        "plain_of_product_rate peak_gib plain_peak_gib"
    ),
    "logprobs": "model what tokens mean_difference 99.9_% mean_ratio",
    "grpo": (
        "model learn sequences trained tokens against seconds sampling_s trl_s ratio peak_gib "
        "trl_peak_gib note"
    ),
}


def bench(flops_per_s: float = 1e9, bytes_per_s: float = 1e9) -> Bench:
    return Bench(Machine(bytes_per_s, flops_per_s), torch.device("cpu"), "auto", SMALL)


def measure_call(with_vllm: Bench) -> list[dict[str, Any]]:
    return list(measure(lambda what, done, total: None, with_vllm, (MODEL,), ("call",)))


def rows_of(section: str) -> list[dict[str, Any]]:
    return list(measure(lambda what, done, total: None, bench(), (MODEL,), (section,)))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """All sections, without TRL, of two models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "has_trl", lambda: False)
        seen: list[tuple[str, int, int]] = []
        asked = GpuWork(device="cpu", models=(MODEL, "tiny:1m"), sizes=SMALL)
        made = gpu_benchmark(lambda *shown: seen.append(shown), asked)
    assert [done for _, done, _ in seen[1:]] == list(range(seen[-1][2]))
    return made


@pytest.mark.slow
def test_every_section_has_its_columns_and_models(rows: list[dict[str, Any]]) -> None:
    assert list(dict.fromkeys(row["section"] for row in rows)) == list(COLUMNS) == list(SECTIONS)
    for row in rows:
        assert list(row) == [
            "section",
            *(name.replace("_%", " %") for name in COLUMNS[row["section"]].split()),
        ]
    assert Counter((row["section"], row.get("model", "")) for row in rows) == {
        ("machine", ""): 2,
        ("memory", MODEL): 1,
        **{(name, model): 2 for name in ("decode", "context") for model in (MODEL, "tiny:1m")},
        **{
            (name, model): 1
            for name in ("call", "ragged", "training", "grpo")
            for model in (MODEL, "tiny:1m")
        },
        **{("logprobs", model): 3 for model in (MODEL, "tiny:1m")},
    }
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.slow
def test_ratios_are_what_ours_is_faster_by(rows: list[dict[str, Any]]) -> None:
    by = lambda section: [row for row in rows if row["section"] == section]
    for row in by("decode"):
        assert row["tokens_per_s"] == pytest.approx(
            1e3 * row["sequences"] / row["ms_per_step"], abs=1
        )
        if row["sequences"] == 4:
            assert row["ratio"] == pytest.approx(row["generate_ms"] / row["ms_per_step"])
        else:  # more than generate is asked for
            assert row["ratio"] is row["generate_ms"] is None
    for row in by("call"):
        assert row["ratio"] == pytest.approx(row["generate_s"] / row["seconds"])
        assert row["tokens_per_s"] == pytest.approx(3 * 4 * 12 / row["seconds"], abs=1)
    for row in by("training"):
        assert row["ratio"] == pytest.approx(
            row["tokens_per_s"] / row["plain_tokens_per_s"], rel=0.01
        )
        assert row["ratio"] == pytest.approx(row["of_product_rate"] / row["plain_of_product_rate"])
    for row in by("decode") + by("context"):
        assert row["of_floor"] == pytest.approx(row["floor_ms"] / row["ms_per_step"])


FAKE_VLLM = """
import json, os, pathlib
class SamplingParams:
    def __init__(self, **given): self.given = given
class _Made:
    def __init__(self, count): self.outputs = [type("Out", (), {"token_ids": [7] * count})]
class LLM:
    def __init__(self, **given):
        one = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        pathlib.Path(os.environ["FAKE_SAID"]).write_text(json.dumps(given | {"in_one": one}))
        assert pathlib.Path(given["model"], "config.json").exists()
    def generate(self, prompts, params, use_tqdm):
        assert all(len(one["prompt_token_ids"]) == 6 for one in prompts)
        with open(os.environ["FAKE_SAID"] + ".calls", "a") as calls:
            print(json.dumps([one.given.get("logprobs") for one in params]), file=calls)
        return [_Made(one.given["max_tokens"] - SHORT) for one in params]
    def reset_prefix_cache(self): pass
"""


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """An interpreter whose vLLM makes answers that are so many tokens short."""

    def made(short: int) -> str:
        (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("SHORT", str(short)))
        monkeypatch.setenv("FAKE_SAID", str(tmp_path / "said.json"))
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return str(python)

    return made


@pytest.mark.slow
def test_vllm_is_asked_for_the_same_call(fake_vllm: Callable[[int], str], tmp_path: Path) -> None:
    (row,) = measure_call(dataclasses.replace(bench(), vllm=fake_vllm(0)))
    assert row["vllm_s"] > 0
    assert row["vllm_ratio"] == pytest.approx(row["vllm_s"] / row["seconds"])
    with_logprobs = row["vllm_logprobs_s"] / row["seconds"]
    assert row["vllm_logprobs_ratio"] == pytest.approx(with_logprobs)
    asked = json.loads((tmp_path / "said.json").read_text())
    assert asked["max_num_seqs"] == 3 * 4
    assert asked["max_model_len"] == 6 + 12
    assert asked["in_one"]  # process
    calls = [json.loads(one) for one in (tmp_path / "said.json.calls").read_text().splitlines()]
    each = 1 + SMALL.repeats
    assert calls == [[None] * 12] * each + [[0] * 12] * each  # tokens alone, then log-probs too


@pytest.mark.slow
def test_a_vllm_that_fails_or_makes_less_leaves_the_rest(fake_vllm: Callable[[int], str]) -> None:
    (row,) = measure_call(dataclasses.replace(bench(), vllm=fake_vllm(1)))
    assert row["note"] == "not measured: vLLM made 132 tokens and not 144"
    (row,) = measure_call(dataclasses.replace(bench(), vllm=sys.executable))
    assert row["note"].endswith("No module named 'vllm'")
    (row,) = measure_call(dataclasses.replace(bench(), vllm="/no/such/python"))
    assert row["note"].startswith("not measured:")
    assert row["vllm_s"] is row["vllm_ratio"] is row["vllm_logprobs_ratio"] is None
    assert row["seconds"] > 0


def test_ragged_lengths_are_log_normal_and_cut() -> None:
    limits = sampling.ragged_limits(Sizes(problems=64, samples=32))
    assert min(limits) == 50
    assert max(limits) == 2048
    assert statistics.median(limits) == pytest.approx(256, rel=0.1)
    inner = [math.log(one) for one in limits if 50 < one < 2048]
    assert statistics.stdev(inner) == pytest.approx(0.85, abs=0.06)
    assert limits == sampling.ragged_limits(Sizes(problems=64, samples=32))


@pytest.mark.slow
@needs_interpreter
def test_ragged_answers_are_as_long_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "runs_kernels", lambda device: True)
    lengths: list[int] = []
    cost = lambda job, *rest: (
        lengths.extend(len(c.tokens) for row in job() for c in row) or Cost(2.0, None)
    )
    monkeypatch.setattr(sampling, "cost", cost)
    small = dataclasses.replace(SMALL, problems=2, samples=2, ragged_longest=9)
    (row,) = sampling._ragged(dataclasses.replace(bench(), sizes=small), MODEL)
    assert lengths == sampling.ragged_limits(small)
    assert (row["tokens"], row["longest"]) == (sum(lengths), max(lengths))
    assert row["tokens_per_s"] == round(sum(lengths) / 2)


@pytest.mark.slow
def test_a_missing_trl_is_said_in_the_row(rows: list[dict[str, Any]]) -> None:
    for row in (row for row in rows if row["section"] == "grpo"):
        assert row["note"].startswith("not measured: pip install 'motley-rl[bench]'")
        assert row["ratio"] is row["trl_s"] is None
        assert row["sequences"] == row["trained"] == 12
        assert 0 < row["sampling_s"] < row["seconds"]


@pytest.mark.slow
def test_a_step_of_trl_is_compared_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "has_trl", lambda: True)
    monkeypatch.setattr(grpo, "trl_cost", lambda *arguments: Cost(100.0, 2.0))
    (row,) = rows_of("grpo")
    assert row["ratio"] == pytest.approx(100.0 / row["seconds"])
    assert (row["trl_peak_gib"], row["against"], row["note"]) == (
        2.0,
        "TRL, float32 weights, 6 rows",
        "",
    )


@pytest.mark.slow
def test_a_trl_that_fails_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> Cost:
        raise ValueError("no such GPU\nand more")

    monkeypatch.setattr(grpo, "has_trl", lambda: True)
    monkeypatch.setattr(grpo, "trl_cost", refuse)
    (row,) = rows_of("grpo")
    assert (row["note"], row["ratio"]) == ("not measured: no such GPU", None)


@pytest.mark.slow
def test_what_the_engine_says_when_memory_ends_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cutting:
        def __init__(self, policy: Policy) -> None:
            self._engine = torch_engine(policy)

        def sample(
            self, prompts: Sequence[Sequence[int]], *others: Any, **named: Any
        ) -> list[list[Completion]]:
            for _ in range(2):
                warnings.warn("going on with 2 at a time", stacklevel=2)
            return self._engine.sample(prompts[:-1], *others, **named)

    (row,) = rows_of("memory")
    assert (row["context"], row["sequences"], row["returned"], row["said"]) == (32, 5, 5, "")
    monkeypatch.setattr(sampling, "torch_engine", Cutting)
    (row,) = rows_of("memory")
    assert (row["returned"], row["said"]) == (4, "going on with 2 at a time")


def test_the_floor_of_a_step_by_hand() -> None:
    policy = build(MODEL)
    parameters = sum(p.numel() for p in policy.model.parameters())
    context = 6 + (2 + 12) / 2
    read = 4 * parameters + 8 * context * 3 * 2 * 96 * 4
    assert sampling._floor_s(bench(flops_per_s=1e30), MODEL, 6, 8) == pytest.approx(read / 1e9)
    assert sampling._floor_s(bench(bytes_per_s=1e30), MODEL, 6, 8) == pytest.approx(
        2 * parameters * 8 / 1e9
    )


@pytest.mark.slow
def test_log_probs_agree_and_a_trainer_that_is_off_is_seen(
    monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]
) -> None:
    for row in (row for row in rows if row["section"] == "logprobs"):
        assert row["mean_difference"] <= row["99.9 %"] < 1e-4
        assert row["mean_ratio"] == pytest.approx(1, abs=1e-4)
    monkeypatch.setattr(training, "score", off_by(0.25))
    trainer, plain, engine = rows_of("logprobs")
    for row in (trainer, engine):
        assert row["mean_difference"] == pytest.approx(0.25, abs=1e-3)
        assert row["mean_ratio"] == pytest.approx(1.2840, abs=1e-3)
    assert plain["mean_difference"] < 1e-4
    assert (trainer["tokens"], engine["tokens"]) == (8 * 19, 3 * 4 * 12)


def off_by(nats: float) -> Callable[..., Any]:
    def shifted(policy: Policy, packed: Any) -> Any:
        found = score(policy, packed)
        return type(found)(found.logp_M + nats, found.entropy_M)

    return shifted


def test_differences_by_hand() -> None:
    row = training._difference(
        "m", "w", torch.tensor([0.0, -1.0, -2.0]), torch.tensor([0.0, -1.5, -1.0])
    )
    assert row["mean_difference"] == pytest.approx(0.5)
    assert row["mean_ratio"] == pytest.approx((1 + 1.6487213 + 0.3678794) / 3)
    many = torch.arange(10_001.0)
    assert training._difference("m", "w", many, torch.zeros(10_001))["99.9 %"] == 9990


def test_both_sides_of_a_training_step_learn_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build(MODEL)
    problems, made = training._rows_to_learn(bench(), policy)
    sequences = training._to_score(policy, problems, made)
    assert [(len(s.prompt), len(s.tokens)) for s in sequences] == [(1, 19)] * 8
    learned = grpo.candidates(policy, problems, made, Sampling(max_tokens=20))
    assert [
        (policy.prompts.ids(c.problem), r.tokens) for c in learned for r in c.group.rollouts
    ] == [(s.prompt, s.tokens) for s in sequences]


def test_a_section_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ValueError, match="section 'decoding' is not known; choose from machine, decode"
    ):
        gpu_benchmark(
            lambda *shown: None,
            GpuWork(device="cpu", models=(MODEL,), sizes=SMALL, sections=("decoding",)),
        )
