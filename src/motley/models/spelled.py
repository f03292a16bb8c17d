"""How the tokens of a tokenizer become bytes, and bytes its tokens.

`Speller` makes the table id -> bytes of a tokenizer (motley.spelling) and cuts bytes as it would. A
completion goes on where a prompt ended, so nothing is put before it: no begin token, and no space
as SentencePiece puts one before a text. Special tokens are never read from text.

A table is believed only after the tokenizer itself has confirmed it, on texts of many kinds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, Literal, cast
from unicodedata import is_normalized

from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerBase

from motley.spelling import Spelling, UnspelledError

Parts = dict[str, Any]  # normalizer, pre_tokenizer and decoder, as a tokenizer.json writes them

_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")
_NUM_OWN_PROBES = 64  # texts of a vocabulary's own tokens
FEW = 512  # characters: so few are cut before threads are awake

# All in the form NFC, that some tokenizers bring text into; what else they change shows here.
PROBES = (
    "Hello, world! The Quick brown fox's 2nd jump.",
    " leading space",
    "trailing space ",
    "two  spaces,   three    four",
    "tab\ttab\t\ttab \t mixed",
    "one line\nand another",
    "\n\nlines\r\n  indented\n\tby a tab\n\n\n",
    "Crème brûlée, naïve Ångström, ÇA VA, ß, ø, Ñandú, ﬁ, ½, x², Ａ, …, “quotes” – dashes",
    "Привет, мир. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया. สวัสดี",
    "你好，世界。日本語のテキスト、한국어 텍스트.",
    "😀 👩‍👩‍👧 🏳️‍🌈 👍🏽 𝒳 𐍈",
    "0 1 12 123 1234 12345678901234567890 3.14159 1,000,000 -7 1e-9",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)], \"b\": None}  # <tag/> && || !=\n",
    '#include <stdio.h>\nint main() { printf("%d\\n", 0x1F); }\t// \u00a0 \u200b',
)


class NoSpellingError(ValueError):
    """A tokenizer whose tokens cannot be told as bytes."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the tokens of this tokenizer cannot be told as bytes: {why}; expected byte-level BPE "
            "or SentencePiece: let its model share a crew with models of the same vocabulary only"
        )


@dataclass(frozen=True, slots=True)
class Uncut:
    """Bytes that a vocabulary has no cut of, and why.

    not utf-8: they end, begin or break inside a character, and a tokenizer reads characters only.
    unknown: a part of it is spelled by no token, or by a special one only, that stands for no text.
    rewritten: the tokenizer brings the text into another form (NFC, say), or leaves out what it has
    no token for; what it would give is the cut of another text.
    """

    reason: Literal["not utf-8", "unknown", "rewritten"]


Cut = tuple[int, ...] | Uncut


class Speller:
    """The table of a tokenizer, and its cut of any bytes.

    `size`: the rows of the model. `ends`: ids that end an answer. They stand for no text, whatever
    the tokenizer says of them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, size: int, ends: Collection[int] = ()
    ) -> None:
        fast: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise NoSpellingError("it has no tokenizer.json, only code of its own")
        parts = _parts_of(fast)
        added = fast.get_added_tokens_decoder()
        silent: set[int | None] = {id for id, token in added.items() if token.special}
        unknown = getattr(fast.model, "unk_token", None)  # whether or not the tokenizer names it
        silent |= {*tokenizer.all_special_ids, *ends, unknown and fast.token_to_id(unknown)}
        texts = {id: token for id, token in sorted(added.items()) if id not in silent}
        self.spelling = Spelling(_table(fast, parts, size, texts, silent))
        self._bare, self._ids = _bare(fast, parts, texts)
        self._confirm(fast, _has_prefix(parts), leave_out=texts)

    def cut_all(self, texts: Sequence[bytes]) -> list[Cut]:
        """The tokens that the tokenizer makes of each text, or why there are none."""
        decoded = [_decoded(text) for text in texts]
        known = [text for text in decoded if text is not None]
        encoded = iter(self._encoded(known))
        cuts: list[Cut] = []
        for raw, text in zip(texts, decoded, strict=True):
            cuts.append(Uncut("not utf-8") if text is None else self._checked(raw, next(encoded)))
        return cuts

    def are_canonical(self, many: Sequence[Sequence[int]]) -> list[bool]:
        """Whether the tokens are those that the tokenizer makes of their bytes.

        Tokens that stand for no text never are. Nor are those that end inside a character, as a
        completion may that ran out of tokens: no tokenizer makes them of any text, and a receiver
        could not cut their bytes either.
        """
        texts: list[bytes | None] = []
        for ids in many:
            try:
                texts.append(self.spelling.bytes_of(ids))
            except UnspelledError:
                texts.append(None)
        cuts = iter(self.cut_all([text for text in texts if text is not None]))
        return [
            text is not None and tuple(ids) == next(cuts)
            for ids, text in zip(many, texts, strict=True)
        ]

    def _encoded(self, texts: list[str]) -> list[tuple[int, ...]]:
        if sum(map(len, texts)) <= FEW:
            batch = [self._bare.encode(text, add_special_tokens=False) for text in texts]
        else:
            batch = self._bare.encode_batch_fast(texts, add_special_tokens=False)
        if not self._ids:
            return [tuple(one.ids) for one in batch]
        return [
            tuple(ids)
            if self._ids.keys().isdisjoint(ids := one.ids)
            else tuple(self._ids.get(id, id) for id in ids)
            for one in batch
        ]

    def _checked(self, raw: bytes, ids: tuple[int, ...]) -> Cut:
        """Nothing is believed of a cut that does not spell what was cut."""
        try:
            return ids if self.spelling.bytes_of(ids) == raw else Uncut("rewritten")
        except UnspelledError:
            return Uncut("unknown")

    def _confirm(self, fast: Tokenizer, has_prefix: bool, leave_out: Collection[int]) -> None:
        """Hold the table to what the tokenizer makes of texts. None of them names a special token,
        so where one comes out, the text was unknown, and says nothing.
        """
        num_known = 0
        texts = [*PROBES, *_own_texts(self.spelling, leave_out)]
        cuts = self.cut_all([text.encode() for text in texts])
        made = fast.encode_batch_fast(texts, add_special_tokens=False)
        for text, cut, one in zip(texts, cuts, made, strict=True):
            try:
                spelled = self.spelling.bytes_of(one.ids).decode(errors="replace")
            except UnspelledError:
                continue
            if spelled != text and not (has_prefix and spelled == " " + text):
                raise NoSpellingError(_difference(text, spelled))
            if isinstance(cut, Uncut):
                raise NoSpellingError(f"it has no cut of {text[:24]!r} ({cut.reason})")
            num_known += 1
        if not num_known:
            raise NoSpellingError("it has no token for any text that was tried")


def _difference(text: str, spelled: str) -> str:
    same = (one == other for one, other in zip(text, spelled, strict=False))
    start = max(0, len(list(takewhile(bool, same))) - 8)
    return f"it reads {text[start : start + 24]!r} as {spelled[start : start + 24]!r}"


def _decoded(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


# A tokenizer's parts


def _parts_of(fast: Tokenizer) -> Parts:
    """What stands around the model, without writing out its whole vocabulary."""
    shell = Tokenizer(models.WordLevel({}, unk_token=""))
    shell.normalizer, shell.pre_tokenizer = fast.normalizer, fast.pre_tokenizer
    shell.decoder = fast.decoder
    return cast(Parts, json.loads(shell.to_str()))


def _walk(part: Any) -> Iterator[Parts]:
    """A part and all that it consists of."""
    if isinstance(part, list):
        for inner in part:
            yield from _walk(inner)
    elif isinstance(part, dict):
        if "type" in part:
            yield part
        for inner in part.values():
            yield from _walk(inner)


def _has_prefix(parts: Parts) -> bool:
    """Whether the tokenizer says that it puts a space before a text."""
    return any(
        part["type"] == "Prepend"
        or part.get("add_prefix_space", False)
        or part.get("prepend_scheme", "never") != "never"
        for part in _walk([parts["normalizer"], parts["pre_tokenizer"]])
    )


def _bare(
    fast: Tokenizer, parts: Parts, texts: dict[int, AddedToken]
) -> tuple[Tokenizer, dict[int, int]]:
    """The same tokenizer for the middle of a text: it puts nothing before it, and knows no special
    token; and the ids of added tokens, where it gives them other ones. The model itself is shared.
    """
    shell = json.loads(json.dumps(parts))
    for part in _walk([shell["normalizer"], shell["pre_tokenizer"]]):
        if part["type"] == "Prepend":
            part["prepend"] = ""
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
        if "prepend_scheme" in part:
            part["prepend_scheme"] = "never"
    around = Tokenizer.from_str(json.dumps(shell))
    bare = Tokenizer(fast.model)
    if around.normalizer is not None:
        bare.normalizer = around.normalizer
    if around.pre_tokenizer is not None:
        bare.pre_tokenizer = around.pre_tokenizer
    bare.add_tokens(list(texts.values()))
    ids = [(bare.token_to_id(token.content), id) for id, token in texts.items()]
    return bare, {other: id for other, id in ids if other is not None and other != id}


# A tokenizer's tokens


def _table(
    fast: Tokenizer, parts: Parts, size: int, texts: dict[int, AddedToken], silent: set[int | None]
) -> tuple[bytes | None, ...]:
    spell = _way_of_spelling(fast, parts)
    table: list[bytes | None] = [None] * size
    for name, id in fast.get_vocab(with_added_tokens=True).items():
        if id < size and id not in silent:
            table[id] = spell(name, id in texts) or None
    return tuple(table)


def _way_of_spelling(fast: Tokenizer, parts: Parts) -> Callable[[str, bool], bytes | None]:
    """How the name of a token stands for bytes; it may matter whether the token was added."""
    glue = (
        getattr(fast.model, "continuing_subword_prefix", None),
        getattr(fast.model, "end_of_word_suffix", None),
    )
    if any(glue):
        raise NoSpellingError(
            f"they say by {''.join(filter(None, glue))!r} whether a word goes on, and leave out "
            "spaces"
        )
    decoders = {part["type"]: part for part in _walk(parts["decoder"])}
    if "ByteLevel" in decoders:
        return _of_bytes
    if not decoders.keys() & {"Metaspace", "Replace", "ByteFallback", "Fuse"}:
        raise NoSpellingError(
            f"it joins them by {', '.join(decoders) or 'a space'}, which changes their text"
        )
    marks = [decoders["Metaspace"]["replacement"]] if "Metaspace" in decoders else []
    if "Replace" in decoders and decoders["Replace"]["content"] == " ":
        marks.append(decoders["Replace"]["pattern"].get("String", ""))
    mark, falls_back = next(iter(marks), ""), "ByteFallback" in decoders
    return lambda name, _: _of_piece(name, mark, falls_back)


def _alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: those that print in Latin-1 are
    themselves, the others follow from U+0100 on, in their order.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(0x100 + place): byte for place, byte in enumerate(hidden)
    }


ALPHABET = _alphabet()


def _of_bytes(name: str, is_added: bool) -> bytes | None:
    """Added tokens are named by their text. None for other names that are not in the alphabet: no
    text is ever cut into such a token.
    """
    if is_added:
        return name.encode()
    try:
        return bytes([ALPHABET[character] for character in name])
    except KeyError:
        return None


def _of_piece(name: str, mark: str, falls_back: bool) -> bytes:
    byte = _BYTE_NAME.fullmatch(name) if falls_back else None
    if byte:
        return bytes.fromhex(byte[1])
    # of added tokens too: Gemma's are ▁▁, ▁▁▁ and so on, and stand for spaces
    return (name.replace(mark, " ") if mark else name).encode()


def _own_texts(spelling: Spelling, leave_out: Collection[int]) -> Iterator[str]:
    """Tokens of all parts of the vocabulary, where they are whole characters: alone, and two with a
    space between. Added tokens may take spaces with them, and are left out.
    """
    step = max(1, len(spelling) // _NUM_OWN_PROBES)
    ids = [id for id in range(0, len(spelling), step) if id not in leave_out]
    tokens = [_decoded(spelling.token_bytes[id] or b"") for id in ids]
    texts = [text for text in tokens if text and is_normalized("NFC", text)]
    yield from texts
    yield from (f"{one} {other}" for one, other in pairwise(texts))
