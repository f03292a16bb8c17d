"""Checkpoints: folders that are written aside, synced, then renamed into place.

Two are kept. Hashes are checked on load. What the state says is up to whoever saves it.

A folder per peer has what trains and `optimiser.safetensors`. What trains is `model/`: an ordinary
Hugging Face or PEFT folder, or the layers that train. `state.json` holds everything else and the
sha256 of every file; `state.json.sha256` holds that of `state.json`, as `sha256sum -c` reads it. No
pickle anywhere.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import torch
from safetensors import SafetensorError

from motley.files import disk_error, sync
from motley.learning.descent import Optimiser, kind_of
from motley.learning.fitting import check_finite
from motley.learning.lean import LeanAdam
from motley.models.policy import Policy, load_tensors, save_tensors, saved_words

KEPT = 2
OPTIMISER = "optimiser.safetensors"  # what it remembers; named in it, unless it is Adam
STATE, STATE_HASH = "state.json", "state.json.sha256"
_NAME = re.compile(r"round-(\d{6,})")


class CheckpointError(ValueError):
    """A checkpoint that is missing or does not have the content it was written with."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what


class OtherStateError(CheckpointError):
    """A checkpoint of another kind of run than the one that would go on from it."""


RunState = TypeVar("RunState", bound=msgspec.Struct)


class Manifest(msgspec.Struct, Generic[RunState], frozen=True, kw_only=True):
    state: RunState
    sha256: dict[str, str]  # path in the folder -> hash


class AnyState(msgspec.Struct, frozen=True):
    """The state of any run, for those who want the files beside it."""

    metrics_bytes: int | None = None  # of metrics.jsonl at that moment; None: of a simulation


def save_checkpoint(
    root: Path, round: int, state: msgspec.Struct, write: Callable[[Path], None]
) -> Path:
    """Let `write` fill a new folder, and make it the newest checkpoint in one rename."""
    final, partial = root / f"round-{round:06d}", root / f".round-{round:06d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write_and_sync(partial, state, write)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        why = getattr(error, "strerror", None) or str(error)
        raise disk_error(final, f"{why}; the checkpoint before it is whole") from error
    replaced = root / f".{final.name}.replaced"
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync(root)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in checkpoints(root)[:-KEPT]:
        shutil.rmtree(old)
    return final


def _write_and_sync(partial: Path, state: msgspec.Struct, write: Callable[[Path], None]) -> None:
    partial.mkdir(parents=True)
    write(partial)
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    manifest = Manifest(
        state=state, sha256={str(p.relative_to(partial)): _sha256(p) for p in files}
    )
    content = msgspec.json.format(msgspec.json.encode(manifest, order="sorted"))
    (partial / STATE).write_bytes(content)
    (partial / STATE_HASH).write_text(f"{hashlib.sha256(content).hexdigest()}  {STATE}\n")
    for path in [*partial.rglob("*"), partial]:
        sync(path)


def checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    by_round = {
        int(match[1]): path
        for path in root.glob("round-*")
        if (match := _NAME.fullmatch(path.name))
    }
    return [by_round[round] for round in sorted(by_round)]


def round_of(checkpoint: Path) -> int:
    """After which it was taken."""
    return int(checkpoint.name.removeprefix("round-"))


def load_newest(
    root: Path, kind: type[RunState], say: Callable[[str], None]
) -> tuple[Path, RunState]:
    """Give the newest checkpoint that is whole, with its state.

    A damaged one before which there is another is put aside, with a word.
    """
    kept = checkpoints(root)
    while kept:
        folder = kept.pop()
        try:
            return folder, load_manifest(folder, kind)
        except OtherStateError:
            raise
        except CheckpointError as error:
            if not kept:
                raise CheckpointError(
                    f"{error.what}, and no other checkpoint is left", _ANEW
                ) from None
            shutil.rmtree(root / f"damaged-{folder.name}", ignore_errors=True)
            folder.rename(root / f"damaged-{folder.name}")
            say(f"{error.what}; it is now damaged-{folder.name}, going on from {kept[-1].name}")
    raise CheckpointError(f"{root} has no checkpoint", _ANEW)


_ANEW = (
    "put one back from a copy, or begin anew in another folder; a peer at a hub takes its peer.key "
    "there"
)


def load_manifest(folder: Path, kind: type[RunState]) -> RunState:
    """Give the state of a checkpoint whose files all have their hashes."""
    try:
        content = (folder / STATE).read_bytes()
        _check_state(folder, content)
        manifest = msgspec.json.decode(
            content,
            type=Manifest[kind],  # type: ignore[valid-type]
        )
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        other = isinstance(error, msgspec.ValidationError)
        raise (OtherStateError if other else CheckpointError)(
            f"{folder} has no readable state.json: {error}", _before(folder)
        ) from None
    for name, expected in manifest.sha256.items():
        path = folder / name
        if not path.is_file() or _sha256(path) != expected:
            raise CheckpointError(
                f"{path} is missing or changed since it was saved", _before(folder)
            )
    state: RunState = manifest.state
    return state


def _check_state(folder: Path, content: bytes) -> None:
    # a checkpoint of version 0.5 has no such file
    known = folder / STATE_HASH
    if not known.exists():
        return
    if known.read_bytes().split()[:1] != [hashlib.sha256(content).hexdigest().encode()]:
        raise CheckpointError(f"{folder / STATE} has changed since it was saved", _before(folder))


def _before(folder: Path) -> str:
    return f"delete {folder} to resume from the checkpoint before it"


def save_training(policy: Policy, optimiser: Optimiser, folder: Path) -> None:
    """Write what trains, and the optimiser's moments of it by name."""
    check_finite(policy)
    folder.mkdir(parents=True)
    policy.save(folder / "model")
    moments = {
        f"{name}/{key}": torch.as_tensor(value)
        for name, p in policy.trained()
        for key, value in optimiser.state.get(p, {}).items()
    }
    kind = kind_of(optimiser)
    save_tensors(moments, folder / OPTIMISER, {} if kind == "adamw" else {"optimizer": kind})


def load_training(policy: Policy, optimiser: Optimiser, folder: Path) -> None:
    moments = load_tensors(folder / OPTIMISER)
    kind, own = saved_words(folder / OPTIMISER).get("optimizer", "adamw"), kind_of(optimiser)
    if kind != own:
        raise ValueError(
            f"{folder / OPTIMISER} is what {kind} remembers, and the peer's optimizer is {own}; go "
            f'on with optimizer = "{kind}", or begin a new run from {folder / "model"}'
        )
    policy.load(folder / "model")
    # then Adam wants its count of steps where the values are
    fused = bool(optimiser.defaults.get("fused"))
    for name, parameter in policy.trained():
        state = {
            key.rsplit("/", 1)[1]: value
            for key, value in moments.items()
            if key.rsplit("/", 1)[0] == name
        }
        if state:
            place = optimiser.place_of(parameter) if isinstance(optimiser, LeanAdam) else None
            optimiser.state[parameter] = {
                key: value.to(place or parameter.device) if fused or key != "step" else value
                for key, value in state.items()
            }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
