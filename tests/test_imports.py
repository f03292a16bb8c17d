"""Imports point one way (docs/architecture.md), and the parts that meet foreign data need no
torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import motley

ROOT = Path(motley.__file__).parent

# From the ground up: a room imports from the floors below its own, and from nowhere else.
FLOORS = [
    {"clock", "files", "links", "objectives", "records", "spelling"},
    {"config", "exchange", "tasks"},
    {"exchange.nats", "models", "trust"},
    {"compute", "weights"},
    {"engines", "learning"},
    {"peers"},
    {"runs"},
    {"distributed", "reports", "sim"},
    {"archive", "benchmarks", "study"},
    {"api", "attacks", "dashboard"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# Stronger promises than the floors make.
NEVER = {
    ("learning", "exchange"): "the learner does not know the transport",
    ("learning", "trust"): "what is admitted is decided before learning",
    ("models", "compute"): "what a model is does not know how it is computed",
    ("objectives", "models"): "the objective knows tensors, no model",
    ("objectives", "records"): "the objective knows tensors, no records",
    ("trust", "models"): "admission knows no model",
    ("exchange", "tasks"): "the log knows bytes, not what they mean",
    ("peers", "exchange.nats"): "a peer does not know which log it reads",
    ("runs", "reports"): "a run does not know who shows it",
}


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module below motley: ("exchange", "nats", "log") is in exchange.nats."""
    inner = ".".join(parts[:2])
    return inner if inner in FLOOR else parts[0]


def module_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).with_suffix("").parts


def imports_of(path: Path) -> set[str]:
    """The rooms that a file imports from, at the top or inside functions."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    below = [name.split(".")[1:] for name in modules if name.startswith("motley.")]
    below = [parts for parts in below if parts != ["__version__"]]
    return {room_of(tuple(parts)) for parts in below}


@cache
def arrows() -> set[tuple[str, str]]:
    """(room, room it imports from)"""
    doors = (ROOT / "__init__.py", ROOT / "__main__.py")
    files = [path for path in ROOT.rglob("*.py") if path not in doors]
    both = {(room_of(module_of(path)), used) for path in files for used in imports_of(path)}
    return {(room, used) for room, used in both if room != used}


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(module_of(path)) for path in ROOT.rglob("*.py")} - {"__init__", "__main__"}
    assert rooms == FLOOR.keys()


def test_four_files_stand_at_the_root() -> None:
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert files == {"records", "clock", "files", "links"}


def test_every_arrow_runs_down() -> None:
    up = [f"{room} imports {used}" for room, used in arrows() if FLOOR[used] >= FLOOR[room]]
    assert sorted(up) == []


@pytest.mark.parametrize(("room", "used"), NEVER, ids=lambda name: name)
def test_promises_of_ignorance_are_kept(room: str, used: str) -> None:
    assert (room, used) not in arrows(), NEVER[room, used]


def test_records_tasks_exchange_trust_and_spelling_import_without_torch() -> None:
    code = (
        "import sys, motley.records, motley.config, motley.clock, motley.tasks, motley.exchange, "
        "motley.trust, motley.spelling\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
