"""What a key was meant to be that no table of a crew file has, and which words a place allows.

Owns the tables and their keys. A guess is made only where it is close: a wrong one sends people
away from what they were looking for.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import inspect

from motley.config import peers, rules
from motley.config.crew import CrewConfig
from motley.links import Delay, Link
from motley.records import Sampling

# as a file writes them; where a key stands in several, the one that is usually meant is first
TABLES: dict[str, type[msgspec.Struct]] = {
    "[crew]": rules.Crew,
    "[sampling]": Sampling,
    "[trust]": rules.Trust,
    "[learning]": rules.Learning,
    "[prompt]": rules.Prompt,
    "[evaluate]": rules.Evaluate,
    "[weights]": rules.WeightsChannel,
    "[network]": Link,
    "delay": Delay,
    "[[peer]]": peers.PeerConfig,
    "[peer.churn]": peers.Churn,
    "[peer.speed]": peers.Speed,
    "engine": peers.EnginePart,
    "openai": peers.OpenAI,
    "vllm": peers.Vllm,
    "train": peers.TrainPart,
    "lora": peers.Lora,
    "warm": peers.Warm,
}

# what other trainers call it
ELSEWHERE = {
    "batch_size": "problems_per_round",
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "max_completion_length": "max_tokens",
    "max_grad_norm": "grad_clip",
    "max_new_tokens": "max_tokens",
    "max_steps": "rounds",
    "num_generations": "group_size",
    "num_iterations": "epochs",
    "num_train_epochs": "rounds",
    "warmup_steps": "warmup_rounds",
}

CLOSE = 0.75  # of a word in the same table, as difflib measures it
CLOSER = 0.85  # of a word in another


def remedy(key: str, place: str) -> str:
    """What to do about an unknown key at a place such as `learning` or `peer[...].train`."""
    homes = _homes(key)
    if homes:
        return f"it belongs under {' or '.join(homes)}"
    if key in ELSEWHERE:
        return f"here it is called {ELSEWHERE[key]}, of {_homes(ELSEWHERE[key])[0]}"
    here = _keys_at(place)
    if close := _closest(key, here, CLOSE):
        return f"did you mean {close}?"
    everywhere = [field for table in TABLES.values() for field in table.__struct_fields__]
    if close := _closest(key, everywhere, CLOSER):
        return f"did you mean {close} of {_homes(close)[0]}?"
    return "remove it, or see docs/crew_file.md for the keys"


def meant(key: str, known: Sequence[str]) -> str:
    """Which of the known keys a key is meant to be; empty if it is like none of them."""
    elsewhere = ELSEWHERE.get(key, "")
    return elsewhere if elsewhere in known else _closest(key, known, CLOSE)


def _homes(key: str) -> list[str]:
    """The tables that have a key."""
    return [name for name, table in TABLES.items() if key in table.__struct_fields__]


def _keys_at(place: str) -> Sequence[str]:
    """The keys of the table at a place; those of the file where it is none of the tables."""
    last = re.sub(r"\[.*?\]", "", place).split(".")[-1]
    last = "network" if last == "link" else last  # the network as one peer has it
    for name, table in TABLES.items():
        if name.strip("[]").split(".")[-1] == last:
            return table.__struct_fields__
    return CrewConfig.__struct_fields__


def _closest(key: str, known: Sequence[str], least: float) -> str:
    """The key that is most like it; empty if none is like it. Where only one begins so, that."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=least)
    begins = [one for one in known if len(key) > 2 and one.startswith(key)]
    return close[0] if close else begins[0] if len(set(begins)) == 1 else ""


def allowed(place: str) -> str:
    """What may stand at a place, as a file writes it.

    >>> allowed("peer[0].train")
    '"full", { lora = … } or { layers = … }'
    """
    kinds = [*_kinds(inspect.type_info(CrewConfig))]
    for step in re.findall(r"\[.*?\]|[^.\[\]]+", place):
        kinds = [inner for kind in kinds for inner in _inside(kind, step)]
    *first, last = [word for kind in kinds for word in _words(kind)]
    return f"{', '.join(first)} or {last}" if first else last


def _kinds(kind: inspect.Type) -> Sequence[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _inside(kind: inspect.Type, step: str) -> Sequence[inspect.Type]:
    """What the key of a table may be, or any value of a list or a table of one's own keys."""
    match kind:
        case inspect.StructType():
            return [k for f in kind.fields if f.encode_name == step for k in _kinds(f.type)]
        case inspect.VarTupleType():
            return _kinds(kind.item_type)
        case inspect.DictType():
            return _kinds(kind.value_type)
    return ()


def _words(kind: inspect.Type) -> Iterator[str]:
    match kind:
        case inspect.LiteralType():
            yield from (f'"{value}"' for value in kind.values)
        case inspect.BoolType():
            yield from ("true", "false")
        case inspect.StructType():
            yield from (f"{{ {field.encode_name} = … }}" for field in kind.fields)
