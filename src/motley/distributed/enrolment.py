"""Enrolment: which crew a folder's peer belongs to, and how it is let in with its own key.

Needs no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from motley.clock import Clock, Deadline
from motley.config import check_name
from motley.distributed.register import Answer, Say
from motley.exchange import LogError
from motley.exchange.nats.connection import Connection, Login, NotAdmittedError
from motley.exchange.nats.names import Names
from motley.files import read_json, replace
from motley.trust import Identity
from motley.trust.invitation import Enrolment, Invitation

RETRY_S = 0.25
ADMISSION_S = 20.0  # a hub needs a moment to let a new key in

SAID_AGAIN_S = 60.0

T = TypeVar("T")


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """Which crew, where, and as whom; kept in the run folder."""

    url: str
    crew: str
    peer: str
    hub: bytes
    certificate: str = ""
    joined_s: float = 0.0  # for the first time

    def login(self, identity: Identity) -> Login:
        return Login(self.url, self.peer, identity.nkey_seed, self.certificate)


def read_membership(folder: Path) -> Membership:
    membership = read_json(
        folder / "member.json",
        Membership,
        "delete it, and come back with the line that the hub printed for this peer",
    )
    check_name("crew", membership.crew)
    check_name("peer", membership.peer)
    return membership


@dataclass(frozen=True, slots=True)
class Joining:
    """One peer on its way in, from its own folder."""

    membership: Membership
    invitation: Invitation
    identity: Identity
    folder: Path
    say: Say
    clock: Clock

    @staticmethod
    def begin(url: str, crew: str, invite: str, folder: Path, say: Say, clock: Clock) -> Joining:
        """Read the invitation, make the key, and see that the folder is this peer's."""
        check_name("crew", crew)
        invitation = Invitation.read(invite)
        membership = Membership(
            url=url,
            crew=crew,
            peer=invitation.peer,
            hub=invitation.hub,
            certificate=invitation.certificate,
            joined_s=clock.now_s(),
        )
        if (folder / "member.json").exists():
            known = read_membership(folder)
            membership = msgspec.structs.replace(membership, joined_s=known.joined_s)
            if (known.crew, known.peer, known.hub) != (crew, membership.peer, membership.hub):
                raise ValueError(
                    f"{folder} is the folder of {known.peer} in crew {known.crew} of another hub "
                    "or name; choose another folder with --out"
                )
        identity = Identity.kept_at(folder / "peer.key")
        return Joining(membership, invitation, identity, folder, say, clock)

    def keep(self) -> None:
        """Keep in the folder whose it is."""
        replace(self.folder / "member.json", msgspec.json.encode(self.membership))

    def enter(self) -> Connection:
        """Log in with the own key; if the hub does not know it, bring it first.

        Answers can get lost while the hub lets others in.
        """
        peer, deadline = self.membership.peer, Deadline(self.clock, ADMISSION_S)
        while True:
            with suppress(NotAdmittedError):
                return Connection(self.membership.login(self.identity), clock=self.clock)
            late = deadline.passed
            try:
                self.enrol()
                self.say(f"enrolled as {peer} with key {self.identity.nkey}")
            except NotAdmittedError:
                if late:
                    raise ValueError(
                        f"the hub does not let {peer} in: its invitation was used from another "
                        "folder, replaced, or taken back; "
                        "come back with the folder you joined with (--out), or ask for a new one "
                        f"(motley hub --invite {peer})"
                    ) from None
            except LogError as error:
                if late or "permissions violation" in str(error):
                    raise LogError(f"{error}; is --crew {self.membership.crew} right?") from None
            else:
                if late:
                    raise LogError(
                        f"the hub has put {peer} on its roster, and its server does not let it "
                        "in; is it stuck?"
                    )
            self.clock.sleep_s(RETRY_S)

    def enrol(self) -> None:
        """Bring the own key to the hub, with the invitation as the only credential."""
        membership, invited = self.membership, Identity.of(self.invitation.secret)
        crew, peer = membership.crew, membership.peer
        login = Login(membership.url, f"invited-{peer}", invited.nkey_seed, membership.certificate)
        connection = Connection(login, clock=self.clock)
        asked = msgspec.msgpack.encode(Enrolment.ask(crew, self.invitation, self.identity))
        subject = Names(crew).enrolment(peer)
        try:
            reply = connection.call(lambda client: client.request(subject, asked, 3), 4)
        finally:
            connection.close()
        answer = msgspec.msgpack.decode(reply.data, type=Answer)
        if answer.error:
            raise ValueError(f"the hub refuses: {answer.error}")

    def patiently(self, work: Callable[[], T]) -> T:
        """Do what needs the hub, as often as it takes; say so when it is away."""
        said_s = -math.inf
        while True:
            try:
                return work()
            except NotAdmittedError:
                raise
            except LogError as error:
                if self.clock.elapsed_s() - said_s > SAID_AGAIN_S:
                    self.say(f"{error}; trying again")
                    said_s = self.clock.elapsed_s()
                self.clock.sleep_s(RETRY_S)
