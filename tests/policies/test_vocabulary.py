from __future__ import annotations

import random

import pytest

from motley.policies.tiny import tiny_vocabulary
from motley.policies.vocabulary import word_vocabulary
from motley.tasks import load_task

KINDS = ["reverse", "sort", "increment", "sum", "difference", "product", "chain", "compare"]


def test_every_problem_of_the_digits_task_can_be_spelled() -> None:
    vocabulary, task = tiny_vocabulary(), load_task("digits", {"kinds": KINDS})
    for kind in KINDS:
        for seed in range(20):
            problem = task.draw(random.Random(seed), "train", kind)
            ids = vocabulary.encode(problem.prompt)
            assert vocabulary.decode(ids) == problem.prompt
            assert len(ids) == len(problem.prompt) - len(kind)  # the word is one token
            assert vocabulary.decode([*vocabulary.encode(problem.answer), vocabulary.end_id]) == problem.answer


def test_special_tokens_leave_no_text() -> None:
    vocabulary = tiny_vocabulary()
    assert vocabulary.decode([vocabulary.pad_id, *vocabulary.encode("12"), vocabulary.end_id]) == "12"


def test_text_that_cannot_be_spelled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the vocabulary cannot spell 'what\?'; tiny models know digits"):
        tiny_vocabulary().encode("what?")


def test_the_fingerprint_changes_with_any_id() -> None:
    same, moved = word_vocabulary(["a ", "b "], "01"), word_vocabulary(["b ", "a "], "01")
    assert same.fingerprint == word_vocabulary(["a ", "b "], "01").fingerprint
    assert same.fingerprint != moved.fingerprint
