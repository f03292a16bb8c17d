"""The log as the page shows it, against all of it read at once."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes import entry, group, identity, spread_crew, write_task
from motley.archive import (
    LoggedRollout,
    LogTexts,
    RolloutFilter,
    open_log,
    read_rollouts,
)
from motley.clock import Clock, RealClock, VirtualClock
from motley.config import CrewConfig
from motley.dashboard import fate_index, loading, log_view
from motley.dashboard.answers import GroupLine
from motley.dashboard.loading import Loading, NotReadyError
from motley.dashboard.log_view import EVERYTHING, GroupQuery, LogView
from motley.dashboard.rows import ObjectiveRow
from motley.exchange import MemoryLog, Outbox, Signer
from motley.exchange.log import tagged
from motley.learning.fates import read_fates
from motley.learning.traces import read_trace
from motley.runs.local import LocalCrew
from motley.spelling import Spelling

pytestmark = pytest.mark.slow

HALF = """
def half(prompts, completions, **columns):
    return [
        0.0 if int(prompt.rstrip("=")[-1]) % 2 == 0 else len(text) - 3.0
        for prompt, text in zip(prompts, completions)
    ]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two peers and four rounds, of which two were done again after a stop; at the end of the log
    stand records that nobody believes.
    """
    folder = tmp_path_factory.mktemp("view")
    write_task(folder)
    (folder / "half_of_view.py").write_text(HALF)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        config = spread_crew(
            folder, task="half_of_view:half", rounds=4, learning="checkpoint_every = 2\nquota = 1"
        )
        for lines in LocalCrew.start(config, folder / "run").rounds():
            if lines[0].round == 3:
                break
        for _ in LocalCrew.resume(folder / "run").rounds():
            pass
        log = MemoryLog(folder / "run" / "groups" / "log.bin")
        own = log.read(2)[0]
        flipped = bytearray(own.record)
        flipped[9] ^= 1
        forged = entry(group("full0", 3, crew="spread"), identity("evil"))
        tag = "0" * 16  # of no record
        log.append(
            [
                ("noise", b"?"),
                (f"full1.1.1.{tag}", own.record),
                (f"full0.2.0.{tag}", bytes(flipped)),
                (f"full0.2.1.{tag}", b"?"),
                (tagged(forged.id, forged.record), forged.record),
                ("ghost.1.1", entry(group("ghost", 1, 1), identity("ghost")).record),
            ]
        )
        yield folder / "run"


@contextmanager
def view_of(folder: Path, clock: Clock | None = None) -> Iterator[LogView]:
    """`clock`: without one time stands still, and every answer is whole, however busy a machine."""
    with open_log(folder) as archive:
        view = LogView(archive, clock or VirtualClock())
        while view.refresh(10) or view.indexed < 1:
            pass
        view._loading.thread.join()
        yield view


@pytest.fixture(scope="module")
def view(run: Path) -> Iterator[LogView]:
    with view_of(run) as opened:
        yield opened


def every_line(view: LogView, **query: Any) -> list[GroupLine]:
    """All pages of a question; none may have a group twice."""
    lines: list[GroupLine] = []
    after: int | None = 0
    while after is not None:
        page = view.groups(GroupQuery(after=after, **query))
        lines += page.groups
        after = page.next
    assert len({line.position for line in lines}) == len(lines)
    return lines


def sound(line: GroupLine) -> bool:
    return not line.fault


def test_every_group_is_told_as_by_who_reads_all(run: Path, view: LogView) -> None:
    rows = list(read_rollouts(run))
    lines = every_line(view, limit=7)
    assert len([line for line in lines if sound(line)]) == 16
    by_place = {(row.position, row.number): row for row in rows}
    for line in lines:
        for dot in line.rollouts:
            row = by_place.pop((line.position, dot.number))
            assert (dot.reward, dot.num_tokens, dot.ending, dot.fates) == (
                row.reward, row.num_tokens, row.ending, row.fates,
            )  # fmt: skip
            assert (line.sender, line.version, line.kind, line.prompt) == (
                row.sender, row.version, row.kind, row.prompt,
            )  # fmt: skip
            if sound(line):
                assert (line.round, line.slot) == (row.round, row.slot)
    assert by_place == {}


def test_what_nobody_believes_is_shown_with_its_fault(view: LogView) -> None:
    faults = {(line.position - 18, line.sender): line.fault for line in every_line(view)}
    assert {place: fault for place, fault in faults.items() if fault} == {
        (2, "full1"): "subject",
        (3, "full0"): "subject",
        (4, "full0"): "schema",
        (5, "full0"): "key",
        (6, "unknown"): "crew",
    }
    found = view.group(22)
    assert (found.fault, found.rollouts, found.version) == ("schema", [], -1)
    assert "does not know" in found.fault_words
    forged = view.group(23)
    assert {fate for one in forged.rollouts for fate in one.fates.values()} == {"refused: key"}


QUERIES: dict[str, dict[str, Any]] = {
    "all": {},
    "sender": {"sender": "full1"},
    "rounds": {"rounds": (2, 3)},
    "kind": {"kind": "sort"},
    "rewards": {"rewards": (-1, 0)},
    "text": {"text": "RT 1"},
    "truncated": {"fate": "truncated"},
    "fate": {"fate": "not selected"},
    "fate of one": {"fate": "silent", "learner": "full0"},
    "refused": {"fate": "refused"},
    "several": {"sender": "full0", "kind": "reverse", "rewards": (1, 9), "fate": "learned"},
    "nobody's": {"sender": "nobody"},
}


def matching(rows: list[LoggedRollout], query: dict[str, Any]) -> set[int]:
    wanted = RolloutFilter(
        peer=query.get("learner", ""),
        kind=query.get("kind", ""),
        rewards=query.get("rewards", EVERYTHING),
        grep=re.compile(query["text"], re.IGNORECASE) if "text" in query else None,
        reason=query.get("fate", ""),
    )
    low, high = query.get("rounds", EVERYTHING)
    return {
        row.position
        for row in rows
        if wanted.wants(row)
        and low <= row.round <= high
        and query.get("sender", row.sender) == row.sender
    }


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 500])
@pytest.mark.parametrize("name", QUERIES)
def test_pages_have_every_group_that_is_wanted_once(
    run: Path, view: LogView, name: str, limit: int, newest: bool
) -> None:
    query = QUERIES[name]
    lines = every_line(view, limit=limit, newest=newest, **query)
    positions = [line.position for line in lines if sound(line)]
    assert positions == sorted(positions, reverse=newest)
    rows = [row for row in read_rollouts(run) if row.position <= 18]  # the rest is not sound
    assert set(positions) == matching(rows, query)
    if name not in ("nobody's", "refused"):
        assert positions


class Passing(VirtualClock):
    """Every look at it takes a while."""

    def elapsed_s(self) -> float:
        self.sleep_s(0.04)
        return super().elapsed_s()


@pytest.mark.parametrize("name", QUERIES)
def test_a_page_that_would_take_too_long_ends_in_time_and_goes_on(
    run: Path, view: LogView, name: str
) -> None:
    whole = every_line(view, **QUERIES[name])
    with open_log(run) as archive:
        slow = LogView(archive, Passing())
        while slow.indexed < 1:
            slow.refresh(10)
        slow._loading.thread.join()
        first = slow.groups(GroupQuery(**QUERIES[name]))
        assert first.looked_at <= log_view.ANSWER_S / 0.04 + 1
        assert every_line(slow, **QUERIES[name]) == whole


def test_a_group_is_shown_whole(run: Path, view: LogView) -> None:
    rows = {(row.position, row.number): row for row in read_rollouts(run)}
    for line in filter(sound, every_line(view)):
        shown = view.group(line.position)
        for one in shown.rollouts:
            row = rows[line.position, one.number]
            assert (one.completion, one.reward, one.fates) == (
                row.completion, row.reward, row.fates,
            )  # fmt: skip
            spelled = one.tokens[:-1] if one.ending == "stop" else one.tokens
            assert "".join(spelled) == one.completion
            assert len(one.tokens) == len(one.logprobs) == row.num_tokens
        assert (shown.prompt, shown.answer, shown.kind, shown.round) == (
            row.prompt, row.answer, row.kind, row.round,
        )  # fmt: skip
    positions = [line.position for line in every_line(view)]
    for before, at, after in zip(
        [None, *positions], positions, [*positions[1:], None], strict=False
    ):
        shown = view.group(at)
        assert (shown.before, shown.after) == (before, after)


def test_tokens_have_the_traces_of_every_step_that_took_them(run: Path, view: LogView) -> None:
    scored = Counter(
        (step.peer, position, number)
        for step in read_fates(run / "groups" / "fates.jsonl")
        for position, letters in step.groups.items()
        for number, letter in enumerate(letters)
        if letter in "lfw"
    )
    assert scored
    for line in filter(sound, every_line(view)):
        for one in view.group(line.position).rollouts:
            for trace in one.traces:
                kept = read_trace(run, trace.learner, trace.round)
                assert kept
                place = (line.position, one.number)
                (own,) = (r for r in kept.rollouts if (r.position, r.number) == place)
                assert trace.tokens == one.tokens
                assert trace.kept == own.kept
                assert trace.log_ratio == pytest.approx(own.log_ratio.tolist(), rel=1e-4)
                assert trace.push == pytest.approx(own.push.tolist(), rel=1e-4)
                assert len(trace.weight) == len(trace.entropy) == len(one.tokens)
                del scored[trace.learner, line.position, one.number]
    assert not scored
    alone = view.group(3, learner="full1")
    assert {t.learner for one in alone.rollouts for t in one.traces} <= {"full1"}


def test_traces_that_are_too_large_together_are_said_to_be_left_out(
    view: LogView, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [view.group(line.position) for line in every_line(view) if sound(line)]
    (whole, *_) = (
        shown
        for shown in groups
        if {t.learner for one in shown.rollouts for t in one.traces} == {"full0", "full1"}
    )
    assert whole.left_out == []
    monkeypatch.setattr("motley.dashboard.group_texts.MAX_TRACED", 1)
    less = view.group(whole.position)
    assert less.left_out
    assert sum(len(one.traces) for one in less.rollouts) == 1  # one is always shown


def test_what_is_not_there_is_a_sentence(view: LogView) -> None:
    for position in (0, 1, 19, 10**9, -3):
        with pytest.raises(ValueError, match=f"there is no group at position {position} of"):
            view.group(position)
    with pytest.raises(ValueError, match="has 4 rollouts, and no number 4"):
        view.formula(3, 4, "full0", 0)
    with pytest.raises(ValueError, match="and no number 99; choose one from 0 on"):
        view.formula(3, 0, "full0", 99)
    for ask in (view.discarded, view.histograms, lambda name: view.formula(3, 0, name, 0)):
        with pytest.raises(ValueError, match="'nobody' learns nothing in this run; choose one of"):
            ask("nobody")
    with pytest.raises(ValueError, match="does not say what 'nobody' learned from"):
        view.groups(GroupQuery(learner="nobody"))


def test_every_token_has_a_formula(view: LogView) -> None:
    fates = set()
    for line in every_line(view):
        for one in view.group(line.position).rollouts:
            for learner, fate in one.fates.items():
                told = view.formula(line.position, one.number, learner, 0)
                assert told.objective == "ftis"
                assert told.verdict
                fates.add(fate)
    assert {"learned", "silent group", "not selected", "refused: key"} <= fates


def test_what_was_not_learned_from_sums_to_what_rollouts_say(run: Path, view: LogView) -> None:
    rows = [row for row in read_rollouts(run) if row.position <= 18]
    for learner in ("full0", "full1", ""):
        told = view.discarded(learner, 2)
        names = [learner] if learner else ["full0", "full1"]
        expected = Counter(row.fates[name] for row in rows for name in names)
        assert {one.reason: one.count for one in told.reasons} == expected
        assert told.total == sum(expected.values())
        assert all(one.words for one in told.reasons)
        for one in told.reasons:
            assert sum(value or 0 for _, value in one.points) == one.count
            assert [round for round, _ in one.points] == [1.0, 3.0]


def test_histograms_count_every_traced_token(run: Path, view: LogView) -> None:
    told = view.histograms().histograms
    assert {(one.sender, one.learner) for one in told} == {
        (sender, learner) for sender in ("full0", "full1") for learner in ("full0", "full1")
    }
    for one in told:
        tokens = sum(
            len(rollout.push)
            for round in (1, 2, 3, 4)
            if (step := read_trace(run, one.learner, round))
            for rollout in step.rollouts
            if rollout.sender == one.sender
        )
        assert sum(one.before) == sum(one.after) + one.zero == one.num_tokens == tokens
        assert len(one.edges) == len(one.before) + 1 == 61
        if one.sender == one.learner:
            middle = one.before[29] + one.before[30]
            assert middle == one.num_tokens  # own ratios are 1
    late = view.histograms("full0", "full1", (3, 4)).histograms
    assert [(one.sender, one.rounds, one.left) for one in late] == [("full1", (3, 4), 0)]


def test_a_histogram_says_which_rounds_it_has_not_counted(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_view, "ANSWER_S", 0.0)
    with view_of(run, RealClock()) as opened:
        (one,) = opened.histograms("full0", "full0").histograms
    newest = read_trace(run, "full0", 4)
    assert newest
    tokens = sum(len(each.push) for each in newest.rollouts if each.sender == "full0")
    assert (one.rounds, one.left, one.num_tokens) == ((4, 4), 3, tokens)


def test_the_wire_is_told_by_sender(run: Path, view: LogView) -> None:
    told = {one.sender: one for one in view.speed().wires}
    records = {
        entry.id: len(entry.record)
        for entry in MemoryLog(run / "groups" / "log.bin").read(0)
        if entry.id.startswith("full0.")
    }
    assert told["full0"].num_bytes == sum(records.values())
    assert told["full0"].groups == len(records)
    assert told["full1"].lag == {"full0": 1, "full1": 1}  # what was forged since
    assert told["full1"].bytes_per_token
    assert 1 < told["full1"].bytes_per_token < 100


def test_faults_are_counted_whoever_looked(run: Path) -> None:
    with view_of(run) as opened:
        assert opened.faults() == {
            "unknown": {"schema": 1, "crew": 1},
            "full1": {"subject": 1},
            "full0": {"subject": 1, "schema": 1, "key": 1},
        }
        newest = opened.newest()
        assert {name: one.version for name, one in newest.items()} == {"full0": 3, "full1": 3}


def copied(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints", "traces"))
    return folder


def test_a_live_run_is_followed_and_one_that_is_cut_begun_anew(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "live")
    log, fates = folder / "groups" / "log.bin", folder / "groups" / "fates.jsonl"
    whole, steps = log.read_bytes(), fates.read_bytes().splitlines(keepends=True)
    records = MemoryLog(log).read(0)
    size = lambda count: sum(8 + len(e.id.encode()) + len(e.record) for e in records[:count])
    log.write_bytes(whole[: size(10)])
    fates.write_bytes(b"".join(steps[:2]))
    with view_of(folder) as opened:
        assert len(every_line(opened)) == 8
        assert not opened.refresh()
        with log.open("ab") as file:
            file.write(whole[size(10) : size(14) + 5])  # and a part of one more
        with fates.open("ab") as file:
            file.write(b"".join(steps[2:6]))
        assert opened.refresh()
        lines = every_line(opened)
        assert len(lines) == 12
        assert lines[-1].rollouts[0].fates["full0"] not in ("waiting", "not read yet")
        log.write_bytes(whole[: size(6)])
        fates.write_bytes(b"".join(steps[:2]))
        assert opened.refresh()
        assert len(every_line(opened)) == 4
        assert opened.discarded().total == 2 * 16


def test_a_run_without_fates_or_traces_says_so(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "old")
    (folder / "groups" / "fates.jsonl").unlink()
    with view_of(folder) as opened:
        assert "fates.jsonl is not there" in opened.notes[0]
        shown = opened.group(3)
        assert shown.rollouts[0].fates == {"full0": "not recorded", "full1": "not recorded"}
        assert shown.rollouts[0].traces == []
        assert "not recorded" in opened.formula(3, 0, "full0", 0).verdict
        assert opened.histograms().histograms == []
        assert opened.discarded().reasons == []


def test_a_task_that_is_elsewhere_leaves_out_prompts_and_says_so(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "moved")
    config = folder / "config.toml"
    gone = config.read_text().replace("problems.jsonl", "gone.jsonl")
    config.write_text(gone)
    with view_of(folder) as opened:
        assert "the task cannot be loaded" in opened.notes[0]
        line = every_line(opened)[0]
        assert (line.prompt, line.kind) == (None, None)
        assert opened.group(3).rollouts[0].completion


def test_while_texts_are_being_loaded_pages_are_asked_for_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from threading import Event

    go, load = Event(), Loading._load

    def late(self: Loading) -> None:
        go.wait(60)
        load(self)

    monkeypatch.setattr(Loading, "_load", late)
    monkeypatch.setattr(log_view, "LOAD_S", 0.05)
    with open_log(run) as archive:
        opened = LogView(archive)
        opened.refresh(10)
        assert opened.newest().keys() == {"full0", "full1"}
        page = opened.groups(GroupQuery(after=4))
        assert (page.groups, page.next, page.looked_at, page.total) == ([], 4, 0, 21)
        with pytest.raises(NotReadyError, match="still being loaded; ask again"):
            opened.group(3)
        go.set()
        opened._loading.thread.join()
        assert every_line(opened)


def test_a_place_that_nobody_looked_at_yet_is_asked_for_again(run: Path) -> None:
    with open_log(run) as archive:
        opened = LogView(archive)
        with pytest.raises(NotReadyError, match="position 3 of the log is not looked at yet"):
            opened.group(3)
        while opened.refresh(10) or opened.indexed < 1:
            pass
        assert opened.group(3).position == 3
        opened._loading.thread.join()


def test_a_formula_is_not_told_without_the_parts_of_its_objective(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from threading import Event

    go, row_of = Event(), loading.row_of

    def late(config: CrewConfig) -> ObjectiveRow:
        go.wait(60)
        return row_of(config)

    monkeypatch.setattr(loading, "row_of", late)
    with open_log(run) as archive:
        opened = LogView(archive)
        opened.refresh(10)
        opened.group(3)
        monkeypatch.setattr(log_view, "LOAD_S", 0.05)
        with pytest.raises(NotReadyError, match="objective are still being loaded; ask again"):
            opened.formula(3, 0, "full0", 0)
        go.set()
        opened._loading.thread.join()
        assert opened.formula(3, 0, "full0", 0).about


def test_an_outbox_beside_the_run_is_counted(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "apart")
    place = folder / "peers" / "full1" / "groups"
    place.mkdir(parents=True)
    author = identity("full1")
    outbox = Outbox(place / "outbox.sqlite", Signer(author.public, author.sign))
    outbox.put([group("full1", n) for n in range(3)])
    with view_of(folder) as opened:
        told = {one.sender: one.outbox for one in opened.speed().wires}
        assert (told["full0"], told["full1"]) == (None, 3)
    outbox.close()


def test_tokens_are_shown_as_text_bytes_or_names() -> None:
    texts = LogTexts()
    spelling = Spelling((None, None, b"\xc3", b"\xa9", b" 12", "é".encode()))
    assert texts.pieces("martian", (4, 2, 3, 5, 1, 99, -1), spelling) == [
        " 12", "\\xc3", "\\xa9", "é", "<1>", "<99>", "<-1>",
    ]  # fmt: skip
    assert texts.pieces("martian", (4,)) == ["<4>"]


def test_a_group_that_waits_for_long_is_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fate_index, "LOOK_ON", 3)
    (tmp_path / "groups").mkdir()
    lines = [f'{{"round":{n},"peer":"a","cursor":9}}\n' for n in range(1, 9)]
    path = tmp_path / "groups" / "fates.jsonl"
    path.write_text("".join(lines[:3]) + '{"round":4,"peer":"a","cursor":9,"groups":{"2":"l"}}\n')
    from motley.clock import Deadline

    index = fate_index.FateIndex(tmp_path)
    index.read_on(Deadline(VirtualClock(), 1))
    assert index.of(2, 0) == {"a": "waiting"}  # as far as is looked
    monkeypatch.setattr(fate_index, "LOOK_ON", 4)
    assert index.of(2, 0) == {"a": "learned"}


def test_questions_of_several_threads_are_answered_while_a_log_is_read(run: Path) -> None:
    from threading import Thread

    with open_log(run) as archive:
        opened = LogView(archive)
        troubles: list[BaseException] = []

        def ask(question: Callable[[], object]) -> None:
            try:
                for _ in range(5):
                    question()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test must fail
                troubles.append(error)

        questions: list[Callable[[], object]] = [
            lambda: opened.refresh(0.01),
            lambda: every_line(opened),
            opened.newest,
            opened.speed,
            opened.discarded,
        ]
        threads = [Thread(target=ask, args=(question,)) for question in questions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert troubles == []
