"""What a page shows of a run's metrics: as much as the lines say, of any folder, and decoded only
where it is shown.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from fakes import spread_crew
from motley.clock import VirtualClock
from motley.config import Crew, CrewConfig, Evaluate, PeerConfig, Trust, write_config
from motley.dashboard import run_lines
from motley.dashboard.answers import Curve
from motley.dashboard.metrics_view import MetricsView
from motley.dashboard.records import NewestGroup
from motley.learning.senders import Distribution, SenderMetrics
from motley.runs.curves import curves as all_numbers
from motley.runs.local import LocalCrew
from motley.runs.metrics import (
    FirstLine,
    LearnerLine,
    MetricsLine,
    SamplerLine,
    Sign,
    Timing,
    append_lines,
)
from motley.trust.standing import Suspicion

EVERYTHING = (-math.inf, math.inf)
NAMES = ("small", "deep")


def group(created_s: float = 2e9) -> NewestGroup:
    return NewestGroup("a model", "0123456789abcdef", 7, created_s)


def crew_of(
    rounds: int = 20, evaluate: Evaluate = Evaluate(every=5), **changes: object
) -> CrewConfig:
    peers = tuple(PeerConfig(name=name, model="tiny:0.3m") for name in NAMES)
    crew = Crew(name="pair", task="digits", rounds=rounds, group_size=4, problems_per_round=2)
    return msgspec.structs.replace(CrewConfig(crew=crew, peer=peers, evaluate=evaluate), **changes)


def sender(rng: random.Random, **changes: object) -> SenderMetrics:
    spread = Distribution(*(rng.random() for _ in range(5)))
    told = SenderMetrics(
        groups=1,
        sequences=4,
        reward=rng.random(),
        accuracy=rng.random(),
        tokens=5.0,
        truncated=0.0,
        age=0.0,
        silent_groups=0,
        kl_k3=rng.random(),
        ratio=spread,
        weight=spread,
        filtered_positive=None,
    )
    return msgspec.structs.replace(told, **changes)


def lines_of(rounds: int, seed: int = 0, names: Sequence[str] = NAMES) -> list[MetricsLine]:
    rng = random.Random(seed)
    return [
        LearnerLine(
            round=number,
            peer=name,
            version=number,
            reward=rng.random(),
            loss=rng.gauss(0, 1),
            num_sequences=8,
            senders={other: sender(rng) for other in names},
            waiting=0,
            refused={},
            dropped={},
            heldout={"sort": rng.random(), "sum": rng.random()} if number % 5 == 0 else None,
            timing=Timing(0.5, 1.5, 100.0),
        )
        for number in range(1, rounds + 1)
        for name in names
    ]


def first_lines() -> list[FirstLine]:
    return [FirstLine(round=0, peer=name, heldout={"sort": 0.1, "sum": 0.2}) for name in NAMES]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_config(crew_of(), tmp_path / "config.toml")
    append_lines(tmp_path / "metrics.jsonl", [*first_lines(), *lines_of(12)])
    return tmp_path


def view_of(folder: Path, **settings: object) -> MetricsView:
    view = MetricsView(folder, **settings)
    view.refresh(60)
    return view


def points(view: MetricsView, key: str, most: int = 300) -> dict[tuple[str, str], list[object]]:
    drawn = view.curves([key], most, EVERYTHING).curves
    return {(one.peer, one.sender): list(one.points) for one in drawn if not one.is_alone}


# Curves


def test_curves_are_the_numbers_that_reading_everything_gives(run: Path) -> None:
    view = view_of(run)
    expected: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for point in all_numbers(run):
        first, *rest = point.key.split("/")
        name = rest.pop(0) if first == "senders" else ""
        key = ".".join([first, *rest])
        if not (point.round == 0 and first not in ("heldout", "ood")):
            expected.setdefault((key, point.peer, name), []).append((point.round, point.value))
    keys = sorted({key for key, _, _ in expected})
    assert set(view.crew(EVERYTHING, {}).keys) == set(keys)
    assert {"senders.ratio.q95", "heldout", "heldout.sort", "timing.sample_s", "loss"} <= set(keys)
    drawn: list[Curve] = []
    for first in range(0, len(keys), 20):
        drawn += view.curves(keys[first : first + 20], 300, EVERYTHING).curves
    assert {(one.key, one.peer, one.sender): one.points for one in drawn} == expected


def test_curves_of_one_peer_are_those_among_everyones(run: Path) -> None:
    view, keys = view_of(run), ["reward", "heldout", "senders.kl_k3"]
    everyones = view.curves(keys, 300, EVERYTHING).curves
    for name in NAMES:
        its = view.curves(keys, 300, EVERYTHING, name).curves
        assert its == [one for one in everyones if one.peer == name]
        assert its
    assert view.curves(keys, 300, EVERYTHING, "nobody").curves == []


def test_long_curves_are_thinned_evenly_with_their_first_and_newest_point(tmp_path: Path) -> None:
    write_config(crew_of(rounds=1000), tmp_path / "config.toml")
    append_lines(tmp_path / "metrics.jsonl", [*first_lines(), *lines_of(997)])
    view = view_of(tmp_path)
    answer = view.curves(["reward", "heldout", "senders.kl_k3"], 50, EVERYTHING)
    assert answer.every == 30  # the first round number that is enough
    for one in answer.curves:
        rounds = [number for number, _ in one.points]
        assert 30 <= len(rounds) <= 50
        assert (rounds[0], rounds[-1]) == (
            0 if one.key == "heldout" else 1,
            995 if one.key == "heldout" else 997,
        )
        gaps = [after - before for before, after in itertools.pairwise(rounds)]
        assert max(gaps) <= 30
    part = view.curves(["reward"], 50, (100, 120)).curves[0]
    assert [number for number, _ in part.points] == list(range(100, 121))


def test_a_curve_that_grows_decodes_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []

    def counted(line: bytes, keys: Sequence[str]) -> dict[str, dict[str, float]]:
        decoded.append(line)
        return read_numbers(line, keys)

    read_numbers = run_lines.read_numbers
    monkeypatch.setattr(run_lines, "read_numbers", counted)
    write_config(crew_of(rounds=1000), tmp_path / "config.toml")
    lines = lines_of(800)
    append_lines(tmp_path / "metrics.jsonl", lines[:-20])
    view = view_of(tmp_path)
    view.curves(["reward"], 50, EVERYTHING)
    assert len(decoded) <= 2 * 50
    decoded.clear()
    append_lines(tmp_path / "metrics.jsonl", lines[-20:])
    assert view.refresh()
    assert points(view, "reward", 50)["small", ""][-1][0] == 800
    assert len(decoded) <= 2 * 2


def test_values_of_a_run_that_was_cut_back_are_forgotten(run: Path) -> None:
    view = view_of(run)
    before = points(view, "reward")
    (run / "metrics.jsonl").unlink()
    append_lines(run / "metrics.jsonl", lines_of(9, seed=1))
    assert view.refresh()
    after = points(view, "reward")
    assert len(after["small", ""]) == 9
    assert after["small", ""][0] != before["small", ""][0]


def test_a_round_that_was_written_twice_counts_once_as_last_written(run: Path) -> None:
    append_lines(run / "metrics.jsonl", [LearnerLine(round=12, peer="small", reward=42.0)])
    view = view_of(run)
    assert points(view, "reward")["small", ""][-2:][1] == (12, 42.0)
    assert len(points(view, "reward")["small", ""]) == 12


def test_unknown_numbers_are_no_curves_and_bad_keys_are_refused_in_words(run: Path) -> None:
    view = view_of(run)
    assert (
        view.curves(["nonsense", "peer", "senders", "timing", "reward.x"], 9, EVERYTHING).curves
        == []
    )
    for keys in ([], ["loss"] * 51, ["x" * 300], [""], ["a.b.c.d.e.f.g"]):
        with pytest.raises(ValueError, match=r"ask for|names no number"):
            view.curves(keys, 10, EVERYTHING)


def test_a_number_that_is_none_leaves_the_others_of_its_line(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round":13,"peer":"small","loss":"much","reward":0.5,"lr":null}\n')
        file.write(b'{"round":14,"peer":"small","reward":0.25,"loss":0.5\n')  # torn inside
    view = view_of(run)
    drawn = {
        one.key: one.points[-1]
        for one in view.curves(["loss", "reward", "lr"], 99, EVERYTHING).curves
        if one.peer == "small"
    }
    assert drawn["reward"] == (13, 0.5)
    assert drawn["loss"][0] == 12


def test_what_peers_reach_alone_stands_beside_their_curves(run: Path) -> None:
    alone = run / "alone" / "small"
    alone.mkdir(parents=True)
    append_lines(alone / "metrics.jsonl", lines_of(10, seed=2, names=["small"]))
    recorded = {
        "command": "motley",
        "skills": {"small": {"sort": 0.5}, "deep": {"sort": 0.25, "sum": 0.75}},
    }
    (run / "alone.json").write_text(json.dumps(recorded))
    drawn = view_of(run).curves(["heldout", "heldout.sum", "senders.ess"], 99, EVERYTHING).curves
    lone = {(one.peer, one.key): one.points for one in drawn if one.is_alone}
    assert [number for number, _ in lone["small", "heldout"]] == [5, 10]
    assert lone["deep", "heldout"] == [(0, 0.5), (12, 0.5)]
    assert lone["deep", "heldout.sum"] == [(0, 0.75), (12, 0.75)]
    assert len(lone) == 4


# The crew


def test_a_card_has_the_device_that_its_peer_ran_on(run: Path) -> None:
    before = {card.name: card.device for card in view_of(run).crew(EVERYTHING, {}).peers}
    assert before == {"small": "auto", "deep": "auto"}  # as the crew file has it
    told = LearnerLine(round=13, peer="small", timing=Timing(0.5, 0.1, device="NVIDIA H200"))
    append_lines(run / "metrics.jsonl", [told])
    cards = view_of(run).crew(EVERYTHING, {}).peers
    assert {card.name: card.device for card in cards} == {"small": "NVIDIA H200", "deep": "auto"}


def test_a_crew_is_shown_with_who_learned_from_whom(run: Path) -> None:
    rng = random.Random(0)
    more = LearnerLine(
        round=13,
        peer="small",
        senders={"small": sender(rng, sequences=1), "deep": sender(rng, sequences=3)},
        warnings=[Sign("filtered", "all of it", ["deep"])],
    )
    append_lines(run / "metrics.jsonl", [more])
    crew = view_of(run).crew((13, 13), {"deep": group()})
    assert (crew.name, crew.task, crew.rounds, crew.round) == ("pair", "digits", 20, 13)
    assert (crew.measure, crew.kinds, crew.is_over) == ("accuracy", ["sort", "sum"], False)
    assert [(a.sender, a.learner, a.sequences, a.share) for a in crew.arrows] == [
        ("small", "small", 1, 0.25),
        ("deep", "small", 3, 0.75),
    ]
    small, deep = crew.peers
    assert (small.name, small.model, small.adapter, small.version) == (
        "small",
        "tiny:0.3m",
        "full",
        None,
    )
    assert (deep.version, deep.vocabulary, deep.last_seen_s, deep.round) == (
        12,
        "0123456789ab",
        2e9,
        12,
    )
    assert set(deep.heldout) == {"sort", "sum"}
    warned = crew.warnings[0]
    assert (warned.round, warned.peer, warned.sign, warned.senders) == (
        13,
        "small",
        "filtered",
        ["deep"],
    )


def test_arrows_of_many_rounds_are_scaled_up_from_some(tmp_path: Path) -> None:
    write_config(crew_of(rounds=500), tmp_path / "config.toml")
    append_lines(tmp_path / "metrics.jsonl", [*first_lines(), *lines_of(500)])
    arrows = view_of(tmp_path).crew(EVERYTHING, {}).arrows
    assert {(a.sequences, a.share) for a in arrows} == {(2000, 0.5)}
    assert all(0 < (a.weight or 0) < 1 for a in arrows)


def test_lines_of_old_runs_count_groups_for_sequences(tmp_path: Path) -> None:
    write_config(crew_of(), tmp_path / "config.toml")
    old = sender(random.Random(0), sequences=msgspec.UNSET)
    append_lines(
        tmp_path / "metrics.jsonl", [LearnerLine(round=1, peer="small", senders={"deep": old})]
    )
    (arrow,) = view_of(tmp_path).crew(EVERYTHING, {}).arrows
    assert (arrow.sequences, arrow.share) == (4, 1.0)


def test_scores_beyond_one_are_rewards(run: Path) -> None:
    append_lines(
        run / "metrics.jsonl", [LearnerLine(round=13, peer="small", heldout={"sort": 3.0})]
    )
    assert view_of(run).crew(EVERYTHING, {}).measure == "reward"


def test_the_size_of_a_model_is_read_from_its_files(run: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "embed": {"dtype": "F32", "shape": [10, 3], "data_offsets": [0, 120]},
        "norm": {"dtype": "F32", "shape": [7], "data_offsets": [120, 148]},
    }
    encoded = json.dumps(header).encode()
    model = run / "start" / "small"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    spoilt = run / "start" / "deep"
    spoilt.mkdir()
    (spoilt / "model.safetensors").write_bytes(b"\xff" * 20)
    assert [peer.size for peer in view_of(run).crew(EVERYTHING, {}).peers] == [37, None]


def test_time_left_is_by_when_rounds_came_and_first_by_what_they_took(tmp_path: Path) -> None:
    write_config(crew_of(rounds=20), tmp_path / "config.toml")
    path, clock, lines = tmp_path / "metrics.jsonl", VirtualClock(), lines_of(20)
    append_lines(path, lines[:8])
    os.utime(path, (0, 0))
    view = view_of(tmp_path, clock=clock)
    told = view.crew(EVERYTHING, {})
    assert told.seconds == pytest.approx(4.0)  # two peers take turns, 2 s each
    assert told.left_s == pytest.approx(4.0 * 16)
    clock.sleep_s(90.0)  # who opens the page late has not seen when the newest round came
    for number in range(4, 10):
        clock.sleep_s(30.0)
        append_lines(path, lines[2 * number : 2 * number + 2])
        os.utime(path, (clock.now_s(), clock.now_s()))
        view.refresh()
    assert view.crew(EVERYTHING, {}).left_s == pytest.approx(30.0 * 10)
    clock.sleep_s(3600.0)
    silent = view.crew(EVERYTHING, {})
    assert (silent.left_s, silent.is_over) == (None, False)
    assert "Nothing was written for 60 minutes" in silent.notes[0]


# When it is over


def test_a_run_is_over_when_all_have_their_last_line(tmp_path: Path) -> None:
    write_config(crew_of(rounds=12), tmp_path / "config.toml")
    lines = lines_of(12)
    append_lines(tmp_path / "metrics.jsonl", lines[:-1])
    view = view_of(tmp_path)
    assert not view.is_over
    append_lines(tmp_path / "metrics.jsonl", lines[-1:])
    view.refresh()
    assert view.is_over
    assert view.crew(EVERYTHING, {}).left_s is None
    write_config(crew_of(rounds=24), tmp_path / "config.toml")  # it goes on for longer
    os.utime(tmp_path / "config.toml", (1, 1))
    view.refresh()
    assert not view.is_over


def test_a_run_that_stopped_by_its_own_rules_is_over_and_says_why(tmp_path: Path) -> None:
    write_config(crew_of(evaluate=Evaluate(stop_at=0.5)), tmp_path / "config.toml")
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [LearnerLine(round=5, peer="small", heldout={"sort": 0.6})])
    view = view_of(tmp_path)
    assert not view.is_over
    append_lines(path, [LearnerLine(round=5, peer="deep", heldout={"sort": 0.5})])
    view.refresh()
    assert view.is_over
    assert "stop_at = 0.5" in view.crew(EVERYTHING, {}).notes[0]


# Folders of other kinds


def test_a_run_that_just_starts_is_shown_without_numbers(tmp_path: Path) -> None:
    write_config(crew_of(), tmp_path / "config.toml")
    view = view_of(tmp_path)
    crew = view.crew(EVERYTHING, {})
    assert [peer.name for peer in crew.peers] == list(NAMES)
    assert (crew.round, crew.is_over, crew.arrows, crew.keys, crew.indexed) == (
        0,
        False,
        [],
        [],
        1.0,
    )
    assert "no metrics yet" in crew.notes[0]
    assert view.curves(["reward"], 10, EVERYTHING).curves == []
    assert view.trust({"x": {"signature": 2}}).faults == {"x": {"signature": 2}}
    append_lines(tmp_path / "metrics.jsonl", lines_of(2))
    assert view.refresh()
    assert view.round == 2


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    crew = view_of(tmp_path).crew(EVERYTHING, {"stranger": group()})
    assert [peer.name for peer in crew.peers] == ["stranger"]
    assert "config.toml is not there" in crew.notes[0]


def test_a_hubs_folder_shows_its_crew_by_what_the_log_has(tmp_path: Path) -> None:
    write_config(crew_of(), tmp_path / "crew.toml")
    text = (tmp_path / "crew.toml").read_text()
    (tmp_path / "hub.json").write_text(json.dumps({"crew": "pair", "config": text, "invited": {}}))
    crew = view_of(tmp_path).crew(EVERYTHING, {"small": group()})
    assert [(peer.name, peer.version) for peer in crew.peers] == [("small", 7), ("deep", None)]
    assert "A hub's folder has no metrics" in crew.notes[0]


def test_a_peers_own_folder_is_over_with_its_own_last_line(tmp_path: Path) -> None:
    write_config(crew_of(rounds=12), tmp_path / "config.toml")
    (tmp_path / "member.json").write_text(json.dumps({"crew": "pair", "peer": "deep"}))
    append_lines(tmp_path / "metrics.jsonl", [line for line in lines_of(12) if line.peer == "deep"])
    view = view_of(tmp_path)
    assert (view.round, view.is_over) == (12, True)
    crew = view.crew(EVERYTHING, {})
    assert {arrow.learner for arrow in crew.arrows} == {"deep"}
    assert "folder of deep" in crew.notes[0]


def test_peers_of_several_processes_are_read_from_their_own_files_once(tmp_path: Path) -> None:
    sampler = PeerConfig(name="fast", role="sampler", follows="small")
    learners = [PeerConfig(name=name, model="tiny:0.3m", role="learner") for name in NAMES]
    crew = msgspec.structs.replace(crew_of().crew, pace="async")
    config = msgspec.structs.replace(crew_of(), crew=crew, peer=(*learners, sampler))
    write_config(config, tmp_path / "config.toml")
    lines = lines_of(6)
    append_lines(tmp_path / "metrics.jsonl", lines[:8])  # put together, and behind
    for name in NAMES:
        (tmp_path / "peers" / name).mkdir(parents=True)
        own = [line for line in lines if line.peer == name]
        append_lines(tmp_path / "peers" / name / "metrics.jsonl", own)
    (tmp_path / "peers" / "fast").mkdir()
    batches = [
        SamplerLine(round=n, peer="fast", version=n // 2, reward=0.5, sampled_tokens=40)
        for n in range(1, 31)
    ]
    append_lines(tmp_path / "peers" / "fast" / "metrics.jsonl", batches)
    view = view_of(tmp_path)
    assert {peer: len(found) for (peer, _), found in points(view, "reward").items()} == {
        "small": 6,
        "deep": 6,
        "fast": 30,
    }
    assert view.round == 6  # not the sampler's batches
    cards = {card.name: card for card in view.crew(EVERYTHING, {}).peers}
    assert (cards["fast"].role, cards["fast"].follows, cards["fast"].model) == (
        "sampler",
        "small",
        "tiny:0.3m",
    )
    assert (cards["fast"].version, cards["fast"].round) == (15, 30)
    assert view.crew(EVERYTHING, {}).seconds == pytest.approx(2.0)  # beside each other


def test_a_simulated_run_is_shown_with_its_samplers_between_the_lines(tmp_path: Path) -> None:
    learner, sampler = (
        PeerConfig(name="l", model="tiny:0.3m", role="learner"),
        PeerConfig(name="s", role="sampler", follows="l"),
    )
    crew = msgspec.structs.replace(crew_of().crew, pace="async")
    write_config(
        msgspec.structs.replace(crew_of(), crew=crew, peer=(learner, sampler)),
        tmp_path / "config.toml",
    )
    rng = random.Random(0)
    for number in range(1, 5):
        append_lines(
            tmp_path / "metrics.jsonl",
            [
                SamplerLine(
                    round=2 * number,
                    peer="s",
                    version=0,
                    reward=0.5,
                    sampled_tokens=9,
                    time_s=1.0 * number,
                ),
                LearnerLine(
                    round=number, peer="l", senders={"s": sender(rng)}, time_s=1.5 * number
                ),
            ],
        )
    view = view_of(tmp_path)
    crew_now = view.crew(EVERYTHING, {"s": group(created_s=12.0)})
    assert [(a.sender, a.learner, a.share) for a in crew_now.arrows] == [("s", "l", 1.0)]
    assert crew_now.round == 4
    assert crew_now.seconds is None
    assert all((peer.last_seen_s or 1e9) > 1e8 for peer in crew_now.peers)  # no simulated moment
    assert len(points(view, "senders.kl_k3")["l", "s"]) == 4


# Trust


def test_what_is_held_against_senders_is_told_over_the_rounds(tmp_path: Path) -> None:
    write_config(crew_of(trust=Trust(alpha=0.002)), tmp_path / "config.toml")
    held: list[dict[str, Suspicion] | None] = [
        None,
        {"deep": Suspicion(1.5)},
        {"deep": Suspicion(3.5, 1.0, "evidence", 12)},
        None,
        None,
        {"deep": Suspicion(2.0, 0.5)},
    ]
    lines = [
        LearnerLine(
            round=number,
            peer="small",
            refused={"deep": {"reward": number}},
            dropped={"stranger": {"stale": 2}},
            missing={"deep": 3},
            suspects=suspects,
        )
        for number, suspects in enumerate(held, 1)
    ]
    append_lines(tmp_path / "metrics.jsonl", lines)
    trust = view_of(tmp_path).trust({})
    deep, stranger = trust.suspects
    assert (deep.learner, deep.sender, deep.refused, deep.missing) == (
        "small",
        "deep",
        {"reward": 6},
        3,
    )
    assert deep.evidence == [(2, 1.5), (3, 3.5), (4, None), (6, 2.0)]
    assert deep.strikes == [(2, 0.0), (3, 1.0), (4, None), (6, 0.5)]
    assert (deep.muted, deep.until) == ("", None)  # it was heard again
    assert (stranger.sender, stranger.dropped, stranger.evidence) == ("stranger", {"stale": 2}, [])
    assert trust.alarm == pytest.approx(3.0)  # either of two questions may be wrong: 0.002 / 2
    append_lines(tmp_path / "metrics.jsonl", [LearnerLine(round=7, peer="small", suspects=held[2])])
    now = view_of(tmp_path).trust({}).suspects[0]
    assert (now.muted, now.until) == ("evidence", 12)


def test_where_every_log_prob_is_believed_there_is_no_alarm(tmp_path: Path) -> None:
    write_config(crew_of(trust=Trust(alpha=0.0)), tmp_path / "config.toml")
    assert view_of(tmp_path).trust({}).alarm is None


# Whole runs


@pytest.mark.slow
def test_views_of_metrics_import_without_torch() -> None:
    code = (
        "import sys, motley.dashboard.metrics_view\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_real_run_is_shown_while_it_trains_and_after(folder: Path) -> None:
    run = folder / "run"
    crew = LocalCrew.start(spread_crew(folder, rounds=4), run)
    view, seen = MetricsView(run), []
    for _ in crew.rounds():
        view.refresh()
        seen.append((view.round, view.is_over))
    assert seen == [(1, False), (2, False), (3, False), (4, True)]
    shown = view.crew(EVERYTHING, {})
    assert len(shown.arrows) == 4
    assert sum(arrow.share for arrow in shown.arrows) == pytest.approx(2)
    assert all(peer.size and peer.heldout for peer in shown.peers)
    assert len(points(view, "senders.ratio.q95")) == 4
    assert points(view, "heldout")
