from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from motley.records import Group, Origin, Rollout, Sampling
from motley.trust.audit import NOISE, Audit, AuditState, sibling_payoffs
from motley.trust.wager import Wager

from .senders import Kind, SimulatedSender, audited, honest_kind

PLAIN = Sampling(max_tokens=16)


def group(*rollouts: Rollout) -> Group:
    return Group(
        crew="c",
        problem="p",
        round=0,
        slot=0,
        origin=Origin(peer="s", model="m", vocabulary="v", version=0, sampling=PLAIN),
        rollouts=rollouts,
        created_s=0.0,
    )


def rollout(tokens: list[int], probabilities: list[float]) -> Rollout:
    logprobs = tuple(math.log(p) for p in probabilities)
    return Rollout(tokens=tuple(tokens), logprobs=logprobs, reward=0.0, ending="length")


@pytest.mark.slow
def test_a_fair_bet_leaves_the_mean_wealth_where_it_was() -> None:
    rng, wealth = np.random.default_rng(0), []
    for _ in range(4000):
        wager = Wager()
        for _ in range(5):
            wager.bet(2.0 * rng.integers(0, 2, 4))
        wealth.append(math.exp(wager.log_wealth))
    assert np.mean(wealth) == pytest.approx(1.0, abs=0.1)


def test_a_bet_that_pays_more_than_it_should_makes_rich() -> None:
    wager = Wager()
    wager.bet(np.full(1000, 1.05))
    assert wager.log_wealth > math.log(1000)


def test_a_thousand_lost_bets_do_not_hide_a_later_win() -> None:
    wager = Wager()
    for _ in range(1000):
        wager.bet(np.zeros(10))
    wager.bet(np.full(100, 2.0))
    assert wager.log_wealth > math.log(1000)


def test_bets_on_the_same_token_do_not_make_each_other_rich() -> None:
    rare = 1e-9
    wealth = 0.0
    for token, q in ((1, rare), (2, 1 - rare)):
        audit = Audit(PLAIN, 2, 0.01)
        audit.hear(group(rollout([token], [q])))
        audit.compare("s", [np.array([math.log(0.5 / q)])])
        wealth += q * 10 ** audit.evidence("s")  # on average
    assert wealth < 2  # which each of the two questions may have by itself


def test_tokens_that_begin_alike_pay_by_the_chance_of_coming_again() -> None:
    first = rollout([1, 2], [0.25, 0.5])
    same, other = rollout([1, 3], [0.25, 0.5]), rollout([4, 2], [0.25, 0.5])
    again, new = sibling_payoffs([first, same, other])
    more, less = math.exp(NOISE), math.exp(-NOISE)
    # behind nothing: 1 came again; behind 1: 3 is new; behind nothing: 4 is new
    assert again == pytest.approx([1 / (0.25 * more), 0.0, 0.0])
    assert new == pytest.approx([0.0, 1 / (1 - 0.5 * less), 1 / (1 - 0.25 * less)])


def test_completions_may_repeat_each_other_to_the_end() -> None:
    again, new = sibling_payoffs([rollout([1, 2], [1.0, 1.0])] * 3)
    assert again == pytest.approx([1.0] * 4)
    assert new == pytest.approx([0.0] * 4)


def test_one_completion_may_be_the_beginning_of_another() -> None:
    short, long = rollout([1], [0.5]), rollout([1, 2], [0.5, 0.5])
    again, _ = sibling_payoffs([short, long, long])
    assert len(again) == 3  # at 1, again at 1, and at 2


def test_sure_tokens_that_differ_are_caught_without_any_model() -> None:
    audit = Audit(PLAIN, 40, alpha=1e-3)
    sender = SimulatedSender(Kind(40, 1.0, 0.0, PLAIN, lie=-8.0), seed=0)
    audit.hear(sender.group(0)[0])
    assert audit.lie("s") == "over-reported"


def test_rare_tokens_that_keep_coming_are_caught_without_any_model() -> None:
    audit = Audit(PLAIN, 40, alpha=1e-3)
    sender = SimulatedSender(Kind(40, 3.0, 0.0, PLAIN, lie=5.0), seed=0)
    audit.hear(sender.group(0)[0])
    assert audit.lie("s") == "under-reported"


@pytest.mark.parametrize(("lie", "within"), [(0.05, 10_000), (0.5, 1_000)])
@pytest.mark.parametrize("apart", [0.0, 0.1, 0.5])
def test_a_small_lie_is_caught_in_time(lie: float, within: int, apart: float) -> None:
    kind = Kind(40, 1.0, apart, PLAIN, noise=0.002, lie=lie)
    assert all(audited(kind, seed, within, alpha=1e-3) for seed in range(3))


def test_who_lies_after_a_long_honest_time_is_caught_as_well() -> None:
    audit = Audit(PLAIN, 40, alpha=1e-3)
    sender = SimulatedSender(Kind(40, 1.0, 0.5, PLAIN), seed=0)
    for number in range(200):
        group, ratios = sender.group(number)
        audit.hear(group)
        audit.compare("s", ratios)
    assert audit.lie("s") is None
    lies = [ratio + 0.5 for ratio in ratios]
    for _ in range(10):
        audit.compare("s", lies)
    assert audit.lie("s") == "under-reported"


@pytest.mark.slow
def test_honest_senders_of_all_kinds_pass() -> None:
    rng = np.random.default_rng(7)
    caught = [audited(honest_kind(rng), seed, 1_000, alpha=1e-2) for seed in range(20)]
    assert sum(c is not None for c in caught) <= 1


@pytest.mark.slow
def test_hundreds_of_honest_senders_raise_no_more_alarms_than_promised() -> None:
    rng = np.random.default_rng(8)
    caught = [audited(honest_kind(rng), seed, 10_000, alpha=0.02) for seed in range(300)]
    assert sum(c is not None for c in caught) <= 6


def test_full_log_probs_of_truncated_sampling_are_not_held_against_anyone() -> None:
    sampling = Sampling(top_k=5, max_tokens=16, logprobs="full")
    assert audited(Kind(40, 0.5, 0.0, sampling), 0, 5_000, alpha=1e-2) is None


def test_an_audit_goes_on_from_its_state() -> None:
    audit, again = Audit(PLAIN, 40, 1e-3), Audit(PLAIN, 40, 1e-3)
    sender = SimulatedSender(Kind(40, 1.0, 0.5, PLAIN), seed=0)
    audit.hear(sender.group(0)[0])
    written = msgspec.json.decode(msgspec.json.encode(audit.state()), type=AuditState)
    again.load_state(written)
    for side in (audit, again):
        side.compare("s", [np.full(5, 0.3)])
    assert again.evidence("s") == audit.evidence("s")


def test_a_forgotten_sender_begins_anew() -> None:
    audit = Audit(PLAIN, 40, 1e-3)
    audit.compare("s", [np.full(50, 3.0)])
    assert audit.lie("s")
    audit.forget("s")
    assert audit.lie("s") is None
    assert audit.evidence("s") == 0.0
