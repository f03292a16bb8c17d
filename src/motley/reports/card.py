"""The model card of an exported peer: how it was trained, with whom, what came of it.

Names no place of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import motley
from motley.config import CrewConfig, Learning, PeerConfig, config_text
from motley.learning.senders import SenderMetrics
from motley.models.sources import NAMED
from motley.reports.scores import score_text
from motley.runs.metrics import Counts, LearnerLine, measure_of
from motley.tasks import Split, best_constant, evaluation_set, load_task

_SPLITS: tuple[Split, ...] = ("heldout", "ood")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """What is in the folder. `lines`: the peer's metrics up to the checkpoint it was made from."""

    folder: str  # its name
    config: CrewConfig
    me: PeerConfig
    lines: Sequence[LearnerLine]
    adapter: bool  # a PEFT folder; a whole model otherwise
    own_base: bool  # the adapter's base is in the folder, as base/
    dtype: str

    @property
    def trained(self) -> int:
        """The newest round that is in the weights."""
        return max((line.round for line in self.lines), default=0)

    @property
    def steps(self) -> int:
        """Optimiser steps behind the weights: one for every version, and what rounds took more."""
        version = next((line.version for line in reversed(self.lines) if line.version), 0)
        return version + sum(line.inner_steps - 1 for line in self.lines if line.inner_steps)

    @property
    def refused(self) -> Counts:
        return next((line.refused for line in reversed(self.lines) if line.refused is not None), {})

    @property
    def dropped(self) -> Counts:
        return next((line.dropped for line in reversed(self.lines) if line.dropped is not None), {})


def hub_id(model: str) -> str:
    """The model's id on the Hugging Face hub, or nothing for one that is not there."""
    elsewhere = (
        model.startswith(("tiny:", ".", "/", "~"))
        or model in NAMED
        or model.endswith(".gguf")
        or model.count("/") > 1
    )
    return "" if elsewhere or Path(model).is_dir() else model


def public_name(model: str) -> str:
    """A model's name without where it is on this machine."""
    return model if hub_id(model) or model.startswith("tiny:") else Path(model).name


def card(exported: ExportedModel) -> str:
    sections: tuple[Callable[[ExportedModel], str], ...] = (
        _front,
        _opening,
        _loading,
        _skills,
        _training,
        _crewmates,
        _refusals,
        _crew_file,
    )
    return "\n\n".join(text for section in sections if (text := section(exported))) + "\n"


# Sections


def _front(e: ExportedModel) -> str:
    facts = {
        "base_model": public_name(e.me.model),
        "library_name": "peft" if e.adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["motley", "reinforcement-learning"],
    }
    return "\n".join(
        ["---", *(f"{key}: {json.dumps(value)}" for key, value in facts.items()), "---"]
    )


def _opening(e: ExportedModel) -> str:
    others = [f"`{p.name}`" for p in e.config.peer if p.name != e.me.name]
    with_whom = f"with {', '.join(others)}" if others else "alone"
    kind = "A LoRA adapter" if e.adapter else "A model"
    terms = f"; its licence: {NAMED[e.me.model].licence}" if e.me.model in NAMED else ""
    return (
        f"# {e.folder}\n\n{kind} trained by reinforcement learning with Motley "
        f"{motley.__version__} "
        f"in a crew of different language models: peer `{e.me.name}` of the crew "
        f"`{e.config.crew.name}`, {with_whom}, "
        f"after round {e.trained} of {e.config.crew.rounds}.\n\n"
        f"- base model: {public_name(e.me.model)}{_changes(e.me)}{terms}\n- trained: "
        f"{what_trains(e.me)}\n"
        f"- weights: safetensors, {e.dtype}"
    )


def _loading(e: ExportedModel) -> str:
    base = f"{e.folder}/base" if e.own_base else public_name(e.me.model) if e.adapter else e.folder
    chat = (
        "tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, "
        'return_tensors="pt")'
    )
    plain = 'tokenizer(prompt, return_tensors="pt")'
    code = [
        "from transformers import AutoModelForCausalLM, "
        f"AutoTokenizer{', GenerationConfig' if e.adapter else ''}",
        *(["from peft import PeftModel"] if e.adapter else []),
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{e.folder}")',
        f'model = AutoModelForCausalLM.from_pretrained("{base}")',
        *([f'model = PeftModel.from_pretrained(model, "{e.folder}")'] if e.adapter else []),
        *(
            [
                f'model.generation_config.update(**GenerationConfig.from_pretrained("{e.folder}").to_diff_dict())'
            ]
            if e.adapter
            else []
        ),
        *(
            ['turns = [{"role": "user", "content": prompt}]']
            if e.config.prompt.style == "chat"
            else []
        ),
        f"ids = {chat if e.config.prompt.style == 'chat' else plain}",
        "tokens = model.generate(input_ids=ids.input_ids, attention_mask=ids.attention_mask)",
        "print(tokenizer.decode(tokens[0, ids.input_ids.shape[1] :], skip_special_tokens=True))",
    ]
    return (
        "## Use\n\n```python\n"
        + "\n".join(code)
        + "\n```\n\n`prompt` is a problem, put as [prompt] of the crew file below says. Sampling "
        "is that of training; for greedy answers, which the figures below are of, give "
        "`do_sample=False`."
    )


def _skills(e: ExportedModel) -> str:
    measured = [line for line in e.lines if line.heldout]
    if not measured:
        return ""
    before, after, rows = measured[0], measured[-1], []
    measure = measure_of(measured)
    for split in _SPLITS:
        first, last = _accuracies(before, split), _accuracies(after, split)
        constants = _constants(e.config, split) if last and measure == "accuracy" else {}
        for kind, value in last.items():
            score = score_text(first[kind], measure) if kind in first else ""
            rows.append((split, kind, score, score_text(value, measure), constants.get(kind, "")))
    head = ["problems", "kind", f"round {before.round}", f"round {after.round}"]
    what = (
        f"Mean reward of greedy answers to {e.config.evaluate.problems} fixed problems per kind; "
        "held-out ones are never trained on."
    )
    if measure == "reward":
        return f"## Reward\n\n{what}\n\n{_table(head, [row[:4] for row in rows])}"
    return (
        f"## Accuracy\n\n{what} The best constant answer is what always giving the one most "
        f"frequent answer would reach.\n\n{_table([*head, 'best constant answer'], rows)}"
    )


def _training(e: ExportedModel) -> str:
    crew, sampling, learning = e.config.crew, e.config.sampling, e.config.learning
    objective = crew.row
    facts = {
        "task": f"{_public(crew.task)}{_settings(_public(e.config.task))}",
        "prompt": f"{e.config.prompt.style}{_settings(_said(e.config.prompt))}",
        "objective": f"{objective}{_settings(e.config.objective)}",
        "rounds": f"{e.trained} of {crew.rounds}; {e.steps} optimiser steps",
        "groups": (
            f"{crew.problems_per_round} problems a round over the crew, {crew.group_size} answers "
            f"each; {crew.layout}, {crew.pace}"
        ),
        "sampling": ", ".join(
            f"{key}={value}" for key, value in msgspec.to_builtins(sampling).items()
        ),
        "learning rate": (
            f"{e.me.lr or learning.lr}{_schedule(learning)}, gradients clipped at "
            f"{learning.grad_clip}"
        ),
        "seed": crew.seed,
    }
    return "## Training\n\n" + "\n".join(f"- {key}: {value}" for key, value in facts.items())


def _schedule(learning: Learning) -> str:
    """What is not as by default, of how the learning rate goes and what else shrinks weights."""
    words = {
        learning.schedule: learning.schedule != "constant",
        f"{learning.warmup_rounds} rounds of warm-up": learning.warmup_rounds,
        f"to {learning.final_lr:g} of it": learning.final_lr and learning.schedule != "constant",
        f"weight decay {learning.weight_decay:g}": learning.weight_decay,
    }
    return "".join(f", {text}" for text, said in words.items() if said)


def _crewmates(e: ExportedModel) -> str:
    senders = [line.senders for line in e.lines if line.senders]
    total = sum(sender.groups for step in senders for sender in step.values())
    rows = []
    for peer in e.config.peer:
        seen = [s[peer.name] for s in senders if peer.name in s]
        model = (
            public_name(peer.model) + _changes(peer) if peer.model else f"that of {peer.follows}"
        )
        groups = sum(sender.groups for sender in seen)
        means = [_mean(seen, key) for key in ("reward", "weight", "ess", "kl_k3")]
        name = f"**{peer.name}**" if peer.name == e.me.name else peer.name
        rows.append(
            (
                name,
                model,
                what_trains(peer),
                groups,
                _percent(groups / total if total else None),
                *means,
            )
        )
    head = ("peer", "model", "trains", "groups", "share", "reward", "weight", "ess", "kl")
    return (
        f"## Learned from\n\nGroups of answers that the steps of `{e.me.name}` were made of, by "
        "who sampled them. Reward, importance "
        "weight, effective sample size and KL (k3, nats per token) are means over its "
        f"steps.\n\n{_table(head, rows)}"
    )


def _refusals(e: ExportedModel) -> str:
    words = [
        f"- {what} of {sender}: "
        + ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        for what, counts in (("refused", e.refused), ("dropped", e.dropped))
        for sender, reasons in counts.items()
    ]
    return "\n".join(words) or "No record was refused and no group dropped."


def _crew_file(e: ExportedModel) -> str:
    return (
        "## Crew file\n\nTrain it again with `motley train "
        f"crew.toml`.\n\n```toml\n{public_config(e.config)}```"
    )


# Words and numbers


def what_trains(peer: PeerConfig) -> str:
    if peer.role == "sampler":
        return "nothing: it samples"
    if isinstance(peer.train, str):
        return "the whole model"
    if peer.train.lora is None:
        return f"layers {peer.train.layers}"
    lora = peer.train.lora
    return (
        f"LoRA of rank {lora.rank}, alpha {lora.alpha or 2 * lora.rank:g}, on "
        f"{', '.join(lora.targets) or 'every linear layer'}"
        f"{f', beside linear layers held in {lora.bits} bits (NF4)' if lora.bits else ''}"
    )


def _changes(peer: PeerConfig) -> str:
    """What was done to a base model before the first round."""
    kept = [f"only {peer.keep_layers} of its layers"] if peer.keep_layers else []
    warmed = (
        [
            "a supervised warm start: "
            + ", ".join(f"{k} {v:.0%}" for k, v in peer.warm.accuracy.items())
        ]
        if peer.warm
        else []
    )
    return f" ({'; '.join(kept + warmed)})" if kept or warmed else ""


def _constants(config: CrewConfig, split: Split) -> dict[str, str]:
    try:
        task = load_task(config.crew.task, config.task)
    except ValueError:  # its files may be gone since
        return {}
    problems = evaluation_set(task, split, config.evaluate.problems)
    return {
        kind: _percent(best_constant([p for p in problems if p.kind == kind]))
        for kind in task.kinds
    }


def _accuracies(line: LearnerLine, split: Split) -> dict[str, float]:
    return (line.heldout if split == "heldout" else line.ood) or {}


def _mean(seen: Sequence[SenderMetrics], key: str) -> str:
    """Over steps, each counting with its groups; nothing where nothing was measured."""
    values = [(value, s.groups) for s in seen if (value := s.number(key)) is not None]
    total = sum(groups for _, groups in values)
    return f"{sum(value * groups for value, groups in values) / total:.3f}" if total else ""


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _said(table: msgspec.Struct) -> dict[str, object]:
    """What differs from the defaults."""
    defaults = msgspec.to_builtins(type(table)())
    return {
        key: value for key, value in msgspec.to_builtins(table).items() if value != defaults[key]
    }


def _settings(settings: Mapping[str, object]) -> str:
    return (
        " with " + ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        if settings
        else ""
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines: list[Sequence[object]] = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


# Nothing of this machine


def public_config(config: CrewConfig) -> str:
    """The crew file with folders and files by their names only, and without addresses."""
    plain = msgspec.toml.decode(config_text(config))
    plain |= {name: _public(plain[name]) for name in ("crew", "task", "peer") if name in plain}
    return msgspec.toml.encode(plain).decode()


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_public(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if value.startswith("file:"):
        return f"file:{Path(value).name.removeprefix('file:')}"
    if "://" in value:
        return f"{value.partition('://')[0]}://HOST"
    return Path(value).name if value.startswith(("/", "~", "./", "../")) else value
