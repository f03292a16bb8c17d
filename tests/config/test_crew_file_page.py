"""docs/crew_file.md names every key that a crew file may have."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

import motley.config.crew
import motley.config.peers
import motley.config.rules
from motley.config import CrewConfig
from motley.links import Delay, Link, Network
from motley.records import Sampling

PAGE = (Path(__file__).parents[2] / "docs" / "crew_file.md").read_text()

# Where the page has a struct's keys: the heading of its section, what the row's table begins
# with, and what stands before the key in it.
PLACES = {
    "Crew": ("## `[crew]`", "| key |", ""),
    "Prompt": ("## `[prompt]`", "| key |", ""),
    "Sampling": ("## `[sampling]`", "| key |", ""),
    "Learning": ("## `[learning]`", "| key |", ""),
    "Trust": ("## `[trust]`", "| key |", ""),
    "Teach": ("## `[teach]`", "| key |", ""),
    "Evaluate": ("## `[evaluate]`", "| key |", ""),
    "WeightsChannel": ("## `[weights]`", "| key |", ""),
    "Link": ("## `[network]`", "| key |", ""),
    "Delay": ("## `[network]`", "| `shape` |", ""),
    "PeerConfig": ("## `[[peer]]`", "| key |", ""),
    "TrainPart": ("## `[[peer]]`", "| key of `train` |", ""),
    "Lora": ("## `[[peer]]`", "| key of `train` |", "lora."),
    "Warm": ("## `[[peer]]`", "| key of `warm` |", ""),
    "EnginePart": ("## `[[peer]]`", "| key of `engine` |", ""),
    "Vllm": ("## `[[peer]]`", "| key of `engine` |", "vllm."),
    "OpenAI": ("## `[[peer]]`", "| key of `engine` |", "openai."),
    "Speed": ("## `[[peer]]`", "| key of `speed`, `churn` |", "speed."),
    "Churn": ("## `[[peer]]`", "| key of `speed`, `churn` |", "churn."),
}


def structs() -> dict[str, type[msgspec.Struct]]:
    """Everything that a table of a crew file is read as, but for the file itself."""
    modules = (motley.config.crew, motley.config.peers, motley.config.rules)
    made = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
    ]
    return {
        struct.__name__: struct
        for struct in (*made, Delay, Link, Sampling)
        if struct is not CrewConfig
    }


def table(heading: str, head: str) -> str:
    """The table that begins with `head`, in the section under a heading."""
    assert heading in PAGE, f"the page has no section {heading}"
    section = PAGE.split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    assert head in section, f"{heading} has no table {head}"
    return section[section.index(head) :].split("\n\n", 1)[0]


def named_in(rows: str) -> set[str]:
    """What stands as code in the rows' cells; of `link.PEER`, `link` too."""
    codes = re.findall(r"`([^`]+)`", rows)
    return {*codes, *(code.split(".")[0] for code in codes)}


def test_the_page_has_a_place_for_every_table_of_a_crew_file() -> None:
    assert structs().keys() == PLACES.keys()
    sections = set(re.findall(r"^## `\[+(\w+)\]+`$", PAGE, re.MULTILINE))
    assert set(CrewConfig.__struct_fields__) == sections


@pytest.mark.parametrize("struct", structs().values(), ids=lambda struct: struct.__name__)
def test_the_page_names_every_key(struct: type[msgspec.Struct]) -> None:
    heading, head, before = PLACES[struct.__name__]
    named = named_in(table(heading, head))
    keys = [f"{before}{key}" for key in struct.__struct_fields__]
    assert [key for key in keys if key not in named] == []


def test_a_crews_network_is_a_link_and_those_of_its_peers() -> None:
    further = set(Network.__struct_fields__) - set(Link.__struct_fields__)
    assert further <= named_in(table("## `[network]`", "| key |"))
