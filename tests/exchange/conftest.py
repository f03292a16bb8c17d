from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .nats_server import Net


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    """A server with a stream, and the keys of hub, a and b."""
    made = Net(tmp_path / "server")
    try:
        yield made.start()
    finally:
        made.close()
