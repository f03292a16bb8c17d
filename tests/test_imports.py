"""Imports point one way (docs/architecture.md), and the parts that meet foreign data need no
torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import motley

ROOT = Path(motley.__file__).parent

# A part may import from its own layer's other parts (never in a circle) and from every layer above
# it in this list.
LAYERS = [
    {"records", "clock", "network", "config", "files"},
    {"tasks", "objectives", "exchange", "policies"},
    {"engines", "trust", "learning"},
    {
        "evaluation",
        "metrics",
        "peer",
        "peer_state",
        "publications",
        "reporting",
        "sampler",
        "sampler_follower",
    },
    {"run"},
    {
        "crew",
        "conformance",
        "distributed",
        "sim",
        "benchmarks",
    },
    {"archive", "card", "display", "export", "study"},
    {"cli"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# Stronger promises than the layers make.
NEVER = {
    ("learning", "exchange"): "the learner does not know the transport",
    ("learning", "trust"): "what is admitted is decided before learning",
    ("objectives", "policies"): "the objective knows tensors, no model",
    ("objectives", "records"): "the objective knows tensors, no records",
    ("trust", "policies"): "admission knows no model",
    ("exchange", "tasks"): "the log knows bytes, not what they mean",
}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The parts of motley that a file imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= (
                {f"motley.{alias.name}" for alias in node.names}
                if node.module == "motley"
                else {node.module or ""}
            )
    return {name.split(".")[1] for name in found if name.startswith("motley.")}


def edges() -> set[tuple[str, str]]:
    files = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    return {
        (part_of(path), imported)
        for path in files
        for imported in imports_of(path)
        if imported != part_of(path)
    }


def test_every_part_has_a_layer() -> None:
    parts = {part_of(path) for path in ROOT.rglob("*.py")} - {"__init__"}
    assert parts <= LEVEL.keys(), f"give {sorted(parts - LEVEL.keys())} a layer in LAYERS"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{part} imports {imported}"
        for part, imported in sorted(edges())
        if LEVEL[imported] > LEVEL[part]
    ]
    assert wrong == []


def test_parts_never_import_each_other_in_a_circle() -> None:
    needs: dict[str, set[str]] = {}
    for part, imported in edges():
        needs.setdefault(part, set()).add(imported)

    def reach(part: str, seen: frozenset[str]) -> frozenset[str]:
        for imported in needs.get(part, set()) - seen:
            seen = reach(imported, seen | {imported})
        return seen

    assert [part for part in needs if part in reach(part, frozenset())] == []


@pytest.mark.parametrize(("part", "imported"), NEVER, ids=lambda name: name)
def test_promises_of_ignorance_are_kept(part: str, imported: str) -> None:
    assert (part, imported) not in edges(), NEVER[part, imported]


def test_records_tasks_exchange_and_trust_import_without_torch() -> None:
    code = (
        "import sys, motley.records, motley.config, motley.clock, motley.tasks, motley.exchange, "
        "motley.trust\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_shows_help_without_torch() -> None:
    code = "import sys, motley.cli\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
