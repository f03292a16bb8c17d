"""Register: who of a crew is invited, enrolled or shut out, and by which rules that changes.

Kept in HUB/hub.json, and written before anybody hears of a change. Knows no server and no log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from motley import files
from motley.clock import Clock
from motley.config import CrewConfig, PeerConfig, config_text, parse_config
from motley.distributed.quota import Quotas
from motley.exchange.nats.accounts import User, invited_user, peer_user
from motley.exchange.nats.cluster import Node, address_of
from motley.exchange.nats.connection import Login
from motley.exchange.nats.server import fingerprint
from motley.exchange.nats.stream import HEADERS_BYTES
from motley.learning.hearing import can_stand_in_lots
from motley.records import HUB, Charter, Roster
from motley.tasks import load_task
from motley.trust import Identity, nkey_of, verifies
from motley.trust.invitation import Enrolment, Invitation

Say = Callable[[str], None]
INVITE_DAYS = 7.0  # how long an invitation is good, unless the hub's owner says otherwise
DAY_S = 86400.0


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the crew's server is, or its cluster of servers."""

    url: str  # what peers dial; of several servers all, with commas between
    host: str = ""  # where our own server listens; nothing: the server is somebody else's
    port: int = 0
    certificate: tuple[str, str] | None = None
    pinned: bool = False  # peers trust this very certificate, not the public authorities
    replicas: int = 1  # on how many servers everything is
    nodes: tuple[Node, ...] = ()  # of a cluster of our own, of which the first is at host and port


class HubState(msgspec.Struct, kw_only=True):
    crew: str
    config: str
    place: Place
    invited: dict[str, bytes] = {}  # peer -> secret of the invitation's key
    keys: dict[str, bytes] = {}  # peer -> its public key
    expires_s: dict[str, float] = {}  # peer -> end of its invitation; none: it stays open
    revoked: list[str] = []
    number: int = 0  # of the newest roster
    muted: list[str] = []  # who wrote more than its quota, and may not write any more
    forgiven: dict[str, int] = {}  # peer -> how many of its records do not count
    ordered: int = 0  # the number of the last order that was carried out
    lots: bool = False  # groups stand in lots

    @staticmethod
    def new(config: CrewConfig, place: Place, expires_s: float = 0.0) -> HubState:
        """With an invitation for every peer; `expires_s` 0: without an end."""
        return HubState(
            crew=config.crew.name,
            config=config_text(config),
            place=place,
            invited={peer.name: Identity.new().secret for peer in config.peer},
            expires_s={peer.name: expires_s for peer in config.peer} if expires_s else {},
            lots=place.replicas == 1 and can_stand_in_lots(config),
        )


class Order(msgspec.Struct, frozen=True):
    """What `motley hub --revoke` and `--invite` ask of the running hub, signed with its key."""

    what: Literal["revoke", "invite", "pardon"]
    peer: str
    number: int = 0  # only ever grows, so that none is carried out twice
    signature: bytes = b""
    days: float = INVITE_DAYS  # of a new invitation; 0: without an end

    def signed(self, crew: str) -> bytes:
        words = [crew, self.what, self.peer, self.number, self.days]
        return b"motley order\n" + msgspec.msgpack.encode(words)

    def by(self, state: HubState, identity: Identity) -> Order:
        """The same as the next of a hub's orders, signed.

        Counted, not timed: a clock that was set back must not keep a peer from being shut out.
        """
        counted = msgspec.structs.replace(self, number=state.ordered + 1)
        signature = identity.sign(counted.signed(state.crew))
        return msgspec.structs.replace(counted, signature=signature)


class Answer(msgspec.Struct, frozen=True):
    """A hub's to an order or an enrolment."""

    error: str = ""


class Register:
    def __init__(self, folder: Path, state: HubState, clock: Clock) -> None:
        self.state, self._folder = state, folder
        self.identity = Identity.kept_at(folder / "hub.key")
        self._config = parse_config(state.config)
        self.quotas = Quotas(self._config)
        self._clock = clock

    def keep(self) -> None:
        files.replace(self._folder / "hub.json", msgspec.json.encode(self.state), mode=0o600)

    # Changes

    def enrol(self, asked: Enrolment) -> bool:
        """Exchange an invitation for the key that its peer brings; whether that is news."""
        state = self.state
        if state.keys.get(asked.peer) == asked.key:
            return False  # asked again, because our first answer was lost
        secret = state.invited.get(asked.peer)
        if secret is None or not asked.is_of(Identity.of(secret).public):
            raise ValueError(
                f"the invitation of {asked.peer} is not open: it was used, or replaced by a newer "
                "one"
            )
        end_s = state.expires_s.get(asked.peer, 0.0)
        if end_s and self._clock.now_s() > end_s:
            raise ValueError(
                f"the invitation of {asked.peer} was good until {day_of(end_s)}; make a new one "
                f"with: motley hub ... --invite {asked.peer}"
            )
        invited = [Identity.of(secret).public for secret in state.invited.values()]
        if asked.key in [*state.keys.values(), *invited, self.identity.public]:
            raise ValueError(
                f"the key that {asked.peer} brings is in use already; each peer needs its own"
            )
        del state.invited[asked.peer]
        state.expires_s.pop(asked.peer, None)
        state.keys[asked.peer] = asked.key
        state.revoked = [peer for peer in state.revoked if peer != asked.peer]
        self._unmute(asked.peer)
        self.turn_page()
        return True

    def revoke(self, peer: str) -> None:
        """Shut a peer out."""
        self._must_know(peer)
        state = self.state
        if peer not in state.keys and peer not in state.invited:
            raise ValueError(f"{peer} is shut out already")
        state.keys.pop(peer, None)
        state.invited.pop(peer, None)
        state.expires_s.pop(peer, None)
        state.revoked = sorted({*state.revoked, peer})
        self._unmute(peer)
        self.turn_page()

    def invite(self, peer: str, days: float = INVITE_DAYS) -> None:
        """Invite a peer anew. Its old key counts until a new one is brought."""
        self._must_know(peer)
        self.state.invited[peer] = Identity.new().secret
        self.state.expires_s.pop(peer, None)
        if days:
            self.state.expires_s[peer] = self._clock.now_s() + days * DAY_S
        self.keep()

    def mute(self, written: Mapping[str, int]) -> list[str]:
        """Take the right to write from who has written more than its quota; who that is."""
        state, peers = self.state, self._config.peer
        beyond = [
            peer.name
            for peer in peers
            if peer.name in state.keys and peer.name not in state.muted
            if written.get(peer.name, 0) - state.forgiven.get(peer.name, 0)
            > self.quotas.records(peer)
        ]
        if beyond:
            state.muted = sorted({*state.muted, *beyond})
            self.keep()
        return beyond

    def pardon(self, peer: str, written: int) -> None:
        """Let a peer write as much again as its quota."""
        self._must_know(peer)
        self._unmute(peer)
        self.state.forgiven[peer] = written
        self.keep()

    def _unmute(self, peer: str) -> None:
        self.state.muted = [muted for muted in self.state.muted if muted != peer]

    def check(self, order: Order) -> None:
        """Let an order of the hub's owner pass, once."""
        signed = order.signed(self.state.crew)
        own = verifies(self.identity.public, order.signature, signed)
        if not own or order.number <= self.state.ordered:
            raise ValueError("an order that the hub's owner did not give, or gave before")
        self.state.ordered = order.number
        self.keep()

    def turn_page(self) -> None:
        """Keep a change that everyone must hear of: there is a new roster from here on."""
        self.state.number += 1
        self.keep()

    def _must_know(self, peer: str) -> None:
        known = [p.name for p in self._config.peer]
        if peer not in known:
            raise ValueError(f"the crew has no peer {peer!r}; it has {', '.join(known)}")

    # What it says

    def charter(self) -> Charter:
        task = load_task(self._config.crew.task, self._config.task).fingerprint
        state = self.state
        return Charter(crew=state.crew, config=state.config, task=task, lots=state.lots)

    def roster(self) -> Roster:
        state = self.state
        return Roster(
            crew=state.crew,
            number=state.number,
            keys=dict(state.keys),
            revoked=tuple(state.revoked),
        )

    def invitations(self) -> dict[str, str]:
        return invitations(self.state, self.identity.public)

    def verify(self, peer: str, signature: bytes, message: bytes) -> bool:
        """Whether an enrolled peer has signed this."""
        keys = self.state.keys
        return peer in keys and verifies(keys[peer], signature, message)

    @property
    def learners(self) -> list[str]:
        return [peer.name for peer in self._config.peer if peer.role == "learner"]

    def users(self) -> list[User]:
        """Who may do what on the server: two accounts per peer of the crew, some without a key."""
        state = self.state
        invited = {peer: Identity.of(secret).nkey for peer, secret in state.invited.items()}
        guests = [
            invited_user(state.crew, peer.name, invited.get(peer.name, ""))
            for peer in self._config.peer
        ]
        return [*guests, *map(self._user, self._config.peer)]

    def _user(self, peer: PeerConfig) -> User:
        state, name = self.state, peer.name
        nkey = nkey_of(state.keys[name]) if name in state.keys else ""
        is_learner = peer.role == "learner"
        user = peer_user(state.crew, name, nkey, is_learner, peer.follows, state.lots)
        most = self.quotas.message_bytes(peer) + HEADERS_BYTES
        return replace(user, max_payload=most, writes=() if name in state.muted else user.writes)


def read_state(folder: Path) -> HubState:
    try:
        return msgspec.json.decode((folder / "hub.json").read_bytes(), type=HubState)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(
            f"{folder} is not the folder of a hub: {error}; give the one that motley hub printed"
        ) from None


def invitations(state: HubState, hub: bytes) -> dict[str, str]:
    """Per peer with an open invitation, the line to paste on its machine."""
    pinned = state.place.pinned and state.place.certificate
    certificate = fingerprint(Path(pinned[0])) if pinned else ""
    return {
        peer: f"motley join {_first_other(state.place.url, number)} --crew {state.crew} --invite "
        + Invitation(peer, secret, hub, certificate, int(state.expires_s.get(peer, 0.0))).text
        for number, (peer, secret) in enumerate(state.invited.items())
    }


def _first_other(url: str, number: int) -> str:
    """The servers of an address in another order: each peer dials another one first."""
    urls = url.split(",")
    first = number % len(urls)
    return ",".join([*urls[first:], *urls[:first]])


def day_of(at_s: float) -> str:
    """A moment for people, such as 2026-11-16 04:30 UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def hub_login(folder: Path, state: HubState) -> Login:
    """How the hub's owner dials its server, from the same machine."""
    identity = Identity.kept_at(folder / "hub.key")
    certificate = fingerprint(Path(state.place.certificate[0])) if state.place.certificate else ""
    url = state.place.url
    if state.place.host:
        near = "127.0.0.1" if state.place.host == "0.0.0.0" else state.place.host
        scheme = "tls" if certificate else "nats"
        url = f"{scheme}://{near}:{state.place.port}"
        if others := state.place.nodes[1:]:
            url = f"{url},{address_of(others, scheme)}"
    return Login(url, HUB, identity.nkey_seed, certificate)
