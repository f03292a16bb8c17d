"""Crews under attack, and the table of what became of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from attacks.crews import crew, crew_text
from motley.attacks import suite as module
from motley.attacks.attack import Cast, Scene
from motley.attacks.catalogue import ATTACKS
from motley.attacks.crew import AttackedCrew, Parts
from motley.attacks.report import rows_of
from motley.attacks.suite import (
    AttackTrial,
    Staging,
    parts_of,
    run_suite,
    run_trial,
    stage_of,
    stagings,
    undefended,
    why_not,
    with_peers,
)
from motley.cli import app
from motley.config import CrewConfig
from motley.records import Group
from motley.runs.local import LocalCrew
from motley.study.processes import Job, Lost


def attacked(name: str, config: CrewConfig, folder: Path, hostile: int = 1) -> AttackedCrew:
    parts = parts_of(config, ATTACKS[name].cast, hostile)
    made = AttackedCrew(parts, ATTACKS[name].mount(stage_of(parts.config)), folder)
    assert list(made.rounds()) == list(range(1, config.crew.rounds + 1))
    return made


@pytest.mark.slow
def test_without_an_attack_it_is_the_crew_that_motley_trains(tmp_path: Path) -> None:
    config = crew(rounds=2)
    local = LocalCrew.start(config, tmp_path / "local")
    for _ in local.rounds():
        pass
    free = AttackedCrew(Parts(config, ("d",)), None, tmp_path / "free")
    for _ in free.rounds():
        pass
    for peer in local.peers:
        ours = free._peers[peer.me.name].learner.policy
        for (_, one), (_, other) in zip(ours.trained(), peer.learner.policy.trained(), strict=True):
            assert torch.equal(one, other)
    assert free.alarms.false == 0
    assert free.alarms.detected == 0


@pytest.mark.slow
def test_what_is_refused_is_detected_and_the_honest_go_on(tmp_path: Path) -> None:
    made = attacked("rewards", crew(rounds=2), tmp_path)
    assert made.alarms.detected == 1
    assert made.alarms.false_share == 0
    evidence = made.evidence()
    assert evidence.taken == 0
    assert set(evidence.answers) == {"a", "b", "c"}
    assert {len(answers) for answers in evidence.answers.values()} == {8}


@pytest.mark.slow
def test_hostile_peers_publish_last_and_have_read_everything(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watching:
        def forge(self, groups: list[Group], scene: Scene) -> list[Group]:
            seen.append(len(scene.records()))
            return list(groups)

    made = AttackedCrew(Parts(crew(rounds=2), ("c", "d")), Watching(), tmp_path)
    assert len(list(made.rounds())) == 2
    assert seen == [2, 3, 2, 3]
    assert made.evidence().taken == 0.5


@pytest.mark.slow
def test_a_flood_is_published_once(tmp_path: Path) -> None:
    made = attacked("flood", crew(rounds=3), tmp_path)
    assert sum(entry.id.startswith("d.") for entry in made._log.read(0)) == 3


@pytest.mark.slow
def test_a_twin_begins_with_the_first_honest_peers_weights(tmp_path: Path) -> None:
    parts = parts_of(crew(), Cast(hostile=1, twin=True), 1)
    made = AttackedCrew(parts, ATTACKS["subliminal"].mount(stage_of(parts.config)), tmp_path)
    first, last = (made._peers[name].learner.policy for name in "ad")
    for (_, one), (_, other) in zip(first.trained(), last.trained(), strict=True):
        assert torch.equal(one, other)


def test_the_last_peers_of_the_file_are_hostile_and_somebody_stays_honest() -> None:
    assert parts_of(crew(), Cast(), 2).hostile == ("c", "d")
    assert parts_of(crew(), Cast(), 2).honest == ("a", "b")
    with pytest.raises(ValueError, match="4 hostile peers of 4 leave nobody honest"):
        parts_of(crew(), Cast(), 4)


def test_attacks_are_not_mounted_on_a_crew_of_several_vocabularies() -> None:
    config = crew()
    last = msgspec.structs.replace(config.peer[-1], model="tiny:0.3m/bytes")
    mixed = msgspec.structs.replace(config, peer=(*config.peer[:-1], last))
    with pytest.raises(ValueError, match="attacks are written in one vocabulary"):
        parts_of(mixed, Cast(), 1)


@pytest.mark.parametrize("layout", ["vertical", "horizontal"])
def test_a_crew_grows_and_shrinks_with_the_same_work_for_each(layout: str) -> None:
    config = crew(layout=layout)
    for count in (2, 4, 6):
        changed = with_peers(config, count)
        assert len({peer.name for peer in changed.peer}) == count
        assert changed.problems_per_peer == config.problems_per_peer
        assert changed.rollouts_per_group == config.rollouts_per_group
    assert with_peers(config, 4) == config


def test_every_crew_is_run_once_without_an_attack() -> None:
    attacks = [ATTACKS[name] for name in ("plant", "rewards", "sybil-6")]
    made = stagings(crew(), attacks, hostile=1)
    for defended in (False, True):
        free = [s for s in made if not s.attack and s.defended == defended]
        assert [(s.crew, s.measured) for s in free] == [
            ("1 of 4", ("plant", "rewards")),
            ("2 of 6", ("sybil-6",)),
        ]
        named = [s.attack for s in made if s.attack and s.defended == defended]
        assert named == ["plant", "rewards", "sybil-6"]


def test_a_crew_without_defences_is_run_once() -> None:
    made = stagings(undefended(crew()), [ATTACKS["rewards"]], hostile=1)
    assert [(s.attack, s.defended) for s in made] == [("", False), ("rewards", False)]


def test_with_defences_to_take_away_every_crew_is_run_with_and_without_them() -> None:
    config = crew()
    made = stagings(config, [ATTACKS["rewards"]], hostile=1)
    bare = undefended(config)
    assert bare.trust != config.trust
    assert [(s.attack, s.defended, s.parts.config) for s in made] == [
        ("", False, bare),
        ("", True, config),
        ("rewards", False, bare),
        ("rewards", True, config),
    ]


@pytest.mark.slow
def test_an_honest_peer_that_stops_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = stagings(crew(), [ATTACKS["rewards"]], hostile=1)[-1]

    def rounds(self: AttackedCrew) -> list[int]:
        raise FloatingPointError("the gradient is no number")

    monkeypatch.setattr(AttackedCrew, "rounds", rounds)
    trial = run_trial(staging, seed=0)
    assert trial.stopped == "after round 0: FloatingPointError: the gradient is no number"


def test_an_attack_that_a_reward_leaves_no_room_for_says_so() -> None:
    assert why_not(crew("text"), ATTACKS["plant"], 1).startswith("the reward gives 0.00")
    assert why_not(crew("first"), ATTACKS["plant"], 1) == ""


def trial(
    attack: str, seed: int, accuracy: float, success: float, detected: int | None
) -> AttackTrial:
    return AttackTrial(
        crew="1 of 4",
        attack=attack,
        defended=False,
        seed=seed,
        success={"plant": success},
        accuracy=accuracy,
        taken=0.25,
        detected=detected,
        false_alarms=0.1 * seed,
    )


def test_a_row_pairs_each_seed_with_the_crew_without_the_attack() -> None:
    trials = [
        trial("", 0, 0.9, 0.0, None),
        trial("", 1, 0.7, 0.1, None),
        trial("plant", 0, 0.5, 0.8, 3),
        trial("plant", 1, 0.4, 1.0, None),
    ]
    (row,) = rows_of(ATTACKS["plant"], trials)
    assert (row.success.mean, row.without.mean) == (pytest.approx(0.9), pytest.approx(0.05))
    assert row.lost.mean == pytest.approx(0.35)
    assert row.lost.half_width == pytest.approx(12.706 * 0.05, rel=1e-3)
    assert row.detected == (3, None)
    assert row.false_alarms == pytest.approx(0.05)
    cells = row.cells()
    assert cells["detected in round"] == "3, never"
    assert cells["defences"] == "off"
    assert json.loads(json.dumps(row.plain()))["accuracy_lost"]["mean"] == pytest.approx(0.35)


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def fake(staging: Staging, seed: int) -> AttackTrial:
        made.append((staging.attack, seed))
        return trial(staging.attack, seed, 0.5, 0.0, None)

    monkeypatch.setattr(module, "run_trial", fake)

    def in_turn(num: int, first: object, then: Sequence[Job[Any]], kept: Any) -> list[Lost]:
        for job in then:
            kept(job.call())
        return []

    monkeypatch.setattr(module, "make_all", in_turn)
    stages = stagings(undefended(crew()), [ATTACKS["plant"]], hostile=1)
    counted: list[tuple[int, int]] = []
    progress = lambda done, total: counted.append((done, total))
    run_suite(stages, range(1), tmp_path, 1, progress)
    found = run_suite(stages, range(2), tmp_path, 1, progress)
    assert made == [("", 0), ("plant", 0), ("", 1), ("plant", 1)]
    assert counted == [(0, 2), (1, 2), (2, 2), (2, 4), (3, 4), (4, 4)]
    assert [(t.attack, t.seed) for t in found] == made
    kept = (tmp_path / "trials.jsonl").read_bytes()
    assert len(kept.splitlines()) == 4
    (tmp_path / "trials.jsonl").write_bytes(kept[:-20])  # as a full disk leaves it
    assert run_suite(stages, range(2), tmp_path, 1, progress) == found
    assert made[4:] == [("plant", 1)]
    assert (tmp_path / "trials.jsonl").read_bytes() == kept


# The command


def motley(*arguments: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result.stdout, result.stderr


@pytest.mark.slow
def test_the_command_prints_a_row_for_every_attack(tmp_path: Path) -> None:
    file = tmp_path / "crew.toml"
    file.write_text(crew_text("text", peers="ab", rounds=1))
    wanted = ["--attack", "plant", "--attack", "rewards", "--attack", "fuzz", "--seeds", 1]
    arguments = ["attack", file, *wanted, "--out", tmp_path / "out"]
    shown, _ = motley(*arguments)
    assert "not mounted: the reward gives 0.00" in shown.replace("\n", " ")
    assert "none found" in shown
    (line,) = motley(*arguments, "--json")[0].splitlines()
    rows = {row["attack"]: row for row in json.loads(line)["rows"]}
    assert list(rows) == ["plant", "rewards", "fuzz"]
    assert rows["rewards"]["detected_in_round"] == [1]
    assert rows["rewards"]["defended"] is True  # the last of its two rows
    assert rows["fuzz"]["success"]["mean"] == 0


def test_what_is_wrong_with_an_attack_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "crew.toml"
    file.write_text(crew_text())
    _, said = motley("attack", file, "--attack", "planet", code=2)
    assert said.startswith("error: attack 'planet' is not known; there are plant, ")
    _, said = motley("attack", file, "--attack", "rewards", "--hostile", 4, code=2)
    assert "leave nobody honest" in said


@pytest.mark.parametrize("attack", ["rewards", "fuzz"])
def test_a_suite_that_is_refused_leaves_nothing(tmp_path: Path, attack: str) -> None:
    file, out = tmp_path / "crew.toml", tmp_path / "out"
    file.write_text(crew_text(objective="ftsi"))
    _, said = motley("attack", file, "--attack", attack, "--out", out, code=2)
    assert "objective 'ftsi' is not known" in said
    assert not out.exists()
