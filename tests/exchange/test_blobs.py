from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from hubs import PATIENCE_S
from marks import slow
from motley.clock import Deadline, RealClock
from motley.exchange import LogError
from motley.exchange.blobs import Blobs, MemoryBlobs
from motley.exchange.nats.blobs import CHUNK_BYTES, NatsBlobs
from motley.exchange.nats.stream import Outgoing, Receipt, Stream

from .nats_server import Net, eventually, in_time

SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 10 * CHUNK_BYTES]


def content_of(size: int, seed: int = 0) -> bytes:
    return random.Random(f"{size} {seed}").randbytes(size)


def name_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put(blobs: Blobs, *contents: bytes) -> None:
    for content in contents:
        blobs.put(name_of(content), content)


def got(blobs: Blobs, content: bytes) -> bytes | None:
    return blobs.get(name_of(content), len(content))


class BlobsContract:
    """`learner` and `sampler` are fixtures, of the same blobs; `spoil` replaces what is stored
    under a name.
    """

    @pytest.fixture
    def learner(self) -> Blobs:
        raise NotImplementedError

    @pytest.fixture
    def sampler(self) -> Blobs:
        raise NotImplementedError

    def spoil(self, learner: Blobs, name: str, content: bytes) -> None:
        raise NotImplementedError

    @pytest.mark.parametrize("size", SIZES)
    def test_what_was_put_is_got(self, learner: Blobs, sampler: Blobs, size: int) -> None:
        content = content_of(size)
        assert got(sampler, content) is None
        put(learner, content)
        assert got(sampler, content) == content
        assert got(learner, content) == content

    def test_any_bytes_are_kept_apart_and_as_they_are(self, learner: Blobs, sampler: Blobs) -> None:
        contents = [
            b"",
            bytes(9),
            bytes(range(256)),
            b"\r\n\r\n",
            *(content_of(1000, seed) for seed in range(20)),
        ]
        put(learner, *contents)
        assert [got(sampler, content) for content in contents] == contents

    @pytest.mark.parametrize("size", SIZES)
    def test_putting_it_again_changes_nothing(
        self, learner: Blobs, sampler: Blobs, size: int
    ) -> None:
        content = content_of(size)
        put(learner, content, content)
        assert got(sampler, content) == content

    def test_what_is_not_there_is_none(self, learner: Blobs, sampler: Blobs) -> None:
        put(learner, content_of(10))
        assert got(sampler, content_of(10, seed=1)) is None

    def test_of_another_length_it_is_none(self, learner: Blobs, sampler: Blobs) -> None:
        for size in (0, 5, 2 * CHUNK_BYTES):
            content = content_of(size)
            put(learner, content)
            for wrong in (0, size - 1, size + 1, CHUNK_BYTES, 10**15):
                assert (sampler.get(name_of(content), wrong) is None) == (wrong != size)

    @pytest.mark.parametrize(
        "name",
        ["", "*", ">", "x", "a b", "a.b", "é", "A" * 64, "f" * 63, "f" * 65, "f" * 64 + "\n"],
    )
    def test_a_name_that_is_no_hash_is_none(
        self, learner: Blobs, sampler: Blobs, name: str
    ) -> None:
        put(learner, b"something")
        assert sampler.get(name, len(b"something")) is None

    @pytest.mark.parametrize("size", SIZES[1:])
    def test_other_bytes_under_its_name_are_none(
        self, learner: Blobs, sampler: Blobs, size: int
    ) -> None:
        content = content_of(size)
        put(learner, content)
        self.spoil(learner, name_of(content), content[:-1] + bytes([content[-1] ^ 1]))
        assert got(sampler, content) is None

    @pytest.mark.parametrize("size", SIZES[1:])
    def test_too_few_bytes_are_none(self, learner: Blobs, sampler: Blobs, size: int) -> None:
        content = content_of(size)
        put(learner, content)
        for kept in (0, size // 2, size - 1):
            self.spoil(learner, name_of(content), content[:kept])
            assert got(sampler, content) is None

    def test_more_bytes_than_asked_for_are_never_given(
        self, learner: Blobs, sampler: Blobs
    ) -> None:
        content = content_of(100)
        put(learner, content)
        self.spoil(learner, name_of(content), content + b"x")
        assert got(sampler, content) is None

    def test_only_what_is_kept_stays(self, learner: Blobs, sampler: Blobs) -> None:
        contents = [content_of(size) for size in SIZES]
        put(learner, *contents)
        kept = [contents[1], contents[5]]
        learner.keep_only([*map(name_of, kept), name_of(b"never put")])
        assert [got(sampler, content) for content in contents] == [
            content if content in kept else None for content in contents
        ]
        learner.keep_only([])
        assert [got(sampler, content) for content in contents] == [None] * len(contents)
        learner.keep_only([])

    @pytest.mark.parametrize("size", SIZES)
    def test_what_was_deleted_can_be_put_again_at_once(
        self, learner: Blobs, sampler: Blobs, size: int
    ) -> None:
        content = content_of(size)
        for _ in range(3):
            put(learner, content)
            assert got(sampler, content) == content
            learner.keep_only([])
            assert got(sampler, content) is None


class TestMemoryBlobs(BlobsContract):
    @pytest.fixture
    def learner(self) -> MemoryBlobs:
        return MemoryBlobs()

    @pytest.fixture
    def sampler(self, learner: MemoryBlobs) -> MemoryBlobs:
        return learner

    def spoil(self, learner: Blobs, name: str, content: bytes) -> None:
        assert isinstance(learner, MemoryBlobs)
        learner._contents[name] = content


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    """One server for tests that leave it as it is: learner a, and b who follows it."""
    made = Net(tmp_path_factory.mktemp("shared") / "server").follow({"b": "a"})
    try:
        yield made.start()
    finally:
        made.close()


class TestNatsBlobs(BlobsContract):
    @pytest.fixture
    def learner(self, shared: Net) -> Iterator[NatsBlobs]:
        made = shared.blobs("a", "a")
        made.keep_only([])
        yield made
        made.connection.close()

    @pytest.fixture
    def sampler(self, shared: Net) -> Iterator[NatsBlobs]:
        made = shared.blobs("b", "a")
        yield made
        made.connection.close()

    def spoil(self, learner: Blobs, name: str, content: bytes) -> None:
        assert isinstance(learner, NatsBlobs)
        learner._write([learner._no_chunks(name)])
        write_chunks(learner, name, content)


def write_chunks(learner: NatsBlobs, name: str, content: bytes) -> None:
    """The chunks, and no meta: as far as a put may have come."""
    for start in range(0, len(content), CHUNK_BYTES):
        learner._write(
            [Outgoing(learner._bucket.chunks_of(name), content[start : start + CHUNK_BYTES], name)]
        )


# What a store on a server has besides


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    made = Net(tmp_path / "server").follow({"b": "a"})
    try:
        yield made.start()
    finally:
        made.close()


@pytest.fixture
def learner(net: Net) -> NatsBlobs:
    return net.blobs("a", "a")


@pytest.fixture
def sampler(net: Net) -> NatsBlobs:
    return net.blobs("b", "a")


def num_messages(net: Net, blobs: NatsBlobs) -> int:
    async def work(client: Client) -> int:
        return (await client.jetstream().stream_info(blobs._bucket.stream)).state.messages

    return net.connections[0].call(work)


def until_confirmed(work: Callable[[], None]) -> None:
    """As a courier does: what failed is done again."""
    for _ in range(10):
        try:
            return work()
        except LogError:
            RealClock().sleep_s(0.01)
    raise AssertionError("not confirmed after 10 attempts")


BIG = content_of(20 * CHUNK_BYTES)


@pytest.mark.slow
def test_putting_what_is_there_writes_nothing(net: Net, learner: NatsBlobs) -> None:
    put(learner, b"", BIG)
    before = last_sequence(learner)
    put(learner, b"", BIG)
    put(net.blobs("a", "a"), b"", BIG)
    assert last_sequence(learner) == before


def last_sequence(blobs: NatsBlobs) -> int:
    stored = blobs._stream.last(f"$O.{blobs._bucket.name}.>")
    return stored.sequence if stored else 0


@pytest.mark.slow
def test_a_put_of_which_only_chunks_are_there_is_made_whole_by_another(
    learner: NatsBlobs, sampler: NatsBlobs
) -> None:
    for size in (1, CHUNK_BYTES, len(BIG)):
        content = BIG[:size]
        write_chunks(learner, name_of(content), content)
        write_chunks(learner, name_of(content), content[:100])
        assert got(sampler, content) is None
        put(learner, content)
        assert got(sampler, content) == content


@pytest.mark.slow
def test_a_put_whose_learner_died_anywhere_is_made_whole_by_another(
    net: Net, sampler: NatsBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(Exception):  # noqa: N818 - no error of anything's
        pass

    content = BIG[: 3 * CHUNK_BYTES + 5]
    for survived in range(5):
        dying, writes = net.blobs("a", "a"), []
        usual = dying._write

        def write(
            messages: list[Outgoing], usual=usual, writes=writes, survived=survived
        ) -> list[Receipt]:
            if len(writes) == survived:
                raise Died
            writes.append(messages)
            return usual(messages)

        monkeypatch.setattr(dying, "_write", write)
        try:
            put(dying, content)
        except Died:
            assert got(sampler, content) is None
        else:
            assert survived == 4  # begun, one chunk, two and what is left, meta
        dying.connection.close()
        again = net.blobs("a", "a")
        put(again, content)
        assert got(sampler, content) == content
        again.keep_only([])
        again.connection.close()


@pytest.mark.slow
def test_what_an_interrupted_put_left_is_deleted_with_the_others(
    net: Net, learner: NatsBlobs
) -> None:
    learner._write([learner._meta(learner._deleted(name_of(BIG)))])
    write_chunks(learner, name_of(BIG), BIG)
    put(learner, b"kept")
    learner.keep_only([name_of(b"kept")])
    eventually(lambda: num_messages(net, learner) == 2)


@pytest.mark.slow
def test_what_was_deleted_leaves_nothing_however_often_that_happens(
    net: Net, learner: NatsBlobs
) -> None:
    for seed in range(100):
        put(learner, content_of(100, seed))
        learner.keep_only([name_of(content_of(100, seed))])
    assert got(learner, content_of(100, 99)) is not None
    eventually(lambda: num_messages(net, learner) == 2)  # its chunk and its meta


def test_what_was_put_survives_kill_9(
    net: Net, learner: NatsBlobs, sampler: NatsBlobs, endless: None
) -> None:
    put(learner, b"", b"small", BIG)
    net.kill()
    for call in (
        lambda: got(sampler, BIG),
        lambda: put(learner, b"more"),
        lambda: learner.keep_only([]),
    ):
        with pytest.raises(LogError, match=rf"no connection to {net.url} for \d+ s"):
            in_time(call)
    net.restart()
    assert [got(sampler, content) for content in (b"", b"small", BIG)] == [b"", b"small", BIG]
    put(learner, b"more")
    assert got(sampler, b"more") == b"more"


@pytest.mark.slow
@pytest.mark.parametrize("stored_chunks", [slow(0), 3, slow(25)])
def test_a_put_during_which_the_server_is_killed_is_made_whole_by_another(
    net: Net, stored_chunks: int
) -> None:
    learner, sampler = net.blobs("a", "a"), net.blobs("b", "a")
    content, failed = content_of(60 * CHUNK_BYTES), []

    def try_to_put() -> None:
        try:
            put(learner, content)
        except LogError as error:
            failed.append(error)

    putting = threading.Thread(target=try_to_put, daemon=True)
    putting.start()
    eventually(lambda: stored_bytes(net) >= stored_chunks * CHUNK_BYTES)
    net.kill()
    putting.join(PATIENCE_S)
    assert len(failed) == 1
    net.restart()
    assert got(sampler, content) is None
    until_confirmed(lambda: put(learner, content))
    assert got(sampler, content) == content


def stored_bytes(net: Net) -> int:
    return sum(file.stat().st_size for file in net.server.folder.rglob("*.blk"))


@pytest.mark.slow
def test_a_get_during_which_the_server_is_killed_fails_and_succeeds_again(
    net: Net, learner: NatsBlobs, sampler: NatsBlobs
) -> None:
    content, found, failures = content_of(60 * CHUNK_BYTES), [], []
    put(learner, content)

    def get() -> None:
        deadline = Deadline(RealClock(), PATIENCE_S)
        while not (failures and found[-1:] == [True]) and not deadline.passed:
            try:
                found.append(got(sampler, content) == content)
            except LogError as error:
                failures.append(error)
                RealClock().sleep_s(0.01)

    getting = threading.Thread(target=get, daemon=True)
    getting.start()
    eventually(lambda: sampler._down.num_bytes > CHUNK_BYTES)
    net.kill()
    eventually(lambda: failures)
    net.restart()
    getting.join(PATIENCE_S)
    assert found[-1]
    assert all(found)


@pytest.mark.slow
def test_bytes_of_a_dead_process_that_arrive_late_are_noticed(
    net: Net, learner: NatsBlobs, sampler: NatsBlobs
) -> None:
    """Its socket's last content comes while another process puts the same blob."""
    late, content, usual = net.blobs("a", "a"), BIG[: 5 * CHUNK_BYTES], learner._write
    for before in (1, 2, 3):
        writes: list[list[Outgoing]] = []

        def write(messages: list[Outgoing], writes=writes, before=before) -> list[Receipt]:
            if len(writes) == before:
                write_chunks(late, name_of(content), content[:CHUNK_BYTES])
            writes.append(messages)
            return usual(messages)

        learner._write = write
        learner._up.num_bytes = CHUNK_BYTES
        with pytest.raises(LogError, match="put it again"):
            put(learner, content)
        learner._write = usual
        assert got(sampler, content) is None
        put(learner, content)
        assert got(sampler, content) == content
        learner.keep_only([])


@pytest.mark.slow
def test_what_stands_behind_the_last_chunk_is_not_looked_at(
    learner: NatsBlobs, sampler: NatsBlobs
) -> None:
    put(learner, BIG)
    write_chunks(learner, name_of(BIG), BIG[:CHUNK_BYTES])
    assert got(sampler, BIG) == BIG


NO_METAS = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"\xff\xfe",
    b'{"name": "\xff"}',
    b"[" * 100_000,
    b'{"x":' * 100_000,
    b'{"name":"x","bucket":"x","nuid":"x","size":-1,"mtime":"","chunks":0}',
    b'{"name":"x","bucket":"x","nuid":"x","size":1e400,"mtime":"","chunks":0}',
    b'{"name":"x","bucket":"x","nuid":7,"size":5,"mtime":"","chunks":0}',
]


@pytest.mark.parametrize("meta", NO_METAS, ids=range(len(NO_METAS)))
def test_whatever_stands_in_place_of_a_meta_the_blob_is_not_there_and_can_be_put(
    net: Net, meta: bytes
) -> None:
    learner, content = net.blobs("a", "a"), b"hello"
    put(learner, content)
    learner._write(
        [Outgoing(learner._bucket.meta_of(name_of(content)), meta, "meta", {"Nats-Rollup": "sub"})]
    )
    assert got(net.blobs("b", "a"), content) is None
    learner.keep_only([name_of(content)])
    put(learner, content)
    assert got(net.blobs("b", "a"), content) == content


@pytest.mark.slow
def test_empty_chunks_do_not_keep_a_reader_busy(
    learner: NatsBlobs, sampler: NatsBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(learner, b"hello")
    learner._write([learner._no_chunks(name_of(b"hello"))])
    nothing = Outgoing(learner._bucket.chunks_of(name_of(b"hello")), b"", "nothing")
    for _ in range(10):  # a slow machine has ten times as long for them
        learner._write([nothing] * 300)
    pages, usual = [], Stream.read
    monkeypatch.setattr(
        Stream,
        "read",
        lambda *args, **settings: pages.append(usual(*args, **settings)) or pages[-1],
    )
    assert got(sampler, b"hello") is None
    assert [len(page) for page in pages] == [1024]


@pytest.mark.slow
def test_blobs_import_without_a_transport_or_torch() -> None:
    code = (
        "import sys, motley.exchange.blobs\nprint([name for name in ('torch', 'nats') if "
        "name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
