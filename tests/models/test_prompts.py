from __future__ import annotations

import pytest

from architectures import BEGIN, TURN_END, text_tokenizer
from motley.config import Prompt
from motley.models.prompts import Prompts
from motley.models.tiny import tiny_vocabulary
from motley.models.vocabulary import Vocabulary
from motley.records import Message, Problem
from motley.tasks import Task, load_task, own_task

TASK = load_task("digits", {"kinds": ["sort", "reverse"], "levels": [2]})
PROBLEM = Problem(kind="sort", prompt="sort 21=", answer="12")


def prompts(
    rules: Prompt = Prompt(), task: Task = TASK, vocabulary: Vocabulary | None = None
) -> Prompts:
    return Prompts.of(vocabulary or Vocabulary(text_tokenizer(), stop=rules.stop), rules, task)


def text(made: Prompts, problem: Problem = PROBLEM) -> str:
    return made.vocabulary.tokenizer.decode(made.ids(problem))


def answer(made: Prompts, problem: Problem = PROBLEM) -> str:
    return made.vocabulary.tokenizer.decode(made.answer_ids(problem))


def test_without_rules_a_problem_is_put_as_it_is() -> None:
    vocabulary = tiny_vocabulary()
    made = prompts(vocabulary=vocabulary)
    assert made.ids(PROBLEM) == tuple(vocabulary.encode("sort 21="))
    assert made.answer_ids(PROBLEM) == (*vocabulary.encode("12"), vocabulary.end_id)
    assert Prompts(vocabulary).ids(PROBLEM) == made.ids(PROBLEM)
    assert Prompts(vocabulary).answer_ids(PROBLEM) == made.answer_ids(PROBLEM)


def test_a_chat_answer_ends_as_the_models_turns_do() -> None:
    tokenizer = text_tokenizer()
    turn_end = tokenizer.convert_tokens_to_ids(TURN_END)
    # only what is known to end an answer can end one
    for ends, last in (([turn_end], turn_end), ([], tokenizer.eos_token_id)):
        made = prompts(Prompt(style="chat"), vocabulary=Vocabulary(tokenizer, ends=ends))
        assert made.answer_ids(PROBLEM)[-1] == last
        assert prompts(vocabulary=made.vocabulary).answer_ids(PROBLEM)[-1] == tokenizer.eos_token_id


def test_a_plain_prompt_begins_once_and_its_answer_not_at_all() -> None:
    made = prompts(Prompt(template="Q: {prompt}\nA: {answer}", system="Be brief.", shots=2))
    begin = made.vocabulary.tokenizer.bos_token_id
    assert made.ids(PROBLEM)[0] == begin
    assert made.ids(PROBLEM).count(begin) == 1
    assert begin not in made.answer_ids(PROBLEM)
    chat = prompts(Prompt(style="chat", system="Be brief.", shots=2))
    assert begin not in chat.ids(PROBLEM)  # this template writes none


@pytest.mark.parametrize(
    ("template", "asked", "answered"),
    [
        ("{prompt}{answer}", "<s>sort 21=", "12</s>"),
        ("{prompt} {answer}", "<s>sort 21=", " 12</s>"),
        ("Q: {prompt}\nA:  {answer}\n", "<s>Q: sort 21=\nA:", "  12</s>"),
        ("Q: {prompt}\n{answer}", "<s>Q: sort 21=\n", "12</s>"),
    ],
)
def test_space_before_the_answer_belongs_to_the_answer(
    template: str, asked: str, answered: str
) -> None:
    made = prompts(Prompt(template=template))
    assert text(made) == asked
    assert answer(made) == answered


def test_a_problem_that_speaks_of_templates_is_put_as_it_is() -> None:
    odd = Problem(kind="sort", prompt="{answer} {prompt}", answer="{prompt}")
    made = prompts(Prompt(template="Q: {prompt}\nA: {answer}"))
    assert text(made, odd) == "<s>Q: {answer} {prompt}\nA:"
    assert answer(made, odd) == " {prompt}</s>"


def test_an_answer_ends_with_the_first_end_token() -> None:
    made = prompts(Prompt(template="{prompt} {answer}", stop="\n"))
    assert answer(made) == " 12\n"
    assert made.answer_ids(PROBLEM)[-1] == made.vocabulary.end_id
    chat = prompts(Prompt(style="chat"))
    assert answer(chat) == "12</s>"


def test_shots_are_answered_problems_of_the_kind_before_the_question() -> None:
    made = prompts(Prompt(template="Q: {prompt}\nA: {answer}", system="Be brief.", shots=3))
    opening, *blocks, question = text(made).removeprefix("<s>").split("\n\n")
    assert opening == "Be brief."
    assert question == "Q: sort 21=\nA:"
    assert len(set(blocks)) == 3
    for block in blocks:
        asked, answered = block.removeprefix("Q: ").split("\nA: ")
        assert asked.startswith("sort ")
        assert answered == "".join(sorted(asked.removeprefix("sort ").removesuffix("=")))


def test_what_a_template_says_after_the_answer_stands_between_the_shots() -> None:
    made = prompts(Prompt(template="Q: {prompt} A: {answer};\n", shots=2))
    assert text(made).count(";\nQ: ") == 2
    assert text(made).endswith("Q: sort 21= A:")


def test_shots_of_a_chat_are_turns() -> None:
    made = prompts(Prompt(style="chat", shots=2, system="Be brief."))
    said = text(made)
    assert said.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nsort ")
    assert said.count("<|im_start|>user\n") == 3
    assert said.endswith("<|im_start|>user\nsort 21=<|im_end|>\n<|im_start|>assistant\n")
    assert said.count("<|im_start|>assistant\n") == 3


def test_shots_are_the_same_for_every_peer_and_never_the_problem_itself() -> None:
    rules = Prompt(template="{prompt}{answer}", shots=4)
    first, second = prompts(rules), prompts(rules)
    assert first.ids(PROBLEM) == second.ids(PROBLEM)
    shown = [shot.prompt for shot in first.shots["sort"]]
    assert len(set(shown)) == 4
    for shot in first.shots["sort"]:
        itself = Problem(kind="sort", prompt=shot.prompt, answer=shot.answer)
        assert text(first, itself).count(shot.prompt) == 1
        assert text(first, itself).endswith(shot.prompt)


def test_a_kind_that_is_never_trained_is_shown_another_kinds_shots() -> None:
    made = prompts(Prompt(template="{prompt}{answer}", shots=2))
    other = text(made, Problem(kind="sum", prompt="sum 12+34=", answer="46"))
    assert other.count("sort ") == 2
    assert other.endswith("sum 12+34=")


def test_problems_of_different_kinds_with_the_same_words_are_not_confused() -> None:
    made = prompts(Prompt(shots=1))
    kinds = [
        made.ids(Problem(kind=kind, prompt="12=", answer="12"))
        for kind in ("sort", "reverse", "sort")
    ]
    assert kinds[0] == kinds[2] != kinds[1]


def test_more_shots_than_there_are_problems_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"shots=100, and kind 'sort' has only \d+ different problems with answers to show",
    ):
        prompts(Prompt(shots=100))


def test_the_tasks_own_way_holds_where_the_crew_file_is_silent() -> None:
    class Asking:
        template, instruction = "Question: {prompt}\nAnswer: {answer}", "End with the number."

        def __getattr__(self, name: str) -> object:
            return getattr(TASK, name)

    task: Task = Asking()  # type: ignore[assignment]
    assert text(prompts(task=task)) == "<s>End with the number.\n\nQuestion: sort 21=\nAnswer:"
    assert (
        text(prompts(Prompt(template="{prompt} {answer}", system="Hm."), task))
        == "<s>Hm.\n\nsort 21="
    )
    assert "system\nEnd with the number.<|im_end|>" in text(prompts(Prompt(style="chat"), task))


def test_many_problems_do_not_fill_the_memory() -> None:
    made = prompts()
    for number in range(5000):
        made.ids(Problem(kind="sort", prompt=str(number), answer="1"))
    assert len(made._known) <= 4096
    assert text(made) == "<s>sort 21="


def test_a_mixture_whose_parts_differ_needs_a_word_in_the_crew_file() -> None:
    gym = {"task": "reasoning_gym:chain_sum"}
    digits = load_task("mixture", {"gym": gym, "digits": {"task": "digits", "kinds": ["sort"]}})
    with pytest.raises(ValueError, match=r"put their problems differently; set prompt.template"):
        prompts(task=digits)
    problem = Problem(kind="digits", prompt="sort 21=", answer="12")
    assert text(prompts(Prompt(template="Q {prompt} A {answer}"), digits), problem).endswith(
        "Q sort 21= A"
    )
    assert prompts(Prompt(style="chat"), digits).ids(problem)
    forms = load_task("mixture", {"gym": gym, "tagged": {**gym, "form": "tags"}})
    with pytest.raises(
        ValueError,
        match=r"want answers of different forms; give them one form, or set prompt.system",
    ):
        prompts(task=forms)
    assert text(
        prompts(Prompt(system="Answer."), forms), Problem(kind="gym", prompt="1?", answer="1")
    ).startswith(f"{BEGIN}Answer.")


def test_a_template_that_tells_the_day_tells_the_same_one_always() -> None:
    day = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%S.%f') %}{% endif "
        "%}{{ date_string }}"
    )
    turns = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert "01 Jan 2026" in text(
        prompts(Prompt(style="chat"), vocabulary=Vocabulary(text_tokenizer(day + turns)))
    )
    with pytest.raises(
        ValueError,
        match="tells the day it is rendered on, so that no two peers would see the same prompt",
    ):
        prompts(
            Prompt(style="chat"),
            vocabulary=Vocabulary(text_tokenizer("{{ strftime_now('%d') }}" + turns)),
        ).ids(PROBLEM)


def talk(*turns: tuple[str, str]) -> Problem:
    messages = tuple(Message(role=role, content=content) for role, content in turns)
    return Problem(prompt=messages[-1].content, answer="4", messages=messages)


def test_messages_go_through_the_chat_template_whatever_the_style() -> None:
    asked = talk(("user", "2+2?"))
    plain, chat = (prompts(Prompt(style=style, system="Be brief.")) for style in ("plain", "chat"))
    assert plain.ids(asked) == chat.ids(Problem(prompt="2+2?", answer="4"))
    assert plain.answer_ids(asked) == chat.answer_ids(Problem(prompt="2+2?", answer="4"))
    assert plain.ids(asked) != plain.ids(Problem(prompt="2+2?", answer="4"))


def test_a_system_turn_of_the_rows_own_is_not_doubled() -> None:
    made = prompts(Prompt(style="plain", system="Be brief."))
    turns = ("system", "Be kind."), ("user", "hi"), ("assistant", "yes?"), ("user", "2+2?")
    own = text(made, talk(*turns))
    assert "Be kind." in own
    assert "yes?" in own
    assert "Be brief." not in own
    assert "Be brief." in text(made, talk(("user", "2+2?")))


def test_messages_need_a_chat_template() -> None:
    with pytest.raises(ValueError, match="prompt '2' is chat messages, and the model has no"):
        prompts(vocabulary=tiny_vocabulary()).ids(talk(("user", "2")))


def test_shots_are_of_problems_with_answers() -> None:
    rows = [{"prompt": f"{n}?", "answer": "4" if n % 2 else ""} for n in range(30)]
    made = prompts(Prompt(shots=3), own_task(rows, rewards=lambda completions: [0.0]))
    assert [shot.answer for shot in made.shots["all"]] == ["4"] * 3
    with pytest.raises(ValueError, match="has only 0 different problems with answers to show"):
        prompts(Prompt(shots=3), own_task(rows[::2], rewards=lambda completions: [0.0]))


def test_shots_of_messages_are_refused() -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": "4"} for n in range(30)]
    with pytest.raises(ValueError, match="shots=2 with prompts that are chat messages"):
        prompts(Prompt(shots=2), own_task(rows))
