"""Motley: a crew of different language models that train each other.

The public names, and nothing else. A name's module is imported when the name is first used, so
that `import motley` costs nothing.

>>> from pathlib import Path
>>> config = motley.read_config(Path("crews/specialists.toml"))
>>> for lines in motley.LocalCrew.start(config, Path("runs/mine")).rounds():
...     print(lines[0].reward)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motley.config import CrewConfig as CrewConfig
    from motley.config import read_config as read_config
    from motley.crew import LocalCrew as LocalCrew
    from motley.export import export_model as export_model
    from motley.metrics import LearnerLine as LearnerLine
    from motley.metrics import SamplerLine as SamplerLine
    from motley.metrics import read_metrics as read_metrics
    from motley.objectives import Objective as Objective
    from motley.objectives import objective as objective
    from motley.policies import Policy as Policy
    from motley.records import Group as Group
    from motley.records import Problem as Problem
    from motley.records import Rollout as Rollout
    from motley.records import Sampling as Sampling
    from motley.run import trained_policies as trained_policies
    from motley.sim.crew import SimCrew as SimCrew
    from motley.tasks import Task as Task
    from motley.tasks import load_task as load_task

__version__ = "0.5.0"

# name -> the module it comes from
_HOMES = {
    "CrewConfig": "motley.config",
    "Group": "motley.records",
    "LearnerLine": "motley.metrics",
    "LocalCrew": "motley.crew",
    "Objective": "motley.objectives",
    "Policy": "motley.policies",
    "Problem": "motley.records",
    "Rollout": "motley.records",
    "SamplerLine": "motley.metrics",
    "Sampling": "motley.records",
    "SimCrew": "motley.sim.crew",
    "Task": "motley.tasks",
    "export_model": "motley.export",
    "load_task": "motley.tasks",
    "objective": "motley.objectives",
    "read_config": "motley.config",
    "read_metrics": "motley.metrics",
    "trained_policies": "motley.run",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'motley' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, "__version__", "__doc__", "__name__", "__path__"})
