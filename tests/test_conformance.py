"""The check behind every importance ratio: an engine that reports anything but the trainer's
log-probs is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import motley.run
from fakes import identity, spread_crew, write_task
from motley.conformance import TOLERANCE, Difference, check_crew, check_engine, differences
from motley.engines import TorchEngine
from motley.engines.engine import Completion
from motley.exchange import MemoryLog, Outbox, Signer
from motley.peer import Peer
from motley.records import HUB, Sampling
from motley.run import Run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_task(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def peer_of(folder: Path, train: str, sampling: str = "") -> Peer:
    config = spread_crew(folder, (train, "full"), sampling=sampling)
    author = identity(config.peer[0].name)
    outbox = Outbox(None, Signer(author.public, author.sign))
    return Run(config, folder / "run").build(
        config.peer[0], MemoryLog(), outbox, identity(HUB).public
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


@pytest.mark.parametrize("sampling", ["", "temperature = 0.7\ntop_k = 3"])
@pytest.mark.parametrize("train", ["full", "lora", "last"])
def test_our_engine_reports_the_trainers_logprobs(train: str, sampling: str, folder: Path) -> None:
    found = check_engine(peer_of(folder, train, sampling).half)
    assert found.fault == ""
    assert 0 <= found.mean <= found.largest < 1e-5


def test_every_sampled_token_is_compared(folder: Path) -> None:
    peer = peer_of(folder, "full")
    made: list[Completion] = []

    def noting(completion: Completion) -> tuple[float, ...]:
        made.append(completion)
        return completion.logprobs

    peer.half.engine = doctored(noting)(peer.learner.policy)
    found = differences(peer.half, peer.config.sampling)["sampled"]
    num_tokens = sum(len(c.tokens) for c in made)
    assert num_tokens > 128
    noted = len(made)
    peer.half.engine = doctored(lambda c: tuple(x + 1.0 for x in c.logprobs))(peer.learner.policy)
    assert differences(peer.half, peer.config.sampling)["sampled"].mean == pytest.approx(
        1.0, abs=1e-3
    )
    assert (found.fault, noted) == ("", 128)


@pytest.mark.parametrize(
    ("doctor", "largest", "mean"),
    [
        (lambda c: tuple(x + 1e-3 for x in c.logprobs), 1e-3, 1e-3),
        (lambda c: (c.logprobs[0] - 0.5, *c.logprobs[1:]), 0.5, None),
        (lambda c: tuple(2 * x for x in c.logprobs), None, None),
        (lambda c: (0.0,) * len(c.tokens), None, None),
    ],
    ids=["a little too sure", "first token wrong", "another temperature", "none at all"],
)
def test_an_engine_that_reports_other_logprobs_is_found_out_with_figures(
    doctor: Callable[[Completion], tuple[float, ...]],
    largest: float | None,
    mean: float | None,
    folder: Path,
) -> None:
    peer = peer_of(folder, "full")
    peer.half.engine = doctored(doctor)(peer.learner.policy)
    found = check_engine(peer.half)
    assert found.fault == f"differs by more than {TOLERANCE}"
    assert found.largest == pytest.approx(largest, rel=0.01) if largest else found.largest > 0.5
    if mean:
        assert found.mean == pytest.approx(mean, rel=0.01)


def test_one_token_in_thousands_is_enough_to_be_found_out(folder: Path) -> None:
    peer = peer_of(folder, "full")
    seen: list[Completion] = []

    def doctor(completion: Completion) -> tuple[float, ...]:
        seen.append(completion)
        return (completion.logprobs[0] + 1e-3 * (len(seen) == 100), *completion.logprobs[1:])

    peer.half.engine = doctored(doctor)(peer.learner.policy)
    found = check_engine(peer.half)
    assert found.fault
    assert found.mean < TOLERANCE


def test_an_engine_that_reports_no_number_is_found_out(folder: Path) -> None:
    peer = peer_of(folder, "full")
    peer.half.engine = doctored(lambda c: (float("nan"),) * len(c.tokens))(peer.learner.policy)
    assert check_engine(peer.half).fault
    assert Difference(float("nan"), float("nan")).fault


def test_an_engine_that_does_not_merge_adapters_is_found_out(folder: Path) -> None:
    peer = peer_of(folder, "lora")
    peer.half.engine = Forgetful(peer.learner.policy)
    assert check_engine(peer.half).largest > 100 * TOLERANCE


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


def test_a_crew_is_checked_task_and_peers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "exact.py").write_text("from motley.tasks.files import exact_match\n")
    config = spread_crew(folder, ("full", "lora"), task="exact:exact_match")
    rows = check_crew(config)
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
        0 < row["mean_difference"] <= row["largest_difference"] < TOLERANCE for row in rows[1:]
    )
    doctor = doctored(lambda c: tuple(x - 0.25 for x in c.logprobs))
    monkeypatch.setattr(motley.run, "open_engine", lambda policy, part, folder: doctor(policy))
    doctored_row = check_crew(config)[1]
    assert (
        doctored_row["result"]
        == f"differs by more than {TOLERANCE}, declared 'sampled'; what fits: nothing"
    )
    assert doctored_row["largest_difference"] == pytest.approx(0.25, rel=0.01)


def test_a_task_that_does_not_know_its_own_answers_shows_in_the_check(folder: Path) -> None:
    rows = check_crew(spread_crew(folder, ("full", "full")))
    assert "scores" in rows[0]["result"]
    assert rows[0]["result"] != "ok"
    assert {row["result"] for row in rows[1:]} == {"ok"}
