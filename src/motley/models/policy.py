"""Policy: a model, its vocabulary, and what of it trains.

Owns loading and saving; knows no sampling, objective or log, and not how a model is computed.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from motley.config import Lora, Masters, TrainPart
from motley.models.four_bits import FourBitLinear, full_shapes, hold_in_four_bits
from motley.models.prompts import Prompts
from motley.models.sources import read_folder
from motley.models.vocabulary import Vocabulary

ADAPTER = "adapter_model.safetensors"
TRAINED = "trained.safetensors"  # where only some layers train: those, by their parameters' names
MADE_OF = "base.json"
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of one input


class MadeOf(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy began as, for folders that hold only the part of it that trains."""

    # as a crew file names it; a path that is not absolute begins at the folder that says so
    model: str
    keep_layers: int = 0
    bits: int = 0  # of its frozen linear layers' values; 0: as the arithmetic has them
    frozen: str = ""  # digest of the layers that do not train


class Remote(Protocol):
    """Where a policy's weights train, if that is elsewhere: on several devices."""

    def fetch(self) -> None:
        """Bring here what trained."""
        ...

    def push(self) -> None:
        """Have what is here train from here on."""
        ...

    def is_finite(self, policy: Policy, packed: Any) -> bool:
        """Whether packed tokens have log-probs and a gradient that are numbers."""
        ...


@dataclass(slots=True)
class Policy:
    """`version` counts the learner steps behind the present weights."""

    model: nn.Module  # a transformers model, or PEFT around one
    vocabulary: Vocabulary
    version: int = 0
    prompts: Prompts = None  # type: ignore[assignment]  # problems as they are, unless given
    dtype: torch.dtype = torch.float32  # of the arithmetic
    gradient_checkpointing: bool = False
    made_of: MadeOf = MadeOf(model="")
    is_partial: bool = False  # only some of its layers train
    # packing would change its numbers: sequences are computed alone, by the model's own code
    one_by_one: bool = False
    remote: Remote | None = None  # None: it trains here
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
        return positions_of(self.config)

    @property
    def is_adapted(self) -> bool:
        return hasattr(self.model, "peft_config")

    def fetch(self) -> None:
        """Have its present weights here, wherever they train."""
        if self.remote:
            self.remote.fetch()

    def save(self, folder: Path) -> None:
        """Write what trains: an ordinary Hugging Face folder, a PEFT adapter folder for LoRA, or
        the tensors of the layers that train.
        """
        self.fetch()
        if self.is_partial:
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors({name: p.detach() for name, p in self.trained()}, folder / TRAINED)
        else:
            disable_progress_bar()  # saving is part of a step that shows its own progress
            # else PEFT asks the hub about them
            options = {"save_embedding_layers": False} if self.is_adapted else {}
            self.model.save_pretrained(folder, **options)  # type: ignore[operator]
        if self.is_partial or self.is_adapted:
            (folder / MADE_OF).write_bytes(msgspec.json.encode(self._made_of()))
        self.vocabulary.save(folder)

    def load(self, folder: Path) -> None:
        """Take the weights of a folder that `save` wrote for the same model."""
        if (folder / ADAPTER).exists():
            self._load_adapter(folder)
        elif (folder / TRAINED).exists():
            self._load_layers(folder)
        else:
            take_tensors(folder, self.base.state_dict(), read_folder(folder).state_dict())
        if self.remote:
            self.remote.push()

    def _made_of(self) -> MadeOf:
        # an adapter's base is kept in the type of the arithmetic, and so differs between machines
        if self.is_adapted:
            return self.made_of
        frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        return msgspec.structs.replace(self.made_of, frozen=_digest(frozen))

    def _load_adapter(self, folder: Path) -> None:
        loaded = set_peft_model_state_dict(self.model, load_tensors(folder / ADAPTER))
        lacking = sorted({name for name, _ in self.trained()} & set(loaded.missing_keys))
        if lacking or loaded.unexpected_keys:
            raise _other_model(folder, lacking, sorted(loaded.unexpected_keys))

    def _load_layers(self, folder: Path) -> None:
        own, saved = {name for name, _ in self.trained()}, saved_layers(folder)
        if own != saved:
            raise _other_model(folder, sorted(own - saved), sorted(saved - own))
        take_layers(self.model, folder)


def saved_layers(folder: Path) -> set[str]:
    """Names of the tensors in a folder that holds only those that train."""
    return set(load_tensors(folder / TRAINED))


def take_layers(model: nn.Module, folder: Path) -> None:
    """Give a model the layers that train, of a folder that holds only them; the others must be what
    they were.
    """
    saved, own = load_tensors(folder / TRAINED), dict(model.named_parameters())
    take_tensors(folder, {name: own[name] for name in own.keys() & saved.keys()}, saved)
    made_of = msgspec.json.decode((folder / MADE_OF).read_bytes(), type=MadeOf)
    if made_of.frozen != _digest({name: own[name] for name in own.keys() - saved.keys()}):
        raise ValueError(
            f"the layers that do not train are not those that {folder} was trained with; put the "
            f"model {made_of.model} back as it was"
        )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Of float32 values. Sums of integers are the same in any order, so on any machine."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach()
        bits = int(value.contiguous().view(torch.int32).sum(dtype=torch.int64))
        digest.update(repr((name, tuple(value.shape), bits)).encode())
    return digest.hexdigest()


def take_tensors(folder: Path, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy what was saved into a model's own tensors; other names or shapes are refused."""
    alike = {name for name in own.keys() & saved.keys() if own[name].shape == saved[name].shape}
    if len(alike) < len(own) or len(alike) < len(saved):
        raise _other_model(folder, sorted(own.keys() - alike), sorted(saved.keys() - alike))
    with torch.no_grad():
        for name, value in saved.items():
            own[name].copy_(value)


def _other_model(folder: Path, lacking: list[str], further: list[str]) -> ValueError:
    return ValueError(
        f"{folder} holds another model: it lacks {lacking[:3]} and adds {further[:3]}; use the "
        "model it was saved from"
    )


def positions_of(config: PretrainedConfig) -> int:
    """How long a text may be; models without a limit name none, or less than one."""
    named = getattr(config, "max_position_embeddings", None) or 0
    return named if named > 0 else 2**31


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
    linear = [n for n, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            raise ValueError(
                f"lora targets name {target!r}, which no layer is called; it has {', '.join(known)}"
            )
    with torch.random.fork_rng(), _quiet_patterns():
        torch.manual_seed(seed)
        adapted = get_peft_model(
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
    if lora.bits:
        hold_in_four_bits(model)
    return adapted


def with_saved_adapter(base: PreTrainedModel, folder: Path) -> PeftModel:
    """A model with the adapter of a folder around it."""
    with _quiet_patterns():
        return PeftModel.from_pretrained(base, folder)


@contextmanager
def _quiet_patterns() -> Iterator[None]:
    """Without PEFT's word that nothing matches a pattern which it made for experts itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        yield


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
        number = int(count)
        if number > num_layers:
            raise ValueError(
                f"train layers={layers!r} asks for more layers than the model has; it has "
                f"{num_layers}"
            )
        every = range(num_layers)
        wanted = every[:number] if side == "first" else every[num_layers - number :]
        return tuple(f"{name}.{i}." for i in wanted)
    return tuple(part.strip() for part in layers.split(","))


def _fingerprint(model: PreTrainedModel) -> str:
    """Names the architecture and its sizes, not the weights, which change at every step."""
    shapes = sorted(
        (name.replace(".base_layer", ""), shape)
        for name, shape in full_shapes(model)
        if "lora_" not in name
    )
    return hashlib.sha256(repr((model.config.model_type, shapes)).encode()).hexdigest()[:16]


def save_tensors(
    tensors: dict[str, Tensor], path: Path, words: Mapping[str, str] | None = None
) -> None:
    """`words`: kept beside them."""
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, path, {**(words or {})} or None
    )


def saved_words(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


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
    if isinstance(train, str):
        return policy
    model = choose_trained(policy.base, train, seed)
    if train.lora is not None:
        store_frozen(model, policy.dtype)
    made_of = msgspec.structs.replace(policy.made_of, bits=train.bits)
    return replace(policy, model=model, made_of=made_of, is_partial=train.lora is None)


def with_masters(policy: Policy, masters: Masters) -> Policy:
    """The same policy, its matrices that train in a type. Vectors stay in float32: they are few."""
    if masters == "bfloat16":
        assert policy.dtype == torch.bfloat16, "a crew file with such masters says so"
        for _, parameter in policy.trained():
            if parameter.dim() > 1:
                parameter.data = parameter.data.to(torch.bfloat16)
    return policy


def frozen_copy(policy: Policy) -> Policy:
    """The policy as it is now, for good. What does not train is shared, and so costs no memory.

    Linear layers are kept in the type of the arithmetic, as `store_frozen` keeps an adapter's. Not
    those with a bias: a GPU would round them otherwise than the policy's own.
    """
    head = policy.base.get_output_embeddings().weight
    half = {
        id(part.weight)
        for part in policy.model.modules()
        if isinstance(part, nn.Linear) and part.bias is None and part.weight is not head
    }
    kept: dict[int, Any] = {}  # what a deep copy takes instead of copying
    for parameter in policy.model.parameters():
        kept[id(parameter)] = parameter
        if parameter.requires_grad:
            dtype = policy.dtype if id(parameter) in half else parameter.dtype
            value = parameter.detach().to(dtype, copy=True)
            kept[id(parameter)] = nn.Parameter(value, requires_grad=False)
    model = copy.deepcopy(policy.model, kept)
    return replace(policy, model=model, gradient_checkpointing=False)


def merged_weight(linear: Any) -> Tensor:
    """The weight a linear layer acts with, its LoRA adapters added in; float32."""
    base = getattr(linear, "base_layer", linear)
    held = isinstance(base, FourBitLinear)
    weight: Tensor = base.four_bits.full(torch.float32) if held else base.weight.detach().float()
    for name in getattr(linear, "active_adapters", ()):
        weight = weight + linear.get_delta_weight(name)
    return weight


def store_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Linear layers beside an adapter never change: they need no more precision than is used."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name.endswith("base_layer.weight"):
            parameter.data = parameter.data.to(dtype)
    if dtype != torch.float32:
        for part in model.modules():
            for names in TOGETHER:
                _lay_in_a_row([getattr(part, name, None) for name in names])


def _lay_in_a_row(linears: list[Any]) -> None:
    """Have frozen layers of one input stand one behind the other: an engine multiplies with all of
    them at once, and so needs no copy of its own.
    """
    weights: list[Any] = [
        getattr(getattr(one, "base_layer", None), "weight", None) for one in linears
    ]
    if any(weight is None or weight.requires_grad for weight in weights):
        return
    stacked = torch.cat([weight.data for weight in weights])
    for weight, rows in zip(weights, stacked.split([len(w) for w in weights]), strict=True):
        weight.data = rows
