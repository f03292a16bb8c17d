"""A learner in a process of its own that goes on, with a station that is made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from cli.test_cli import CREW
from motley.config import CrewConfig, parse_config
from motley.distributed.recovery import Recovery
from motley.exchange import MemoryLog
from motley.learning.journal import Journal
from motley.runs.building import build_peer
from motley.runs.folder import Run
from motley.runs.local import found_log, one_process_outbox
from motley.runs.metrics import read_metrics


@pytest.fixture
def config() -> CrewConfig:
    return parse_config(CREW.replace('objective = "ftis"', 'objective = "ftis"\npace = "async"'))


def recovery(config: CrewConfig, folder: Path) -> Recovery:
    run, log, said = Run(config, folder), MemoryLog(), []
    me = config.peer[0]
    hub = found_log(config, log, run.task)
    peer = build_peer(run, me, log, one_process_outbox(config, me.name), hub)
    joining = SimpleNamespace(patiently=lambda work: work())
    station = SimpleNamespace(run=run, folder=folder, say=said.append, joining=joining, blobs=None)
    return Recovery(station, peer, Journal(folder / "journal.jsonl"))  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_was_over_goes_on_where_there_are_more_rounds(
    config: CrewConfig, tmp_path: Path
) -> None:
    first = recovery(config, tmp_path)
    assert not first.start_or_restore()
    run = first.station.run
    run.write([run.last_line(first.peer)])  # it ends with fewer steps than rounds
    first.save(over=True)
    assert recovery(config, tmp_path).start_or_restore()
    assert [line.round for line in read_metrics(tmp_path)] == [0, 2]
    longer = msgspec.structs.replace(config, crew=msgspec.structs.replace(config.crew, rounds=5))
    assert not recovery(longer, tmp_path).start_or_restore()
    assert [line.round for line in read_metrics(tmp_path)] == [0]
