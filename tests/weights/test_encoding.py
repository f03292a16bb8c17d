from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import load, save
from torch import Tensor

from fakes import (
    four_bit_policy,
    grouped_query_policy,
    lora_policy,
    reference_logp,
    tiny_policy,
)
from motley.config import TrainPart
from motley.records import Blob
from motley.weights import encoding
from motley.weights.encoding import (
    State,
    WeightsError,
    apply_change,
    check_blob,
    decode_whole,
    describe,
    encode_change,
    encode_whole,
    frozen_state,
    most_bytes,
    state_hash,
    take_state,
    trained_state,
)

POLICIES = {
    "full": tiny_policy,
    "lora": lora_policy,
    "layers": lambda seed=0: tiny_policy(TrainPart(layers="last:1"), seed),
    "grouped": grouped_query_policy,
    "four bits": four_bit_policy,
}
BF16, F32 = torch.bfloat16, torch.float32


def bits(value: Tensor) -> bytes:
    return (
        value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else bits(value[None])
    )


def same(one: State, other: State) -> bool:
    """Equal to the last bit, NaN and the sign of zero included, and names in order."""
    assert list(one) == sorted(one)
    return list(one) == list(other) and all(
        (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def normal(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def moved(state: State, share: float, seed: int) -> State:
    """A share of the values one unit in the last place up or down."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, value in state.items():
        whole = (
            value.flatten()
            .view(torch.int16 if value.element_size() == 2 else torch.int32)
            .numpy()
            .copy()
        )
        whole += np.where(
            rng.random(whole.shape) < share, rng.choice([-1, 1], whole.shape), 0
        ).astype(whole.dtype)
        found[name] = torch.from_numpy(whole).view(value.dtype).reshape(value.shape)
    return found


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.from_numpy(rng.integers(0, 256, int(np.prod(shape)) * size, dtype=np.uint8))
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def mixed(value: Tensor, other: Tensor, share: float, rng: np.random.Generator) -> Tensor:
    return torch.where(
        torch.from_numpy(rng.random(value.numel()) < share).reshape(value.shape), other, value
    )


def num_bytes(blobs: list[bytes]) -> int:
    return sum(map(len, blobs))


def compressed(file: dict[str, Tensor]) -> bytes:
    return zstandard.ZstdCompressor().compress(save(file))


def row(*values: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# States


@pytest.mark.parametrize("kind", POLICIES)
def test_a_state_and_what_is_frozen_are_the_whole_model(kind: str) -> None:
    policy = POLICIES[kind]()
    trained, frozen = trained_state(policy, "float32"), frozen_state(policy)
    assert trained
    assert bool(frozen) == (kind in ("lora", "layers", "four bits"))
    assert not trained.keys() & frozen.keys()
    assert trained.keys() | frozen.keys() == dict(policy.model.named_parameters()).keys()
    assert list(trained) == sorted(trained)
    assert list(frozen) == sorted(frozen)


def test_a_state_is_a_copy_rounded_to_its_precision() -> None:
    policy = tiny_policy()
    state, name = trained_state(policy, "bfloat16"), "model.embed_tokens.weight"
    before = dict(policy.trained())[name].detach().clone()
    assert torch.equal(state[name], before.to(BF16))
    state[name].zero_()
    assert torch.equal(dict(policy.trained())[name], before)
    assert not state[name].requires_grad


@pytest.mark.parametrize("kind", POLICIES)
def test_a_taken_state_makes_the_policies_answer_alike(kind: str) -> None:
    learner, sampler = POLICIES[kind](seed=1), POLICIES[kind](seed=2)
    prompt, tokens = (5, 12, 13), (14, 15, 1)
    assert not torch.equal(
        reference_logp(learner, prompt, tokens), reference_logp(sampler, prompt, tokens)
    )
    take_state(sampler, frozen_state(learner) | trained_state(learner, "float32"))
    assert torch.equal(
        reference_logp(learner, prompt, tokens), reference_logp(sampler, prompt, tokens)
    )


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    policy = tiny_policy()
    before = trained_state(policy, "float32")
    good = {"model.embed_tokens.weight": torch.zeros_like(before["model.embed_tokens.weight"])}
    with pytest.raises(ValueError, match="name nowhere; the model has no such parameters"):
        take_state(policy, good | {"nowhere": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \[2\]; expected \[96\]"):
        take_state(policy, good | {"model.norm.weight": torch.zeros(2)})
    assert same(trained_state(policy, "float32"), before)


# Hashes


def test_the_hash_does_not_depend_on_the_order_of_names_or_on_memory_layout() -> None:
    state = {"b": normal((3, 4), 1), "a": normal((5,), 2, F32)}
    turned = {"a": state["a"].clone(), "b": state["b"].t().contiguous().t()}
    assert not turned["b"].is_contiguous()
    assert state_hash(state) == state_hash(turned) == state_hash(dict(sorted(state.items())))


def test_the_hash_is_the_one_written_down() -> None:
    """As another implementation would compute it, from the words of `state_hash` alone."""
    state = {"b": torch.tensor([[1.0, -0.0]], dtype=BF16), "a": torch.tensor(2.0)}
    content = (
        b'["a","F32",[]]\n'
        + bytes.fromhex("00000040")
        + b'["b","BF16",[1,2]]\n'
        + bytes.fromhex("803f0080")
    )
    assert state_hash(state) == hashlib.sha256(content).digest()


def test_the_hash_sees_names_dtypes_shapes_and_every_bit() -> None:
    zero = torch.zeros(4, dtype=BF16)
    states: list[State] = [
        {"a": zero},
        {"b": zero},
        {"a": zero.reshape(2, 2)},
        {"a": zero.half()},
        {"a": torch.zeros(2)},
        {"a": torch.tensor([0, 0, 0, -0.0], dtype=BF16)},
        {"a": zero[:2], "b": zero[2:]},
        {},
    ]
    assert len({state_hash(state) for state in states}) == len(states)


# Whole


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", POLICIES)
def test_a_whole_state_comes_back(kind: str, precision: Any) -> None:
    policy = POLICIES[kind](seed=3)
    for state in (trained_state(policy, precision), frozen_state(policy)):
        assert same(decode_whole(encode_whole(state)), state)


def test_a_decompressed_blob_is_an_ordinary_safetensors_file() -> None:
    state = {"b": normal((3, 4)), "a": normal((5,), dtype=F32)}
    (blob,) = encode_whole(state)
    assert same(dict(sorted(load(zstandard.decompress(blob)).items())), decode_whole([blob]))


def test_blobs_keep_to_their_size_and_to_the_order_of_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "BLOB_BYTES", 4096)
    state = {f"layer.{number:03d}": normal((number % 7, 20), number) for number in range(200)}
    state["layer.100"] = normal((9000,))
    blobs = encode_whole(state)
    names = [sorted(load(zstandard.decompress(blob))) for blob in blobs]
    assert [name for file in names for name in file] == sorted(state)
    assert ["layer.100"] in names
    assert all(
        blob.raw_bytes <= 4096
        for blob, file in zip(describe(blobs), names, strict=True)
        if file != ["layer.100"]
    )
    assert len(blobs) < 30
    assert same(decode_whole(blobs), state)
    change = encode_change(state, moved(state, 0.5, 1))
    assert len(change) > 2
    assert all(
        blob.raw_bytes <= 4096 or len(load(zstandard.decompress(b))) == 1
        for b, blob in zip(change, describe(change), strict=True)
    )
    assert same(apply_change(state, change), moved(state, 0.5, 1))


def test_the_same_state_makes_the_same_bytes_whatever_the_order_of_its_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "BLOB_BYTES", 2000)
    state = {f"n{number:02d}": normal((50,), number) for number in range(20)}
    turned = dict(reversed(state.items()))
    new = moved(state, 0.1, 1)
    assert len(encode_whole(state)) > 1
    assert encode_whole(state) == encode_whole(turned)
    assert encode_change(state, new) == encode_change(turned, dict(reversed(new.items())))
    assert same(apply_change(turned, encode_change(state, new)), new)


def test_nothing_takes_no_blob() -> None:
    state = {"a": normal((4,))}
    assert encode_whole({}) == []
    assert decode_whole([]) == {}
    assert encode_change(state, state) == []
    assert same(apply_change(state, []), state)


def test_what_a_reader_would_not_take_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightsError, match=r"a is torch.int64; expected one of torch.bfloat16"):
        encode_whole({"a": torch.zeros(2, dtype=torch.int64)})
    monkeypatch.setattr(encoding, "MAX_RAW_BYTES", 1000)
    with pytest.raises(WeightsError, match="a has 2000 bytes; expected at most 1000"):
        encode_whole({"a": normal((1000,))})


# Changes


def test_a_change_is_what_the_words_of_the_module_say() -> None:
    base = {"w": torch.zeros(400, dtype=BF16)}
    new = {"w": base["w"].clone()}
    new["w"].view(torch.int16)[3] = 0x0007
    new["w"].view(torch.int16)[300] = 0x0108
    (blob,) = encode_change(base, new)
    file = {name: value.tolist() for name, value in load(zstandard.decompress(blob)).items()}
    assert file == {
        "gaps0/w": [3, 255, 41],
        "bytes0/w": [7, 8],
        "gaps1/w": [255, 45],
        "bytes1/w": [1],
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
def test_random_bits_come_back_whatever_changed(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(7)
    for seed in range(60):
        shapes = [tuple(rng.integers(0, 40, rng.integers(0, 4))) for _ in range(4)]
        base = {f"t{number}": random_bits(shape, dtype, rng) for number, shape in enumerate(shapes)}
        share = rng.choice([0.001, 0.02, 0.5, 1.0])
        new = {
            name: mixed(value, random_bits(tuple(value.shape), dtype, rng), share, rng)
            for name, value in base.items()
        }
        before = {name: bits(value) for name, value in base.items()}
        assert same(apply_change(base, encode_change(base, new)), new), seed
        assert {name: bits(value) for name, value in base.items()} == before


def test_gaps_around_the_longest_that_a_byte_says() -> None:
    for gap in (0, 1, 253, 254, 255, 256, 509, 510, 511, 765, 5000):
        for first in (0, gap):
            base = {"w": torch.zeros(first + gap + 2, dtype=BF16)}
            new = {"w": base["w"].clone()}
            new["w"][[first, first + gap + 1]] = 1.0
            assert same(apply_change(base, encode_change(base, new)), new), (gap, first)


def test_zeros_of_both_signs_and_every_nan_are_values() -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    base, new = {"w": patterns}, {"w": patterns.roll(1)}
    assert same(apply_change(base, encode_change(base, new)), new)
    zero, negative = {"w": torch.zeros(3)}, {"w": -torch.zeros(3)}
    assert len(encode_change(zero, negative)) == 1
    assert same(apply_change(zero, encode_change(zero, negative)), negative)
    nan = {"w": torch.full((3,), torch.nan)}
    assert encode_change(nan, nan) == []


def test_a_tensor_that_does_not_lie_in_order_is_read_in_order() -> None:
    base = {"w": normal((6, 8)).t()}
    new = {"w": normal((8, 6), 1)}
    assert not base["w"].is_contiguous()
    assert same(apply_change(base, encode_change(base, new)), new)
    assert same(apply_change(new, encode_change(new, base)), {"w": base["w"].contiguous()})
    assert same(decode_whole(encode_whole(base)), {"w": base["w"].contiguous()})


@pytest.mark.parametrize(("share", "most"), [(0.01, 0.015), (0.05, 0.065), (0.3, 0.3), (0.9, 0.7)])
def test_a_change_is_much_smaller_than_the_whole(share: float, most: float) -> None:
    state = {"a": normal((400, 1000)), "b": normal((100, 1000), 1)}
    new = moved(state, share, 2)
    assert num_bytes(encode_change(state, new)) < most * num_bytes(encode_whole(new))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", POLICIES)
def test_a_chain_of_changes_of_a_training_is_the_whole(kind: str, precision: Any) -> None:
    policy = POLICIES[kind](seed=4)
    optimiser = torch.optim.Adam([p for _, p in policy.trained()], lr=1e-3)
    followed = trained_state(policy, precision)
    first = state_hash(followed)
    for step in range(12):
        optimiser.zero_grad()
        tokens = torch.randint(
            3, policy.vocabulary.size, (7,), generator=torch.Generator().manual_seed(step)
        ).tolist()
        (-reference_logp(policy, tokens[:3], tokens[3:]).sum()).backward()
        optimiser.step()
        new = trained_state(policy, precision)
        followed = apply_change(followed, encode_change(followed, new))
        assert same(followed, decode_whole(encode_whole(new)))
        assert state_hash(followed) == state_hash(new) != first


def test_only_like_states_have_a_change() -> None:
    base = {"a": normal((4,)), "b": normal((4,))}
    for new, words in [
        ({"a": normal((4,))}, "lack b and add nothing"),
        (base | {"c": normal((4,))}, "lack nothing and add c"),
        (base | {"b": normal((2, 2))}, r"b has shape \[2, 2\]; expected \[4\]"),
        (base | {"b": normal((4,), dtype=F32)}, "b is torch.float32; expected torch.bfloat16"),
        (base | {"b": normal((4,)).half()}, "b is torch.float16; expected torch.bfloat16"),
    ]:
        with pytest.raises(ValueError, match=words):
            encode_change(base, new)


# Blobs


def test_a_blob_is_described_by_its_hash_and_sizes() -> None:
    content = encode_whole({"a": normal((1000,))})[0]
    (blob,) = describe([content])
    assert blob == Blob(
        sha256=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
        raw_bytes=len(zstandard.decompress(content)),
    )
    check_blob(blob, content)


def test_a_blob_that_is_not_what_was_described_is_refused() -> None:
    content = encode_whole({"a": normal((1000,))})[0]
    (blob,) = describe([content])
    changed = content[:-1] + bytes([content[-1] ^ 1])
    lying = Blob(sha256=blob.sha256, num_bytes=blob.num_bytes, raw_bytes=blob.raw_bytes + 1)
    for described, got, words in [
        (blob, content[:-1], f"has {len(content) - 1} bytes; expected {len(content)}"),
        (blob, changed, f"expected {blob.sha256}"),
        (
            lying,
            content,
            f"declares {blob.raw_bytes} bytes uncompressed; expected {blob.raw_bytes + 1}",
        ),
    ]:
        with pytest.raises(WeightsError, match=words):
            check_blob(described, got)


def test_no_blobs_of_a_model_are_larger_than_it_may_have() -> None:
    for precision in ("bfloat16", "float32"):
        state = trained_state(tiny_policy(), precision)  # type: ignore[arg-type]
        inverted = {
            name: (~value.view(torch.uint8)).view(value.dtype) for name, value in state.items()
        }
        for blobs in (encode_whole(state), encode_change(state, inverted)):
            assert sum(blob.raw_bytes for blob in describe(blobs)) <= most_bytes(state.values())


# Hostile bytes

BASE: State = {"a": torch.zeros(10, dtype=BF16), "s": torch.zeros((), dtype=BF16)}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"gaps0/a": row(10), "bytes0/a": row(1)}, "writes to value 10; expected less than its 10"),
        ({"gaps0/a": row(255), "bytes0/a": row()}, None),
        (
            {"gaps0/a": row(*[0] * 11), "bytes0/a": row(*[1] * 11)},
            "has 11 gaps; expected at most one for each of its 10",
        ),
        ({"gaps0/a": row(255, 0), "bytes0/a": row(1)}, "writes to value 255"),
        (
            {"gaps0/a": row(1, 2), "bytes0/a": row(1)},
            "has 1 new bytes 0; expected one for each of 2",
        ),
        ({"gaps0/a": row(1)}, "has 0 new bytes 0; expected one for each of 1"),
        ({"bytes0/a": row(1)}, "has 1 new bytes 0; expected one for each of 0"),
        (
            {"gaps0/a": row(1), "bytes0/a": row(1, dtype=torch.int8)},
            "bytes0/a is torch.int8 of 1 dimensions; expected a row of bytes",
        ),
        ({"gaps0/a": row(1, dtype=torch.int64), "bytes0/a": row(1)}, "gaps0/a is torch.int64"),
        (
            {"gaps0/a": row(1, 1).reshape(1, 2), "bytes0/a": row(1)},
            "gaps0/a is torch.uint8 of 2 dimensions",
        ),
        (
            {"gaps2/a": row(1), "bytes2/a": row(1)},
            "change has bytes2/a, gaps2/a, for which the base has no tensor or no such byte",
        ),
        ({"gaps0/b": row(1), "bytes0/b": row(1)}, "change has bytes0/b, gaps0/b"),
        ({"a": torch.zeros(10, dtype=BF16)}, "change has a, for which"),
        ({"gaps0/s": row(1), "bytes0/s": row(1)}, "writes to value 1; expected less than its 1"),
        ({"gaps0/s": row(0), "bytes0/s": row(1)}, None),
    ],
)
def test_a_change_that_does_not_fit_its_base_is_refused(
    file: dict[str, Tensor], words: str | None
) -> None:
    if words is None:
        apply_change(BASE, [compressed(file)])
    else:
        with pytest.raises(WeightsError, match=words):
            apply_change(BASE, [compressed(file)])
    assert not any(value.any() for value in BASE.values())


def test_a_name_in_two_blobs_is_refused() -> None:
    blob = compressed({"a": torch.zeros(2)})
    with pytest.raises(WeightsError, match="hold a twice"):
        decode_whole([blob, blob])
    with pytest.raises(WeightsError, match="hold bytes0/a, gaps0/a twice"):
        apply_change(BASE, [compressed({"gaps0/a": row(1), "bytes0/a": row(1)})] * 2)


def raw_file(header: Any, content: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def tensor_entry(dtype: str, shape: list[int], end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 16,
        raw_file(b"no json"),
        raw_file(b'{"\xff": 1}'),
        raw_file([1]),
        raw_file({"a": 1}),
        raw_file({"a": tensor_entry("F32", [2], 4)}, bytes(4)),
        raw_file({"a": tensor_entry("F32", [1], 4)}),
        raw_file({"a": tensor_entry("F32", [1], 4)}, bytes(8)),
        raw_file({"a": tensor_entry("F9", [1], 4)}, bytes(4)),
        raw_file({"a": tensor_entry("F8_E8M0", [4], 4)}, bytes(4)),
        raw_file({"a": tensor_entry("F4", [8], 4)}, bytes(4)),
        raw_file({"a": tensor_entry("I32", [1], 4)}, bytes(4)),
        raw_file({"a": tensor_entry("BOOL", [4], 4)}, b"\x02\x03\x04\x05"),
        raw_file({"a": tensor_entry("F64", [1], 8)}, bytes(8)),
        raw_file({"a": tensor_entry("F32", [2**64 - 1, 0], 0)}),
        raw_file({"a": tensor_entry("F32", [2**40, 2**40], 0)}),
        raw_file({"a": tensor_entry("F32", [-1], 4)}, bytes(4)),
        raw_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)),
        raw_file(b"[" * 100_000),
        raw_file(b'{"a":' * 100_000),
    ],
)
def test_a_file_that_holds_no_weights_is_refused(raw: bytes) -> None:
    for decode in (decode_whole, lambda blobs: apply_change(BASE, blobs)):
        with pytest.raises(WeightsError):
            decode([zstandard.ZstdCompressor().compress(raw)])


def test_a_blob_is_not_decompressed_beyond_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(2**20))
    undeclared = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**20))
    monkeypatch.setattr(encoding, "MAX_RAW_BYTES", 2**20 - 1)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", None)  # must not come so far
    for blob, words in [
        (bomb, "declares 1048576 bytes uncompressed; expected at most 1048575"),
        (undeclared, "does not declare its uncompressed size"),
        (b"no frame", "not a zstd frame"),
        (b"", "not a zstd frame"),
    ]:
        with pytest.raises(WeightsError, match=words):
            decode_whole([blob])
        with pytest.raises(WeightsError, match=words):
            describe([blob])


def test_a_frame_that_says_less_or_more_than_it_holds_is_refused() -> None:
    frame = bytearray(encode_whole({"a": normal((1000,))})[0])
    assert (
        zstandard.get_frame_parameters(bytes(frame)).content_size
        == int.from_bytes(frame[5:7], "little") + 256
    )
    for size in (0, 100, 3000, 65535):
        frame[5:7] = size.to_bytes(2, "little")
        with pytest.raises(WeightsError):
            decode_whole([bytes(frame)])


def test_bytes_behind_a_frame_are_refused() -> None:
    (blob,) = encode_whole({"a": normal((10,))})
    with pytest.raises(WeightsError, match="does not decompress"):
        decode_whole([blob + b"x"])


def mutated(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = (
            rng.randrange(len(changed))
            if rng.random() < 0.5
            else rng.randrange(min(len(changed), 300))
        )
        match rng.randrange(5):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at] = rng.choice(b'0123456789"[]{},:\x00\xff')
            case 2:
                del changed[at : at + rng.choice([1, 2, 50])]
            case 3:
                changed[at:at] = rng.choice([b"9", b'"', b"\x00" * 8, bytes(changed[: at + 1])])
            case _:
                changed = changed[: max(1, at)]
        if not changed:
            return b""
    return bytes(changed)


def test_changed_blobs_raise_nothing_but_weights_errors() -> None:
    """Half of the changes are made inside of the frame, where a dishonest learner would make
    them.
    """
    rng = random.Random(0)
    base = {"model.a": normal((40, 9)), "model.b": normal((9,), 1, F32), "model.c": normal((), 2)}
    new = moved(base, 0.3, 3)
    originals = {"whole": encode_whole(new)[0], "change": encode_change(base, new)[0]}
    outcomes: Counter[tuple[str, str]] = Counter()
    for number in range(2000):
        kind = ("whole", "change")[number % 2]
        blob = originals[kind]
        inside = number % 4 < 2
        raw = mutated(zstandard.decompress(blob) if inside else blob, rng)
        blob = zstandard.ZstdCompressor(level=1).compress(raw) if inside else raw
        try:
            state = decode_whole([blob]) if kind == "whole" else apply_change(base, [blob])
            state_hash(state)
            outcomes[kind, "success"] += 1
        except WeightsError as error:
            outcomes[kind, str(error)[:18]] += 1
    assert outcomes.total() == 2000
    assert {kind for kind, outcome in outcomes if outcome == "success"} == {"whole", "change"}
    assert len(outcomes) >= 8
