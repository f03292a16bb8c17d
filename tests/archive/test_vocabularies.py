"""A pretrained model's vocabulary, told by a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from motley.archive import vocabularies
from motley.archive.vocabularies import told
from motley.models.tiny_vocabularies import tiny_vocabularies
from motley.models.vocabulary import Vocabulary, byte_vocabulary


@pytest.mark.parametrize("known", tiny_vocabularies(), ids=lambda known: known.fingerprint)
def test_what_is_told_reads_as_the_vocabulary_does(known: Vocabulary) -> None:
    short = told(known)
    assert (short.fingerprint, short.size) == (known.fingerprint, known.size)
    assert short.spelling == known.spelling
    ids = [*range(known.size)]
    shown = [short.decode([id]) for id in ids]
    assert all(shown)
    assert short.decode(ids) == "".join(shown) or "�" in "".join(shown)
    textless = [id for id in ids if known.spelling.token_bytes[id] is None]
    assert {id: known.name_of(id) for id in textless} == short.names
    assert short.decode([known.size + 7]) == f"<{known.size + 7}>"


ASK = """
import sys
from motley.archive.vocabularies import vocabulary_of
found = vocabulary_of(sys.argv[1])
print(found and found.fingerprint, "torch" in sys.modules)
"""


def ask(model: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(model)], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.slow
def test_a_process_without_torch_asks_another_and_stays_without(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    known = byte_vocabulary()
    known.save(tmp_path)
    Qwen2Config(vocab_size=known.size).save_pretrained(tmp_path)
    read = vocabularies.vocabulary_of(str(tmp_path))  # by this process, which has torch
    assert isinstance(read, Vocabulary)
    assert ask(tmp_path) == [read.fingerprint, "False"]


@pytest.mark.slow
def test_a_model_that_is_not_here_is_not_asked_for_elsewhere(tmp_path: Path) -> None:
    assert ask(tmp_path / "none") == ["None", "False"]


def test_where_torch_is_there_already_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(vocabularies.subprocess, "run", never)
    assert vocabularies.vocabulary_of("./no/such/model") is None
