"""An index of lines knows what reading the whole file tells, however the file grows or is cut."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.clock import VirtualClock
from motley.dashboard import lines as lines_module
from motley.dashboard.lines import HELDOUT, SUSPECTS, WARNINGS, LineIndex
from motley.learning.senders import SenderMetrics
from motley.runs.metrics import LearnerLine, SampleAnswer, SamplerLine, Sign
from motley.trust.standing import Suspicion

MARKS = {"heldout": HELDOUT, "suspects": SUSPECTS, "warnings": WARNINGS}
# words that a line has as keys, too
names = st.sampled_from(["small", "deep", "waiting", "refused", "heldout", "suspects", "warnings"])
texts = st.sampled_from(['"heldout":{', ',"refused":{', '"waiting":3,"refused":{', "\\", "é\n"])
sender = SenderMetrics(
    groups=1, reward=0.5, accuracy=0.5, tokens=5.0, truncated=0.0, age=0.0, silent_groups=0
)

learner_lines = st.builds(
    LearnerLine,
    round=st.integers(0, 10**6),
    peer=names,
    senders=st.none() | st.dictionaries(names, st.just(sender), max_size=3),
    waiting=st.none() | st.integers(0, 99),
    refused=st.none() | st.dictionaries(names, st.just({"reward": 1}), max_size=3),
    missing=st.none() | st.dictionaries(names, st.integers(1, 9), min_size=1, max_size=3),
    heldout=st.none() | st.dictionaries(names, st.floats(0, 1), max_size=3),
    suspects=st.none() | st.dictionaries(names, st.just(Suspicion(2.0)), max_size=2),
    warnings=st.none() | st.lists(st.builds(Sign, sign=texts, words=texts), max_size=2),
    samples=st.none()
    | st.lists(st.builds(SampleAnswer, texts, texts, texts, st.just(0.0)), max_size=2),
)
sampler_lines = st.builds(
    SamplerLine,
    round=st.integers(0, 99),
    peer=names,
    version=st.just(1),
    reward=st.just(0.5),
    sampled_tokens=st.just(9),
)
written = (learner_lines | sampler_lines).map(msgspec.json.encode)
# as somebody else may write them, and what is none
others = st.sampled_from(
    [
        b'{"peer": "small", "round": 3, "reward": 1}',
        b'{"round": 4,"peer": "a b"}',
        b'{"round":5,"peer":"small","loss":',
        b'{"round":-1,"peer":"small"}',
        b'{"round":99999999999999999999,"peer":"small"}',
        b"[]",
        b"\xff\xfe",
        b"",
        b"null",
    ]
)
contents = st.lists(written | others, max_size=30).map(
    lambda lines: b"".join(line + b"\n" for line in lines)
)


class Naive(msgspec.Struct):
    """What must be told of a line, read by another decoder."""

    start: int
    text: bytes
    round: int
    peer: str
    keys: set[str]


def naive(content: bytes) -> list[Naive]:
    found, start = [], 0
    for line in content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict) and 0 <= value.get("round", -1) < 2**40:
            found.append(Naive(start, line, value["round"], value["peer"], set(value)))
        start += len(line) + 1
    return found


def assert_agrees(index: LineIndex, content: bytes) -> None:
    expected, lines = naive(content), index.lines
    assert lines.start.tolist() == [line.start for line in expected]
    assert lines.round.tolist() == [line.round for line in expected]
    assert [lines.names[peer] for peer in lines.peer] == [line.peer for line in expected]
    texts = list(index.read(lines, range(len(lines)))) if expected else []
    assert texts == [line.text for line in expected]
    for line, marks in zip(expected, lines.marks.tolist(), strict=True):
        for key, mark in MARKS.items():
            assert marks & mark or key not in line.keys, (key, line)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(content=contents, piece=st.sampled_from([7, 64, 1000, 1 << 20]), data=st.data())
def test_an_index_knows_what_reading_the_whole_file_tells(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, piece: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("index") / "metrics.jsonl"
    first = data.draw(st.integers(0, len(content)))  # a line may be torn there
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "PIECE_BYTES", piece)
        patch.setattr(lines_module, "LINE_BYTES", 16)
        path.write_bytes(content[:first])
        index = LineIndex(path)
        index.refresh(60)
        assert_agrees(index, content[:first])
        with path.open("ab") as file:
            file.write(content[first:])
        index.refresh(60)
        assert index.indexed == 1
        assert_agrees(index, content)


@settings(deadline=None, max_examples=40)
@given(line=learner_lines)
def test_a_mark_is_only_on_lines_that_have_such_a_word(
    tmp_path_factory: pytest.TempPathFactory, line: LearnerLine
) -> None:
    """But for peers of that name: then somebody looks into a line in vain."""
    path = tmp_path_factory.mktemp("marks") / "metrics.jsonl"
    encoded = msgspec.json.encode(line)
    path.write_bytes(encoded + b"\n")
    index = LineIndex(path)
    index.refresh()
    value = json.loads(encoded)
    inner = {name for table in value.values() if isinstance(table, dict) for name in table}
    for key, mark in MARKS.items():
        if key not in value and key not in inner:
            assert not index.lines.marks[0] & mark


def rounds_of(count: int, words: str = "") -> bytes:
    lines = [LearnerLine(round=n, peer="small", without=[words]) for n in range(count)]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def test_a_file_that_was_cut_and_written_again_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(rounds_of(9))
    index = LineIndex(path)
    index.refresh()
    before = index.lines.times_cut
    path.write_bytes(rounds_of(9)[: len(rounds_of(4))])  # as a resumed run cuts it
    assert index.refresh()
    assert_agrees(index, rounds_of(4))
    path.write_bytes(rounds_of(9, words="again"))  # and goes on, further than it was
    assert index.refresh()
    assert_agrees(index, rounds_of(9, words="again"))
    assert index.lines.times_cut == before + 2
    path.unlink()
    assert index.refresh()
    assert len(index.lines) == 0
    assert not index.refresh()


def test_nothing_new_is_said_to_be_nothing_new(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    index = LineIndex(path)
    assert not index.refresh()
    path.write_bytes(rounds_of(3) + b'{"round":3,"pe')
    assert index.refresh()
    assert not index.refresh()
    assert len(index.lines) == 3


class SlowClock(VirtualClock):
    """A second passes whenever somebody looks at it."""

    def elapsed_s(self) -> float:
        self.sleep_s(1.0)
        return super().elapsed_s()


def test_a_short_look_is_spread_over_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "PIECE_BYTES", 100)
    content = rounds_of(4000)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    index = LineIndex(path, SlowClock())
    index.refresh(64)
    assert 0 < index.indexed < 0.1
    known = index.lines.round
    assert known[-1] == 3999  # the newest comes first
    gaps = known[1:] - known[:-1]
    assert gaps.max() <= 4000 / 30
    while index.refresh(64):
        pass
    assert index.indexed == 1
    assert_agrees(index, content)


def test_lines_that_come_while_old_ones_are_still_looked_for_are_known_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "PIECE_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(rounds_of(1000))
    index = LineIndex(path, SlowClock())
    index.refresh(5)
    path.write_bytes(rounds_of(1003))
    index.refresh(5)
    assert index.indexed < 1
    assert index.lines.round[-3:].tolist() == [1000, 1001, 1002]


def test_any_bytes_at_all_are_no_reason_to_fail(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "metrics.jsonl"
    for _ in range(20):
        path.write_bytes(rng.randbytes(3000) + rounds_of(2) + rng.randbytes(500))
        index = LineIndex(path)
        index.refresh()
        assert len(index.lines) in (1, 2)  # the first may stand behind garbage without an end


def test_lines_of_a_file_that_is_gone_read_as_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(rounds_of(3))
    index = LineIndex(path)
    index.refresh()
    path.unlink()
    assert list(index.read(index.lines, [0, 2])) == [b"", b""]


def test_a_sender_that_is_called_refused_hides_nothing(tmp_path: Path) -> None:
    """What a line has is looked for behind the key of that name."""
    line = LearnerLine(
        round=1,
        peer="small",
        senders={"deep": sender},
        waiting=0,
        refused={},
        heldout={"sort": 0.5},
        suspects={"deep": Suspicion(2.0), "refused": Suspicion(2.0)},
    )
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(msgspec.json.encode(line) + b"\n")
    index = LineIndex(path)
    index.refresh()
    assert index.lines.marks[0] == HELDOUT | SUSPECTS
