"""What a row decides from the log-ratios of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, log, nan, sqrt

import numpy as np
import pytest

from motley.objectives import Terms, objective

from .cases import Case, batch_of, make_case, prepared, run, samples_of, tiny


def a_pair(success: list[float], failure: list[float]) -> Case:
    """A success and a failure by their tokens' log ratios."""
    return tiny(
        [1.0, 0.0],
        lp=[[x - 9 for x in success], [x - 9 for x in failure]],
        lq=[[-9.0] * len(success), [-9.0] * len(failure)],
    )


@pytest.mark.parametrize(
    ("budget", "most"),
    [(0.5, 0.0), (1.0, 1.0), (2.0, 1.0), (2.5, 4.0), (4.6, 4.0), (14 / 3, 9.0), (inf, 9.0)],
)
def test_second_moment_keeps_as_many_of_the_smallest_squares_as_fit(
    budget: float, most: float
) -> None:
    # pushed out are 1 and 3 of the success and -2 of the failure; its 7 and the -5 are not
    terms = prepared(objective("m2po", settings={"budget": budget}), a_pair([1, 3, -5], [-2, 7]))
    assert terms.most_square == pytest.approx(most, rel=3e-5)


def test_second_moment_keeps_equal_squares_or_drops_them_together() -> None:
    # 0.25, 4, 4: one 4 would fit, both do not
    terms = prepared(objective("m2po", settings={"budget": 2.5}), a_pair([0.5, 2.0], [-2.0]))
    assert terms.most_square == pytest.approx(0.25, rel=3e-5)
    both = prepared(objective("m2po", settings={"budget": 2.75}), a_pair([0.5, 2.0], [-2.0]))
    assert both.most_square == pytest.approx(4, rel=3e-5)


def test_second_moment_takes_squares_for_equal_that_differ_by_rounding() -> None:
    # one 4 would fit, both do not
    for nearly in (2.000001, 1.999999):
        case = a_pair([0.5, 2.0], [-nearly])
        terms = prepared(objective("m2po", settings={"budget": 2.5}), case)
        assert terms.most_square == pytest.approx(0.25, rel=3e-5)


def test_second_moment_tells_squares_apart_that_differ_by_more_than_rounding() -> None:
    # 1 and 1.000025: the first fits alone
    settings = {"budget": 1.000005}
    terms = prepared(objective("m2po", settings=settings), a_pair([1.0, 1.0000125], [0.0]))
    assert terms.most_square == pytest.approx(1, rel=3e-5)


def test_second_moment_keeps_any_number_of_squares_at_its_budget() -> None:
    """However their sum would round in float32."""
    square = float(np.float32(0.1) ** 2)
    for num in range(2, 40):
        case = tiny([1.0, 0.0], lp=[[0.1] * num, [0.0]], lq=[[0.0] * num, [0.0]])
        terms = prepared(objective("m2po", settings={"budget": square}), case)
        assert terms.most_square == pytest.approx(square, rel=3e-5)


def test_second_moment_of_nothing_pushed_out_bounds_nothing() -> None:
    assert prepared(objective("m2po"), a_pair([-1.0, 0.0], [2.0])).most_square == inf
    silent = tiny([1.0, 1.0], [[-1.0]] * 2, [[-9.0]] * 2)
    assert prepared(objective("m2po"), silent).most_square == inf


@pytest.mark.parametrize(("most", "kept"), [(0.25, True), (0.2499, False)])
def test_a_square_that_is_the_most_allowed_is_kept(most: float, kept: bool) -> None:
    case, row = a_pair([0.5], [0.0]), objective("m2po")
    terms = replace(row.prepare(samples_of(case)), most_square=most)
    weight_BT = row.loss(batch_of(case, terms)).weight_BT
    assert weight_BT[:, 0].tolist() == pytest.approx([exp(0.5) * kept, 1.0])


def scale_of(case: Case, **settings: float | str) -> float:
    return prepared(objective("vcpo", settings=settings), case).lr_scale


def test_a_rate_is_scaled_by_the_effective_sample_size() -> None:
    # products 2 and 1: ESS = 9/5 of 2
    case = a_pair([log(4), -log(2)], [0.0])
    assert scale_of(case) == pytest.approx(sqrt(0.9))
    assert scale_of(case, base_ess=0.95) == pytest.approx(sqrt(0.9 / 0.95))
    assert scale_of(case, base_ess=0.89) == scale_of(case, base_ess=0.1) == 1.0
    assert scale_of(a_pair([0.0], [0.0, 0.0])) == 1.0


def test_an_effective_sample_size_is_of_truncated_products_unless_told() -> None:
    # e^9 counts as 8: 81/65 of 2; free it is all there is
    case = a_pair([9.0], [0.0])
    assert scale_of(case) == pytest.approx(sqrt(81 / 65 / 2))
    assert scale_of(case, C=2.0) == pytest.approx(sqrt(9 / 5 / 2))
    assert scale_of(case, ess="free") == pytest.approx(sqrt(0.5), rel=1e-3)
    assert scale_of(a_pair([900.0], [-900.0]), ess="free") == pytest.approx(sqrt(0.5))
    # products of e^900 and e^899 in float64: (1 + 1/e)^2/(1 + 1/e^2) of 2
    share = (1 + exp(-1)) ** 2 / (1 + exp(-2)) / 2
    assert scale_of(a_pair([900.0], [899.0]), ess="free") == pytest.approx(sqrt(share))


def test_an_effective_sample_size_of_products_that_are_all_truncated_is_whole() -> None:
    # products 2 and 1; a bound of 0 truncates all of them to nothing, and says nothing
    case = a_pair([log(4), -log(2)], [0.0])
    assert scale_of(case, C=0.5) == 1.0
    assert scale_of(case, C=0.0) == pytest.approx(sqrt(0.9))


def test_vcpo_weighs_a_sequence_by_its_product_up_to_eight() -> None:
    case = a_pair([log(3), log(2)], [log(9)])
    weight_BT = run(objective("vcpo"), case).output.weight_BT
    assert weight_BT[:, 0].tolist() == pytest.approx([6.0, 8.0], rel=1e-5)


def test_an_effective_sample_size_counts_what_speaks() -> None:
    case = tiny(
        [1.0, 0.0, 1.0, 1.0],
        lp=[[-1.0], [-1.0], [-1.0], [-2.0]],
        lq=[[-1.0]] * 3 + [[-9.0]],
        group=[0, 0, 1, 1],
    )
    assert scale_of(case) == 1.0
    silent = tiny([1.0, 1.0], [[-1.0]] * 2, [[-9.0]] * 2)
    assert scale_of(silent) == 1.0


def test_strangers_cannot_stop_a_learner_by_what_they_report() -> None:
    """Half of the batch is theirs: whatever they say, the rate falls to sqrt(1/2) at most."""
    for reported in (-42.0, -1.0, 1e-3):
        case = tiny(
            [1.0, 0.0] * 2,
            lp=[[-1.0, -1.0]] * 4,
            lq=[[-1.0, -1.0]] * 2 + [[reported] * 2] * 2,
            own=[True, True, False, False],
        )
        assert sqrt(0.5) - 1e-9 <= scale_of(case) <= 1


def test_a_log_prob_that_is_no_number_leaves_the_rate_and_the_bound_to_others() -> None:
    case = tiny([1.0, 0.0], [[nan], [-1.0]], [[-2.0]] * 2)
    assert scale_of(case) == 1.0
    assert prepared(objective("m2po"), case).most_square == inf


@pytest.mark.parametrize("name", ["m2po", "vcpo"])
def test_what_a_look_decides_does_not_depend_on_the_cut(name: str) -> None:
    row, case = objective(name), make_case("apart", 3)
    terms = row.prepare(samples_of(case))
    cuts = np.array_split(np.random.default_rng(0).permutation(len(case)), 5)

    def some(index: list[int]) -> Terms:
        return terms.take(samples_of(case).group_B.new_tensor(index))

    parts = [batch_of(case.take(c.tolist()), some(c.tolist())) for c in cuts]
    got, expected = row.settle(terms, parts), prepared(row, case)
    assert (got.most_square, got.lr_scale) == pytest.approx(
        (expected.most_square, expected.lr_scale), rel=1e-6
    )
    assert (got.most_square, got.lr_scale) != (inf, 1.0)


def test_only_rows_that_need_it_have_their_batch_scored_first() -> None:
    assert [name for name in ("grpo", "uplift", "m2po", "vcpo") if objective(name).looks] == [
        "m2po",
        "vcpo",
    ]
