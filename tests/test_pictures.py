"""The README's pictures are what docs/pictures.py draws from what was recorded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[1] / "docs"
NAMES = ("curves.svg", "way.svg")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["pictures"] = module
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_drawn_from_the_records(script: ModuleType) -> None:
    drawn = script.pictures()
    assert tuple(drawn) == NAMES
    for name, text in drawn.items():
        assert (DOCS / "pictures" / name).read_text() == text, "run: python docs/pictures.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_small_stands_alone_and_has_a_dark_scheme(name: str) -> None:
    text = (DOCS / "pictures" / name).read_text()
    assert len(text) < 12_000
    assert ElementTree.fromstring(text).get("aria-label")
    assert "prefers-color-scheme:dark" in text
    assert "<script" not in text
    assert text.count("http") == text.count("http://www.w3.org/2000/svg")


def test_curves_are_means_over_the_kinds_a_peer_was_not_best_at(script: ModuleType) -> None:
    point = lambda run, number, **heldout: script.Point(run, number, "a", heldout)
    points = [
        point("crew", 10, sort=1.0, sum=0.5, reverse=0.7),
        point("crew", 0, sort=0.9, sum=0.1, reverse=0.3),
        point("alone", 0, sort=0.0, sum=0.0, reverse=0.0),
    ]
    others = script._curve("", points, "crew", "a", own=False)
    assert (list(others.x), others.y) == ([0, 10], [pytest.approx(0.2), pytest.approx(0.6)])
    assert script._curve("", points, "crew", "a", own=True).y == [0.9, 1.0]
