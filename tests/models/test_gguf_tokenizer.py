from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from architectures import BEGIN, END, TURN_END, text_tokenizer
from motley.models.gguf_tokenizer import ADDED, CONTROL, ORDINARY, Stated, check, put_right

CONTROLS = (BEGIN, END, "<|im_start|>", TURN_END, "<|endoftext|>")


def spelled(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def stated() -> Stated:
    """What a file says whose tokenizer is `text_tokenizer`."""
    tokenizer = text_tokenizer()
    tokens = spelled(tokenizer)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return Stated(
        kind="gpt2",
        tokens=tokens,
        types=[CONTROL if token in CONTROLS else ORDINARY for token in tokens],
        scores=[],
        merges=[" ".join(merge) for merge in model["merges"]],
        special={"bos": tokens.index(BEGIN), "eos": tokens.index(END), "pad": tokens.index(END)},
        begins=True,
    )


def with_merges(share: float) -> PreTrainedTokenizerFast:
    """`text_tokenizer` with its first merges alone."""
    written = json.loads(text_tokenizer().backend_tokenizer.to_str())
    merges = written["model"]["merges"]
    written["model"]["merges"] = merges[: int(share * len(merges))]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)),
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
    )


def pieces(merges: list[tuple[str, str]]) -> tuple[PreTrainedTokenizerFast, Stated]:
    """A vocabulary as sentencepiece has them, where a file lists scores and no merges."""
    tokens = ["<unk>", *"▁abc", "▁a", "▁ab", "▁abc", "bc", "▁▁"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    says = Stated(
        kind="llama",
        tokens=tokens,
        types=[CONTROL] + [ORDINARY] * (len(tokens) - 1),
        scores=[0, 0, 0, 0, 0, -2, -3, -4, -1, -9],
        merges=[],
        special={"unk": 0},
        begins=False,
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"), says


def test_a_tokenizer_that_is_the_files_stays_as_it_is() -> None:
    tokenizer, says = with_merges(1), stated()
    before = tokenizer.backend_tokenizer.to_str()
    put_right(tokenizer, says)
    check(tokenizer, says, "m")
    assert tokenizer.backend_tokenizer.to_str() == before


def test_special_tokens_are_those_that_the_file_names() -> None:
    tokenizer, says = with_merges(1), stated()
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token = BEGIN, None, TURN_END
    with pytest.raises(ValueError, match=f"eos_token is 0, expected {says.special['eos']}, '</s>'"):
        check(tokenizer, says, "m")
    put_right(tokenizer, says)
    check(tokenizer, says, "m")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (BEGIN, END, END)
    assert tokenizer.unk_token == TURN_END, "the file says nothing of it"


def test_texts_begin_as_the_file_says() -> None:
    tokenizer, says = text_tokenizer(begins=False), stated()
    tokenizer.pad_token = END
    check(tokenizer, replace(says, begins=None), "m")
    with pytest.raises(ValueError, match="texts begin with <s>: False, expected True"):
        check(tokenizer, says, "m")
    put_right(tokenizer, says)
    check(tokenizer, says, "m")
    assert tokenizer.encode("12")[0] == tokenizer.bos_token_id
    with pytest.raises(ValueError, match="texts begin with <s>: True, expected False"):
        check(tokenizer, replace(says, begins=False), "m")


def test_control_tokens_are_found_whole_in_a_text() -> None:
    says = stated()
    written = json.loads(text_tokenizer().backend_tokenizer.to_str())
    written["added_tokens"] = [one for one in written["added_tokens"] if one["content"] != TURN_END]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), bos_token=BEGIN, eos_token=END
    )
    text = f"sort{TURN_END}12"
    assert tokenizer.encode(text) != text_tokenizer().encode(text)
    put_right(tokenizer, says)
    assert tokenizer.encode(text) == text_tokenizer().encode(text)
    assert len(tokenizer) == len(says.tokens)


def test_an_end_token_under_another_id_than_the_files_is_refused() -> None:
    tokenizer, says = with_merges(1), stated()
    tokens = list(says.tokens)
    tokens[says.special["eos"]] = "<｜end｜>"  # some versions spell it in bytes and add another
    tokenizer.add_special_tokens({"eos_token": "<｜end｜>"})
    says = replace(says, tokens=tokens)
    put_right(tokenizer, says)
    with pytest.raises(ValueError, match=f"eos_token is {len(tokens)}, expected 1, '<｜end｜>'"):
        check(tokenizer, says, "m")


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_tokenizer_with_fewer_merges_than_the_file_is_refused(share: float) -> None:
    tokenizer, says = with_merges(share), stated()
    expected = len(says.merges)
    with pytest.raises(ValueError, match="install another version of transformers") as caught:
        check(tokenizer, says, "small.gguf")
    assert f"it has {int(share * expected)} merges, expected {expected};" in str(caught.value)
    assert str(caught.value).startswith("model small.gguf: the tokenizer that transformers ")


def test_text_is_merged_by_the_scores_of_the_file_where_another_rule_was_made() -> None:
    right, says = pieces(
        [("b", "c"), ("▁", "a"), ("▁a", "b"), ("▁ab", "c"), ("▁a", "bc"), ("▁", "▁")]
    )
    scored = list(zip(says.tokens, says.scores, strict=True))
    other = Tokenizer(models.Unigram(scored, 0, byte_fallback=False))
    other.normalizer, other.decoder = right.backend_tokenizer.normalizer, decoders.Replace("▁", " ")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=other, unk_token="<unk>")
    texts = ["abc", " abc", " ab c", "  bc", "xbc"]
    assert tokenizer(texts).input_ids != right(texts).input_ids
    put_right(tokenizer, replace(says, scores=[]))
    assert tokenizer(texts).input_ids != right(texts).input_ids, "the file has no scores"
    put_right(tokenizer, says)
    assert tokenizer(texts).input_ids == right(texts).input_ids
    check(tokenizer, says, "m")


def test_added_tokens_are_merged_first() -> None:
    tokenizer, says = pieces([])
    added = [
        ADDED if token == "▁▁" else kind
        for token, kind in zip(says.tokens, says.types, strict=True)
    ]
    put_right(tokenizer, replace(says, types=added))
    assert tokenizer.encode("  abc") == [says.tokens.index(one) for one in ("▁▁", "a", "bc")]


def test_words_that_fall_to_pieces_are_refused_where_the_file_lists_no_merges() -> None:
    tokenizer, says = pieces([("▁", "a"), ("▁a", "b"), ("▁ab", "c"), ("▁", "▁")])
    check(tokenizer, says, "m")
    tokenizer, says = pieces([])
    with pytest.raises(ValueError, match="0 of 4 words of the vocabulary are encoded") as caught:
        check(tokenizer, says, "m")
    assert "expected 90%; '▁a' becomes ['▁', 'a'];" in str(caught.value)


def test_a_vocabulary_without_words_has_none_to_lose() -> None:
    tokenizer, says = pieces([])
    check(tokenizer, replace(says, types=[CONTROL] * len(says.types)), "m")
