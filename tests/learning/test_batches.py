from __future__ import annotations

import pytest
import torch

from fakes import POLICIES, ragged_sequences
from motley.learning import batches
from motley.learning.batches import MicroBatch, ToScore, micro_batches
from motley.policies.forward import score

CPU = torch.device("cpu")


def packed_tokens(micro: MicroBatch) -> int:
    return len(micro.packed.token_N)


@pytest.mark.parametrize("budget", [1, 5, 12, 30, 10**6])
def test_every_sequence_is_in_exactly_one_micro_batch(budget: int) -> None:
    sequences = ragged_sequences()
    rows = [row for micro in micro_batches(sequences, budget, CPU) for row in micro.row_B.tolist()]
    assert sorted(rows) == list(range(len(sequences)))


@pytest.mark.parametrize("budget", [12, 20, 50])
def test_the_budget_is_kept_wherever_a_pair_fits(budget: int) -> None:
    for micro in micro_batches(ragged_sequences(), budget, CPU):
        assert packed_tokens(micro) <= budget or len(micro.row_B) <= 2


def test_a_shared_prompt_is_packed_once() -> None:
    sequences = [ToScore(row=row, prompt=(5, 6, 7, 8), tokens=(9, 10, 1)) for row in range(6)]
    (micro,) = micro_batches(sequences, 1000, CPU)
    assert packed_tokens(micro) == 4 + 6 * 2  # the last token of a completion is a target only


@pytest.mark.parametrize("budget", range(1, 40, 3))
@pytest.mark.parametrize("size", [2, 4, 6, 10])
def test_pairs_of_a_group_are_never_parted(budget: int, size: int) -> None:
    lengths = [1 + (7 * row) % 5 for row in range(2 * size)]
    sequences = [
        ToScore(row=row, prompt=(5, 6 + row // size), tokens=(9,) * length)
        for row, length in enumerate(lengths)
    ]
    for micro in micro_batches(sequences, budget, CPU):
        rows = set(micro.row_B.tolist())
        assert {row ^ 1 for row in rows} == rows


def test_unpack_puts_every_value_at_its_sequence_and_token() -> None:
    sequences = ragged_sequences()
    for micro in micro_batches(sequences, 20, CPU):
        table_BT = micro.unpack(micro.packed.target_M)
        for place, row in enumerate(micro.row_B.tolist()):
            tokens = sequences[row].tokens
            assert table_BT[place].tolist() == [*tokens, *[0] * (table_BT.shape[1] - len(tokens))]
            assert micro.mask_BT[place].sum() == len(tokens)


@pytest.mark.parametrize("joined", [False, True])
def test_a_batch_is_laid_as_the_example_says(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "joins_alone", lambda device: joined)
    sequences = [
        ToScore(row=0, prompt=(5, 6), tokens=(7, 8, 1)),
        ToScore(row=1, prompt=(4,), tokens=(2, 1)),
        ToScore(row=2, prompt=(5, 6), tokens=(9, 1)),
    ]
    (micro,) = micro_batches(sequences, 1000, CPU)
    packed = micro.packed
    assert micro.row_B.tolist() == [1, 0, 2]
    assert packed.target_M.tolist() == [2, 1, 7, 8, 1, 9, 1]
    assert micro.place_M.tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert micro.mask_BT.shape == (3, 3)
    assert packed.of_prompt_B.tolist() == [0, 1, 1]
    assert packed.longest == 4
    if joined:
        assert packed.token_N.tolist() == [4, 2, 5, 6, 7, 8, 9]
        assert packed.position_N.tolist() == [0, 1, 0, 1, 2, 3, 2]
        assert packed.predictor_M.tolist() == [0, 1, 3, 4, 5, 3, 6]
        assert packed.own.start_S.tolist() == [0, 2, 4, 4, 6, 7]
    else:
        assert packed.token_N.tolist() == [4, 5, 6, 2, 7, 8, 9]
        assert packed.position_N.tolist() == [0, 0, 1, 1, 2, 3, 2]
        assert packed.predictor_M.tolist() == [0, 3, 2, 4, 5, 2, 6]
        assert packed.own.start_S.tolist() == [0, 1, 3, 4, 6, 7]


def test_no_sequences_make_no_micro_batch() -> None:
    assert micro_batches([], 100, CPU) == []


@pytest.mark.parametrize("kind", ["full", "grouped"])
def test_a_prompt_with_its_only_completion_may_be_one_stretch(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: shared prompts of some length stay shared, others are given to each
    completion.
    """
    policy = POLICIES[kind]()
    sequences = [
        *(
            ToScore(row=row, prompt=(5, 6, 7, 8), tokens=(9, 10, 11)[: row + 1], temperature=0.7)
            for row in range(3)
        ),
        ToScore(row=3, prompt=(12, 13), tokens=(14,)),
        ToScore(row=4, prompt=(15, 16, 17), tokens=(18, 19, 20, 21)),
        *(ToScore(row=row, prompt=(7,), tokens=tuple(range(3, 25)), group=1) for row in (5, 6)),
    ]

    def logp(micro: MicroBatch) -> dict[int, torch.Tensor]:
        table_BT = micro.unpack(score(policy, micro.packed).logp_M)
        return {
            row: table_BT[place][micro.mask_BT[place]]
            for place, row in enumerate(micro.row_B.tolist())
        }

    (apart,) = micro_batches(sequences, 10**6, torch.device("cpu"))
    monkeypatch.setattr(batches, "joins_alone", lambda device: True)
    (joined,) = micro_batches(sequences, 10**6, torch.device("cpu"))
    assert joined.packed.answers.total == sum(len(s.tokens) - 1 for s in sequences[:3])
    assert len(joined.packed.token_N) == len(apart.packed.token_N) + 1
    expected, found = logp(apart), logp(joined)
    assert found.keys() == expected.keys() == {s.row for s in sequences}
    for row, value in expected.items():
        torch.testing.assert_close(found[row], value, rtol=0, atol=1e-5)


def test_micro_batches_are_of_about_the_same_size() -> None:
    sequences = [ToScore(row=row, prompt=(5, 6 + row), tokens=(9,) * 9) for row in range(11)]
    sizes = [packed_tokens(micro) for micro in micro_batches(sequences, 80, CPU)]
    assert sizes == [60, 50]


def test_even_sizes_make_no_more_micro_batches() -> None:
    """Of units of 9, 4, 10 and 4 tokens: the first two must share one, though half of what there is
    stands in the first and the third.
    """
    sequences = [
        ToScore(row=row, prompt=(5,) * (row + 1), tokens=(9,) * length)
        for row, length in enumerate((9, 3, 8, 1))
    ]
    sizes = [packed_tokens(micro) for micro in micro_batches(sequences, 13, CPU)]
    assert sizes == [13, 10, 4]
