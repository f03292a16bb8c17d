from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motley.config import parse_config
from motley.study import gpu_memory, processes, running
from motley.study import shared_gpu as module
from motley.study.arms import crews_of, parse_arm
from motley.study.processes import Job, Lost, Returned, in_processes
from motley.study.shared_gpu import Peak, Peaks, SharedGpu, shared_gpu

GIB = 1 << 30


class Gpu:
    """A GPU of which others, and the runs that go on, hold a part."""

    def __init__(self, free: float) -> None:
        self.free = free

    def __call__(self) -> int:
        return int(self.free * GIB)


def unmeasured() -> Any:
    return lambda: 0


@pytest.fixture
def peaks(tmp_path: Path) -> Peaks:
    return Peaks(tmp_path / "runs" / "memory.jsonl", "H200")


# One decision at a time


def test_nothing_begins_beside_an_unknown_job_until_it_had_a_round_without_growth(
    peaks: Peaks,
) -> None:
    gpu = Gpu(80)
    shared = SharedGpu(gpu, peaks, unmeasured)
    assert shared.fits("crew")
    shared.began("one", "crew")
    for held in (5, 12, 20):  # it loaded its models, and made two rounds
        gpu.free = 80 - held
        shared.told("one", held * GIB)
        assert not shared.fits("crew")
        assert not shared.fits("other")
    shared.told("one", 20 * GIB)
    assert shared.fits("crew")


def told(shared: SharedGpu, name: str, *held: int) -> None:
    for each in held:
        shared.told(name, each * GIB)


def test_a_job_that_ends_before_it_has_settled_is_known_from_then_on(peaks: Peaks) -> None:
    shared = SharedGpu(Gpu(80), peaks, unmeasured)
    shared.began("warm", "warm start")
    told(shared, "warm", 1, 2)
    assert not shared.fits("warm start")
    shared.ended("warm", 2 * GIB)
    shared.began("one", "warm start")
    assert shared.fits("warm start")


def test_a_job_that_had_nothing_left_to_do_shows_nothing(peaks: Peaks) -> None:
    """A warm start that was made before, or a run that another study made meanwhile."""
    shared = SharedGpu(Gpu(80), peaks, unmeasured)
    shared.began("cached", "warm start")
    shared.ended("cached", GIB)
    shared.began("at its end", "crew")
    told(shared, "at its end", 3)
    shared.ended("at its end", 3 * GIB)
    assert peaks.of("warm start") is peaks.of("crew") is None


def test_what_is_reserved_and_not_yet_taken_is_not_free(peaks: Peaks) -> None:
    peaks.saw("crew", 20 * GIB)
    shared, names = SharedGpu(Gpu(80), peaks, unmeasured), iter("abcdefgh")
    began = 0
    while shared.fits("crew"):
        shared.began(next(names), "crew")  # and has taken nothing yet
        began += 1
    assert began == 3  # three of 20, and a margin


def test_one_that_grows_reserves_more_for_all_of_its_class(peaks: Peaks) -> None:
    peaks.saw("crew", 12 * GIB)
    gpu = Gpu(80)
    shared = SharedGpu(gpu, peaks, unmeasured)
    for name in "ab":
        shared.began(name, "crew")
    assert shared.fits("crew")
    gpu.free = 80 - 30 - 12
    shared.told("a", 30 * GIB)
    assert not shared.fits("crew")  # 20 are left when b has 30, too


def test_an_unknown_job_begins_where_the_largest_beside_it_would_fit_once_more(
    peaks: Peaks,
) -> None:
    peaks.saw("crew", 30 * GIB)
    gpu = Gpu(80)
    shared = SharedGpu(gpu, peaks, unmeasured)
    shared.began("a", "crew")
    assert shared.fits("own")
    shared.began("b", "crew")
    assert not shared.fits("own")


def test_what_others_take_meanwhile_counts(peaks: Peaks) -> None:
    peaks.saw("crew", 20 * GIB)
    gpu = Gpu(80)
    shared = SharedGpu(gpu, peaks, unmeasured)
    shared.began("a", "crew")
    gpu.free = 60
    assert shared.fits("crew")
    gpu.free = 20
    assert not shared.fits("crew")
    shared.lost("a")
    assert shared.fits("crew")  # alone it has all there is


def test_runs_that_take_nothing_of_the_gpu_always_fit(peaks: Peaks) -> None:
    shared = SharedGpu(Gpu(80), peaks, unmeasured)
    shared.began("first", "simulated")
    told(shared, "first", 0, 0, 0)
    for name in "abcdefgh":
        assert shared.fits("simulated")
        shared.began(name, "simulated")


def test_a_job_that_failed_otherwise_shows_nothing_of_its_class(peaks: Peaks) -> None:
    shared = SharedGpu(Gpu(80), peaks, unmeasured)
    shared.began("wrong", "crew")
    told(shared, "wrong", 1, 1)
    shared.lost("wrong")
    assert peaks.of("crew") is None


# What is kept


def test_peaks_are_kept_for_a_restart_by_class_and_gpu(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "memory.jsonl"
    here = Peaks(path, "H200")
    for held in (20, 30, 25):
        here.saw("crew", held * GIB)
    with path.open("ab") as file:
        file.write(b'{"alike":"crew","gpu":"H2')  # the machine crashed
    assert Peaks(path, "H200").of("crew") == 30 * GIB
    assert Peaks(path, "H200").of("other") is None
    assert Peaks(path, "A100").of("crew") is None
    lines = path.read_bytes().splitlines()[:-1]
    assert [msgspec.json.decode(line, type=Peak).held_bytes // GIB for line in lines] == [20, 30]


def test_what_another_study_finds_meanwhile_is_known(tmp_path: Path) -> None:
    here, there = (Peaks(tmp_path / "memory.jsonl", "H200") for _ in range(2))
    assert here.of("crew") is None
    there.saw("crew", 5)
    assert here.of("crew") == 5


def test_growth_by_little_is_not_written_down_each_time(peaks: Peaks, tmp_path: Path) -> None:
    for held in range(1000, 1040):
        peaks.saw("crew", held)
    assert len((tmp_path / "runs" / "memory.jsonl").read_bytes().splitlines()) == 1


# Whole studies, simulated: each job says what it holds in each round


class Machine:
    """A GPU of 80 GiB, and processes that go on by one round at a time. Those who want what it has
    not, run out.
    """

    def __init__(self) -> None:
        self.total = 80.0
        self.at_work: list[Simulated] = []
        self.together: list[list[str]] = []  # who was at work, round by round
        self.ran_out: list[str] = []

    def free_bytes(self) -> int:
        return int((self.total - sum(one.held for one in self.at_work)) * GIB)

    def speaking(self, busy: Sequence[Simulated]) -> list[Simulated]:
        """Everybody's next round, in place of waiting for their pipes."""
        assert len(self.together) < 10_000
        self.together.append([one.name for one in busy])
        for one in busy:
            one.go_on()
        return [one for one in busy if one.has_word]

    def most(self, word: str) -> int:
        """Of those whose names have this word, how many were at work beside each other."""
        return max(sum(word in name for name in names) for names in self.together)


class Simulated:
    """In place of a process. Its call gives what it holds in each round, in GiB."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.process = machine, self
        self.held = self.peak = 0.0

    def is_alive(self) -> bool:
        return True

    def stop(self) -> None:
        self.held = 0.0

    def begin(self, job: Job[Any]) -> None:
        self.name, self.tells = job.name, job.tells
        self.rounds, self.peak, self.full = list(job.call()), 0.0, False
        self.machine.at_work.append(self)

    def go_on(self) -> None:
        wanted = self.rounds.pop(0)
        if (wanted - self.held) * GIB > self.machine.free_bytes():
            self.full = True
        else:
            self.held, self.peak = wanted, max(self.peak, wanted)

    @property
    def has_word(self) -> bool:
        return self.tells or self.full or not self.rounds

    def said(self) -> object:
        held = int(self.peak * GIB)
        if self.rounds and not self.full:
            return processes._Told(0.5, held)
        self.machine.at_work.remove(self)
        self.held = 0.0  # given back
        if self.full:
            self.machine.ran_out.append(self.name)
            return processes._Ended(processes._Failed("CUDA out of memory", True), held)
        return processes._Ended(self.name, held)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(processes, "_speaking", made.speaking)
    monkeypatch.setattr(processes, "_Process", lambda measure: Simulated(made))
    return made


def simulate(
    machine: Machine, peaks: Peaks, num: int, work: Sequence[Job[Any]]
) -> list[Returned[Any] | Lost]:
    shared = SharedGpu(machine.free_bytes, peaks, unmeasured)
    return list(in_processes(num, work, gpu=shared))


def crew(name: str, *rounds: float, needs: tuple[str, ...] = ()) -> Job[Any]:
    return Job(name, lambda: rounds, needs, tells=True, alike=name.split()[0])


def names_of(ends: Sequence[Returned[Any] | Lost]) -> set[str]:
    assert all(isinstance(end, Returned) for end in ends), ends
    return {end.name for end in ends}


STEADY = (10.0, *[30.0] * 20)  # models are loaded, then it trains


def test_a_small_warm_start_says_nothing_of_the_runs_after_it(
    machine: Machine, peaks: Peaks
) -> None:
    warm = crew("warm", 2.0, 2.0, 2.0)
    work = [warm, *(crew(f"crew {i}", *STEADY, needs=("warm",)) for i in range(4))]
    assert len(names_of(simulate(machine, peaks, 4, work))) == 5
    assert machine.ran_out == []
    assert machine.most("crew") == 2  # of 30 in 80
    # the first shows what a crew takes: it loads, trains a round, and trains one without growth
    assert machine.together[3:6] == [["crew 0"]] * 3


def test_small_runs_before_large_ones_do_not_vouch_for_them(machine: Machine, peaks: Peaks) -> None:
    work = [crew("own", *[8.0] * 30), *(crew(f"crew {i}", *STEADY) for i in range(4))]
    assert len(names_of(simulate(machine, peaks, 4, work))) == 5
    assert machine.ran_out == []
    assert machine.most("crew") == 2
    assert machine.most("") == 3  # beside the small one


def test_small_runs_after_a_large_one_have_their_own_size(machine: Machine, peaks: Peaks) -> None:
    work = [crew("crew", *[30.0] * 60), *(crew(f"own {i}", *[3.0] * 10) for i in range(20))]
    assert len(names_of(simulate(machine, peaks, 20, work))) == 21
    assert machine.ran_out == []
    assert machine.most("own") == 16  # of 3 in 50


def test_a_run_that_grows_in_its_second_round_is_foreseen(machine: Machine, peaks: Peaks) -> None:
    late = (12.0, 12.0, *[30.0] * 20)
    work = [crew(f"crew {i}", *late) for i in range(4)]
    assert len(names_of(simulate(machine, peaks, 4, work))) == 4
    assert machine.ran_out == []
    assert machine.most("crew") == 2


def test_those_that_ran_out_are_tried_again_beside_each_other(
    machine: Machine, peaks: Peaks, caplog: pytest.LogCaptureFixture
) -> None:
    later = (12.0, *[12.0] * 5, *[22.0] * 20)  # which nobody could foresee
    work = [crew(f"crew {i}", *later) for i in range(8)]
    with caplog.at_level(logging.WARNING):
        assert len(names_of(simulate(machine, peaks, 8, work))) == 8
    assert len(machine.ran_out) >= 2
    assert len(set(machine.ran_out)) == len(machine.ran_out)  # nobody twice
    assert "it is tried again when the GPU has more room" in caplog.text
    end = max(i for i, names in enumerate(machine.together) if set(machine.ran_out) & set(names))
    assert len(machine.together[end]) > 1  # the last of them is not alone


def test_who_runs_out_three_times_is_lost_and_costs_the_others_nothing(
    machine: Machine, peaks: Peaks
) -> None:
    work = [crew("huge", 50.0, 90.0), *(crew(f"own {i}", *[3.0] * 9) for i in range(3))]
    *others, last = simulate(machine, peaks, 4, work)
    assert len(names_of(others)) == 3
    assert last == Lost("huge", "CUDA out of memory (three times, the last time alone)")
    assert machine.ran_out == ["huge"] * 3
    assert machine.together[-1] == ["huge"]


def test_a_large_run_is_passed_only_so_often(machine: Machine, peaks: Peaks) -> None:
    peaks.saw("own", 10 * GIB)
    peaks.saw("crew", 60 * GIB)
    small = [crew(f"own {i}", *[10.0] * (3 + i % 4)) for i in range(60)]
    work = [small[0], crew("crew", *[60.0] * 9), *small[1:]]
    assert len(names_of(simulate(machine, peaks, 5, work))) == 61
    assert machine.ran_out == []
    first = next(i for i, names in enumerate(machine.together) if "crew" in names)
    before = {name for names in machine.together[:first] for name in names}
    assert 1 < len(before) <= 1 + 5


def test_a_restart_begins_all_that_fit_at_once(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    simulate(machine, Peaks(path, "H200"), 4, [crew("crew 0", *STEADY)])
    machine.together.clear()
    work = [crew(f"crew {i}", *STEADY) for i in (1, 2)]
    simulate(machine, Peaks(path, "H200"), 4, work)
    assert machine.together[0] == ["crew 1", "crew 2"]


# Which runs are alike

CREW = """
[crew]
name = "pair"
task = "digits"
rounds = 4
group_size = 4
problems_per_round = 4

[[peer]]
name = "ann"
model = "tiny:a"
warm = { kinds = ["sort"], steps = 2 }

[[peer]]
name = "bob"
model = "tiny:b"
"""


def test_seeds_and_objectives_take_the_same_and_other_peers_and_lengths_do_not() -> None:
    config = parse_config(CREW)

    def alike(arm: str, seed: int = 0) -> list[str]:
        return [
            gpu_memory.alike_run(one, measured=False)
            for one in crews_of(config, parse_arm(arm), seed)
        ]

    assert alike("ftis") == alike("ftis", 1) == alike("uplift/relative:g=10")
    ann, bob = alike("alone/own")
    assert len({ann, bob, *alike("alone"), *alike("ftis"), *alike("ftis:toward=reference")}) == 6
    assert alike("ftis:sampling.max_tokens=99") != alike("ftis")


def test_warm_starts_of_one_model_take_the_same_in_every_crew_and_seed() -> None:
    pair = parse_config(CREW)
    other = parse_config(CREW.replace("pair", "other").replace("ann", "eve"))
    more = parse_config(CREW.replace("steps = 2", "steps = 2, batch = 32"))
    jobs = running.warm_starts([(pair, 0), (pair, 1), (other, 0)])
    assert len(jobs) == 3
    assert len({job.alike for job in jobs}) == 1
    assert running.warm_starts([(more, 0)])[0].alike != jobs[0].alike


@pytest.mark.slow
def test_a_warm_start_tells_only_if_it_was_not_made_before() -> None:
    config = parse_config(CREW.replace("tiny:a", "tiny:0.3m").replace("tiny:b", "tiny:0.3m"))
    shares: list[float] = []
    running.warm(config, 4711, "ann", shares.append)
    assert len(shares) > 1
    made = len(shares)
    running.warm(config, 4711, "ann", shares.append)
    assert len(shares) == made


def test_without_a_gpu_a_process_holds_nothing_of_one() -> None:
    assert gpu_memory.measure()() == 0


# The driver


def test_a_machine_that_cannot_say_what_is_free_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "NVML", "libnothing-at-all.so.1")
    module._nvml.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert shared_gpu(tmp_path / "memory.jsonl", unmeasured) is None
    assert "free memory is not known" in caplog.text
    assert "--jobs alone limits runs" in caplog.text


def test_the_driver_is_asked_for_the_gpu_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Driver:
        def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:
            asked.append(index)
            return 0

        def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: object) -> int:
            asked.append(name)
            return 0

        def nvmlDeviceGetName(self, gpu: object, name: object, size: int) -> int:
            name.value = b"H200"  # type: ignore[attr-defined]
            return 0

        def nvmlDeviceGetUUID(self, gpu: object, name: object, size: int) -> int:
            name.value = b"GPU-1"  # type: ignore[attr-defined]
            return 0

        def nvmlDeviceGetMemoryInfo(self, gpu: object, memory: object) -> int:
            memory._obj.free = 7 * GIB  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(module, "_nvml", Driver)
    for visible in ("1,0", "GPU-abc"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        module._gpu.cache_clear()
        assert module.free_gpu_bytes() == 7 * GIB
        assert module.gpu_name() == "H200"
        assert module.gpu_id() == "GPU-1"
    module._gpu.cache_clear()
    assert asked == [1, b"GPU-abc"]
    assert ctypes.sizeof(module._Memory) == 24
