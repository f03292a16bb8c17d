"""The house stays one that can be read: sizes, and names that mean one thing."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import motley

ROOT = Path(motley.__file__).parent
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_A_CLASS = 250


@cache
def definitions() -> list[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    return [
        (path.relative_to(ROOT), node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def is_kernel(node: ast.AST) -> bool:
    """Compiled by Triton: a part of one cannot be a kernel of its own."""
    decorators = getattr(node, "decorator_list", [])
    return any("triton" in ast.unparse(decorator) for decorator in decorators)


def test_functions_and_classes_are_short_enough_to_read() -> None:
    long = [
        f"{path}: {node.name} has {num_lines(node)} lines"
        for path, node in definitions()
        if not is_kernel(node)
        and num_lines(node)
        > (MOST_LINES_OF_A_CLASS if isinstance(node, ast.ClassDef) else MOST_LINES_OF_A_FUNCTION)
    ]
    assert long == []


def test_no_two_classes_share_a_name() -> None:
    # but for the words that users write in Python, which are the crew file's, and those of the
    # page's JSON, which are the schema's
    elsewhere = (Path("dashboard/answers.py"),)
    names = Counter(
        node.name
        for path, node in definitions()
        if isinstance(node, ast.ClassDef) and path.parts[0] != "api" and path not in elsewhere
    )
    assert [name for name, count in names.items() if count > 1] == []
