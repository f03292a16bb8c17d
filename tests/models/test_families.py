"""Many architectures of transformers, from the first round to a folder that others load: the table
of docs/models.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import write_task
from families import FAMILIES, check_comes_back, family_crew, fate, table_of_page, write_family
from motley.runs.local import LocalCrew

ROWS = {line.split("`")[1]: line for line in table_of_page().splitlines()[2:]}
PARTS = {"lora": "train = { lora = { rank = 2 } }", "layers": 'train = { layers = "last:1" }'}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task on which nearly every group has something to learn."""
    write_task(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_page_has_a_row_for_each_of_forty_and_more() -> None:
    assert list(ROWS) == list(FAMILIES)
    assert sum("refused" not in row for row in ROWS.values()) > 40


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_trains_resumes_and_is_exported_as_the_page_says(kind: str, place: Path) -> None:
    """Or is refused, for the reason that the page says."""
    assert fate(kind, place) == ROWS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("train", PARTS)
@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral", "jamba", "gpt2", "granitemoe"])
def test_a_part_of_a_family_trains_resumes_and_is_exported(
    kind: str, train: str, place: Path
) -> None:
    config = family_crew(write_family(kind, place / "model"), place, PARTS[train])
    check_comes_back(LocalCrew.start(config, place / "run"), place)
