"""Pages on a CPU: who runs, who waits, and that no page has two rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.engines.pages import Pages


def run(
    lengths: list[int], pages: Pages, page: int, steps: int = 4, most: int = 10**5
) -> tuple[list[int], int]:
    """Rows in the order in which they ended, and how many began; looks come one turn late."""
    drawn, ended, began = dict[int, int](), list[int](), 0
    seen: list[int] = []
    for _ in range(most):
        pages.end(seen)
        pages.grow(steps)
        begun = pages.begin(steps + 1)
        began += len(begun)
        if not pages.running:
            return ended, began
        drawn |= dict.fromkeys(begun, 1)
        held = [pages.table_RJ[row] for row in pages.running]
        own = np.concatenate([row_J[row_J != pages.nobodys] for row_J in held])
        assert len(set(own.tolist())) == len(own)  # nobody's twice
        seen = [row for row in pages.running if drawn[row] >= lengths[row]]
        for row in pages.running:
            drawn[row] = min(drawn[row] + steps, lengths[row])
            if drawn[row] == lengths[row] and row not in ended:
                ended.append(row)
            filled = -(-(drawn[row] - 1) // page)  # the last token's are never kept
            assert (pages.table_RJ[row, :filled] != pages.nobodys).all()
    raise AssertionError("it does not come to an end")


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    page=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 60),
    expected=st.floats(0.5, 50),
)
def test_every_row_ends_and_every_page_has_one_row(
    lengths: list[int], page: int, spare: int, expected: float
) -> None:
    row_pages = -(-40 // page)
    pages = Pages(len(lengths), row_pages, row_pages + 1 + spare, page, expected)
    ended, began = run(lengths, pages, page)
    assert sorted(ended) == list(range(len(lengths)))
    assert began >= len(lengths)
    assert (pages.table_RJ == pages.nobodys).all()


def test_rows_that_end_make_room_for_others() -> None:
    pages = Pages(6, 4, 9, 8, expected=4)
    assert pages.begin(5) == [0, 1]  # two may become as long as they can
    pages.end([0])
    pages.grow(4)
    assert pages.begin(5) == [2]
    assert pages.running == [1, 2]


def test_as_many_begin_as_are_expected_to_fit() -> None:
    assert len(Pages(99, 64, 101, 32, expected=5).begin(5)) == 20
    assert len(Pages(99, 64, 101, 32, expected=64).begin(5)) == 1


def test_the_last_that_began_gives_way_and_begins_again() -> None:
    pages = Pages(3, 4, 6, 8, expected=1)
    assert pages.begin(8) == [0, 1, 2]
    pages.grow(8)  # six pages are asked for, and five are there
    assert pages.running == [0, 1]
    assert pages.begin(8) == []
    pages.end([0])
    assert pages.begin(8) == [2]


def test_too_few_pages_for_one_row_are_refused() -> None:
    with pytest.raises(ValueError, match="4 pages do not hold a row of 4"):
        Pages(1, 4, 4, 8, expected=1)
