"""Every name of a crew on a NATS server: its streams, its subjects, and ids as subjects."""

from __future__ import annotations

import base64
import re


class Names:
    """Every subject of a crew, and its streams."""

    def __init__(self, crew: str) -> None:
        self.stream = f"motley-{crew}"
        self.presence_stream = f"motley_presence-{crew}"  # no log's: those begin with motley-
        self._root = f"motley.{crew}"
        self.everything = f"{self._root}.>"  # that a log holds
        self.in_no_lot = f"{self._root}.log.>"
        self.stored = (self.in_no_lot, f"{self._root}.lot.>")
        self.presences = f"{self._root}.presence.*"
        self.control = f"{self._root}.control"
        self.rights_stream = f"motley_rights-{crew}"
        self.rights = f"{self._root}.rights"  # what all nodes of a cluster let everyone do

    def record(self, id: str, lot: int | None = None) -> str:
        """`lot`: that the group of this id is in, where a crew's groups stand in lots."""
        place = "log" if lot is None else f"lot.{lot}"
        return f"{self._root}.{place}.{_escaped(id)}"

    def records_of(self, peer: str) -> str:
        """What stands in no lot."""
        return f"{self._root}.log.{peer}.>"

    def groups_in(self, lot: int) -> str:
        return f"{self._root}.lot.{lot}.>"

    def groups_of(self, peer: str) -> str:
        """In all lots."""
        return f"{self._root}.lot.*.{peer}.>"

    def records_by(self, peer: str, learner: bool = False, in_lots: bool = False) -> list[str]:
        """The shapes of all that a peer can have to write: its ids, and its ids with a tag."""
        own = f"{self._root}.log.{peer}"
        if learner:
            return [f"{own}.weights.*", f"{own}.weights.*.*"]
        groups = f"{self._root}.lot.*.{peer}" if in_lots else own
        return [f"{own}.table", f"{own}.table.*", f"{groups}.*.*", f"{groups}.*.*.*"]

    def presence(self, peer: str) -> str:
        return f"{self._root}.presence.{peer}"

    def enrolment(self, peer: str) -> str:
        return f"{self._root}.enrol.{peer}"

    def id_of(self, subject: str) -> str:
        """The id of a subject; one that no id has stands for itself, and fits no record."""
        kind, _, escaped = subject.removeprefix(f"{self._root}.").partition(".")
        if kind == "lot":
            escaped = escaped.partition(".")[2]
        id = _unescaped(escaped)
        return id if _escaped(id) == escaped else f"={escaped}"

    def bucket(self, learner: str) -> Bucket:
        return Bucket(f"{self.stream}-{learner}")

    @property
    def direct_get(self) -> str:
        return direct_get(self.stream)

    @property
    def presence_get(self) -> str:
        return direct_get(self.presence_stream)

    @property
    def rights_get(self) -> str:
        return direct_get(self.rights_stream)


class Bucket:
    """Every subject of a learner's blobs, as NATS's own Object Store has them, and their stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stream = f"OBJ_{name}"
        self.chunks = self.chunks_of("*")
        self.metas = f"$O.{name}.M.*"
        self.direct_get = direct_get(self.stream)

    def chunks_of(self, blob: str) -> str:
        return f"$O.{self.name}.C.{blob}"

    def meta_of(self, blob: str) -> str:
        return f"$O.{self.name}.M.{base64.urlsafe_b64encode(blob.encode()).decode()}"


def direct_get(stream: str, domain: str = "") -> str:
    """`domain`: that the stream is in, where it is not the one of the server that is asked."""
    return f"$JS.{domain}.API.DIRECT.GET.{stream}" if domain else f"$JS.API.DIRECT.GET.{stream}"


# Ids as subjects: parts between dots; what a subject may not hold is written =XX

_PLAIN = re.compile(rb"[A-Za-z0-9_-]")


def _escaped(id: str) -> str:
    return ".".join(
        "".join(chr(b) if _PLAIN.match(bytes([b])) else f"={b:02X}" for b in part.encode()) or "="
        for part in id.split(".")
    )


def _unescaped(subject: str) -> str:
    plain = lambda part: re.sub(
        rb"=([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), b"" if part == "=" else part.encode()
    )
    return ".".join(plain(part).decode(errors="replace") for part in subject.split("."))
