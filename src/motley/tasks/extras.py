"""Packages that only some tasks need: imported when such a task is loaded, never before."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

_REMEDY = "pip install 'motley-rl[tasks]'"


def need(package: str, wanted_by: str) -> None:
    """Refuse a task whose package is missing, without importing it."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"{wanted_by} needs the package {package}, which is not installed; {_REMEDY}"
        )


def load(package: str, wanted_by: str) -> ModuleType:
    need(package, wanted_by)
    return importlib.import_module(package)
