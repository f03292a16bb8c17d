"""Who may do what on a hub's server: one account for the hub and its streams, one for every peer
and one for every open invitation.

Rights alone do not keep peers apart: the server answers a request on any reply subject, whoever may
not write there. So each peer is alone in its account. Of the hub's account it sees the services
that it needs and nothing else, an answer can reach only who asked, and nothing is ever sent to
anybody unasked.

An account that a running server takes in anew does not see what it imports. So all that a crew can
ever need are there from the start, and only their keys come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from motley.exchange.nats.names import Bucket, Names
from motley.exchange.nats.stream import HEADERS_BYTES
from motley.exchange.wire import MAX_RECORD_BYTES

HUB_ACCOUNT = "HUB"
# of one key: its own, somebody who looks at the log with it, and two that TCP has not given up yet
MAX_CONNECTIONS = 4
MAX_SUBSCRIPTIONS = 64  # of one connection: each answer that is waited for is one
MAX_REQUEST_BYTES = 4096  # of an enrolment


@dataclass(frozen=True, slots=True)
class User:
    """A key with an account of its own, and what it may do."""

    account: str
    nkey: str  # nothing: nobody has it
    writes: tuple[str, ...]  # what it may store
    asks: tuple[str, ...]
    subscribe: tuple[str, ...]
    max_payload: int = MAX_RECORD_BYTES + HEADERS_BYTES

    @property
    def publish(self) -> tuple[str, ...]:
        """The hub's services that it sees."""
        return self.writes + self.asks


def peer_user(
    crew: str,
    peer: str,
    nkey: str,
    learner: bool = False,
    follows: str = "",
    in_lots: bool = False,
) -> User:
    """A peer writes under its own name only, reads the log, and looks who is there.

    A learner writes weights and has a bucket, and its followers read it. `in_lots`: where the
    crew's groups stand.
    """
    names = Names(crew)
    own, followed = names.bucket(peer), names.bucket(follows)
    return User(
        f"peer-{peer}",
        nkey,
        writes=(
            *names.records_by(peer, learner, in_lots),
            *((own.chunks, own.metas) if learner else ()),
        ),
        asks=(
            *(names.presence(peer), names.direct_get, names.presence_get),
            *((own.direct_get,) if learner else ()),
            *((followed.direct_get,) if follows else ()),
        ),
        subscribe=(f"_INBOX.{peer}.>",),
    )


def invited_user(crew: str, peer: str, nkey: str) -> User:
    """An invitation can be used for one thing: to bring the peer's own key."""
    return User(
        f"invited-{peer}",
        nkey,
        writes=(),
        asks=(Names(crew).enrolment(peer),),
        subscribe=(f"_INBOX.invited-{peer}.>",),
        max_payload=MAX_REQUEST_BYTES,
    )


def accounts(
    names: Names,
    hub: str,
    users: Sequence[User],
    learners: Sequence[str],
    nodes: Sequence[str] = (),
) -> dict[str, Any]:
    """The accounts of a server's configuration. `hub` is the owner's nkey, `nodes` are those of
    nodes on other machines.
    """
    buckets = [names.bucket(learner) for learner in learners]
    return {
        HUB_ACCOUNT: {
            "jetstream": "enabled",
            "users": [{"nkey": hub}, *(_node(names, nkey) for nkey in nodes)],
            "exports": _exports(names, buckets),
        },
        **{user.account: _account(user) for user in users},
    }


def _node(names: Names, nkey: str) -> dict[str, Any]:
    """A node reads what everyone may do, and nothing else."""
    publish, subscribe = {"allow": [names.rights_get]}, {"allow": ["_INBOX.node.>"]}
    return {"nkey": nkey, "permissions": {"publish": publish, "subscribe": subscribe}}


def _exports(names: Names, buckets: Sequence[Bucket]) -> list[dict[str, str]]:
    """What accounts can take a part of: which part, their imports say."""
    stored = [*names.stored, names.presences, names.enrolment("*")]
    stored += [subject for bucket in buckets for subject in (bucket.chunks, bucket.metas)]
    read = [names.direct_get, names.presence_get, *(bucket.direct_get for bucket in buckets)]
    return [
        *({"service": subject} for subject in stored),
        *({"service": subject, "response": "stream"} for subject in read),
    ]


def _account(user: User) -> dict[str, Any]:
    rights = {"publish": {"allow": user.publish}, "subscribe": {"allow": user.subscribe}}
    return {
        "users": [{"nkey": user.nkey, "permissions": rights}] if user.nkey else [],
        "imports": [
            {"service": {"account": HUB_ACCOUNT, "subject": subject}} for subject in user.publish
        ],
        "limits": {
            "max_connections": MAX_CONNECTIONS,
            "max_subscriptions": MAX_SUBSCRIPTIONS,
            "max_payload": user.max_payload,
        },
    }
