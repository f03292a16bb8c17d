from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import motley.study.sweep
from fakes import spread_crew
from motley.cli import app
from motley.config import CrewConfig
from motley.links import Network
from motley.study.arms import Arm, crews_of, parse_arms
from motley.study.processes import Job, Lost, LostRunsError
from motley.study.statistics import bounded_interval
from motley.study.sweep import (
    DIAGNOSTICS,
    Trial,
    cells,
    draw,
    glance,
    markdown,
    read_trials,
    run_sweep,
    table,
)
from sim.crews import crew_text, far_crew

PNG = b"\x89PNG\r\n\x1a\n"
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def trial(
    crew: str, seed: int, curve: dict[int, float], arm: str = "gepo", peer: str = "l", **fields: Any
) -> Trial:
    usual = {
        "hours": 1.0,
        "mean_age": 2.0,
        "max_age": 5,
        "dropped": 0,
        "grad_norm": 1.0,
        "diagnostics": dict.fromkeys(DIAGNOSTICS, 0.5),
    }
    return Trial(crew=crew, arm=arm, seed=seed, peer=peer, curve=curve, **usual | fields)


# Statistics

NEAR = [{0: 0.1, 20: 0.8, 40: 0.50}, {0: 0.1, 20: 0.4, 40: 0.60}, {0: 0.1, 20: 0.3, 40: 0.70}]
FAR = [{0: 0.2, 20: 0.6, 40: 0.47}, {0: 0.1, 20: 0.5, 40: 0.56}, {0: 0.1, 20: 0.6, 40: 0.65}]
TRIALS = [
    trial(crew, seed, curve)
    for crew, curves in (("near", NEAR), ("far", FAR))
    for seed, curve in enumerate(curves)
]


def test_last_best_and_loss_of_known_curves() -> None:
    near, far = table(TRIALS, ["near", "far"], ["gepo"])
    assert (near.arm, near.crew, far.crew) == ("gepo", "near", "far")
    assert near.last.mean == pytest.approx(0.6)
    assert near.last == bounded_interval([0.5, 0.6, 0.7], "accuracy")
    assert far.last.mean == pytest.approx(0.56)
    # One round for all seeds: 40 in the one crew, where the mean is 0.6, and 20 in the other; not
    # each seed's luckiest.
    assert (near.best_round, near.best.mean) == (40, pytest.approx(0.6))
    assert (far.best_round, far.best.mean) == (20, pytest.approx((0.6 + 0.5 + 0.6) / 3))


def test_the_loss_is_paired_by_seed() -> None:
    near, far = table(TRIALS, ["near", "far"], ["gepo"])
    assert (near.loss.mean, near.loss.half_width) == (0.0, 0.0)
    assert math.isnan(near.p_value)
    differences = [-0.03, -0.04, -0.05]
    assert far.loss.mean == pytest.approx(-0.04)
    assert far.loss.half_width == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-6)
    t = 0.04 / (0.01 / math.sqrt(3))
    # two degrees of freedom have this closed form
    assert far.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert far.loss.half_width < 0.3 * far.last.half_width  # what pairing is for
    assert sum(differences) / 3 == pytest.approx(far.loss.mean)


def test_pairs_are_found_by_seed_and_learner_in_whatever_order_trials_come() -> None:
    both = [
        trial(crew, seed, {0: 0.0, 40: start - far * loss}, peer=peer)
        for crew, far in (("far", 1), ("near", 0))
        for seed, peer, start, loss in (
            (1, "k", 0.9, 0.125),
            (0, "l", 0.5, 0.125),
            (1, "l", 0.3, 0.0625),
            (0, "k", 0.7, 0.0625),
        )
    ]
    near, far = table([*both[4:], *both[3::-1]], ["near", "far"], ["gepo"])
    assert far.loss.mean == pytest.approx(-0.09375)
    # learners of a run are one: each seed loses 0.09375, and two that agree leave no spread
    assert far.loss.half_width == pytest.approx(0.0, abs=1e-9)
    assert near.last.mean == pytest.approx(0.6)


def test_a_seed_that_only_one_crew_has_is_in_no_pair() -> None:
    near, far = table(
        [*TRIALS, trial("far", 7, {0: 0.0, 40: 0.0, 20: 0.0})], ["near", "far"], ["gepo"]
    )
    assert far.loss.mean == pytest.approx(-0.04)
    assert far.last.mean == pytest.approx((0.47 + 0.56 + 0.65) / 4)
    assert near.last.mean == pytest.approx(0.6)


def test_the_best_round_is_one_that_every_seed_has() -> None:
    short = [trial("near", 0, {0: 0.1, 20: 0.2, 30: 0.9}), trial("near", 1, {0: 0.1, 20: 0.3})]
    (line,) = table(short, ["near"], ["gepo"])
    assert (line.best_round, line.best.mean) == (20, pytest.approx(0.25))
    assert line.last.mean == pytest.approx(0.6)  # each run's own last


def test_where_all_lose_the_same_there_is_no_p() -> None:
    lines = table(
        [
            trial(crew, seed, {40: last})
            for crew, last in (("near", 0.5), ("far", 0.4))
            for seed in (0, 1)
        ],
        ["near", "far"],
        ["gepo"],
    )
    assert lines[1].loss.mean == pytest.approx(-0.1)
    assert math.isnan(lines[1].p_value)


@pytest.mark.filterwarnings("ignore:Precision loss")
def test_where_all_lose_the_same_but_for_rounding_there_is_no_p() -> None:
    lasts = [("near", 0, 0.9), ("near", 1, 0.4), ("far", 0, 0.8), ("far", 1, 0.3)]
    lines = table(
        [trial(crew, seed, {40: last}) for crew, seed, last in lasts], ["near", "far"], ["gepo"]
    )
    assert lines[1].loss.mean == pytest.approx(-0.1)
    assert math.isnan(lines[1].p_value)


def test_one_seed_has_no_interval() -> None:
    near, far = table(
        [trial("near", 0, {40: 0.5}), trial("far", 0, {40: 0.4})], ["near", "far"], ["gepo"]
    )
    assert far.loss.mean == pytest.approx(-0.1)
    assert math.isnan(far.loss.half_width)
    assert math.isnan(far.p_value)
    assert "0.500" in markdown([near, far])


def test_ages_and_diagnostics_are_means_over_runs_and_the_largest_of_all() -> None:
    runs = [
        trial(
            "near",
            0,
            {40: 0.5},
            mean_age=1.0,
            max_age=3,
            diagnostics={"kl_k3": 0.2, "clipped": 0.1},
        ),
        trial(
            "near",
            1,
            {40: 0.5},
            mean_age=2.0,
            max_age=9,
            diagnostics=dict.fromkeys(DIAGNOSTICS, 0.4),
        ),
    ]
    (line,) = table(runs, ["near"], ["gepo"])
    assert (line.mean_age, line.max_age) == (1.5, 9)
    assert line.diagnostics["kl_k3"] == pytest.approx(0.3)
    assert line.diagnostics["weight_var"] == pytest.approx(0.4)  # of the run that knows it


@pytest.mark.filterwarnings("error")
def test_what_no_run_knows_leaves_its_cell_empty() -> None:
    runs = [trial("near", 0, {40: 0.5}, diagnostics={"kl_k3": 0.2})]
    head, (row,) = cells(table(runs, ["near"], ["gepo"]))
    found = dict(zip(head, row, strict=True))
    assert (found["KL(q‖p)"], found["weight variance"]) == ("0.200", "")


def test_a_table_has_a_line_per_arm_and_crew_in_the_order_asked_for() -> None:
    both = [*TRIALS, *(msgspec.structs.replace(t, arm="grpo") for t in TRIALS)]
    lines = table(both, ["near", "far"], ["grpo", "gepo"])
    assert [(line.arm, line.crew) for line in lines] == [
        ("grpo", "near"),
        ("grpo", "far"),
        ("gepo", "near"),
        ("gepo", "far"),
    ]
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")] for row in markdown(lines).splitlines()
    ]
    assert rows[0][:4] == ["arm", "crew", "last", "best (round)"]
    assert rows[2][:6] == [
        "grpo",
        "near",
        "0.600 (0.348 to 0.809)",
        "0.600 (0.348 to 0.809) (40)",
        "",
        "",
    ]
    assert rows[3][:6] == [
        "grpo",
        "far",
        "0.560 (0.339 to 0.759)",
        "0.567 (0.422 to 0.701) (20)",
        "-0.040 ± 0.025",
        "0.020",
    ]
    assert rows[3][6] == "2.0, 5"
    assert len({len(row) for row in rows}) == 1


@pytest.mark.parametrize("kept", ["delay.jsonl", "delay_low_lr.jsonl"])
def test_the_page_on_delay_has_the_tables_that_its_outcomes_print(kept: str) -> None:
    page = (RESULTS / "delay.md").read_text(encoding="utf-8").splitlines()
    trials = read_trials(RESULTS / kept)
    crews = list(dict.fromkeys(one.crew for one in trials))
    rows = table(trials, crews, list(dict.fromkeys(one.arm for one in trials)))
    printed = [*glance(rows).splitlines(), *markdown(rows).splitlines()]
    assert [line for line in printed if line not in page] == []


def test_at_a_glance_there_is_a_row_per_arm_with_what_each_crew_cost() -> None:
    both = [*TRIALS, *(msgspec.structs.replace(t, arm="grpo", curve={40: 0.25}) for t in TRIALS)]
    text = glance(table(both, ["near", "far"], ["gepo", "grpo"]))
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()]
    assert rows[0] == ["arm", "near", "far"]
    assert rows[2:] == [
        ["gepo", "0.600 (0.348 to 0.809)", "0.560 (-0.040 ± 0.025)"],
        ["grpo", "0.250 ± 0.000", "0.250 (+0.000 ± 0.000)"],
    ]


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_drawing_is_a_picture(tmp_path: Path, seeds: int) -> None:
    lines = table([t for t in TRIALS if t.seed < seeds], ["near", "far"], ["gepo"])
    draw(lines, tmp_path / "sweep.png", "accuracy")
    content = (tmp_path / "sweep.png").read_bytes()
    assert content.startswith(PNG)
    assert len(content) > 5000


# Runs


class Here:
    """Calls everything in this process, in order; notes what."""

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()

    def __call__(
        self, num: int, first: Sequence[Job[Any]], then: Sequence[Job[Any]], kept: Any
    ) -> list[Lost]:
        for job in (*first, *then):
            self.called[job.call.func.__name__] += 1  # type: ignore[attr-defined]
        lost = []
        for job in then:  # what comes first are warm starts, which these crews have not
            try:
                kept(job.call())
            except ValueError as error:
                lost.append(Lost(job.name, str(error)))
        return lost


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    found = Here()
    monkeypatch.setattr(motley.study.sweep, "make_all", found)
    return found


@pytest.fixture
def folder(folder: Path, here: Here) -> Path:
    return folder


SETTINGS: dict[str, Any] = {"rounds": 2, "learning": "max_age = 99"}


def crews(folder: Path, *delays: float) -> list[CrewConfig]:
    return [
        far_crew(folder, name=f"delay-{number}", network=f"delay = {delay}", **SETTINGS)
        for number, delay in enumerate(delays)
    ]


def swept(
    configs: list[CrewConfig], arms: str, seeds: int, out: Path
) -> tuple[list[Trial], list[tuple[int, int]]]:
    progress: list[tuple[int, int]] = []
    found = run_sweep(
        configs,
        parse_arms(arms),
        range(seeds),
        out,
        1,
        lambda done, total: progress.append((done, total)),
    )
    return found, progress


@pytest.mark.slow
def test_a_sweep_runs_every_crew_arm_and_seed_and_goes_on_where_it_stopped(
    folder: Path, here: Here
) -> None:
    out = folder / "sweep"
    configs = crews(folder, 0.0, 0.1)
    first, progress = swept(configs, "gepo", 1, out)
    assert [(t.crew, t.arm, t.seed, t.peer) for t in first] == [
        ("delay-0", "gepo", 0, "l"),
        ("delay-1", "gepo", 0, "l"),
    ]
    assert (progress, here.called["_run"]) == ([(0, 2), (1, 2), (2, 2)], 2)
    near, far = first
    assert set(near.curve) == {0, 2}
    assert far.hours > near.hours + 0.2 / 3600
    assert (near.mean_age, near.max_age) <= (far.mean_age, far.max_age)
    assert near.diagnostics.keys() <= set(DIAGNOSTICS)
    assert near.diagnostics["kl_k3"] >= 0
    assert list((out / "runs").iterdir()) == []
    again, progress = swept(configs, "gepo", 1, out)
    assert (again, progress, here.called["_run"]) == (first, [(2, 2)], 2)
    more, progress = swept(configs, "ftis gepo", 1, out)
    assert (progress, here.called["_run"]) == ([(2, 4), (3, 4), (4, 4)], 4)
    assert more[:2] == first
    assert Counter((t.crew, t.arm) for t in more) == Counter(
        itertools.product(["delay-0", "delay-1"], ["ftis", "gepo"])
    )
    less, _ = swept(configs[:1], "ftis", 1, out)
    # what was asked for, of all that is there
    assert [(t.crew, t.arm) for t in less] == [("delay-0", "ftis")]
    assert read_trials(out / "trials.jsonl") == more


def _run(config: CrewConfig, arm: Arm, seed: int, folder: Path) -> list[Trial]:
    """What a run would give, without one."""
    of_arm = {"crew": config.crew.name, "arm": arm.label, "seed": seed, "made": arm.made}
    return [msgspec.structs.replace(TRIALS[0], peer=p.name, **of_arm) for p in config.students]


@pytest.mark.parametrize("lines_left", [2, 3])
@pytest.mark.parametrize("torn", [b"", b'{"crew": "spread", "ar'], ids=["whole", "torn"])
def test_a_run_whose_trials_were_not_all_kept_is_made_again_and_none_stands_twice(
    lines_left: int, torn: bytes, folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(motley.study.sweep, "_run", _run)
    config, out = spread_crew(folder, ("full", "lora")), folder / "sweep"
    first, _ = swept([config], "ftis", 2, out)
    assert [(t.seed, t.peer) for t in first] == [
        (seed, peer) for seed in (0, 1) for peer in ("full0", "lora1")
    ]
    kept = (out / "trials.jsonl").read_bytes().splitlines(keepends=True)
    (out / "trials.jsonl").write_bytes(b"".join(kept[:lines_left]) + torn)
    again, progress = swept([config], "ftis", 2, out)
    assert again == first
    assert (progress, here.called["_run"]) == ([(1, 2), (2, 2)], 3)
    assert read_trials(out / "trials.jsonl") == first


def test_an_arm_in_which_fewer_learn_is_whole_without_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: CrewConfig, arm: Arm, seed: int, folder: Path) -> list[Trial]:
        return _run(crews_of(config, arm, seed)[0], arm, seed, folder)

    monkeypatch.setattr(motley.study.sweep, "_run", run)
    config, out = spread_crew(folder, ("full", "full"), pace="async"), folder / "sweep"
    changes = ("full0.role=learner", "full1.role=sampler", "full1.follows=full0", 'full1.model=""')
    samples = "samples=tis:" + ",".join(f"peer.{change}" for change in changes)
    first, _ = swept([config], samples, 2, out)
    assert [(t.seed, t.peer) for t in first] == [(0, "full0"), (1, "full0")]
    assert swept([config], samples, 2, out) == (first, [(2, 2)])
    swept([config], "ftis", 1, out)
    assert read_trials(out / "trials.jsonl")[:2] == first


def test_trials_that_cannot_be_read_are_named_with_the_remedy(folder: Path) -> None:
    (folder / "sweep").mkdir()
    (folder / "sweep" / "trials.jsonl").write_bytes(b"\x00\x00\n")
    with pytest.raises(
        ValueError, match=r"trials\.jsonl, line 1 cannot be read .*delete this line"
    ):
        swept([spread_crew(folder)], "ftis", 1, folder / "sweep")


@pytest.mark.slow
def test_what_a_stopped_run_left_is_made_anew(folder: Path) -> None:
    out = folder / "sweep"
    (out / "runs" / "delay-0-gepo-0").mkdir(parents=True)
    (out / "runs" / "delay-0-gepo-0" / "rest.txt").write_text("of a run that was killed")
    found, _ = swept(crews(folder, 0.0), "gepo", 1, out)
    assert len(found) == 1


@pytest.mark.slow
def test_crews_that_differ_in_their_names_only_come_out_the_same(folder: Path) -> None:
    (first, second), _ = swept(crews(folder, 0.05, 0.05), "gepo", 1, folder / "sweep")
    assert msgspec.structs.replace(second, crew=first.crew) == first


@pytest.mark.slow
def test_a_failing_run_is_an_error_after_all_others_are_made_and_kept(folder: Path) -> None:
    gone = far_crew(
        folder,
        name="gone",
        rounds=2,
        per_peer=dict.fromkeys(("s0", "s1"), "churn = { leave_s = 0.01 }"),
    )
    words = "1 of 2 runs gave nothing: crew gone, arm gepo, seed 0: .*nothing more can happen"
    with pytest.raises(LostRunsError, match=words):
        swept([gone, *crews(folder, 0.0)], "gepo", 1, folder / "sweep")
    assert [t.crew for t in read_trials(folder / "sweep" / "trials.jsonl")] == ["delay-0"]


def test_two_crews_of_one_name_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="different names; got delay-0, delay-0"):
        swept([*crews(folder, 0.0), *crews(folder, 1.0)], "gepo", 1, folder / "sweep")


def test_a_folder_of_another_crew_file_is_refused(folder: Path) -> None:
    (folder / "sweep").mkdir()
    configs = crews(folder, 0.0)
    motley.study.sweep.claim(folder / "sweep" / "delay-0", configs[0])
    with pytest.raises(ValueError, match="another crew file"):
        swept(crews(folder, 1.0), "gepo", 1, folder / "sweep")


def test_an_arm_that_is_not_known_is_refused_before_anything_runs(folder: Path, here: Here) -> None:
    with pytest.raises(ValueError, match="gepu"):
        swept(crews(folder, 0.0), "gepo gepu", 1, folder / "sweep")
    assert here.called == Counter()


@pytest.mark.slow
def test_alone_is_the_learner_by_itself(folder: Path) -> None:
    (found,), _ = swept(crews(folder, 0.0), "alone", 1, folder / "sweep")
    assert (found.arm, found.peer, found.mean_age) == ("alone", "l", 0.0)


@pytest.mark.slow
def test_several_learners_of_a_crew_have_trials_of_their_own(folder: Path) -> None:
    config = far_crew(folder, samplers={"s": "l", "t": "k"}, **SETTINGS)
    found, _ = swept([config], "gepo", 1, folder / "sweep")
    assert [t.peer for t in found] == ["l", "k"]


@pytest.mark.slow
def test_alone_in_a_crew_of_two_learners_runs_or_is_refused_by_name(folder: Path) -> None:
    config = far_crew(folder, samplers={"s": "l", "t": "k"}, **SETTINGS)
    try:
        found, _ = swept([config], "alone", 1, folder / "sweep")
    except ValueError as error:
        assert "alone" in str(error)  # noqa: PT017
    else:
        assert [t.peer for t in found] == ["l", "k"]


@pytest.mark.slow
def test_peers_that_end_early_have_trials_too(folder: Path) -> None:
    peers = spread_crew(folder, pace="async", rounds=5, learning="max_age = 0")
    config = msgspec.structs.replace(peers, network=Network(delay=0.2))
    found, _ = swept([config], "ftis", 1, folder / "sweep")
    assert [t.peer for t in found] == ["full0", "full1"]


# Command line


@pytest.mark.slow
def test_sweep_prints_a_table_and_leaves_it_with_a_plot(folder: Path, here: Here) -> None:
    files = []
    for number, delay in enumerate((0.0, 0.1)):
        files.append(folder / f"{number}.toml")
        files[-1].write_text(
            crew_text(folder, name=f"delay-{number}", network=f"delay = {delay}", **SETTINGS)
        )
    out = folder / "out"
    arguments = [
        "sweep",
        *map(str, files),
        "--arms",
        "gepo",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert (out / "sweep.png").read_bytes().startswith(PNG)
    written = (out / "table.md").read_text()
    assert result.stdout.startswith(written)
    glanced, whole = written.split("\n\n")
    assert [cell.strip() for cell in glanced.splitlines()[0].strip("|").split("|")] == [
        "arm",
        "delay-0",
        "delay-1",
    ]
    assert [row.split("|")[2].strip() for row in whole.splitlines()[2:]] == ["delay-0", "delay-1"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    (line,) = result.stdout.splitlines()
    found = json.loads(line)["lines"]
    assert [(row["arm"], row["crew"]) for row in found] == [
        ("gepo", "delay-0"),
        ("gepo", "delay-1"),
    ]
    assert found[1]["p_value"] is None  # one seed
    assert here.called["_run"] == 2


def test_a_wrong_arm_is_one_line(folder: Path) -> None:
    (folder / "crew.toml").write_text(crew_text(folder, **SETTINGS))
    result = CliRunner().invoke(
        app,
        ["sweep", str(folder / "crew.toml"), "--arms", "gepo:beta", "--out", str(folder / "out")],
    )
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: arm 'gepo:beta'")
