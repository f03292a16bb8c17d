"""The sections of a group's record: tokens, log-probs, rewards and endings as bytes.
docs/protocol.md has them byte by byte.

What is read stays in arrays until it has been checked: a reader pays for Python's own numbers only
where it keeps them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from motley.records import Ending, Rollout

MAX_ROLLOUTS = 2**14  # of one group, and
MAX_TOKENS = 2**20  # tokens in all: what decoding may cost in memory
STEPS_PER_NAT = 1700  # a log-prob is off by half a step at most, a ratio by 0.03 %
LEAST_LOGPROB, MOST_LOGPROB = -(2**16 - 1) / STEPS_PER_NAT, 0.5 / STEPS_PER_NAT

_ENDINGS: tuple[Ending, Ending] = ("stop", "length")
_OTHER_CUT = 2  # a bit of the ending: not canonical
_VARINT_BYTES = 5
_MOST_VARINTS = 1 << 16  # that are remembered
_MOST_LATELY_BYTES = 4 << 20  # of sections; their arrays take up to eight times as much

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]
Bytes = npt.NDArray[np.uint8]


class WireError(ValueError):
    """Bytes that are no record of a known schema. `reason` is one word to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class RolloutArrays:
    """The rollouts of a group, R of them, with N tokens in all, one behind the other."""

    reward_R: Floats
    stopped_R: npt.NDArray[np.bool_]  # the ending is "stop", not "length"
    canonical_R: npt.NDArray[np.bool_]
    length_R: Integers
    token_N: Integers
    logprob_N: Floats

    @property
    def stop_R(self) -> Integers:
        """Where each rollout ends among the tokens."""
        return np.cumsum(self.length_R)

    def rollouts(self) -> tuple[Rollout, ...]:
        tokens, logprobs = self.token_N.tolist(), self.logprob_N.tolist()
        made, start = [], 0
        for stop, reward, stopped, canonical in zip(
            self.stop_R.tolist(),
            self.reward_R.tolist(),
            self.stopped_R.tolist(),
            self.canonical_R.tolist(),
            strict=True,
        ):
            made.append(
                Rollout(
                    tokens=tuple(tokens[start:stop]),
                    logprobs=tuple(logprobs[start:stop]),
                    reward=reward,
                    ending="stop" if stopped else "length",
                    canonical=canonical,
                )
            )
            start = stop
        return tuple(made)


class _Lately:
    """The newest sections with the arrays they hold: written here, or read once.

    A peer reads its own records back, and all peers of one process read the same ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # by the sections, how many rollouts they are of, and whether log-probs are not rounded
        self._arrays: OrderedDict[tuple[bytes, int, bool], RolloutArrays] = OrderedDict()
        self._num_bytes = 0

    def find(self, key: tuple[bytes, int, bool]) -> RolloutArrays | None:
        return self._arrays.get(key)

    def add(self, key: tuple[bytes, int, bool], arrays: RolloutArrays) -> None:
        for name in RolloutArrays.__slots__:
            getattr(arrays, name).flags.writeable = False  # others hold it too
        with self._lock:
            if key in self._arrays:
                return
            self._arrays[key] = arrays
            self._num_bytes += len(key[0])
            while self._num_bytes > _MOST_LATELY_BYTES:
                (sections, *_), _ = self._arrays.popitem(last=False)
                self._num_bytes -= len(sections)


_lately = _Lately()


# Encoding


class Sections(NamedTuple):
    """Rewards, endings and lengths; tokens; log-probs: cut where the kind of bytes changes."""

    lossless: bool  # log-probs are not rounded
    parts: list[bytes]


def encode_sections(id: str, rollouts: Sequence[Rollout], lossless: bool) -> Sections:
    """Without rounding also where a log-prob is beyond what the rounded form can say."""
    if any(len(rollout.tokens) != len(rollout.logprobs) for rollout in rollouts):
        raise ValueError(
            f"a rollout of group {id} has not as many log-probs as tokens; expected one each"
        )
    logprob_N = _logprobs(rollouts)
    if len(rollouts) > MAX_ROLLOUTS or len(logprob_N) > MAX_TOKENS:
        raise ValueError(
            f"group {id} has {len(rollouts)} rollouts and {len(logprob_N)} tokens; a record takes "
            f"{MAX_ROLLOUTS}, {MAX_TOKENS}: "
            "use a smaller group_size or max_tokens"
        )
    reward_R = _float32([r.reward for r in rollouts])
    endings = bytes(_ENDINGS.index(r.ending) + _OTHER_CUT * (not r.canonical) for r in rollouts)
    lengths = [len(r.tokens) for r in rollouts]
    tokens = list(chain.from_iterable(r.tokens for r in rollouts))
    fits = bool(((logprob_N >= LEAST_LOGPROB) & (logprob_N <= MOST_LOGPROB)).all())
    lossless = lossless or not fits
    if lossless:
        written_N: Floats = _float32(logprob_N)
        logprobs = [_planes(written_N)]
    else:
        step_N = _steps(logprob_N)
        written_N, logprobs = _of_steps(step_N), _steps_bytes(step_N)
    first = reward_R.tobytes() + endings + varint_bytes(lengths)
    parts = [first, varint_bytes(tokens), *logprobs]
    held = RolloutArrays(
        reward_R,
        *_endings(np.frombuffer(endings, np.uint8)),
        np.fromiter(lengths, np.int64),
        np.fromiter(tokens, np.int64),
        written_N,
    )
    _lately.add((b"".join(parts), len(rollouts), lossless), held)
    return Sections(lossless, parts)


def _logprobs(rollouts: Sequence[Rollout]) -> npt.NDArray[np.float64]:
    every = chain.from_iterable(r.logprobs for r in rollouts)
    return np.fromiter(every, dtype=np.float64)


def _float32(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):  # what float32 cannot hold becomes infinite
        return np.asarray(values, dtype=np.float64).astype("<f4")


def _planes(logprob_N: Floats) -> bytes:
    """All first bytes, then all second ones, and so on: alike, they compress better."""
    return logprob_N.view(np.uint8).reshape(-1, 4).T.tobytes()


def _steps(logprob_N: npt.NDArray[np.float64]) -> Integers:
    return np.maximum(np.rint(-logprob_N * STEPS_PER_NAT).astype(np.int64), 0)


def _of_steps(step_N: Integers) -> Floats:
    return -step_N / STEPS_PER_NAT


def _steps_bytes(step_N: Integers) -> list[bytes]:
    """Numbers of 16 bits: how long each is in binary, a byte each; then the bits below its leading
    one, lowest first, in a row.

    The lengths of confident tokens are short and alike, and compress; the bits below do not, and
    are not rounded up to bytes.
    """
    length_N = np.frexp(step_N)[1]
    halves_N2 = step_N.astype("<u2").view(np.uint8).reshape(-1, 2)
    bit_NK = np.unpackbits(halves_N2, axis=1, bitorder="little")
    below_NK = np.arange(bit_NK.shape[1]) < length_N[:, None] - 1
    rest = np.packbits(bit_NK[below_NK], bitorder="little")
    return [length_N.astype(np.uint8).tobytes(), rest.tobytes()]


class _Varints(dict[int, bytes]):
    """Numbers as varints, each made once: the same ids come again and again."""

    def __missing__(self, number: int) -> bytes:
        if not 0 <= number < 1 << 7 * _VARINT_BYTES:
            raise ValueError(f"numbers of a record go from 0 to 2^35; got {number}")
        rest, digits = int(number), bytearray()
        while rest > 127:
            digits.append(rest & 127 | 128)
            rest >>= 7
        made = bytes((*digits, rest))
        if len(self) < _MOST_VARINTS:
            self[number] = made
        return made


_varints = _Varints()


def varint_bytes(numbers: Iterable[int]) -> bytes:
    """Seven bits a byte, lowest first; a set eighth says that more follow."""
    return b"".join(map(_varints.__getitem__, numbers))


# Decoding


def decode_sections(
    sections: bytes, num_rollouts: int, lossless: bool, rollout_tokens: int = MAX_TOKENS
) -> RolloutArrays:
    """`rollout_tokens`: longer rollouts are refused before a token is read."""
    key = (sections, num_rollouts, lossless)
    arrays = _lately.find(key)
    if arrays is None or arrays.length_R.max(initial=0) > rollout_tokens:
        arrays = _decoded(sections, num_rollouts, lossless, rollout_tokens)
        _lately.add(key, arrays)
    return arrays


def _decoded(
    sections: bytes, num_rollouts: int, lossless: bool, rollout_tokens: int
) -> RolloutArrays:
    if not 0 <= num_rollouts <= len(sections):
        raise WireError(
            "truncated", f"record declares {num_rollouts} rollouts in {len(sections)} bytes"
        )
    if num_rollouts > MAX_ROLLOUTS:
        raise WireError(
            "size", f"group has {num_rollouts} rollouts; at most {MAX_ROLLOUTS} are read"
        )
    rewards_stop, endings_stop = 4 * num_rollouts, 5 * num_rollouts
    _must_have(sections, endings_stop)
    ending_R = np.frombuffer(sections, np.uint8, num_rollouts, rewards_stop)
    if ending_R.max(initial=0) >= 2 * _OTHER_CUT:
        raise WireError("malformed", "an ending is neither stop nor length")
    length_R, start = varints(sections, endings_stop, num_rollouts)
    total = int(length_R.sum())
    if total > MAX_TOKENS:
        raise WireError("size", f"group has {total} tokens; at most {MAX_TOKENS} are read")
    if length_R.max(initial=0) > rollout_tokens:
        raise WireError(
            "length", f"a rollout has {length_R.max()} tokens; at most {rollout_tokens} are read"
        )
    token_N, start = varints(sections, start, total)
    decode = _exact_logprobs if lossless else _rounded_logprobs
    return RolloutArrays(
        np.frombuffer(sections, "<f4", num_rollouts),
        *_endings(ending_R),
        length_R,
        token_N,
        decode(sections[start:], total),
    )


def _endings(ending_R: Bytes) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which stopped, and which are canonical."""
    return ending_R & 1 == 0, ending_R < _OTHER_CUT


def _must_have(content: bytes, size: int, exactly: bool = False) -> None:
    if len(content) < size:
        raise WireError("truncated", f"sections have {len(content)} bytes where {size} are due")
    if exactly and len(content) > size:
        raise WireError("malformed", f"sections have {len(content)} bytes where {size} are due")


def _exact_logprobs(planes: bytes, count: int) -> Floats:
    _must_have(planes, 4 * count, exactly=True)
    bytes_4N = np.frombuffer(planes, np.uint8).reshape(4, count)
    return np.ascontiguousarray(bytes_4N.T).reshape(-1).view("<f4")


def _rounded_logprobs(section: bytes, count: int) -> Floats:
    _must_have(section, count)
    length_N = np.frombuffer(section, np.uint8, count).astype(np.int64)
    if length_N.max(initial=0) > 16:
        raise WireError("malformed", "a log-prob has more than 16 bits")
    # a number without a leading one has none below it either
    width_N = np.maximum(length_N - 1, 0)
    num_bits = int(width_N.sum())
    _must_have(section, count + (num_bits + 7) // 8, exactly=True)
    start_N = np.cumsum(width_N) - width_N
    # three bytes hold 15 bits wherever in the first they begin
    bits = np.frombuffer(section + bytes(3), np.uint8, offset=count).astype(np.int64)
    at_N = start_N >> 3
    word_N = (bits[at_N] | bits[at_N + 1] << 8 | bits[at_N + 2] << 16) >> (start_N & 7)
    leading_N = np.left_shift(1, width_N)
    return _of_steps(np.where(length_N > 0, word_N & leading_N - 1 | leading_N, 0))


def varint(content: bytes) -> tuple[int, int]:
    """The number that some bytes begin with, and where it ends."""
    number = 0
    for place, byte in enumerate(content[:_VARINT_BYTES]):
        number |= (byte & 127) << 7 * place
        if byte < 128:
            return number, place + 1
    if len(content) < _VARINT_BYTES:
        raise WireError("truncated", "record ends in the middle of a number")
    raise WireError("malformed", "a number is longer than five bytes")


def varints(content: bytes, start: int, count: int) -> tuple[Integers, int]:
    """`count` numbers of at most 35 bits, seven bits a byte, lowest first; and where they end."""
    window = np.frombuffer(content, np.uint8, offset=min(start, len(content)))
    window = window[: _VARINT_BYTES * count]
    if len(window) >= count and window[:count].max(initial=0) < 128:
        return window[:count].astype(np.int64), start + count
    last_N = np.flatnonzero(window < 128)[:count]
    first_N = np.concatenate([[0], last_N + 1])  # one more: where what follows begins
    if np.diff(first_N).max(initial=0) > _VARINT_BYTES:
        raise WireError("malformed", "a number is longer than five bytes")
    if len(last_N) < count:
        too_long = len(window) - first_N[-1] >= _VARINT_BYTES
        raise (
            WireError("malformed", "a number is longer than five bytes")
            if too_long
            else WireError("truncated", "record ends in the middle of its numbers")
        )
    number_N = (window[first_N[:-1]] & 127).astype(np.int64)
    for place in range(1, int(np.diff(first_N).max())):
        long_N = np.flatnonzero(last_N - first_N[:-1] >= place)
        number_N[long_N] |= (window[first_N[long_N] + place] & 127).astype(np.int64) << 7 * place
    return number_N, start + int(first_N[-1])
