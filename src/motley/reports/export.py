"""A trained peer as a folder for other tools: an ordinary Hugging Face model or a PEFT adapter, and
its card. Only reads the run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from motley.config import PeerConfig, read_config
from motley.files import whole
from motley.learning.checkpoint import AnyState, load_manifest
from motley.models.four_bits import round_to_four_bits
from motley.models.policy import (
    ADAPTER,
    MADE_OF,
    TRAINED,
    load_tensors,
    save_tensors,
    take_layers,
    with_saved_adapter,
)
from motley.models.sources import find, keep_layers, read_folder, read_model
from motley.records import Sampling
from motley.reports.card import ExportedModel, card, hub_id
from motley.runs.best import best_checkpoint
from motley.runs.folder import newest_checkpoint, peer_folder
from motley.runs.metrics import LearnerLine, decode_lines, learner_lines
from motley.runs.stopping import Best

Dtype = Literal["float32", "bfloat16"]

# and weights; the rest is the tokenizer's
_TOLD_ANEW = ("config.json", "generation_config.json", "adapter_config.json", "README.md", MADE_OF)


def learners_of(run: Path) -> list[str]:
    """The peers of a run that can be exported: those who learn and are in this folder."""
    if not (run / "config.toml").exists():
        raise ValueError(
            f"{run} is not a run folder: it has no config.toml; give the folder that motley train "
            "printed"
        )
    names = [peer.name for peer in read_config(run / "config.toml").students]
    return [name for name in names if (newest_checkpoint(peer_folder(run, name)) / name).exists()]


def export_model(
    run: Path,
    peer: str,
    out: Path,
    merge: bool = False,
    dtype: Dtype = "float32",
    best: bool = False,
) -> Path:
    """Write a peer's model at the run's newest checkpoint to `out`, all of it or nothing.

    `merge`: an adapter into its base. `best`: as it was when it was best on held-out problems.

    An adapter stays one unless merged. Its folder names the base: an id of the Hugging Face hub, or
    a model folder of this machine. A base that is neither (a tiny, warmed or cut model, or a file)
    goes along, as OUT/base.
    """
    _check_free(out)
    known = learners_of(run)
    if peer not in known:
        raise ValueError(
            f"{run} has no peer {peer!r} that learns; it has {', '.join(known) or 'none'}"
        )
    config, own = read_config(run / "config.toml"), peer_folder(run, peer)
    me = config.named(peer)
    saved, lines = _best_of(own, peer) if best else _newest_of(own, peer)
    adapter = (saved / ADAPTER).exists()
    if merge and not adapter:
        raise ValueError(
            f"peer {peer} trains no adapter, so that there is nothing to merge; leave --merge out"
        )
    facts = ExportedModel(
        folder=out.resolve().name,
        config=config,
        me=me,
        lines=lines,
        adapter=adapter and not merge,
        own_base=adapter and not merge and not _stays(_named_base(me), run),
        dtype=dtype,
    )
    disable_progress_bar()
    write = (
        _adapter_writer(facts, saved, own / "start" / peer, out)
        if facts.adapter
        else _model_writer(facts, saved, own / "start" / peer)
    )
    _write_whole(
        out,
        [
            write,
            lambda folder: _copy_tokenizer(saved, folder),
            lambda folder: _write_card(facts, folder),
        ],
    )
    return out


def _newest_of(own: Path, peer: str) -> tuple[Path, list[LearnerLine]]:
    """A peer's newest model, and the metrics behind it."""
    newest = newest_checkpoint(own)
    return newest / peer / "model", _lines_until(own, peer, load_manifest(newest, AnyState))


def _best_of(own: Path, peer: str) -> tuple[Path, list[LearnerLine]]:
    folder = best_checkpoint(own, peer)
    last = load_manifest(folder, Best).round
    lines = [line for line in _lines_until(own, peer, AnyState()) if line.round <= last]
    return folder / "model", lines


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"{out} is already there and not an empty folder; choose another, or delete it"
        )


def _named_base(me: PeerConfig) -> str:
    """What PEFT finds the very base by that an adapter was trained on, from any working folder;
    nothing where only this run has it.
    """
    if me.warm or me.keep_layers:
        return ""
    if hub_id(me.model):
        return me.model
    folder = Path(me.model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else ""


def _stays(base: str, run: Path) -> bool:
    """Whether a base is still there when the run is not: a model object was written into it."""
    return bool(base) and not Path(base).is_relative_to(run.resolve())


def _lines_until(own: Path, peer: str, state: AnyState) -> list[LearnerLine]:
    """The peer's metrics that a checkpoint counts on: what comes later is not in its weights."""
    content = (own / "metrics.jsonl").read_bytes()[: state.metrics_bytes]
    return [line for line in learner_lines(decode_lines(content)) if line.peer == peer]


# Writing


def _write_whole(out: Path, writers: Sequence[Callable[[Path], None]]) -> None:
    try:
        with whole(out) as folder:
            folder.mkdir()
            for write in writers:
                write(folder)
    except (OSError, SafetensorError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"{out} could not be written: {said}; nothing was left there; free some space, or "
            "choose another place"
        ) from error


def _model_writer(facts: ExportedModel, saved: Path, start: Path) -> Callable[[Path], None]:
    """A whole model: as it trained, or an adapter added into its base in float32. Rounded last."""
    if (saved / ADAPTER).exists():
        model = with_saved_adapter(_base_model(facts.me, start), saved).merge_and_unload()
    elif (saved / TRAINED).exists():
        model = _base_model(facts.me, start)
        take_layers(model, saved)
    else:
        model = read_folder(saved)
    model = model.to(getattr(torch, facts.dtype))
    model.generation_config = _as_sampled(model.generation_config, facts.config.sampling)
    return lambda folder: model.save_pretrained(folder)


def _adapter_writer(
    facts: ExportedModel, saved: Path, start: Path, out: Path
) -> Callable[[Path], None]:
    dtype = getattr(torch, facts.dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in load_tensors(saved / ADAPTER).items()}
    rules = json.loads((saved / "adapter_config.json").read_text())
    own = str(out.resolve() / "base")
    rules["base_model_name_or_path"] = own if facts.own_base else _named_base(facts.me)
    base = _base_model(facts.me, start).to(dtype) if facts.own_base else None
    generation = base.generation_config if base is not None else GenerationConfig()

    def write(folder: Path) -> None:
        save_tensors(tensors, folder / ADAPTER)
        (folder / "adapter_config.json").write_text(
            json.dumps(rules, indent=2, sort_keys=True) + "\n"
        )
        if base is not None:
            base.save_pretrained(folder / "base")
            _copy_tokenizer(saved, folder / "base")
        _as_sampled(generation, facts.config.sampling).save_pretrained(folder)

    return write


def _write_card(facts: ExportedModel, folder: Path) -> None:
    (folder / "README.md").write_text(card(facts), encoding="utf-8")


def _copy_tokenizer(saved: Path, folder: Path) -> None:
    for path in saved.iterdir():
        if (
            path.is_file()
            and path.name not in _TOLD_ANEW
            and not path.name.endswith((".safetensors", ".safetensors.index.json"))
        ):
            shutil.copyfile(path, folder / path.name)


# Reading


def _base_model(me: PeerConfig, start: Path) -> PreTrainedModel:
    """What an adapter was trained on: made in this run, or found where the crew file says; with
    the values that 4 bits left of it, in full.
    """
    if start.exists():
        model = read_folder(start)
    else:
        model = read_model(find(me.model))
        if me.keep_layers:
            keep_layers(model, me.keep_layers)
    if me.bits:
        round_to_four_bits(model)
    return model


def _as_sampled(generation: GenerationConfig, sampling: Sampling) -> GenerationConfig:
    """Answers are made as they were in training."""
    settings = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    generation.update(**settings, max_new_tokens=sampling.max_tokens)
    return generation
