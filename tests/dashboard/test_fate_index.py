"""What learners made of groups, found by offsets, against all of it read at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.archive.rollouts import FateBook
from motley.clock import Deadline, VirtualClock
from motley.dashboard import fate_index
from motley.dashboard.fate_index import FateIndex, FateTotals
from motley.learning.fates import FateFile, StepFates

NOW = Deadline(VirtualClock(), 1)


def index_of(folder: Path) -> FateIndex:
    index = FateIndex(folder)
    index.read_on(NOW)
    return index


def write(folder: Path, steps: list[StepFates], peer: str = "") -> None:
    path = folder / "peers" / peer / "groups" if peer else folder / "groups"
    path.mkdir(parents=True, exist_ok=True)
    file = FateFile(path / "fates.jsonl")
    for step in steps:
        file.write(step)


@st.composite
def runs(draw: st.DrawFn) -> list[StepFates]:
    """Two learners that read a log of thirty groups, at their own pace and in their own order."""
    steps = []
    for peer in ("a", "b"):
        cursor, waiting = 0, []
        for round in range(1, draw(st.integers(1, 8)) + 1):
            ahead = draw(st.integers(0, 6))
            waiting += range(cursor + 1, min(30, cursor + ahead) + 1)
            cursor = min(30, cursor + ahead)
            taken = {n: draw(st.sampled_from(["llsf", "ssss", "wb", ""])) for n in waiting[::2]}
            gone = {n: draw(st.sampled_from(["stale", "refused: reward"])) for n in waiting[3::4]}
            gone = {n: why for n, why in gone.items() if n not in taken}
            waiting = [n for n in waiting if n not in taken and n not in gone]
            steps.append(
                StepFates(round=round, peer=peer, cursor=cursor, groups=taken, let_go=gone)
            )
    order = draw(st.permutations(range(len(steps))))
    key = {n: place for place, n in enumerate(order)}
    mixed = sorted(range(len(steps)), key=lambda n: (steps[n].round, key[n]))
    return [steps[n] for n in mixed]


@pytest.mark.slow
@given(runs(), st.booleans(), st.sampled_from([1, 150, 2**20]))
def test_every_fate_is_that_of_the_whole_book(
    tmp_path_factory: pytest.TempPathFactory, steps: list[StepFates], apart: bool, block: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    if apart:
        for peer in ("a", "b"):
            write(folder, [step for step in steps if step.peer == peer], peer)
    else:
        write(folder, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fate_index, "BLOCK_BYTES", block)
        index = index_of(folder)
    book = FateBook.read(folder)
    assert index.is_whole
    assert index.share == 1
    assert index.cursors == book.cursors
    for position in range(1, 33):
        for number in range(5):
            assert index.of(position, number) == book.of(position, number)
    totals = FateTotals(index, 4)
    totals.count_on(NOW)
    assert totals.is_whole
    expected: dict[tuple[str, str], int] = {}
    for position in range(1, 31):
        for peer in book.cursors:
            letters = book.taken.get(position, {}).get(peer)
            size = 4 if letters is None else len(letters)
            for number in range(size):
                word = book.of(position, number)[peer]
                if word not in ("waiting", "not read yet"):
                    expected[peer, word] = expected.get((peer, word), 0) + 1
    assert {key: int(column.values.sum()) for key, column in totals.counts.items()} == expected


def test_new_lines_are_found_and_torn_ones_wait(tmp_path: Path) -> None:
    write(tmp_path, [StepFates(round=1, peer="a", cursor=5, groups={3: "ll"})])
    index = index_of(tmp_path)
    path = tmp_path / "groups" / "fates.jsonl"
    with path.open("ab") as file:
        file.write(b'{"round":2,"peer":"a","cursor":9,')
    assert not index.read_on(NOW)
    assert index.of(6, 0) == {"a": "not read yet"}
    with path.open("ab") as file:
        file.write(b'"groups":{"6":"f"}}\nnonsense\n')
    assert index.read_on(NOW)
    assert index.of(6, 0) == {"a": "filtered"}
    assert not index.read_on(NOW)
    assert index.cuts == 0


def test_a_file_that_a_resumed_run_cut_is_read_anew(tmp_path: Path) -> None:
    steps = [StepFates(round=n, peer="a", cursor=n, groups={n: "l"}) for n in range(1, 9)]
    write(tmp_path, steps)
    index = index_of(tmp_path)
    totals = FateTotals(index, 4)
    totals.count_on(NOW)
    FateFile(tmp_path / "groups" / "fates.jsonl").cut("a", 5)
    later = [StepFates(round=n, peer="a", cursor=n, groups={n: "f"}) for n in range(6, 12)]
    write(tmp_path, later)
    assert index.read_on(NOW)
    assert index.cuts == 1
    assert [index.of(n, 0)["a"] for n in range(1, 13)] == [
        *["learned"] * 5, *["filtered"] * 6, "not read yet",
    ]  # fmt: skip
    assert totals.count_on(NOW)
    assert {fate: int(column.values.sum()) for fate, column in totals.of("a")} == {
        "learned": 5,
        "filtered": 6,
    }


def test_a_folder_without_fates_has_no_learners(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    assert (list(index.learners), index.of(3, 0), index.is_whole) == ([], {}, True)


def test_names_that_need_quoting_are_read_too(tmp_path: Path) -> None:
    write(tmp_path, [StepFates(round=1, peer='a"b', cursor=5, groups={3: "l"})])
    assert index_of(tmp_path).of(3, 0) == {'a"b': "learned"}


def test_looking_at_files_stops_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fate_index, "BLOCK_BYTES", 200)
    steps = [StepFates(round=n, peer="a", cursor=n, groups={n: "l"}) for n in range(1, 40)]
    write(tmp_path, steps)
    clock = VirtualClock()
    original = FateIndex._add_lines

    def slow(self: FateIndex, number: int, block: bytes) -> None:
        clock.sleep_s(1)
        original(self, number, block)

    monkeypatch.setattr(FateIndex, "_add_lines", slow)
    index = FateIndex(tmp_path)
    assert index.read_on(Deadline(clock, 2.5))
    assert clock.now_s() == 3
    assert 0 < index.share < 1
    while index.read_on(Deadline(clock, 2.5)):
        pass
    assert index.share == 1
    assert index.num_steps == 39
