"""docs/architecture.md follows a group through functions that exist, and says how long they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import motley
from test_imports import FLOORS

ROOT = Path(motley.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
README = PAGE.parents[1] / "README.md"
HEADS = {
    "way": "| arrow | function | file | lines |",
    "rooms": "| floor | room | owns |",
    "cuts": "| module | why it stands by itself |",
}


class Stop(NamedTuple):
    """A row of the table: a function on the group's way."""

    function: str
    file: str
    num_lines: int


def rows_below(head: str) -> list[list[str]]:
    """The cells of a table of the page, without the marks of code."""
    lines = PAGE.read_text().splitlines()
    rows = []
    for line in lines[lines.index(head) + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def stops() -> list[Stop]:
    return [
        Stop(function, file, int(lines)) for _, function, file, lines in rows_below(HEADS["way"])
    ]


def num_lines(stop: Stop) -> int:
    """How long the function is in its file; `Outbox.put` is looked for in the class `Outbox`."""
    node: ast.AST = ast.parse((ROOT / stop.file).read_text())
    for name in stop.function.split("."):
        inner = {getattr(child, "name", ""): child for child in ast.iter_child_nodes(node)}
        assert name in inner, f"{stop.file} has no {stop.function}"
        node = inner[name]
    assert isinstance(node, ast.FunctionDef)
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("stop", stops(), ids=lambda stop: stop.function)
def test_a_function_on_the_way_is_there_and_as_long_as_the_page_says(stop: Stop) -> None:
    assert num_lines(stop) == stop.num_lines


def test_the_way_leads_from_the_problems_to_the_next_round() -> None:
    arrows = [arrow for arrow, *_ in rows_below(HEADS["way"]) if arrow]
    assert arrows[0] == "round -> problems"
    assert arrows[-1] == "weights -> next round"
    assert len(arrows) == len(set(arrows))


def test_the_rooms_of_the_page_are_those_that_imports_are_held_to() -> None:
    floors: list[set[str]] = []
    for floor, room, _ in rows_below(HEADS["rooms"]):
        if floor:
            floors.insert(0, set())
            assert int(floor) == len(FLOORS) + 1 - len(floors)
        floors[0].add(room)
    assert floors == FLOORS
    num_rooms = sum(map(len, FLOORS))
    assert f"There are {num_rooms} rooms on {len(FLOORS)} floors." in PAGE.read_text()


def test_the_modules_whose_cut_is_explained_are_there() -> None:
    modules = [module for module, _ in rows_below(HEADS["cuts"])]
    assert [module for module in modules if not (ROOT / module).is_file()] == []


def test_the_readme_has_every_room_and_nothing_else() -> None:
    house = README.read_text().split("## The house\n", 1)[1]
    named = re.findall(r"^      ([\w/]+(?:\.py)?/?) ", house, re.MULTILINE)
    rooms = {name.removesuffix(".py").strip("/").replace("/", ".") for name in named}
    assert rooms == set().union(*FLOORS)
    assert [name for name in named if not (ROOT / name).exists()] == []
