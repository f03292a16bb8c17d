"""Packages that only some tasks need: imported when such a task is loaded, never before."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


def need(package: str, wanted_by: str, extra: str = "tasks") -> None:
    """Refuse a task whose package is missing, without importing it."""
    name = package.partition(".")[0]
    if importlib.util.find_spec(name) is None:
        raise ValueError(
            f"{wanted_by} needs the package {name}, which is not installed; "
            f"pip install 'motley-rl[{extra}]', in a clone pip install -e '.[{extra}]'"
        )


def load(package: str, wanted_by: str, extra: str = "tasks") -> ModuleType:
    need(package, wanted_by, extra)
    return importlib.import_module(package)
