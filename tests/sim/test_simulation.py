"""Whole crews on virtual time: what delays, losses, outages and churn do to them, and what they
must not do.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import motley.sim.simulation
from fakes import spread_crew, write_task
from motley.config import Churn, CrewConfig
from motley.exchange import decode, unpack
from motley.links import Network
from motley.models.policy import Policy
from motley.peers.peer import Peer
from motley.records import Group, Weights
from motley.runs.building import build_peer, trained_policies
from motley.runs.local import LocalCrew
from motley.runs.metrics import MetricsLine, read_metrics
from motley.sim.events import Events
from motley.sim.simulation import SimCrew
from sim.crews import far_crew, lines_of, simulated

pytestmark = pytest.mark.slow  # whole crews

LOGNORMAL = '{ shape = "lognormal", low_s = 0.02, high_s = 0.4 }'


def run(folder: Path, out: str = "run", **settings: Any) -> SimCrew:
    return simulated(far_crew(folder, **settings), folder / out)


def weights_of(policy: Policy) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in policy.model.parameters()]


def same_weights(first: Policy, second: Policy) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(weights_of(first), weights_of(second), strict=True)
    )


def contents(crew: SimCrew) -> list[Group | Weights]:
    found = [decode(unpack(entry.record).body)[1] for entry in crew.log.read(0, limit=10**6)]
    return [content for content in found if isinstance(content, Group | Weights)]


def groups_of(crew: SimCrew, peer: str) -> list[Group]:
    return [
        content
        for content in contents(crew)
        if isinstance(content, Group) and content.origin.peer == peer
    ]


def steps_of(crew: SimCrew, peer: str = "l") -> list[MetricsLine]:
    return [line for line in lines_of(crew, peer) if line.ages is not None]


def mean_age(crew: SimCrew) -> float:
    ages = [(int(age), count) for line in steps_of(crew) for age, count in line.ages.items()]
    return sum(age * count for age, count in ages) / sum(count for _, count in ages)


def is_sound(crew: SimCrew) -> bool:
    """Time goes forward, every step has its version, nobody was refused, and no record of anyone is
    missing in between.
    """
    times = [line.time_s for line in read_metrics(crew.folder)]
    assert times == sorted(times)
    for student in crew.students:
        assert student.peer.admission.refused == Counter()
        steps = steps_of(crew, student.me.name)
        assert (
            [line.version for line in steps]
            == list(range(1, len(steps) + 1))
            == [line.round for line in steps]
        )
    for sampler in crew.samplers:
        assert sampler.sampler.admission.refused == Counter()
        assert sampler.sampler.failed == 0
        lines = lines_of(crew, sampler.me.name)
        assert [line.round for line in lines] == list(range(1, len(lines) + 1))
        for line in lines:
            assert line.behind >= 0
    return True


# The same again


STORMY: dict[str, Any] = {
    "network": f"delay = {LOGNORMAL}\nloss = 0.2\noutages = [[0.3, 0.5]]",
    "per_peer": {
        "s0": "churn = { join_s = 0.05, crashes = [[0.5, 0.7]] }",
        "s1": "speed = { sample = 300 }",
    },
    "rounds": 4,
}


@pytest.mark.quick
def test_the_same_seed_gives_the_same_lines_and_the_same_weights_and_another_gives_others(
    folder: Path,
) -> None:
    first, second = run(folder, "a", **STORMY), run(folder, "b", **STORMY)
    other = run(folder, "c", seed=1, **STORMY)
    assert is_sound(first)
    lines = [(crew.folder / "metrics.jsonl").read_bytes() for crew in (first, second, other)]
    logs = [(crew.folder / "groups" / "log.bin").read_bytes() for crew in (first, second, other)]
    assert lines[0] == lines[1] != lines[2]
    assert logs[0] == logs[1] != logs[2]
    policies = [crew.students[0].peer.learner.policy for crew in (first, second, other)]
    assert same_weights(policies[0], policies[1])
    assert not same_weights(policies[0], policies[2])
    traces = [
        [path.read_bytes() for path in sorted((crew.folder / "groups" / "traces").rglob("*.zst"))]
        for crew in (first, second)
    ]
    assert traces[0] == traces[1] != []


def test_a_simulation_leaves_the_weights_it_reached(folder: Path) -> None:
    crew = run(folder, rounds=2)
    (policy,) = trained_policies(crew.folder).values()
    assert same_weights(policy, crew.students[0].peer.learner.policy)
    assert not same_weights(
        policy,
        build_peer(
            crew._run, crew.config.named("l"), crew.log, crew.students[0].peer.half.outbox, b""
        ).learner.policy,
    )


@pytest.mark.quick
def test_a_folder_with_something_in_it_is_not_written_to(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        run(folder)


# Without roles: the same crew as in one process


def comparable(folder: Path, *of_time: str) -> dict[tuple[int, str], MetricsLine]:
    """What a run's lines say, but for what is about time."""
    ignored = dict.fromkeys(("timing", "time_s", *of_time))
    return {
        (line.round, line.peer): msgspec.structs.replace(line, **ignored)
        for line in read_metrics(folder)
    }


def changed(
    config: CrewConfig, network: dict[str, Any] | None = None, **churn: dict[str, Any]
) -> CrewConfig:
    peers = tuple(
        msgspec.structs.replace(p, churn=msgspec.convert(churn.get(p.name, {}), Churn))
        for p in config.peer
    )
    return msgspec.structs.replace(
        config, peer=peers, network=msgspec.convert(network or {}, Network)
    )


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalCrew:
    folder = tmp_path_factory.mktemp("local")
    write_task(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        crew = LocalCrew.start(spread_crew(folder, ("full", "lora"), rounds=2), folder / "local")
        for _ in crew.rounds():
            pass
    return crew


@pytest.mark.parametrize(
    ("network", "churn", "took_s"),
    [
        pytest.param({}, {}, 0.0, id="at once"),
        pytest.param({"delay": 7.0}, {}, 2 * 14.0, id="far"),
        pytest.param(
            {"delay": {"shape": "exponential", "mean_s": 5.0}, "loss": 0.3}, {}, 10.0, id="lossy"
        ),
        pytest.param({"link": {"full0": {"outages": [[0.05, 30.0]]}}}, {}, 30.0, id="outage"),
        pytest.param({}, {"full0": {"join_s": 20.0}}, 20.0, id="late"),
        pytest.param({}, {"lora1": {"crashes": [[0.01, 5.0]]}}, 5.0, id="crash while sampling"),
        pytest.param({}, {"lora1": {"crashes": [[0.045, 5.0]]}}, 5.0, id="crash while learning"),
        pytest.param(
            {},
            {"full0": {"crashes": [[0.045, 5.0], [5.001, 6.0]]}},
            6.0,
            id="crash twice in one step",
        ),
    ],
)
def test_lockstep_does_not_see_time(
    folder: Path, local: LocalCrew, network: dict[str, Any], churn: dict[str, Any], took_s: float
) -> None:
    crew = simulated(
        changed(spread_crew(folder, ("full", "lora"), rounds=2), network, **churn), folder / "run"
    )
    assert crew.events.clock.now_s() >= took_s
    of_time = ["waiting"] if churn else []  # of the next round, where the others are already in it
    assert comparable(crew.folder, *of_time) == comparable(local.folder, *of_time)
    for student, peer in zip(crew.students, local.peers, strict=True):
        assert same_weights(student.peer.learner.policy, peer.learner.policy)


def test_a_step_that_is_taken_again_misses_nobody_who_was_there(folder: Path) -> None:
    config = changed(
        spread_crew(folder, rounds=2, deadline_s=3.0), full1={"crashes": [[0.045, 10.0]]}
    )
    crew = simulated(config, folder / "run")
    assert crew.events.clock.now_s() > 10
    assert [line.without for line in steps_of(crew, "full1")] == [None, None]


def test_a_round_goes_on_without_who_is_late(folder: Path) -> None:
    config = changed(
        spread_crew(folder, ("full", "full", "full"), rounds=3, deadline_s=3.0),
        full2={"join_s": 100.0},
    )
    crew = simulated(config, folder / "run")
    early = [steps_of(crew, name) for name in ("full0", "full1")]
    for lines in early:
        assert [line.without for line in lines] == [["full2"]] * 3
        assert 3 < lines[0].time_s < 4 < 9 < lines[2].time_s < 10
    assert all(line.time_s > 100 for line in steps_of(crew, "full2"))


def test_a_peer_that_leaves_for_good_does_not_keep_the_others_from_finishing(folder: Path) -> None:
    config = changed(
        spread_crew(folder, ("full", "full", "full"), rounds=3, deadline_s=3.0),
        full2={"leave_s": 0.05},
    )
    crew = simulated(config, folder / "run")
    assert [len(steps_of(crew, name)) for name in ("full0", "full1")] == [3, 3]


@pytest.mark.quick
def test_a_lockstep_crew_that_somebody_left_says_so_instead_of_hanging(folder: Path) -> None:
    config = changed(spread_crew(folder, rounds=3), full1={"leave_s": 0.05})
    with pytest.raises(
        ValueError,
        match=(
            r"nothing more can happen after \d+ s.*full0 has 2 groups after round 1.*did everyone "
            r"who samples leave"
        ),
    ):
        simulated(config, folder / "run")


def test_async_peers_learn_from_each_other_far_away(folder: Path) -> None:
    near = simulated(spread_crew(folder, pace="async", rounds=4), folder / "near")
    config = changed(
        spread_crew(folder, pace="async", rounds=4, learning="max_age = 99"), {"delay": 0.5}
    )
    far = simulated(config, folder / "far")
    for crew in (near, far):
        assert all(set(line.senders) <= {"full0", "full1"} for line in steps_of(crew, "full0"))
    assert far.events.clock.now_s() > near.events.clock.now_s() + 0.9
    ages = [
        max(int(age) for line in steps_of(crew, "full0") for age in line.ages)
        for crew in (near, far)
    ]
    assert ages[0] < ages[1]


@pytest.mark.parametrize("learning", ["", 'stale = "pace"'])
def test_in_async_a_quick_peer_does_not_wait_for_one_that_is_ten_times_slower(
    learning: str, folder: Path
) -> None:
    slow_s = "speed = { sample = 100, learn = 400 }\n"
    settings = {"samplers": {}, "peers": {"quick": "", "slow": ""}, "rounds": 24}
    crew = run(folder, learning=learning, per_peer={"slow": slow_s}, **settings)
    quick, slow = (
        [{n: s.groups for n, s in line.senders.items()} for line in steps_of(crew, name)]
        for name in ("quick", "slow")
    )
    assert [len(quick), len(slow)] == [24, 24]
    assert [groups["quick"] for groups in quick] == [groups["slow"] for groups in slow] == [2] * 24
    # each learns from what is there of the other, and has no larger a step for that
    assert 2 <= sum(groups.get("slow", 0) for groups in quick) < 12
    assert [groups.get("quick", 0) for groups in slow[:8]] == [2] * 8
    for student, tokens_per_s in zip(crew.students, (1000, 100), strict=True):
        name = student.me.name
        sampled = sum(len(r.tokens) for g in groups_of(crew, name) for r in g.rollouts)
        learned = sum(line.num_tokens for line in steps_of(crew, name))
        works_s = sampled / tokens_per_s + learned / (4 * tokens_per_s)
        assert steps_of(crew, name)[-1].time_s == pytest.approx(works_s, rel=0.02)


# One learner, far samplers


def test_the_first_step_is_over_when_it_should_be(folder: Path) -> None:
    network = (
        "[network.link.l]\nup = 1\ndown = 2\n[network.link.s0]\ndelay = "
        "10\n[network.link.s1]\ndelay = 9.9"
    )
    speeds = {
        "l": "speed = { learn = 10 }",
        "s0": "speed = { sample = 20 }",
        "s1": "speed = { sample = 20 }",
    }
    crew = run(folder, rounds=1, network=network, per_peer=speeds)
    tokens = {
        name: sum(len(r.tokens) for g in groups_of(crew, name) if g.round == 0 for r in g.rollouts)
        for name in ("s0", "s1")
    }
    # weights up, weights down, sampling, groups up; then down to the learner, and its step
    arrives_s = {
        "s0": 1 + 10 + tokens["s0"] / 20 + 10 + 2,
        "s1": 1 + 9.9 + tokens["s1"] / 20 + 9.9 + 2,
    }
    (line,) = steps_of(crew)
    assert line.time_s == pytest.approx(max(arrives_s.values()) + sum(tokens.values()) / 10)
    assert {name: sender.groups for name, sender in line.senders.items()} == {
        "s0": 2,
        "s1": 2,
    }
    first = {name: lines_of(crew, name)[0].time_s for name in ("s0", "s1")}
    assert first == pytest.approx({"s0": 11 + tokens["s0"] / 20, "s1": 10.9 + tokens["s1"] / 20})
    assert groups_of(crew, "s0")[0].created_s == 11.0
    # the last is still on its way
    assert [c.created_s for c in contents(crew) if isinstance(c, Weights)] == pytest.approx([0.0])


def test_without_delays_a_sampler_is_at_most_the_versions_behind_that_a_round_takes(
    folder: Path,
) -> None:
    crew = run(folder, rounds=6)
    assert is_sound(crew)
    assert mean_age(crew) <= 1
    assert steps_of(crew)[0].ages == {0: 4}
    assert len(contents(crew)) == len({c.id for c in contents(crew)})


def test_ages_grow_with_the_delay(folder: Path) -> None:
    crews = [
        run(folder, f"{delay}", rounds=8, learning="max_age = 99", network=f"delay = {delay}")
        for delay in (0, 0.02, 0.1)
    ]
    assert all(is_sound(crew) for crew in crews)
    ages = [mean_age(crew) for crew in crews]
    assert ages[0] < ages[1] < ages[2]
    behind = [
        max(line.behind for name in ("s0", "s1") for line in lines_of(crew, name)) for crew in crews
    ]
    assert behind[0] < behind[2]


def test_old_groups_are_dropped_where_the_window_is_short(folder: Path) -> None:
    crew = run(folder, rounds=5, learning="max_age = 1", network="delay = 0.05")
    assert max(int(age) for line in steps_of(crew) for age in line.ages) == 1
    dropped = steps_of(crew)[-1].dropped
    assert sum(dropped[name]["stale"] for name in ("s0", "s1")) > 0


def test_a_faster_sampler_makes_more_of_what_is_learned(folder: Path) -> None:
    crew = run(folder, rounds=6, per_peer={"s1": "speed = { sample = 200 }"})
    made = {name: len(lines_of(crew, name)) for name in ("s0", "s1")}
    assert made["s0"] > 3 * made["s1"]
    assert is_sound(crew)


def test_losses_delay_and_lose_nothing(folder: Path) -> None:
    crew = run(folder, rounds=6, learning="max_age = 99", network="delay = 0.03\nloss = 0.6")
    assert is_sound(crew)
    orders = [[g.round for g in groups_of(crew, name)] for name in ("s0", "s1")]
    assert any(order != sorted(order) for order in orders)
    for name, order in zip(("s0", "s1"), orders, strict=True):
        on_their_way = len(next(s for s in crew.samplers if s.me.name == name).sampler.half.outbox)
        assert len(order) + on_their_way == 2 * len(lines_of(crew, name))


def test_every_round_is_on_the_log_at_the_moment_its_link_says_whatever_was_sent_before_it(
    folder: Path,
) -> None:
    config = far_crew(
        folder, rounds=6, learning="max_age = 99", network=f"delay = {LOGNORMAL}\nloss = 0.3"
    )
    crew = SimCrew(config, folder / "run")
    appended_s: dict[str, float] = {}
    append = crew.log.append

    def noting(records: Sequence[tuple[str, bytes]]) -> None:
        appended_s.update(dict.fromkeys((id for id, _ in records), crew.events.clock.now_s()))
        append(records)

    crew.log.append = noting  # type: ignore[method-assign]
    for _ in crew.rounds():
        pass
    for name in ("s0", "s1"):
        sent_s = {line.round - 1: line.time_s for line in lines_of(crew, name)}
        due_s = {
            f"{name}.{round}.{slot}": config.weather(name).sent(str(round), sent_s[round])
            for round in sent_s
            for slot in range(2)
        }
        there = {id: at_s for id, at_s in due_s.items() if at_s < crew.events.clock.now_s()}
        assert there == {id: at_s for id, at_s in appended_s.items() if id in there}
        assert list(there) != sorted(there, key=lambda id: there[id])  # some overtook others
    versions = {c.version: c.created_s for c in contents(crew) if isinstance(c, Weights)}
    for version, made_s in versions.items():
        assert appended_s[f"l.weights.{version}"] == config.weather("l").sent(
            f"weights.{version}", made_s
        )


def test_an_outage_keeps_a_samplers_groups_back_until_it_is_over(folder: Path) -> None:
    crew = run(
        folder,
        rounds=8,
        learning="max_age = 99",
        network="[network.link.s0]\noutages = [[0.05, 0.3]]",
    )
    assert is_sound(crew)
    senders = {line.time_s: set(line.senders) for line in steps_of(crew)}
    assert {"s1"} in [found for at_s, found in senders.items() if 0.15 < at_s < 0.3]
    assert all("s0" not in found for at_s, found in senders.items() if 0.15 < at_s < 0.3)
    # it goes on sampling
    assert [line.round for line in lines_of(crew, "s0") if 0.05 < line.time_s < 0.3]
    kept = [g.origin.version for g in groups_of(crew, "s0") if 0.1 < g.created_s < 0.3]
    assert len(set(kept)) <= 1  # with weights that do not get there either


# Who comes, goes and crashes


def test_a_sampler_that_crashes_loses_the_batch_it_was_making_and_nothing_else(
    folder: Path,
) -> None:
    crew = run(folder, rounds=8, per_peer={"s0": "churn = { crashes = [[0.06, 0.2]] }"})
    assert is_sound(crew)
    groups = groups_of(crew, "s0")
    assert [(g.round, g.slot) for g in groups] == [
        (round, slot) for round in range(len(groups) // 2) for slot in range(2)
    ]
    times = [line.time_s for line in lines_of(crew, "s0")]
    assert times[0] < 0.06
    assert times[1] > 0.2  # the batch that was begun at 0.04 s
    assert {g.created_s for g in groups if g.round == 1} == {0.2}
    assert {g.origin.version for g in groups if g.round == 1} == {newest_at(crew, 0.2)} != {0}


def newest_at(crew: SimCrew, at_s: float) -> int:
    return max(c.version for c in contents(crew) if isinstance(c, Weights) and c.created_s <= at_s)


def test_a_sampler_that_crashes_waits_for_weights_again(folder: Path) -> None:
    crew = run(
        folder,
        rounds=12,
        learning="max_age = 99",
        network="delay = 0.05",
        per_peer={"s0": "churn = { crashes = [[0.12, 0.3]] }"},
    )
    assert is_sound(crew)
    assert all(not 0.12 <= g.created_s < 0.35 for g in groups_of(crew, "s0"))
    assert 0.35 in {g.created_s for g in groups_of(crew, "s0")}
    assert {g.created_s for g in groups_of(crew, "s1") if 0.12 < g.created_s < 0.3}


def test_a_learner_that_crashes_in_its_step_takes_the_same_step_again(folder: Path) -> None:
    plain = run(folder, "plain", rounds=4)
    tokens = sum(
        len(r.tokens)
        for g in contents(plain)
        if isinstance(g, Group) and g.round == 0
        for r in g.rollouts
    )
    undisturbed = steps_of(plain)[0]
    crash_s = undisturbed.time_s - tokens / 4000 / 2
    crew = run(
        folder,
        rounds=4,
        learning="max_age = 99",
        per_peer={"l": f"churn = {{ crashes = [[{crash_s}, 0.3]] }}"},
    )
    assert is_sound(crew)
    first = steps_of(crew)[0]
    assert first.time_s == pytest.approx(0.3 + tokens / 4000)
    for key in ("loss", "grad_norm", "ages", "senders"):
        assert getattr(first, key) == getattr(undisturbed, key)
    peer = crew.students[0].peer
    taken = sum(count for line in steps_of(crew) for count in line.ages.values())
    read = [g for name in ("s0", "s1") for g in groups_of(crew, name)]
    assert taken + len(peer.waiting) + peer.waiting.dropped.total() == len(read)


def test_samplers_go_on_while_their_learner_is_away(folder: Path) -> None:
    crew = run(
        folder,
        rounds=6,
        learning="max_age = 99",
        per_peer={"l": "churn = { crashes = [[0.1, 0.4]] }"},
    )
    assert is_sound(crew)
    assert not [line for line in steps_of(crew) if 0.1 < line.time_s <= 0.4]
    assert len([line for line in lines_of(crew, "s0") if 0.1 < line.time_s < 0.4]) > 5


def test_a_sampler_that_joins_late_begins_with_the_newest_weights(folder: Path) -> None:
    crew = run(folder, rounds=8, per_peer={"s1": "churn = { join_s = 0.2 }"})
    assert is_sound(crew)
    late = groups_of(crew, "s1")
    assert min(g.created_s for g in late) == 0.2
    assert [g.round for g in late[:2]] == [0, 0]
    assert late[0].origin.version == newest_at(crew, 0.2) > 0


def test_a_learner_that_joins_late_has_published_nothing_before(folder: Path) -> None:
    crew = run(folder, rounds=2, per_peer={"l": "churn = { join_s = 1 }"})
    assert min(g.created_s for name in ("s0", "s1") for g in groups_of(crew, name)) >= 1


def test_a_sampler_that_leaves_is_done_without(folder: Path) -> None:
    crew = run(folder, rounds=6, per_peer={"s1": "churn = { leave_s = 0.1 }"})
    assert is_sound(crew)
    assert max(g.created_s for g in groups_of(crew, "s1")) < 0.1
    assert max(line.time_s for line in lines_of(crew, "s1")) < 0.1
    assert set(steps_of(crew)[-1].senders) == {"s0"}


def test_where_every_sampler_leaves_the_error_says_so(folder: Path) -> None:
    leaving = dict.fromkeys(("s0", "s1"), "churn = { leave_s = 0.05 }")
    with pytest.raises(
        ValueError,
        match=(
            r"nothing more can happen.*l has 0 groups after round 1; did everyone who samples leave"
        ),
    ):
        run(folder, rounds=9, per_peer=leaving)


def test_what_a_leaver_sent_still_arrives(folder: Path) -> None:
    leaving = dict.fromkeys(("s0", "s1"), "churn = { leave_s = 0.06 }")
    crew = run(
        folder,
        rounds=1,
        network="[network.link.s0]\nup = 5\n[network.link.s1]\nup = 5",
        per_peer=leaving,
    )
    assert crew.events.clock.now_s() > 5
    assert {name: len(groups_of(crew, name)) for name in ("s0", "s1")} == {"s0": 2, "s1": 2}


def test_what_can_never_be_learned_from_is_an_error_and_no_endless_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(motley.sim.simulation, "MAX_UNLEARNED", 5)
    monkeypatch.setattr(
        Peer, "_take_in", lambda self, entry, admitted: self.admission.refuse(entry, "mood", "")
    )
    with pytest.raises(
        ValueError,
        match=r"nobody has learned anything from the last \d+ records.*'s0': \{'mood': \d+\}",
    ):
        run(folder, rounds=4)


def test_a_window_in_seconds_shorter_than_the_delays_slows_a_crew_and_does_not_stop_it(
    folder: Path,
) -> None:
    crew = run(folder, rounds=4, learning="max_age_s = 0.1", network="delay = 0.2")
    assert is_sound(crew)


def test_groups_on_their_way_are_no_reason_to_give_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(motley.sim.simulation, "MAX_UNLEARNED", 2)
    crew = run(folder, rounds=2, learning="max_age = 99", network="delay = 0.5")
    assert is_sound(crew)


def test_a_window_in_seconds_takes_what_is_inside_it(folder: Path) -> None:
    crew = run(
        folder,
        rounds=8,
        learning="max_age_s = 0.5",
        network="delay = 0.1\n[network.link.l]\ndelay = 0",
    )
    assert is_sound(crew)
    made_s = {c.version: c.created_s for c in contents(crew) if isinstance(c, Weights)}
    for line in steps_of(crew):
        oldest = line.version - 1 - max(int(age) for age in line.ages)
        assert line.time_s - 0.03 - made_s[oldest] <= 0.5  # less the step itself


def test_a_window_in_seconds_survives_a_silence_longer_than_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(motley.sim.simulation, "MAX_UNLEARNED", 100)
    away = dict.fromkeys(("s0", "s1"), "churn = { crashes = [[0.1, 1.5]] }")
    crew = run(folder, rounds=4, learning="max_age_s = 1", per_peer=away)
    assert is_sound(crew)


# Pace


@pytest.mark.parametrize(
    ("learning", "network"),
    [
        ("max_age = 0", ""),
        ("max_age = 2", f"delay = {LOGNORMAL}"),
        ("max_age_s = 0.1", f"delay = {LOGNORMAL}"),
    ],
)
def test_a_paced_crew_drops_nothing_and_finishes(folder: Path, learning: str, network: str) -> None:
    slow = {"l": "speed = { learn = 400 }"}
    crew = run(
        folder, rounds=4, learning=f'stale = "pace"\n{learning}', network=network, per_peer=slow
    )
    assert is_sound(crew)
    assert steps_of(crew)[-1].dropped == {}
    # 40 tokens at most
    could_have_made = (crew.events.clock.now_s() - lines_of(crew, "s0")[0].time_s) / 0.04
    assert len(lines_of(crew, "s0")) < 0.8 * could_have_made  # it really waited


@pytest.mark.quick
def test_a_paced_crew_that_publishes_seldom_would_stand_still_and_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"stale = 'pace' with weights.every = 4 stands still"):
        run(folder, rounds=12, learning='stale = "pace"', weights="every = 4\nanchor_every = 4")


@pytest.mark.parametrize("learning", ["max_age = 1", "max_age_s = 0.05"])
def test_a_paced_crew_whose_learner_is_far_hears_that_there_is_little_left_to_learn_from(
    folder: Path, learning: str
) -> None:
    # several steps are taken while one version is on its way
    far = "[network.link.l]\nup = 1\ndown = 0"
    slow = {"l": "speed = { learn = 400 }"}
    crew = run(
        folder, rounds=50, learning=f'stale = "pace"\n{learning}', network=far, per_peer=slow
    )
    assert is_sound(crew)


def test_a_paced_horizontal_crew_with_a_slow_sampler_does_not_stand_still(folder: Path) -> None:
    slow = {"s1": "speed = { sample = 20 }"}
    crew = run(
        folder, rounds=4, learning='stale = "pace"\nmax_age = 1', layout="horizontal", per_peer=slow
    )
    assert is_sound(crew)


# Further crews


def test_a_horizontal_crew_learns_from_groups_of_all_its_samplers(folder: Path) -> None:
    crew = run(folder, rounds=3, layout="horizontal", per_peer={"s1": "speed = { sample = 500 }"})
    assert is_sound(crew)
    assert all(
        line.senders["s0"].groups == line.senders["s1"].groups == 4 for line in steps_of(crew)
    )


MIXED: dict[str, Any] = {
    "samplers": {"s0": "l", "s1": "l", "t0": "k"},
    "peers": {"p": ""},
    "rounds": 3,
}


def test_two_learners_with_samplers_and_a_plain_peer_make_one_crew(folder: Path) -> None:
    # so slow that groups of others come in time: it waits for none
    slow = {"p": "speed = { learn = 100, sample = 100 }"}
    network = f"delay = {LOGNORMAL}"
    crew = run(folder, **MIXED, network=network, learning="max_age = 99", per_peer=slow)
    assert is_sound(crew)
    assert {student.me.name: student.peer.learned_rounds for student in crew.students} == {
        "l": 3,
        "k": 3,
        "p": 3,
    }
    models = {name: groups_of(crew, name)[0].origin for name in ("s0", "t0", "p")}
    assert len({origin.peer for origin in models.values()}) == 3
    assert {c.peer for c in contents(crew) if isinstance(c, Weights)} == {"l", "k"}
    senders = {
        name: {s for line in steps_of(crew, name) for s in line.senders} for name in ("l", "k", "p")
    }
    assert set.union(*senders.values()) == {"s0", "s1", "t0", "p"}
    assert all(len(found) >= 2 for found in senders.values())


def test_a_slow_plain_peer_beside_learners_takes_all_its_steps(folder: Path) -> None:
    slow = {"p": "speed = { learn = 10, sample = 10 }"}
    crew = run(folder, **MIXED | {"rounds": 4}, learning="max_age = 1", per_peer=slow)
    assert [line.senders["p"].groups for line in steps_of(crew, "p")] == [2] * 4


def test_a_lora_learner_moves_little_and_its_samplers_follow(folder: Path) -> None:
    crew = run(folder, rounds=3, train="lora")
    assert is_sound(crew)
    records = [c for c in contents(crew) if isinstance(c, Weights)]
    assert [c.version for c in records] == [0, 1, 2]  # the last is not read by anyone
    for record in records:
        assert sum(b.num_bytes for b in record.blobs) < 0.2 * sum(
            b.num_bytes for b in record.frozen
        )
        assert record.frozen == records[0].frozen
    kl = [
        sender.kl_k3
        for sender in steps_of(crew)[0].senders.values()
        if sender.kl_k3 is not msgspec.UNSET
    ]
    assert max(kl) < 1e-3  # the base arrived whole: sampler and learner agree before the first step


def test_weights_are_sent_as_precisely_as_asked_for(folder: Path) -> None:
    kl, sizes = {}, {}
    for precision in ("float32", "bfloat16"):
        crew = run(folder, precision, rounds=1, weights=f'precision = "{precision}"', lossless=True)
        kl[precision] = max(sender.kl_k3 for sender in steps_of(crew)[0].senders.values())
        sizes[precision] = next(
            sum(b.raw_bytes for b in c.blobs) for c in contents(crew) if isinstance(c, Weights)
        )
    assert kl["float32"] < 1e-10 < 1e-8 < kl["bfloat16"] < 1e-3
    assert sizes["float32"] == pytest.approx(2 * sizes["bfloat16"], rel=0.05)


def test_with_weights_published_seldom_samplers_are_further_behind(folder: Path) -> None:
    crew = run(folder, rounds=6, learning="max_age = 99", weights="every = 4\nanchor_every = 8")
    assert is_sound(crew)
    assert [c.version for c in contents(crew) if isinstance(c, Weights)] == [0, 4]
    assert {g.origin.version for name in ("s0", "s1") for g in groups_of(crew, name)} == {0, 4}
    assert mean_age(crew) > 1


# What it costs


def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    happened = itertools.count()
    happen = Events.happen
    monkeypatch.setattr(Events, "happen", lambda self: (next(happened), happen(self))[1])
    return lambda: next(happened)


def test_a_far_learner_looks_about_as_often_as_something_arrives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = counted(monkeypatch)
    crew = run(folder, rounds=8, learning="max_age = 99", network="[network.link.l]\ndown = 0.4")
    assert happened() < 6 * len(crew.log)


def test_far_samplers_cost_few_events(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = counted(monkeypatch)
    crew = run(
        folder,
        rounds=6,
        learning="max_age = 99",
        network="[network.link.s0]\ndelay = 0.1\n[network.link.s1]\ndelay = 0.1",
    )
    assert happened() < 6 * len(crew.log)


@pytest.mark.parametrize("pace", ["lockstep", "async"])
def test_peers_that_hear_some_learn_over_slow_links_and_through_crashes(
    pace: str, folder: Path
) -> None:
    crew = run(
        folder,
        samplers={},
        peers=dict.fromkeys([f"p{number}" for number in range(6)], ""),
        pace=pace,
        hear=2,
        network=f"delay = {LOGNORMAL}",
        per_peer={"p1": "churn = { crashes = [[0.5, 3.0]] }\n"},
    )
    for student in crew.students:
        peer = student.peer
        assert not peer.admission.refused
        assert peer.hearing.passed_by > 0
        steps = steps_of(crew, peer.me.name)
        assert len(steps) == 4
        assert all(line.senders[peer.me.name].groups == 2 for line in steps)
        sizes = [sum(s.groups for s in line.senders.values()) for line in steps]
        assert max(sizes) == 6
        if pace == "lockstep":
            assert min(sizes) == 6
            heard = [peer.hearing.of(round) for round in range(4)]
            assert [sorted(line.senders) for line in steps] == heard
