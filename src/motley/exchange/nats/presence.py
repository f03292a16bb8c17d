"""Presence: who is there, and what they do.

Small signed messages, each newer than the one before, of which the server keeps everyone's last.
Who listens asks for them: nobody can be drowned in what others say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from motley import files
from motley.clock import Clock, Deadline
from motley.exchange.log import LogError
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.names import Names
from motley.exchange.nats.stream import Stored, Stream, make_stream

BEAT_S = 2.0
LOOKS_PER_BEAT = 4  # at what others say
# that a speaker takes in each second: in a large crew it looks at everyone less often, and at whom
# it waits for in between
MOST_BEATS_PER_S = 10
UNHEARD_BEATS = 2  # of its own, after which a peer knows that nobody can be heard
SILENT_S = 10.0  # after which a peer counts as gone
MAX_BEAT_BYTES = 512
MAX_STREAM_BYTES = 2**20

State = Literal["starting", "sampling", "learning", "waiting", "finished", "left"]


class Beat(msgspec.Struct, frozen=True):
    state: State
    round: int
    buffered: int = 0  # records in the outbox
    # Two numbers that only ever grow, the second within the first: clocks can be set back.
    session: int = 0  # of the sender's start
    number: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return self.session, self.number


class Voice(NamedTuple):
    """How a peer speaks for itself."""

    name: str
    sign: Callable[[bytes], bytes]
    session: int = 0


Verify = Callable[[str, bytes, bytes], bool]  # (peer, signature, message)


def begin_session(path: Path, clock: Clock) -> int:
    """The number of this start: above all others of its file, whatever the clock says."""
    try:
        before = int(path.read_text())
    except (OSError, ValueError):  # the first, or a damaged file
        before = 0
    session = max(int(clock.now_s() * 1000), before + 1)
    files.replace(path, f"{session}\n".encode())
    return session


@dataclass(frozen=True, slots=True)
class Heard:
    beat: Beat
    at_s: float  # of what has elapsed on the listener's clock
    clock: Clock
    said: bytes = b""  # signature and beat, as they came

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
    """Looks who is there; with a voice, also repeats every few seconds what `say` was given."""

    def __init__(
        self, connection: Connection, crew: str, verify: Verify, me: Voice | None = None
    ) -> None:
        self.heard: dict[str, Heard] = {}
        self._connection, self._names, self._verify, self._me = connection, Names(crew), verify, me
        self._clock = connection.clock
        self._stream = Stream(connection, self._names.presence_stream, "presence", MAX_BEAT_BYTES)
        self._beat = Beat("starting", 0, session=me.session if me else 0)
        self._looked = 0  # up to which sequence
        self._everyone = Deadline(self._clock, 0.0)  # to be looked at next
        self._awaited: tuple[str, ...] = ()
        self._news_s = self._clock.elapsed_s()  # when there was the last
        self._anew, self._stop = threading.Event(), threading.Event()
        self._speaking = threading.Lock()
        connection.on_reconnect.append(self._listen_anew)
        self._thread = threading.Thread(target=self._work, name="presence", daemon=True)
        self._send()
        self._thread.start()

    def say(self, beat: Beat) -> None:
        changed = beat.state != self._beat.state
        self._set(beat)
        if changed:
            self._send()

    def await_beats(self, peers: Collection[str]) -> None:
        """Look at these more often than at everyone, where the crew is large."""
        self._awaited = tuple(peers)

    def close(self, beat: Beat) -> None:
        """Stop, with a last word."""
        self.stop()
        self._set(beat)
        self._send()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_S + 1)

    # Speaking

    def _work(self) -> None:
        num_looks = 0
        while not self._stop.wait(BEAT_S / LOOKS_PER_BEAT) and not self._connection.closed:
            num_looks += 1
            self._look(num_looks % 2 == 0)
            if num_looks % LOOKS_PER_BEAT == 0:
                self._send()

    def _set(self, beat: Beat) -> None:
        with self._speaking:
            said = self._beat
            self._beat = msgspec.structs.replace(beat, session=said.session, number=said.number)

    def _send(self) -> None:
        """Say it once more. The lock keeps the order of what two threads say."""
        if not self._me:
            return
        with self._speaking, suppress(LogError):  # not being heard is what silence is for
            self._beat = msgspec.structs.replace(self._beat, number=self._beat.number + 1)
            content = msgspec.json.encode(self._beat)
            self._connection.publish(
                self._names.presence(self._me.name),
                self._me.sign(self._signed(self._me.name, content)) + content,
            )

    # Listening

    def _look(self, at_awaited: bool = True) -> None:
        """Take in what was said since the last look, of each one message, the newest.

        What a speaker takes in must not grow with the crew: so it looks at everyone as often as it
        may, and in between at itself and whom it waits for.
        """
        if self._anew.is_set():  # a server that was away may have begun to count anew
            self._anew.clear()
            self._looked, self._everyone = 0, Deadline(self._clock, 0.0)
        with suppress(LogError):
            everyone = not self._me or self._everyone.passed
            if everyone:
                self._look_at_everyone()
            if at_awaited:
                self._look_at_awaited(everyone)
            self._check_news()

    def _look_at_awaited(self, seen: bool) -> None:
        """`seen`: everyone was looked at just now. Then only who was never heard is missing: what
        it said last may have come before the roster that names it.
        """
        me = {self._me.name} if self._me and not seen else set()
        names = [n for n in self._awaited if not seen or n not in self.heard]
        if subjects := [*map(self._names.presence, {*me, *names[:MOST_BEATS_PER_S]})]:
            for stored in self._stream.last_among(subjects):
                self._take_in(stored)

    def _look_at_everyone(self) -> None:
        news = self._stream.read(self._names.presences, self._looked)
        for stored in news:
            self._looked = stored.sequence
            self._take_in(stored)
        wait_s = len(news) / MOST_BEATS_PER_S
        # of a small crew there is little at a time: every look is at everyone
        self._everyone = Deadline(self._clock, wait_s if wait_s > BEAT_S else 0.0)

    def _check_news(self) -> None:
        """A cluster that chooses who leads takes nothing in; and one of which all but one server
        were lost may count anew. Who speaks hears itself, or nobody's silence means anything.
        """
        known = [self.heard[self._me.name]] if self._me and self._me.name in self.heard else []
        newest_s = max((heard.at_s for heard in known or self.heard.values()), default=0.0)
        self._news_s = max(self._news_s, newest_s)
        if self._clock.elapsed_s() - self._news_s > UNHEARD_BEATS * BEAT_S:
            self._news_s = self._clock.elapsed_s()
            self._anew.set()
            if known:
                self._listen_anew()

    def _take_in(self, stored: Stored) -> None:
        peer, said = stored.subject.rsplit(".", 1)[-1], stored.content
        known = self.heard.get(peer)
        if (known and known.said == said) or not self._is_true(peer, said):
            return
        try:
            beat = msgspec.json.decode(said[64:], type=Beat)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        # A peer that was invited anew begins anew: what its name said with another key is void.
        if not known or beat.place > known.beat.place or not self._is_true(peer, known.said):
            self.heard[peer] = Heard(beat, self._clock.elapsed_s(), self._clock, said)

    def _is_true(self, peer: str, said: bytes) -> bool:
        return self._verify(peer, said[:64], self._signed(peer, said[64:]))

    def _listen_anew(self) -> None:
        """Who could not be heard while we were away was not silent.

        At once: whoever asks before the next look must not take it for gone.
        """
        self._anew.set()
        for peer, heard in list(self.heard.items()):
            self.heard[peer] = replace(heard, at_s=self._clock.elapsed_s())

    def _signed(self, peer: str, content: bytes) -> bytes:
        return f"motley presence\n{self._names.presence(peer)}\n".encode() + content


def create_presence(connection: Connection, crew: str, replicas: int = 1) -> None:
    """Make the stream of what everyone said last.

    In memory: it is gone when the server is, and everyone says it again.
    """
    names = Names(crew)
    config = StreamConfig(
        name=names.presence_stream,
        subjects=[names.presences],
        storage=StorageType.MEMORY,
        num_replicas=replicas,
        max_bytes=MAX_STREAM_BYTES,
        max_msg_size=MAX_BEAT_BYTES,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.OLD,
        allow_direct=True,
    )
    make_stream(connection, config)
