"""Packages that only some need: how they are installed, and imported not before somebody needs
them.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


def install(extra: str) -> str:
    """How to get what an extra brings, from PyPI and in a clone of the repository."""
    return (
        f"pip install 'motley-rl[{extra}]', or in a clone .venv/bin/pip install -c constraints.txt "
        f"-e '.[{extra}]'"
    )


def need(package: str, wanted_by: str, extra: str = "tasks") -> None:
    """Refuse a task whose package is missing, without importing it."""
    name = package.partition(".")[0]
    if importlib.util.find_spec(name) is None:
        raise ValueError(
            f"{wanted_by} needs the package {name}, which is not installed; {install(extra)}"
        )


def load(package: str, wanted_by: str, extra: str = "tasks") -> ModuleType:
    need(package, wanted_by, extra)
    return importlib.import_module(package)
