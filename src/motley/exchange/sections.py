"""The sections of a group's record: tokens, log-probs, rewards and endings as bytes.
docs/protocol.md has them byte by byte.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

from motley.records import Ending, Rollout

MAX_ROLLOUTS = 2**14  # of one group, and
MAX_TOKENS = 2**20  # tokens in all: what decoding may cost in memory
STEPS_PER_NAT = 1700  # a log-prob is off by half a step at most, a ratio by 0.03 %
LEAST_LOGPROB, MOST_LOGPROB = -(2**16 - 1) / STEPS_PER_NAT, 0.5 / STEPS_PER_NAT

_ENDINGS: tuple[Ending, Ending] = ("stop", "length")


class WireError(ValueError):
    """Bytes that are no record of a known schema. `reason` is one word to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def encode_sections(id: str, rollouts: Sequence[Rollout], lossless: bool) -> list[bytes]:
    """Rewards, endings and lengths; tokens; log-probs: cut where the kind of bytes changes."""
    if any(len(rollout.tokens) != len(rollout.logprobs) for rollout in rollouts):
        raise ValueError(
            f"a rollout of group {id} has not as many log-probs as tokens; expected one each"
        )
    flat = [logprob for rollout in rollouts for logprob in rollout.logprobs]
    if len(rollouts) > MAX_ROLLOUTS or len(flat) > MAX_TOKENS:
        raise ValueError(
            f"group {id} has {len(rollouts)} rollouts and {len(flat)} tokens; a record takes "
            f"{MAX_ROLLOUTS}, {MAX_TOKENS}: "
            "use a smaller group_size or max_tokens"
        )
    rewards = _little_endian(array("f", (r.reward for r in rollouts))).tobytes()
    endings = bytes(_ENDINGS.index(r.ending) for r in rollouts)
    lengths = varint_bytes(len(r.tokens) for r in rollouts)
    tokens = varint_bytes(token for r in rollouts for token in r.tokens)
    logprobs = (
        [_planes(array("f", flat))]
        if lossless
        else _steps_bytes([max(0, round(-x * STEPS_PER_NAT)) for x in flat])
    )
    return [rewards + endings + lengths, tokens, *logprobs]


def fits_rounding(rollouts: Sequence[Rollout]) -> bool:
    """Whether every log-prob is within what the rounded form can say."""
    return all(
        LEAST_LOGPROB <= logprob <= MOST_LOGPROB
        for rollout in rollouts
        for logprob in rollout.logprobs
    )


def decode_sections(sections: bytes, num_rollouts: int, lossless: bool) -> tuple[Rollout, ...]:
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
    rewards = _little_endian(array("f", sections[:rewards_stop]))
    endings = sections[rewards_stop:endings_stop]
    if any(ending >= len(_ENDINGS) for ending in endings):
        raise WireError("malformed", "an ending is neither stop nor length")
    lengths, start = varints(sections, endings_stop, num_rollouts)
    total = sum(lengths)
    if total > MAX_TOKENS:
        raise WireError("size", f"group has {total} tokens; at most {MAX_TOKENS} are read")
    tokens, start = varints(sections, start, total)
    logprobs = (
        _exact_logprobs(sections[start:], total)
        if lossless
        else _rounded_logprobs(sections[start:], total)
    )
    rollouts, at = [], 0
    for length, reward, ending in zip(lengths, rewards, endings, strict=True):
        part = slice(at, at + length)
        rollouts.append(
            Rollout(
                tokens=tuple(tokens[part]),
                logprobs=tuple(logprobs[part]),
                reward=reward,
                ending=_ENDINGS[ending],
            )
        )
        at += length
    return tuple(rollouts)


def _must_have(content: bytes, size: int, exactly: bool = False) -> None:
    if len(content) < size:
        raise WireError("truncated", f"sections have {len(content)} bytes where {size} are due")
    if exactly and len(content) > size:
        raise WireError("malformed", f"sections have {len(content)} bytes where {size} are due")


def _exact_logprobs(planes: bytes, count: int) -> list[float]:
    _must_have(planes, 4 * count, exactly=True)
    content = bytearray(len(planes))
    for byte in range(4):
        content[byte::4] = planes[byte * count : (byte + 1) * count]
    return _little_endian(array("f", bytes(content))).tolist()


def _planes(values: array[float]) -> bytes:
    """All first bytes, then all second ones, and so on: alike, they compress better."""
    content = _little_endian(values).tobytes()
    return b"".join(content[byte::4] for byte in range(4))


def _steps_bytes(steps: list[int]) -> list[bytes]:
    """Numbers of 16 bits: how long each is in binary, a byte each; then the bits below its leading
    one, lowest first, in a row.

    The lengths of confident tokens are short and alike, and compress; the bits below do not, and
    are not rounded up to bytes.
    """
    packed, held, num_held = bytearray(), 0, 0
    for step in steps:
        width = step.bit_length() - 1
        if width > 0:
            held |= (step ^ 1 << width) << num_held
            num_held += width
            while num_held >= 8:
                packed.append(held & 255)
                held >>= 8
                num_held -= 8
    if num_held:
        packed.append(held)
    return [bytes(step.bit_length() for step in steps), bytes(packed)]


def _rounded_logprobs(section: bytes, count: int) -> list[float]:
    _must_have(section, count)
    lengths = section[:count]
    if max(lengths, default=0) > 16:
        raise WireError("malformed", "a log-prob has more than 16 bits")
    # a number without a leading one has none below it either
    num_bits = sum(lengths) - count + lengths.count(0)
    _must_have(section, count + (num_bits + 7) // 8, exactly=True)
    logprobs, at, held, num_held = [], count, 0, 0
    for length in lengths:
        width = length - 1
        if width <= 0:
            logprobs.append(-length / STEPS_PER_NAT)
            continue
        while num_held < width:
            held |= section[at] << num_held
            at += 1
            num_held += 8
        logprobs.append(-(held & (1 << width) - 1 | 1 << width) / STEPS_PER_NAT)
        held >>= width
        num_held -= width
    return logprobs


def _little_endian(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def varint_bytes(numbers: Iterable[int]) -> bytes:
    encoded = bytearray()
    for number in numbers:
        while number >= 128:
            encoded.append(number & 127 | 128)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


def varints(content: bytes, start: int, count: int) -> tuple[list[int], int]:
    """`count` numbers of at most 35 bits, seven bits a byte, lowest first; and where they end."""
    numbers = []
    try:
        for _ in range(count):
            byte = content[start]
            start += 1
            number = byte & 127
            shift = 7
            while byte >= 128:
                if shift > 28:
                    raise WireError("malformed", "a number is longer than five bytes")
                byte = content[start]
                start += 1
                number |= (byte & 127) << shift
                shift += 7
            numbers.append(number)
    except IndexError:
        raise WireError("truncated", "record ends in the middle of its numbers") from None
    return numbers, start
