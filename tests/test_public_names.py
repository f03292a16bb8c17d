"""`import motley` costs nothing, and every public name is there when it is asked for."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import motley

PUBLIC = sorted(motley._HOMES)


def test_importing_motley_imports_nothing_heavy() -> None:
    code = (
        "import sys, motley\n"
        "heavy = ('torch', 'transformers', 'numpy', 'msgspec', 'rich', 'typer')\n"
        "print([name for name in sys.modules if name in heavy or name.startswith('motley.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_what_its_module_has(name: str) -> None:
    assert getattr(motley, name) is getattr(importlib.import_module(motley._HOMES[name]), name)


def test_dir_lists_the_public_names() -> None:
    assert {*PUBLIC, "__version__"} <= set(dir(motley))


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'motley' has no attribute 'CrewConfg'"):
        motley.CrewConfg  # noqa: B018


def test_modules_can_still_be_imported_from_motley() -> None:
    from motley import records

    assert records.Group is motley.Group


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(motley.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {
        alias.asname: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert told == motley._HOMES


def test_the_version_is_that_of_the_package() -> None:
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    assert f'version = "{motley.__version__}"' in pyproject.read_text()
