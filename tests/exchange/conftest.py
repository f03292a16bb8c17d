from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hubs import PATIENCE_S

from .nats_server import Net


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    """A server with a stream, and the keys of hub, a and b."""
    made = Net(tmp_path / "server")
    try:
        yield made.start()
    finally:
        made.close()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for an answer to all it sends waits longer than any test does."""
    for name in ("FLIGHT_S", "SILENCE_S"):
        monkeypatch.setattr(f"motley.exchange.nats.stream.{name}", 10 * PATIENCE_S)
