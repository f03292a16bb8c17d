"""Policy: a model, its vocabulary, and what of it trains.

Owns loading and saving; knows no sampling, objective or log, and not how a model is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from motley.config import Lora, TrainPart
from motley.models.prompts import Prompts
from motley.models.vocabulary import Vocabulary


@dataclass(slots=True)
class Policy:
    """`version` counts the learner steps behind the present weights."""

    model: nn.Module  # a transformers model, or PEFT around one
    vocabulary: Vocabulary
    version: int = 0
    prompts: Prompts = None  # type: ignore[assignment]  # problems as they are, unless given
    dtype: torch.dtype = torch.float32  # of the arithmetic; what trains is kept in float32
    gradient_checkpointing: bool = False
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.fingerprint = _fingerprint(self.base)
        self.prompts = self.prompts or Prompts(self.vocabulary)

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model itself, adapters still inside its layers."""
        get_base_model = getattr(self.model, "get_base_model", None)
        return get_base_model() if get_base_model else self.model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and values of what trains."""
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    @property
    def config(self) -> PretrainedConfig:
        """Of the text part, where a model has others."""
        return self.base.config.get_text_config()

    @property
    def max_positions(self) -> int:
        return getattr(self.config, "max_position_embeddings", None) or 2**31

    def save(self, folder: Path) -> None:
        """Write an ordinary Hugging Face folder, or a PEFT adapter folder for LoRA."""
        disable_progress_bar()  # saving is part of a step that shows its own progress
        # else PEFT asks the hub about them
        options = {"save_embedding_layers": False} if hasattr(self.model, "peft_config") else {}
        self.model.save_pretrained(folder, **options)  # type: ignore[operator]
        self.vocabulary.save(folder)

    def load(self, folder: Path) -> None:
        """Take the weights of a folder that `save` wrote for the same model."""
        adapter = folder / "adapter_model.safetensors"
        if adapter.exists():
            set_peft_model_state_dict(self.model, load_tensors(adapter))
        else:
            loaded = self.base.load_state_dict(_saved_tensors(folder), strict=False)
            missing = set(loaded.missing_keys) - {"lm_head.weight"}  # a tied head is stored once
            if missing or loaded.unexpected_keys:
                raise ValueError(
                    f"{folder} holds another model: it lacks {sorted(missing)[:3]} and adds "
                    f"{loaded.unexpected_keys[:3]}"
                )


def choose_trained(model: PreTrainedModel, train: str | TrainPart, seed: int) -> nn.Module:
    """Freeze what does not train.

    LoRA wraps the model; `layers` takes last:N, first:N or parameter-name prefixes.
    """
    if isinstance(train, str):
        return model
    if train.lora is not None:
        return _with_lora(model, train.lora, seed)
    prefixes = _layer_prefixes(
        train.layers, _layers_name(model), model.config.get_text_config().num_hidden_layers
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))
    if not any(p.requires_grad for p in model.parameters()):
        known = ", ".join(
            sorted({name.rsplit(".", 1)[0] for name, _ in model.named_parameters()})[:4]
        )
        raise ValueError(
            f"train layers={train.layers!r} matches no parameter; use last:N, first:N, or a "
            f"prefix such as {known}"
        )
    return model


def _with_lora(model: PreTrainedModel, lora: Lora, seed: int) -> nn.Module:
    for name, part in model.named_modules():
        if name.rpartition(".")[2] in lora.targets and not isinstance(part, nn.Linear | Conv1D):
            raise ValueError(
                f"lora targets name {name.rpartition('.')[2]}, which is no linear layer; leave it "
                "out"
            )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(
            model,
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha or 2 * lora.rank,
                target_modules=list(lora.targets) or "all-linear",
                lora_dropout=0.0,
                # GPT-2's, whose weights stand the other way
                fan_in_fan_out=any(isinstance(part, Conv1D) for part in model.modules()),
                task_type="CAUSAL_LM",
            ),
        )


def _layers_name(model: PreTrainedModel) -> str:
    """What the names of the layers' parameters begin with, such as model.layers: the outermost list
    with as many parts.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = (
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == count
    )
    return next(lists, "model.layers")


def _layer_prefixes(layers: str, name: str, num_layers: int) -> tuple[str, ...]:
    side, _, count = layers.partition(":")
    if side in ("first", "last") and count.isdigit():
        wanted = (
            range(num_layers)[: int(count)]
            if side == "first"
            else range(num_layers)[max(0, num_layers - int(count)) :]
        )
        return tuple(f"{name}.{i}." for i in wanted)
    return tuple(part.strip() for part in layers.split(","))


def _fingerprint(model: PreTrainedModel) -> str:
    """Names the architecture and its sizes, not the weights, which change at every step."""
    shapes = sorted(
        (name.replace(".base_layer", ""), tuple(p.shape))
        for name, p in model.named_parameters()
        if "lora_" not in name
    )
    return hashlib.sha256(repr((model.config.model_type, shapes)).encode()).hexdigest()[:16]


def _saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Of a model in one file, or in several."""
    return {
        name: value
        for path in sorted(folder.glob("model*.safetensors"))
        for name, value in load_tensors(path).items()
    }


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be read as tensors ({error}); put it back from a copy, or delete "
            f"{path.parent}: in start/ of a run it is made again, elsewhere fetch the model again"
        ) from None


def with_trained_part(policy: Policy, train: str | TrainPart, seed: int) -> Policy:
    """The same model with what trains chosen."""
    model = choose_trained(policy.base, train, seed)
    if isinstance(train, TrainPart) and train.lora is not None:
        _store_frozen(model, policy)
    return replace(policy, model=model)


def merged_weight(linear: Any) -> Tensor:
    """The weight a linear layer acts with, its LoRA adapters added in; float32."""
    weight: Tensor = getattr(linear, "base_layer", linear).weight.detach().float()
    for name in getattr(linear, "active_adapters", ()):
        weight = weight + linear.get_delta_weight(name)
    return weight


def _store_frozen(model: nn.Module, policy: Policy) -> None:
    """Linear layers beside an adapter never change: they need no more precision than is used."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name.endswith("base_layer.weight"):
            parameter.data = parameter.data.to(policy.dtype)
