"""Invitation: one line that lets one peer bring its key to a hub, once.

And that key's enrolment, signed by both.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

import msgspec

from motley.config import check_name
from motley.trust.identity import Identity, verifies

_CHECK_BYTES = 4


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    peer: str
    secret: bytes  # of a key that is good for enrolling only, and gone after that
    hub: bytes  # public key: whose charter and rosters count
    certificate: str = ""  # sha256 of the server's, in hex
    # until when the hub takes it, in seconds since 1970 on its clock; 0: as long as it is open
    expires_s: int = 0

    @property
    def text(self) -> str:
        content = msgspec.msgpack.encode(self)
        return base64.urlsafe_b64encode(_check(content) + content).decode().rstrip("=")

    @staticmethod
    def read(text: str) -> Invitation:
        try:
            content = base64.urlsafe_b64decode(text.strip() + "=" * (-len(text.strip()) % 4))
            if content[:_CHECK_BYTES] != _check(content[_CHECK_BYTES:]):
                raise ValueError("its check does not fit")
            found = msgspec.msgpack.decode(content[_CHECK_BYTES:], type=Invitation)
            check_name("peer", found.peer)
            return found
        except (ValueError, binascii.Error, msgspec.DecodeError, RecursionError) as error:
            raise ValueError(
                f"the invitation is damaged ({error}); copy the whole line that the hub printed"
            ) from None


class Enrolment(msgspec.Struct, frozen=True):
    """A peer's request to be put on the roster with its own key."""

    crew: str
    peer: str
    key: bytes
    by_invitation: bytes = b""  # signature with the invitation's key: the hub asked this peer
    by_key: bytes = b""  # signature with the peer's own key: it has the secret

    @property
    def _signed(self) -> bytes:
        return b"motley enrolment\n" + msgspec.msgpack.encode([self.crew, self.peer, self.key])

    @staticmethod
    def ask(crew: str, invitation: Invitation, own: Identity) -> Enrolment:
        plain = Enrolment(crew, invitation.peer, own.public)
        invited = Identity.of(invitation.secret)
        return msgspec.structs.replace(
            plain, by_invitation=invited.sign(plain._signed), by_key=own.sign(plain._signed)
        )

    def is_of(self, invited: bytes) -> bool:
        """Whether the holder of an invitation's key, and of the new key, asks."""
        return verifies(invited, self.by_invitation, self._signed) and verifies(
            self.key, self.by_key, self._signed
        )


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECK_BYTES]
