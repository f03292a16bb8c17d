"""Vocabulary: text to token ids and back, what ends an answer, and the fingerprint by which peers
know they speak the same ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from motley.models.spelled import ALPHABET, Cut, Speller
from motley.spelling import Spelling, UnspelledError

PAD = "<pad>"
END = "<end>"
UNKNOWN = "<unknown>"

WORTH_THREADS = 4096  # tokens: below, handing them to other cores costs more than decoding them

SOME_DAY = "01 Jan 2026"
Turn = dict[str, str]  # role and content


class NoTemplateError(ValueError):
    """A chat template that is not there, or cannot be used."""


class Vocabulary:
    """A tokenizer with the ids that end an answer; the first of them is the one that answers are
    taught to end with.

    `stop`: every token whose text begins with it ends an answer too, and comes first. `size`: the
    rows of the model's vocabulary, which may be more than the tokenizer uses, or fewer; 0: as many.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Iterable[int] = (),
        stop: str = "",
        size: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self._fast: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self._spells_all = tokenizer.unk_token != UNKNOWN
        self.size: int = size or len(tokenizer)
        stops = _beginning_with(tokenizer, stop) if stop else []
        known = [
            i for i in (*stops, tokenizer.eos_token_id, *ends) if i is not None and i < self.size
        ]
        if not known:
            raise ValueError(
                "the tokenizer names no end token, so that no answer could end; set eos_token in "
                "its tokenizer_config.json"
            )
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys(known))
        self._textless_ends = set(known) - set(stops)  # a stop is text, such as a newline
        pad = tokenizer.pad_token_id
        # some were added without giving the model a row
        self.pad_id: int = self.end_id if pad is None or pad >= self.size else pad
        # before a plain prompt
        self.begin: tuple[int, ...] = tuple(
            i for i in tokenizer.encode("") if i not in self.end_ids
        )
        ids = tokenizer.get_vocab()
        # some tokens have no row in the model
        self.is_larger_than_model: bool = max(ids.values(), default=0) >= self.size
        table = json.dumps(sorted(ids.items()), ensure_ascii=True)
        self.fingerprint: str = hashlib.sha256(table.encode()).hexdigest()[:16]

    @property
    def end_id(self) -> int:
        return self.end_ids[0]

    @property
    def has_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a text and nothing around it."""
        if self._fast is None:
            return self._with_rows(list(self.tokenizer.encode(text, add_special_tokens=False)))
        ids = self._with_rows(self._fast.encode(text, add_special_tokens=False).ids)
        if not self._spells_all and self.tokenizer.unk_token_id in ids:
            raise ValueError(
                f"the vocabulary cannot spell {text!r}; tiny models know digits, the words of the "
                "digits task and +-*,<>= only, but for tiny:NAME/bytes, which spells any text"
            )
        return ids

    def _with_rows(self, ids: list[int]) -> list[int]:
        if self.is_larger_than_model and (beyond := [i for i in ids if i >= self.size]):
            token = self.tokenizer.convert_ids_to_tokens(beyond[0])
            raise ValueError(
                f"the tokenizer makes token {beyond[0]} ({token!r}), and the model has rows for "
                f"0 to {self.size - 1} only; give it more with "
                "model.resize_token_embeddings(len(tokenizer)), and save it again"
            )
        return ids

    def chat(self, turns: Sequence[Turn]) -> list[int]:
        """Ids of a conversation up to the model's answer, in the model's own template."""
        has_system = turns[0]["role"] == "system"
        try:
            text: Any = self._rendered(turns, add_generation_prompt=True)
        except NoTemplateError:
            raise
        except (
            Exception
        ) as error:  # a template is a program of the model's author, and raises what it likes
            if not has_system:
                raise ValueError(
                    f"the model's chat template failed: {error}; set prompt.style = 'plain'"
                ) from error
            text = ""
        # some know no system turn: it then opens the first question
        if has_system and turns[0]["content"].strip() not in text:
            system, first, *rest = turns
            return self.chat(
                [{"role": "user", "content": f"{system['content']}\n\n{first['content']}"}, *rest]
            )
        return self.encode(text)

    def _rendered(self, turns: Sequence[Turn], **options: bool) -> Any:
        """Some templates tell the model what day it is: always the same one, since sampler and
        learner must see the same prompt.
        """
        if not self.has_chat:
            raise NoTemplateError(
                'the model has no chat template; set prompt.style = "plain", or use an '
                "instruct model"
            )
        template = str(self.tokenizer.chat_template)
        if "strftime_now" in template and "date_string" not in template:
            raise NoTemplateError(
                "the model's chat template tells the day it is rendered on, so that no two peers "
                "would see the same prompt; "
                'set prompt.style = "plain", or give the model a template without '
                "strftime_now"
            )
        return self.tokenizer.apply_chat_template(
            list(turns), tokenize=False, date_string=SOME_DAY, **options
        )

    @cached_property
    def turn_end_id(self) -> int:
        """What ends a turn in the chat template, if that ends an answer; else the usual end."""
        turns = [{"role": "user", "content": "xyzzy"}, {"role": "assistant", "content": "plugh"}]
        rendered: Any = self._rendered(turns)
        after = self.encode(rendered.rpartition("plugh")[2])
        return after[0] if after and after[0] in self.end_ids else self.end_id

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; only the token that ended it is left out.

        Special tokens show, and so do ids that no token has, as <ID>: what is scored must be all
        that was sampled, or answers could carry what no reward function sees.
        """
        (text,) = self.decode_all([ids])
        return text

    def decode_all(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """The same of many, on all cores where that is worth it."""
        kept = [self._without_end(one) for one in ids]
        if self._nameless and not all(map(self._nameless.isdisjoint, kept)):
            return [self._spelled(one) for one in kept]
        return self._texts(kept)

    def _texts(self, ids: list[list[int]]) -> list[str]:
        if self._fast is not None:
            if sum(map(len, ids)) < WORTH_THREADS:
                return [self._fast.decode(one, skip_special_tokens=False) for one in ids]
            texts: list[str] = self._fast.decode_batch(ids, skip_special_tokens=False)
            return texts
        return [
            str(
                self.tokenizer.decode(
                    one, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            )
            for one in ids
        ]

    @cached_property
    def _nameless(self) -> frozenset[int]:
        """Rows of the model that the tokenizer has no token for, and would decode to nothing."""
        return frozenset(range(self.size)) - set(self.tokenizer.get_vocab().values())

    def _spelled(self, ids: Sequence[int]) -> str:
        parts: list[list[int]] = [[]]
        for id in ids:
            if id in self._nameless:
                parts.append([])
            else:
                parts[-1].append(id)
        names = [f"<{id}>" for id in ids if id in self._nameless]
        first, *rest = self._texts(parts)
        return first + "".join(name + text for name, text in zip(names, rest, strict=True))

    def name_of(self, id: int) -> str | None:
        """What the tokenizer calls a token; None where it has none of that id."""
        name = self.tokenizer.convert_ids_to_tokens(id) if 0 <= id < self.size else None
        return name if isinstance(name, str) else None

    # Bytes, for crews of several vocabularies

    @property
    def spelling(self) -> Spelling:
        """The bytes of each token; NoSpellingError where they cannot be told."""
        return self._speller.spelling

    def cut(self, text: bytes) -> Cut:
        """The tokens of a text that goes on where a prompt ended, or `Uncut` with the reason."""
        (made,) = self.cut_all([text])
        return made

    def cut_all(self, texts: Sequence[bytes]) -> list[Cut]:
        """The same of many, on all cores."""
        return self._speller.cut_all(texts)

    def is_canonical(self, ids: Sequence[int]) -> bool:
        """Whether a completion's tokens are those that `cut` makes of their bytes; the token that
        ended it does not count. One that ends inside a character is not.
        """
        (answer,) = self.are_canonical([ids])
        return answer

    def are_canonical(self, many: Sequence[Sequence[int]]) -> list[bool]:
        """The same of many, on all cores."""
        return self._speller.are_canonical([self._without_end(ids) for ids in many])

    def read_all(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """Text of many, as who has nothing but the table reads it. A decoder may differ: some leave
        out a leading space. Where a token stands for no text nobody else can read it, and it is as
        `decode` has it.
        """
        kept = [self._without_end(one) for one in ids]
        return [self._read(one) for one in kept]

    def _read(self, ids: list[int]) -> str:
        try:
            return self.spelling.text_of(ids)
        except UnspelledError:
            return self.decode_all([ids])[0]

    @cached_property
    def _speller(self) -> Speller:
        return Speller(self.tokenizer, self.size, self._textless_ends)

    def _without_end(self, ids: Sequence[int]) -> list[int]:
        return list(ids[:-1] if ids and ids[-1] in self.end_ids else ids)

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


def _beginning_with(tokenizer: PreTrainedTokenizerBase, stop: str) -> list[int]:
    ids = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).startswith(stop)]
    if not ids:
        raise ValueError(
            f"no token of the vocabulary begins with stop={stop!r}; use a shorter text, such as a "
            "newline"
        )
    exact = [i for i in ids if tokenizer.decode([i]) == stop]
    return exact + [i for i in ids if i not in exact]


def word_vocabulary(words: Sequence[str], symbols: str, at_once: str = "") -> Vocabulary:
    """One token per word and per symbol. A word is letters and the space after them, or what
    `at_once` says, from the left.
    """
    tokens = [PAD, END, UNKNOWN, *words, *symbols]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    parts = "|".join(part for part in ("[a-z]+ ", at_once, r"[\s\S]") if part)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(parts), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    return Vocabulary(_named(tokenizer, unk_token=UNKNOWN))


def byte_vocabulary() -> Vocabulary:
    """One token per byte: byte-level BPE that joins nothing."""
    tokens = [PAD, END, *ALPHABET]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END])
    return Vocabulary(_named(tokenizer))


def _named(tokenizer: Tokenizer, **more: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        **more,
    )
