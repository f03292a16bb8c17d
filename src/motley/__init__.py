"""Motley: a crew of different language models that train each other.

The public names, and nothing else. A name's module is imported when the name is first used, so
that `import motley` costs nothing.

>>> crew = motley.Crew([motley.Peer("tiny:0.3m"), motley.Peer("tiny:1m")], task="digits", rounds=20)
>>> run = crew.train()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motley.api.crew import Crew as Crew
    from motley.api.peer import Peer as Peer
    from motley.api.run import Run as Run
    from motley.config import CrewConfig as CrewConfig
    from motley.config import read_config as read_config
    from motley.models.policy import Policy as Policy
    from motley.objectives import Objective as Objective
    from motley.objectives import objective as objective
    from motley.records import Group as Group
    from motley.records import Problem as Problem
    from motley.records import Rollout as Rollout
    from motley.records import Sampling as Sampling
    from motley.reports.export import export_model as export_model
    from motley.runs.building import trained_policies as trained_policies
    from motley.runs.local import LocalCrew as LocalCrew
    from motley.runs.metrics import LearnerLine as LearnerLine
    from motley.runs.metrics import SamplerLine as SamplerLine
    from motley.runs.metrics import read_metrics as read_metrics
    from motley.sim.simulation import SimCrew as SimCrew
    from motley.tasks import Task as Task
    from motley.tasks import load_task as load_task

__version__ = "0.5.0"

# name -> the module it comes from
_HOMES = {
    "Crew": "motley.api.crew",
    "CrewConfig": "motley.config",
    "Group": "motley.records",
    "LearnerLine": "motley.runs.metrics",
    "LocalCrew": "motley.runs.local",
    "Objective": "motley.objectives",
    "Peer": "motley.api.peer",
    "Policy": "motley.models.policy",
    "Problem": "motley.records",
    "Rollout": "motley.records",
    "Run": "motley.api.run",
    "SamplerLine": "motley.runs.metrics",
    "Sampling": "motley.records",
    "SimCrew": "motley.sim.simulation",
    "Task": "motley.tasks",
    "export_model": "motley.reports.export",
    "load_task": "motley.tasks",
    "objective": "motley.objectives",
    "read_config": "motley.config",
    "read_metrics": "motley.runs.metrics",
    "trained_policies": "motley.runs.building",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'motley' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, "__version__", "__doc__", "__name__", "__path__"})
