"""Members on a hub that sample beside their steps: what is on the log is what it says, and is there
once, whatever happens.

On a CPU it does not pay, and is switched on here all the same.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import chaos
from chaos import disturbed_run, log_faults, read_log, weights
from e2e.test_participants import (
    House,
    HouseOf,
    assert_ends_as,
    assert_learned_once,
    steps_of,
    weights_of,
)
from fakes import reference_logp, spread_crew
from hubs import PATIENCE_S
from motley.config import CrewConfig
from motley.distributed import enrolment, overlap
from motley.distributed.overlap import Overlap
from motley.engines import TorchEngine
from motley.engines.engine import Completion
from motley.exchange import MemoryLog, Outbox, Signer
from motley.learning.checkpoint import save_training
from motley.learning.journal import Journal
from motley.learning.learner import StepReport
from motley.learning.pace import Async, Turns
from motley.learning.waiting import Wait, Waiting
from motley.models.opening import initial_policy
from motley.models.policy import Policy
from motley.peers.peer import Peer
from motley.records import Sampling
from motley.runs import building
from motley.runs.building import build_peer
from motley.runs.folder import Run
from motley.runs.local import LocalCrew
from motley.runs.metrics import read_metrics
from motley.trust import Identity

MOST_RUNS = 20  # until enough were killed

# of the NATS client, when the server refuses to take it back
pytestmark = [
    pytest.mark.slow,  # whole crews, each with a server
    pytest.mark.filterwarnings("ignore:unclosed <StreamWriter"),
]


class Watched(TorchEngine):
    """Notes in which thread each round was sampled.

    Beside a step, it begins when the step is taken, unless it is to fail.
    """

    rounds: ClassVar[list[str]] = []
    fails: ClassVar[Exception | None] = None  # what sampling beside a step fails with
    stepped: ClassVar[threading.Event]

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        if seed:  # neither an evaluation nor a check
            self.rounds.append(
                "in turn" if threading.current_thread() is threading.main_thread() else "beside"
            )
            if self.rounds[-1] == "beside":
                if self.fails:
                    raise self.fails
                assert self.stepped.wait(PATIENCE_S)
        return super().sample(prompts, num_samples, sampling, seed)


@pytest.fixture(autouse=True)
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "RETRY_S", 0.05)
    monkeypatch.setattr(overlap, "pays", lambda half: True)
    monkeypatch.setattr(building, "open_engine", lambda policy, part, folder: Watched(policy))
    monkeypatch.setattr(Watched, "rounds", [])
    monkeypatch.setattr(Watched, "fails", None)
    monkeypatch.setattr(Watched, "stepped", threading.Event(), raising=False)
    step, both = Peer.step, Overlap.both

    def stepping(self: Peer, *given: Any, **named: Any) -> StepReport | None:
        report = step(self, *given, **named)
        Watched.stepped.set()
        return report

    monkeypatch.setattr(
        Overlap, "both", lambda self, step: Watched.stepped.clear() or both(self, step)
    )
    monkeypatch.setattr(Peer, "step", stepping)


@pytest.fixture
def house_of(tmp_path: Path) -> Iterator[HouseOf]:
    with ExitStack() as houses:

        def build(config: CrewConfig) -> House:
            house = House(config, tmp_path)
            houses.callback(house.close)
            return house

        yield build


def async_crew(
    task: Path, trains: Sequence[str] = ("full",), learning: str = "", **settings: Any
) -> CrewConfig:
    return spread_crew(
        task,
        trains,
        pace="async",
        lossless=True,
        learning=f"checkpoint_every = 2\n{learning}",
        **({"rounds": 12} | settings),
    )


def policy_with(config: CrewConfig, name: str, parameters: dict[str, torch.Tensor]) -> Policy:
    policy = initial_policy(config.named(name), config.crew.seed)
    policy.model.load_state_dict(parameters, strict=False)
    return policy


def test_every_group_has_the_version_of_the_weights_it_was_sampled_with(
    task: Path, house_of: HouseOf
) -> None:
    config = async_crew(task, ("full", "full"), rounds=8)
    house = house_of(config)
    house.join()
    made: dict[tuple[str, int], Policy] = {}

    def note() -> bool:
        for name, member in house.members.items():
            version = member.role.peer.learner.policy.version
            if (name, version) not in made:
                made[name, version] = policy_with(config, name, weights_of(member))
        return len(house._runs) == 0

    house.until(note)
    assert_learned_once(house)
    beside = [
        line
        for lines in house.lines.values()
        for line in lines
        if line.timing and line.timing.overlap_s
    ]
    assert Watched.rounds.count("beside") == len(beside) >= 2
    behind = 0
    for group in house.groups():
        name, version = group.origin.peer, group.origin.version
        problem = house.peer(name).half.problems(name, group.round)[group.slot]
        prompt = made[name, version].prompts.ids(problem)
        logp_of = lambda at: torch.cat(
            [reference_logp(made[name, at], prompt, r.tokens) for r in group.rollouts]  # noqa: B023
        ).detach()
        found = torch.tensor([logp for r in group.rollouts for logp in r.logprobs])
        assert torch.allclose(logp_of(version), found, atol=1e-4), group.id
        if (name, version + 1) in made:
            assert (logp_of(version + 1) - found).abs().max() > 1e-3, group.id
            behind += 1
    assert behind > 10


def test_a_round_per_step_is_sampled_beside_it_once_the_first_have_been_in_turn(
    task: Path, house_of: HouseOf
) -> None:
    house = house_of(async_crew(task, rounds=12))
    house.join()
    house.finish()
    assert_learned_once(house)
    lines = house.lines["full0"]
    assert [line.round for line in lines] == list(range(1, 13))
    assert not any(line.timing.overlap_s for line in lines[:2])  # by which memory is judged
    beside = [line for line in lines if line.timing.overlap_s]
    assert len(beside) == Watched.rounds.count("beside") >= 3
    for line in beside:
        timing = line.timing
        assert 0 < timing.overlap_s <= min(timing.sample_s, timing.learn_s)
        assert timing.sampled_tokens_per_s > 0
        assert line.reward is not None
    # a version old, from being sampled beside the step before
    assert any(line.ages == {1: 2} for line in lines[1:])


def test_what_a_step_is_to_use_up_counts_as_waiting_when_pace_is_asked(
    task: Path, house_of: HouseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = house_of(async_crew(task, learning='stale = "pace"\nmax_age = 1', rounds=12))
    waiting: list[int] = []
    may_sample = Async.may_sample

    def noting(self: Async, author: str, turns: Turns, there: Waiting) -> bool:
        waiting.append(len(there))
        return may_sample(self, author, turns, there)

    monkeypatch.setattr(Async, "may_sample", noting)
    house.join()
    house.finish()
    assert_learned_once(house)
    beside = Watched.rounds.count("beside")
    assert beside >= 3
    assert sum(count >= house.config.crew.problems_per_round for count in waiting) >= beside
    assert not any(line.dropped for line in house.lines["full0"])


def test_who_is_to_wait_for_its_learner_samples_nothing_beside_a_step(
    task: Path, house_of: HouseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = house_of(async_crew(task, rounds=12))
    monkeypatch.setattr(Async, "may_sample", lambda *asked: len(Watched.rounds) < 9)
    house.join()
    house.until(lambda: house.learned("full0") == 9)
    assert len(Watched.rounds) == 9
    assert "beside" in Watched.rounds


def test_what_was_sampled_beside_a_step_is_awaited_for_a_turn_and_then_sampling_goes_on(
    task: Path, house_of: HouseOf
) -> None:
    house = house_of(async_crew(task, rounds=30))
    house.join()
    house.until(lambda: "beside" in Watched.rounds)
    member = house.members["full0"]
    member.station.courier.close()  # what is sampled from here on does not arrive
    house.turn()
    house.until(lambda: Watched.rounds[-1] == "beside" and not member.role.peer.waiting)
    before = list(Watched.rounds)
    house.turn()
    assert Watched.rounds == before
    house.turn()
    assert Watched.rounds == [*before, "in turn"]


def test_in_lockstep_nothing_is_sampled_beside_and_a_crew_ends_as_in_one_process(
    task: Path, house_of: HouseOf, tmp_path: Path
) -> None:
    config = spread_crew(task, ("full", "last"), rounds=3)
    house = house_of(config)
    house.join()
    house.finish()
    local = LocalCrew.start(config, tmp_path / "local")
    for _ in local.rounds():
        pass
    assert_ends_as(house, local)
    assert set(Watched.rounds) == {"in turn"}


def test_crews_in_one_process_take_turns_in_async_too(task: Path, tmp_path: Path) -> None:
    for _ in LocalCrew.start(async_crew(task), tmp_path / "local").rounds():
        pass
    assert set(Watched.rounds) == {"in turn"}


# Crashes


@pytest.fixture
def killed(task: Path, house_of: HouseOf) -> House:
    """A peer that was killed after five steps of twelve, with its first checkpoint left."""
    house = house_of(async_crew(task, rounds=12))
    house.join()
    house.until(lambda: house.learned("full0") == 5)
    assert "beside" in Watched.rounds
    house.leave("full0")
    for folder in sorted((house.folder / "full0" / "checkpoints").glob("round-*"))[1:]:
        shutil.rmtree(folder)
    return house


def come_back(house: House) -> None:
    """Ready to sample beside a step from the first on."""
    Watched.rounds.clear()
    house.join()
    house.role("full0").overlap.on = True


def test_steps_that_are_taken_again_have_nothing_beside_them(killed: House) -> None:
    steps = steps_of(killed, "full0")
    come_back(killed)
    assert killed.learned("full0") < 4
    killed.until(lambda: killed.learned("full0") == 5)
    assert Watched.rounds == []
    assert [step for step in steps_of(killed, "full0") if step.round < 5] == [
        step for step in steps if step.round < 5
    ]
    killed.finish()
    assert_learned_once(killed)


def test_steps_before_which_nothing_was_sampled_do_not_show_what_memory_both_take(
    killed: House,
) -> None:
    killed.join()
    assert killed.learned("full0") < 4
    killed.until(lambda: killed.learned("full0") == 5)
    assert not killed.role("full0").overlap.on


def test_a_round_that_the_outbox_has_is_not_sampled_again(killed: House) -> None:
    known = len(killed.groups()) // 2
    come_back(killed)
    killed.finish()
    assert len(Watched.rounds) == 12 - known
    assert_learned_once(killed)


def test_a_round_that_the_log_has_is_not_sampled_again_though_the_outbox_was_lost(
    killed: House,
) -> None:
    known = len(killed.groups()) // 2
    for path in (killed.folder / "full0" / "groups").glob("outbox.sqlite*"):
        path.unlink()
    come_back(killed)
    killed.finish()
    assert len(Watched.rounds) == 12 - known
    assert_learned_once(killed)


def test_a_failure_beside_a_step_ends_the_member_and_the_step_is_taken_again(
    task: Path, house_of: HouseOf
) -> None:
    house = house_of(async_crew(task, rounds=20))
    house.join()
    house.until(lambda: "beside" in Watched.rounds)
    Watched.fails = ValueError("the server gives no log-probs")
    with pytest.raises(ValueError, match="the server gives no log-probs"):
        house.finish()
    outbox, lines = house.members["full0"].station.outbox, house.lines["full0"]
    assert house.learned("full0") == lines[-1].round + 1 == steps_of(house, "full0")[-1].round + 1
    assert len(outbox) == 0 or outbox.last_round == house.peer("full0").half.sampled_rounds - 1
    Watched.fails = None
    house.leave("full0")
    house.join()
    house.finish()
    assert_learned_once(house)
    assert [line.round for line in read_metrics(house.folder / "full0")] == list(range(21))


def test_without_memory_for_both_a_member_goes_on_in_turn(task: Path, house_of: HouseOf) -> None:
    house = house_of(async_crew(task, rounds=20))
    house.join()
    house.until(lambda: Watched.rounds.count("beside") == 1)
    Watched.fails = torch.OutOfMemoryError("CUDA out of memory")
    house.finish()
    assert Watched.rounds.count("beside") == 2
    assert [text for text in house.said["full0"] if "at once" in text] == [
        "sampling and learning at once: memory ran out; they take turns from here on"
    ]
    assert_learned_once(house)
    assert [line.round for line in house.lines["full0"]] == list(range(1, 21))


def test_whoever_stops_between_two_events_leaves_no_thread(task: Path, house_of: HouseOf) -> None:
    house = house_of(async_crew(task, rounds=12))
    house.join()
    house.until(lambda: Watched.rounds.count("beside") == 2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sampling")]
    house.members["full0"].save()
    house.leave("full0")
    house.join()
    house.finish()
    assert_learned_once(house)


# Kill -9


def run_peer(folder: Path, url: str, name: str) -> None:
    """A peer's process that samples beside its steps."""
    overlap.pays = lambda half: True
    run_peer_in_turn(folder, url, name)


run_peer_in_turn = chaos.run_peer


def taken_again(config: CrewConfig, folder: Path, name: str, log: MemoryLog) -> list[str]:
    """Whether the weights are those that the journal's steps make from the log, taken by somebody
    whom nobody disturbs.
    """
    again, journal = folder / "again" / name, Journal(folder / name / "journal.jsonl")
    shutil.copytree(folder / name / "start", again / "start")
    hub = Identity.kept_at(folder / "hub" / "hub.key").public
    peer = build_peer(
        Run(config, again),
        config.named(name),
        log,
        Outbox(None, Signer(bytes(32), lambda message: b"")),
        hub,
    )
    used: Counter[int] = Counter()
    while step := journal.of(peer.learned_rounds):
        used.update(step.positions)
        peer.receive(until=step.cursor)
        chosen = peer.choose(step.closed)
        if isinstance(chosen, Wait) or chosen.positions != step.positions:
            return [f"{name} would take step {step.round} from other groups"]
        peer.step(chosen)
    save_training(
        peer.learner.policy, peer.learner.optimiser, again / "checkpoints" / "round-000001" / name
    )
    (again / "config.toml").touch()
    same = weights(again, name) == weights(folder / name, name)
    return [f"{name} learned twice from a group"] * (max(used.values()) > 1) + [
        f"weights of {name} differ"
    ] * (not same)


def test_members_killed_at_any_moment_lose_nothing_and_learn_from_everything_once(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "run_peer", run_peer)
    rng, killed, num_runs, overlapped = random.Random(3), Counter[str](), 0, 0
    while killed["full0"] + killed["last1"] < 4 or not overlapped:
        assert num_runs < MOST_RUNS, f"killed {dict(killed)}, {overlapped} rounds beside a step"
        config = spread_crew(
            task,
            ("full", "last"),
            pace="async",
            rounds=16,
            seed=num_runs,
            learning="max_age = 4\ncheckpoint_every = 1000",
        )
        folder = tmp_path / f"run{num_runs}"
        killed += disturbed_run(config, folder, rng, kills=5, timeout_s=600)
        entries = read_log(folder / "hub")
        assert log_faults(config, folder / "hub") == []
        log = MemoryLog()
        log.append([(entry.id, entry.record) for entry in entries])
        assert [
            fault for peer in config.peer for fault in taken_again(config, folder, peer.name, log)
        ] == []
        for peer in config.peer:
            lines = read_metrics(folder / peer.name)
            overlapped += sum(bool(line.timing and line.timing.overlap_s) for line in lines)
            versions = [line.version for line in lines if line.senders is not None]
            assert versions == list(range(1, len(versions) + 1))
            assert not any(line.refused for line in lines)
        num_runs += 1
    print(f"killed {dict(killed)} in {num_runs} runs, {overlapped} rounds sampled beside a step")
