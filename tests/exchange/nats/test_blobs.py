from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from fakes import identity
from hubs import PATIENCE_S
from motley.clock import Deadline, RealClock, VirtualClock
from motley.exchange import LogError
from motley.exchange.nats.accounts import peer_user
from motley.exchange.nats.blobs import (
    CHUNK_BYTES,
    QUICK_S,
    SLOW_S,
    NatsBlobs,
    Window,
    create_bucket,
)
from motley.exchange.nats.connection import Connection, Login
from motley.exchange.nats.log import MAX_FLIGHT_BYTES
from motley.exchange.nats.names import Names
from motley.records import HUB

from ..nats_server import CREW, Net, eventually, open_server
from ..test_blobs import BIG, SIZES, content_of, got, name_of, put
from .test_server import publish, refused, subscribe

BUCKET = Names(CREW).bucket("a")


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    """Learners a and c; b follows a, and d follows c."""
    made = Net(tmp_path / "server").follow({"b": "a", "d": "c"})
    try:
        yield made.start()
    finally:
        made.close()


def test_a_buckets_names_are_those_of_the_object_store() -> None:
    assert BUCKET.name == "motley-crew-a"
    assert BUCKET.stream == "OBJ_motley-crew-a"
    assert BUCKET.chunks_of("ab") == "$O.motley-crew-a.C.ab"
    assert BUCKET.meta_of("a>>?") == "$O.motley-crew-a.M.YT4-Pw=="
    assert (BUCKET.chunks, BUCKET.metas) == ("$O.motley-crew-a.C.*", "$O.motley-crew-a.M.*")
    assert BUCKET.direct_get == "$JS.API.DIRECT.GET.OBJ_motley-crew-a"


# The object store of nats-py


def stores_words(net: Net, name: str) -> tuple[Any, bytes]:
    """What nats-py's own object store says of a blob, and its content."""

    async def work(client: Client) -> tuple[Any, bytes]:
        result = await (await client.jetstream().object_store(BUCKET.name)).get(name)
        return result.info, bytes(result.data or b"")

    return net.connections[0].call(work)


def listed(net: Net, timeout_s: float = 10.0) -> dict[str, bool]:
    """Names, and whether they are said to be deleted."""

    async def work(client: Client) -> dict[str, bool]:
        store = await client.jetstream().object_store(BUCKET.name)
        try:
            return {info.name: bool(info.deleted) for info in await store.list()}
        except NotFoundError:
            return {}

    return net.connections[0].call(work, timeout_s)


def lists_only(net: Net, content: bytes) -> bool:
    """While something is being deleted nats-py may wait for a message that is gone."""
    with suppress(LogError):
        return listed(net, timeout_s=1) == {name_of(content): False}
    return False


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_stores_own_client_reads_what_we_wrote(net: Net, size: int) -> None:
    content = content_of(size)
    put(net.blobs("a", "a"), content)
    info, read = stores_words(net, name_of(content))
    assert read == content
    assert (info.name, info.bucket, info.nuid, info.size) == (
        name_of(content),
        BUCKET.name,
        name_of(content),
        size,
    )
    assert (info.chunks, info.options.max_chunk_size) == (-(-size // CHUNK_BYTES), CHUNK_BYTES)
    assert not info.deleted


@pytest.mark.slow
def test_the_stores_own_client_lists_what_is_there_and_not_what_was_deleted(net: Net) -> None:
    learner, contents = net.blobs("a", "a"), [b"", b"one", BIG]
    assert listed(net) == {}
    put(learner, *contents)
    assert listed(net) == {name_of(content): False for content in contents}
    learner.keep_only([name_of(b"one")])
    eventually(lambda: lists_only(net, b"one"))


def test_the_stores_own_client_sees_a_blob_half_put_as_deleted(net: Net) -> None:
    learner = net.blobs("a", "a")
    learner._write([learner._meta(learner._deleted(name_of(b"one")))])
    assert listed(net) == {name_of(b"one"): True}
    with pytest.raises(LogError, match="ObjectNotFoundError"):
        stores_words(net, name_of(b"one"))


def test_a_bucket_is_as_the_store_makes_its_own_and_messages_in_it_may_vanish(net: Net) -> None:
    async def work(client: Client) -> tuple[dict[str, Any], dict[str, Any]]:
        streams = client.jetstream()
        await streams.create_object_store("theirs")
        ours, theirs = [await streams.stream_info(name) for name in (BUCKET.stream, "OBJ_theirs")]
        return ours.config.as_dict(), theirs.config.as_dict()

    ours, theirs = net.connections[0].call(work)
    different = {key for key in ours | theirs if ours.get(key) != theirs.get(key)} - {"metadata"}
    assert different == {"name", "subjects", "allow_msg_ttl", "max_msgs", "max_msg_size"}
    assert ours["subjects"] == ["$O.motley-crew-a.C.>", "$O.motley-crew-a.M.>"]
    assert ours["storage"] == "file"


def test_making_a_bucket_again_leaves_what_is_in_it(net: Net) -> None:
    put(net.blobs("a", "a"), b"one")
    create_bucket(net.connections[0], CREW, "a")
    assert got(net.blobs("b", "a"), b"one") == b"one"


# Rights


PURGE = json.dumps({"filter": BUCKET.chunks}).encode()
WRITING = [
    BUCKET.chunks_of("x"),
    BUCKET.meta_of("x"),
    BUCKET.chunks_of(name_of(b"one")),
    BUCKET.meta_of(name_of(b"one")),
]
COMMANDS = [
    f"$JS.API.STREAM.{verb}.{BUCKET.stream}"
    for verb in (
        "PURGE",
        "DELETE",
        "UPDATE",
        "INFO",
        "MSG.DELETE",
        "MSG.GET",
        "SNAPSHOT",
        "RESTORE",
        "LEADER.STEPDOWN",
    )
] + [
    f"$JS.API.CONSUMER.CREATE.{BUCKET.stream}",
    f"$JS.API.CONSUMER.CREATE.{BUCKET.stream}.spy.{BUCKET.chunks}",
]
OUTSIDE = [
    "$O.motley-crew-a.X.x",
    "$O.motley-crew-a.C",
    "$O.motley-crew-a.C.x.y",
    "$O.motley-crew-a",
    "$O.other.C.x",
]


class Watch:
    """All that is in the streams."""

    def __init__(self, net: Net) -> None:
        self._hub = net.connections[0]

    def __call__(self) -> list[tuple[str, dict[str, Any], int, int, int]]:
        async def work(client: Client) -> list[tuple[str, dict[str, Any], int, int, int]]:
            return [
                (
                    info.config.name,
                    info.config.as_dict(),
                    info.state.messages,
                    info.state.last_seq,
                    info.state.consumer_count,
                )
                for info in await client.jetstream().streams_info()
                if info.config.name != Names(CREW).presence_stream
            ]

        return sorted(self._hub.call(work), key=lambda stream: stream[0])


@pytest.fixture
def watch(net: Net) -> Watch:
    """Of a store with one blob, from whose putting nothing is left to vanish."""
    put(net.blobs("a", "a"), b"one")
    made = Watch(net)
    eventually(lambda: made()[0][2] == 2)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["b", "c", "d"])
def test_nobody_but_the_learner_can_write_to_its_bucket(net: Net, watch: Watch, name: str) -> None:
    other, before = net.blobs(name, "a"), watch()
    for subject in (*WRITING, *OUTSIDE):
        assert "permissions violation for publish" in publish(
            other.connection, subject, b"forged"
        ), subject
    for call in (lambda: put(other, b"forged"), lambda: other.keep_only([])):
        with pytest.raises(LogError, match="permissions violation"):
            call()
    assert watch() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_nobody_can_give_the_server_a_command_about_a_bucket(
    net: Net, watch: Watch, name: str
) -> None:
    connection, before = net.connect(name), watch()
    for subject in COMMANDS:
        assert "permissions violation for publish" in publish(connection, subject, PURGE), subject
    assert watch() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["c", "d"])
def test_only_the_learner_and_who_follows_it_can_read_its_bucket(
    net: Net, watch: Watch, name: str
) -> None:
    with pytest.raises(LogError, match="permissions violation"):
        got(net.blobs(name, "a"), b"one")
    assert [got(net.blobs(reader, "a"), b"one") for reader in ("a", "b")] == [b"one", b"one"]


@pytest.mark.slow
def test_a_learner_writes_nothing_but_its_chunks_and_metas(net: Net, watch: Watch) -> None:
    learner, before = net.connect("a"), watch()
    other = Names(CREW).bucket("c")
    for subject in (*OUTSIDE, other.chunks_of("x"), other.meta_of("x"), other.direct_get):
        assert "permissions violation for publish" in publish(learner, subject, b"forged"), subject
    assert watch() == before


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_nobody_hears_what_is_written_to_a_bucket(net: Net, name: str) -> None:
    connection = net.connect(name)
    for subject in ("$O.>", "$O.*.C.*", BUCKET.chunks, BUCKET.metas, BUCKET.direct_get):
        assert "permissions violation for subscription" in subscribe(connection, subject), subject


@pytest.mark.slow
def test_nothing_can_be_done_by_having_the_server_answer_to_a_forbidden_subject(
    net: Net, watch: Watch
) -> None:
    """A sampler and its learner together can have any content sent to any reply subject."""
    learner, sampler = net.blobs("a", "a"), net.connect("b")
    other = Names(CREW).bucket("c")
    put(net.blobs("c", "c"), b"of c")
    put(learner, PURGE)
    targets = [
        *COMMANDS,
        *(command.replace(BUCKET.stream, other.stream) for command in COMMANDS),
        *(f"$JS.API.STREAM.{verb}.motley-crew" for verb in ("PURGE", "DELETE", "INFO")),
        *(other.chunks_of(name_of(b"of c")), other.meta_of(name_of(b"of c")), other.direct_get),
        *(BUCKET.chunks_of(name_of(PURGE)), BUCKET.meta_of(name_of(PURGE)), BUCKET.direct_get),
        *(
            "motley.crew.log.c.0.0",
            "motley.crew.log.hub.roster.9",
            "motley.crew.presence.c",
            "motley.crew.control",
            "motley.crew.enrol.x",
        ),
    ]
    eventually(lambda: [stream[2] for stream in watch()] == [4, 2, 0])
    before = watch()
    for target in targets:
        for wanted in (
            {"last_by_subj": BUCKET.chunks_of(name_of(PURGE))},
            {"seq": 1, "batch": 9, "next_by_subj": BUCKET.chunks},
        ):
            for connection in (sampler, learner.connection):
                publish(connection, BUCKET.direct_get, json.dumps(wanted).encode(), reply=target)
    assert got(net.blobs("b", "a"), PURGE) == PURGE
    assert watch() == before
    for target in targets:
        publish(learner.connection, BUCKET.chunks_of("x"), PURGE, reply=target)
        publish(learner.connection, BUCKET.meta_of("x"), PURGE, reply=target)
    put(learner, b"behind all of it")
    after = watch()
    assert after[1:] == before[1:]
    assert (after[0][1], after[0][4]) == (before[0][1], before[0][4])
    assert got(net.blobs("d", "c"), b"of c") == b"of c"


ACTING_HEADERS = [
    {"Nats-Rollup": "all"},
    {"Nats-TTL": "1s"},
    {
        "Nats-Schedule": "@at 2020-01-01T00:00:00Z",
        "Nats-Schedule-Target": "motley.crew.log.b.9.9",
    },
    {"Nats-Trace-Dest": "motley.crew.log.b.9.9"},
    {"Nats-Trace-Dest": f"$JS.API.STREAM.DELETE.{BUCKET.stream}"},
]


@pytest.mark.slow
def test_no_header_of_a_chunk_does_anything_outside_the_bucket(net: Net, watch: Watch) -> None:
    learner, before = net.blobs("a", "a"), watch()
    for headers in ACTING_HEADERS:
        for subject in (BUCKET.chunks_of("x"), BUCKET.meta_of("x")):
            refused(
                learner.connection,
                lambda client, s=subject, h=headers: client.publish(s, b"{}", headers=h),
            )
    put(learner, b"behind all of it")
    after = watch()
    assert after[1:] == before[1:]
    assert (after[0][1], after[0][4]) == (before[0][1], before[0][4])


@pytest.mark.slow
def test_a_learner_that_joins_later_has_its_bucket_after_a_reload_and_others_go_on(
    net: Net,
) -> None:
    learner, sampler, hub = net.blobs("a", "a"), net.blobs("b", "a"), net.connections[0]
    put(learner, BIG)
    newcomers = [
        peer_user(CREW, "e", identity("e").nkey, learner=True),
        peer_user(CREW, "f", identity("f").nkey, follows="e"),
    ]
    net.admit(*newcomers)
    create_bucket(hub, CREW, "e")
    net.server.reload()
    late, follower = eventually(lambda: came_in(net, "e")), eventually(lambda: came_in(net, "f"))
    again(lambda: put(late, BIG))
    assert again(lambda: got(follower, BIG)) == BIG
    assert again(lambda: got(sampler, BIG)) == BIG
    again(lambda: put(learner, b"more"))
    assert again(lambda: got(sampler, b"more")) == b"more"
    assert [blobs.connection._client.stats["reconnects"] for blobs in (learner, sampler)] == [0, 0]


def came_in(net: Net, name: str) -> NatsBlobs | None:
    with suppress(LogError):
        return net.blobs(name, "e")
    return None


def again(work: Callable[[], Any]) -> Any:
    """An answer may be lost while the server takes in a configuration."""
    deadline = Deadline(RealClock(), PATIENCE_S)
    while True:
        try:
            return work()
        except LogError:
            if deadline.passed:
                raise


# Sizes and speeds


@pytest.mark.slow
def test_a_chunk_that_the_server_does_not_take_is_refused_by_name(net: Net) -> None:
    learner = net.blobs("a", "a")
    learner.connection._client._max_payload = CHUNK_BYTES // 2
    with pytest.raises(
        LogError,
        match=(
            f"refuses {name_of(BIG)}: it has {CHUNK_BYTES} bytes, and {CHUNK_BYTES // 2} is the "
            "most"
        ),
    ):
        put(learner, BIG)
    put(learner, b"small")
    assert got(learner, b"small") == b"small"


@pytest.mark.slow
def test_a_full_store_refuses_by_name_and_takes_it_when_there_is_room(net: Net) -> None:
    learner = net.blobs("a", "a")

    def limit(num_bytes: int) -> None:
        async def work(client: Client) -> None:
            streams = client.jetstream()
            config = (await streams.stream_info(BUCKET.stream)).config
            config.max_bytes = num_bytes
            await streams.update_stream(config)

        net.connections[0].call(work)

    limit(CHUNK_BYTES)
    with pytest.raises(LogError, match=f"the store refuses {name_of(BIG)}: "):
        put(learner, BIG)
    assert got(learner, BIG) is None
    limit(2 * len(BIG))
    put(learner, BIG)
    assert got(learner, BIG) == BIG


def test_without_a_bucket_there_is_an_error(net: Net) -> None:
    blobs = NatsBlobs(net.connections[0], CREW, "nobody")
    for call in (
        lambda: got(blobs, b"one"),
        lambda: put(blobs, b"one"),
        lambda: blobs.keep_only([]),
    ):
        with pytest.raises(LogError):
            call()


@pytest.mark.slow
def test_a_server_of_somebody_elses_with_its_usual_settings_will_do(tmp_path: Path) -> None:
    with open_server(tmp_path) as url:  # which takes a megabyte, unless told otherwise
        connection = Connection(Login(url, HUB))
        try:
            create_bucket(connection, CREW, "a")
            blobs = NatsBlobs(connection, CREW, "a")
            put(blobs, b"", BIG)
            assert got(blobs, BIG) == BIG
            blobs.keep_only([name_of(b"")])
            assert (got(blobs, BIG), got(blobs, b"")) == (None, b"")
        finally:
            connection.close()


def test_what_is_under_way_grows_on_a_quick_link_and_shrinks_on_a_slow_one() -> None:
    clock = VirtualClock()
    window, seen = Window(MAX_FLIGHT_BYTES, clock), []
    for took_s in (
        0.1,
        0.1,
        0.1,
        0.1,
        QUICK_S + 1,
        SLOW_S + 1,
        SLOW_S + 1,
        SLOW_S + 1,
        SLOW_S + 1,
        0.1,
    ):
        with window.measured():
            clock.sleep_s(took_s)
        seen.append(window.num_bytes // CHUNK_BYTES)
    assert seen == [2, 4, 8, 8, 8, 4, 2, 1, 1, 2]
    with pytest.raises(LogError), window.measured():
        raise LogError("lost")
    assert window.num_bytes == CHUNK_BYTES
