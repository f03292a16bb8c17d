"""Whole crews whose peers save memory: stopped, resumed, and refused with another optimiser."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.test_cli import error, motley
from cli.test_resuming import CREW, crew_in, weights

pytestmark = pytest.mark.slow

KEYS = 'optimizer = "adamw8bit"\ngradient_checkpointing = "auto"\noffload = true'


def lean_crew(keys: str) -> str:
    return CREW.replace('model = "tiny:0.3m"', f'model = "tiny:0.3m"\n{keys}')


def test_a_lean_crew_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    crew = crew_in(tmp_path, lean_crew(KEYS))
    motley("train", crew, "--rounds", 3, "--out", tmp_path / "whole")
    motley("train", crew, "--rounds", 2, "--out", tmp_path / "parts")
    motley("train", "--resume", tmp_path / "parts", "--rounds", 3)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole == parts
    assert any(name.endswith("optimiser.safetensors") for name in whole)


def test_a_run_cannot_go_on_with_another_optimizer(tmp_path: Path) -> None:
    crew = crew_in(tmp_path, lean_crew('optimizer = "adamw8bit"'))
    motley("train", crew, "--rounds", 1, "--out", tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('"adamw8bit"', '"adamw"'))
    said = error("train", "--resume", tmp_path / "run", "--rounds", 2)
    assert "adamw8bit" in said
    assert "begin a new run" in said
