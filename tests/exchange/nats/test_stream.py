"""Reads that are not answered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import nats.errors
import pytest

from motley.exchange.nats.connection import Login
from motley.exchange.nats.stream import Stream

END = SimpleNamespace(headers={"Status": "204"}, data=b"")


class SlowClient:
    """A client whose answers come after so many seconds, and how long each was waited for."""

    is_connected = True

    def __init__(self) -> None:
        self.takes_s = 100.0
        self.waited: list[float] = []

    def new_inbox(self) -> str:
        return "_INBOX.a"

    async def subscribe(self, inbox: str) -> SlowClient:
        return self

    async def publish(self, subject: str, content: bytes, reply: str) -> None:
        pass

    async def unsubscribe(self) -> None:
        pass

    async def next_msg(self, timeout_s: float) -> Any:
        self.waited.append(timeout_s)
        if timeout_s < self.takes_s:
            raise nats.errors.TimeoutError
        return END


def test_an_answer_that_did_not_come_is_waited_for_longer_each_time() -> None:
    client = SlowClient()
    connection = SimpleNamespace(
        call=lambda work, timeout_s: asyncio.run(work(client)), login=Login("nats://a:1", "a")
    )
    stream: Any = Stream(connection, "log", "the log", 100, silence_s=3.0)  # type: ignore[arg-type]
    for _ in range(6):
        with pytest.raises(nats.errors.TimeoutError):
            stream.read("a.>")
    assert client.waited == [3.0, 6.0, 12.0, 24.0, 24.0, 24.0]
    client.takes_s = 1.0
    for _ in range(2):
        assert stream.read("a.>") == []
    assert client.waited[-1] == 3.0
