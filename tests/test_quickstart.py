"""docs/quickstart.md names settings that exist, in TRL and here, and its crew files are right."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path

import msgspec
import pytest

from motley.config import CrewConfig, PeerConfig, parse_config
from motley.objectives import OBJECTIVES
from motley.runs.checking import check_config
from motley.tasks.own import OwnConfig

PAGE = (Path(__file__).parents[1] / "docs" / "quickstart.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.split("| TRL | Motley | |\n|---|---|---|\n", 1)[1]
    .split("\n\n", 1)[0]
    .splitlines()
]
TABLES = {
    field.name: field.type.__struct_fields__
    for field in msgspec.structs.fields(CrewConfig)
    if hasattr(field.type, "__struct_fields__")
}


def crew_files() -> list[str]:
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", PAGE, re.MULTILINE)
    return [
        text for block in blocks if (text := textwrap.dedent(block)).lstrip().startswith("[crew]")
    ]


def test_the_first_crew_file_can_be_trained_and_the_second_be_read() -> None:
    own, pretrained = map(parse_config, crew_files())
    check_config(own)
    assert [peer.name for peer in pretrained.students] == ["whole", "lora"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_setting_of_the_table_exists_here(row: list[str]) -> None:
    settings = {name for one in OBJECTIVES.values() for name in one.settings()}
    for code in re.findall(r"`([^`]+)`", row[1]):
        name = code.split(" ")[0]
        table, _, key = name.partition(".")
        if name.startswith(("--", "[[")):
            continue
        if not key:
            assert name in PeerConfig.__struct_fields__, code
        elif table == "objective":
            assert key in settings, code
        elif table == "task":
            assert key in OwnConfig.__struct_fields__, code
        else:
            assert key in TABLES[table], code
        if code.startswith("crew.objective ="):
            assert code.split('"')[1] in OBJECTIVES


def test_the_settings_of_the_table_exist_in_trl() -> None:
    places = [("trl", "trainer/grpo_config.py"), ("trl", "trainer/grpo_trainer.py")]
    places += [("transformers", "training_args.py"), ("transformers", "trainer.py")]
    known = ""
    for package, file in places:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pytest.skip(f"{package} is not installed")
        known += (Path(spec.origin).parent / file).read_text()
    named = [name.split("=")[0] for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])]
    assert [name for name in named if not re.search(rf"^\s+{name}: ", known, re.MULTILINE)] == []


@pytest.mark.slow
def test_the_lines_of_python_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = PAGE.split("## The same in Python\n\n", 1)[1].split("\n[", 1)[0]
    assert "rounds=30" in block
    monkeypatch.chdir(tmp_path)
    exec(compile(textwrap.dedent(block).replace("rounds=30", "rounds=1"), "quickstart", "exec"), {})
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["crew-001"]
