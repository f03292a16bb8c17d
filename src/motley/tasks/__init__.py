"""Problems and rewards. Imports without torch."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import msgspec

from motley.tasks.datasets import DATASETS, DatasetConfig, DatasetTask
from motley.tasks.digits import Digits, DigitsConfig
from motley.tasks.gym import GymConfig, GymTask
from motley.tasks.mixture import Mixture
from motley.tasks.own import OwnConfig, own_task, task_of_file
from motley.tasks.rewards import RewardError, load_reward, named_reward
from motley.tasks.rows import read_rows
from motley.tasks.scoring import Scorer
from motley.tasks.task import (
    UNDECIDED,
    Measure,
    Split,
    Task,
    assign,
    best_constant,
    check_task,
    decided,
    draw_problems,
    evaluation_set,
    examine_task,
    hardest_to_hold,
    ready_problems,
    unsteady,
)

Config = TypeVar("Config", bound=msgspec.Struct)

__all__ = [
    "KNOWN",
    "UNDECIDED",
    "Measure",
    "RewardError",
    "Scorer",
    "Split",
    "Task",
    "assign",
    "best_constant",
    "check_task",
    "decided",
    "draw_problems",
    "evaluation_set",
    "examine_task",
    "hardest_to_hold",
    "load_task",
    "own_task",
    "read_rows",
    "ready_problems",
    "unsteady",
]

KNOWN = ("digits", *DATASETS, "reasoning_gym:NAME", "mixture", "file:PATH", "module:function")


def load_task(spec: str, parameters: dict[str, Any], scores: bool = True) -> Task:
    """A task by name, with its [task] table.

    "module:function" is a reward function, its file of problems is under [task]. `scores` False:
    reward functions are not imported, for who only asks which problems there are.
    """
    load = load_reward if scores else named_reward
    if spec == "digits":
        return Digits(_convert(parameters, DigitsConfig, spec))
    if spec == "mixture":
        return Mixture(parameters, partial(load_task, scores=scores))
    if spec in DATASETS:
        return DatasetTask(spec, _convert(parameters, DatasetConfig, spec))
    if spec.startswith("reasoning_gym:"):
        own = {
            key: value for key, value in parameters.items() if key in GymConfig.__struct_fields__
        }
        others = {key: value for key, value in parameters.items() if key not in own}
        return GymTask(spec.removeprefix("reasoning_gym:"), _convert(own, GymConfig, spec), others)
    if spec.startswith("file:"):
        file = {"file": spec.removeprefix("file:")}
        return task_of_file(_convert({**file, **parameters}, OwnConfig, spec), load=load)
    if ":" in spec:
        return task_of_file(_convert(parameters, OwnConfig, spec), spec, load)
    raise ValueError(f"task {spec!r} is not known; use {', '.join(KNOWN[:-1])} or {KNOWN[-1]}")


def _convert(parameters: dict[str, Any], config: type[Config], spec: str) -> Config:
    try:
        return msgspec.convert(parameters, config)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"[task] of {spec!r}: {error}; known: {', '.join(config.__struct_fields__)}"
        ) from None
