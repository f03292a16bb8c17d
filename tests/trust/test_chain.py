from __future__ import annotations

import hashlib
import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.records import FIRST_PREVIOUS, Stamp
from motley.trust.chain import (
    MAX_MISSING,
    REMEMBERED,
    REMEMBERED_FORKS,
    REMEMBERED_SPARSELY,
    Chain,
    ChainState,
    SparseChain,
)

Link = tuple[Stamp, bytes]  # a record as a chain sees it: its stamp and its hash


def link(counter: int, previous: bytes, content: str = "") -> Link:
    stamp = Stamp(key=bytes(32), counter=counter, previous=previous)
    return stamp, hashlib.sha256(f"{counter} {previous.hex()} {content}".encode()).digest()


def honest(length: int) -> list[Link]:
    links: list[Link] = []
    for counter in range(length):
        links.append(link(counter, links[-1][1] if links else FIRST_PREVIOUS))
    return links


def taken(links: list[Link], chain: Chain | None = None) -> list[str]:
    """What a chain says to each."""
    chain = chain or Chain()
    return [chain.add(*one) for one in links]


def whole(chain: Chain, length: int) -> bool:
    return (chain.next, chain.missing) == (length, {})


def test_in_order_everything_is_taken_in() -> None:
    chain, links = Chain(), honest(1000)
    assert taken(links, chain) == [""] * 1000
    assert whole(chain, 1000)
    assert chain.head == links[-1][1]
    assert len(chain.recent) == REMEMBERED


@pytest.mark.parametrize("order", itertools.permutations(range(1, 5)))
def test_a_gap_may_be_filled_in_any_order(order: tuple[int, ...]) -> None:
    chain, links = Chain(), honest(7)
    assert taken([links[0], links[5]], chain) == ["", ""]
    assert sorted(chain.missing) == [1, 2, 3, 4]
    assert taken([links[number] for number in order], chain) == [""] * 4
    assert chain.missing == {}
    assert taken([links[6]], chain) == [""]
    assert whole(chain, 7)


def test_the_first_records_may_come_last() -> None:
    chain, links = Chain(), honest(4)
    assert taken([links[3], links[2], links[1], links[0]], chain) == [""] * 4
    assert whole(chain, 4)


def test_a_record_taken_in_before_is_a_replay() -> None:
    links = honest(5)
    assert taken([*links, links[4], links[0], links[4]]) == [""] * 5 + ["replay"] * 3


def test_a_first_record_that_names_one_before_it_is_a_fork() -> None:
    assert taken([link(0, b"\x01" * 32)]) == ["fork"]


def test_two_records_in_one_place_are_a_fork_and_the_first_stays() -> None:
    links = honest(3)
    other = link(2, links[1][1], "other")
    chain = Chain()
    assert taken([*links, other], chain) == ["", "", "", "fork"]
    assert taken([link(3, other[1]), link(3, links[2][1])], chain) == ["fork", ""]


def test_a_fork_older_than_what_is_remembered_is_not_taken_in_either() -> None:
    links = honest(REMEMBERED + 10)
    assert taken([*links, link(2, links[1][1], "other")])[-1] == "replay"


def test_a_fork_that_is_copied_is_a_replay() -> None:
    links = honest(3)
    other = link(2, links[1][1], "other")
    follower, late = link(3, other[1]), link(5, bytes(32))
    wrong = link(4, bytes(32))
    chain = Chain()
    assert taken([*links, other, follower, late, wrong], chain) == [
        "",
        "",
        "",
        "fork",
        "fork",
        "",
        "fork",
    ]
    again = Chain.from_state(chain.state())
    assert again == chain
    assert taken([wrong, other, follower, other], again) == ["replay"] * 4


def test_of_forks_the_newest_are_remembered() -> None:
    links = honest(3)
    forks = [link(2, links[1][1], f"other {number}") for number in range(REMEMBERED_FORKS + 1)]
    chain = Chain()
    assert taken([*links, *forks], chain)[3:] == ["fork"] * len(forks)
    assert len(chain.state().forks) == REMEMBERED_FORKS
    assert taken([*forks[1:], forks[0]], chain) == ["replay"] * REMEMBERED_FORKS + ["fork"]


def test_the_record_before_a_gaps_end_must_have_the_hash_named_there() -> None:
    links = honest(4)
    chain = Chain()
    assert taken([links[0], links[1], links[3], link(2, links[1][1], "other")], chain) == [
        "",
        "",
        "",
        "fork",
    ]
    assert taken([links[2]], chain) == [""]
    assert whole(chain, 4)


def test_the_record_at_a_gaps_start_must_name_the_one_before_the_gap() -> None:
    links = honest(1)
    astray = link(1, b"\x01" * 32)
    end = link(2, astray[1])
    assert taken([links[0], end, astray]) == ["", "", "fork"]


def test_a_fork_inside_a_gap_is_seen_from_either_side() -> None:
    links = honest(6)
    other = link(2, links[1][1], "other")
    assert taken([links[0], links[5], links[3], other, links[2]]) == ["", "", "", "fork", ""]
    assert taken([links[0], links[5], other, links[3], links[4]]) == ["", "", "", "fork", ""]


def test_a_first_record_that_comes_late_must_name_nothing_before_it_either() -> None:
    first = link(0, b"\x01" * 32)
    assert taken([link(1, first[1]), first]) == ["", "fork"]


def test_a_fork_inside_a_gap_is_seen_however_late_it_is_filled() -> None:
    links = honest(REMEMBERED + 20)
    other = link(2, links[1][1], "other")
    chain = Chain()
    taken([links[0], *links[5:]], chain)
    assert taken([other, links[3]], chain) == ["", "fork"]


def test_too_large_a_gap_is_refused_and_changes_nothing() -> None:
    chain = Chain()
    first = honest(1)[0]
    assert taken(
        [first, link(MAX_MISSING + 2, b"\x01" * 32), link(2**62, b"\x01" * 32)], chain
    ) == ["", "gap", "gap"]
    assert whole(chain, 1)
    assert taken([link(MAX_MISSING + 1, b"\x01" * 32)], chain) == [""]
    assert len(chain.missing) == MAX_MISSING
    assert taken([link(MAX_MISSING + 3, b"\x01" * 32)], chain) == ["gap"]


def test_what_was_refused_as_a_gap_is_taken_in_once_the_missing_ones_came() -> None:
    links = honest(MAX_MISSING + 3)
    chain = Chain()
    assert taken([links[0], links[-1]], chain) == ["", "gap"]
    assert taken(links[1:], chain) == [""] * (MAX_MISSING + 2)


@pytest.mark.parametrize("passed_over", [0, 1, 3, 300])
def test_a_chain_goes_on_from_its_state_as_if_nothing_had_been(passed_over: int) -> None:
    links = honest(passed_over + 8)
    begun, rest = (
        [links[0], *links[passed_over + 1 : passed_over + 4]],
        [*links[passed_over + 4 :], *links[1 : passed_over + 1], links[3]],
    )
    chain = Chain()
    taken(begun, chain)
    again = Chain.from_state(
        msgspec.json.decode(msgspec.json.encode(chain.state()), type=ChainState)
    )
    assert again == chain
    assert taken(rest, again) == taken(rest, chain)
    assert again == chain


@settings(max_examples=200)
@given(st.integers(1, 40).flatmap(lambda length: st.permutations(range(length))))
def test_an_honest_chain_is_taken_in_whole_in_any_order(order: list[int]) -> None:
    chain, links = Chain(), honest(len(order))
    assert taken([links[number] for number in order], chain) == [""] * len(order)
    assert whole(chain, len(order))


@settings(max_examples=200)
@given(st.lists(st.integers(0, 20), max_size=60), st.sampled_from([Chain, SparseChain]))
def test_no_copies_delays_or_losses_make_a_fork_of_an_honest_chain(
    shown: list[int], kind: type[Chain] | type[SparseChain]
) -> None:
    chain, links = kind(), honest(21)
    for number, counter in enumerate(shown):
        answer = chain.add(*links[counter])
        assert answer == ("replay" if counter in shown[:number] else "")


@settings(max_examples=200)
@given(
    st.integers(2, 30).flatmap(
        lambda length: st.tuples(st.permutations(range(length)), st.integers(0, length - 2))
    )
)
def test_with_one_record_replaced_by_a_forged_one_no_order_is_taken_in_whole(
    case: tuple[list[int], int],
) -> None:
    order, place = case
    links = honest(len(order))
    links[place] = link(place, links[place][0].previous, "forged")
    chain = Chain()
    assert taken([links[number] for number in order], chain).count("fork") >= 1


@settings(max_examples=200)
@given(
    st.integers(1, 30).flatmap(
        lambda length: st.tuples(st.permutations(range(length + 1)), st.integers(0, length - 1))
    )
)
def test_of_two_records_in_one_place_only_one_is_taken_in_whatever_the_order(
    case: tuple[list[int], int],
) -> None:
    order, place = case
    links = honest(len(order) - 1)
    links.append(link(place, links[place][0].previous, "forged"))
    answers = dict(zip(order, taken([links[number] for number in order]), strict=True))
    assert (answers[place], answers[len(links) - 1]) != ("", "")
    assert "replay" not in answers.values()


def test_a_gap_at_every_second_place_is_remembered_in_bounded_memory() -> None:
    chain = Chain()
    links = honest(2 * MAX_MISSING + 600)
    assert taken(links[1::2][:MAX_MISSING], chain) == [""] * MAX_MISSING
    assert taken(links[2 * MAX_MISSING :], chain).count("") == 600
    assert len(chain.missing) == MAX_MISSING
    assert len(chain.recent) <= MAX_MISSING + REMEMBERED
    # what a missing one will have to name is still known, and what is whole is forgotten again
    assert taken(links[: 2 * MAX_MISSING : 2], chain) == [""] * MAX_MISSING
    assert (chain.missing, len(chain.recent)) == ({}, REMEMBERED)
    assert min(chain.recent) == len(links) - REMEMBERED


@settings(max_examples=100)
@given(
    st.integers(1, 60).flatmap(
        lambda length: st.tuples(st.permutations(range(length)), st.integers(0, length))
    )
)
def test_a_chain_of_any_order_goes_on_from_its_state(case: tuple[list[int], int]) -> None:
    order, stop = case
    links = honest(len(order))
    whole_way, first = Chain(), Chain()
    answers = taken([links[number] for number in order], whole_way)
    found = taken([links[number] for number in order[:stop]], first)
    second = Chain.from_state(first.state())
    found += taken([links[number] for number in order[stop:]], second)
    assert (found, second) == (answers, whole_way)


# Of which parts are heard


def test_holes_of_any_size_and_order_say_nothing_in_a_sparse_chain() -> None:
    chain, links = SparseChain(), honest(20_000)
    heard = [*links[::97], *links[50:9000:331]]
    assert {chain.add(*one) for one in heard} == {""}
    assert chain.add(*link(2**62, bytes(32))) == ""
    assert len(chain.recent) <= REMEMBERED_SPARSELY
    assert len(chain.named) <= REMEMBERED_SPARSELY


def test_a_sparse_chain_tells_a_replay_from_a_fork() -> None:
    chain, links = SparseChain(), honest(10)
    assert [chain.add(*links[at]) for at in (2, 5)] == ["", ""]
    assert chain.add(*links[5]) == "replay"
    other = link(5, links[4][1], "another")
    assert chain.add(*other) == "fork"
    again = SparseChain.from_state(chain.state())
    assert [again.add(*one) for one in (other, links[5], links[6])] == ["replay", "replay", ""]


def test_a_sparse_chain_holds_a_record_to_the_neighbours_it_knows() -> None:
    chain, links = SparseChain(), honest(10)
    assert [chain.add(*links[at]) for at in (2, 5)] == ["", ""]
    assert chain.add(*link(4, links[3][1], "another")) == "fork"  # 5 named the one it has
    assert chain.add(*link(3, bytes(32))) == "fork"  # 2 is known, and another
    assert chain.add(*link(0, bytes([1] * 32))) == "fork"  # nothing is before the first
    assert [chain.add(*links[at]) for at in (4, 3, 0)] == ["", "", ""]


def test_a_sparse_chain_goes_on_from_a_checkpoint() -> None:
    chain, links = SparseChain(), honest(400)
    assert {chain.add(*one) for one in links[1::3]} == {""}
    state = msgspec.json.decode(msgspec.json.encode(chain.state()), type=ChainState)
    again = SparseChain.from_state(state)
    assert again == chain
    assert again.add(*link(396, links[395][1], "another")) == "fork"
    assert again.add(*links[396]) == ""
