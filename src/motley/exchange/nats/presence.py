"""Presence: who is there, and what they do.

Small signed messages that are not kept, each newer than the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import msgspec
from nats.aio.msg import Msg

from motley.clock import Clock
from motley.exchange.log import LogError
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.log import Names

BEAT_S = 2.0
SILENT_S = 10.0  # after which a peer counts as gone

State = Literal["starting", "sampling", "learning", "waiting", "finished", "left"]


class Beat(msgspec.Struct, frozen=True):
    state: State
    round: int
    buffered: int = 0  # records in the outbox
    at_s: float = 0.0  # on the sender's clock: only ever grows


class Voice(NamedTuple):
    """How a peer speaks for itself."""

    name: str
    sign: Callable[[bytes], bytes]


Verify = Callable[[str, bytes, bytes], bool]  # (peer, signature, message)


@dataclass(frozen=True, slots=True)
class Heard:
    beat: Beat
    at_s: float  # of what has elapsed on the listener's clock
    clock: Clock

    @property
    def ago_s(self) -> float:
        return self.clock.elapsed_s() - self.at_s

    @property
    def gone(self) -> bool:
        return self.state in ("left", "finished", "silent")

    @property
    def state(self) -> State | Literal["silent"]:
        over = self.beat.state in ("left", "finished")
        return self.beat.state if over or self.ago_s <= SILENT_S else "silent"


class Presence:
    """Listens to everyone; with a voice, also repeats every few seconds what `say` was given."""

    def __init__(
        self, connection: Connection, crew: str, verify: Verify, me: Voice | None = None
    ) -> None:
        self.heard: dict[str, Heard] = {}
        self._connection, self._names, self._verify, self._me = connection, Names(crew), verify, me
        self._clock = connection.clock
        self._beat = Beat("starting", 0)
        self._stop = threading.Event()
        connection.subscribe(self._names.presences, self._on_message)
        connection.on_reconnect.append(self._listen_anew)
        self._thread = threading.Thread(target=self._tell, name="presence", daemon=True)
        if me:
            self._send()
            self._thread.start()

    def say(self, beat: Beat) -> None:
        changed = beat.state != self._beat.state
        self._beat = beat
        if changed:
            self._send()

    def close(self, beat: Beat) -> None:
        """Stop, with a last word."""
        self.stop()
        self._beat = beat
        self._send()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_S + 1)

    def _tell(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._send()

    def _send(self) -> None:
        assert self._me
        content = msgspec.json.encode(msgspec.structs.replace(self._beat, at_s=self._clock.now_s()))
        with suppress(LogError):  # not being heard is what silence is for
            self._connection.publish(
                self._names.presence(self._me.name),
                self._me.sign(self._signed(self._me.name, content)) + content,
            )

    def _on_message(self, message: Msg) -> None:
        peer, signature, content = (
            message.subject.rsplit(".", 1)[-1],
            message.data[:64],
            message.data[64:],
        )
        if not self._verify(peer, signature, self._signed(peer, content)):
            return
        try:
            beat = msgspec.json.decode(content, type=Beat)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if peer not in self.heard or beat.at_s > self.heard[peer].beat.at_s:
            self.heard[peer] = Heard(beat, self._clock.elapsed_s(), self._clock)

    def _listen_anew(self) -> None:
        """Who could not be heard while we were away was not silent."""
        for peer, heard in self.heard.items():
            self.heard[peer] = replace(heard, at_s=self._clock.elapsed_s())

    def _signed(self, peer: str, content: bytes) -> bytes:
        return f"motley presence\n{self._names.presence(peer)}\n".encode() + content
