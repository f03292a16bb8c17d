"""The index of a log, and single records examined by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import entry, group, identity, rollout, spread_crew
from motley.archive import UNKNOWN, Archive
from motley.archive.reading import FileSource
from motley.clock import Deadline, VirtualClock
from motley.config import config_text
from motley.dashboard import records
from motley.dashboard.records import (
    GROUP,
    OF_HUB,
    OTHER,
    TABLE,
    WEIGHTS,
    LogIndex,
    RecordName,
    RecordReader,
    read_id,
)
from motley.exchange import Entry, MemoryLog, cut_log
from motley.records import HUB, Charter, Roster, Table
from motley.spelling import Spelling

MARTIAN = Spelling((None, None, b"\xc3", b"\xa9", b" 12", None))


def roster(number: int, *peers: str, revoked: tuple[str, ...] = ()) -> Entry:
    keys = {peer: identity(peer).public for peer in peers}
    said = Roster(crew="crew", number=number, keys=keys, revoked=revoked)
    return entry(said, identity(HUB), counter=number)


def archive_of(path: Path, *entries: Entry) -> Archive:
    MemoryLog(path).append([(one.id, one.record) for one in entries])
    return Archive(path.parent, "crew", identity(HUB).public, FileSource(path))


def indexed(archive: Archive) -> tuple[LogIndex, RecordReader]:
    index = LogIndex(archive.source)
    while index.read_on():
        pass
    return index, RecordReader(archive, index)


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("small.3.0", RecordName("small", GROUP, 3, 0)),
        ("small.3.0.0123456789abcdef", RecordName("small", GROUP, 3, 0)),
        ("small.table", RecordName("small", TABLE)),
        ("small.table.0123456789abcdef", RecordName("small", TABLE)),
        ("small.weights.7", RecordName("small", WEIGHTS)),
        ("hub.charter", RecordName("hub", OF_HUB)),
        ("hub.3.0", RecordName("hub", OF_HUB)),
        ("noise", RecordName("noise", OTHER)),
        ("", RecordName("", OTHER)),
        ("a.-1.0", RecordName("a", OTHER)),
        ("a.1.٣", RecordName("a", OTHER)),
        ("a.1.0.b.c", RecordName("a", OTHER)),
        (f"a.{10**12}.0", RecordName("a", OTHER)),
    ],
)
def test_an_id_says_what_its_record_is(id: str, said: RecordName) -> None:
    assert read_id(id) == said


@given(st.text(max_size=30))
def test_any_id_has_a_place(id: str) -> None:
    said = read_id(id)
    assert said.sender == id.split(".")[0]
    assert -1 <= said.round < 2**31
    assert -1 <= said.slot < 2**31


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 3)),
        unique=True,
        max_size=40,
    ),
    st.sampled_from(["", "a", "d"]),
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(1, 9),
)
def test_groups_are_found_by_sender_and_round(
    tmp_path_factory: pytest.TempPathFactory,
    places: list[tuple[str, int, int]],
    sender: str,
    low: int,
    high: int,
    step: int,
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.bin"
    log = MemoryLog(path)
    log.append([("hub.charter", b"?")])
    log.append([(f"{name}.{round}.{slot}", b"x" * slot) for name, round, slot in places])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "STEP", step)
        index = LogIndex(FileSource(path))
        while index.read_on():
            pass
    expected = [
        position
        for position, (name, round, _) in enumerate(places, 2)
        if sender in ("", name) and low <= round + 1 <= high
    ]
    assert index.groups(sender, (low, high)).tolist() == expected
    assert index.groups().tolist() == [*range(2, len(places) + 2)]
    assert index.num_groups == len(places)
    for name, (count, num_bytes) in index.sizes().items():
        own = [slot for one, _, slot in places if one == name]
        assert (count, num_bytes) == (len(own), sum(own) + (name == HUB))
    for position, (name, round, slot) in enumerate(places, 2):
        assert index.place_of(position) == RecordName(name, GROUP, round, slot)
    assert index.place_of(0) is index.place_of(len(places) + 2) is None
    behind = index.behind(1)
    assert all(behind[name] == sum(one == name for one, _, _ in places) for name in behind)


def test_a_log_that_was_cut_is_indexed_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.bin"
    archive = archive_of(path, roster(0, "a"), entry(group(), identity("a")))
    index, reader = indexed(archive)
    assert reader.look(2)
    cut_log(path, 1)
    other = entry(group(round=4, rollouts=[rollout(reward=0.25)]), identity("a"))
    MemoryLog(path).append([(other.id, other.record)])
    while index.read_on():
        pass
    assert (len(index), index.cuts, index.place_of(2)) == (2, 1, RecordName("a", GROUP, 4, 0))
    seen = reader.look(2)
    assert seen
    assert (seen.id, seen.reward, seen.fault) == ("a.4.0", 0.25, "")


def test_single_records_are_examined_as_all_in_order_are(tmp_path: Path) -> None:
    a, b, evil = identity("a"), identity("b"), identity("evil")
    table = Table(crew="crew", peer="a", vocabulary="martian", ends=(1,), encoded=MARTIAN.encode())
    flipped = bytearray(entry(group("b", 5), b).record)
    flipped[5] ^= 1
    stranger = entry(group("c"), evil)
    archive = archive_of(
        tmp_path / "log.bin",
        entry(group("a"), a),  # before there is a roster
        roster(0, "a", "b"),
        entry(table, a),
        entry(group("a", 1, vocabulary="martian"), a),
        entry(group("b", 1), b),
        entry(group("b", 2), evil),
        Entry(0, "b.5.0", bytes(flipped)),
        Entry(0, "b.6.0", entry(group("b", 7), b).record),
        stranger,
        Entry(0, "a.8.0", b"?"),
        roster(1, "a", revoked=("b",)),
        entry(group("b", 3), b),
        entry(msgspec.structs.replace(table, vocabulary="other"), a)._replace(id="a.table.00"),
        Entry(0, "noise", b""),
        entry(group("a", 9), a),
    )
    _, reader = indexed(archive)
    whole = list(archive.records(with_tables=True))
    assert [reader.look(position) for position in range(15, 0, -1)] == whole[::-1]
    assert {seen.fault for seen in whole} == {
        "", "sender", "key", "signature", "subject", "schema", "revoked",
    }  # fmt: skip
    counted = {
        (sender, fault): count
        for sender, faults in reader.faults.items()
        for fault, count in faults.items()
    }
    expected: dict[tuple[str, str], int] = {}
    for seen in whole:
        if seen.fault:
            expected[seen.sender, seen.fault] = expected.get((seen.sender, seen.fault), 0) + 1
    assert counted == expected
    assert reader.look(0) is reader.look(99) is None


def test_single_records_are_held_to_the_charter_too(tmp_path: Path) -> None:
    config = spread_crew(tmp_path, rounds=2)
    charter = Charter(crew="spread", config=config_text(config), task="")
    said = Roster(crew="spread", number=0, keys={"full0": identity("full0").public})
    fields = {"crew": "spread", "sampling": config.sampling, "rollouts": [rollout()] * 4}
    many = [rollout((0,) * 2**18, logprob=0.0)] * 4
    groups = [
        group("full0", **fields),
        group("full0", 2, **fields),
        group("full0", 1, **fields | {"rollouts": many}),
        group("full0", 1, 1, **fields | {"rollouts": [rollout()] * 5}),
    ]
    archive = archive_of(
        tmp_path / "log.bin",
        entry(charter, identity(HUB)),
        entry(said, identity(HUB), 1),
        *(entry(made, identity("full0")) for made in groups),
    )
    archive = replace(archive, crew="spread")
    _, reader = indexed(archive)
    found = [reader.look(position) for position in range(6, 0, -1)][::-1]
    assert found == list(archive.records())
    assert [seen.fault for seen in found if seen] == [
        *("", "", ""),
        *("assignment", "inflated", "group_size"),
    ]
    assert reader.faults == {"full0": {"assignment": 1, "inflated": 1, "group_size": 1}}
    assert reader._kept_tokens < 1000


def test_looking_back_examines_every_record_once_and_the_newest_first(tmp_path: Path) -> None:
    sound = [entry(group(round=n), identity("a")) for n in range(6)]
    archive = archive_of(tmp_path / "log.bin", roster(0, "a"), *sound, Entry(0, "x.1.1", b"?"))
    _, reader = indexed(archive)
    clock = VirtualClock()
    looked: list[int] = []
    original = reader._examined

    def examined(position: int) -> object:
        clock.sleep_s(1)
        looked.append(position)
        return original(position)

    reader._examined = examined  # type: ignore[assignment, method-assign]
    assert reader.look_back(Deadline(clock, 2.5))
    assert looked == [8, 7, 6]
    while reader.look_back(Deadline(clock, 2.5)):
        pass
    assert looked == [8, 7, 6, 5, 4, 3, 2, 1]
    assert reader.faults == {UNKNOWN: {"schema": 1}}


def test_the_newest_sound_group_of_a_sender_speaks_for_it(tmp_path: Path) -> None:
    made = group(round=1)
    newer = msgspec.structs.replace(made, origin=msgspec.structs.replace(made.origin, version=7))
    archive = archive_of(
        tmp_path / "log.bin",
        roster(0, "a"),
        entry(group(), identity("a")),
        entry(newer, identity("a")),
        entry(group(round=2), identity("evil")),
    )
    _, reader = indexed(archive)
    newest = reader.newest("a")
    assert newest
    assert (newest.version, newest.model) == (7, "m")
    assert reader.newest("evil") is None


def test_what_is_kept_of_examined_records_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "KEPT_TOKENS", 400)
    sound = [entry(group(round=n), identity("a")) for n in range(20)]
    _, reader = indexed(archive_of(tmp_path / "log.bin", roster(0, "a"), *sound))
    for position in range(2, 22):
        assert reader.look(position)
    assert 1 < len(reader._kept) < 5


def test_names_and_tables_of_strangers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_NAMES", 3)
    log = MemoryLog(tmp_path / "log.bin")
    log.append([(f"n{n}.0.0", b"") for n in range(9)])
    log.append([(f"n0.table.{n}", b"") for n in range(50)])
    index = LogIndex(FileSource(tmp_path / "log.bin"))
    while index.read_on():
        pass
    assert index.names == ["n0", "n1", "n2"]
    assert len(index.telling) == records.MAX_TABLES
    assert len(index.groups()) == 9
    assert index.place_of(9) == RecordName(UNKNOWN, GROUP, 0, 0)
    assert index.groups(UNKNOWN).tolist() == index.groups().tolist()
    assert np.sum([count for count, _ in index.sizes().values()]) == 3


def test_positions_may_have_gaps(tmp_path: Path) -> None:
    """As those of a server's log have, where a record was sent twice."""
    archive = archive_of(tmp_path / "log.bin", roster(0, "a"), entry(group(), identity("a")))

    class Sparse(FileSource):
        def heads(self, after: int, limit: int = 1024):  # type: ignore[no-untyped-def]
            found = super().heads(after // 10, limit)
            return [head._replace(position=10 * head.position) for head in found]

        def read(self, after: int, limit: int = 1024) -> list[Entry]:
            found = super().read(after // 10, limit)
            return [one._replace(position=10 * one.position) for one in found]

    sparse = replace(archive, source=Sparse(tmp_path / "log.bin"))
    index, reader = indexed(sparse)
    assert index.groups().tolist() == [20]
    assert reader.look(15) is None
    seen = reader.look(20)
    assert seen
    assert seen.fault == ""
    while reader.look_back(Deadline(VirtualClock(), 1)):
        pass
