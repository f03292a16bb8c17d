"""Model weights as bytes: whole, or as what changed since another version.

Owns hashes, blobs and their checks; knows no store or log.

A blob is one zstd frame around one safetensors file. A whole blob has the tensors under their own
names.

A change overwrites bytes. A value's bytes are told apart by significance, and for byte k of a
tensor the file has two entries: `gaps<k>/NAME`, where it changes, and `bytes<k>/NAME`, what is
there now. A gap byte g < 255 says: g values keep their byte, the next one changes. 255 says: 255
values keep theirs. Values 3 and 300 of a tensor change: gaps 3, 255, 41.

Why so, in bits per changed bfloat16 value, N(0, 0.02) with 1 %, 5 %, 30 % and 90 % moved by one
unit in the last place:

| share | gaps | 2-byte gaps, split | mask | bytes that changed | both, split | side by side |
|---|---|---|---|---|---|---|
| 1 % | 8.1 | 8.7 | 14.3 | 8.2 | 11.8 | 12.5 |
| 5 % | 5.8 | 5.8 | 7.6 | 8.1 | 11.5 | 12.5 |
| 30 % | 3.6 | 3.6 | 3.0 | 8.1 | 11.4 | 12.5 |
| 90 % | 1.1 | 1.1 | 0.6 | 8.1 | 11.4 | 12.5 |

A step seldom carries into the high byte, so that leaving it out saves more than any way to code it.
A mask would save 5 % of the whole change from 30 % on, and a whole tensor (12.5 bits a value) is
never smaller: neither is worth a second form.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from motley.exchange.frames import FrameError, declared_bytes, decompressed
from motley.models.policy import Policy
from motley.records import Blob, Precision

State = dict[str, Tensor]  # name -> value, on the CPU, names in order
Bytes = NDArray[np.uint8]

BLOB_BYTES = 64 * 2**20  # uncompressed; a tensor above it has a blob of its own
MAX_RAW_BYTES = 2**31
LEVEL = 3

_DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.uint8: "U8",  # two values in 4 bits each, of what does not train
}
_SKIP = 255
_ENTRY_BYTES = 256  # more than safetensors writes about a tensor, its name aside
# What safetensors and torch raise on bytes that are no file of tensors they know.
_UNREADABLE = (
    SafetensorError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    RuntimeError,
    AssertionError,
)


class WeightsError(ValueError):
    """Weights that cannot be what they should be: what, got, expected."""


# States


def trained_state(policy: Policy, precision: Precision) -> State:
    """A copy of what trains, rounded to the precision."""
    policy.fetch()
    return _state(policy.trained(), _DTYPES[precision])


def frozen_state(policy: Policy) -> State:
    """A copy of what does not train."""
    return _state(frozen_parameters(policy), None)


def frozen_parameters(policy: Policy) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and values of what does not train."""
    return ((name, p) for name, p in policy.model.named_parameters() if not p.requires_grad)


def _state(parameters: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype | None) -> State:
    copies = {
        name: p.detach().to("cpu", dtype or p.dtype, copy=True).contiguous()
        for name, p in parameters
    }
    return _sorted(copies)


def _sorted(state: State) -> State:
    return {name: state[name] for name in sorted(state)}


def take_state(policy: Policy, state: State) -> None:
    """Give the policy's parameters these values. Nothing changes if one of them does not fit."""
    parameters = dict(policy.model.named_parameters())
    unknown = sorted(state.keys() - parameters.keys())
    if unknown:
        raise WeightsError(
            f"weights name {_some(unknown)}; the model has no such parameters, but "
            f"{_some(sorted(parameters))}"
        )
    check_shapes(state, {name: parameters[name] for name in state})
    with torch.no_grad():
        for name, value in state.items():
            parameters[name].copy_(value)


def check_shapes(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse other names or other shapes than expected."""
    lacking, further = (
        sorted(expected.keys() - state.keys()),
        sorted(state.keys() - expected.keys()),
    )
    if lacking or further:
        raise WeightsError(
            f"weights lack {_some(lacking)} and add {_some(further)}; expected {len(expected)} "
            "tensors by their names"
        )
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise WeightsError(
                f"{name} has shape {list(value.shape)}; expected {list(expected[name].shape)}"
            )


def check_precision(state: State, precision: Precision) -> None:
    for name, value in state.items():
        if value.dtype != _DTYPES[precision]:
            raise WeightsError(f"{name} is {value.dtype}; expected {precision}")


def check_finite(state: State) -> None:
    """Refuse weights with which nothing can be sampled."""
    for name, value in state.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise WeightsError(f"{name} has values that are no finite numbers")


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}" if names else "nothing"


def state_hash(state: State) -> bytes:
    """sha256 over names, dtypes, shapes and values: the same on every machine."""
    digest = hashlib.sha256()
    for name, value in _sorted(state).items():
        digest.update(
            msgspec.json.encode([name, _dtype_name(name, value), list(value.shape)]) + b"\n"
        )
        digest.update(np.ascontiguousarray(_bytes(value)).data)
    return digest.digest()


def _dtype_name(name: str, value: Tensor) -> str:
    if value.dtype not in _DTYPE_NAMES:
        raise WeightsError(
            f"{name} is {value.dtype}; expected one of {', '.join(map(str, _DTYPE_NAMES))}"
        )
    return _DTYPE_NAMES[value.dtype]


def _bytes(value: Tensor) -> Bytes:
    """The bytes of every value [numel, bytes], the least significant first.

    Writing to them writes to a contiguous tensor.
    """
    table: Bytes = (
        value.contiguous()
        .flatten()
        .view(torch.uint8)
        .numpy()
        .reshape(value.numel(), value.element_size())
    )
    return table if sys.byteorder == "little" else table[:, ::-1]


# Encoding


def encode_whole(state: State) -> list[bytes]:
    """Blobs with all of a state."""
    for name, value in state.items():
        _dtype_name(name, value)
    return list(_blobs(_sorted(state).items()))


def encode_change(base: State, new: State) -> list[bytes]:
    """Blobs that make `new` out of `base`; none if no bit differs."""
    _check_alike(base, new)
    return list(
        _blobs(entry for name in sorted(new) for entry in _changed(name, base[name], new[name]))
    )


def _check_alike(base: State, new: State) -> None:
    check_shapes(new, base)
    for name, value in new.items():
        if _dtype_name(name, value) != _dtype_name(name, base[name]):
            raise WeightsError(
                f"{name} is {value.dtype}; expected {base[name].dtype}, as in the base"
            )


def _changed(name: str, base: Tensor, new: Tensor) -> Iterator[tuple[str, Tensor]]:
    before, after = _bytes(base), _bytes(new)
    for place in range(new.element_size()):
        positions = np.flatnonzero(before[:, place] != after[:, place])
        if len(positions):
            yield f"gaps{place}/{name}", torch.from_numpy(_gaps(positions))
            yield f"bytes{place}/{name}", torch.from_numpy(after[positions, place])


def _gaps(positions: NDArray[np.int64]) -> Bytes:
    skips, rest = np.divmod(np.diff(positions, prepend=-1) - 1, _SKIP)
    ends = np.cumsum(skips + 1)
    gaps = np.full(ends[-1], _SKIP, np.uint8)
    gaps[ends - 1] = rest
    return gaps


def _blobs(entries: Iterable[tuple[str, Tensor]]) -> Iterator[bytes]:
    """Entries, in their order, in as few files as may be."""
    file: dict[str, Tensor] = {}
    size = 0
    for name, value in entries:
        entry_bytes = value.nbytes + len(msgspec.json.encode(name)) + _ENTRY_BYTES
        if entry_bytes > MAX_RAW_BYTES:
            raise WeightsError(
                f"{name} has {value.nbytes} bytes; expected at most {MAX_RAW_BYTES}, which is "
                "what a reader takes"
            )
        if file and size + entry_bytes > BLOB_BYTES:
            yield _compress(file)
            file, size = {}, 0
        file[name] = value
        size += entry_bytes
    if file:
        yield _compress(file)


def _compress(file: dict[str, Tensor]) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(
        save({name: value.contiguous() for name, value in file.items()})
    )


# Blobs


def describe(blobs: Sequence[bytes]) -> tuple[Blob, ...]:
    """What a manifest says of these blobs."""
    return tuple(
        Blob(sha256=hashlib.sha256(b).hexdigest(), num_bytes=len(b), raw_bytes=_raw_bytes(b))
        for b in blobs
    )


def check_blob(blob: Blob, content: bytes) -> None:
    """Refuse bytes that are not what a manifest says; nothing is decompressed."""
    if len(content) != blob.num_bytes:
        raise WeightsError(
            f"blob {blob.sha256} has {len(content)} bytes; expected {blob.num_bytes}"
        )
    got = hashlib.sha256(content).hexdigest()
    if got != blob.sha256:
        raise WeightsError(f"blob has sha256 {got}; expected {blob.sha256}")
    declared = _raw_bytes(content)
    if declared != blob.raw_bytes:
        raise WeightsError(
            f"blob {blob.sha256} declares {declared} bytes uncompressed; expected {blob.raw_bytes}"
        )


def most_bytes(parameters: Iterable[Tensor]) -> int:
    """More than any blobs of these parameters have in all.

    Whole or as a change, compressed or not.
    """
    return sum(8 * p.numel() + 8 * 1024 for p in parameters) + 2**16


def _raw_bytes(content: bytes) -> int:
    try:
        return declared_bytes(content, MAX_RAW_BYTES)
    except FrameError as error:
        raise WeightsError(f"blob {error}") from None


def _raw(content: bytes) -> bytes:
    try:
        return decompressed(content, MAX_RAW_BYTES)
    except FrameError as error:
        raise WeightsError(f"blob {error}") from None


# Decoding


def decode_whole(blobs: Sequence[bytes]) -> State:
    """The state that `encode_whole` was given."""
    state = _sorted(_entries(blobs))
    for name, value in state.items():
        _dtype_name(name, value)
    return state


def apply_change(base: State, blobs: Sequence[bytes]) -> State:
    """The state that `encode_change` was given as `new`. The base stays as it is."""
    entries = _entries(blobs)
    state = {name: _overwritten(name, base[name], entries) for name in sorted(base)}
    if entries:
        raise WeightsError(
            f"change has {_some(sorted(entries))}, for which the base has no tensor or no such byte"
        )
    return state


def _entries(blobs: Sequence[bytes]) -> dict[str, Tensor]:
    entries: dict[str, Tensor] = {}
    for blob in blobs:
        file = _file(_raw(blob))
        twice = sorted(entries.keys() & file.keys())
        if twice:
            raise WeightsError(f"blobs hold {_some(twice)} twice; expected every name once")
        entries |= file
    return entries


def _file(raw: bytes) -> dict[str, Tensor]:
    try:
        return load(raw)
    except _UNREADABLE as error:
        raise WeightsError(f"blob does not hold a safetensors file: {error}") from None


def _overwritten(name: str, base: Tensor, entries: dict[str, Tensor]) -> Tensor:
    """A copy of the base with its entries written over it; they are taken out of `entries`."""
    new = base.clone(memory_format=torch.contiguous_format)
    table = _bytes(new)
    for place in range(base.element_size()):
        gaps, changed = (
            _byte_entry(f"{kind}{place}/{name}", entries) for kind in ("gaps", "bytes")
        )
        positions = _positions(name, gaps, base.numel())
        if len(positions) != len(changed):
            raise WeightsError(
                f"change of {name} has {len(changed)} new bytes {place}; expected one for each of "
                f"{len(positions)} positions"
            )
        table[positions, place] = changed
    return new


def _byte_entry(key: str, entries: dict[str, Tensor]) -> Bytes:
    entry = entries.pop(key, torch.empty(0, dtype=torch.uint8))
    if entry.dtype != torch.uint8 or entry.dim() != 1:
        raise WeightsError(
            f"{key} is {entry.dtype} of {entry.dim()} dimensions; expected a row of bytes"
        )
    return entry.numpy()


def _positions(name: str, gaps: Bytes, numel: int) -> NDArray[np.int64]:
    if len(gaps) > numel:  # each stands for one value at least
        raise WeightsError(
            f"change of {name} has {len(gaps)} gaps; expected at most one for each of its {numel} "
            "values"
        )
    changes = gaps != _SKIP
    positions = np.cumsum(gaps + changes.astype(np.int64))[changes] - 1
    if len(positions) and positions[-1] >= numel:
        raise WeightsError(
            f"change of {name} writes to value {positions[-1]}; expected less than its {numel}"
        )
    return positions
