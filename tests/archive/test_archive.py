from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from nats.aio.client import Client
from pyarrow import parquet
from typer.testing import CliRunner

from fakes import PROBLEM, entry, group, identity, rollout, sealed_record, spread_crew, write_task
from hubs import local_place
from motley.archive import (
    UNKNOWN,
    Archive,
    Examiner,
    Seen,
    Tally,
    export,
    find_log,
    open_log,
    problems_of,
)
from motley.archive.reading import FileSource
from motley.cli import app
from motley.config import CrewConfig, config_text
from motley.distributed.enrolment import Membership
from motley.distributed.hub import Hub
from motley.exchange import Entry, MemoryLog, Outbox, Signer, encode
from motley.exchange.log import tagged
from motley.exchange.nats.server import Server
from motley.models.tiny import tiny_vocabulary
from motley.records import (
    HUB,
    NO_BASE,
    Backlog,
    Branch,
    Charter,
    Group,
    Roster,
    Sampling,
    Stamp,
    Table,
    Weights,
)
from motley.runs.local import LocalCrew
from motley.runs.metrics import read_metrics
from motley.spelling import Spelling
from motley.trust import Admission, RefusedRecord, Rules, nkey_of

GARBAGE = b"\x02" + bytes(64) + b"not a group"


MARTIAN = Spelling((None, None, b"\xc3", b"\xa9", b" 12", None))
TABLE = Table(crew="crew", peer="a", vocabulary="martian", ends=(1,), encoded=MARTIAN.encode())
WEIGHTS = Weights(
    crew="spread",
    peer="full0",
    version=0,
    precision="float32",
    base=NO_BASE,
    base_state="",
    state="00" * 32,
    blobs=(),
    frozen=(),
    backlog=Backlog(waiting=(), oldest_s=0.0),
    created_s=0.0,
)


def sound(peer: str, **fields: Any) -> Group:
    """A group by the rules of a spread crew."""
    most, four = Sampling(max_tokens=5), [rollout(reward=number / 4) for number in range(4)]
    return group(peer, **{"crew": "spread", "sampling": most, "rollouts": four} | fields)


def motley(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def as_json(*arguments: object) -> dict[str, Any]:
    return json.loads(motley("log", *arguments, "--json").stdout)


def error(*arguments: object) -> str:
    result = motley("log", *arguments, code=2)
    assert len(result.stderr.splitlines()) == 1
    return result.stderr.strip()


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# A crew in one process


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds, with a record that is none and one under another's name at its end."""
    folder = tmp_path_factory.mktemp("archive")
    write_task(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        crew = LocalCrew.start(spread_crew(folder, rounds=2), folder / "run")
        for _ in crew.rounds():
            pass
        elsewhere = f"full1.1.1.{'0' * 16}", crew._log.read(2)[0].record
        crew._log.append([("noise\x1b[31m", GARBAGE), elsewhere])
    return folder / "run"


def groups_of(folder: Path) -> list[Group]:
    with open_log(folder) as archive:
        return [seen.group for seen in archive.records() if seen.group and not seen.fault]


def test_the_table_says_who_sent_what(trained: Path) -> None:
    found = as_json(trained)
    senders = {row["sender"]: row for row in found["senders"]}
    assert list(senders) == ["full0", "full1", "hub", "unknown"]
    assert found["crew"] == "spread"
    log = MemoryLog.copy_of(trained / "groups" / "log.bin")
    for peer in ("full0", "full1"):
        row, made = senders[peer], [g for g in groups_of(trained) if g.origin.peer == peer]
        assert (row["groups"], row["rollouts"], row["rounds"]) == (4, 16, [0, 1])
        assert row["tokens"] == sum(len(r.tokens) for g in made for r in g.rollouts)
        sizes = {e.id: len(e.record) for e in log.read(0)}
        assert row["bytes_per_token"] == pytest.approx(
            sum(sizes[g.id] for g in made) / row["tokens"]
        )
        assert row["bytes"] == sum(size for id, size in sizes.items() if id.startswith(peer))
        rewards = [
            line.reward
            for line in read_metrics(trained)
            if line.peer == peer and line.reward is not None
        ]
        assert row["reward"] == pytest.approx(sum(rewards) / 2, abs=1e-6)
        assert 0 < row["age_s"] < 600
    assert [senders[name]["faults"] for name in senders] == [{}, {"subject": 1}, {}, {"corrupt": 1}]
    assert [
        senders["hub"][name] for name in ("records", "groups", "rounds", "reward", "age_s")
    ] == [2, 0, None, None, None]
    total = found["total"]
    assert (total["records"], total["groups"], total["faults"]) == (
        12,
        8,
        {"corrupt": 1, "subject": 1},
    )
    assert total["bytes"] == sum(len(e.record) for e in log.read(0))
    assert total["reward"] == pytest.approx(
        (senders["full0"]["reward"] + senders["full1"]["reward"]) / 2
    )


def test_the_table_is_read_by_people_too(trained: Path) -> None:
    lines = motley("log", trained).stdout.splitlines()
    assert lines[0].strip() == "log of crew spread"
    assert [line.split()[0] for line in lines[3:] if line.strip()] == [
        "full0",
        "full1",
        "hub",
        "unknown",
        "all",
    ]
    assert "corrupt 1, subject 1" in lines[-1]


def test_the_newest_records_are_listed_with_their_faults(trained: Path) -> None:
    rows = as_json(trained, "--list", 3)["records"]
    assert [row["position"] for row in rows] == [10, 11, 12]
    assert [row["kind"] for row in rows] == ["group", "", "group"]
    assert [row["fault"] for row in rows] == ["", "corrupt", "subject"]
    last = groups_of(trained)[-1]
    assert [rows[0][name] for name in ("id", "round", "problem", "rollouts")] == [
        last.id,
        last.round,
        last.problem,
        4,
    ]
    assert rows[0]["reward"] == pytest.approx(sum(r.reward for r in last.rollouts) / 4)
    assert rows[1]["tokens"] is None
    assert [row["kind"] for row in as_json(trained, "--list", 99)["records"]][:3] == [
        "charter",
        "roster",
        "group",
    ]


def test_what_a_stranger_wrote_does_not_reach_the_terminal(trained: Path) -> None:
    assert "\x1b" not in motley("log", trained, "--list", 2).stdout
    assert "noise?[31m" in motley("log", trained, "--list", 2).stdout


def test_one_peer_and_a_part_of_the_log_can_be_chosen(trained: Path) -> None:
    rows = as_json(trained, "--list", 2, "--peer", "full0")["records"]
    assert [row["id"] for row in rows] == ["full0.1.0", "full0.1.1"]
    found = as_json(trained, "--after", 6)
    assert (found["total"]["records"], found["total"]["groups"], found["total"]["rounds"]) == (
        6,
        4,
        [1, 1],
    )
    assert [row["sender"] for row in as_json(trained, "--peer", UNKNOWN)["senders"]] == [UNKNOWN]
    assert error(trained, "--peer", "ful0") == (
        "error: crew spread has no peer 'ful0'; it has full0, full1, hub, and senders that are "
        "unknown"
    )


def test_an_empty_part_is_no_mistake(trained: Path) -> None:
    assert as_json(trained, "--after", 99)["total"]["records"] == 0
    assert "all" in motley("log", trained, "--after", 99).stdout
    assert motley("log", trained, "--after", 99, "--list", 5).stdout == "nothing\n"


def test_reading_in_small_pages_shows_the_same(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_log(trained) as archive:
        whole = list(archive.records())
        read = archive.source.read
        monkeypatch.setattr(archive.source, "read", lambda after: read(after, 3), raising=False)
        assert list(archive.records()) == whole
        assert len(whole) == 12


def test_the_file_of_a_live_run_is_left_as_it_is(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "groups" / "log.bin"
    path.parent.mkdir()
    torn = (trained / "groups" / "log.bin").read_bytes() + b"\x09\x00\x00"
    path.write_bytes(torn)
    assert as_json(tmp_path)["total"]["records"] == 12
    assert path.read_bytes() == torn


@pytest.mark.slow
def test_listing_a_file_needs_no_torch(trained: Path) -> None:
    code = (
        "import sys\nfrom motley.cli import app\n"
        f"try: app(['log', {str(trained)!r}])\nexcept SystemExit as end: assert not "
        "end.code\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def heed_interrupts() -> None:
    """Whoever runs the tests may have been told to ignore Ctrl-C, and its children with it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_follow_prints_what_is_appended_later_until_it_is_interrupted(
    trained: Path, tmp_path: Path
) -> None:
    path = tmp_path / "groups" / "log.bin"
    path.parent.mkdir()
    path.write_bytes((trained / "groups" / "log.bin").read_bytes())
    command = [
        sys.executable,
        "-c",
        "from motley.cli import app; app()",
        "log",
        str(tmp_path),
        "--follow",
        "--json",
        "--after",
        "10",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    ) as following:
        assert following.stdout
        assert [json.loads(following.stdout.readline())["position"] for _ in range(2)] == [11, 12]
        MemoryLog(path).append([("later", GARBAGE)])
        line = json.loads(following.stdout.readline())
        following.send_signal(signal.SIGINT)
        assert following.stdout.read() == ""
    assert following.returncode == 0
    assert [line[name] for name in ("position", "id", "fault")] == [13, "later", "corrupt"]


def test_follow_begins_with_what_is_new(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "groups" / "log.bin"
    path.parent.mkdir()
    path.write_bytes((trained / "groups" / "log.bin").read_bytes())
    with open_log(tmp_path) as archive:
        following = archive.follow()
        MemoryLog(path).append([("later", GARBAGE)])
        with (path).open("ab") as file:
            file.write(b"\x03")  # torn, as when it is being written
        assert next(following).id == "later"


def test_only_one_way_to_see_a_log_at_a_time(trained: Path) -> None:
    assert "give one of them" in error(trained, "--list", 3, "--follow")


# What is wrong with a record


def examiner(*peers: str, revoked: tuple[str, ...] = ()) -> Examiner:
    hub = identity(HUB)
    found = Examiner("crew", hub.public)
    roster = Roster(
        crew="crew", number=0, keys={peer: identity(peer).public for peer in peers}, revoked=revoked
    )
    assert not found.look(entry(roster, hub)).fault
    return found


def fault_of(record: Entry, found: Examiner | None = None) -> str:
    seen = (found or examiner("a", "b")).look(record)
    assert seen.num_bytes == len(record.record)
    return seen.fault


def test_a_sound_record_has_no_fault() -> None:
    seen = examiner("a").look(entry(group(), identity("a")))
    assert (seen.fault, seen.sender, seen.kind, seen.num_tokens, seen.reward) == (
        "",
        "a",
        "group",
        6,
        0.5,
    )


def test_a_record_under_its_own_tag_is_sound_and_under_anothers_it_is_not() -> None:
    right, other = entry(group(), identity("a")), entry(group(slot=1), identity("a"))
    assert fault_of(right._replace(id=tagged("a.0.0", right.record))) == ""
    assert fault_of(right._replace(id=tagged("a.0.0", other.record))) == "subject"


def test_a_record_that_is_not_what_it_says_is_named() -> None:
    right = entry(group(), identity("a"))
    flipped = bytearray(right.record)
    flipped[5] ^= 1
    assert fault_of(right._replace(record=bytes(flipped))) == "signature"
    assert fault_of(right._replace(id="a.7.7")) == "subject"
    assert fault_of(entry(group(crew="other"), identity("a"))) == "crew"
    assert fault_of(entry(group(), identity("b"))) == "key"
    assert fault_of(entry(group(peer="c"), identity("c"))) == "sender"
    assert fault_of(right, examiner("b", revoked=("a",))) == "revoked"
    roster = Roster(crew="crew", number=1, keys={"b": identity("b").public})
    assert fault_of(entry(roster, identity("b"))) == "key"


def test_a_record_that_cannot_be_read_is_named() -> None:
    right = entry(group(), identity("a"))
    for record, reason in {
        b"": "schema",
        b"\x01" + right.record[1:]: "schema",
        right.record[:40]: "truncated",
        GARBAGE: "corrupt",
        right.record[:-3]: "corrupt",
        bytes(5 * 2**20): "size",
        sealed_record(b"", identity("a")): "truncated",
        sealed_record(b"\x05hello", identity("a")): "malformed",
    }.items():
        assert fault_of(right._replace(record=record)) == reason
    whole = encode(group(), Stamp(key=identity("a").public))
    assert fault_of(right._replace(record=sealed_record(whole[:-1], identity("a")))) == "truncated"


def test_numbers_that_fit_no_table_are_a_fault() -> None:
    assert fault_of(entry(group(round=2**64 - 1), identity("a"))) == "range"
    assert fault_of(entry(group(sampling=Sampling(max_tokens=2**63)), identity("a"))) == "range"


def charter_of(config: CrewConfig) -> Entry:
    return entry(Charter(crew=config.crew.name, config=config_text(config), task=""), identity(HUB))


def chartered(config: CrewConfig) -> Examiner:
    """After a charter and a roster that has both peers."""
    hub, names = identity(HUB), [peer.name for peer in config.peer]
    found, charter = Examiner(config.crew.name, hub.public), charter_of(config)
    keys = {name: identity(name).public for name in names}
    roster = entry(Roster(crew=config.crew.name, number=0, keys=keys), hub, 1, charter)
    assert [found.look(one).fault for one in (charter, roster)] == ["", ""]
    return found


def gate_of(config: CrewConfig, found: Examiner) -> Admission:
    """A peer's own judgement of the same crew, of tiny models."""
    own = tiny_vocabulary()
    rules = Rules.of(config, mixed=False)
    gate = Admission(
        rules.with_vocabulary(own.fingerprint, own.size, own.end_ids),
        identity(HUB).public,
        lambda peer, round: [PROBLEM] * config.problems_per_peer,
        None,
    )
    gate.keys = found.keys
    return gate


def with_one(**fields: Any) -> Group:
    """A group of which one rollout is at fault."""
    bad = msgspec.structs.replace(rollout(), **fields)
    return sound("full0", rollouts=[*[rollout()] * 3, bad])


def of_origin(**fields: Any) -> Group:
    made = sound("full0")
    return msgspec.structs.replace(made, origin=msgspec.structs.replace(made.origin, **fields))


LONG = (11, 12, 13, 14, 15, 1)  # of at most five
CONTINUED = Branch(round=0, slot=0, prefix=(11, 12))

BEYOND = {
    "more rollouts": (sound("full0", rollouts=[rollout()] * 5), "group_size"),
    "other sampling": (sound("full0", sampling=Sampling(max_tokens=6)), "sampling"),
    "a later round": (sound("full0", round=3), "assignment"),
    "a round of nobody": (sound("full0", round=-1), "assignment"),
    "a further slot": (sound("full0", slot=2), "assignment"),
    "a later version": (of_origin(version=4), "version"),
    "an unprintable model": (of_origin(model="m\x1b"), "model"),
    "a strange day": (msgspec.structs.replace(sound("full0"), created_s=1e18), "time"),
    "a branch in a crew of none": (
        msgspec.structs.replace(sound("full0"), branch=CONTINUED),
        "assignment",
    ),
    "a long rollout": (with_one(tokens=LONG, logprobs=(-1.0,) * 6), "length"),
    "an empty rollout": (with_one(tokens=(), logprobs=(), ending="length"), "length"),
    "an end that came too soon": (with_one(ending="length"), "ending"),
    "an impossible log-prob": (with_one(logprobs=(-60.0, -1.0, -1.0)), "logprob"),
    "a huge reward": (with_one(reward=2e6), "reward"),
    "a reward that is no number": (with_one(reward=float("nan")), "reward"),
    "weights of who does not learn alone": (WEIGHTS, "role"),
    "a table that nobody needs": (
        msgspec.structs.replace(TABLE, crew="spread", peer="full0"),
        "table",
    ),
    "nothing": (sound("full0"), ""),
}


@pytest.fixture
def config(tmp_path: Path) -> CrewConfig:
    return spread_crew(tmp_path)


@pytest.mark.parametrize("name", BEYOND)
def test_what_no_peer_takes_is_a_fault_by_admissions_word(name: str, config: CrewConfig) -> None:
    content, fault = BEYOND[name]
    record, found = entry(content, identity("full0")), chartered(config)
    assert fault_of(record, found) == fault
    verdict = gate_of(config, found).admit(record)
    assert (verdict.reason if isinstance(verdict, RefusedRecord) else "") == fault


def test_a_group_larger_than_the_crews_is_not_decoded(config: CrewConfig) -> None:
    many = rollout((0,) * 2**18, logprob=0.0)
    bomb = entry(sound("full0", rollouts=[many] * 4), identity("full0"))
    assert len(bomb.record) < 2**11
    seen, tally = chartered(config).look(bomb), Tally()
    tally.add(seen)
    assert (seen.fault, seen.content, seen.num_tokens) == ("inflated", None, 0)
    assert (tally.num_tokens, tally.num_groups, tally.faults) == (0, 0, {"inflated": 1})
    stranger = entry(sound("ghost", rollouts=[many] * 4), identity("ghost"))
    assert chartered(config).look(stranger).content is None


def test_who_has_a_table_is_held_to_it(tmp_path: Path) -> None:
    found = chartered(spread_crew(tmp_path, models=("tiny:0.3m", "tiny:0.3m/bytes")))
    author = identity("full0")
    table = entry(msgspec.structs.replace(TABLE, crew="spread", peer="full0"), author)
    assert fault_of(table, found) == ""
    for tokens, fault in {(4, 2, 1): "", (4, 6, 1): "token", (4, 1, 1): "ending"}.items():
        made = sound("full0", vocabulary="martian", rollouts=[rollout(tokens)] * 4)
        assert fault_of(entry(made, author, 1, table), found) == fault
    assert fault_of(entry(sound("full0"), author, 1, table), found) == "vocabulary"


@pytest.mark.parametrize("keeper", ["config.toml", "hub.json"])
def test_a_run_that_goes_on_has_as_many_rounds_as_its_folder_says(
    keeper: str, config: CrewConfig, tmp_path: Path
) -> None:
    hub, log = identity(HUB), MemoryLog(tmp_path / "log.bin")
    charter = charter_of(config)
    roster = Roster(crew="spread", number=0, keys={"full0": identity("full0").public})
    later = of_origin(version=4)
    later = msgspec.structs.replace(later, round=4)
    for one in (charter, entry(roster, hub, 1, charter), entry(later, identity("full0"))):
        log.append([(one.id, one.record)])
    source = FileSource(tmp_path / "log.bin")
    archive = Archive(tmp_path, "spread", hub.public, source)
    assert [seen.fault for seen in archive.records()] == ["", "", "assignment"]
    (tmp_path / keeper).write_text("no crew at all")
    assert [seen.fault for seen in archive.records()] == ["", "", "assignment"]
    longer = config_text(spread_crew(tmp_path, rounds=5))
    (tmp_path / keeper).unlink()
    kept = longer if keeper == "config.toml" else json.dumps({"crew": "spread", "config": longer})
    (tmp_path / keeper).write_text(kept)
    assert [seen.fault for seen in archive.records()] == ["", "", ""]


def test_the_roster_of_the_records_place_decides() -> None:
    found = examiner("a")
    before, after = entry(group(), identity("a")), entry(group(round=1), identity("a"), counter=1)
    assert not fault_of(before, found)
    found.look(
        entry(
            Roster(crew="crew", number=1, keys={"a": identity("new").public}),
            identity(HUB),
            counter=1,
        )
    )
    assert fault_of(after, found) == "key"
    assert not fault_of(entry(group(round=2), identity("new")), found)
    assert found.look(after._replace(id="z.0.0")).sender == UNKNOWN


def test_a_record_with_a_fault_counts_as_such_and_in_bytes_only() -> None:
    tally, found = Tally(), examiner("a")
    tally.add(found.look(entry(group(), identity("a"))))
    bad = entry(group(round=9, rollouts=[rollout(reward=1000.0)]), identity("b"))
    tally.add(found.look(bad))
    assert (
        tally.num_records,
        tally.num_groups,
        tally.num_tokens,
        tally.last_round,
        tally.reward,
    ) == (2, 1, 6, 0, 0.5)
    assert tally.faults == {"key": 1}
    assert tally.num_bytes == tally.group_bytes + len(bad.record)


# Export


@pytest.mark.slow
def test_json_lines_and_parquet_hold_the_same_and_what_the_log_holds(
    trained: Path, tmp_path: Path
) -> None:
    for name in ("log.jsonl", "log.parquet"):
        done = as_json(trained, "--export", tmp_path / name)
        assert done == {
            "file": str(tmp_path / name),
            "groups": 8,
            "left_out": {"corrupt": 1, "subject": 1},
            "note": "",
        }
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "log.parquet"}
    rows = json_lines(tmp_path / "log.jsonl")
    assert parquet.read_table(tmp_path / "log.parquet").to_pylist() == rows
    groups = groups_of(trained)
    assert [row["position"] for row in rows] == list(range(3, 11))
    for row, made in zip(rows, groups, strict=True):
        assert [row[name] for name in ("id", "crew", "peer", "problem")] == [
            made.id,
            made.crew,
            made.origin.peer,
            made.problem,
        ]
        assert msgspec.convert(row["sampling"], Sampling) == made.origin.sampling
        assert (row["version"], row["created_s"]) == (made.origin.version, made.created_s)
        assert row["prompt"] == f"{row['kind']} {row['answer']}="
        for exported, original in zip(row["rollouts"], made.rollouts, strict=True):
            assert tuple(exported["tokens"]) == original.tokens
            assert tuple(exported["logprobs"]) == original.logprobs
            assert (exported["reward"], exported["ending"]) == (original.reward, original.ending)
            assert exported["text"] == tiny_vocabulary().decode(original.tokens)
            spelled = [tiny_bytes(t) for t in original.tokens]
            assert exported["token_bytes"] == spelled
            assert exported["canonical"]
    of_first = [row for row in rows if row["peer"] == "full0"]
    assert [row["counter"] for row in of_first] == [0, 1, 2, 3]
    assert len({row["key"] for row in of_first}) == 1
    assert of_first[0]["key"].startswith("U")


def test_a_file_that_is_there_is_not_overwritten(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("years of work")
    assert "is there already and is not overwritten; choose another name" in error(
        trained, "--export", tmp_path / "log.jsonl"
    )
    assert (tmp_path / "log.jsonl").read_text() == "years of work"


def test_an_export_needs_a_name_that_says_the_format_and_a_folder(
    trained: Path, tmp_path: Path
) -> None:
    assert "the name ends in .csv; expected .jsonl or .parquet" in error(
        trained, "--export", tmp_path / "log.csv"
    )
    assert "the name ends in nothing" in error(trained, "--export", tmp_path / "log")
    assert "there is no folder" in error(trained, "--export", tmp_path / "none" / "log.jsonl")


def test_parquet_without_pyarrow_says_what_to_install(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'motley-rl[parquet]'" in error(
        trained, "--export", tmp_path / "log.parquet"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    def stopped() -> Iterator[Seen]:
        yield examiner("a").look(entry(group(), identity("a")))
        raise KeyboardInterrupt

    for name in ("log.jsonl", "log.parquet"):
        with pytest.raises(KeyboardInterrupt):
            export(stopped(), tmp_path / name, lambda made: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_is_not_known_or_no_number_is_null(tmp_path: Path) -> None:
    odd = rollout(tokens=(11, 2**34), reward=float("nan"), logprob=float("-inf"))
    found = examiner("a")
    records = [
        found.look(entry(group(rollouts=[odd, rollout()]), identity("a"))),
        found.look(entry(group(slot=1, vocabulary="martian"), identity("a"), counter=1)),
        found.look(entry(group(slot=2, rollouts=[]), identity("a"), counter=2)),
    ]
    for name in ("log.jsonl", "log.parquet"):
        assert export(records, tmp_path / name, lambda made: None).num_groups == 3
    first, second, _ = rows = json_lines(tmp_path / "log.jsonl")
    assert parquet.read_table(tmp_path / "log.parquet").to_pylist() == rows
    assert first["prompt"] is None
    assert first["rollouts"][0] == {
        "tokens": [11, 2**34],
        "logprobs": [None, None],
        "reward": None,
        "ending": "stop",
        "text": None,
        "token_bytes": [tiny_bytes(11), None],
        "canonical": True,
    }
    assert first["rollouts"][1]["text"] == tiny_vocabulary().decode((11, 12, 1))
    assert second["rollouts"][0]["text"] is None
    assert second["rollouts"][0]["token_bytes"] is None


def tiny_bytes(token: int) -> str | None:
    """What a token of tiny models stands for, in hexadecimal."""
    spelled = tiny_vocabulary().spelling.token_bytes[token]
    return None if spelled is None else spelled.hex()


def test_a_vocabulary_that_is_not_here_is_read_by_its_table_on_the_log(tmp_path: Path) -> None:
    found, author = examiner("a"), identity("a")
    table = entry(TABLE, author)
    whole, torn = rollout((4, 2, 3, 1)), rollout((2, 4, 1))
    other_cut = msgspec.structs.replace(rollout((5, 4, 1)), canonical=False)
    made = group(vocabulary="martian", rollouts=[whole, torn, other_cut])
    seen = [found.look(table), found.look(entry(made, author, 1, table))]
    assert (seen[0].kind, seen[0].fault, seen[1].spelling) == ("table", "", MARTIAN)
    for name in ("log.jsonl", "log.parquet"):
        assert export(seen, tmp_path / name, lambda made: None).num_groups == 1
    (row,) = rows = json_lines(tmp_path / "log.jsonl")
    assert parquet.read_table(tmp_path / "log.parquet").to_pylist() == rows
    told = [[r[name] for name in ("text", "token_bytes", "canonical")] for r in row["rollouts"]]
    assert told == [
        [" 12é", ["203132", "c3", "a9", None], True],
        ["\ufffd 12", ["c3", "203132", None], True],
        [None, [None, "203132", None], False],  # nobody here knows what a special token is called
    ]
    for rollout_row in row["rollouts"][:2]:
        spelled = b"".join(bytes.fromhex(one) for one in rollout_row["token_bytes"] if one)
        assert spelled.decode(errors="replace") == rollout_row["text"]


def test_tables_that_stand_before_what_is_exported_count(tmp_path: Path) -> None:
    log, author = MemoryLog(tmp_path / "log.bin"), identity("a")
    roster = Roster(crew="crew", number=0, keys={"a": author.public})
    table = entry(TABLE, author)
    made = entry(group(vocabulary="martian", rollouts=[rollout((4, 1))]), author, 1, table)
    for one in (entry(roster, identity(HUB)), table, made):
        log.append([(one.id, one.record)])
    source = FileSource(tmp_path / "log.bin")
    archive = Archive(tmp_path, "crew", identity(HUB).public, source)
    assert [seen.spelling for seen in archive.records(2)] == [None]
    assert [seen.spelling for seen in archive.records(2, with_tables=True)] == [MARTIAN]
    assert [seen.spelling for seen in archive.records()] == [None, None, MARTIAN]


def test_a_second_table_is_a_fault_and_a_bad_one_too() -> None:
    found, author = examiner("a"), identity("a")
    bad = entry(msgspec.structs.replace(TABLE, encoded=b"?"), author)
    assert found.look(bad).fault == "table"
    first = entry(TABLE, author, 1, bad)
    assert found.look(first).fault == ""
    second = entry(msgspec.structs.replace(TABLE, vocabulary="venusian"), author, 2, first)
    assert found.look(second).fault == "table"
    assert found.look(entry(TABLE, author, 3, second)).fault == ""  # the first again


def test_a_task_that_is_not_here_leaves_out_prompts_and_says_so(
    trained: Path, tmp_path: Path
) -> None:
    path = tmp_path / "groups" / "log.bin"
    path.parent.mkdir()
    path.write_bytes((trained / "groups" / "log.bin").read_bytes())
    config = (trained / "config.toml").read_text()
    problems = trained.parent / "problems.jsonl"
    (tmp_path / "config.toml").write_text(
        config.replace(str(problems), str(tmp_path / "gone.jsonl"))
    )
    found = as_json(tmp_path, "--export", tmp_path / "log.jsonl")
    assert "cannot read problems from" in found["note"]
    assert {row["prompt"] for row in json_lines(tmp_path / "log.jsonl")} == {None}
    other = problems.read_text().replace("sort 10=", "sort 0=")
    (tmp_path / "gone.jsonl").write_text(other)
    assert (
        "asks other problems here"
        in as_json(tmp_path, "--export", tmp_path / "again.jsonl")["note"]
    )


def test_a_group_whose_problem_was_not_assigned_has_no_prompt(trained: Path) -> None:
    with open_log(trained) as archive:
        problem_of = problems_of(archive)
    made = groups_of(trained)[0]
    found = problem_of(made)
    assert found
    assert found.id == made.problem
    for changes in ({"slot": 1}, {"slot": 99}, {"slot": -1}, {"round": 10**30}):
        assert problem_of(msgspec.structs.replace(made, **changes)) is None


# A log on a server


@pytest.fixture(scope="module", autouse=True)
def closed_pipes() -> Iterator[None]:
    """A stopped server's pipe is closed at once: left to the garbage collector, it would warn in
    some later test.
    """
    stop = Server.stop

    def stop_and_close(self: Server) -> None:
        stop(self)
        if self._child and self._child.stderr:
            self._child.stderr.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "stop", stop_and_close)
        yield


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, closed_pipes: None) -> Iterator[Hub]:
    """A hub whose two peers have sent three groups and some noise."""
    folder = tmp_path_factory.mktemp("hub")
    write_task(folder)
    hub = Hub.open(
        spread_crew(folder, task=f"file:{folder / 'problems.jsonl'}"),
        folder / "runs" / "spread-hub",
        local_place(),
    )
    hub.start()
    enrol(hub, "full0", "full1")
    send(hub, "full0", sound("full0"), sound("full0", slot=1))
    send(hub, "full1", sound("full1", rollouts=[rollout(reward=0.25)] * 4))
    hub.office.log.append(
        [
            ("full1.0.1", GARBAGE),
            ("full0.2.0", entry(sound("full0", round=2), identity("full1")).record),
        ]
    )
    yield hub
    hub.close()


def enrol(hub: Hub, *peers: str) -> None:
    hub.register.state.keys = {peer: identity(peer).public for peer in peers}
    hub.register.turn_page()
    hub.tick(0)  # tells everyone


def send(hub: Hub, peer: str, *groups: Group) -> None:
    outbox = Outbox(None, Signer(identity(peer).public, identity(peer).sign))
    outbox.put(groups)
    outbox.deliver(hub.office.log)
    outbox.close()


def peer_folder(hub: Hub, peer: str, folder: Path) -> Path:
    folder.mkdir(parents=True)
    membership = Membership(
        url=hub.register.state.place.url, crew="spread", peer=peer, hub=hub.register.identity.public
    )
    (folder / "member.json").write_bytes(msgspec.json.encode(membership))
    (folder / "peer.key").write_text(identity(peer).nkey_seed)
    return folder


def faults(archive: Archive) -> list[tuple[str, str]]:
    return [(seen.id, seen.fault) for seen in archive.records() if seen.sender != HUB]


EXPECTED = [
    ("full0.0.0", ""),
    ("full0.0.1", ""),
    ("full1.0.0", ""),
    ("full1.0.1", "corrupt"),
    ("full0.2.0", "key"),
]


def test_a_running_hub_is_read_and_left_running(hub: Hub) -> None:
    with open_log(hub.folder) as archive:
        assert faults(archive) == EXPECTED
    assert hub.server
    assert hub.server.alive()
    assert hub.office.log.read(0)


def test_a_peer_reads_with_its_own_key(hub: Hub, tmp_path: Path) -> None:
    folder = peer_folder(hub, "full0", tmp_path / "runs" / "spread-full0")
    with open_log(folder) as archive:
        assert faults(archive) == EXPECTED
        assert archive.source.last() == hub.office.log.read(0)[-1].position
    rows = as_json(folder, "--list", 9, "--peer", "full1")["records"]
    assert [(row["id"], row["fault"]) for row in rows] == [
        e for e in EXPECTED if e[0].startswith("full1")
    ]


def test_a_log_on_a_server_is_exported_with_the_charters_task(hub: Hub, tmp_path: Path) -> None:
    done = as_json(hub.folder, "--export", tmp_path / "log.parquet")
    assert (done["groups"], done["left_out"], done["note"]) == (3, {"corrupt": 1, "key": 1}, "")
    rows = parquet.read_table(tmp_path / "log.parquet").to_pylist()
    assert [row["key"] for row in rows] == [
        nkey_of(identity(peer).public) for peer in ("full0", "full0", "full1")
    ]
    assert {row["prompt"] for row in rows} == {None}  # nobody was given this problem


def test_follow_shows_what_comes_to_a_server(hub: Hub, tmp_path: Path) -> None:
    with open_log(peer_folder(hub, "full1", tmp_path / "peer")) as archive:
        following = archive.follow()
        hub.office.log.append([("full1.3.3", GARBAGE)])
        assert next(following).id == "full1.3.3"
        enrol(hub, "full0", "full1", "late")
        send(hub, "late", sound("late"))
        assert [
            (seen.id, seen.sender, seen.fault) for seen in (next(following), next(following))
        ] == [
            (f"hub.roster.{hub.register.state.number}", HUB, ""),
            ("late.0.0", "late", ""),
        ]


# a refused reconnect leaves its stream to the collector
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_follow_ends_with_a_word_when_the_hub_shuts_the_reader_out(
    hub: Hub, tmp_path: Path
) -> None:
    said: list[str] = []
    with open_log(peer_folder(hub, "full1", tmp_path / "peer")) as archive:
        following = archive.follow(say=said.append)
        enrol(hub, "full0")
        with pytest.raises(ValueError, match="does not know the key of full1 any more"):
            list(following)
    assert len(said) <= 1
    del following, archive
    gc.collect()


def test_a_record_dressed_as_the_servers_word_does_not_hide_the_end_of_the_log(hub: Hub) -> None:
    async def publish(client: Client) -> None:
        await client.request("motley.spread.log.full0.6.6", GARBAGE, 3, headers={"Status": "503"})

    hub.office.connection.call(publish)
    with open_log(hub.folder) as archive:
        assert [seen.id for seen in archive.records()][-1] == "full0.6.6"


@pytest.mark.slow
def test_a_stopped_hub_is_started_for_reading_and_stopped_again(tmp_path: Path) -> None:
    write_task(tmp_path)
    hub = Hub.open(
        spread_crew(tmp_path, task=f"file:{tmp_path / 'problems.jsonl'}"),
        tmp_path / "run" / "hub",
        local_place(),
    )
    assert "this hub has never run" in error(tmp_path / "run")
    hub.start()
    enrol(hub, "full0")
    send(hub, "full0", group("full0", crew="spread"))
    hub.close()
    assert hub.server
    assert not hub.server.alive()
    found = as_json(tmp_path / "run")
    assert [(row["sender"], row["records"]) for row in found["senders"]] == [
        ("full0", 1),
        ("hub", 3),
    ]
    assert not hub.server.alive()
    with open_log(tmp_path / "run"):
        assert (
            "a hub is already running"
            in motley(
                "hub",
                config_of(hub, tmp_path),
                "--out",
                hub.folder,
                "--port",
                hub.register.state.place.port,
                code=2,
            ).stderr
        )
    assert not hub.server.alive()


def config_of(hub: Hub, folder: Path) -> Path:
    (folder / "crew.toml").write_text(hub.register.state.config)
    return folder / "crew.toml"


def test_a_folder_without_its_key_is_refused_and_none_is_made(hub: Hub, tmp_path: Path) -> None:
    folder = peer_folder(hub, "full0", tmp_path / "peer")
    (folder / "peer.key").unlink()
    assert "peer.key is missing, and without it the log cannot be read; join again" in error(folder)
    assert not (folder / "peer.key").exists()
    (folder / "member.json").write_text("{")
    assert "member.json cannot be read" in error(folder)


# Names


def make(path: Path, content: str = "{}") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_the_name_of_a_crew_finds_its_hub_then_a_peer_then_the_newest_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("spread-002", "spread-010", "spread-two-011", "spread-old"):
        make(runs / name / "groups" / "log.bin", "")
    (runs / "spread-012").mkdir()
    assert find_log("spread", runs) == runs / "spread-010"
    make(runs / "spread-011" / "hub" / "hub.json")
    assert find_log("spread", runs) == runs / "spread-011"
    make(runs / "spread-two-anna" / "member.json", '{"crew": "spread-two"}')
    make(runs / "spread-torn" / "member.json", "{")
    assert find_log("spread", runs) == runs / "spread-011"
    make(runs / "spread-anna" / "member.json", '{"crew": "spread"}')
    assert find_log("spread", runs) == runs / "spread-anna"
    make(runs / "spread-hub" / "hub.json")
    assert find_log("spread", runs) == runs / "spread-hub"
    assert find_log(str(runs / "spread-002"), runs) == runs / "spread-002"


def test_a_target_without_a_log_is_answered_with_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for target in ("empty", "../else", "spread"):
        words = error(target)
        assert words.startswith(
            f"error: there is no log at {target}: it is no folder with hub.json, member.json, "
            "hub/hub.json or groups"
        )
        assert (
            f"runs/{target}-hub, runs/{target}-PEER or runs/{target}-NNN; give a run folder, or "
            "the name of a crew" in words
        )


def test_a_log_without_a_charter_is_shown_as_far_as_it_can_be(tmp_path: Path) -> None:
    (tmp_path / "groups").mkdir()
    records = [("a.0.0", entry(group(), identity("a")).record), ("a.0.1", b"\x01old")]
    MemoryLog(tmp_path / "groups" / "log.bin").append(records)
    found = as_json(tmp_path)
    assert [(row["sender"], row["faults"]) for row in found["senders"]] == [
        (UNKNOWN, {"crew": 1, "schema": 1})
    ]
    assert "the log has no charter" in as_json(tmp_path, "--export", tmp_path / "log.jsonl")["note"]
    (tmp_path / "groups" / "log.bin").write_bytes(b"")
    assert as_json(tmp_path)["total"]["records"] == 0
