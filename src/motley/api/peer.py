"""A peer as one writes it in Python: a model, and how it takes part."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.api.given import well_called

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from motley.tasks import Task

# writes a model object where a crew file can name it; the folder
Store = Callable[["PreTrainedModel", "PreTrainedTokenizerBase", str], str]


@well_called
@dataclass(frozen=True)
class Peer:
    """A model, and how it takes part. The keys are those of a `[[peer]]` of a crew file.

    `model`: a Hugging Face id, a folder, a GGUF file, `tiny:0.3m`, or a model object of
    transformers with its `tokenizer`. An object is where training begins; it is not changed. What
    was learned is in the run: `run.model("ann")`.

    >>> Peer("tiny:0.3m", name="ann", train="lora", warm=0.3)
    """

    model: str | Path | PreTrainedModel = ""
    _: KW_ONLY
    name: str = ""  # none: made from the model's
    tokenizer: PreTrainedTokenizerBase | None = None  # of a model object
    # "full", "lora", {"lora": {"rank": 16}}, {"layers": "last:2"}, or a peft.LoraConfig
    train: Any = "full"
    lr: float = 0.0  # 0: the crew's
    # supervised first: 0.3 until that share of sampled answers is right, or the keys of `warm`
    warm: float | Mapping[str, Any] | None = None
    keep_layers: int = 0
    device: str = "auto"
    dtype: str = "auto"
    engine: str | Mapping[str, Any] = "torch"
    judge: Mapping[str, Any] | None = None
    gradient_checkpointing: bool | str = False
    optimizer: str = "adamw"
    masters: str = "float32"
    offload: bool = False
    role: str = "peer"
    follows: str = ""
    speed: Mapping[str, float] | None = None  # simulated
    churn: Mapping[str, Any] | None = None  # simulated

    def __post_init__(self) -> None:
        self._check_model()
        _train_table(self.train)  # what is wrong in it is said now
        known = self.warm is None or isinstance(self.warm, Real | Mapping)
        if not known or isinstance(self.warm, bool):
            raise ValueError(
                f"warm={self.warm!r}; expected a share of right answers, such as 0.3, or a table, "
                "such as {'accuracy': {'sort': 0.3}}"
            )

    def _check_model(self) -> None:
        if isinstance(self.model, str | Path):
            if self.tokenizer is not None:
                raise ValueError(
                    f"tokenizer is for a model object; {self.model} brings its own: leave it out"
                )
        elif hasattr(self.model, "peft_config"):
            raise ValueError(
                "the model has adapters already; give its base, and train=LoraConfig(…) for an "
                "adapter of its own"
            )
        elif isinstance(self.model, type) or not hasattr(self.model, "save_pretrained"):
            raise ValueError(
                f"model is a {type(self.model).__name__}; expected a Hugging Face id, a folder, a "
                "GGUF file, such as 'tiny:0.3m', or a model of transformers"
            )
        elif self.tokenizer is None:
            raise ValueError(
                "a model object needs its tokenizer; write Peer(model, tokenizer=tokenizer)"
            )

    def table(self, name: str, store: Store, task: Task) -> dict[str, Any]:
        """The `[[peer]]` of a crew file."""
        table = {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None and value != field.default
        }
        table.pop("tokenizer", None)
        table |= {"name": name, "model": self._place(name, store)}
        if "train" in table:
            table["train"] = _train_table(self.train)
        if isinstance(self.warm, Real):
            table["warm"] = {"accuracy": {kind: float(self.warm) for kind in task.kinds}}
        return table

    def _place(self, name: str, store: Store) -> str:
        if isinstance(self.model, Path) and self.model.exists():  # Path("./x") is written "x"
            return str(self.model.absolute())
        if isinstance(self.model, str | Path):
            return str(self.model)
        assert self.tokenizer is not None  # as was checked
        return store(self.model, self.tokenizer, name)

    @property
    def is_tiny(self) -> bool:
        return isinstance(self.model, str) and self.model.startswith("tiny:")


def names_of(peers: Sequence[Peer]) -> list[str]:
    """Every peer's name: its own, or one made from its model's, numbered where that is taken."""
    names: list[str] = []
    for peer in peers:
        name = stem = peer.name or _stem(peer.model)
        number = 2
        while not peer.name and name in names:
            name, number = f"{stem}-{number}", number + 1
        names.append(name)
    return names


def _stem(model: str | Path | PreTrainedModel) -> str:
    said = str(model) if isinstance(model, str | Path) else getattr(model, "name_or_path", "")
    last = re.split(r"[/:\\]", said.rstrip("/"))[-1].removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9_-]+", "-", last).strip("-").lower() or "peer"


def _train_table(train: Any) -> Any:
    if isinstance(train, Mapping) or (isinstance(train, str) and train == "full"):
        return train
    if isinstance(train, str) and train == "lora":
        return {"lora": {}}
    if hasattr(train, "lora_alpha") and hasattr(train, "target_modules"):
        return {"lora": _lora_table(train)}
    raise ValueError(
        f"train={train!r}; expected 'full', 'lora', {{'lora': {{'rank': 16}}}}, "
        "{'layers': 'last:2'} or a peft.LoraConfig"
    )


def _lora_table(given: Any) -> dict[str, Any]:
    """What a peft.LoraConfig says, where a peer can do it."""
    targets = given.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        raise ValueError(
            f"LoraConfig target_modules={targets!r} is a pattern; give the names of layers, such "
            "as ['q_proj', 'v_proj'], or 'all-linear'"
        )
    for key in ("lora_dropout", "modules_to_save", "use_rslora", "use_dora", "rank_pattern"):
        if getattr(given, key, None):
            raise ValueError(
                f"LoraConfig {key}={getattr(given, key)!r} is not supported; leave it out"
            )
    named = sorted(targets) if targets and not isinstance(targets, str) else []
    return {"rank": given.r, "alpha": float(given.lora_alpha), "targets": named}
