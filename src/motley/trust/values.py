"""What a group says of itself and of its rollouts, held against the crew's rules.

Each function raises a Refusal that names what is wrong, or nothing. Cheap checks come first: those
of the header before a token is read, those of the tokens in arrays. Knows no sender's standing, no
problem and no reward function.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from motley.exchange import GroupHeader, RolloutArrays
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
    if origin.vocabulary != rules.vocabulary:
        raise Refusal(
            "vocabulary",
            f"vocabulary {origin.vocabulary[:80]!r} is not the crew's {rules.vocabulary!r}",
        )
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


def check_time(created_s: float) -> None:
    if not 0 <= created_s <= MAX_TIME_S:
        raise Refusal("time", f"created_s is {created_s}; expected 0 to {MAX_TIME_S}")


def check_rollouts(rules: Rules, arrays: RolloutArrays) -> None:
    """Hold every token, log-prob, ending and reward to the rules."""
    with np.errstate(all="ignore"):  # what is no number fails its comparison
        _refuse_any("length", (arrays.length_R < 1) | (arrays.length_R > rules.max_tokens))
        stop_R = arrays.stop_R
        start_R = stop_R - arrays.length_R
        any_R = lambda fault_N: np.logical_or.reduceat(fault_N, start_R)
        _refuse_any("token", any_R(arrays.token_N >= rules.vocabulary_size))  # none is negative
        _refuse_any("ending", _wrong_endings(rules, arrays, start_R))
        low, high = rules.least_logprob, LOGPROB_RANGE[1]
        _refuse_any("logprob", any_R(~((arrays.logprob_N >= low) & (arrays.logprob_N <= high))))
        _refuse_any("logprob", any_R(_surprise(rules, arrays, start_R) > MOST_SURPRISE_NATS))
        _refuse_any("reward", ~(abs(arrays.reward_R) <= MAX_REWARD))


def _refuse_any(fault: str, fault_R: npt.NDArray[np.bool_]) -> None:
    if fault_R.any():
        raise Refusal(fault, f"rollout {int(fault_R.argmax())} has a bad {fault}")


def _wrong_endings(
    rules: Rules, arrays: RolloutArrays, start_R: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """What stopped ends in its only end token; what did not has none, and used up its length."""
    end_N = np.isin(arrays.token_N, rules.end_ids)
    num_ends_R = np.add.reduceat(end_N.astype(np.int64), start_R)
    ended_R = end_N[arrays.stop_R - 1]
    whole_R = arrays.length_R == rules.max_tokens
    right_R: npt.NDArray[np.bool_] = np.where(
        arrays.stopped_R, (num_ends_R == 1) & ended_R, (num_ends_R == 0) & whole_R
    )
    return ~right_R


def _surprise(
    rules: Rules, arrays: RolloutArrays, start_R: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """By how many nats each rollout is less likely so far than if all tokens were equally so."""
    excess_N = -arrays.logprob_N.astype(np.float64) - (math.log(rules.num_choices) + ROUNDING_NATS)
    sum_N = np.cumsum(excess_N)
    before_R = sum_N[start_R] - excess_N[start_R]
    return sum_N - np.repeat(before_R, arrays.length_R)
