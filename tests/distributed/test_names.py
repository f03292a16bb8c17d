"""Names from outside, and where an invitation may come from, before anything is made of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fakes import identity
from motley.cli.joining import _invitation
from motley.distributed.enrolment import Membership, read_membership
from motley.distributed.join import join
from motley.trust.invitation import Invitation

BAD = ["../x", "a/b", "", "a.b", "a\n", "*"]


def invitation(peer: str) -> str:
    return Invitation(peer, identity("guest").secret, identity("hub").public).text


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_is_none_makes_no_folder(tmp_path: Path, name: str) -> None:
    url = "nats://127.0.0.1:1"
    for crew, peer in (("crew", name), (name, "a")):
        with pytest.raises(ValueError, match="must be letters, digits, - and _ only"):
            join(url, crew, invitation(peer), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_membership_with_another_folder_for_a_name_is_refused(tmp_path: Path) -> None:
    kept = Membership(url="nats://x", crew="crew", peer="../../x", hub=b"")
    (tmp_path / "member.json").write_bytes(msgspec.json.encode(kept))
    with pytest.raises(ValueError, match="must be letters, digits"):
        read_membership(tmp_path)


def test_an_invitation_of_version_05_is_read() -> None:
    fields = ["a", identity("guest").secret, identity("hub").public, ""]
    old = msgspec.convert(fields, Invitation)
    assert Invitation.read(old.text).expires_s == 0


def test_an_invitation_can_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "line").write_text(f"motley join URL --crew crew --invite {invitation('a')}\n")
    assert _invitation(f"@{tmp_path / 'line'}") == invitation("a")
    assert _invitation(invitation("a")) == invitation("a")
    for given in ("", f"@{tmp_path / 'none'}"):
        with pytest.raises(ValueError, match="invit"):
            _invitation(given)
