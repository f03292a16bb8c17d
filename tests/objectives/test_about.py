"""Every row and variant has a line and a source, on the page of methods too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from motley.objectives import OBJECTIVES, VARIANTS, about
from motley.objectives.about import ABOUT

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_every_row_and_variant_has_a_line_and_nothing_else_has() -> None:
    variants = [f"{row}/{name}" for row, found in VARIANTS.items() for name in found]
    assert set(ABOUT) == {*OBJECTIVES, *(v for v in variants if not v.endswith("/published"))}


def test_lines_are_short_enough_for_a_table() -> None:
    assert [a.line for a in ABOUT.values() if len(a.line) > 66 or a.line.endswith(".")] == []
    assert [
        a.source for a in ABOUT.values() if not re.search(r"arXiv \d{4}\.|\d|Motley", a.source)
    ] == []


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_page_of_methods_has_a_section_and_a_line_for_a_row_and_names_its_settings(
    name: str,
) -> None:
    page = PAGE.read_text()
    assert f"(#{name})" in page
    (section,) = re.findall(rf"^## `{name}`\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    source = about(name).source
    if source.startswith("arXiv"):
        assert source in section or source.removeprefix("arXiv ") in section
    everywhere = {"dual_clip", "delta", "beta", "toward", "beta_times", "keep", "held"}
    for setting in OBJECTIVES[name].settings().keys() - everywhere:
        assert f"`{setting}`" in section, setting
    for variant in VARIANTS.get(name, {}):
        assert variant == "published" or f"`{variant}`" in section, variant
