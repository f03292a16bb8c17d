"""Which prefixes of others' successes are continued, and for how long."""

from __future__ import annotations

from collections import Counter

import pytest

from motley.learning.prefixes import PREFIXES, Continued, PrefixQueue, TriedPrefix
from motley.records import Branch


def success(number: int = 0, length: int = 12, round: int = 0) -> Continued:
    tokens = tuple(range(100, 100 + length))
    return Continued(f"p{number}", round, number, tokens, low=0, high=length)


def queue(choice: str, most: int = 4) -> PrefixQueue:
    return PrefixQueue(PREFIXES[choice], most, seed=3)


def take(prefixes: PrefixQueue) -> list[Branch]:
    """Sample what is due."""
    due = prefixes.due()
    prefixes.took([(b.round, b.slot, len(b.prefix)) for b in due])
    return due


def test_a_drawn_prefix_may_have_any_length_but_none_and_all() -> None:
    lengths: Counter[int] = Counter()
    for number in range(600):
        prefixes = queue("drawn")
        prefixes.add(success(number, length=7))
        (branch,) = take(prefixes)
        assert branch.prefix == success(number, length=7).tokens[: len(branch.prefix)]
        lengths[len(branch.prefix)] += 1
    assert sorted(lengths) == [1, 2, 3, 4, 5, 6]
    assert min(lengths.values()) > 60


def test_a_drawn_prefix_is_continued_once() -> None:
    prefixes = queue("drawn")
    prefixes.add(success())
    (branch,) = take(prefixes)
    assert prefixes.due() == []
    prefixes.learned([TriedPrefix("p0", len(branch.prefix), succeeded=0, failed=4)])
    assert prefixes.due() == []
    assert prefixes.state().waiting == []


@pytest.mark.parametrize("needed", range(1, 12))
def test_a_bisection_finds_the_length_from_which_continuations_succeed(needed: int) -> None:
    """Here they all succeed from so many tokens on, and all fail below."""
    prefixes = queue("bisected")
    prefixes.add(success(length=12))
    tried = []
    while due := take(prefixes):
        (branch,) = due
        tried.append(len(branch.prefix))
        right = len(branch.prefix) >= needed
        prefixes.learned([TriedPrefix("p0", tried[-1], 4 * right, 4 * (not right))])
    assert tried[0] == 6
    assert len(tried) == len(set(tried)) <= 4
    assert needed in tried or needed - 1 in tried
    assert prefixes.state().waiting == []


def test_a_bisection_ends_where_some_succeed_and_some_fail() -> None:
    prefixes = queue("bisected")
    prefixes.add(success())
    (branch,) = take(prefixes)
    prefixes.learned([TriedPrefix("p0", len(branch.prefix), succeeded=1, failed=3)])
    assert take(prefixes) == []


def test_what_is_on_its_way_is_not_sampled_again_until_it_was_learned_from() -> None:
    prefixes = queue("bisected")
    prefixes.add(success())
    assert prefixes.due() == prefixes.due()  # asking takes nothing
    (branch,) = take(prefixes)
    assert prefixes.due() == []
    prefixes.learned([TriedPrefix("p0", len(branch.prefix), succeeded=0, failed=4)])
    assert [len(b.prefix) for b in prefixes.due()] == [9]


def test_a_round_takes_so_many_at_most_and_the_oldest_first() -> None:
    prefixes = queue("bisected", most=2)
    for number in range(5):
        prefixes.add(success(number))
    assert [b.slot for b in take(prefixes)] == [0, 1]
    prefixes.learned([TriedPrefix("p1", 6, succeeded=0, failed=4)])
    assert [b.slot for b in take(prefixes)] == [1, 2]


def test_no_more_problems_wait_than_eight_rounds_take() -> None:
    prefixes = queue("drawn", most=2)
    for number in range(40):
        prefixes.add(success(number))
    assert [one.slot for one in prefixes.state().waiting] == list(range(24, 40))


def test_a_success_of_one_token_has_no_prefix() -> None:
    prefixes = queue("drawn")
    prefixes.add(success(length=1))
    assert prefixes.due() == []


def test_a_problem_that_is_being_continued_is_not_begun_again() -> None:
    prefixes = queue("bisected")
    prefixes.add(success())
    prefixes.learned([TriedPrefix("p0", len(take(prefixes)[0].prefix), succeeded=4, failed=0)])
    prefixes.add(success(round=5, length=10))
    assert [(b.round, len(b.prefix)) for b in prefixes.due()] == [(0, 3)]


def test_an_outcome_that_is_known_before_its_round_is_looked_at_again_counts_once() -> None:
    """As after a crash: the step is taken again before the round is found in the outbox."""
    prefixes = queue("bisected")
    prefixes.add(success())
    prefixes.learned([TriedPrefix("p0", 6, succeeded=0, failed=4)])
    prefixes.took([(0, 0, 6)])
    assert [len(b.prefix) for b in prefixes.due()] == [9]
    prefixes.learned([TriedPrefix("gone", 6, succeeded=0, failed=4)])


def test_a_queue_comes_back_from_a_checkpoint_in_the_middle_of_a_bisection() -> None:
    before, after = queue("bisected"), queue("bisected")
    for number in range(3):
        before.add(success(number))
    take(before)
    before.learned([TriedPrefix("p1", 6, succeeded=0, failed=4)])
    after.load_state(before.state())
    assert after.state() == before.state()
    assert take(after) == take(before) != []
