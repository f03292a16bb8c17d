"""What a crew file and a run folder say of a peer: its model, how large it is, what of it trains.

Opens no model: sizes are read from the headers of its files.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from math import prod
from pathlib import Path

import msgspec

from motley.config import ConfigError, CrewConfig, PeerConfig, parse_config, read_config

MOST_HEADER_BYTES = 1 << 26  # of a safetensors file: a larger number is no length


class _HubFile(msgspec.Struct):
    """The part of hub.json that is no secret."""

    config: str


class _MemberFile(msgspec.Struct):
    peer: str


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]


def config_file(folder: Path) -> Path:
    """The file that has the crew of a folder, if there is one."""
    return next(
        (
            path
            for path in (folder / "config.toml", folder / "hub.json", folder / "hub" / "hub.json")
            if path.is_file()
        ),
        folder / "config.toml",
    )


def crew_of(folder: Path) -> CrewConfig | None:
    """The crew of a run folder, or of a hub's; None: there is none that can be read."""
    path = config_file(folder)
    with suppress(ConfigError, ValueError, OSError):
        if path.suffix == ".toml":
            return read_config(path)
        return parse_config(msgspec.json.decode(path.read_bytes(), type=_HubFile).config)
    return None


def member_of(folder: Path) -> str:
    """Whose own folder it is, of a crew at a hub; "": nobody's."""
    with suppress(ValueError, OSError):
        return msgspec.json.decode((folder / "member.json").read_bytes(), type=_MemberFile).peer
    return ""


def adapter_of(peer: PeerConfig) -> str:
    if isinstance(peer.train, str):
        return peer.train
    if peer.train.lora:
        bits = f", {peer.bits} bits" if peer.bits else ""
        return f"LoRA r={peer.train.lora.rank}{bits}"
    return f"layers {peer.train.layers}"


def num_parameters(folder: Path, peer: PeerConfig) -> int | None:
    """Of a peer's whole model, where a file has all of it; None: no file here tells."""
    own = folder / "peers" / peer.name
    for run in (own, folder):
        saved = [run / "start" / peer.name, *(run / "start" / peer.name).glob("*/")]
        if peer.train == "full":
            saved += sorted((run / "checkpoints").glob(f"round-*/{peer.name}/model"))[-1:]
        for model in saved:
            if size := _size_of(model):
                return size
    path = Path(peer.model).expanduser()
    return _size_of(path) if not peer.keep_layers and path.is_dir() else None


def _size_of(model: Path) -> int | None:
    """Numbers in a model folder's safetensors files; None: it has none, or those of an adapter."""
    if (model / "adapter_config.json").exists():
        return None
    try:
        return sum(map(_num_values, sorted(model.glob("*.safetensors")))) or None
    except (OSError, ValueError, struct.error):
        return None


def _num_values(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MOST_HEADER_BYTES:
            raise ValueError(f"{path} says that its header has {length} bytes")
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    return sum(prod(msgspec.json.decode(raw, type=_Tensor).shape) for raw in header.values())
