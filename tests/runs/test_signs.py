"""Signs that nothing is learned: each shows in lines that have it, once, and in no ordinary run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fakes import spread_crew
from motley.config import CrewConfig, Teach, read_config
from motley.learning.senders import Distribution, SenderMetrics
from motley.records import Sampling
from motley.runs.history import WINDOW
from motley.runs.local import LocalCrew
from motley.runs.metrics import LearnerLine, Sign, append_lines, learner_lines, read_metrics
from motley.runs.signs import UNHEARD, Watch, signs_of
from motley.trust.standing import Suspicion

pytestmark = pytest.mark.slow

CREWS = Path(__file__).parents[2] / "crews"


@pytest.fixture
def config(tmp_path: Path) -> CrewConfig:
    """Peers full0 and full1, forty rounds, 400 held-out problems per kind."""
    made = spread_crew(tmp_path, rounds=40)
    return msgspec.structs.replace(
        made, evaluate=msgspec.structs.replace(made.evaluate, problems=400)
    )


def spread(mean: float) -> Distribution:
    return Distribution(mean, mean, mean, mean, mean)


def sender(**others: object) -> SenderMetrics:
    """Of an ordinary step."""
    usual: dict[str, object] = {
        "groups": 4, "reward": 0.5, "accuracy": 0.5, "tokens": 5.0, "truncated": 0.1, "age": 0.0,
        "silent_groups": 1, "kl_k1": 0.0, "weight": spread(1.0), "entropy": 0.4,
        "tau_before": 0.9,
    }  # fmt: skip
    return SenderMetrics(**(usual | others))  # type: ignore[arg-type]


def line(number: int, mine: SenderMetrics, other: SenderMetrics | None = None, **more: object):  # type: ignore[no-untyped-def]
    senders = {"full0": mine} | ({"full1": other} if other else {})
    usual: dict[str, object] = {"grad_norm": 0.8, "num_sequences": 16, "num_scored": 12}
    return LearnerLine(round=number, peer="full0", senders=senders, **(usual | more))  # type: ignore[arg-type]


def said(config: CrewConfig, lines: list[LearnerLine]) -> list[tuple[int, str, list[str]]]:
    """(round, sign, senders) of everything that is said."""
    watch = Watch(config)
    return [(one.round, s.sign, s.senders) for one in lines for s in watch.see(one)]


FAR = sender(kl_k1=9.0)
CASES: dict[str, tuple[SenderMetrics, SenderMetrics, dict[str, object], list[str]]] = {
    "all wrong": (sender(reward=0.0), sender(reward=0.0), {"num_scored": 0, "grad_norm": 0.0}, []),
    "all right": (sender(reward=1.0), sender(reward=1.0), {"num_scored": 0, "grad_norm": 0.0}, []),
    "constant reward": (
        sender(reward=-7.0), sender(reward=-7.0),
        {"num_scored": 0, "grad_norm": 0.0, "measure": "reward"}, [],
    ),
    "silent groups": (sender(), sender(reward=0.25), {"num_scored": 0, "grad_norm": 0.0}, []),
    "truncated": (sender(truncated=1.0), sender(), {}, []),
    "no gradient": (sender(), sender(), {"grad_norm": 0.0}, []),
    "no entropy": (sender(entropy=0.001), sender(), {}, []),
    "own kl": (sender(kl_k1=2.0), sender(), {}, ["full0"]),
    "filtered": (sender(), sender(weight=spread(0.0)), {}, ["full1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_sign_shows_after_several_rounds_and_is_said_once(name: str, config: CrewConfig) -> None:
    mine, other, more, senders = CASES[name]
    lines = [line(number, mine, other, **more) for number in range(1, 3 * WINDOW)]
    assert said(config, lines) == [(WINDOW, name, senders)]


@pytest.mark.parametrize("name", CASES)
def test_one_ordinary_round_among_bad_ones_is_no_sign(name: str, config: CrewConfig) -> None:
    mine, other, more, _ = CASES[name]
    measure = {key: more[key] for key in ("measure",) if key in more}
    lines = [
        line(number, sender(), sender(), **measure)
        if number % WINDOW == 0
        else line(number, mine, other, **more)
        for number in range(1, 4 * WINDOW)
    ]
    assert said(config, lines) == []


def test_an_ordinary_peer_has_no_sign(config: CrewConfig) -> None:
    foreign = sender(kl_k1=1.5, weight=spread(0.6))
    lines = [line(n, sender(), foreign, heldout={"sort": 0.4 + n / 100}) for n in range(1, 40)]
    assert said(config, lines) == []


@pytest.mark.parametrize(
    ("sampling", "cause"),
    [
        (Sampling(), "too old"),
        (Sampling(top_k=20), "set logprobs = 'full' under"),
        (Sampling(top_p=0.5), "set logprobs = 'full' under"),
        (Sampling(top_p=0.5, logprobs="full"), "too old"),
    ],
)
def test_the_distance_of_own_samples_is_that_of_truncation_where_it_is_reported(
    sampling: Sampling, cause: str, config: CrewConfig
) -> None:
    watch = Watch(msgspec.structs.replace(config, sampling=sampling))
    far = [line(n, sender(kl_k1=2.0), sender()) for n in range(1, 10)]
    (sign,) = [sign for one in far for sign in watch.see(one)]
    assert sign.sign == "own kl"
    assert cause in sign.words
    assert ("too old" in sign.words) == (cause == "too old")


def test_a_sender_from_whom_the_learner_moves_away_is_named(config: CrewConfig) -> None:
    near = [line(n, sender(), sender(kl_k1=1.0)) for n in range(1, 10)]
    far = [line(n, sender(), FAR) for n in range(10, 20)]
    assert said(config, near + far) == [(14, "kl", ["full1"])]
    assert said(config, far) == [], "who was far from the beginning has not moved"


@pytest.mark.parametrize(
    ("other", "remedy"),
    [(sender(), 'use objective = "uplift" and variant = "sure"'), (None, "earlier checkpoint")],
)
def test_an_entropy_that_rises_is_said_with_its_likely_cause(
    other: SenderMetrics | None, remedy: str, config: CrewConfig
) -> None:
    calm = [line(n, sender(entropy=0.2), other) for n in range(1, 10)]
    wild = [line(n, sender(entropy=0.7), other) for n in range(10, 20)]
    watch = Watch(config)
    (sign,) = [sign for one in calm + wild for sign in watch.see(one)]
    assert sign.sign == "entropy rises"
    assert "went from 0.2 to 0.7 nats" in sign.words
    assert remedy in sign.words


@pytest.mark.parametrize(("first", "then"), [(0.3, 0.8), (0.05, 0.4), (2.0, 2.5)])
def test_an_entropy_that_is_low_or_was_as_high_before_is_no_sign(
    first: float, then: float, config: CrewConfig
) -> None:
    lines = [line(n, sender(entropy=first), sender()) for n in range(1, 10)]
    lines += [line(n, sender(entropy=then), sender()) for n in range(10, 20)]
    assert said(config, lines) == []


def test_steps_without_an_own_entropy_say_nothing_of_it(config: CrewConfig) -> None:
    nothing = sender(entropy=None)
    lines = [line(1, nothing, sender()), *(line(n, sender(entropy=1.0)) for n in range(2, 20))]
    assert said(config, lines) == []
    assert said(config, [line(n, nothing) for n in range(1, 20)]) == []


def test_a_sender_whose_groups_are_all_refused_is_named_with_the_reason(
    config: CrewConfig,
) -> None:
    watch = Watch(config)
    signs = [
        sign
        for n in range(1, 12)
        for sign in watch.see(line(n, sender(), refused={"full1": {"unscorable": 4 * n}}))
    ]
    assert [(sign.sign, sign.senders) for sign in signs] == [("refused", ["full1"])]
    assert "20 of its groups were refused, most as 'unscorable'" in signs[0].words
    assert "the reward function fails" in signs[0].words


def test_a_peer_that_takes_no_step_says_what_it_lacks(config: CrewConfig) -> None:
    refused = {"full0": {"reward": 4}, "full1": {"reward": 40}}
    idle = [LearnerLine(round=n, peer="full0", refused=refused) for n in range(12)]
    watch = Watch(config)
    (sign,) = [sign for one in idle for sign in watch.see(one)]
    assert sign.sign == "no step"
    assert "40 groups of full1 refused as 'reward'; its rewards are not those" in sign.words
    busy = [line(n, sender(), sender()) if n % 3 == 0 else idle[n] for n in range(1, 12)]
    assert said(config, busy) == [], "an async peer may wait for a while"


def test_a_slow_sender_with_one_old_refusal_is_not_named(config: CrewConfig) -> None:
    refused = {"full1": {"duplicate": 1}}
    lines = [line(1, sender(), sender(), refused=refused)]
    lines += [line(n, sender(), refused=refused) for n in range(2, 30)]
    assert said(config, lines) == []


def test_dropped_muted_and_unheard_senders_are_named(config: CrewConfig) -> None:
    dropped = [line(n, sender(), dropped={"full1": {"stale": n}}) for n in range(1, 9)]
    assert said(config, dropped) == [(WINDOW, "dropped", ["full1"])]
    unselected = [line(n, sender(), dropped={"full1": {"not selected": n}}) for n in range(1, 30)]
    assert said(config, unselected) == []
    muted = {"full1": Suspicion(evidence=4.0, muted="log-probs", until=30)}
    assert said(config, [line(3, sender(), suspects=muted)]) == [(3, "muted", ["full1"])]
    own_only = msgspec.structs.replace(config.learning, own_share=1.0)
    assert said(msgspec.structs.replace(config, learning=own_only), dropped) == []
    unheard = [line(n, sender()) for n in range(1, 30)]
    assert said(config, unheard) == [(UNHEARD, "never heard", ["full1"])]
    # others' groups teach beside the objective, and are in no step
    crew = msgspec.structs.replace(config.crew, objective="alone", meet=1.0)
    taught = msgspec.structs.replace(config, crew=crew, teach=Teach(rescue=1.0, success=1.0))
    assert said(taught, unheard) == []


def evaluated(scores: list[float], reward: float = 0.5, **more: object) -> list[LearnerLine]:
    """An evaluation before training and after every ten rounds."""
    first = LearnerLine(round=0, peer="full0", heldout={"sort": scores[0]}, **more)  # type: ignore[arg-type]
    lines = [first]
    for n in range(1, 10 * len(scores)):
        measured = {"heldout": {"sort": scores[n // 10]}, **more} if n % 10 == 0 else {}
        now = sender(reward=0.5 if n < 10 else reward)
        lines.append(line(n, now, now, **measured))
    return lines


def test_a_held_out_score_far_below_its_start_is_said(config: CrewConfig) -> None:
    assert said(config, evaluated([0.6, 0.3, 0.65, 0.55])) == [], "one bad evaluation is chance"
    assert said(config, evaluated([0.6, 0.35, 0.3], reward=0.3)) == [(20, "held-out fell", [])]
    assert said(config, evaluated([0.6, 0.35, 0.3], reward=0.9)) == [(20, "overfit", [])]
    assert said(config, evaluated([0.6, 0.5, 0.5], reward=0.3)) == [], "a little below is noise"
    assert said(config, evaluated([0.6, 0.35, 0.3])) == [], "what is sampled is as good as before"


def crossed(sums: list[float], alone: bool = False) -> list[LearnerLine]:
    """A kind that is taught gets better, and another goes these ways."""
    lines = [LearnerLine(round=0, peer="full0", heldout={"sums": sums[0], "gcd": 0.1})]
    for n in range(1, 10 * len(sums)):
        heldout = {"heldout": {"sums": sums[n // 10], "gcd": 0.9}} if n % 10 == 0 else {}
        lines.append(line(n, sender(), None if alone else sender(), **heldout))
    return lines


def test_a_kind_that_is_lost_while_others_teach_is_said(config: CrewConfig) -> None:
    assert said(config, crossed([0.7, 0.7, 0.45, 0.5, 0.4])) == [(30, "skill lost", [])]
    assert said(config, crossed([0.7, 0.7, 0.45, 0.7])) == [], "one bad evaluation is chance"
    assert said(config, crossed([0.7, 0.45, 0.5])) == [], "in the first steps kinds sway"
    assert said(config, crossed([0.7, 0.7, 0.6, 0.6])) == [], "a little below is noise"
    names = {sign for _, sign, _ in said(config, crossed([0.7, 0.7, 0.4, 0.4], alone=True))}
    assert "skill lost" not in names, "nobody taught"
    watch = Watch(config)
    (sign,) = [sign for one in crossed([0.7, 0.7, 0.45, 0.5]) for sign in watch.see(one)]
    assert "sums from 0.70 to 0.50" in sign.words
    assert "gcd" not in sign.words


def test_a_reward_that_falls_is_measured_by_its_own_size(config: CrewConfig) -> None:
    fell = evaluated([-4000.0, -5500.0, -5600.0], reward=-2000.0, measure="reward")
    assert said(config, fell) == [(20, "held-out fell", [])]
    noise = evaluated([-4000.0, -4300.0, -4200.0], reward=-2000.0, measure="reward")
    assert said(config, noise) == []


def test_scores_that_do_not_move_at_all_are_said(config: CrewConfig) -> None:
    assert said(config, evaluated([0.4] * 4)) == [(30, "standstill", [])]
    assert said(config, evaluated([0.0] * 5)) == [], "who can do nothing may still learn"


@pytest.mark.parametrize(("lr", "sign"), [(1e-12, "tiny lr"), (0.5, "huge lr")])
def test_an_lr_that_cannot_work_is_said_at_once(lr: float, sign: str, config: CrewConfig) -> None:
    learning = msgspec.structs.replace(config.learning, lr=lr)
    config = msgspec.structs.replace(config, learning=learning)
    assert said(config, [line(n, sender(), sender()) for n in (1, 2)]) == [(1, sign, [])]


def test_what_was_said_before_a_stop_is_not_said_again(config: CrewConfig, tmp_path: Path) -> None:
    wrong = sender(reward=0.0)
    lines = [line(n, wrong, wrong, num_scored=0, grad_norm=0.0) for n in range(1, 12)]
    for cut in range(len(lines)):
        path = tmp_path / f"{cut}"
        path.mkdir()
        whole, before = Watch(config), Watch(config)
        marked = [msgspec.structs.replace(one, warnings=whole.see(one) or None) for one in lines]
        append_lines(path / "metrics.jsonl", marked[:cut])
        after = Watch(config, read_metrics(path))
        found = [s for one in lines[:cut] for s in before.see(one)]
        found += [s for one in lines[cut:] for s in after.see(one)]
        assert [s.sign for s in found] == ["all wrong"]


def test_a_number_that_a_file_cannot_hold_counts_as_none(config: CrewConfig) -> None:
    broken = sender(reward=float("nan"), entropy=float("inf"), kl_k1=float("nan"))
    assert said(config, [line(n, broken, broken) for n in range(1, 12)]) == []


def test_signs_of_several_peers_in_one_round_are_told_together() -> None:
    one = Sign("all wrong", "nothing was right")
    lines = [LearnerLine(round=5, peer=peer, warnings=[one]) for peer in "ab"]
    lines.append(LearnerLine(round=9, peer="a", warnings=[Sign("muted", "it lied", ["c"])]))
    assert [str(said) for said in signs_of(lines)] == [
        "round 5, a, b: all wrong: nothing was right",
        "round 9, a: muted (of c): it lied",
    ]


# Real runs

ONES = """
def ones(prompts, completions, **columns):
    return [1.0] * len(completions)
"""


def warned(folder: Path) -> Iterator[tuple[int, str, str]]:
    for one in learner_lines(read_metrics(folder)):
        for sign in one.warnings or ():
            yield one.round, one.peer, sign.sign


def test_a_crew_with_a_constant_reward_says_so_across_a_stop(folder: Path) -> None:
    (folder / "ones_reward.py").write_text(ONES)
    config = spread_crew(folder, task="ones_reward:ones", rounds=7, learning="checkpoint_every = 2")
    run = folder / "run"
    for lines in LocalCrew.start(config, run).rounds():
        if lines[0].round == 6:  # nothing is saved: the checkpoint is of round 6 or before
            break
    for _ in LocalCrew.resume(run).rounds():
        pass
    whole = folder / "whole"
    for _ in LocalCrew.start(config, whole).rounds():
        pass
    constant = [found for found in warned(run) if found[2] == "constant reward"]
    assert constant == [(5, "full0", "constant reward"), (5, "full1", "constant reward")]
    assert [*warned(run)] == [*warned(whole)]


def test_a_constant_reward_is_said_where_a_row_still_learns_from_it(folder: Path) -> None:
    (folder / "ones_reward.py").write_text(ONES)
    config = spread_crew(folder, task="ones_reward:ones", objective="auto", rounds=WINDOW)
    for lines in LocalCrew.start(config, folder / "run").rounds():
        assert all(one.num_scored for one in learner_lines(lines)), "own groups are rehearsed"
    signs = [found.sign for found in signs_of(read_metrics(folder / "run"))]
    (constant,) = [sign for sign in signs if sign.sign == "constant reward"]
    assert "the model only repeats its own samples" in constant.words


@pytest.mark.parametrize(
    ("tau", "measure", "expected"),
    [(None, "reward", ["constant reward"]), (0.9, "reward", []), (None, "accuracy", [])],
)
def test_equal_means_of_rewards_that_differ_are_no_constant_reward(
    tau: float | None, measure: str, expected: list[str], config: CrewConfig
) -> None:
    mine, other = sender(tau_before=tau), sender(tau_before=None)
    lines = [line(n, mine, other, measure=measure) for n in range(1, 10)]
    assert [name for _, name, _ in said(config, lines)] == expected


@pytest.mark.parametrize("name", ["attacked", "specialists"])
def test_an_ordinary_crew_has_no_sign(name: str, tmp_path: Path) -> None:
    config = read_config(CREWS / f"{name}.toml")
    crew = msgspec.structs.replace(config.crew, rounds=12)
    evaluate = msgspec.structs.replace(config.evaluate, every=3)
    config = msgspec.structs.replace(config, crew=crew, evaluate=evaluate)
    for _ in LocalCrew.start(config, tmp_path / "run").rounds():
        pass
    assert [*warned(tmp_path / "run")] == []
