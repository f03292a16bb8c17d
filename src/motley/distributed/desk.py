"""Desk: where requests to a hub wait to be answered, a few of everybody's."""

from __future__ import annotations

import queue
import threading
from collections import Counter

from nats.aio.msg import Msg

MOST_WAITING = 16  # requests on one subject: an invitation has one of its own, orders another
MOST_AT_ONCE = 64


class Desk:
    """Who asks faster than it is answered waits behind itself, and nobody behind it."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Msg] = queue.Queue()
        self._num_waiting: Counter[str] = Counter()
        self._lock = threading.Lock()

    def put(self, message: Msg) -> None:
        """Let a request wait; what is too much is forgotten, and who means it asks again."""
        with self._lock:
            if self._num_waiting[message.subject] >= MOST_WAITING:
                return
            self._num_waiting[message.subject] += 1
        self._waiting.put(message)

    def next(self, timeout_s: float) -> Msg | None:
        """The oldest request; None if none comes in time."""
        try:
            message = self._waiting.get(timeout=timeout_s)
        except queue.Empty:
            return None
        with self._lock:
            self._num_waiting[message.subject] -= 1
            self._num_waiting += Counter()  # forget those without any
        return message

    def all(self, timeout_s: float) -> list[Msg]:
        """The oldest requests, as many as are answered at a time; none if none comes in time."""
        found: list[Msg] = []
        while len(found) < MOST_AT_ONCE and (one := self.next(0.0 if found else timeout_s)):
            found.append(one)
        return found

    def empty(self) -> bool:
        return self._waiting.empty()
