"""Courier: brings an outbox to the log on a thread of its own, and keeps trying.

What it cannot send, it says.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from motley.clock import Clock, RealClock
from motley.exchange.blobs import Blobs
from motley.exchange.log import Log, LogError
from motley.exchange.outbox import Outbox

RETRY_S = 0.25


class Courier:
    def __init__(
        self,
        open_outbox: Callable[[], Outbox],
        log: Log,
        blobs: Blobs | None = None,
        clock: Clock = RealClock(),
    ) -> None:
        """`open_outbox`: its own handle to the file, as transactions of threads do not mix."""
        self.trouble = ""
        self._open_outbox, self._log, self._blobs, self._clock = open_outbox, log, blobs, clock
        self._wanted, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="courier", daemon=True)

    def start(self) -> None:
        """Begin with what a run before this one may have left."""
        self._wanted.set()
        self._thread.start()

    def wake(self) -> None:
        """There is something to send."""
        self._wanted.set()

    def close(self, patience_s: float = 5.0) -> None:
        """Send what can still be sent in time; the rest stays in the file."""
        self._stop.set()
        self._wanted.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join(patience_s)

    def _work(self) -> None:
        """Until it is to stop. Nobody else sends these records: no error may end this thread."""
        outbox: Outbox | None = None
        while True:
            try:
                outbox = outbox or self._open_outbox()
                self._wanted.wait(self._until_s(outbox.due_s))
                self._wanted.clear()
                outbox.deliver(self._log, self._clock.now_s(), self._blobs)
            except Exception as error:  # noqa: BLE001 - a full disk, a locked file: whatever it is may pass
                self.trouble = _words(error)
                self._wanted.set()
                ended = self._stop.wait(RETRY_S)
            else:
                self.trouble = ""
                ended = self._stop.is_set()
            if ended:
                break
        if outbox:
            outbox.close()

    def _until_s(self, due_s: float) -> float | None:
        """How long to wait for the next record to be due; for ever if there is none."""
        return None if due_s == math.inf else max(0.0, due_s - self._clock.now_s())


def _words(error: Exception) -> str:
    if isinstance(error, LogError):
        return str(error)
    return f"records cannot be sent: {str(error) or type(error).__name__}; trying again"
