from __future__ import annotations

import pytest
import torch

from motley.benchmarks import timing
from motley.benchmarks.timing import Machine, cost, cost_per_token, measure_machine

CPU = torch.device("cpu")


class Clock:
    """Stands still but for what a job says it took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now_s)

    def spend(self, took_s: float) -> None:
        self.now_s += took_s


def test_a_cost_is_the_median_without_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    takes = iter([100.0, 3.0, 50.0, 1.0])
    assert cost(lambda: clock.spend(next(takes)), CPU, repeats=3).seconds == 3.0
    assert list(takes) == []


def test_a_tokens_cost_has_nothing_in_it_that_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert (
        cost_per_token(
            lambda count: clock.spend(7.0 + 0.25 * count), few=4, many=24, device=CPU, repeats=1
        ).seconds
        == 0.25
    )


def test_the_floor_is_whichever_takes_longer() -> None:
    machine = Machine(bytes_per_s=100.0, flops_per_s=10.0)
    assert machine.floor_s(num_bytes=200.0, flops=5.0) == 2.0
    assert machine.floor_s(num_bytes=200.0, flops=50.0) == 5.0


@pytest.mark.slow
def test_the_machine_is_measured_by_what_was_moved_and_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took_s = iter([4.0, 2.0, 3.0, 2.5, 5.0, 0.5, 0.25, 0.5, 0.5, 0.5])
    monkeypatch.setattr(timing, "seconds", lambda job, device: next(took_s))
    machine = measure_machine(CPU, torch.float32, copied_bytes=1000, size=10)
    assert (machine.bytes_per_s, machine.flops_per_s) == (2 * 1000 / 2.0, 2 * 10**3 / 0.25)
