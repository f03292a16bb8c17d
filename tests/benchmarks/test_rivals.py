from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fakes import reference_logp, tiny_policy
from motley.benchmarks.models import build
from motley.benchmarks.rivals import PaddedRows, PlainStep, generate, plain_dtype
from motley.learning.batches import ToScore

SEQUENCES = [
    ToScore(row=0, prompt=(11, 12, 13), tokens=(14, 15)),
    ToScore(row=1, prompt=(16,), tokens=(17, 18, 19, 11)),
]


def test_padded_rows_score_completion_tokens_only() -> None:
    policy = tiny_policy()
    with torch.no_grad():
        found_M = PaddedRows.of(SEQUENCES, policy.vocabulary.pad_id, policy.device).logp(
            policy.base
        )
        wanted_M = torch.cat([reference_logp(policy, s.prompt, s.tokens) for s in SEQUENCES])
    torch.testing.assert_close(found_M, wanted_M)


def test_a_plain_step_is_one_of_adam() -> None:
    policy, other = build("tiny:0.3m"), build("tiny:0.3m")
    PlainStep(policy, SEQUENCES, lr=1e-2, grad_clip=1e-3)()
    optimiser = torch.optim.Adam(other.model.parameters(), lr=1e-2)
    (
        -PaddedRows.of(SEQUENCES, other.vocabulary.pad_id, other.device).logp(other.base).mean()
    ).backward()
    torch.nn.utils.clip_grad_norm_(other.model.parameters(), 1e-3)
    optimiser.step()
    for one, two in zip(policy.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("ours", "plain"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")]
)
def test_a_plain_step_rounds_where_ours_does_but_never_to_what_it_could_not_train_in(
    ours: str, plain: str
) -> None:
    policy = replace(build("tiny:0.3m"), dtype=getattr(torch, ours))
    assert plain_dtype(policy) is getattr(torch, plain)


@pytest.mark.parametrize("rows", [[(11, 12, 13), (14,)], [(11, 12)] * 3])
def test_generate_makes_as_many_tokens_as_asked(rows: list[tuple[int, ...]]) -> None:
    policy = build("tiny:0.3m")
    for count in (1, 7):
        assert generate(policy.base, rows, count, policy.vocabulary.pad_id).shape == (
            len(rows),
            count,
        )


def test_generate_ends_where_an_end_is_given() -> None:
    policy = tiny_policy()
    end_id, pad_id = policy.vocabulary.end_id, policy.vocabulary.pad_id
    torch.manual_seed(0)
    made_BT = generate(policy.base, [(11, 12)] * 200, 12, pad_id, end_id)
    after_end_BT = (made_BT == end_id).cumsum(1) - (made_BT == end_id).int() > 0
    assert bool(after_end_BT.any())
    assert bool((made_BT[after_end_BT] == pad_id).all())
