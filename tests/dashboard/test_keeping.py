"""The log of a run while a page is open: a hub comes and goes, and the page keeps what it has."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dashboard.asking import eventually
from fakes import spread_crew
from hubs import AtWork, local_place
from motley.archive import is_stopped
from motley.config import CrewConfig
from motley.dashboard.keeping import LogCopy, LogKeeper
from motley.distributed.hub import Hub
from motley.distributed.register import Place, hub_login, read_state
from motley.exchange import Entry
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.log import NatsLog


def test_a_copy_gives_what_was_put_in_under_the_same_positions() -> None:
    entries = [Entry(2, "hub.charter", b"c"), Entry(3, "a.0.0", b""), Entry(9, "b.0.1", b"xyz")]
    with tempfile.TemporaryFile() as file:
        copy = LogCopy(file)
        assert (copy.last(), copy.read(0), copy.heads(0)) == (0, [], [])
        copy.add(entries[:1])
        copy.add(entries[1:])
        assert copy.read(0) == entries
        assert copy.read(3) == copy.read(8, 1) == entries[2:]
        assert copy.read(2, 1) == entries[1:2]
        assert [(h.position, h.id, h.num_bytes) for h in copy.heads(2)] == [
            (3, "a.0.0", 0),
            (9, "b.0.1", 3),
        ]
        assert copy.of_hub() == entries[:1]
        assert copy.last() == 9
        assert copy.read(9) == []


@contextmanager
def keeping(folder: Path) -> Iterator[LogKeeper]:
    with closing(LogKeeper(folder)) as keeper:
        yield keeper


def ids(keeper: LogKeeper) -> list[str]:
    return [entry.id for entry in keeper.archive.source.read(0)] if keeper.archive else []


@contextmanager
def running(config: CrewConfig, folder: Path, place: Place) -> Iterator[NatsLog]:
    """A hub at work, and its log to write to."""
    hub = Hub.open(config, folder, place)
    try:
        hub.start()
        login = hub_login(folder, read_state(folder))
        with AtWork(hub), closing(Connection(login)) as connection:
            yield NatsLog(connection, config.crew.name)
    finally:
        hub.close()


@pytest.mark.slow
def test_a_page_goes_on_when_the_hub_stops_and_never_keeps_it_from_starting(folder: Path) -> None:
    config, place, hub = spread_crew(folder), local_place(), folder / "crew-hub"
    with running(config, hub, place) as log:
        log.append([("a.0.0", b"one")])
        assert not is_stopped(hub)
    assert is_stopped(hub)
    with keeping(hub) as keeper:
        eventually(lambda: "a.0.0" in ids(keeper))
        eventually(lambda: keeper.note == "the hub is not running: this is what its log has")
        for number in (1, 2):
            with running(config, hub, place) as log:  # while the page is open
                log.append([(f"a.0.{number}", b"more")])
                eventually(lambda name=f"a.0.{number}": name in ids(keeper))
                eventually(lambda: keeper.note == "")
            assert "a.0.0" in ids(keeper)
        eventually(lambda: "the hub is not running" in keeper.note)
        assert ids(keeper)[-3:] == ["a.0.0", "a.0.1", "a.0.2"]
        assert keeper.archive
        assert keeper.archive.charter()


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    with keeping(tmp_path) as keeper:
        assert keeper.archive is None
        assert keeper.note == "there is no log yet: rollouts are shown when there is"
