"""Tokens as bytes: the traps that lie between two vocabularies, and real tokenizers."""

from __future__ import annotations

import random
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from architectures import END, TURN_END, text_tokenizer
from motley.models.sources import find, read_tokenizer
from motley.models.spelled import FEW, PROBES, NoSpellingError, Uncut
from motley.models.tiny import tiny_vocabulary
from motley.models.vocabulary import Vocabulary
from motley.spelling import Spelling, UnspelledError
from vocabularies import REAL, piece_tokenizer, real_tokenizer, text_token, unigram_tokenizer


def prefixed_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = text_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


SMALL = {
    "byte-level": text_tokenizer,
    "byte-level, prefixed": prefixed_tokenizer,
    "pieces": piece_tokenizer,
    "pieces, prepended": lambda: piece_tokenizer("prepend"),
    "pieces, metaspace": lambda: piece_tokenizer("metaspace"),
    "unigram": unigram_tokenizer,
}


@cache
def small(kind: str) -> Vocabulary:
    return Vocabulary(SMALL[kind]())


def ids_of(vocabulary: Vocabulary, text: str) -> tuple[int, ...]:
    made = vocabulary.cut(text.encode())
    assert not isinstance(made, Uncut), made.reason
    return made


def names(vocabulary: Vocabulary, text: str) -> list[str]:
    return list(vocabulary.tokenizer.convert_ids_to_tokens(list(ids_of(vocabulary, text))))


# Every kind of tokenizer


@pytest.mark.parametrize("kind", SMALL)
@settings(max_examples=60)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_any_text_is_spelled_by_its_cut_which_is_canonical(kind: str, text: str) -> None:
    vocabulary, raw = small(kind), text.encode()
    ids = ids_of(vocabulary, text)
    assert vocabulary.spelling.bytes_of(ids) == raw
    assert sum(vocabulary.spelling.lengths_of(ids)) == len(raw)
    assert vocabulary.is_canonical(ids)
    assert vocabulary.is_canonical([*ids, vocabulary.end_id])


@pytest.mark.parametrize("kind", SMALL)
def test_a_text_cut_otherwise_is_not_canonical(kind: str) -> None:
    vocabulary = small(kind)
    ids = ids_of(vocabulary, "12 12")
    letters = [id for text in "12 12" for id in ids_of(vocabulary, text)]
    assert vocabulary.spelling.bytes_of(letters) == b"12 12"
    assert vocabulary.are_canonical([ids, letters, [], ids]) == [True, False, True, True]


@pytest.mark.parametrize("kind", SMALL)
def test_a_begin_token_on_one_side_adds_nothing(kind: str) -> None:
    vocabulary = small(kind)
    assert vocabulary.begin == (vocabulary.tokenizer.bos_token_id,)
    for text in ("", " 12", "Hello"):
        ids = ids_of(vocabulary, text)
        assert vocabulary.begin[0] not in ids
        assert not vocabulary.is_canonical([*vocabulary.begin, *ids])


@pytest.mark.parametrize("kind", SMALL)
def test_special_tokens_stand_for_no_text(kind: str) -> None:
    vocabulary = small(kind)
    (one,) = ids_of(vocabulary, "1")
    for id in vocabulary.tokenizer.all_special_ids:
        assert vocabulary.spelling.token_bytes[id] is None
        assert not vocabulary.is_canonical([one, id, one])
        with pytest.raises(UnspelledError, match=f"token {id} stands for no text"):
            vocabulary.spelling.bytes_of([one, id])


@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind != "unigram"])
def test_special_tokens_as_text_are_text(kind: str) -> None:
    vocabulary = small(kind)
    for special in vocabulary.tokenizer.all_special_tokens:
        text = f"12{special} 1"
        id = vocabulary.tokenizer.convert_tokens_to_ids(special)
        assert id in vocabulary.encode(text)  # which a prompt's template needs
        ids = ids_of(vocabulary, text)
        assert id not in ids
        assert vocabulary.spelling.bytes_of(ids) == text.encode()


def test_a_special_token_that_unigram_would_read_as_a_piece_is_refused_as_text() -> None:
    """Its model looks for the longest names it knows, and special ones are among them."""
    assert small("unigram").cut(b"12</s>") == Uncut("unknown")
    assert small("unigram").cut(b"1<0x0A>") == Uncut("rewritten")


@pytest.mark.parametrize("kind", SMALL)
def test_characters_split_between_tokens_come_together_again(kind: str) -> None:
    vocabulary = small(kind)
    ids = ids_of(vocabulary, "1é😀")
    assert len(ids) >= 7  # a token a byte
    assert vocabulary.spelling.bytes_of(ids).decode() == "1é😀"
    assert vocabulary.is_canonical(ids)
    # ran out of tokens inside a character
    assert vocabulary.spelling.bytes_of(ids[:-1]) == "1é😀".encode()[:-1]
    assert not vocabulary.is_canonical(ids[:-1])
    assert vocabulary.cut("1é😀".encode()[:-1]) == Uncut("not utf-8")


def test_one_text_that_has_no_cut_does_not_shift_the_others() -> None:
    vocabulary = small("byte-level")
    one, two, three = vocabulary.cut_all([b"1", b"\xff", b" 12"])
    assert (one, two, three) == (
        ids_of(vocabulary, "1"),
        Uncut("not utf-8"),
        ids_of(vocabulary, " 12"),
    )
    assert vocabulary.cut_all([]) == []
    assert vocabulary.are_canonical([]) == []


@pytest.mark.parametrize("kind", SMALL)
def test_many_texts_are_cut_as_each_by_itself(kind: str) -> None:
    vocabulary = small(kind)
    texts = [text.encode() for text in PROBES]
    assert sum(map(len, PROBES)) > FEW
    assert max(map(len, PROBES)) <= FEW
    assert vocabulary.cut_all(texts) == [vocabulary.cut(text) for text in texts]


# SentencePiece


@pytest.mark.parametrize("kind", ["pieces, prepended", "pieces, metaspace", "unigram"])
def test_the_space_that_sentencepiece_puts_before_a_text_is_put_before_no_completion(
    kind: str,
) -> None:
    vocabulary = small(kind)
    assert vocabulary.tokenizer.convert_ids_to_tokens(vocabulary.encode("Hello")) == ["▁Hello"]
    assert names(vocabulary, " Hello world") == ["▁Hello", "▁world"]
    assert names(vocabulary, "Hello")[0] == "H"  # and nothing before it
    assert vocabulary.spelling.bytes_of(ids_of(vocabulary, " Hello")) == b" Hello"
    assert vocabulary.decode(ids_of(vocabulary, " Hello")) == "Hello"  # what decoding strips


def test_byte_fallback_spells_what_no_piece_does() -> None:
    vocabulary = small("pieces")
    assert names(vocabulary, "a\né") == ["a", "<0x0A>", "<0xC3>", "<0xA9>"]
    assert names(vocabulary, "<0x0A>") == list("<0x0A>")  # as text
    # a byte for a character that has a piece of its own is another cut of it
    byte = vocabulary.tokenizer.convert_tokens_to_ids("<0x61>")
    assert vocabulary.spelling.bytes_of([byte]) == b"a"
    assert not vocabulary.is_canonical([byte])


def test_without_byte_fallback_unknown_characters_have_no_cut() -> None:
    vocabulary = Vocabulary(piece_tokenizer(falls_back=False))
    assert vocabulary.cut("aé".encode()) == Uncut("unknown")
    assert names(vocabulary, "a 12") == ["a", "▁1", "2"]


def test_the_mark_itself_is_no_text_that_could_be_told_from_a_space() -> None:
    assert small("pieces").cut("a▁b".encode()) == Uncut("rewritten")


# Rows of the model


def test_rows_that_fill_up_the_matrix_have_no_bytes_and_are_never_cut_into() -> None:
    tokenizer = text_tokenizer()
    exact = Vocabulary(tokenizer)
    filled = Vocabulary(tokenizer, size=len(tokenizer) + 7)
    assert len(filled.spelling) == len(tokenizer) + 7
    assert filled.spelling.token_bytes[-7:] == (None,) * 7
    assert filled.spelling.fingerprint == exact.spelling.fingerprint
    assert not filled.is_canonical([len(tokenizer) + 3])


def test_a_token_without_a_row_is_not_cut_into() -> None:
    tokenizer = text_tokenizer()
    tokenizer.add_tokens([text_token("zebra")])
    assert len(ids_of(Vocabulary(tokenizer), "zebra")) == 1
    fewer = Vocabulary(tokenizer, size=len(tokenizer) - 1)
    assert len(fewer.spelling) == len(tokenizer) - 1
    assert fewer.cut(b"zebra") == Uncut("unknown")


def test_end_tokens_that_are_padding_have_no_bytes() -> None:
    tokenizer = text_tokenizer()
    tokenizer.pad_token = END
    vocabulary = Vocabulary(tokenizer, ends=[tokenizer.convert_tokens_to_ids(TURN_END)])
    assert vocabulary.pad_id == vocabulary.end_id
    for id in (vocabulary.pad_id, *vocabulary.end_ids):
        assert vocabulary.spelling.token_bytes[id] is None
    ids = ids_of(vocabulary, "12")
    assert vocabulary.is_canonical([*ids, vocabulary.end_id])
    assert not vocabulary.is_canonical([*ids, vocabulary.pad_id, vocabulary.end_id])


def test_an_end_that_the_tokenizer_calls_text_stands_for_none() -> None:
    tokenizer = text_tokenizer()
    tokenizer.add_tokens([text_token("<|done|>")])
    done = tokenizer.convert_tokens_to_ids("<|done|>")
    assert Vocabulary(tokenizer).cut(b"<|done|>") == (done,)
    vocabulary = Vocabulary(tokenizer, ends=[done])
    assert vocabulary.spelling.token_bytes[done] is None
    assert done not in ids_of(vocabulary, "1<|done|>2")


def test_a_stop_is_text_and_changes_no_table() -> None:
    tokenizer = text_tokenizer()
    tokenizer.add_tokens([text_token("\n\n\n")])
    stops, plain = Vocabulary(tokenizer, stop="\n"), Vocabulary(tokenizer)
    assert stops.spelling == plain.spelling
    assert stops.cut(b"1\n\n\n2") == plain.cut(b"1\n\n\n2")
    assert stops.is_canonical([*ids_of(stops, "12"), stops.end_id])


def test_added_tokens_that_are_text_are_cut_into_whatever_their_ids() -> None:
    tokenizer = text_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|one|>", "<|two|>"]})
    tokenizer.add_tokens([text_token("<think>"), text_token("naïve ")])
    vocabulary = Vocabulary(tokenizer)
    for text in ("<think>", "naïve "):
        id = tokenizer.convert_tokens_to_ids(text)
        assert vocabulary.spelling.token_bytes[id] == text.encode()
        assert id in ids_of(vocabulary, f"1{text}2")
        assert vocabulary.is_canonical(vocabulary.encode(f"1{text}2"))


def test_spaces_among_added_pieces_are_spaces() -> None:
    tokenizer = piece_tokenizer()
    tokenizer.add_tokens([text_token("▁▁")])
    vocabulary = Vocabulary(tokenizer)
    assert names(vocabulary, "a  b") == ["a", "▁▁", "b"]
    assert vocabulary.spelling.bytes_of(ids_of(vocabulary, "a  b")) == b"a  b"


# Tiny models


def test_the_tiny_vocabulary_spells_its_words_and_symbols() -> None:
    vocabulary = tiny_vocabulary()
    spelled = [token for token in vocabulary.spelling.token_bytes if token is not None]
    assert len(spelled) == vocabulary.size - 3
    assert {b"sort ", b"7", b"="} <= set(spelled)
    ids = vocabulary.encode("sort 312=")
    assert vocabulary.spelling.bytes_of(ids) == b"sort 312="
    assert vocabulary.cut(b"sort 312=") == tuple(ids)
    assert vocabulary.is_canonical([*ids, vocabulary.end_id])
    assert vocabulary.cut(b"what?") == Uncut("unknown")
    assert vocabulary.cut(b"<end>") == Uncut("unknown")


# Tokenizers whose tokens cannot be told as bytes


def word_tokenizer(model: models.Model, decoder: decoders.Decoder | None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def byte_level(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer: Tokenizer = text_tokenizer().backend_tokenizer
    tokenizer.normalizer = normalizer
    return tokenizer


TABLE = {"<unk>": 0, "</s>": 1, "play": 2, "go": 3, "play</w>": 4, "a": 5}


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (
            word_tokenizer(models.WordPiece(TABLE, unk_token="<unk>"), decoders.WordPiece()),
            "they say by '##' whether a word goes on, and leave out spaces",
        ),
        (
            word_tokenizer(models.BPE(TABLE, [], end_of_word_suffix="</w>"), decoders.BPEDecoder()),
            "they say by '</w>' whether a word goes on",
        ),
        (
            word_tokenizer(models.WordLevel(TABLE, unk_token="<unk>"), None),
            "it joins them by a space, which changes their text",
        ),
        (
            word_tokenizer(models.WordLevel(TABLE, unk_token="<unk>"), decoders.Fuse()),
            "it reads 'play go' as 'playgo'",
        ),
        (
            byte_level(normalizers.Lowercase()),
            "it reads 'Hello, world! The Quick ' as 'hello, world! the quick '",
        ),
        (byte_level(normalizers.NFKC()), "it reads ' Ñandú, ﬁ, ½, x².*' as ' Ñandú, fi, 1⁄2, x2"),
        (
            byte_level(normalizers.Replace("  ", " ")),
            "it reads 'two  spaces,   three    ' as 'two spaces",
        ),
        (byte_level(normalizers.Strip()), "it reads ' leading space' as 'leading space'"),
    ],
    ids=[
        "wordpiece",
        "bpe of words",
        "no joining",
        "lost spaces",
        "lower",
        "nfkc",
        "spaces",
        "strip",
    ],
)
def test_a_tokenizer_that_changes_text_is_refused(tokenizer: Tokenizer, why: str) -> None:
    eos = END if tokenizer.token_to_id(END) is not None else "</s>"
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos))
    with pytest.raises(NoSpellingError, match=f"cannot be told as bytes: (?:{why})") as caught:
        _ = vocabulary.spelling
    assert str(caught.value).endswith(
        "expected byte-level BPE or SentencePiece: let its model share a crew with models of the "
        "same vocabulary only"
    )
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_composes_characters_has_no_cut_of_others() -> None:
    """Qwen's brings text into NFC: letter and accent become one character."""
    vocabulary = Vocabulary(
        PreTrainedTokenizerFast(tokenizer_object=byte_level(normalizers.NFC()), eos_token=END)
    )
    assert vocabulary.spelling.bytes_of(ids_of(vocabulary, "é")) == "é".encode()
    apart = unicodedata.normalize("NFD", "é")
    assert vocabulary.cut(apart.encode()) == Uncut("rewritten")
    letters = [id for text in ("e", "\u0301") for id in ids_of(vocabulary, text)]
    assert vocabulary.spelling.bytes_of(letters) == apart.encode()
    assert not vocabulary.is_canonical(letters)


def test_the_texts_that_tables_are_held_to_are_composed() -> None:
    assert all(unicodedata.is_normalized("NFC", text) for text in PROBES)


# Real tokenizers

RANGES = [(0x20, 0x7E), (0xA0, 0x24F), (0x400, 0x4FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)]
RANGES += [(0x1F300, 0x1FAFF), (0x0E00, 0x0E7F), (0x2000, 0x206F), (0x9, 0xD), (0x1, 0x10FFFF)]


def random_text(rng: random.Random) -> str:
    """Runs of a few scripts, as they come, with surrogates left out."""
    runs = []
    for _ in range(rng.randint(1, 6)):
        low, high = rng.choice(RANGES)
        runs += [rng.randint(low, high) for _ in range(rng.randint(1, 8))]
        runs += [0x20] * rng.choice((0, 1, 1, 2))
    return "".join(chr(code) for code in runs if not 0xD800 <= code < 0xE000)


def own_text(rng: random.Random, spelling: Spelling) -> str:
    """Tokens that the vocabulary has, in an order that no text has."""
    some = [token for token in rng.choices(spelling.token_bytes, k=rng.randint(1, 12)) if token]
    return b"".join(some).decode(errors="ignore")


def spelled_texts(vocabulary: Vocabulary, rng: random.Random) -> dict[str, tuple[int, ...] | Uncut]:
    """The cuts of many texts, of which each that there is spells its text and is canonical."""
    spelling = vocabulary.spelling
    texts = [*PROBES, *(random_text(rng) for _ in range(300))]
    texts += [own_text(rng, spelling) for _ in range(300)]
    texts += [f"a{special} b" for special in vocabulary.tokenizer.all_special_tokens]
    cuts = vocabulary.cut_all([text.encode() for text in texts])
    assert cuts == [vocabulary.cut(text.encode()) for text in texts]
    made = [cut for cut in cuts if isinstance(cut, tuple)]
    assert all(vocabulary.are_canonical(made))
    for text, cut in zip(texts, cuts, strict=True):
        if isinstance(cut, tuple):
            assert spelling.bytes_of(cut) == text.encode()
    return dict(zip(texts, cuts, strict=True))


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_tokenizer_spells_random_text(name: str, real_tokenizers: Path) -> None:
    tokenizer = real_tokenizer(real_tokenizers, name)
    vocabulary = Vocabulary(tokenizer, size=len(tokenizer) + 100)
    cuts = spelled_texts(vocabulary, random.Random(name))
    spelling = vocabulary.spelling
    assert Spelling.decode(spelling.encode()) == spelling
    lost = [text for text, cut in cuts.items() if isinstance(cut, Uncut)]
    if name == "jiutian-139moe-chat":  # knows few characters, and puts a space before a text
        assert len(cuts) - len(lost) > 200
        return
    assert all(not unicodedata.is_normalized("NFC", text) for text in lost)
    for text, cut in cuts.items():  # the same that the whole tokenizer makes, special tokens apart
        if text not in lost and not any(name in text for name in tokenizer.all_special_tokens):
            assert tuple(vocabulary.encode(text)) == cut
    # a byte at a time is no cut that it would make
    single = [spelling.token_bytes.index(byte) for byte in (b"t", b"h", b"e")]
    assert spelling.bytes_of(single) == b"the"
    assert not vocabulary.is_canonical(single)


@pytest.mark.models
@pytest.mark.slow
def test_the_tokenizer_of_smollm2_spells_random_text(smollm2: str) -> None:
    """It has no token for some bytes of rare characters, and leaves them out."""
    vocabulary = Vocabulary(read_tokenizer(find(smollm2)))
    cuts = spelled_texts(vocabulary, random.Random(0))
    single = {token for token in vocabulary.spelling.token_bytes if token and len(token) == 1}
    assert len(single) > 230
    for text, cut in cuts.items():
        can_spell = all(bytes([byte]) in single for byte in text.encode())
        assert isinstance(cut, tuple) or (cut == Uncut("rewritten") and not can_spell)
