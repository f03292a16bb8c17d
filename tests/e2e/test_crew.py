"""Whole crews of tiny peers: what a run leaves on disk, stopped and resumed anywhere, is the same
as if nothing had happened.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

import motley.runs.folder
from fakes import FixedClock, spread_crew
from marks import quick
from motley.archive.rollouts import FateBook
from motley.clock import RealClock
from motley.config import ConfigError, CrewConfig, Warm, by_name, parse_config
from motley.exchange import Entry, decode, unpack
from motley.exchange.sections import STEPS_PER_NAT
from motley.learning.fates import read_fates
from motley.learning.learner import Learner, StepReport
from motley.learning.select import Candidate
from motley.learning.waiting import Wait
from motley.models.opening import saved_policy
from motley.models.policy import ADAPTER, load_tensors
from motley.peers.peer import Learned, Peer
from motley.peers.sampling import Answered, DrawnRound, SamplerHalf
from motley.records import Charter, Content, Group, Roster
from motley.runs.building import trained_policies
from motley.runs.folder import newest_checkpoint
from motley.runs.local import LocalCrew
from motley.runs.metrics import learner_lines, read_metrics
from motley.tasks import Scorer, load_task

pytestmark = pytest.mark.slow  # whole crews


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # the time is all that two equal runs differ in
    monkeypatch.setattr(motley.runs.folder, "RealClock", FixedClock)
    return folder


def finish(crew: LocalCrew) -> LocalCrew:
    for _ in crew.rounds():
        pass
    return crew


def run(config: CrewConfig, folder: Path) -> LocalCrew:
    return finish(LocalCrew.start(config, folder))


def metrics(folder: Path) -> bytes:
    """metrics.jsonl without what a clock decides, its keys in the order in which they stand."""
    lines = map(msgspec.json.decode, (folder / "metrics.jsonl").read_bytes().splitlines())
    return b"\n".join(
        msgspec.json.encode({key: value for key, value in line.items() if key != "timing"})
        for line in lines
    )


def weights(crew: LocalCrew) -> dict[str, dict[str, torch.Tensor]]:
    return {
        p.me.name: {
            name: t.detach().clone() for name, t in p.learner.policy.model.named_parameters()
        }
        for p in crew.peers
    }


def entries(crew: LocalCrew) -> list[Entry]:
    return crew._log.read(0, limit=10**6)


def contents(crew: LocalCrew) -> list[Content]:
    return [decode(unpack(entry.record).body)[1] for entry in entries(crew)]


def groups(crew: LocalCrew) -> list[Group]:
    return [content for content in contents(crew) if isinstance(content, Group)]


def assert_same_run(ours: LocalCrew, theirs: LocalCrew) -> None:
    for peer, parameters in weights(theirs).items():
        for name, value in parameters.items():
            assert torch.equal(weights(ours)[peer][name], value), f"{peer}: {name}"
    assert metrics(ours.folder) == metrics(theirs.folder)
    assert entries(ours) == entries(theirs)
    assert [p.state() for p in ours.peers] == [p.state() for p in theirs.peers]


LAYOUTS: dict[str, dict[str, Any]] = {
    "lockstep": {"trains": ("full", "lora", "last"), "objective": "uplift", "variant": "relative"},
    "horizontal": {"trains": ("full", "lora"), "layout": "horizontal", "objective": "gepo"},
    "async-drop": {
        "trains": ("full", "lora", "last"),
        "pace": "async",
        "learning": "max_age = 1\nquota = 1\nown_share = 0.3",
    },
    "async-pace": {
        "trains": ("full", "last"),
        "pace": "async",
        "learning": 'stale = "pace"\nmax_age = 1\nquota = 1',
    },
    "several-steps": {
        "trains": ("full", "lora"),
        "learning": (
            'schedule = "cosine"\nwarmup_rounds = 1\nweight_decay = 0.1\nepochs = 2\n'
            "groups_per_step = 2\ninner_kl = 5.0"
        ),
    },
    "four-bits": {"trains": ("full", "bits")},
    "async-horizontal": {"trains": ("full", "lora"), "pace": "async", "layout": "horizontal"},
    "hearing": {"trains": ("full", "lora", "last", "full"), "hear": 1, "objective": "ftis"},
    "async-hearing": {"trains": ("full", "lora", "last", "full"), "hear": 2, "pace": "async"},
    "reference": {
        "trains": ("full", "lora", "last"),
        "learning": 'epochs = 2\n[objective]\nbeta = 0.1\ntoward = "reference"',
    },
}


@pytest.mark.parametrize("pace", ["lockstep", "async"])
def test_a_crew_that_hears_everyone_is_the_same_to_the_byte_as_one_that_is_not_asked(
    pace: str, folder: Path
) -> None:
    plain = run(spread_crew(folder, ("full",) * 3, pace=pace), folder / "plain")
    asked = run(spread_crew(folder, ("full",) * 3, pace=pace, hear=2), folder / "asked")
    assert metrics(asked.folder) == metrics(plain.folder)
    fates = [crew.folder / "groups" / "fates.jsonl" for crew in (asked, plain)]
    assert fates[0].read_bytes() == fates[1].read_bytes()
    assert groups(asked) == groups(plain)
    assert "hear =" not in (plain.folder / "config.toml").read_text()


def test_every_group_that_a_peer_heard_is_learned_once_and_the_others_are_told(
    folder: Path,
) -> None:
    config = spread_crew(folder, ("full",) * 5, hear=2, rounds=4)
    crew = run(config, folder / "run")
    ids = {entry.position: entry.id for entry in entries(crew)}
    for peer in crew.peers:
        steps = [
            step
            for step in read_fates(crew.folder / "groups" / "fates.jsonl")
            if step.peer == peer.me.name
        ]
        taken = Counter(ids[position] for step in steps for position in step.groups)
        expected = {
            f"{name}.{round}.{slot}"
            for round in range(4)
            for name in peer.hearing.of(round)
            for slot in range(2)
        }
        assert taken == Counter(expected)
        unheard = {ids[p] for step in steps for p in ids if step.is_unheard(p)}
        assert unheard == {group.id for group in groups(crew)} - expected
        last = [line for line in read_metrics(crew.folder) if line.peer == peer.me.name][-1]
        assert last.unheard == len(unheard) == peer.hearing.passed_by
    book = FateBook.read(crew.folder)
    words = {book.of(p, 0)["full0"] for p, id in ids.items() if not id.startswith("hub")}
    assert "unheard" in words
    assert "waiting" not in words


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_seed_gives_the_same_run(layout: str, folder: Path) -> None:
    config = spread_crew(folder, rounds=3, **LAYOUTS[layout])
    first, second = run(config, folder / "one"), run(config, folder / "two")
    assert_same_run(first, second)
    learned = [line for line in read_metrics(first.folder) if (line.grad_norm or 0) > 0]
    assert len(learned) >= 3, "a run that learns nothing would pass every test of sameness"


def test_another_seed_gives_another_run(folder: Path) -> None:
    first, second = (
        run(spread_crew(folder, rounds=1, seed=seed), folder / str(seed)) for seed in (0, 1)
    )
    assert metrics(first.folder) != metrics(second.folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_crew_stopped_after_any_round_and_resumed_ends_the_same(
    layout: str, folder: Path
) -> None:
    config = spread_crew(folder, rounds=3, **LAYOUTS[layout])
    whole = run(config, folder / "whole")
    for stop in (1, 2):
        crew = LocalCrew.start(config, folder / f"stopped{stop}")
        rounds = crew.rounds()
        for _ in range(stop):
            next(rounds)
        crew.save()
        rounds.close()
        assert_same_run(finish(LocalCrew.resume(crew.folder)), whole)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pace": "async", "learning": "max_age = 1"},
        {"layout": "horizontal", "learning": "epochs = 2\ngroups_per_step = 2"},
    ],
    ids=["lockstep", "async", "several-steps"],
)
def test_a_crew_that_keeps_own_successes_stopped_and_resumed_ends_the_same(
    settings: dict[str, Any], folder: Path
) -> None:
    row = {"objective": "uplift", "variant": "kept"}
    # a crew of four rounds masters nothing
    settings = settings | {"learning": settings.get("learning", "") + '\n[objective]\nheld = "all"'}
    config = spread_crew(folder, ("full", "lora"), rounds=4, **row, **settings)
    whole = run(config, folder / "whole")
    kept = [line.kept for line in learner_lines(read_metrics(whole.folder)) if line.round > 1]
    assert sum(one is not None and 0 < one.fallen < 1 for one in kept) >= 4
    for stop in (1, 3):
        crew = LocalCrew.start(config, folder / f"stopped{stop}")
        rounds = crew.rounds()
        for _ in range(stop):
            next(rounds)
        crew.save()
        rounds.close()
        assert stop == 1 or all(peer.learner.memory.by_kind for peer in crew.peers)
        assert_same_run(finish(LocalCrew.resume(crew.folder)), whole)


def test_a_crew_stopped_before_its_first_round_can_be_resumed(folder: Path) -> None:
    config = spread_crew(folder, rounds=1)
    whole = run(config, folder / "whole")
    LocalCrew.start(config, folder / "stopped")
    assert_same_run(finish(LocalCrew.resume(folder / "stopped")), whole)


def test_what_was_done_after_the_last_checkpoint_is_done_again_the_same(folder: Path) -> None:
    config = spread_crew(folder, ("full", "lora"), rounds=5, learning="checkpoint_every = 2")
    whole = run(config, folder / "whole")
    crew = LocalCrew.start(config, folder / "killed")
    rounds = crew.rounds()
    for _ in range(3):
        next(rounds)
    rounds.close()
    with (crew.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 4, "pe')
    with (crew.folder / "groups" / "log.bin").open("ab") as file:
        file.write(b"\x09\x00")
    resumed = LocalCrew.resume(crew.folder)
    assert resumed.finished_rounds == 2
    assert_same_run(finish(resumed), whole)


@pytest.mark.parametrize(
    ("layout", "peer", "during", "kept"),
    [
        ("lockstep", 0, "sampling", 2),
        ("lockstep", -1, "sampling", 2),
        ("hearing", -1, "sampling", 2),
        ("several-steps", -1, "sampling", 2),
        ("lockstep", -1, "learning", 0),  # the others have learned
        ("async-drop", -1, "sampling", 0),
    ],
)
def test_what_was_before_a_round_that_ends_in_an_error_is_kept_if_nobody_has_learned(
    layout: str, peer: int, during: str, kept: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = spread_crew(folder, rounds=4, **LAYOUTS[layout])
    whole = run(config, folder / "whole")
    crew = LocalCrew.start(config, folder / "broken")
    rounds = crew.rounds()
    for _ in range(2):
        next(rounds)
    broken, drawn, learn = crew.peers[peer], SamplerHalf.drawn, Peer.learn

    def draw(half: SamplerHalf, answered: Answered) -> DrawnRound:
        if half is broken.half:
            raise ValueError("the reward is no number")
        return drawn(half, answered)

    def step(self: Peer) -> Learned | Wait:
        learned = learn(self)
        if self is broken:
            raise ValueError("the reward is no number")
        return learned

    with monkeypatch.context() as patch:
        if during == "sampling":
            patch.setattr(SamplerHalf, "drawn", draw)
        else:
            patch.setattr(Peer, "learn", step)
        with pytest.raises(ValueError, match="the reward is no number"):
            next(rounds)
    resumed = LocalCrew.resume(crew.folder)
    assert resumed.finished_rounds == kept
    assert_same_run(finish(resumed), whole)


def test_a_full_disk_does_not_hide_the_error_that_ended_a_round(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crew = LocalCrew.start(spread_crew(folder, rounds=3), folder / "broken")
    rounds, tried = crew.rounds(), list[object]()
    next(rounds)

    def fail(*_: object) -> None:
        raise ValueError("the reward is no number")

    def full(*given: object) -> None:
        tried.append(given)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SamplerHalf, "drawn", fail)
    monkeypatch.setattr("motley.learning.checkpoint.save_tensors", full)
    with pytest.raises(ValueError, match="the reward is no number"):
        next(rounds)
    assert len(tried) == 1
    assert "round 1 could not be saved: " in caplog.text


def test_a_finished_crew_resumed_has_nothing_to_do(folder: Path) -> None:
    crew = run(spread_crew(folder, rounds=1), folder / "run")
    before = (crew.folder / "metrics.jsonl").read_bytes()
    assert_same_run(finish(LocalCrew.resume(crew.folder)), crew)
    assert (crew.folder / "metrics.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_serves(folder: Path) -> None:
    config = spread_crew(folder, rounds=3, learning="checkpoint_every = 1")
    whole = run(config, folder / "run")
    damaged = newest_checkpoint(whole.folder)
    path = damaged / "full0" / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    expected, said = weights(whole), []
    again = finish(LocalCrew.resume(whole.folder, said.append))
    assert len(said) == 1
    assert "model.safetensors is missing or changed since it was saved" in said[0]
    assert damaged.with_name(f"damaged-{damaged.name}").is_dir()
    assert all(
        torch.equal(value, weights(again)[peer][name])
        for peer, named in expected.items()
        for name, value in named.items()
    )


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[Candidate]]]:
    """What each learner was given, step by step: (id of the learner, candidates)."""
    steps: list[tuple[int, list[Candidate]]] = []
    original = Learner.step

    def noted(self: Learner, candidates: list[Candidate], **hooks: Any) -> StepReport:
        steps.append((id(self), list(candidates)))
        return original(self, candidates, **hooks)

    monkeypatch.setattr(Learner, "step", noted)
    return steps


@pytest.mark.quick
@pytest.mark.parametrize("layout", ["vertical", "horizontal"])
def test_in_lockstep_every_published_group_is_learned_exactly_once_by_every_peer(
    layout: str, folder: Path, learned: list[tuple[int, list[Candidate]]]
) -> None:
    crew = run(spread_crew(folder, ("full", "lora"), rounds=3, layout=layout), folder / "run")
    published = sorted(group.id for group in groups(crew))
    assert len(set(published)) == len(published) == 3 * (4 if layout == "vertical" else 8)
    for peer in crew.peers:
        given = [candidates for learner, candidates in learned if learner == id(peer.learner)]
        assert sorted(c.group.id for candidates in given for c in candidates) == published
        assert [{c.group.round for c in candidates} for candidates in given] == [{0}, {1}, {2}]
        assert all(
            c.own == (c.group.origin.peer == peer.me.name)
            for candidates in given
            for c in candidates
        )


def test_in_async_no_group_is_learned_twice_and_none_is_lost(
    folder: Path, learned: list[tuple[int, list[Candidate]]]
) -> None:
    crew = run(
        spread_crew(
            folder,
            ("full", "full", "full"),
            rounds=5,
            pace="async",
            learning="max_age = 1\nquota = 1",
        ),
        folder / "run",
    )
    for peer in crew.peers:
        given = Counter(
            c.position
            for learner, candidates in learned
            if learner == id(peer.learner)
            for c in candidates
        )
        assert max(given.values()) == 1
        read = [
            group
            for entry, group in zip(entries(crew)[2:], groups(crew), strict=True)
            if entry.position <= peer.cursor
        ]
        assert len(given) + len(peer.waiting) + peer.waiting.dropped.total() == len(read) >= 26


@pytest.mark.parametrize(
    ("sampling", "lossless"),
    [("", False), ("", True), ("temperature = 0.7", False), quick("temperature = 0.7", True)],
)
def test_own_rollouts_have_ratio_one(sampling: str, lossless: bool, folder: Path) -> None:
    crew = run(
        spread_crew(
            folder, ("full", "lora", "last"), rounds=3, sampling=sampling, lossless=lossless
        ),
        folder / "run",
    )
    rounding = 0.0 if lossless else 0.5 / STEPS_PER_NAT  # of a log-prob on the wire
    seen = 0
    for line in read_metrics(crew.folder):
        for sender, found in (line.senders or {}).items():
            if found.ratio is msgspec.UNSET:
                continue
            if sender == line.peer:
                seen += 1
                assert all(
                    value == pytest.approx(1, abs=1e-4 + rounding)
                    for value in msgspec.structs.astuple(found.ratio)
                )
                assert found.kl_k3 == pytest.approx(0, abs=1e-6)
            else:
                assert found.ratio.max > 1.01  # another model's: or this would test nothing
    assert seen >= 6


@pytest.mark.quick
def test_a_corrupted_record_on_the_log_is_counted_and_training_goes_on(folder: Path) -> None:
    crew = LocalCrew.start(spread_crew(folder, rounds=3), folder / "run")
    rounds = crew.rounds()
    next(rounds)
    noise = b"\x02" + bytes(64) + b"not a group"
    crew._log.append(
        [("noise", noise), ("hub.roster.8", noise), ("hub.roster.9", b"\x01\x93not a group")]
    )
    crew._log.append([("full1.9.9", entries(crew)[2].record)])
    lines = [line for round in rounds for line in round]
    assert [line.version for line in lines] == [2, 2, 3, 3]
    assert all(
        line.refused
        == {
            "full1": {"assignment": 1},
            "hub": {"corrupt": 1, "schema": 1},
            "unknown": {"sender": 1},
        }
        for line in lines
    )
    assert all(line.num_sequences == 16 for line in lines)


def test_the_log_begins_with_what_the_crew_agreed_to(folder: Path) -> None:
    config = spread_crew(folder, rounds=1)
    crew = run(config, folder / "run")
    charter, roster, *rest = contents(crew)
    assert isinstance(charter, Charter)
    assert isinstance(roster, Roster)
    assert all(isinstance(content, Group) for content in rest)
    assert parse_config(charter.config) == by_name(config)
    assert str(folder) not in charter.config  # a run can be moved
    assert charter.task == load_task(config.crew.task, config.task).fingerprint
    assert set(roster.keys) == {"full0", "full1"}
    assert len(set(roster.keys.values())) == 2


def test_the_time_a_group_was_made_is_on_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(motley.runs.folder, "RealClock", RealClock)
    before = time.time()
    crew = run(spread_crew(folder, rounds=1), folder / "run")
    assert all(before <= group.created_s <= time.time() for group in groups(crew))


LUCK = (
    "import random\ndef luck(prompts, completions, **columns):\n    return [random.random() for _ "
    "in completions]\n"
)


def test_a_lockstep_crew_whose_rewards_cannot_be_computed_again_says_so_at_once(
    folder: Path,
) -> None:
    (folder / "luck_reward.py").write_text(LUCK)
    run(spread_crew(folder, task="luck_reward:luck", rounds=1), folder / "one process")
    crew = LocalCrew.start(spread_crew(folder, task="luck_reward:luck"), folder / "run")
    for peer in crew.peers:  # as in processes of their own: nobody knows what others found
        peer.half.scorer = Scorer(peer.half.task)
    words = (
        r"the reward function gives another number each time: .*, then .*, for '.*set "
        r"crew\.check_rewards = false"
    )
    with pytest.raises(ValueError, match=words):
        finish(crew)
    trusting = run(
        spread_crew(folder, task="luck_reward:luck", check_rewards=False), folder / "trusting"
    )
    assert all(peer.learner.policy.version == 3 for peer in trusting.peers)


def test_what_is_frozen_does_not_change_and_what_trains_does(folder: Path) -> None:
    crew = LocalCrew.start(spread_crew(folder, ("full", "lora", "last"), rounds=2), folder / "run")
    before = weights(crew)
    trained = {p.me.name: {name for name, _ in p.learner.policy.trained()} for p in crew.peers}
    finish(crew)
    changed = {
        peer: {
            name
            for name, value in named.items()
            if not torch.equal(value, weights(crew)[peer][name])
        }
        for peer, named in before.items()
    }
    assert changed["full0"] == trained["full0"] == set(before["full0"])
    assert changed["lora1"] == trained["lora1"]
    assert all("lora_" in name for name in changed["lora1"])
    assert changed["last2"] == trained["last2"]
    assert all(name.startswith("model.layers.2.") for name in changed["last2"])


def test_checkpoints_are_ordinary_folders_of_transformers_and_peft(folder: Path) -> None:
    """Or single layers, which `saved_policy` puts into the model that they name."""
    crew = run(spread_crew(folder, ("full", "lora", "last"), rounds=2), folder / "run")
    newest = newest_checkpoint(crew.folder)
    policies = trained_policies(crew.folder)
    ids = torch.tensor([[5, 12, 13, 14]])
    for peer, load in (
        ("full0", AutoModelForCausalLM.from_pretrained),
        ("lora1", AutoPeftModelForCausalLM.from_pretrained),
        ("last2", lambda place: saved_policy(place).model),
    ):
        model = load(newest / peer / "model")
        trained = next(p.learner.policy.model for p in crew.peers if p.me.name == peer)
        with torch.no_grad():
            expected = trained(input_ids=ids).logits
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
            assert torch.equal(policies[peer].model(input_ids=ids).logits, expected)


def test_the_metrics_begin_with_the_skills_before_training(folder: Path) -> None:
    crew = run(spread_crew(folder, rounds=3), folder / "run")
    lines = read_metrics(crew.folder)
    assert [(line.round, line.peer) for line in lines] == [
        (r, p) for r in range(4) for p in ("full0", "full1")
    ]
    # Every second round, and the last.
    assert [line.round for line in lines if line.heldout is not None] == [0, 0, 2, 2, 3, 3]
    assert set(lines[0].heldout) == {"reverse", "sort"}


@pytest.mark.quick
def test_training_raises_the_reward(folder: Path) -> None:
    crew = run(spread_crew(folder, ("full", "full"), rounds=15, group_size=8), folder / "run")
    rewards = [line.reward for line in read_metrics(crew.folder) if line.reward is not None]
    assert sum(rewards[-6:]) > 1.2 * sum(rewards[:6])


def test_a_peer_in_four_bits_learns_beside_a_full_one_and_saves_its_adapter_only(
    folder: Path,
) -> None:
    config = spread_crew(folder, ("full", "bits"), rounds=15, group_size=8, problems_per_round=8)
    crew = LocalCrew.start(config, folder / "run")
    before = weights(crew)["bits1"]
    finish(crew)
    lines = [line for line in read_metrics(crew.folder) if line.peer == "bits1"]
    rewards = [line.reward for line in lines if line.reward is not None]
    assert sum(rewards[-5:]) > 1.1 * sum(rewards[:5])
    after = weights(crew)["bits1"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if name.endswith((".code", ".scale"))}
    assert changed == {name for name in before if ".lora_" in name}
    saved = newest_checkpoint(crew.folder) / "bits1" / "model"
    assert all("lora_" in name for name in load_tensors(saved / ADAPTER))
    assert not (saved / "model.safetensors").exists()
    ids = torch.tensor([[5, 12, 13, 14]])
    trained = next(p.learner.policy.model for p in crew.peers if p.me.name == "bits1")
    with torch.no_grad():
        expected = trained(input_ids=ids).logits
        assert torch.equal(saved_policy(saved).model(input_ids=ids).logits, expected)
        assert torch.equal(trained_policies(crew.folder)["bits1"].model(ids).logits, expected)


@pytest.mark.quick
def test_a_folder_that_holds_something_is_not_overwritten(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(
        ValueError,
        match=(
            r"is not empty; choose another \(--out, or folder= in Python\), or go on with: motley "
            "train --resume"
        ),
    ):
        LocalCrew.start(spread_crew(folder), folder / "run")


@pytest.mark.quick
def test_a_folder_that_is_no_run_cannot_be_resumed(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run folder: it has no config\.toml"):
        LocalCrew.resume(folder / "none")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"objective": "ftsi"}, "objective 'ftsi' is not known; choose one of"),
        ({"variant": "none"}, "has no variant 'none'; it has code"),
        ({"task": "sums"}, "task 'sums' is not known"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_before_a_folder_is_made(
    change: dict[str, str], words: str, folder: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        LocalCrew.start(spread_crew(folder, **change), folder / "run")
    assert not (folder / "run").exists()


def test_a_crew_stopped_during_its_warm_start_can_be_started_again(folder: Path) -> None:
    config = spread_crew(folder, rounds=1)
    warm = Warm(accuracy={"sort": 1e-9})  # reached before the first step
    config = msgspec.structs.replace(
        config, peer=tuple(msgspec.structs.replace(p, warm=warm) for p in config.peer)
    )

    def interrupt(peer: str, steps: int, accuracy: dict[str, float]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalCrew.start(config, folder / "run", interrupt)
    run(config, folder / "run")


def test_a_paced_crew_with_an_own_share_is_refused_or_goes_on(folder: Path) -> None:
    try:
        config = spread_crew(
            folder, rounds=6, pace="async", learning='stale = "pace"\nmax_age = 1\nown_share = 1.0'
        )
    except ConfigError:
        return
    crew = run(config, folder / "run")
    assert all(p.learner.policy.version == 6 for p in crew.peers)


def test_a_crew_lets_go_of_its_files(folder: Path) -> None:
    crew = run(spread_crew(folder, rounds=1), folder / "run")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del crew
        gc.collect()
    assert [
        str(warning.message) for warning in seen if "metrics.jsonl" in str(warning.message)
    ] == []


def test_a_full_disk_at_a_checkpoint_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = spread_crew(folder, ("full", "lora"), learning="checkpoint_every = 2")
    undisturbed = run(config, folder / "undisturbed")

    def full(tensors: dict[str, torch.Tensor], path: Path, *words: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    crew = LocalCrew.start(config, folder / "run")
    with monkeypatch.context() as patch:
        patch.setattr("motley.learning.checkpoint.save_tensors", full)
        with pytest.raises(
            OSError, match=r"round-000002 could not be written: No space left.*before it is whole"
        ):
            finish(crew)
    again = finish(LocalCrew.resume(folder / "run"))
    assert metrics(folder / "run") == metrics(folder / "undisturbed")
    for name, values in weights(undisturbed).items():
        assert all(torch.equal(value, weights(again)[name][key]) for key, value in values.items())


def test_weights_that_are_learned_to_pieces_are_not_saved_and_the_run_goes_on_with_another_lr(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.config.peers.MOST_LR", math.inf)
    config = spread_crew(folder, ("full", "full"), learning="checkpoint_every = 1")
    peers = (msgspec.structs.replace(config.peer[0], lr=1e30), config.peer[1])
    crew = LocalCrew.start(msgspec.structs.replace(config, peer=peers), folder / "run")
    with pytest.raises(
        FloatingPointError,
        match=(
            r"version 1 give log-probs that are no numbers, and were not saved; lower lr .* "
            r"--resume"
        ),
    ):
        finish(crew)
    file = folder / "run" / "config.toml"
    file.write_text(file.read_text().replace("lr = 1e+30", "lr = 0.001"))
    assert finish(LocalCrew.resume(folder / "run")).finished_rounds == config.crew.rounds


def test_a_token_budget_that_is_set_for_a_resumed_run_counts(folder: Path) -> None:
    config = spread_crew(folder, ("full", "full"))
    LocalCrew.start(config, folder / "run")
    assert {p.learner.token_budget for p in LocalCrew.resume(folder / "run").peers} == {16384}
    file = folder / "run" / "config.toml"
    file.write_text(file.read_text().replace("token_budget = 0", "token_budget = 512"))
    assert {p.learner.token_budget for p in LocalCrew.resume(folder / "run").peers} == {512}
