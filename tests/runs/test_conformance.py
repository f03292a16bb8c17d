"""The check behind every importance ratio: what is not the trainer's log-probs is found out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from fakes import identity, reference_logp, spread_crew
from families import write_family
from motley.engines import TorchEngine
from motley.engines.engine import Completion
from motley.exchange import MemoryLog, Outbox, Signer
from motley.models.policy import Policy
from motley.peers.peer import Peer
from motley.records import HUB, Sampling
from motley.runs import building, conformance
from motley.runs.building import build_peer
from motley.runs.conformance import (
    Bound,
    Difference,
    _summary,
    check_crew,
    check_engine,
    differences,
    float32_bound,
)
from motley.runs.folder import Run


def peer_of(folder: Path, train: str, sampling: str = "", models: Sequence[str] = ()) -> Peer:
    config = spread_crew(folder, (train, "full"), sampling=sampling, models=models)
    author = identity(config.peer[0].name)
    outbox = Outbox(None, Signer(author.public, author.sign))
    return build_peer(
        Run(config, folder / "run"), config.peer[0], MemoryLog(), outbox, identity(HUB).public
    )


class Doctored(TorchEngine):
    """Reports what `doctor` makes of a completion's log-probs."""

    doctor: Callable[[Completion], tuple[float, ...]]

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        made = super().sample(prompts, num_samples, sampling, seed)
        return [[Completion(c.tokens, self.doctor(c), c.ending) for c in row] for row in made]


def doctored(doctor: Callable[[Completion], tuple[float, ...]]) -> type[Doctored]:
    return type("DoctoredSo", (Doctored,), {"doctor": staticmethod(doctor)})


class Forgetful(TorchEngine):
    """Never takes new weights: samples from the policy as it was in the beginning."""

    def refresh(self) -> None:
        """Nothing."""


class AtOne(TorchEngine):
    """Draws and reports at temperature 1, whatever it is asked for."""

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        at_one = msgspec.structs.replace(sampling, temperature=1.0)
        return super().sample(prompts, num_samples, at_one, seed)


class Raw(TorchEngine):
    """Draws as asked, and reports the full softmax at temperature 1, as many servers do."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.policy = policy

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        made = super().sample(prompts, num_samples, sampling, seed)
        return [
            [
                Completion(c.tokens, tuple(reference_logp(self.policy, p, c.tokens)), c.ending)
                for c in row
            ]
            for p, row in zip(prompts, made, strict=True)
        ]


@pytest.fixture
def few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each token takes long, as with bfloat16 on a processor that has none."""
    monkeypatch.setattr(conformance, "NUM_PROBLEMS", 4)


BOUND = float32_bound(num_layers=3, temperature=1.0)  # of tiny:0.3m in most of these tests
ON_AVERAGE = f"differs by more than {BOUND.mean:.1g} on average"


@pytest.mark.parametrize("sampling", ["", "temperature = 0.7\ntop_k = 3", "temperature = 1.3"])
@pytest.mark.parametrize("train", ["full", "lora", "bits", "last"])
def test_our_engine_reports_the_trainers_logprobs(train: str, sampling: str, folder: Path) -> None:
    away = check_engine(peer_of(folder, train, sampling).half)
    assert away.fault == ""
    assert 0 <= away.mean <= away.rare <= away.largest


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_a_model_that_is_scored_one_sequence_at_a_time_is_held_to_those_scores(
    kind: str, folder: Path
) -> None:
    """Its logits are more than a projection: a cap, or a scale."""
    model = str(write_family(kind, folder / kind))
    peer = peer_of(folder, "full", models=(model, model))
    assert peer.half.policy.one_by_one
    assert check_engine(peer.half).fault == ""


def test_more_layers_and_a_lower_temperature_may_differ_by_more() -> None:
    three = float32_bound(num_layers=3, temperature=1.0)
    assert float32_bound(num_layers=30, temperature=1.0) == pytest.approx([10 * x for x in three])
    assert float32_bound(num_layers=3, temperature=0.5) == pytest.approx([2 * x for x in three])
    assert float32_bound(num_layers=3, temperature=2.0) == pytest.approx([x / 2 for x in three])
    assert three == pytest.approx((1.07e-5, 4.29e-5), rel=0.01)


def test_mean_and_percentile_are_judged_and_the_largest_is_not() -> None:
    bound = Bound(mean=0.1, rare=0.3)
    fault = lambda *away: _summary(torch.tensor(away), bound).fault
    assert fault(*[0.05] * 199, 5.0) == ""
    assert fault(*[0.2] * 200) == "differs by more than 0.1 on average"
    assert fault(*[0.05] * 195, *[-0.4] * 5) == "differs by more than 0.3 in one token of a hundred"
    assert fault(*[0.05] * 199, 50.0) == "differs by more than 0.1 on average"


@pytest.mark.slow
@pytest.mark.parametrize(("every", "is_fault"), [(200, False), (50, True)])
def test_rounding_may_decide_about_one_cut_token_in_a_hundred(
    every: int, is_fault: bool, folder: Path
) -> None:
    peer = peer_of(folder, "full", "top_p = 0.9")
    seen = 0

    def at_the_edge(completion: Completion) -> tuple[float, ...]:
        nonlocal seen
        before, seen = seen, seen + len(completion.tokens)
        is_edge = before // every != seen // every
        return (completion.logprobs[0] + is_edge, *completion.logprobs[1:])

    peer.half.engine = doctored(at_the_edge)(peer.learner.policy)
    away = differences(peer.half, peer.config.sampling)["sampled"]
    assert away.largest == pytest.approx(1.0, abs=1e-3)
    assert bool(away.fault) == is_fault


@pytest.mark.slow
def test_every_sampled_token_is_compared(folder: Path) -> None:
    peer = peer_of(folder, "full")
    made: list[Completion] = []

    def noting(completion: Completion) -> tuple[float, ...]:
        made.append(completion)
        return completion.logprobs

    peer.half.engine = doctored(noting)(peer.learner.policy)
    honest = differences(peer.half, peer.config.sampling)["sampled"]
    num_tokens = sum(len(c.tokens) for c in made)
    assert num_tokens > 128
    noted = len(made)
    peer.half.engine = doctored(lambda c: tuple(x + 1.0 for x in c.logprobs))(peer.learner.policy)
    assert differences(peer.half, peer.config.sampling)["sampled"].mean == pytest.approx(
        1.0, abs=1e-3
    )
    assert (honest.fault, noted) == ("", 128)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("doctor", "rare", "mean"),
    [
        (lambda c: tuple(x + 1e-3 for x in c.logprobs), 1e-3, 1e-3),
        (lambda c: (c.logprobs[0] - 0.5, *c.logprobs[1:]), 0.5, None),
        (lambda c: tuple(2 * x for x in c.logprobs), None, None),
        (lambda c: (0.0,) * len(c.tokens), None, None),
    ],
    ids=["a little too sure", "first token wrong", "twice the logits", "none at all"],
)
def test_an_engine_that_reports_other_logprobs_is_found_out_with_figures(
    doctor: Callable[[Completion], tuple[float, ...]],
    rare: float | None,
    mean: float | None,
    folder: Path,
) -> None:
    peer = peer_of(folder, "full")
    peer.half.engine = doctored(doctor)(peer.learner.policy)
    away = check_engine(peer.half)
    assert away.fault == ON_AVERAGE
    assert away.rare == pytest.approx(rare, rel=0.01) if rare else away.rare > 0.5
    if mean:
        assert away.mean == pytest.approx(mean, rel=0.01)


@pytest.mark.slow
def test_one_token_in_hundreds_that_is_far_off_is_enough_to_be_found_out(folder: Path) -> None:
    peer = peer_of(folder, "full")
    seen: list[Completion] = []

    def doctor(completion: Completion) -> tuple[float, ...]:
        seen.append(completion)
        return (completion.logprobs[0] + 0.1 * (len(seen) == 100), *completion.logprobs[1:])

    peer.half.engine = doctored(doctor)(peer.learner.policy)
    away = check_engine(peer.half)
    assert away.fault == ON_AVERAGE
    assert away.rare < BOUND.rare


def test_one_token_in_a_completion_that_is_slightly_off_is_found_by_the_percentile() -> None:
    """As where the first of 64 tokens is read at a wrong position."""
    away_M = torch.full((64, 64), BOUND.mean / 10)
    away_M[:, 0] = 2 * BOUND.rare
    away = _summary(away_M.flatten(), BOUND)
    assert away.fault == f"differs by more than {BOUND.rare:.1g} in one token of a hundred"
    assert away.mean < BOUND.mean


@pytest.mark.slow
def test_an_engine_that_reports_no_number_is_found_out(folder: Path) -> None:
    peer = peer_of(folder, "full")
    peer.half.engine = doctored(lambda c: (float("nan"),) * len(c.tokens))(peer.learner.policy)
    assert check_engine(peer.half).fault
    nan = float("nan")
    assert Difference(nan, nan, nan, outside=0.0, bound=BOUND).fault
    assert _summary(torch.tensor([1e-7] * 99 + [nan]), BOUND).fault


@pytest.mark.slow
def test_an_engine_that_does_not_merge_adapters_is_found_out(folder: Path) -> None:
    peer = peer_of(folder, "lora")
    peer.half.engine = Forgetful(peer.learner.policy)
    away = check_engine(peer.half)
    assert away.fault == ON_AVERAGE
    assert away.mean > 100 * BOUND.mean


def test_an_engine_that_missed_a_step_is_found_out(folder: Path) -> None:
    """A step of Adam moves every weight by about the learning rate; here one of the smallest."""
    peer = peer_of(folder, "full")
    peer.half.engine = Forgetful(peer.learner.policy)
    with torch.no_grad():
        for _, parameter in peer.learner.policy.trained():
            random = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            parameter.add_(1e-4 * random.sign())
    assert check_engine(peer.half).fault == ON_AVERAGE


@pytest.mark.slow
@pytest.mark.usefixtures("few_problems")
def test_a_bfloat16_engine_of_a_float32_trainer_is_found_out(folder: Path) -> None:
    peer = peer_of(folder, "full")
    rounded = dataclasses.replace(peer.learner.policy, dtype=torch.bfloat16)
    peer.half.engine = TorchEngine(rounded)
    away = check_engine(peer.half)
    assert away.fault == ON_AVERAGE
    assert away.mean > 50 * BOUND.mean


@pytest.mark.slow
@pytest.mark.usefixtures("few_problems")
def test_a_bfloat16_engine_of_a_bfloat16_trainer_may_round_as_that_does(folder: Path) -> None:
    peer = peer_of(folder, "full")
    peer.half.policy.dtype = torch.bfloat16
    peer.half.engine.refresh()
    assert check_engine(peer.half).fault == ""
    for too_sure, fault in ((0.015, ""), (0.1, "differs by more than 0.03 on average")):
        doctor = doctored(lambda c, by=too_sure: tuple(x + by for x in c.logprobs))
        peer.half.engine = doctor(peer.half.policy)
        assert check_engine(peer.half).fault == fault


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 0.95, 1.3])
def test_an_engine_that_samples_at_another_temperature_is_found_out(
    temperature: float, folder: Path
) -> None:
    peer = peer_of(folder, "full", f"temperature = {temperature}")
    assert check_engine(peer.half).fault == ""
    peer.half.engine = AtOne(peer.learner.policy)
    assert check_engine(peer.half).fault.endswith("on average")


@pytest.mark.slow
@pytest.mark.parametrize("train", ["full", "lora", "last"])
def test_the_check_leaves_a_peer_as_it_was(train: str, folder: Path) -> None:
    peer = peer_of(folder, train)
    policy = peer.learner.policy
    before = {
        name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()
    }
    prompts = [policy.vocabulary.encode("sort 31=")]
    sampled = peer.half.engine.sample(prompts, 4, Sampling(max_tokens=5), seed=1)
    random = torch.get_rng_state()
    check_engine(peer.half)
    assert all(
        torch.equal(parameter, before[name]) for name, parameter in policy.model.named_parameters()
    )
    assert peer.half.engine.sample(prompts, 4, Sampling(max_tokens=5), seed=1) == sampled
    assert torch.equal(torch.get_rng_state(), random)
    assert (peer.half.sampled_rounds, policy.version, len(peer.half.outbox)) == (0, 0, 0)


@pytest.mark.slow
def test_an_engine_that_fails_leaves_the_adapters_as_they_were(folder: Path) -> None:
    peer = peer_of(folder, "lora")
    before = {name: parameter.detach().clone() for name, parameter in peer.learner.policy.trained()}

    class Broken(TorchEngine):
        def sample(self, *arguments: object, **more: object) -> list[list[Completion]]:
            raise RuntimeError("out of memory")

    peer.half.engine = Broken(peer.learner.policy)
    with pytest.raises(RuntimeError, match="out of memory"):
        check_engine(peer.half)
    assert all(
        torch.equal(parameter, before[name]) for name, parameter in peer.learner.policy.trained()
    )


@pytest.mark.slow
def test_a_crew_is_checked_task_and_peers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "exact.py").write_text(
        "def exact_match(completions, answer):\n"
        "    return [float(c.strip() == a) for c, a in zip(completions, answer)]\n"
    )
    config = spread_crew(folder, ("full", "lora"), task="exact:exact_match")
    rows = check_crew(config).rows
    assert {(row["what"], row["result"]) for row in rows} == {
        ("task exact:exact_match", "ok"),
        ("full0: engine against trainer, cpu float32", "ok"),
        ("lora1: engine against trainer, cpu float32", "ok"),
    }
    ways = ["T=1", "T=0.7", "T=0.7 top_k=20", "T=0.7 top_p=0.9"]
    assert [(row["sampling"], row["fits"]) for row in rows[1:]] == 2 * list(
        zip(ways, ["any", "sampled, full", "sampled", "sampled"], strict=True)
    )
    assert all(
        0 < row["mean_difference"] <= row["99 %"] <= row["largest_difference"] for row in rows[1:]
    )
    doctor = doctored(lambda c: tuple(x - 0.25 for x in c.logprobs))
    monkeypatch.setattr(building, "open_engine", lambda policy, part, folder: doctor(policy))
    doctored_row = check_crew(config).rows[1]
    assert doctored_row["result"] == f"{ON_AVERAGE}, declared 'sampled'; what fits: nothing"
    assert doctored_row["99 %"] == pytest.approx(0.25, rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("few_problems")
def test_an_engine_of_another_convention_is_found_out_and_its_own_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "open_engine", lambda policy, part, folder: Raw(policy))
    at_one, sharper, *truncated = check_crew(spread_crew(folder, ("full", "full"))).rows[1:5]
    assert (at_one["result"], at_one["fits"]) == ("ok", "any")
    for row in (sharper, *truncated):
        assert row["result"].endswith("declared 'sampled'; what fits: raw")


@pytest.mark.slow
def test_a_task_that_does_not_know_its_own_answers_shows_in_the_check(folder: Path) -> None:
    rows = check_crew(spread_crew(folder, ("full", "full"))).rows
    assert "learning would lead away from the answers" in rows[0]["result"]
    assert rows[0]["result"] != "ok"
    assert {row["result"] for row in rows[1:]} == {"ok"}
