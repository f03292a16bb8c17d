"""How much a peer may write, by the crew file alone."""

from __future__ import annotations

import pytest

from motley.clock import VirtualClock
from motley.config import CrewConfig, parse_config
from motley.distributed.quota import SPARE_TABLES, Quotas, Scales
from motley.exchange import MemoryLog
from motley.exchange.wire import MAX_RECORD_BYTES


def crew(*models: str) -> CrewConfig:
    peers = "".join(
        f'[[peer]]\nname = "p{number}"\nmodel = "{model}"\n' for number, model in enumerate(models)
    )
    return parse_config(
        '[crew]\nname = "crew"\ntask = "digits"\nrounds = 3\ngroup_size = 4\n'
        f'problems_per_round = 2\nobjective = "ftis"\n{peers}'
    )


PLAIN, MIXED = Quotas(crew("tiny:0.3m", "tiny:1m")), Quotas(crew("tiny:0.3m", "./qwen"))


@pytest.mark.parametrize("number", [0, 1])
def test_a_mixed_crew_has_room_for_everyones_table(number: int) -> None:
    plain, mixed = (
        crew("tiny:0.3m", "tiny:1m").peer[number],
        crew("tiny:0.3m", "./qwen").peer[number],
    )
    assert PLAIN.record_bytes(plain) == MIXED.record_bytes(mixed) < 2**15
    assert PLAIN.message_bytes(plain) == PLAIN.record_bytes(plain)
    assert MIXED.message_bytes(mixed) == MIXED.largest_bytes == MAX_RECORD_BYTES
    least = 2 * SPARE_TABLES * MAX_RECORD_BYTES
    assert least <= MIXED.room_bytes - PLAIN.room_bytes < least + 2**20


def test_a_record_as_large_as_a_table_counts_for_all_that_it_takes() -> None:
    """Else who may publish a table could fill the log with records as large."""
    (peer, _), log = crew("tiny:0.3m", "./qwen").peer, MemoryLog()
    scales = Scales(MIXED.sizes)
    log.append([("p0.table", bytes(MAX_RECORD_BYTES)), ("p0.0.0", b"x"), ("hub.charter", b"x")])
    assert scales.weigh(log, VirtualClock())
    size = MIXED.record_bytes(peer)
    assert scales.records["p0"] == 1 + -(-MAX_RECORD_BYTES // size)
    assert scales.records["hub"] == 1
    assert scales.records["p0"] < MIXED.records(peer)
    log.append([(f"p0.1.{number}", bytes(MAX_RECORD_BYTES)) for number in range(4)])
    scales.weigh(log, VirtualClock())
    assert scales.records["p0"] > MIXED.records(peer)


def test_what_stands_under_no_id_of_a_record_counts_for_who_wrote_it() -> None:
    scales, log = Scales(PLAIN.sizes), MemoryLog()
    log.append([("=p0.=41.0", b"x"), ("=p0.3.1", b"x"), ("p1.0.0", b"x")])
    scales.weigh(log, VirtualClock())
    assert scales.records == {"p0": 2, "p1": 1}
