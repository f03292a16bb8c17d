"""What the README and docs/python.md show in Python runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(page: Path) -> list[str]:
    """What stands in ```python fences."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_python_of_a_page_runs_in_order(page: str, tmp_path: Path) -> None:
    code = "\n".join(blocks(ROOT / page))
    assert "motley.Crew(" in code
    (tmp_path / "page.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_shows_a_crew_in_about_ten_lines() -> None:
    (block,) = blocks(ROOT / "README.md")
    assert len([line for line in block.splitlines() if line.strip()]) <= 12
