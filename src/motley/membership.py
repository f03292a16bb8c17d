"""Membership: which crew a folder's peer belongs to, and how it is let in with its own key. Needs no model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from motley.exchange import LogError
from motley.exchange.connection import Connection, Login, NotAdmittedError
from motley.exchange.nats import Names
from motley.files import replace
from motley.hub import Answer
from motley.trust import Identity
from motley.trust.invitation import Enrolment, Invitation

RETRY_S = 0.25
ADMISSION_S = 20.0  # a hub needs a moment to let a new key in

Say = Callable[[str], None]


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """Which crew, where, and as whom; kept in the run folder."""

    url: str
    crew: str
    peer: str
    hub: bytes
    certificate: str = ""

    def login(self, identity: Identity) -> Login:
        return Login(self.url, self.peer, identity.nkey_seed, self.certificate)


def read_membership(folder: Path) -> Membership:
    path = folder / "member.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Membership)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); join again from another folder, with a new invitation") from None


def keep_membership(membership: Membership, folder: Path) -> None:
    path = folder / "member.json"
    if path.exists():
        known = read_membership(folder)
        if (known.crew, known.peer, known.hub) != (membership.crew, membership.peer, membership.hub):
            raise ValueError(
                f"{folder} is the folder of {known.peer} in crew {known.crew} of another hub or name; choose another folder with --out"
            )
    replace(path, msgspec.json.encode(membership))


def admitted_connection(membership: Membership, identity: Identity, invitation: Invitation, say: Say) -> Connection:
    """Log in with the own key; if the hub does not know it, bring it first. Answers can get lost while the hub lets others in."""
    stop = time.monotonic() + ADMISSION_S
    while True:
        try:
            return Connection(membership.login(identity))
        except NotAdmittedError:
            pass
        try:
            enrol(membership, identity, invitation)
            say(f"enrolled as {membership.peer} with key {identity.nkey}")
        except NotAdmittedError:
            if time.monotonic() > stop:
                raise ValueError(
                    f"the hub does not let {membership.peer} in: its invitation was used from another folder, replaced, or taken back; "
                    f"come back with the folder you joined with (--out), or ask for a new one (motley hub --invite {membership.peer})"
                ) from None
        except LogError:
            if time.monotonic() > stop:
                raise
        time.sleep(RETRY_S)


def enrol(membership: Membership, identity: Identity, invitation: Invitation) -> None:
    """Bring the own key to the hub, with the invitation as the only credential."""
    invited = Identity.of(invitation.secret)
    connection = Connection(Login(membership.url, f"invited-{membership.peer}", invited.nkey_seed, membership.certificate))
    asked = msgspec.msgpack.encode(Enrolment.ask(membership.crew, invitation, identity))
    subject = Names(membership.crew).enrolment(membership.peer)
    try:
        reply = connection.call(lambda client: client.request(subject, asked, 3), 4)
    finally:
        connection.close()
    answer = msgspec.msgpack.decode(reply.data, type=Answer)
    if answer.error:
        raise ValueError(f"the hub refuses: {answer.error}")
