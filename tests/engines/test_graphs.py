"""The engine for GPUs against the one for CPUs: its steps under Triton's interpreter here, its
graphs where there is a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from architectures import ARCHITECTURES, TRAINS, WINDOW, own_code_policy
from compiling import sizes_of
from compute.devices import needs_gpu, needs_interpreter
from engines import programs
from fakes import POLICIES, grouped_query_policy, lora_policy, tiny_policy
from marks import slow
from motley.compute.layers import Layer
from motley.compute.scoring import score
from motley.engines import Completion, TorchEngine, attention, few_rows, torch_engine
from motley.engines.branches import TorchEngine as Reference
from motley.engines.graphs import BUCKETS, PREFILL_TOKENS, PROMPT_STEP, GraphEngine
from motley.engines.room import PAGE, Room, RoomSize, pages_that_fit
from motley.learning import footprint
from motley.learning.batches import ToScore, micro_batches
from motley.models.policy import Policy
from motley.models.vocabulary import Vocabulary
from motley.records import Sampling

# longer, and after a few tokens all, than the windows of the architectures
PROMPTS = [(5, 12, 13, 14), (9,), (7, 15, 15, 16, 17, 27)]
SHORT = Sampling(max_tokens=5)
KNOWN = [kind for kind in ARCHITECTURES if kind not in ("gpt2", "opt")]


def flat(made: list[list[Completion]]) -> list[Completion]:
    return [completion for row in made for completion in row]


def assert_alike(
    ours: list[list[Completion]], theirs: list[list[Completion]], atol: float = 2e-5
) -> None:
    assert [(c.tokens, c.ending) for c in flat(ours)] == [
        (c.tokens, c.ending) for c in flat(theirs)
    ]
    for one, other in zip(flat(ours), flat(theirs), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=atol)


def policy_of(kind: str) -> Policy:
    if kind.endswith(" lora"):
        return own_code_policy(kind.removesuffix(" lora"), TRAINS["lora"])
    return POLICIES[kind](seed=3) if kind in POLICIES else own_code_policy(kind)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("kind", ["grouped", *map(slow, [*KNOWN, "qwen3 lora", "four bits"])])
def test_it_draws_what_the_engine_for_cpus_draws(kind: str) -> None:
    policy = policy_of(kind)
    assert_alike(
        GraphEngine(policy).sample(PROMPTS, 2, SHORT, seed=4),
        TorchEngine(policy).sample(PROMPTS, 2, SHORT, seed=4),
    )


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("kind", ["grouped", slow("qwen3"), slow("gemma3")])
def test_products_of_few_rows_are_those_of_many(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = dataclasses.replace(policy_of(kind), dtype=torch.float16)
    made, product = [], few_rows.product
    monkeypatch.setattr(few_rows, "product", lambda x, own: made.append(x) or product(x, own))
    few = GraphEngine(policy).sample(PROMPTS, 2, SHORT, seed=4)
    assert made
    monkeypatch.setattr(few_rows, "MOST_ROWS", 0)
    assert_alike(few, GraphEngine(policy).sample(PROMPTS, 2, SHORT, seed=4), atol=3e-3)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=3, temperature=0.0),
        Sampling(max_tokens=3, temperature=0.6),
        Sampling(max_tokens=3, temperature=0.8, top_k=9, top_p=0.9),
        Sampling(max_tokens=3, top_p=0.7, logprobs="full"),
    ],
    ids=["greedy", "sharper", "top k and top p", "full"],
)
def test_every_way_of_sampling_is_that_of_the_engine_for_cpus(sampling: Sampling) -> None:
    policy = grouped_query_policy()
    assert_alike(
        GraphEngine(policy).sample(PROMPTS, 2, sampling, seed=4),
        TorchEngine(policy).sample(PROMPTS, 2, sampling, seed=4),
    )


@needs_interpreter
@pytest.mark.slow
def test_rows_that_end_leave_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = grouped_query_policy(seed=3)
    ends = (policy.vocabulary.end_id, 9, 17, 20, 21, 22, 23)
    policy = dataclasses.replace(
        policy, vocabulary=Vocabulary(policy.vocabulary.tokenizer, ends=ends), prompts=None
    )
    engine, sampling, lanes = GraphEngine(policy), Sampling(max_tokens=13), list[int]()
    step = engine._steps.step
    monkeypatch.setattr(
        engine._steps,
        "step",
        lambda room, row_B, sampling: lanes.append(len(row_B)) or step(room, row_B, sampling),
    )
    made = engine.sample(PROMPTS, 4, sampling, seed=0)
    assert_alike(made, TorchEngine(policy).sample(PROMPTS, 4, sampling, seed=0))
    assert {c.ending for c in flat(made)} == {"stop", "length"}
    assert lanes[0] > lanes[-1] > 0
    assert lanes == sorted(lanes, reverse=True)


@needs_interpreter
@pytest.mark.slow
def test_room_is_used_again_and_holds_nothing_of_what_was_there_before() -> None:
    policy = grouped_query_policy(seed=3)
    engine, reference = GraphEngine(policy), TorchEngine(policy)
    engine.sample(PROMPTS, 2, SHORT, seed=0)
    room = engine._room
    for prompts, samples, sampling in (
        ([(7, 8), (9, 9, 9)], 2, Sampling(max_tokens=3)),
        ([(6,)], 3, Sampling(max_tokens=5)),
    ):
        assert_alike(
            engine.sample(prompts, samples, sampling, seed=1),
            reference.sample(prompts, samples, sampling, seed=1),
        )
        assert engine._room is room
    engine.sample([(5,) * 2], 1, Sampling(max_tokens=6), seed=0)
    assert engine._room is not room
    assert engine._room.size.holds(room.size)


@needs_interpreter
@pytest.mark.slow
def test_weights_are_taken_at_refresh_and_only_then_and_in_their_old_place() -> None:
    policy, sampling = lora_policy(), Sampling(max_tokens=3)
    engine = GraphEngine(policy)
    before, place = (
        engine.sample(PROMPTS, 1, sampling, seed=0),
        engine._steps.weights.layers[0].qkv[0].weight.data_ptr(),
    )
    with torch.no_grad():
        for _, parameter in policy.trained():
            parameter.add_(0.05)
    assert engine.sample(PROMPTS, 1, sampling, seed=0) == before
    engine.refresh()
    assert engine._steps.weights.layers[0].qkv[0].weight.data_ptr() == place
    after = engine.sample(PROMPTS, 1, sampling, seed=0)
    assert after != before
    assert_alike(after, TorchEngine(policy).sample(PROMPTS, 1, sampling, seed=0))


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("most", [16, slow(32)])  # one prompt at a time, two
def test_prompts_may_be_run_in_parts(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = grouped_query_policy()
    monkeypatch.setattr("motley.engines.graphs.PREFILL_TOKENS", most)
    sampling = Sampling(max_tokens=2)
    assert_alike(
        GraphEngine(policy).sample(PROMPTS, 2, sampling, seed=4),
        TorchEngine(policy).sample(PROMPTS, 2, sampling, seed=4),
    )


def few_pages(monkeypatch: pytest.MonkeyPatch, num_bytes: float, page: int = 16) -> None:
    monkeypatch.setattr("motley.engines.room.PAGE", page)
    monkeypatch.setattr("motley.engines.graphs.PAGE", page)
    monkeypatch.setattr("motley.engines.graphs.kept_bytes", lambda device: num_bytes)
    monkeypatch.setattr("motley.engines.graphs.free_bytes", lambda device: num_bytes)


def ending_soon(policy: Policy) -> Policy:
    """With so many ends that rows end raggedly."""
    ends = (policy.vocabulary.end_id, 9)
    return dataclasses.replace(
        policy, vocabulary=Vocabulary(policy.vocabulary.tokenizer, ends=ends), prompts=None
    )


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grouped", "mistral"])
def test_rows_take_turns_where_memory_does_not_hold_all(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, sampling = policy_of(kind), Sampling(max_tokens=24)
    expected = TorchEngine(policy).sample(PROMPTS, 2, sampling, seed=1)
    engine, begun = GraphEngine(policy), list[int]()
    few_pages(monkeypatch, math.inf)
    monkeypatch.setattr("motley.engines.graphs.pages_that_fit", lambda *size: 4)
    # fewer than rows take, so that some give way
    monkeypatch.setattr(engine, "_expected_pages", lambda tokens: 1.0)
    begin = engine._begin

    def noted(room: Room, logits_PV: torch.Tensor, row_B: torch.Tensor, sampling: Sampling) -> None:
        assert room.takes_turns
        begun.extend(row_B.tolist())
        begin(room, logits_PV, row_B, sampling)

    monkeypatch.setattr(engine, "_begin", noted)
    assert_alike(engine.sample(PROMPTS, 2, sampling, seed=1), expected)
    assert set(begun) == set(range(6))
    assert len(begun) > 6  # some began again


@needs_interpreter
@pytest.mark.slow
def test_room_has_pages_for_what_rows_take_and_not_for_what_they_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, size = GraphEngine(grouped_query_policy()), RoomSize(3, 64, 100, 160)
    whole = engine._new_room(size)
    assert not whole.takes_turns
    few_pages(monkeypatch, 0.5 * whole.nbytes, page=32)
    assert engine._new_room(size).takes_turns
    assert 0.3 * whole.nbytes < engine._new_room(size).nbytes <= 0.5 * whole.nbytes
    assert engine._expected_pages(160) == size.row_pages == 5
    engine._mean_tokens = 30.0
    assert engine._expected_pages(160) < 3
    assert engine._expected_pages(20) == 1


@pytest.mark.parametrize(
    ("expected", "kept", "free", "pages"),
    [
        (5, math.inf, math.inf, 505),  # all, and nobody's
        (5, 1e9, math.inf, 505),
        (5, 60 * 320, 600 * 320, 505),  # more than may be kept, and there is enough
        (5, 60 * 320, 256 * 320, 250),  # what there is
        (2, 256 * 320, 600 * 320, 250),  # what is kept is expected to do
        (2, 600 * 320, 256 * 320, 250),  # never more than there is
    ],
)
def test_pages_are_as_many_as_memory_holds(
    expected: float, kept: float, free: float, pages: int
) -> None:
    size = RoomSize(prompts=3, prompt_tokens=64, rows=100, tokens=160)  # prompts take 6 pages
    assert pages_that_fit(size, 10, expected, kept, free) == pages


def test_too_few_pages_are_no_room() -> None:
    size = RoomSize(prompts=3, prompt_tokens=64, rows=100, tokens=160)
    with pytest.raises(torch.OutOfMemoryError, match="3 prompts leave room for 60 pages"):
        pages_that_fit(size, 10, 5.0, 1e9, 66 * 320)
    with pytest.raises(torch.OutOfMemoryError, match="room for 0 pages"):
        pages_that_fit(size, 10, 5.0, 1e9, 0)
    assert pages_that_fit(size._replace(rows=1), 10, 5.0, 1e9, 0) == 6  # of one row it is tried


@needs_interpreter
@pytest.mark.slow
def test_a_call_that_fits_a_room_of_turns_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = grouped_query_policy()
    engine = GraphEngine(policy)
    few_pages(monkeypatch, math.inf)
    monkeypatch.setattr("motley.engines.graphs.pages_that_fit", lambda *size: 8)
    engine._make_room(RoomSize(3, 64, 6, 40))
    monkeypatch.setattr(engine, "_take_turns", None)
    assert_alike(
        engine.sample(PROMPTS, 2, SHORT, seed=4), TorchEngine(policy).sample(PROMPTS, 2, SHORT, 4)
    )
    assert engine._room is not None
    assert engine._room.takes_turns


@needs_interpreter
@pytest.mark.slow
def test_what_was_read_is_not_known_after_a_call_that_was_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, sampling = grouped_query_policy(), Sampling(max_tokens=1)
    monkeypatch.setattr("motley.engines.graphs.SHARED_LEAST", 16)
    shots = [[5 + (i + seed) % 9 for i in range(20)] for seed in range(2)]
    first, second = ([[*shot, 7], [*shot, 8]] for shot in shots)
    engine = GraphEngine(policy)
    engine.sample(first, 1, sampling, seed=0)
    prefill = engine._prefill

    def cut_short(*given: object) -> None:
        prefill(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_prefill", cut_short)
        with pytest.raises(KeyboardInterrupt):
            engine.sample(second, 1, sampling, seed=0)
    expected = TorchEngine(policy).sample(first, 1, sampling, seed=0)
    assert_alike(engine.sample(first, 1, sampling, seed=0), expected)
    for prompt in first:  # as who goes on with a conversation does
        prompt.extend(shots[1])
    expected = TorchEngine(policy).sample(first, 1, sampling, seed=0)
    assert_alike(engine.sample(first, 1, sampling, seed=0), expected)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grouped", "mistral", slow("gemma3")])
def test_what_all_prompts_begin_with_is_read_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, sampling = policy_of(kind), Sampling(max_tokens=2)
    monkeypatch.setattr("motley.engines.graphs.SHARED_LEAST", 16)
    shots = tuple(5 + i % 9 for i in range(35))
    prompts = [(*shots, 7), (*shots, 8, 9, 6), (*shots, *range(5, 25))]
    engine, read = GraphEngine(policy), list[tuple[int, int, int]]()
    steps_read = engine._steps.read

    def counted(room: Room, token_PT: torch.Tensor, *rest: object, start: int) -> torch.Tensor:
        read.append((*token_PT.shape, start))
        return steps_read(room, token_PT, *rest, start=start)

    monkeypatch.setattr(engine._steps, "read", counted)
    expected = TorchEngine(policy).sample(prompts, 2, sampling, seed=4)
    assert_alike(engine.sample(prompts, 2, sampling, seed=4), expected)
    assert read == [(1, 32, 0), (3, 32, 32)]
    read.clear()
    assert_alike(engine.sample(prompts, 2, sampling, seed=4), expected)
    assert read == [(3, 32, 32)]  # it was there, with the same weights
    read.clear()
    engine.refresh()
    assert_alike(engine.sample(prompts, 2, sampling, seed=4), expected)
    assert read == [(1, 32, 0), (3, 32, 32)]
    other = [(*shots[:20], 6, *shots[:20]), (*shots[:20], 6, 6, *shots[:15])]
    assert_alike(
        engine.sample(other, 2, sampling, seed=4),
        TorchEngine(policy).sample(other, 2, sampling, seed=4),
    )


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grouped", "mistral"])
def test_a_long_prompt_is_read_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, sampling = policy_of(kind), Sampling(max_tokens=2)
    monkeypatch.setattr("motley.engines.graphs.PREFILL_TOKENS", 32)
    monkeypatch.setattr("motley.engines.graphs.PIECE_TOKENS", 16)
    prompts = [tuple(5 + i % 9 for i in range(53)), (9, 8)]
    assert_alike(
        GraphEngine(policy).sample(prompts, 2, sampling, seed=4),
        TorchEngine(policy).sample(prompts, 2, sampling, seed=4),
    )


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "turns", "least", "expected_shares"),
    # 64 + 19 keys; where a window of 4 slides, 4 + 16 of them
    [("grouped", False, 16, {5}), ("gemma3", True, 5, {4, 16})],
)
def test_programs_may_share_the_keys_of_a_row(
    kind: str,
    turns: bool,
    least: int,
    expected_shares: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows whose keys fill fewer blocks than there are shares, and rows that have more."""
    policy, sampling = policy_of(kind), Sampling(max_tokens=19)
    prompts = [(9,), tuple(5 + i % 9 for i in range(37))]
    expected = TorchEngine(policy).sample(prompts, 1, sampling, seed=4)
    few_pages(monkeypatch, math.inf)
    if turns:
        monkeypatch.setattr("motley.engines.graphs.pages_that_fit", lambda *size: 3)
    monkeypatch.setattr(attention, "LEAST_KEYS", least)
    shares, num_shares = list[int](), attention.num_shares
    monkeypatch.setattr(
        attention, "num_shares", lambda *given: shares.append(num_shares(*given)) or shares[-1]
    )
    assert_alike(GraphEngine(policy).sample(prompts, 1, sampling, seed=4), expected)
    assert set(shares) == expected_shares


def attended(
    qkv_E: torch.Tensor, key_THd: torch.Tensor, value_THd: torch.Tensor, room: Room, layer: Layer
) -> torch.Tensor:
    """[H · d] of one new token over what stands before it, the plain way."""
    kv_heads, size = key_THd.shape[1:]
    query, key, value = qkv_E.view(-1, size).split(
        [len(qkv_E) // size - 2 * kv_heads, *[kv_heads] * 2]
    )
    cos_d, sin_d = (table[len(key_THd)] for table in room.rotations[layer.rotation])
    query, key = (
        x * cos_d + torch.cat([-x[:, size // 2 :], x[:, : size // 2]], 1) * sin_d
        for x in (query, key)
    )
    key, value = torch.cat([key_THd, key[None]]), torch.cat([value_THd, value[None]])
    seen = slice(-layer.window if layer.window else None, None)
    groups = len(query) // kv_heads
    key, value = (x[seen].repeat_interleave(groups, 1) for x in (key, value))
    score_HT = torch.einsum("hd,thd->ht", query, key) * layer.scaling
    return torch.einsum("ht,thd->hd", score_HT.softmax(1), value).flatten()


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("shares", "turns"), [(1, False), (3, False), (4, True), (16, False)])
def test_what_nobody_wrote_is_not_read(
    shares: int, turns: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes of rows with few tokens and with many, in which shares are left without keys, of one
    that has ended, and of nobody. What was not written is NaN, and all that the ended row has.
    """
    few_pages(monkeypatch, math.inf)
    monkeypatch.setattr(attention, "LEAST_KEYS", 16)
    monkeypatch.setattr(attention, "num_shares", lambda *given: shares)
    place_for = attention._place_for
    monkeypatch.setattr(
        attention,
        "_place_for",
        lambda *given: tuple(each.fill_(torch.nan) for each in place_for(*given)),
    )
    engine = GraphEngine(grouped_query_policy())
    monkeypatch.setattr("motley.engines.graphs.pages_that_fit", lambda *size: 15 if turns else 18)
    room = engine._new_room(RoomSize(3, 64, 5, 40))
    assert room.takes_turns == turns
    layer = dataclasses.replace(engine._steps.decoder.layers[0], window=window)
    torch.manual_seed(0)
    count_R, prompt_R, length_P = [1, 2, 18, 40, 33, 1], [0, 1, 1, 0, 2, 0], [3, 61, 40]
    room.page_RJ[:5] = (
        torch.arange(15).view(5, 3)
        if not turns
        else torch.tensor([[7, 14, 14], [2, 14, 14], [9, 0, 14], [5, 11, 3], [1, 8, 4]])
    )
    room.count_R[:], room.prompt_R[:] = torch.tensor(count_R), torch.tensor(prompt_R)
    room.length_P[:], room.ended_R[:4] = torch.tensor(length_P), False
    room.prompt_L2PHTd.fill_(torch.nan)
    room.own_L2GHTd.fill_(torch.nan)
    for prompt in range(2):
        kept = room.prompt_L2PHTd[0, :, prompt, :, : length_P[prompt]]
        kept.copy_(torch.randn_like(kept))
    written = [(row, token) for row in range(4) for token in range(count_R[row] - 1)]
    for row, token in written:
        page = int(room.page_RJ[row, token // 16]) if turns else 3 * row + token // 16
        kept = room.own_L2GHTd[0, :, page, :, token % 16]
        kept.copy_(torch.randn_like(kept))
    row_B = torch.tensor([3, 4, 0, 5, 2, 5, 1])
    heads, before = engine._steps.decoder.heads, room.own_L2GHTd.clone()
    qkv_BE = torch.randn(len(row_B), sum(heads.counts) * heads.size)
    made_BE = attention.attend(qkv_BE, attention.look_up(row_B, room), layer, room)
    for lane, row in enumerate(row_B.tolist()):
        pages = room.page_RJ[row].tolist() if turns else range(3 * row, 3 * row + 3)
        own_2THd = torch.cat([before[0, :, page] for page in pages], 2).transpose(1, 2)
        prompt_2THd = room.prompt_L2PHTd[0, :, prompt_R[row]].transpose(1, 2)
        kept_2THd = torch.cat(
            [prompt_2THd[:, : length_P[prompt_R[row]]], own_2THd[:, : count_R[row] - 1]], 1
        )
        alone = dataclasses.replace(layer, window=1) if room.ended_R[row] else layer
        expected_E = attended(qkv_BE[lane], *kept_2THd, room, alone)
        torch.testing.assert_close(made_BE[lane], expected_E, rtol=0, atol=2e-5)


@needs_interpreter
def test_what_a_share_found_shows_though_it_is_no_number() -> None:
    """Four shares of one head: of the last two none had keys, and what they mixed is not read."""
    highest_BHS = torch.tensor([[[0.0, 1.0, -1e30, -1e30]]])
    weight_BHS = torch.tensor([[[1.0, 2.0, 0.0, 0.0]]])
    mixed_BHSd = torch.full((1, 1, 4, 2), torch.nan)
    mixed_BHSd[0, 0, :2] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    out_BHd = torch.empty(1, 1, 2)
    attention._join_shares(highest_BHS, weight_BHS, mixed_BHSd, out_BHd)
    torch.testing.assert_close(out_BHd, torch.tensor([[[7.0, 10.0]]]) / 5)
    mixed_BHSd[0, 0, 0, 1] = torch.nan
    attention._join_shares(highest_BHS, weight_BHS, mixed_BHSd, out_BHd)
    assert out_BHd.isnan().tolist() == [[[False, True]]]
    weight_BHS[0, 0, 1] = torch.nan
    attention._join_shares(highest_BHS, weight_BHS, mixed_BHSd, out_BHd)
    assert out_BHd.isnan().all()


@pytest.mark.parametrize(
    ("programs", "longest", "key_bytes", "shares"),
    [
        (8, 4096, 128, 16),
        (64, 4096, 128, 16),
        (64, 4096, 256, 8),
        (64, 4096, 512, 4),
        (64, 4096, 2048, 2),
        (64, 300, 256, 2),
        (64, 200, 256, 1),
        (150, 4096, 256, 3),
        (3000, 4096, 256, 1),
    ],
)
def test_keys_are_shared_where_few_programs_would_read_many(
    programs: int, longest: int, key_bytes: int, shares: int
) -> None:
    made = attention.num_shares(programs, longest, key_bytes, torch.device("cpu"))
    assert made == shares


def test_room_is_made_in_the_steps_that_a_footprint_counts() -> None:
    counted = (footprint.PAGE, footprint.PROMPT_STEP, footprint.PREFILL_TOKENS)
    assert counted == (PAGE, PROMPT_STEP, PREFILL_TOKENS)


@needs_interpreter
@pytest.mark.slow
def test_rows_may_have_limits_of_their_own() -> None:
    class Limited(GraphEngine):
        def limits(self, rows: int, tokens: int) -> torch.Tensor:
            return torch.arange(1, rows + 1).clamp(max=tokens)

    made = flat(Limited(policy_of("grouped")).sample(PROMPTS, 2, SHORT, seed=4))
    whole = flat(TorchEngine(policy_of("grouped")).sample(PROMPTS, 2, SHORT, seed=4))
    for limit, one, other in zip((1, 2, 3, 4, 5, 5), made, whole, strict=True):
        assert one.tokens == other.tokens[:limit]


class Replayed:
    """What a captured graph does, without one."""

    def __init__(self, work: Callable[..., torch.Tensor]) -> None:
        self.replay = work


@needs_interpreter
@pytest.mark.slow
def test_prompts_of_a_shape_that_came_before_are_read_by_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, sampling = grouped_query_policy(), Sampling(max_tokens=1)
    engine, reference, captured = GraphEngine(policy), TorchEngine(policy), list[torch.Size]()
    monkeypatch.setattr("motley.engines.graphs.MOST_READERS", 2)
    engine._graphs.reads = True
    engine._graphs.record = lambda given, work: captured.append(given[0].shape) or Replayed(work)
    engine.sample([(5,) * 2] * 4, 2, sampling, seed=0)  # makes room for all
    for times in range(3):
        for prompts in ([(5, 6), (7,) * 9], [(5, 6, 7)], [(8,)] * 3):
            assert_alike(
                engine.sample(prompts, 2, sampling, seed=1),
                reference.sample(prompts, 2, sampling, seed=1),
            )
        assert captured == ([(2, 16), (1, 16)] if times else [])  # no more than two


@needs_interpreter
@pytest.mark.slow
def test_prompts_are_read_without_a_graph_where_memory_holds_none() -> None:
    policy, sampling, tried = grouped_query_policy(), Sampling(max_tokens=1), list[int]()

    def fails(given: object, work: object) -> None:
        tried.append(1)
        raise torch.OutOfMemoryError("out of memory")

    engine = GraphEngine(policy)
    engine._graphs.reads, engine._graphs.record = True, fails
    expected = TorchEngine(policy).sample(PROMPTS, 2, sampling, seed=1)
    for _ in range(4):
        assert_alike(engine.sample(PROMPTS, 2, sampling, seed=1), expected)
    assert tried == [1]


@needs_interpreter
@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """What the interpreter takes, a compiler may refuse."""
    sizes = sizes_of(programs, tmp_path)
    assert len(sizes) == 26
    assert all(size > 0 for size in sizes.values())


@needs_interpreter
def test_buckets_waste_no_more_than_a_third() -> None:
    for small, large in itertools.pairwise(BUCKETS):
        assert large <= max(small + 1, 1.5 * small)
    assert BUCKETS[-1] > 10**6


# On a GPU


def cuda(policy: Policy, dtype: torch.dtype) -> Policy:
    policy.model.to("cuda")
    policy.dtype = dtype
    return policy


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["full", "grouped", *KNOWN, "qwen3 lora", "four bits"])
def test_graphs_draw_what_the_engine_for_cpus_draws(kind: str) -> None:
    expected = Reference(policy_of(kind)).sample(PROMPTS, 5, Sampling(max_tokens=12), seed=4)
    engine = torch_engine(cuda(policy_of(kind), torch.float32))
    assert isinstance(engine, GraphEngine)
    for _ in range(2):
        assert_alike(
            engine.sample(PROMPTS, 5, Sampling(max_tokens=12), seed=4), expected, atol=5e-5
        )
    for other in (
        Sampling(max_tokens=12, temperature=0.0),
        Sampling(max_tokens=12, temperature=0.8, top_k=9, top_p=0.9),
    ):
        assert_alike(
            engine.sample(PROMPTS, 2, other, seed=4),
            Reference(policy_of(kind)).sample(PROMPTS, 2, other, seed=4),
            atol=5e-5,
        )


@pytest.mark.gpu
@needs_gpu
def test_graphs_see_refreshed_weights() -> None:
    policy, sampling = cuda(tiny_policy(), torch.float32), Sampling(max_tokens=8)
    engine = GraphEngine(policy)
    before = engine.sample(PROMPTS, 4, sampling, seed=0)
    graphs = dict(engine._graphs.steps)
    for _ in range(2):  # prompts are read by a graph from the second time on
        with torch.no_grad():
            for _, parameter in policy.trained():
                parameter.mul_(1.05)
        engine.refresh()
        after = engine.sample(PROMPTS, 4, sampling, seed=0)
        assert engine._graphs.readers
        assert all(engine._graphs.steps[key] is graph for key, graph in graphs.items())
        assert [c.logprobs for c in flat(after)] != [c.logprobs for c in flat(before)]
        assert_alike(after, GraphEngine(policy).sample(PROMPTS, 4, sampling, seed=0))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["grouped", "mistral"])
def test_rows_that_take_turns_draw_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, sampling = ending_soon(policy_of(kind)), Sampling(max_tokens=40)
    expected = Reference(policy).sample(PROMPTS, 32, sampling, seed=4)
    policy = cuda(policy, torch.float32)
    few_pages(monkeypatch, GraphEngine(policy)._new_room(RoomSize(3, 64, 96, 40)).nbytes / 4)
    engine = GraphEngine(policy)
    for _ in range(2):  # the second time it knows how long rows are
        assert_alike(engine.sample(PROMPTS, 32, sampling, seed=4), expected, atol=5e-5)
        assert engine._room is not None
        assert engine._room.takes_turns


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["grouped", "mistral", "qwen3", "gemma3"])
def test_keys_that_programs_share_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, sampling = [(9,), tuple(5 + i % 9 for i in range(37))], Sampling(max_tokens=24)
    expected = Reference(policy_of(kind)).sample(prompts, 8, sampling, seed=4)
    monkeypatch.setattr(attention, "LEAST_KEYS", 16)
    key_bytes, device = 4 * 64, torch.device("cuda")
    assert attention.num_shares(16 * 4, 64 + 24, key_bytes, device) == 5
    assert attention.num_shares(16 * 4, WINDOW + 32, key_bytes, device) == 2
    engine = GraphEngine(cuda(policy_of(kind), torch.float32))
    assert_alike(engine.sample(prompts, 8, sampling, seed=4), expected, atol=5e-5)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["grouped", "mistral"])
def test_shared_beginnings_and_pieces_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shots, sampling = tuple(5 + i % 9 for i in range(40)), Sampling(max_tokens=12)
    prompts = [(*shots, 7), (*shots, 8, 9, 6), (*shots, *range(5, 15))]
    expected = Reference(policy_of(kind)).sample(prompts, 4, sampling, seed=4)
    policy = cuda(policy_of(kind), torch.float32)
    for most in (1 << 15, 32):
        monkeypatch.setattr("motley.engines.graphs.PREFILL_TOKENS", most)
        monkeypatch.setattr("motley.engines.graphs.PIECE_TOKENS", 16)
        engine = GraphEngine(policy)
        for _ in range(3):
            assert_alike(engine.sample(prompts, 4, sampling, seed=4), expected, atol=5e-5)
            engine.refresh()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kind", ["full", "qwen2", "qwen3 lora", "four bits", "gemma3"])
def test_half_precision_reports_what_the_trainer_computes(
    kind: str, dtype: torch.dtype, most: float
) -> None:
    policy = cuda(policy_of(kind), dtype)
    made = GraphEngine(policy).sample(PROMPTS, 16, Sampling(max_tokens=12), seed=0)
    assert far_from_trainer(policy, PROMPTS, made) < most


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kind", ["full", "qwen2", "qwen3 lora", "gemma3"])
def test_half_precision_reports_the_same_where_programs_share_the_keys_of_long_prompts(
    kind: str, dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More keys than a share takes at least, beside prompts that leave shares without any."""
    policy = cuda(policy_of(kind), dtype)
    policy.base.config.max_position_embeddings = 1024
    prompts = [
        tuple(5 + (i * i + i // 7) % 13 for i in range(length)) for length in (640, 9, 701, 130)
    ]
    shares, num_shares = list[int](), attention.num_shares
    monkeypatch.setattr(
        attention, "num_shares", lambda *given: shares.append(num_shares(*given)) or shares[-1]
    )
    made = GraphEngine(policy).sample(prompts, 8, Sampling(max_tokens=40), seed=0)
    assert max(shares) == 5  # of 704 + 40 keys
    assert far_from_trainer(policy, prompts, made) < most


def far_from_trainer(
    policy: Policy, prompts: Sequence[tuple[int, ...]], made: list[list[Completion]]
) -> float:
    """How far log-probs are from what the trainer computes, on average."""
    sequences = [
        ToScore(row=i, prompt=prompt, tokens=c.tokens)
        for i, (prompt, c) in enumerate(
            (prompt, c) for prompt, row in zip(prompts, made, strict=True) for c in row
        )
    ]
    completions = flat(made)
    found = []
    with torch.no_grad():
        for micro in micro_batches(sequences, 10**6, policy.device):
            table_BT = micro.unpack(score(policy, micro.packed).logp_M)
            for row_T, row in zip(table_BT, micro.row_B.tolist(), strict=True):
                logp_T = torch.tensor(completions[row].logprobs)
                found.append((row_T[: len(logp_T)].cpu() - logp_T).abs())
    return float(torch.cat(found).mean())


@pytest.mark.gpu
@needs_gpu
def test_what_memory_does_not_hold_is_sampled_in_parts_and_room_is_given_back() -> None:
    policy, sampling = cuda(grouped_query_policy(), torch.float16), Sampling(max_tokens=8)
    engine = GraphEngine(policy)
    whole = engine.sample(PROMPTS, 64, sampling, seed=0)
    size = engine._room
    assert size is not None
    engine._forget()
    make, most = engine._make_room, 100

    def small(size: object) -> object:
        if size.rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(size)

    engine._make_room = small
    with pytest.warns(UserWarning, match="sampling in parts"):
        parts = engine.sample(PROMPTS, 64, sampling, seed=0)
    assert [c.tokens for c in flat(parts)] == [c.tokens for c in flat(whole)]
