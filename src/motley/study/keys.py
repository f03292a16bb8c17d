"""What makes two runs the same: the content of their crew files, wherever that lies and whoever
asks. A study keeps a run under this key, and makes it once.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from motley.config import CrewConfig, by_name, with_each_file
from motley.files import whole
from motley.objectives import objective
from motley.study.defaults import KEYS, OF_ROWS, SETTINGS

# How a run is computed and watched, and not what it computes
NOT_CONTENT = (
    "crew.chosen",
    "crew.report",
    "crew.report_all",
    "evaluate.traces",
    "learning.checkpoint_every",
    "learning.token_budget",
    "peer.*.device",
    "peer.*.gradient_checkpointing",
    "peer.*.offload",
)
WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
MOST_LETTERS = 80  # of a folder's name, before the key
KEY_LETTERS = 12  # of it in names of folders


def key_of(config: CrewConfig) -> str:
    """A hash of what a crew file says: seed and all, but not what has its first default. So new
    keys change none, and a new default is another run (study/defaults.py).

    Files count by their content. Local models count by name and size: they are too large to read.
    """
    named = by_name(with_each_file(config, _digest))
    plain = _said(named)
    for name, peer in zip([p.name for p in config.peer], plain.pop("peer"), strict=True):
        plain[f"peer.{name}"] = peer | _size_of(config.named(name).model)
    plain["objective"] = _newer_settings(named) | plain["objective"]
    content = {
        f"{table}.{key}": value
        for table, values in plain.items()
        for key, value in values.items()
        if not any(fnmatchcase(f"{table}.{key}", pattern) for pattern in NOT_CONTENT)
    }
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def _said(value: Any) -> Any:
    """A struct without what has its first default, as plain tables."""
    if isinstance(value, msgspec.Struct):
        first = KEYS.get(type(value).__name__, {})
        told = {}
        for field in msgspec.structs.fields(value):
            own = getattr(value, field.name)
            default = first.get(field.encode_name, field.default)
            said = _said(own)
            if default is msgspec.NODEFAULT or said != _usual(default):
                told[field.encode_name] = said
        return told
    if isinstance(value, tuple | list):
        return [_said(one) for one in value]
    return msgspec.to_builtins(value)


def _usual(default: Any) -> Any:
    """What is said of a value that has its first default. Lists and tables are always told."""
    if not isinstance(default, msgspec.Struct):
        return _said(default)
    made = {f.encode_name: f.default_factory for f in msgspec.structs.fields(default)}
    return {key: make() for key, make in made.items() if make is not msgspec.NODEFAULT}


def _newer_settings(config: CrewConfig) -> dict[str, Any]:
    """Those of the crew's row whose default is no longer the first."""
    first = SETTINGS | OF_ROWS.get(config.crew.row, {})
    now = objective(config.crew.objective, config.crew.variant).settings()
    return {key: value for key, value in now.items() if value != first.get(key, value)}


def _digest(file: str) -> str:
    path = Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else file


def _size_of(model: str) -> dict[str, int]:
    path = Path(model)
    if path.is_file():
        return {"bytes": path.stat().st_size}
    if not path.is_dir():
        return {}
    return {"bytes": sum(f.stat().st_size for form in WEIGHTS for f in path.glob(form))}


def run_name(config: CrewConfig, key: str) -> str:
    """A run's folder: who and how in letters that every disk takes, then the key.

    >>> run_name(config, "ab12cd34ef567890")
    'specialists-uplift-relative-0-ab12cd34ef56'
    """
    words = re.sub(r"[^\w.,+=-]", "-", f"{config.crew.name}-{config.crew.row}")[:MOST_LETTERS]
    return f"{words}-{config.crew.seed}-{key[:KEY_LETTERS]}"


def with_copies(config: CrewConfig, folder: Path) -> CrewConfig:
    """The crew with its files in a folder of the study, copied there if they are not yet, so that
    they go where the study goes.
    """

    def copied(file: str) -> str:
        path = Path(file)
        if not path.is_file() or folder.resolve() in path.resolve().parents:
            return file
        copy = folder.resolve() / f"{_digest(file)[:KEY_LETTERS]}-{path.name}"
        if not copy.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with whole(copy) as partial:
                shutil.copyfile(path, partial)
        return str(copy)

    return with_each_file(config, copied)
