"""What a GGUF file says of its tokenizer, held against what transformers made of it.

transformers loses parts of it, other ones in each version: the end token, merges that follow from
the vocabulary, how text is cut. What the file names is put right; a tokenizer that still differs is
refused. Knows nothing of weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase
from transformers import __version__ as transformers_version

SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
ORDINARY, CONTROL, ADDED, BYTE = 1, 3, 4, 6  # gguf.TokenType
SENTENCEPIECE = "llama"  # the kind whose merges follow from the scores of its tokens
SAMPLED = 2000  # words, evenly over the vocabulary
# of the words, those that must be encoded as themselves: .99 are where all is right (SmolLM2, Qwen,
# Gemma, Mistral); text cut by GPT-2's rule instead of Qwen's leaves .85, without merges none are
WHOLE = 0.9


@dataclass(frozen=True, slots=True)
class Stated:
    """A tokenizer in the file's own words."""

    kind: str  # gpt2: spelled in bytes; in others ▁ is a space
    tokens: list[str]
    types: list[int]  # of each token
    scores: list[float]  # of each token, or none
    merges: list[str]  # none: they follow from the vocabulary
    special: dict[str, int]  # such as eos: 2, where the file names one
    begins: bool | None  # texts begin with the begin token; None: it does not say


def read_stated(path: Path) -> Stated:
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def read(name: str, otherwise: Any) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{name}")
        return otherwise if field is None else field.contents()

    tokens: list[str] = read("tokens", [])
    ids = {name: read(f"{key}_token_id", None) for name, key in SPECIAL.items()}
    return Stated(
        kind=read("model", ""),
        tokens=tokens,
        types=read("token_type", [ORDINARY] * len(tokens)),
        scores=read("scores", []),
        merges=read("merges", []),
        special={name: i for name, i in ids.items() if i is not None and i < len(tokens)},
        begins=read("add_bos_token", None),
    )


def put_right(tokenizer: PreTrainedTokenizerBase, stated: Stated) -> None:
    """Give a tokenizer what the file names and transformers may have lost."""
    if stated.kind == SENTENCEPIECE and len(stated.scores) == len(stated.tokens):
        _merge_by_scores(tokenizer, stated)
    for name, token in stated.special.items():
        if getattr(tokenizer, f"{name}_token_id") != token:
            setattr(tokenizer, f"{name}_token", stated.tokens[token])
    known = tokenizer.get_added_vocab()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for i, (token, kind) in enumerate(zip(stated.tokens, stated.types, strict=True))
            if kind in (CONTROL, ADDED)
            and token not in known
            and tokenizer.convert_tokens_to_ids(token) == i
        ]
    )
    if stated.begins:
        _begin_texts(tokenizer)


def _merge_by_scores(tokenizer: PreTrainedTokenizerBase, stated: Stated) -> None:
    """Some versions cut text by another rule than that of the file, which is to merge."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or json.loads(fast.to_str())["model"].get("merges"):
        return
    tokens = [token.replace(" ", "▁") for token in stated.tokens]
    unknown = stated.special.get("unk")
    fast.model = BPE(
        {token: i for i, token in enumerate(tokens)},
        _merges(tokens, stated),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=BYTE in stated.types,
    )


def _merges(tokens: list[str], stated: Stated) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a third: added ones first, then by the third's score; those
    that make the same one with the longest left part first.
    """
    known = set(tokens)
    first = sorted(
        range(len(tokens)), key=lambda i: (stated.types[i] != ADDED, -stated.scores[i], i)
    )
    return [
        (left, right)
        for token in (tokens[i] for i in first)
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in known and (right := token[cut:]) in known
    ]


def _begin_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    """Put the begin token before every text: without it such models babble."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or tokenizer.bos_token_id is None:
        return
    if tokenizer.bos_token_id not in tokenizer.encode(""):
        bos = tokenizer.bos_token
        fast.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )


def check(tokenizer: PreTrainedTokenizerBase, stated: Stated, name: str) -> None:
    """Refuse a tokenizer that is not the file's. `name`: the model's."""
    wrong = (
        _wrong_special(tokenizer, stated)
        or _wrong_begin(tokenizer, stated)
        or _wrong_merges(tokenizer, stated)
        or _wrong_words(tokenizer, stated)
    )
    if wrong:
        raise ValueError(
            f"model {name}: the tokenizer that transformers {transformers_version} makes of the "
            f"GGUF file is not the file's: {wrong}; install another version of transformers (from "
            "5.18 on it reads most files right), or use the model's Hugging Face folder"
        )


def _wrong_special(tokenizer: PreTrainedTokenizerBase, stated: Stated) -> str:
    for name, token in stated.special.items():
        got = getattr(tokenizer, f"{name}_token_id")
        if got != token:
            return f"{name}_token is {got}, expected {token}, {stated.tokens[token]!r}"
    return ""


def _wrong_begin(tokenizer: PreTrainedTokenizerBase, stated: Stated) -> str:
    if stated.begins is None or "bos" not in stated.special:
        return ""
    got = tokenizer.bos_token_id in tokenizer.encode("")
    if got == stated.begins:
        return ""
    return f"texts begin with {tokenizer.bos_token}: {got}, expected {stated.begins}"


def _wrong_merges(tokenizer: PreTrainedTokenizerBase, stated: Stated) -> str:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or not stated.merges:
        return ""
    got = len(json.loads(fast.to_str())["model"].get("merges", ()))
    expected = len(set(stated.merges))
    return f"it has {got} merges, expected {expected}" if got < expected else ""


def _wrong_words(tokenizer: PreTrainedTokenizerBase, stated: Stated) -> str:
    """A lost merge, or text cut where it should not be, shows in the words it was made for."""
    words = _words(tokenizer, stated)
    cut = {
        token: pieces
        for token, text in words.items()
        if (pieces := tokenizer.encode(text, add_special_tokens=False)) != [token]
    }
    whole = len(words) - len(cut)
    if whole >= WHOLE * len(words):
        return ""
    token, pieces = next(iter(cut.items()))
    return (
        f"{whole} of {len(words)} words of the vocabulary are encoded as themselves, expected "
        f"{WHOLE:.0%}; {stated.tokens[token]!r} becomes {tokenizer.convert_ids_to_tokens(pieces)}"
    )


def _words(tokenizer: PreTrainedTokenizerBase, stated: Stated) -> dict[int, str]:
    """Tokens of more than a letter, and the text that each must be found in whole.

    Where ▁ is a space only tokens that begin with one: the others stand within words.
    """
    mark = "" if stated.kind == "gpt2" else "▁"
    ids = [
        i
        for i, (token, kind) in enumerate(zip(stated.tokens, stated.types, strict=True))
        if kind == ORDINARY and len(token) > 1 and token.startswith(mark)
    ]
    texts = {
        i: tokenizer.decode([i], clean_up_tokenization_spaces=False)
        for i in ids[:: max(1, len(ids) // SAMPLED)]
    }
    return {i: text for i, text in texts.items() if "\ufffd" not in text}  # part of a letter
