"""Policy: a model, its vocabulary, and what of it trains. Owns loading and saving; knows no sampling, objective or log."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from motley.config import Lora, TrainPart
from motley.policies.vocabulary import Vocabulary


@dataclass(slots=True)
class Policy:
    """`version` counts the learner steps behind the present weights."""

    model: nn.Module  # a transformers model, or PEFT around one
    vocabulary: Vocabulary
    version: int = 0
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.fingerprint = _fingerprint(self.base)

    @property
    def base(self) -> LlamaForCausalLM:
        """The transformers model itself, adapters still inside its layers."""
        get_base_model = getattr(self.model, "get_base_model", None)
        return get_base_model() if get_base_model else self.model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and values of what trains."""
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def save(self, folder: Path) -> None:
        """Write an ordinary Hugging Face folder, or a PEFT adapter folder for LoRA."""
        disable_progress_bar()  # saving is part of a step that shows its own progress
        self.model.save_pretrained(folder)  # type: ignore[operator]
        self.vocabulary.save(folder)

    def load(self, folder: Path) -> None:
        """Take the weights of a folder that `save` wrote for the same model."""
        adapter = folder / "adapter_model.safetensors"
        if adapter.exists():
            set_peft_model_state_dict(self.model, load_tensors(adapter))
        else:
            found = self.base.load_state_dict(load_tensors(folder / "model.safetensors"), strict=False)
            missing = set(found.missing_keys) - {"lm_head.weight"}  # a tied head is stored once
            if missing or found.unexpected_keys:
                raise ValueError(f"{folder} holds another model: it lacks {sorted(missing)[:3]} and adds {found.unexpected_keys[:3]}")


def choose_trained(model: PreTrainedModel, train: str | TrainPart, seed: int) -> nn.Module:
    """Freeze what does not train. LoRA wraps the model; `layers` takes last:N, first:N or parameter-name prefixes."""
    if isinstance(train, str):
        return model
    if train.lora is not None:
        return _with_lora(model, train.lora, seed)
    prefixes = _layer_prefixes(train.layers, model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))
    if not any(p.requires_grad for p in model.parameters()):
        known = ", ".join(sorted({name.rsplit(".", 1)[0] for name, _ in model.named_parameters()})[:4])
        raise ValueError(f"train layers={train.layers!r} matches no parameter; use last:N, first:N, or a prefix such as {known}")
    return model


def _with_lora(model: PreTrainedModel, lora: Lora, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(
            model,
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha or 2 * lora.rank,
                target_modules=list(lora.targets),
                lora_dropout=0.0,
                task_type="CAUSAL_LM",
            ),
        )


def _layer_prefixes(layers: str, num_layers: int) -> tuple[str, ...]:
    side, _, count = layers.partition(":")
    if side in ("first", "last") and count.isdigit():
        wanted = range(num_layers)[: int(count)] if side == "first" else range(num_layers)[max(0, num_layers - int(count)) :]
        return tuple(f"model.layers.{i}." for i in wanted)
    return tuple(part.strip() for part in layers.split(","))


def _fingerprint(model: PreTrainedModel) -> str:
    """Names the architecture and its sizes, not the weights, which change at every step."""
    shapes = sorted((name.replace(".base_layer", ""), tuple(p.shape)) for name, p in model.named_parameters() if "lora_" not in name)
    return hashlib.sha256(repr((model.config.model_type, shapes)).encode()).hexdigest()[:16]


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path)
