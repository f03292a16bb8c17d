"""What a group says of itself and of its rollouts, held against the crew's rules.

Each function raises a Refusal that names what is wrong, or nothing. Cheap checks come first: those
of the header before a token is read, those of the tokens in arrays. Knows no sender's standing, no
problem and no reward function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from motley.exchange import BranchHeader, GroupHeader, RolloutArrays
from motley.records import Origin
from motley.trust.rules import (
    LOGPROB_RANGE,
    MOST_SURPRISE_NATS,
    ROUNDING_NATS,
    Refusal,
    Rules,
)

MAX_REWARD = 1e6  # far inside float32, in which advantages are computed
MAX_MODEL_CHARACTERS = 200
MAX_TIME_S = 2**33  # since 1970: some day of the year 2242


def check_header(rules: Rules, header: GroupHeader) -> Origin:
    """Hold what stands before the rollouts to the rules; who made the group, with what."""
    origin = header.origin()
    if rules.vocabulary and origin.vocabulary != rules.vocabulary:
        expected = (
            f"{rules.vocabulary!r}, and no table of {header.peer}'s with it stands before it on "
            "the log; expected the table first"
            if rules.mixed
            else f"the crew's {rules.vocabulary!r}"
        )
        raise Refusal("vocabulary", f"vocabulary {origin.vocabulary[:80]!r} is not {expected}")
    if origin.sampling != rules.sampling:
        raise Refusal("sampling", f"sampled with {origin.sampling}, not with {rules.sampling}")
    rules.check_version(origin.version)
    check_time(header.created_s)
    if len(origin.model) > MAX_MODEL_CHARACTERS or not origin.model.isprintable():
        raise Refusal(
            "model",
            f"model {origin.model[:80]!r} is not printable, or longer than {MAX_MODEL_CHARACTERS} "
            "characters",
        )
    if header.num_rollouts != rules.rollouts_per_group:
        raise Refusal(
            "group_size", f"{header.num_rollouts} rollouts, not {rules.rollouts_per_group}"
        )
    return origin


def check_branch(rules: Rules, header: GroupHeader) -> None:
    """Hold where a group's rollouts begin to the rules.

    Continuations have slots behind those of problems, and one of the problems that all peers had
    before.
    """
    if not isinstance(header, BranchHeader):
        if header.slot >= rules.slots:
            raise Refusal("assignment", f"slot {header.slot} is for continuations, and it has none")
        return
    if header.slot < rules.slots:
        raise Refusal("assignment", f"slot {header.slot} is for a problem, not for continuations")
    if not (0 <= header.met_round < header.round and 0 <= header.met_slot < rules.met_slots):
        raise Refusal(
            "assignment",
            f"its problem is of round {header.met_round}, slot {header.met_slot}; expected one "
            f"that all peers had before round {header.round}",
        )
    if not 0 < len(header.prefix) < rules.max_tokens:
        raise Refusal(
            "prefix",
            f"a prefix of {len(header.prefix)} tokens; expected 1 to {rules.max_tokens - 1}",
        )
    ends = set(rules.end_ids)
    if not all(0 <= t < rules.vocabulary_size and t not in ends for t in header.prefix):
        raise Refusal("prefix", "a token of the prefix is none of the vocabulary's, or ends it")


def check_time(created_s: float) -> None:
    if not 0 <= created_s <= MAX_TIME_S:
        raise Refusal("time", f"created_s is {created_s}; expected 0 to {MAX_TIME_S}")


def check_rollouts(rules: Rules, arrays: RolloutArrays, num_before: int = 0) -> None:
    """Hold every token, log-prob, ending and reward to the rules.

    `num_before`: tokens of a prefix, which count to the length.
    """
    most = rules.max_tokens - num_before
    with np.errstate(all="ignore"):  # what is no number fails its comparison
        shortest, longest = arrays.length_R.min(initial=1), arrays.length_R.max(initial=1)
        _check("length", shortest >= 1 and longest <= most, arrays)
        # none is negative
        _check("token", arrays.token_N.max(initial=0) < rules.vocabulary_size, arrays)
        _check("ending", _has_right_endings(rules.end_ids, most, arrays), arrays)
        low, high = arrays.logprob_N.min(initial=0), arrays.logprob_N.max(initial=0)
        _check("logprob", rules.least_logprob <= low and high <= LOGPROB_RANGE[1], arrays)
        _check("logprob", _surprise_nats(rules, arrays) <= MOST_SURPRISE_NATS, arrays)
        _check("reward", abs(arrays.reward_R).max(initial=0) <= MAX_REWARD, arrays)


def _check(what: str, right: bool | np.bool_, arrays: RolloutArrays) -> None:
    if not right:
        raise Refusal(what, f"one of its {len(arrays.length_R)} rollouts has a bad {what}")


def _has_right_endings(end_ids: Sequence[int], most: int, arrays: RolloutArrays) -> bool:
    """What stopped ends in its only end token; what did not has none, and used up its length.

    `end_ids`: none where they are not known.
    """
    used_up_R = arrays.length_R[~arrays.stopped_R] == most
    if not used_up_R.all() or not end_ids:
        return bool(used_up_R.all())
    last_R = arrays.stop_R[arrays.stopped_R] - 1
    return np.array_equal(np.flatnonzero(_are_ends(arrays.token_N, end_ids)), last_R)


def _are_ends(token_N: npt.NDArray[np.int64], end_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
    if len(end_ids) > 4:
        return np.isin(token_N, end_ids)
    found_N = token_N == end_ids[0]
    for end_id in end_ids[1:]:
        found_N |= token_N == end_id
    return found_N


def _surprise_nats(rules: Rules, arrays: RolloutArrays) -> float:
    """How much less likely a rollout ever was than if all tokens had been drawn evenly, at most."""
    excess_N = -arrays.logprob_N.astype(np.float64) - (math.log(rules.num_choices) + ROUNDING_NATS)
    bound = float(np.maximum(excess_N, 0).sum())
    if bound <= MOST_SURPRISE_NATS:
        return bound
    sum_N = np.cumsum(excess_N)
    start_R = arrays.stop_R - arrays.length_R
    before_R = sum_N[start_R] - excess_N[start_R]
    return float((sum_N - np.repeat(before_R, arrays.length_R)).max())
