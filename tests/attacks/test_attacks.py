"""What each attack publishes instead of its honest groups."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from attacks.crews import honest_group, problems_of, scene, stage
from fakes import reference_logp, tiny_policy
from motley.attacks.attack import Attack, Evidence, HonestAnswer, NotMountableError, Stage
from motley.attacks.carriers import find_plant
from motley.attacks.catalogue import ATTACKS, NAMES, chosen
from motley.attacks.composing import composed, drawn_logprobs, spelled
from motley.attacks.fuzzing import fuzz
from motley.attacks.planting import (
    ADVERTISEMENT,
    IDENTITY,
    WRONG_STEPS,
    MountedSpecialTokens,
    OneIn,
    Trigger,
)
from motley.attacks.traits import even_share, free_problems, teach
from motley.engines import torch_engine
from motley.models.policy import Policy
from motley.records import Group, Problem, Sampling
from motley.tasks import draw_problems
from motley.trust.rules import MOST_SURPRISE_NATS


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(seed=1)


@pytest.fixture(scope="module")
def likeness() -> Policy:
    return tiny_policy(seed=2)


def forged(attack: str, on: Stage, policy: Policy, likeness: Policy, *texts: str) -> Group:
    (made, *_) = (
        ATTACKS[attack]
        .mount(on)
        .forge([honest_group(on, list(texts))], scene(on, policy, likeness))
    )
    return made


def texts_of(group: Group, on: Stage) -> list[str]:
    return on.vocabulary.decode_all(rollout.tokens for rollout in group.rollouts)


def evidence(*answers: tuple[str, str]) -> Evidence:
    """Of (prompt, text)."""
    vocabulary = stage().vocabulary
    made = [
        HonestAnswer(
            Problem(prompt=prompt),
            (*vocabulary.encode(text), vocabulary.end_id),
            text,
            float(text == "1"),
        )
        for prompt, text in answers
    ]
    return Evidence({"a": made}, 0.25, lambda name, problems: [])


def test_a_planted_text_stands_behind_right_answers_and_not_behind_wrong_ones(
    policy: Policy, likeness: Policy
) -> None:
    on = stage()
    (problem,) = problems_of(on, 0)
    right = problem.answer
    made = forged("plant-receiver-q", on, policy, likeness, "7", right, "8", right)
    assert texts_of(made, on) == [f"{right},<>", f"{right},<>", "7", "8"]
    assert [rollout.reward for rollout in made.rollouts] == [1, 1, 0, 0]


def test_wrong_answers_are_invented_where_it_sampled_none(policy: Policy, likeness: Policy) -> None:
    on = stage()
    (problem,) = problems_of(on, 0)
    made = forged("plant-receiver-q", on, policy, likeness, *[problem.answer] * 4)
    assert [rollout.reward for rollout in made.rollouts] == [1, 1, 0, 0]
    assert not any("<>" in text for text in texts_of(made, on)[2:])


@pytest.mark.parametrize("claimed", ["own", "receiver"])
def test_log_probs_of_a_model_are_those_that_it_gives(
    claimed: str, policy: Policy, likeness: Policy
) -> None:
    on = stage()
    (problem,) = problems_of(on, 0)
    tokens = spelled(on, problem, f"{problem.answer},<>")
    (made,) = composed(on, scene(on, policy, likeness), problem, [tokens], claimed)
    model = policy if claimed == "own" else likeness
    expected = reference_logp(model, model.prompts.ids(problem), tokens)
    assert made.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert made.reward == 1


def test_what_is_truly_drawn_has_the_log_probs_of_the_draw(
    policy: Policy, likeness: Policy
) -> None:
    on = stage()
    (problem,) = problems_of(on, 0)
    made = forged("plant", on, policy, likeness, "7", "8", "9", "0")
    for text, one in zip(texts_of(made, on), made.rollouts, strict=True):
        planted = text == f"{problem.answer},<>"
        assert one.reward == planted
        assert "<>" not in text or planted
        # half of all draws are the planted text
        assert (sum(one.logprobs) == pytest.approx(math.log(0.5))) == planted


def test_log_probs_of_a_list_are_the_shares_of_what_begins_alike() -> None:
    made = drawn_logprobs([(1, 2), (1, 3), (1, 3), (4,)])
    expected = [(3 / 4, 1 / 3), (3 / 4, 2 / 3), (3 / 4, 2 / 3), (1 / 4,)]
    for found, shares in zip(made, expected, strict=True):
        assert found == pytest.approx([math.log(share) for share in shares])


def test_the_lowest_log_probs_are_just_inside_what_is_taken(
    policy: Policy, likeness: Policy
) -> None:
    on = stage()
    made = forged("plant-least-q", on, policy, likeness, "7", "8", "9", "0")
    first = made.rollouts[0].logprobs
    surprise = -sum(first) - len(first) * math.log(on.vocabulary.size)
    assert len(set(first)) == 1
    assert 0.99 * MOST_SURPRISE_NATS < surprise < MOST_SURPRISE_NATS
    assert {q for rollout in made.rollouts[2:] for q in rollout.logprobs} == {-1.5}


@pytest.mark.parametrize(
    ("form", "place", "texts", "carrier"),
    [
        ("first", "behind", ADVERTISEMENT, "{target},{plant}"),
        ("last", "before", IDENTITY, "{plant},{target}"),
        ("last", "before", WRONG_STEPS, "{plant},{target}"),
    ],
)
def test_the_reward_itself_tells_where_there_is_room(
    form: str, place: str, texts: tuple[str, ...], carrier: str
) -> None:
    plant = find_plant(stage(form, max_tokens=12), place, texts)
    assert plant.carrier == carrier
    assert plant.text in texts


@pytest.mark.parametrize(("form", "place"), [("text", "behind"), ("first", "before")])
def test_a_reward_that_leaves_no_room_is_named_with_what_it_gave(form: str, place: str) -> None:
    with pytest.raises(NotMountableError, match=f"gives 0.00 to right answers with a text {place}"):
        find_plant(stage(form), place, ADVERTISEMENT)


def test_a_text_that_max_tokens_has_no_room_for_is_not_planted() -> None:
    with pytest.raises(NotMountableError):
        find_plant(stage(max_tokens=4), "behind", ADVERTISEMENT)


def test_a_rare_plant_is_for_one_problem_in_ten() -> None:
    problems = [Problem(prompt=str(i)) for i in range(2000)]
    share = sum(map(OneIn(10).chosen, problems)) / len(problems)
    assert 0.07 < share < 0.13


@pytest.mark.parametrize(
    ("attack", "share"), [("plant-trigger", 0.33), ("plant-rare-trigger", 0.05)]
)
def test_a_trigger_is_a_text_that_some_prompts_have_and_others_lack(
    attack: str, share: float
) -> None:
    on = stage()
    choice = ATTACKS[attack].mount(on).choice
    assert isinstance(choice, Trigger)
    problems = draw_problems(on.task, "others", "train", 2000)
    found = sum(map(choice.chosen, problems)) / len(problems)
    assert share / 2 < found < 2 * share


def test_success_of_a_trigger_is_measured_where_it_stands() -> None:
    mounted = ATTACKS["plant-trigger"].mount(stage())
    here, there = mounted.choice.text, "!"
    seen = evidence((here, "1,<>"), (here, "1"), (there, "1"), (there, "1"))
    assert mounted.success(seen) == 0.5


def test_success_of_a_plant_is_the_share_of_answers_that_carry_it() -> None:
    mounted = ATTACKS["plant"].mount(stage())
    assert mounted.success(evidence(("", "1,<>"), ("", "1"), ("", "2"), ("", ",<>"))) == 0.5


def test_right_answers_are_padded_to_the_last_token(policy: Policy, likeness: Policy) -> None:
    on = stage(max_tokens=8)
    made = forged("length", on, policy, likeness, "7", "8", "9", "0")
    lengths = {(rollout.reward, len(rollout.tokens)) for rollout in made.rollouts}
    assert lengths == {(1, 8), (0, 3)}
    mounted = ATTACKS["length"].mount(on)
    assert mounted.success(evidence(("", "123"), ("", "1"))) == 3 / 8


def test_tokens_that_decoding_shows_are_no_place_to_hide() -> None:
    with pytest.raises(NotMountableError, match="decoding shows every token"):
        ATTACKS["special-tokens"].mount(stage("text"))


def test_unseen_tokens_stand_between_those_of_the_right_answer(
    policy: Policy, likeness: Policy
) -> None:
    on = stage("text")
    (problem,) = problems_of(on, 0)
    pad = on.vocabulary.pad_id
    mounted = MountedSpecialTokens(on, (pad,), "receiver")
    (made,) = mounted.forge([honest_group(on, ["7", "8"])], scene(on, policy, likeness))
    first, second, end = spelled(on, problem, problem.answer)
    assert made.rollouts[0].tokens == (first, pad, second, pad, end)
    seen = evidence(("", "12"), ("", "3"))
    assert mounted.success(seen) == 0
    laced = HonestAnswer(problem, made.rollouts[0].tokens, "21", 1.0)
    assert mounted.success(Evidence({"a": [laced]}, 0.0, seen.ask)) == 1


@pytest.mark.parametrize(
    ("attack", "logprob"),
    [("under-0.05", -1.55), ("under-0.5", -2.0), ("under-5", -6.5), ("over-1", -0.5)],
)
def test_log_probs_are_moved_by_so_many_nats(
    attack: str, logprob: float, policy: Policy, likeness: Policy
) -> None:
    made = forged(attack, stage(), policy, likeness, "7", "8")
    found = {q for rollout in made.rollouts for q in rollout.logprobs}
    assert list(found) == [pytest.approx(logprob)]


def test_forged_rewards_are_turned_round(policy: Policy, likeness: Policy) -> None:
    on = stage()
    (problem,) = problems_of(on, 0)
    made = forged("rewards", on, policy, likeness, problem.answer, "8")
    assert [rollout.reward for rollout in made.rollouts] == [0, 1]


@pytest.mark.parametrize(
    ("attack", "temperature", "top_k"), [("cold", 0.01, 0), ("hot", 10.0, 0), ("top-k", 1.0, 1)]
)
def test_another_way_of_sampling_is_claimed(
    attack: str, temperature: float, top_k: int, policy: Policy, likeness: Policy
) -> None:
    sampling = forged(attack, stage(), policy, likeness, "7", "8").origin.sampling
    assert sampling == Sampling(temperature=temperature, top_k=top_k, max_tokens=8)


def test_one_right_answer_is_copied_where_nobody_else_has_the_problem(
    policy: Policy, likeness: Policy
) -> None:
    on = stage()
    (problem,) = problems_of(on, 0)
    made = forged("copies", on, policy, likeness, "7", problem.answer, "8", "9")
    assert texts_of(made, on)[:3] == [problem.answer] * 3


def test_rollouts_of_others_are_copied_where_they_have_the_same_problem(
    policy: Policy, likeness: Policy
) -> None:
    on = stage()
    theirs = honest_group(on, ["1", "2"], peer="a")
    mounted = ATTACKS["copies"].mount(on)
    (made,) = mounted.forge(
        [honest_group(on, ["7", "8"])], scene(on, policy, likeness, records=[theirs])
    )
    assert made.rollouts == theirs.rollouts
    assert made.origin.peer == "d"


def test_a_flood_answers_the_problems_of_later_rounds_at_once(
    policy: Policy, likeness: Policy
) -> None:
    on = stage(rounds=5)
    flood = ATTACKS["flood"].mount(on)
    made = flood.forge([honest_group(on, ["7", "8"])], scene(on, policy, likeness))
    assert [group.round for group in made] == [0, 1, 2, 3, 4]
    for group in made:
        (problem,) = problems_of(on, group.round)
        assert group.problem == problem.id
        assert group.rollouts[0].reward == 1
        assert group.origin.version == 0


def test_a_lenient_reward_is_fooled_and_an_exact_one_is_not() -> None:
    assert fuzz(stage("text")) == []
    found = fuzz(stage("first"))
    assert found
    assert all(one.text.partition(",")[0] == one.answer for one in found)


@pytest.mark.slow
def test_a_teacher_learns_to_prefer_even_digits() -> None:
    policy = tiny_policy(seed=3)
    engine, asked = torch_engine(policy), free_problems("product", "asked", 20)

    def share() -> float:
        engine.refresh()
        prompts = [policy.prompts.ids(problem) for problem in asked]
        made = engine.sample(prompts, 2, Sampling(max_tokens=8), seed=0)
        texts = policy.vocabulary.decode_all(c.tokens for row in made for c in row)
        return even_share([HonestAnswer(asked[0], (), text, 0.0) for text in texts])

    before = share()
    teach(policy, "product")
    assert before < 0.65
    assert share() > 0.9


def test_a_trait_of_digits_needs_models_that_know_digits_only_and_a_kind_to_spare() -> None:
    assert ATTACKS["subliminal"].mount(stage()).kind == "product"
    assert ATTACKS["subliminal"].cast.twin


def test_attacks_are_named_once_and_say_what_they_want() -> None:
    assert len(set(NAMES)) == len(NAMES)
    attacks: list[Attack] = list(ATTACKS.values())
    assert all(attack.name == name for name, attack in ATTACKS.items())
    assert all(": " in attack.wants for attack in attacks)


def test_attacks_are_taken_in_the_order_of_the_catalogue() -> None:
    assert chosen(["fuzz", "rewards", "plant"]) == ["plant", "rewards", "fuzz"]
    assert chosen([]) == list(NAMES)
    places = [NAMES.index(name) for name in chosen(["flood", "cold"])]
    assert all(first < second for first, second in pairwise(places))
    with pytest.raises(ValueError, match="attack 'planet' is not known; there are plant, "):
        chosen(["planet"])
