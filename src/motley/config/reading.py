"""Crew files: reading, writing, and one line with a remedy for what is wrong in one."""

from __future__ import annotations

import logging
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from motley.config.crew import CrewConfig
from motley.config.guessing import allowed, remedy
from motley.config.settings import Document, with_settings
from motley.files import replace

logger = logging.getLogger(__name__)


class ConfigError(ValueError):
    """One line that says what is wrong in a crew file, and the remedy."""


def read_config(path: Path, settings: Sequence[str] = ()) -> CrewConfig:
    """Read and check a crew file, with `learning.lr=1e-5` and the like on top of what it says."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read crew file {path}: {error.strerror}; give the path of a TOML file, such "
            "as crews/specialists.toml"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"crew file {path} is not UTF-8 text: {error.reason} at byte {error.start}; "
            f"{_expected(str(path))}"
        ) from None
    config = parse_config(text, source=str(path), settings=settings)
    logger.info("read %s%s", path.resolve(), "".join(f" --set {one}" for one in settings))
    return _with_absolute_paths(config, path.resolve().parent)


_FILES = ("file", "heldout", "ood")  # keys of [task] that name files


class _Places(NamedTuple):
    """Where what a crew file names is on this machine."""

    file: Callable[[str], str]
    reward: Callable[[str], str]  # of "module:function"


def _with_absolute_paths(config: CrewConfig, folder: Path) -> CrewConfig:
    """Files and reward modules are named relative to the crew file; a run must find them from
    anywhere.
    """

    def reward(spec: str) -> str:
        module, colon, function = spec.rpartition(":")
        path = folder / module.removesuffix(".py")
        return f"{path}:{function}" if colon and _is_module(path) else spec

    return _with_files(config, _Places(lambda name: str(folder / name), reward))


def with_files_in(config: CrewConfig, folder: Path | None) -> CrewConfig:
    """Another's crew, with its files and reward modules looked for by name in a folder of this
    machine.

    Which folder of this machine a program is taken from is not another's to say: a module that is
    not there is looked for on Python's own path.
    """

    def reward(spec: str) -> str:
        bare = re.split(r"[/\\]", spec)[-1]
        path = (folder or Path()).resolve() / bare.rpartition(":")[0]
        return f"{path.parent / bare}" if folder and _is_module(path) else bare

    def file(name: str) -> str:
        return name if folder is None else str(folder.resolve() / Path(name).name)

    return _with_files(config, _Places(file, reward))


def with_models_in(config: CrewConfig, folder: Path) -> CrewConfig:
    """The crew with models that are written as relative paths looked for in a folder."""
    return _with_models(config, lambda name: str(folder / name))


def with_each_file(config: CrewConfig, place: Callable[[str], str]) -> CrewConfig:
    """The crew with each of its task's files put elsewhere by `place`."""
    return msgspec.structs.replace(
        _with_files(config, _Places(place, lambda spec: spec)), peer=config.peer
    )


def by_name(config: CrewConfig) -> CrewConfig:
    """The crew with files, reward modules and local models by their last names: the same on every
    machine, wherever they lie there.
    """
    bare = lambda place: re.split(r"[/\\]", place)[-1]
    named = _with_files(config, _Places(bare, bare))
    peers = tuple(
        msgspec.structs.replace(peer, model=bare(peer.model)) if _is_place(peer.model) else peer
        for peer in named.peer
    )
    return msgspec.structs.replace(named, peer=peers)


def write_beside(config: CrewConfig, path: Path) -> None:
    """Write a crew file that names files and models of this machine from where it lies itself, so
    that they may be moved together.
    """
    folder = path.resolve().parent
    near = lambda place: os.path.relpath(place, folder) if Path(place).is_absolute() else place
    placed = _with_files(config, _Places(near, near))
    peers = tuple(
        msgspec.structs.replace(peer, model=f"./{near(peer.model)}")
        if Path(peer.model).is_absolute()
        else peer
        for peer in placed.peer
    )
    write_config(msgspec.structs.replace(placed, peer=peers), path)


def _is_place(model: str) -> bool:
    return Path(model).is_absolute() or model.startswith(("./", "../")) or model.endswith(".gguf")


def _is_module(path: Path) -> bool:
    """Whether a folder has the module, or the package that it is of: FOLDER/package.module."""
    top = path.name.partition(".")[0]
    return (path.parent / f"{top}.py").is_file() or (path.parent / top / "__init__.py").is_file()


def _with_files(config: CrewConfig, places: _Places) -> CrewConfig:
    task = _placed(config.task, places)
    crew = msgspec.structs.replace(config.crew, task=_placed_spec(config.crew.task, places))
    placed = _with_models(config, places.file)
    return msgspec.structs.replace(placed, task=task, crew=crew)


def _with_models(config: CrewConfig, place: Callable[[str], str]) -> CrewConfig:
    peers = tuple(
        msgspec.structs.replace(peer, model=_placed_model(peer.model, place))
        for peer in config.peer
    )
    return msgspec.structs.replace(config, peer=peers)


def _placed(table: dict[str, Any], places: _Places) -> dict[str, Any]:
    """A [task], and the tables in it, which are tasks themselves in a mixture."""
    return {key: _placed_value(key, value, places) for key, value in table.items()}


def _placed_value(key: str, value: Any, places: _Places) -> Any:
    if isinstance(value, dict):
        return value if key == "fields" else _placed(value, places)
    if key in ("reward", *_FILES) and isinstance(value, list):
        return [_placed_value(key, one, places) for one in value]
    if not isinstance(value, str):
        return value
    if key in _FILES:
        return places.file(value)
    if key == "reward":
        return places.reward(value)
    return _placed_spec(value, places) if key == "task" else value


def _placed_spec(spec: str, places: _Places) -> str:
    if spec.startswith("file:"):
        return f"file:{places.file(spec.removeprefix('file:'))}"
    return spec if spec.startswith("reasoning_gym:") else places.reward(spec)


def _placed_model(model: str, place: Callable[[str], str]) -> str:
    """A folder or GGUF file beside the crew file; ids, names and folders elsewhere stay."""
    written_as_path = model.startswith(("./", "../")) or (
        model.endswith(".gguf") and not Path(model).is_absolute()
    )
    return place(model) if written_as_path else model


def parse_config(text: str, source: str = "crew file", settings: Sequence[str] = ()) -> CrewConfig:
    document = _document(text, source)
    if settings:
        document = with_settings(document, settings)
        source = " ".join([source, *(f"--set {setting}" for setting in settings)])
    try:
        return msgspec.convert(document, CrewConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error), document)}") from None


def with_changes(config: CrewConfig, settings: Sequence[str]) -> CrewConfig:
    """A crew with `learning.lr=1e-5` and the like instead of what it says."""
    document = with_settings(_without_none(msgspec.to_builtins(config)), settings)
    try:
        return msgspec.convert(document, CrewConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), document)) from None


def _document(text: str, source: str) -> Document:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: {error}; {_expected(source)}") from None


def _expected(source: str) -> str:
    """The words for what is no crew file, and what to do where it is data."""
    if source.lower().endswith((".jsonl", ".json", ".csv", ".parquet")):
        new = shlex.join(["motley", "new", "--data", source])
        return f"expected a crew file in TOML; for one that trains on this data run: {new}"
    return "expected a crew file in TOML"


def write_config(config: CrewConfig, path: Path) -> None:
    replace(path, config_text(config).encode())


# Of a peer and of a LoRA, with their defaults. They are written where they differ from these, so
# that a charter without them is what it was before there were such keys.
LATER_KEYS = {"devices": 1, "optimizer": "adamw", "masters": "float32", "offload": False}
LATER_LORA_KEYS = {"bits": 0}


def config_text(config: CrewConfig) -> str:
    """The crew as TOML."""
    plain = _without_none(msgspec.to_builtins(config))
    for peer in plain["peer"]:
        _leave_usual_out(peer, LATER_KEYS)
        if isinstance(peer["train"], dict) and "lora" in peer["train"]:
            _leave_usual_out(peer["train"]["lora"], LATER_LORA_KEYS)
    return msgspec.toml.encode(plain).decode()


def _leave_usual_out(table: dict[str, Any], usual: dict[str, Any]) -> None:
    for key, value in usual.items():
        if table[key] == value:
            del table[key]


def _without_none(value: Any) -> Any:
    """TOML has no null: an absent key says the same."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None and v != ""}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def _explain(message: str, document: Document) -> str:
    """msgspec's words, with the place named as in the file, and a remedy for a misspelt key or
    word.
    """
    what, at, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    said = f"{what} (in {_named(path, document) or 'the file'})" if at else what
    if unknown := re.search(r"unknown field `([^`]*)`", what):
        return f"{said}; {remedy(unknown[1], path)}"
    if what == "Invalid enum value 'lora'":
        return f"{said}; write train = {{ lora = {{ rank = 8 }} }}"
    if what.startswith("Invalid enum value"):
        return f"{said}; use {allowed(path)}"
    return said


def _named(path: str, document: Document) -> str:
    """A place with its peer's name, where it has one: `peer.a.train` for `peer[0].train`."""
    place = re.fullmatch(r"peer\[(\d+)\](.*)", path)
    peer = document["peer"][int(place[1])] if place else None
    if not place or not isinstance(peer, dict):
        return path
    name = str(peer.get("name", ""))
    return f"peer.{name}{place[2]}" if re.fullmatch(r"[\w-]+", name) else path
