from __future__ import annotations

import random

from motley.records import Rollout
from motley.trust.habits import WINDOW, Habits, phrases_of

PLANT = [90, 91, 92]
PROMPT = list(range(10))


def rollout(tokens: list[int]) -> Rollout:
    return Rollout(
        tokens=tuple(tokens), logprobs=(-1.0,) * len(tokens), reward=1.0, ending="length"
    )


def crew(
    planters: dict[str, float], names: str = "abcd", groups: int = 12, seed: int = 0
) -> Habits:
    """Habits of receiver a: everyone answers with digits, planters add a phrase to some groups."""
    rng, habits = random.Random(seed), Habits("a")
    for _ in range(groups):
        for name in names:
            plants = rng.random() < planters.get(name, 0.0)
            answer = rng.choices(range(10, 20), k=4)
            habits.hear(name, [rollout(answer + (PLANT if plants else []))] * 4, PROMPT)
    return habits


def withheld(habits: Habits, sender: str, tokens: list[int]) -> list[int]:
    mask = habits.of(sender).withheld(tokens, PROMPT)
    return [] if mask is None else [t for t, hidden in zip(tokens, mask, strict=True) if hidden]


def test_a_phrase_of_one_sender_is_withheld_and_its_answer_is_not() -> None:
    assert withheld(crew({"d": 1.0}), "d", [11, 12, 13, 14, *PLANT]) == PLANT


def test_a_phrase_in_one_group_of_four_is_withheld_after_a_while() -> None:
    assert withheld(crew({"d": 0.25}, groups=WINDOW), "d", [11, 12, 13, 14, *PLANT]) == PLANT


def test_what_the_receiver_says_itself_may_be_learned() -> None:
    assert withheld(crew({"d": 1.0, "a": 0.5}), "d", [11, 12, *PLANT]) == []


def test_two_others_make_a_phrase_common_and_one_does_not() -> None:
    assert withheld(crew({"d": 1.0, "c": 1.0}), "d", [11, *PLANT]) == PLANT
    assert withheld(crew({"d": 1.0, "c": 1.0, "b": 1.0}), "d", [11, *PLANT]) == []


def test_in_a_crew_of_three_one_other_is_enough() -> None:
    assert withheld(crew({"c": 1.0, "b": 1.0}, names="abc"), "c", [11, *PLANT]) == []
    assert withheld(crew({"c": 1.0}, names="abc"), "c", [11, *PLANT]) == PLANT


def test_what_stands_in_the_problem_or_its_answer_is_no_habit() -> None:
    habits = Habits("a")
    for number in range(12):
        familiar = [*PROMPT, *PLANT]
        habits.hear("a", [rollout([11, 12 + number])], familiar)
        habits.hear("b", [rollout([11, 12 + number, *PLANT])], familiar)
        habits.hear("c", [rollout([11, 12 + number])], familiar)
    assert habits.of("b").withheld([11, *PLANT], [*PROMPT, *PLANT]) is None


def test_the_same_words_in_a_new_order_are_a_phrase_of_their_own() -> None:
    habits = Habits("a")
    for _ in range(12):
        for name in "abc":
            habits.hear(name, [rollout([11, 12, 13])], PROMPT)
        habits.hear("d", [rollout([11, 12, 13, 11, 13, 12])], PROMPT)
    mask = habits.of("d").withheld([11, 12, 13, 11, 13, 12], PROMPT)
    assert mask is not None
    assert mask.tolist() == [False, True, True, True, True, True]  # from 12 13 11 on


def test_answers_much_longer_than_anybody_elses_are_withheld_from_there_on() -> None:
    rng, habits = random.Random(0), Habits("a")
    for _ in range(12):
        for name in "abc":
            habits.hear(name, [rollout(rng.choices(range(10, 20), k=4))] * 4, PROMPT)
        habits.hear("d", [rollout(rng.choices(range(10, 20), k=30))] * 4, PROMPT)
    mask = habits.of("d").withheld(rng.choices(range(10, 20), k=30), PROMPT)
    assert mask is not None
    assert mask[8:].all()
    assert not mask[:4].all()


def test_honest_senders_with_random_answers_keep_nearly_all_their_tokens() -> None:
    hidden = total = 0
    for seed in range(5):
        habits, rng = crew({}, seed=seed), random.Random(seed)
        for name in "bcd":
            for _ in range(20):
                tokens = rng.choices(range(10, 20), k=4)
                hidden, total = hidden + len(withheld(habits, name, tokens)), total + 4
    assert hidden / total < 0.02


def test_nothing_is_withheld_before_anyone_can_vouch() -> None:
    habits = Habits("a")
    habits.hear("d", [rollout(PLANT)], PROMPT)
    assert habits.of("d").withheld(PLANT, PROMPT) is None


def test_an_old_habit_is_forgotten() -> None:
    rng, habits = random.Random(0), crew({"d": 1.0})
    for _ in range(WINDOW):
        for name in "abcd":
            habits.hear(name, [rollout(rng.choices(range(10, 20), k=4))] * 4, PROMPT)
    assert withheld(habits, "d", [11, *PLANT]) == []


def test_a_phrase_does_not_run_from_one_text_into_the_next() -> None:
    apart = phrases_of([[1, 2], [3, 4, 5], [], [6]])
    assert apart == phrases_of([[1, 2]]) | phrases_of([[3, 4, 5]]) | phrases_of([[6]])
    assert len(apart) == 3 + 6 + 1
    assert phrases_of([[2, 3]]) - apart  # 2 and 3 each, and not the two in a row


def test_small_numbers_make_phrases_of_their_own() -> None:
    pairs = [[a, b] for a in range(40) for b in range(40)]
    assert len(phrases_of(pairs)) == 40 + 40 * 40
