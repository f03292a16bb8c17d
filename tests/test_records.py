from __future__ import annotations

import msgspec
import pytest

from motley.records import Problem, Sampling


def test_equal_problems_have_equal_ids() -> None:
    first = Problem(kind="sum", prompt="1+1=", answer="2", columns={"level": 1, "unit": "m"})
    second = Problem(kind="sum", prompt="1+1=", answer="2", columns={"unit": "m", "level": 1})
    assert first.id == second.id


@pytest.mark.parametrize(
    "other",
    [
        Problem(kind="product", prompt="1+1=", answer="2"),
        Problem(kind="sum", prompt="1+2=", answer="2"),
        Problem(kind="sum", prompt="1+1=", answer="3"),
        # The fields are kept apart: no text can move from one to the next.
        Problem(kind="sum1", prompt="+1=", answer="2"),
        Problem(kind="sum", prompt="1+1", answer="=2"),
    ],
)
def test_different_problems_have_different_ids(other: Problem) -> None:
    assert other.id != Problem(kind="sum", prompt="1+1=", answer="2").id


def test_problems_that_differ_in_a_column_have_different_ids() -> None:
    assert (
        Problem(prompt="p", columns={"tests": "a"}).id
        != Problem(prompt="p", columns={"tests": "b"}).id
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 is outside 0..10"),
        ({"temperature": float("nan")}, "temperature=nan is outside"),
        ({"temperature": 11.0}, "temperature=11.0 is outside"),
        ({"top_k": -1}, "top_k=-1 is negative; 0 keeps every token"),
        ({"top_p": 0.0}, "top_p=0.0 is outside"),
        ({"top_p": 1.5}, "1.0 keeps every token"),
        ({"max_tokens": 0}, "max_tokens=0 leaves no room"),
    ],
)
def test_sampling_refuses_what_cannot_be_drawn(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        Sampling(**settings)


def test_sampling_refuses_the_same_when_decoded_and_when_replaced() -> None:
    with pytest.raises(msgspec.ValidationError, match="top_k=-1 is negative"):
        msgspec.convert({"top_k": -1}, Sampling)
    with pytest.raises(ValueError, match="max_tokens=0"):
        msgspec.structs.replace(Sampling(), max_tokens=0)


def test_sampling_keeps_its_limits_inclusive() -> None:
    made = Sampling(temperature=0.0, top_k=0, top_p=1.0, max_tokens=1)
    assert (made.temperature, made.max_tokens) == (0.0, 1)
    assert Sampling(temperature=10.0).temperature == 10.0
