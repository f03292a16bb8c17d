from __future__ import annotations

import msgspec
import pytest

from fakes import identity
from motley.trust.invitation import Enrolment, Invitation

INVITED, OWN, OTHER = (identity(name) for name in ("invited", "own", "other"))
INVITATION = Invitation("a", INVITED.secret, identity("hub").public, "ab" * 32)


@pytest.mark.parametrize(
    "invitation", [INVITATION, Invitation("A_b-9", bytes(32), bytes(range(32)))]
)
def test_an_invitation_comes_back_from_its_text(invitation: Invitation) -> None:
    assert Invitation.read(invitation.text) == invitation
    assert Invitation.read(f"  {invitation.text}\n") == invitation


def test_the_text_is_one_word_to_paste() -> None:
    assert all(character.isalnum() or character in "-_" for character in INVITATION.text)


def test_every_invitation_differs() -> None:
    texts = {
        Invitation(peer, secret, hub).text
        for peer in ("a", "b")
        for secret in (bytes(32), b"1" * 32)
        for hub in (bytes(32), b"1" * 32)
    }
    assert len(texts) == 8


def refused(text: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"the invitation is damaged \(.+\); copy the whole line that the hub printed",
    ) as caught:
        Invitation.read(text)
    assert type(caught.value) is ValueError


def test_a_truncated_invitation_is_refused_wherever_it_was_cut() -> None:
    text = INVITATION.text
    for length in range(len(text)):
        refused(text[:length])
        refused(text[length + 1 :])


def test_a_damaged_invitation_is_refused_whichever_character_it_is() -> None:
    text = INVITATION.text
    for place in range(len(text)):
        refused(text[:place] + text[place + 1 :])
        refused(text[:place] + ("A" if text[place] != "A" else "Q") + text[place + 1 :])


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "hello",
        "é",
        "=",
        "====",
        "motley join nats://x --crew c --invite y",
        INVITATION.text * 2,
    ],
)
def test_what_is_no_invitation_is_refused(text: str) -> None:
    refused(text)


def test_a_well_checked_text_of_something_else_is_refused() -> None:
    class Short(msgspec.Struct, array_like=True):
        peer: str
        text = Invitation.text

    refused(Invitation.text.fget(Short("a")))  # type: ignore[attr-defined]


# Enrolment


ASKED = Enrolment.ask("crew", INVITATION, OWN)


def test_an_enrolment_is_signed_by_the_invitation_and_by_the_key_it_brings() -> None:
    assert (ASKED.crew, ASKED.peer, ASKED.key) == ("crew", "a", OWN.public)
    assert ASKED.is_of(INVITED.public)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ASKED), type=Enrolment) == ASKED


def test_an_enrolment_gives_no_secret_away() -> None:
    sent = msgspec.msgpack.encode(ASKED)
    assert INVITED.secret not in sent
    assert OWN.secret not in sent


STOLEN = Enrolment.ask("crew", INVITATION, OTHER)
CHANGED = {
    "another crew": {"crew": "other"},
    "another peer": {"peer": "b"},
    "another key": {"key": OTHER.public},
    "another key, signed": {"key": OTHER.public, "by_key": STOLEN.by_key},
    "not by the invitation": {"by_invitation": b""},
    "not by the key": {"by_key": b""},
    "by the other's key": {"by_key": STOLEN.by_key},
    "by the key twice": {"by_invitation": ASKED.by_key},
    "by the invitation twice": {"by_key": ASKED.by_invitation},
    "zeros": {"by_invitation": bytes(64)},
    "short signature": {"by_invitation": ASKED.by_invitation[:63]},
    "long signature": {"by_key": ASKED.by_key + b"\x00"},
    "short key": {"key": OWN.public[:31]},
    "long key": {"key": OWN.public + b"\x00"},
    "no key": {"key": b""},
}


@pytest.mark.parametrize("changes", CHANGED.values(), ids=CHANGED)
def test_a_changed_enrolment_is_nobodys(changes: dict[str, object]) -> None:
    assert not msgspec.structs.replace(ASKED, **changes).is_of(INVITED.public)


def test_an_enrolment_is_not_of_another_invitation() -> None:
    assert not ASKED.is_of(OTHER.public)
    assert not ASKED.is_of(OWN.public)
    assert not ASKED.is_of(b"")


def test_what_an_invited_peer_signed_elsewhere_is_no_enrolment() -> None:
    plain = msgspec.msgpack.encode(["crew", "a", OWN.public])
    forged = msgspec.structs.replace(ASKED, by_invitation=INVITED.sign(plain))
    assert not forged.is_of(INVITED.public)
