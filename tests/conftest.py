"""What every test shares: one thread, and a cache of warm starts that is not the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def motley_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for the session: the same warm start is made once."""
    folder = tmp_path_factory.mktemp("motley-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTLEY_CACHE", str(folder))
        yield folder
