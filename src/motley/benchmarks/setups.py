"""How a model learns in a benchmark: settings of a crew file, as a command line gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from motley.config import Lora, Masters, PeerConfig, TrainPart
from motley.config.settings import with_settings
from motley.learning.descent import Upkeep

DEFAULT = "default"  # the settings of a crew file that says nothing
OF_PEERS = ("train", "dtype", "masters", "optimizer", "offload", "gradient_checkpointing")
OF_LEARNING = ("token_budget",)
KNOWN = (*OF_PEERS, *(f"learning.{key}" for key in OF_LEARNING))
NOBODY = PeerConfig(name="bench", model="tiny:1m")  # its model is nobody's


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a [[peer]] that say what it learns in, and the tokens of a micro-batch."""

    name: str = DEFAULT
    peer: PeerConfig = NOBODY
    token_budget: int = 0

    @property
    def train(self) -> str | TrainPart:
        return self.peer.train

    @property
    def lora(self) -> Lora | None:
        return None if isinstance(self.train, str) else self.train.lora

    @property
    def masters(self) -> Masters:
        return self.peer.masters

    @property
    def upkeep(self) -> Upkeep:
        return Upkeep(kind=self.peer.optimizer, offload=self.peer.offload)

    @property
    def keeps_half(self) -> bool:
        """Whether a model's matrices are bfloat16 from the beginning on."""
        frozen = self.lora is not None and self.peer.dtype == "bfloat16"
        return frozen or self.masters == "bfloat16"


def setup_of(text: str, dtype: str = "auto") -> Setup:
    """Settings with spaces between them. `dtype`: where they name none.

    >>> setup_of("masters=bfloat16 dtype=bfloat16 learning.token_budget=8192").token_budget
    8192
    """
    settings = [] if text == DEFAULT else text.split()
    for setting in settings:
        key, equals, _ = setting.partition("=")
        if not equals or (key not in KNOWN and not key.startswith("train.")):
            raise ValueError(
                f"--learn {text!r}: {setting!r} is none of its settings; write KEY=VALUE with one "
                f"of {', '.join(KNOWN)}, with spaces between them and none in them, or {DEFAULT}"
            )
    try:
        document = with_settings({}, settings)
        learning = document.pop("learning", {})
        named = {"name": NOBODY.name, "model": NOBODY.model, "dtype": dtype}
        peer = msgspec.convert(named | document, PeerConfig)
        return Setup(text, peer, _budget(learning.get("token_budget", 0)))
    except ValueError as error:
        raise ValueError(f"--learn {text!r}: {str(error).replace('--set ', '')}") from None


def _budget(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"learning.token_budget={value!r} is no number of tokens; use such as 8192, or 0 for "
            "as many as memory holds"
        )
    return value
