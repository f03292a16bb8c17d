"""Problems and rewards. Imports without torch."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from motley.tasks.digits import Digits, DigitsConfig
from motley.tasks.files import FileConfig, FileTask, load_reward
from motley.tasks.task import Split, Task, assign, best_constant, check_task, draw_problems, evaluation_set

Config = TypeVar("Config", bound=msgspec.Struct)

__all__ = ["Split", "Task", "assign", "best_constant", "check_task", "draw_problems", "evaluation_set", "load_task"]


def load_task(spec: str, parameters: dict[str, Any]) -> Task:
    """A task by name: "digits", "file:problems.jsonl", or "module:function" with the file under [task]."""
    if spec == "digits":
        return Digits(_convert(parameters, DigitsConfig, spec))
    if spec.startswith("file:"):
        return FileTask(_convert({"file": spec.removeprefix("file:"), **parameters}, FileConfig, spec))
    if ":" in spec:
        return FileTask(_convert(parameters, FileConfig, spec), load_reward(spec))
    raise ValueError(f"task {spec!r} is not known; use digits, file:PATH.jsonl or module:function")


def _convert(parameters: dict[str, Any], config: type[Config], spec: str) -> Config:
    try:
        return msgspec.convert(parameters, config)
    except msgspec.ValidationError as error:
        raise ValueError(f"[task] of {spec!r}: {error}; known: {', '.join(config.__struct_fields__)}") from None
