"""Who is invited, enrolled and shut out, by the rules alone: without a server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fakes import identity
from motley.clock import VirtualClock
from motley.config import parse_config
from motley.distributed.register import HubState, Order, Place, Register, read_state
from motley.tasks import load_task
from motley.trust import Identity
from motley.trust.invitation import Enrolment, Invitation

CONFIG = parse_config("""
[crew]
name = "crew"
task = "digits"
pace = "async"
rounds = 3
group_size = 4
problems_per_round = 2
objective = "gepo"
[[peer]]
name = "l"
role = "learner"
model = "tiny:0.3m"
[[peer]]
name = "s"
role = "sampler"
follows = "l"
""")


@pytest.fixture
def register(tmp_path: Path) -> Register:
    made = Register(
        tmp_path, HubState.new(CONFIG, Place(url="nats://127.0.0.1:4222")), VirtualClock()
    )
    made.keep()
    return made


def enrolment(register: Register, peer: str, key: Identity) -> Enrolment:
    secret = register.state.invited[peer]
    invitation = Invitation(peer, secret, register.identity.public, "")
    return Enrolment.ask("crew", invitation, key)


def test_an_enrolment_is_news_once_and_kept(register: Register, tmp_path: Path) -> None:
    asked = enrolment(register, "l", identity("l"))
    assert register.enrol(asked)
    assert not register.enrol(asked)
    assert (register.roster().number, register.roster().keys) == (1, {"l": identity("l").public})
    assert list(register.invitations()) == ["s"]
    assert msgspec.json.encode(read_state(tmp_path)) == msgspec.json.encode(register.state)


def test_what_changes_nothing_turns_no_page(register: Register, tmp_path: Path) -> None:
    before = msgspec.json.encode(register.state)
    asked = enrolment(register, "l", identity("l"))
    forged = msgspec.structs.replace(asked, by_invitation=b"")
    with pytest.raises(ValueError, match="the invitation of l is not open"):
        register.enrol(forged)
    with pytest.raises(ValueError, match="the key that l brings is in use already"):
        register.enrol(enrolment(register, "l", register.identity))
    with pytest.raises(ValueError, match="the crew has no peer 'zoe'; it has l, s"):
        register.revoke("zoe")
    assert msgspec.json.encode(register.state) == before


def test_who_is_shut_out_is_on_the_next_roster_until_it_comes_back(register: Register) -> None:
    register.enrol(enrolment(register, "s", identity("s")))
    register.revoke("s")
    assert (register.roster().keys, register.roster().revoked) == ({}, ("s",))
    with pytest.raises(ValueError, match="s is shut out already"):
        register.revoke("s")
    register.invite("s")
    assert (register.roster().number, register.roster().revoked) == (2, ("s",))
    register.enrol(enrolment(register, "s", identity("new")))
    assert (register.roster().number, register.roster().revoked) == (3, ())


def test_an_order_of_the_owner_passes_once_and_no_other_does(register: Register) -> None:
    def order(number: int, key: Identity) -> Order:
        made = Order("revoke", "s", number)
        return msgspec.structs.replace(made, signature=key.sign(made.signed("crew")))

    register.check(order(1, register.identity))
    register.check(order(3, register.identity))
    for bad in (
        order(3, register.identity),
        order(2, register.identity),
        order(4, identity("stranger")),
        msgspec.structs.replace(order(4, register.identity), what="invite"),
    ):
        with pytest.raises(ValueError, match="did not give, or gave before"):
            register.check(bad)


def test_a_beat_counts_if_an_enrolled_peer_signed_it(register: Register) -> None:
    register.enrol(enrolment(register, "s", identity("s")))
    assert register.verify("s", identity("s").sign(b"here"), b"here")
    assert not register.verify("s", identity("l").sign(b"here"), b"here")
    assert not register.verify("l", identity("l").sign(b"here"), b"here")


def test_rights_follow_roles(register: Register) -> None:
    for peer in ("l", "s"):
        register.enrol(enrolment(register, peer, identity(peer)))
    guest, other_guest, learner, sampler = register.users()
    assert [user.nkey for user in (learner, sampler)] == [identity("l").nkey, identity("s").nkey]
    assert [user.nkey for user in (guest, other_guest)] == ["", ""]
    assert len({user.account for user in register.users()}) == 4
    assert "$O.motley-crew-l.C.*" in learner.publish
    assert "$O.motley-crew-l.C.*" not in sampler.publish
    assert "$JS.API.DIRECT.GET.OBJ_motley-crew-l" in sampler.publish
    assert register.learners == ["l"]


def test_the_charter_has_the_crews_rules_and_what_its_task_asks(register: Register) -> None:
    charter = register.charter()
    assert parse_config(charter.config) == CONFIG
    assert charter.task == load_task("digits", {}).fingerprint
