"""Ranks of torchrun find each other, and hear how rank 0 ended."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec
import pytest
import torch
from torch.distributed import HashStore

from motley.peers import torchrun
from motley.peers.parts import hear, tell
from motley.peers.torchrun import Launched, Ranks, RankStore, call, gather

ENVIRONMENT = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "one.example",
    "MASTER_PORT": "29500",
}


def rank(number: int, size: int = 3, local_rank: int | None = None) -> Launched:
    own = number if local_rank is None else local_rank
    return Launched(number, size, own, on_one_machine=True, host="127.0.0.1", attempt="0")


Ends = dict[int, tuple[Connection, Connection]]


@contextmanager
def together(
    *others: Launched, first: Launched | None = None, store: RankStore | None = None
) -> Iterator[tuple[Ranks, Ends]]:
    """Rank 0's side, and by rank the connections of the others."""
    shared, ends = store or HashStore(), Ends()
    callers = [
        threading.Thread(target=lambda one=one: ends.update({one.rank: call(one, shared)}))
        for one in others
    ]
    for caller in callers:
        caller.start()
    ranks = gather(first or rank(0, len(others) + 1), shared)
    for caller in callers:
        caller.join()
    try:
        yield ranks, ends
    finally:
        ranks.say_farewell("")
        for pair in ends.values():
            for connection in pair:
                connection.close()


def test_a_process_knows_what_torchrun_says_of_it() -> None:
    launched = Launched.of(ENVIRONMENT)
    assert launched == Launched(3, 8, 1, on_one_machine=False, host="one.example", attempt="0")
    here = Launched.of(ENVIRONMENT | {"LOCAL_WORLD_SIZE": "8"})
    assert here
    assert here.on_one_machine


@pytest.mark.parametrize("missing", ENVIRONMENT)
def test_without_all_of_its_words_torchrun_did_not_start_it(missing: str) -> None:
    assert Launched.of({name: v for name, v in ENVIRONMENT.items() if name != missing}) is None


def test_every_rank_gets_its_own_orders_and_answers() -> None:
    with together(rank(2), rank(1)) as (ranks, ends):
        for number, device in enumerate(ranks.devices, 1):
            tell(device.orders, f"for {number}")
            orders, _ = ends[number]
            assert hear(orders) == f"for {number}"
            tell(orders, f"of {number}")
            assert hear(device.orders) == f"of {number}"


def test_a_rank_that_has_gone_is_noticed() -> None:
    with together(rank(1), rank(2)) as (ranks, ends):
        assert [device.how_ended() for device in ranks.devices] == ["", ""]
        for connection in ends[2]:
            connection.close()
        assert [device.how_ended() for device in ranks.devices] == ["", "has gone"]


def test_who_does_not_know_the_key_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "HELLO_S", 0.05)
    strangers: list[Connection] = []

    class Besieged(HashStore):
        """Strangers call before anybody who has read the place."""

        def set(self, key: str, value: str) -> None:
            place = msgspec.json.decode(value)
            for said in (b"", b"\x80\x04.", b'{"key": "?", "rank": 1, "local_rank": 7, "line": '):
                made = socket.create_connection((place["host"], place["port"]))
                strangers.append(Connection(made.detach()))
                if said:
                    strangers[-1].send_bytes(said)
            made = socket.create_connection((place["host"], place["port"]))
            made.send(b"\0")  # of a message that never comes
            strangers.append(Connection(made.detach()))
            wrong = {"key": "é", "rank": 1, "local_rank": 7, "line": "orders"}
            made = socket.create_connection((place["host"], place["port"]))
            strangers.append(Connection(made.detach()))
            strangers[-1].send_bytes(msgspec.json.encode(wrong))
            super().set(key, value)

    with together(rank(1, size=2), store=Besieged()) as (ranks, ends):
        assert [device.local_rank for device in ranks.devices] == [1]
        tell(ranks.devices[0].orders, "for 1")
        assert hear(ends[1][0]) == "for 1"
    for stranger in strangers:
        stranger.close()


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "GATHERING_S", 0.05)
    with pytest.raises(
        ValueError, match=r"3 processes, and those of ranks \[1, 2\] have not called"
    ):
        gather(rank(0), HashStore())


@pytest.mark.parametrize("words", ["", "no such model"])
def test_the_others_hear_how_rank_0_ended(words: str) -> None:
    with together(rank(1), rank(2)) as (ranks, ends):
        ranks.say_farewell(words)
        assert [torchrun._farewell(life) for _, life in ends.values()] == [words, words]


def test_a_rank_0_that_is_killed_did_not_end_well() -> None:
    with together(rank(1), rank(2)) as (ranks, ends):
        for device in ranks.devices:
            device.life.close()
        assert all("was killed" in torchrun._farewell(life) for _, life in ends.values())


def test_who_fails_as_rank_0_is_killed_says_that_it_was() -> None:
    with together(rank(1)) as (ranks, ends):
        tell(ranks.devices[0].orders, "what fails")
        ranks.devices[0].life.close()
        with pytest.raises(ValueError, match="since rank 0 failed: it was killed"):
            torchrun.serve(rank(1), *ends[1])


def test_who_fails_before_rank_0_says_why() -> None:
    with together(rank(1)) as (ranks, ends):
        tell(ranks.devices[0].orders, "what fails")
        ranks.devices[0].life.send_bytes(b"its device 1 failed")
        with pytest.raises(ValueError, match="'str' object has no attribute 'plan'"):
            torchrun.serve(rank(1), *ends[1])


# Devices


def test_each_rank_has_the_gpu_of_its_local_rank() -> None:
    with together(rank(1, local_rank=1), rank(2, local_rank=0)) as (ranks, _):
        for first in ("cuda", "cuda:0"):
            places = ranks.places("ada", torch.device(first))
            assert [str(place) for place in places] == ["cuda:0", "cuda:1", "cuda:0"]
        assert ranks.places("ada", torch.device("cpu")) == (torch.device("cpu"),) * 3
        with pytest.raises(ValueError, match=r"device='cuda:1'.* LOCAL_RANK, cuda:0; use cuda"):
            ranks.places("ada", torch.device("cuda:1"))


def test_another_number_of_devices_is_refused() -> None:
    ranks = Ranks(rank(0, size=4), [])
    ranks.check("ada", 4)
    with pytest.raises(ValueError, match=r"devices=2, and torchrun started 4 processes; start 2, "):
        ranks.check("ada", 2)


def test_when_torchrun_starts_all_again_nobody_calls_where_rank_0_was() -> None:
    store = HashStore()
    with together(rank(1, size=2), store=store):
        pass
    again = [rank(number, size=2)._replace(attempt="1") for number in range(2)]
    with together(again[1], first=again[0], store=store) as (ranks, ends):
        tell(ranks.devices[0].orders, "again")
        assert hear(ends[1][0]) == "again"
