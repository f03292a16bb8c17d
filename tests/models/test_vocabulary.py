from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from architectures import BEGIN, CHATML, END, TURN_END, text_tokenizer
from motley.models.tiny import tiny_vocabulary
from motley.models.vocabulary import Vocabulary, word_vocabulary
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
            assert (
                vocabulary.decode([*vocabulary.encode(problem.answer), vocabulary.end_id])
                == problem.answer
            )


def test_special_tokens_show_and_only_the_one_that_ended_the_answer_leaves_no_text() -> None:
    vocabulary = tiny_vocabulary()
    pad, end, (one, two) = vocabulary.pad_id, vocabulary.end_id, vocabulary.encode("12")
    assert vocabulary.decode([one, two, end]) == "12"
    assert vocabulary.decode([pad, one, two, end]) == "<pad>12"
    assert vocabulary.decode([one, pad, two]) == "1<pad>2"
    assert vocabulary.decode([one, 2, two, end]) == "1<unknown>2"
    assert vocabulary.decode([end, one, end]) == "<end>1"
    assert vocabulary.decode_all([[one, pad], [two, end]]) == ["1<pad>", "2"]


def test_ids_that_no_token_has_show_too() -> None:
    tokenizer = text_tokenizer()
    named = len(tokenizer)
    vocabulary = Vocabulary(tokenizer, size=named + 8)
    one, two = vocabulary.encode("12"), vocabulary.encode("34")
    assert vocabulary.decode([*one, named + 3, *two, vocabulary.end_id]) == f"12<{named + 3}>34"
    assert vocabulary.decode([named, named + 7]) == f"<{named}><{named + 7}>"
    assert vocabulary.decode_all([one, [named], []]) == ["12", f"<{named}>", ""]


def test_text_that_cannot_be_spelled_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the vocabulary cannot spell 'what\?'; tiny models know digits"
    ):
        tiny_vocabulary().encode("what?")


def test_the_fingerprint_changes_with_any_id() -> None:
    same, moved = word_vocabulary(["a ", "b "], "01"), word_vocabulary(["b ", "a "], "01")
    assert same.fingerprint == word_vocabulary(["a ", "b "], "01").fingerprint
    assert same.fingerprint != moved.fingerprint


def test_the_tiny_vocabulary_is_the_one_that_records_of_older_runs_name() -> None:
    vocabulary = tiny_vocabulary()
    assert (vocabulary.fingerprint, vocabulary.size) == ("f985d7aef1f03d7f", 28)
    assert (vocabulary.pad_id, vocabulary.end_id, vocabulary.end_ids, vocabulary.begin) == (
        0,
        1,
        (1,),
        (),
    )


# Tokenizers of pretrained models


def test_the_tokenizers_end_comes_before_the_models_further_ones() -> None:
    tokenizer = text_tokenizer()
    turn_end = tokenizer.convert_tokens_to_ids(TURN_END)
    vocabulary = Vocabulary(tokenizer, ends=[turn_end, tokenizer.eos_token_id, turn_end])
    assert vocabulary.end_ids == (tokenizer.eos_token_id, turn_end)
    assert vocabulary.end_id == tokenizer.eos_token_id
    for end in vocabulary.end_ids:
        assert vocabulary.decode([*vocabulary.encode("12"), end]) == "12"


def test_a_stop_ends_answers_first_and_leaves_no_text() -> None:
    tokenizer = text_tokenizer()
    vocabulary = Vocabulary(tokenizer, stop="\n")
    texts = [tokenizer.decode([i]) for i in vocabulary.end_ids]
    assert texts[0] == "\n"
    assert "\n\n" in texts, "the tokenizer must have a longer token for this to test anything"
    assert vocabulary.end_ids[-1] == tokenizer.eos_token_id
    assert all(text.startswith("\n") for text in texts[:-1])
    for end in vocabulary.end_ids:
        assert vocabulary.decode([*vocabulary.encode(" 12"), end]) == " 12"
    ids = [*vocabulary.encode("1"), vocabulary.end_id, *vocabulary.encode("2")]
    assert vocabulary.decode(ids) == "1\n2"  # only the token that ended it is left out


def test_answers_are_taught_to_end_with_the_stop_itself() -> None:
    words = Tokenizer(WordLevel({"</s>": 0, ";;": 1, ";": 2, "x": 3}))
    assert Vocabulary(
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"), stop=";"
    ).end_ids == (2, 1, 0)


def test_a_stop_that_no_token_begins_with_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=(
            "no token of the vocabulary begins with stop='Question: 99'; use a shorter text, such "
            "as a newline"
        ),
    ):
        Vocabulary(text_tokenizer(), stop="Question: 99")


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer = text_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(
        ValueError,
        match=(
            r"names no end token, so that no answer could end; set eos_token in its "
            r"tokenizer_config\.json"
        ),
    ):
        Vocabulary(tokenizer)
    assert Vocabulary(tokenizer, ends=[7]).end_ids == (7,)


def test_padding_is_the_end_token_where_there_is_no_other() -> None:
    tokenizer = text_tokenizer()
    assert Vocabulary(tokenizer).pad_id == tokenizer.eos_token_id
    tokenizer.pad_token = BEGIN
    assert Vocabulary(tokenizer).pad_id == tokenizer.bos_token_id


def test_special_tokens_without_a_row_in_the_model_are_not_used() -> None:
    tokenizer = text_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>", "eos_token": "<|done|>"})
    vocabulary = Vocabulary(tokenizer, ends=[tokenizer.convert_tokens_to_ids(TURN_END)], size=rows)
    assert vocabulary.end_ids == (tokenizer.convert_tokens_to_ids(TURN_END),)
    assert vocabulary.pad_id == vocabulary.end_id
    with pytest.raises(ValueError, match="names no end token"):
        Vocabulary(tokenizer, size=rows)


def test_what_comes_before_a_plain_prompt_is_what_the_tokenizer_puts_there() -> None:
    begins, bare = Vocabulary(text_tokenizer()), Vocabulary(text_tokenizer(begins=False))
    assert begins.begin == (begins.tokenizer.bos_token_id,)
    assert bare.begin == ()
    assert begins.encode("sort") == bare.encode("sort")  # and never inside
    assert begins.fingerprint == bare.fingerprint


def test_an_end_token_the_tokenizer_adds_is_no_part_of_a_prompt() -> None:
    tokenizer = text_tokenizer()
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BEGIN, END)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=ids
    )
    assert Vocabulary(tokenizer).begin == (tokenizer.bos_token_id,)


def test_a_tokenizer_saved_with_a_length_limit_still_encodes_everything() -> None:
    tokenizer = text_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.encode("z" * 20) == Vocabulary(text_tokenizer()).encode("z" * 20)
    assert len(vocabulary.encode("z")) == 1


def test_unknown_text_is_a_fault_of_tiny_models_only() -> None:
    """A pretrained tokenizer has its own way with what it does not know."""
    words = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "sort": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    assert Vocabulary(tokenizer).encode("what") == [0]


def test_the_size_is_that_of_the_models_rows() -> None:
    """Gemma's tokenizer has a token more than its text model has rows: such a token must not be let
    in.
    """
    tokenizer = text_tokenizer()
    assert Vocabulary(tokenizer).size == len(tokenizer)
    assert Vocabulary(tokenizer, size=len(tokenizer) - 1).size == len(tokenizer) - 1
    assert Vocabulary(tokenizer, size=1000).size == 1000


# Chat templates

QUESTION = [{"role": "user", "content": "sort 21="}]
ASKED = [{"role": "system", "content": "Answer briefly."}, *QUESTION]
NO_SYSTEM = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}",
)
DEAF = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")


def spoken(template: str, turns: list[dict[str, str]]) -> str:
    vocabulary = Vocabulary(text_tokenizer(template))
    return vocabulary.tokenizer.decode(vocabulary.chat(turns))


def test_a_conversation_ends_where_the_answer_begins() -> None:
    assert spoken(CHATML, ASKED) == (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\nsort "
        "21=<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [NO_SYSTEM, DEAF], ids=["refuses it", "leaves it out"])
def test_where_a_template_has_no_system_turn_it_opens_the_question(template: str) -> None:
    assert (
        spoken(template, ASKED)
        == "<|im_start|>user\nAnswer briefly.\n\nsort 21=<|im_end|>\n<|im_start|>assistant\n"
    )
    shots = [
        *ASKED[:1],
        {"role": "user", "content": "sort 31="},
        {"role": "assistant", "content": "13"},
        *QUESTION,
    ]
    text = spoken(template, shots)
    assert text.count("Answer briefly.") == 1
    assert text.startswith("<|im_start|>user\nAnswer briefly.\n\nsort 31=<|im_end|>")


def test_a_template_with_its_own_begin_token_begins_once() -> None:
    vocabulary = Vocabulary(text_tokenizer("{{ bos_token }}" + CHATML))
    assert vocabulary.chat(QUESTION).count(vocabulary.tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("turns", [QUESTION, ASKED], ids=["question", "system and question"])
def test_a_template_that_fails_is_named_as_the_cause(turns: list[dict[str, str]]) -> None:
    with pytest.raises(
        ValueError,
        match=r"chat template failed: out of words; set prompt\.style = 'plain'",
    ) as caught:
        spoken("{{ raise_exception('out of words') }}", turns)
    assert "\n" not in str(caught.value)


def test_a_token_that_the_model_has_no_row_for_is_named() -> None:
    tokenizer = text_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<think>"])
    vocabulary = Vocabulary(tokenizer, size=rows)
    assert vocabulary.is_larger_than_model
    assert vocabulary.encode("think") == Vocabulary(text_tokenizer()).encode("think")
    with pytest.raises(ValueError, match=rf"makes token {rows} \('<think>'\), .* 0 to {rows - 1} "):
        vocabulary.encode("<think> 2")


def test_without_a_template_there_is_no_chat() -> None:
    vocabulary = Vocabulary(text_tokenizer(None))
    assert not vocabulary.has_chat
    with pytest.raises(
        ValueError, match=r'the model has no chat template; set prompt\.style = "plain", or'
    ):
        vocabulary.chat(QUESTION)


def test_a_saved_tokenizer_is_the_same_vocabulary(tmp_path: Path) -> None:
    vocabulary = Vocabulary(text_tokenizer(), stop="\n")
    vocabulary.save(tmp_path)
    again = Vocabulary(AutoTokenizer.from_pretrained(tmp_path), stop="\n")
    assert (again.fingerprint, again.end_ids, again.begin) == (
        vocabulary.fingerprint,
        vocabulary.end_ids,
        vocabulary.begin,
    )
    assert again.chat(ASKED) == vocabulary.chat(ASKED)
