"""Drawing by kernels against drawing by torch: under Triton's interpreter here, and on a GPU where
there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import msgspec
import pytest
import torch

from compute.devices import DEVICES
from fakes import grouped_query_policy
from marks import quick
from motley.compute.decoder import Decoder
from motley.engines import drawing
from motley.engines.room import Room, RoomSize
from motley.engines.sampling import draw, truncate
from motley.records import Sampling

BLOCK = drawing.LOGITS_OF_A_BLOCK
GREEDY = Sampling(temperature=0.0)
BOTH = Sampling(temperature=0.8, top_k=20, top_p=0.9)
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": Sampling(temperature=0.7),
    "top k": Sampling(temperature=0.7, top_k=4),
    "top p, full": Sampling(top_p=0.8, logprobs="full"),
    "both": BOTH,
    "both, full": msgspec.structs.replace(BOTH, logprobs="full"),
}

pytestmark = pytest.mark.parametrize("device", DEVICES)


@cache
def decoder(device: str) -> Decoder:
    return Decoder.of(grouped_query_policy().base.to(device))


def room_of(rows: int, tokens: int, device: str) -> Room:
    size = RoomSize(1, 8, rows, tokens)
    return Room(size, size.all_pages, decoder(device), torch.float32, torch.device(device))


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def drawn(
    logits_RV: torch.Tensor,
    source_B: torch.Tensor,
    sampling: Sampling,
    uniform_B: torch.Tensor,
    device: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each lane works for a row of its own, which has drawn two of three tokens."""
    rows = len(source_B)
    row_B = torch.arange(rows, device=device).flip(0)
    room = room_of(rows, 3, device)
    room.count_R[:rows], room.limit_R[:rows], room.ended_R[:rows] = 2, 9, False
    room.uniform_RT.fill_(torch.nan)
    room.uniform_RT[row_B, 2] = uniform_B.to(room.uniform_RT)
    is_end_V = torch.zeros(logits_RV.shape[1], dtype=torch.bool, device=device)
    with unwritten_is_nan():
        drawing.draw(room, logits_RV.to(device), source_B.to(device), row_B, sampling, is_end_V)
    return room.token_RT[row_B, 2].cpu(), room.logp_RT[row_B, 2].cpu()


def rates(logits_RV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    return truncate(torch.log_softmax(logits_RV / sampling.temperature, -1), sampling)


# one block; several; several, the last one nearly empty
@pytest.mark.slow
@pytest.mark.parametrize("size", [28, 5000, 9001])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 1.0), (0, 0.8), (1, 0.5), (20, 0.6)])
def test_tokens_are_those_of_the_inverse_distribution(
    size: int, top_k: int, top_p: float, device: str
) -> None:
    """Where the uniform number falls within rounding of a token's edge, the neighbour may come;
    nothing else.
    """
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p)
    generator = torch.Generator().manual_seed(size)
    logits_RV = 3 * torch.randn(3, size, generator=generator)
    logits_RV[1, : size // 2] = -torch.inf
    source_B = torch.tensor([0, 1, 1, 2, 0, 2, 1, 0])
    uniform_B = torch.cat(
        [torch.tensor([0.0, 0.0, 1 - 2**-53]), torch.rand(5, generator=generator)]
    ).double()
    token_B, logp_B = drawn(logits_RV, source_B, sampling, uniform_B, device)
    expected_B, expected_logp_B = draw(logits_RV, source_B, sampling, uniform_B)
    logp_RV = rates(logits_RV, sampling)
    cumulative_RV = logp_RV.double().exp().cumsum(1)
    for b, (token, expected) in enumerate(zip(token_B.tolist(), expected_B.tolist(), strict=True)):
        low, high = sorted((token, expected))
        between = cumulative_RV[source_B[b], low:high]
        assert bool(((between - uniform_B[b]).abs() < 1e-6).all())
        assert bool(torch.isfinite(logp_RV[source_B[b], token]))
    torch.testing.assert_close(logp_B, logp_RV[source_B, token_B], rtol=0, atol=1e-5)
    assert expected_logp_B.isfinite().all()
    full = msgspec.structs.replace(sampling, logprobs="full")
    token_B, logp_B = drawn(logits_RV, source_B, full, uniform_B, device)
    torch.testing.assert_close(
        logp_B, torch.log_softmax(logits_RV / 0.7, -1)[source_B, token_B], rtol=0, atol=1e-5
    )


def at_edges(size: int) -> torch.Tensor:
    """The first and the last token, and those beside the edges of blocks."""
    edges = {0, BLOCK - 1, BLOCK, 2 * BLOCK, size - 1}
    return torch.tensor(sorted(token for token in edges if token < size))


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [1, BLOCK - 1, BLOCK, BLOCK + 1, quick(2 * BLOCK + 17), 3 * BLOCK + 17]
)
@pytest.mark.parametrize(
    "name", ["temperature", "top k", "top p, full", "both", quick("both, full")]
)
def test_the_middle_of_a_tokens_share_draws_it(size: int, name: str, device: str) -> None:
    """Tokens beside the edges of blocks, from two lines."""
    sampling = SAMPLINGS[name]
    token_B = at_edges(size)
    source_B = torch.arange(len(token_B)) % 2
    logits_RV = torch.randn(2, size, generator=torch.Generator().manual_seed(size))
    logits_RV[source_B, token_B] = 9 - torch.arange(len(token_B)) / 7
    chance_BV = rates(logits_RV, sampling).double().exp()[source_B]
    share_B = chance_BV.gather(1, token_B[:, None])[:, 0]
    uniform_B = chance_BV.cumsum(1).gather(1, token_B[:, None])[:, 0] - share_B / 2
    assert share_B.min() > 0.01
    made_B, logp_B = drawn(logits_RV, source_B, sampling, uniform_B, device)
    expected_B, expected_logp_B = draw(logits_RV, source_B, sampling, uniform_B)
    assert made_B.tolist() == expected_B.tolist() == token_B.tolist()
    torch.testing.assert_close(logp_B, expected_logp_B, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, quick(2 * BLOCK + 17)])
def test_the_best_token_is_the_first_of_the_best(size: int, device: str) -> None:
    """In each line one of the edges, and all that follow."""
    edge_B = at_edges(size)
    logits_RV = torch.randn(len(edge_B), size, generator=torch.Generator().manual_seed(size))
    for line, logits_V in enumerate(logits_RV):
        logits_V[edge_B[line:]] = 6.0
    lane_B = torch.arange(len(edge_B)).flip(0)
    uniform_B = torch.full((len(lane_B),), 0.9)
    token_B, logp_B = drawn(logits_RV, lane_B, GREEDY, uniform_B, device)
    assert token_B.tolist() == edge_B.flip(0).tolist()
    torch.testing.assert_close(
        logp_B, draw(logits_RV, lane_B, GREEDY, uniform_B)[1], rtol=0, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [quick("temperature"), "both"])
def test_what_has_no_chance_is_not_drawn(name: str, device: str) -> None:
    """By the least number and by the largest. A whole block at either end has no chance."""
    first, last = BLOCK + 5, 2 * BLOCK - 3
    logits_RV = torch.full((1, 2 * BLOCK + 17), -torch.inf)
    logits_RV[0, first : last + 1] = torch.randn(
        last + 1 - first, generator=torch.Generator().manual_seed(0)
    )
    logits_RV[0, [first, last]] = 5.0
    source_B = torch.zeros(2, dtype=torch.int64)
    uniform_B = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    token_B, logp_B = drawn(logits_RV, source_B, SAMPLINGS[name], uniform_B, device)
    assert token_B.tolist() == [first, last]
    torch.testing.assert_close(
        logp_B, draw(logits_RV, source_B, SAMPLINGS[name], uniform_B)[1], rtol=0, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", quick("temperature"), "both, full"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
def test_lines_of_no_numbers_draw_some_token_and_say_so(name: str, device: str) -> None:
    """The lanes beside them draw as ever."""
    sampling = SAMPLINGS[name]
    logits_RV = torch.randn(3, BLOCK + 9, generator=torch.Generator().manual_seed(0))
    logits_RV[1, 7] = 9.0
    logits_RV[0], logits_RV[2] = torch.nan, -torch.inf
    source_B, uniform_B = torch.tensor([1, 0, 2, 1]), torch.full((4,), 0.5).double()
    token_B, logp_B = drawn(logits_RV, source_B, sampling, uniform_B, device)
    assert token_B.tolist() == [7, 0, 0, 7]
    assert logp_B.isnan().tolist() == [False, True, True, False]
    expected_B = draw(logits_RV[1:2], torch.zeros(1, dtype=torch.int64), sampling, uniform_B[:1])[1]
    torch.testing.assert_close(logp_B[[0, 3]], expected_B.expand(2), rtol=0, atol=1e-5)


def test_what_was_drawn_is_written_down_and_ends_rows(device: str) -> None:
    """Row 0 goes on, 1 draws an end, 2 has all its tokens, 3 had ended, 4 is nobody's here, and for
    row 5 idle lanes work.
    """
    room = room_of(5, 4, device)
    is_end_V = torch.zeros(28, dtype=torch.bool, device=device)
    is_end_V[9] = True
    room.count_R[:5] = torch.tensor([1, 2, 3, 2, 0])
    room.limit_R[:5] = 4
    room.ended_R[:5] = torch.tensor([False, False, False, True, False])
    logits_RV = torch.zeros(6, 28)
    logits_RV[torch.arange(6), [9, 7, 6, 5, 3, 9]] = torch.arange(1.0, 7.0)
    row_B, source_B = torch.tensor([2, 0, 3, 5, 1, 5]), torch.tensor([3, 2, 1, 4, 0, 5])
    with unwritten_is_nan():
        drawing.draw(
            room, logits_RV.to(device), source_B.to(device), row_B.to(device), GREEDY, is_end_V
        )
    assert room.count_R.tolist() == [2, 3, 4, 2, 0, 1]
    assert room.ended_R.tolist() == [False, True, True, True, False, True]
    assert room.last_R[:5].tolist() == [6, 9, 5, 7, 0]
    assert room.last_R[5] in (3, 9)
    assert room.token_RT.tolist() == [
        [0, 6, 0, 0],
        [0, 0, 9, 0],
        [0, 0, 0, 5],
        *[[0] * 4] * 3,
    ]
    best_R = torch.log_softmax(logits_RV, 1).amax(1)
    torch.testing.assert_close(room.logp_RT[[0, 1, 2], [1, 2, 3]].cpu(), best_R[[2, 0, 3]])
    assert int((room.logp_RT != 0).sum()) == 3


def test_a_row_that_has_all_its_tokens_draws_by_its_last_number(device: str) -> None:
    """And not by the first of the row behind it."""
    room = room_of(1, 3, device)
    room.count_R[0], room.limit_R[0] = 3, 3
    room.uniform_RT[0] = torch.tensor([torch.nan, torch.nan, 0.6])
    lane_B = torch.zeros(1, dtype=torch.int64, device=device)
    logits_RV, is_end_V = torch.zeros(1, 5), torch.zeros(5, dtype=torch.bool)
    drawing.draw(room, logits_RV.to(device), lane_B, lane_B, Sampling(), is_end_V.to(device))
    assert room.last_R.tolist() == [3, 0]
    assert room.token_RT.tolist() == [[0] * 3] * 2
    assert room.count_R[0] == 3
