"""A study that is stopped, moved to another machine and finished there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest

from motley.config import CrewConfig, by_name, parse_config, read_config, with_changes, write_beside
from motley.objectives.table import OBJECTIVES
from motley.runs.local import LocalCrew
from motley.runs.metrics import read_metrics
from motley.study import running
from motley.study.arms import parse_arms
from motley.study.defaults import KEYS
from motley.study.keys import key_of, run_name, with_copies
from motley.study.plans import EstimatorPlan
from motley.study.processes import Heard, Job, Lost
from motley.study.running import Ended, Wanted, often_saved, run_study, studied
from motley.study.shared_gpu import SharedGpu

CREW = """\
[crew]
name = "{name}"
task = "digits"
objective = "ftis"
rounds = 4
group_size = 4
problems_per_round = 4
{extra}
[task]
kinds = ["sort"]
levels = [3]
[sampling]
max_tokens = 6
[evaluate]
every = 2
problems = 8
"""
PEERS = '[[peer]]\nname = "a"\nmodel = "tiny:0.3m"\n[[peer]]\nname = "b"\nmodel = "tiny:0.3m"\n'


def crew(name: str, extra: str = "", peers: str = PEERS) -> CrewConfig:
    return parse_config(CREW.format(name=name, extra=extra) + peers)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far runs were when they told, made in this process."""
    heard_of: list[float] = []

    def make_all(
        num: int,
        first: Sequence[Job[None]],
        then: Sequence[Job[str]],
        kept: Callable[[str], None],
        heard: Heard,
        gpu: SharedGpu | None,
    ) -> list[Lost]:
        for job in then:
            kept(job.call(lambda share: heard_of.append(share)))
        return []

    monkeypatch.setattr(running, "make_all", make_all)
    return heard_of


def run(config: CrewConfig, out: Path, arm: str = "ftis", saved: bool = True) -> Ended:
    crews = studied([config], out, out / "study", True)
    arms = [(one, range(1)) for one in parse_arms(arm)]
    return run_study(crews, arms, 1, lambda done, total: None, saved=saved)


@pytest.mark.slow
def test_a_run_that_is_not_saved_ends_alike_and_begins_again(
    tmp_path: Path, told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(crew("near"), tmp_path / "whole")
    saved: list[Path] = []
    monkeypatch.setattr(LocalCrew, "save", lambda one: saved.append(one.folder))
    for kept in tmp_path.glob("whole/runs/*/outcomes.jsonl"):  # as one that was stopped on the way
        kept.unlink()
    told.clear()
    again = run(crew("near"), tmp_path / "whole", saved=False)
    assert told == [0, 0.25, 0.5, 0.75, 1]
    assert not saved
    without_time = lambda ended: [
        msgspec.structs.replace(o, spent=msgspec.structs.replace(o.spent, seconds=0))
        for o in ended.outcomes["near"]
    ]
    assert without_time(again) == without_time(whole)


@pytest.mark.slow
def test_a_run_whose_outcomes_are_torn_is_made_again_from_its_beginning(
    tmp_path: Path, told: list[float]
) -> None:
    """Its weights are gone, and what it says of itself is there."""
    whole = run(crew("near"), tmp_path)
    (folder,) = (one.folder for one in whole.runs)
    (folder / "outcomes.jsonl").write_bytes(b"")
    told.clear()
    again = run(crew("near"), tmp_path)
    assert told == [0, 0.25, 0.5, 0.75, 1]
    curves = lambda ended: [(o.peer, o.curve) for o in ended.outcomes["near"]]
    assert curves(again) == curves(whole)
    assert len(read_metrics(folder)) == 2 * 5


def test_gradients_are_not_measured_of_runs_that_are_not_saved(tmp_path: Path) -> None:
    arms = [(arm, range(1)) for arm in parse_arms("ftis")]
    crews = studied([crew("near")], tmp_path, tmp_path / "study", True)
    plan = EstimatorPlan(arm="ftis", rows="tis ftis")
    with pytest.raises(ValueError, match="leave out --unsaved"):
        run_study(crews, arms, 1, lambda done, total: None, plan, saved=False)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_from_its_checkpoint_in_another_place(
    tmp_path: Path, told: list[float]
) -> None:
    whole = run(crew("near"), tmp_path / "whole")
    assert told == [0, 0.25, 0.5, 0.75, 1]
    told.clear()
    # stopped after two rounds
    begun = tmp_path / "begun"
    (studied_crew,) = studied([crew("near")], begun, begun / "study", True)
    (half,) = Wanted.of(studied_crew, parse_arms("ftis")[0], 0).runs
    stopped = LocalCrew.start(often_saved(half.config), half.folder)
    for _, _ in zip(range(2), stopped.rounds(), strict=False):
        pass
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    begun.rename(moved)
    ended = run(crew("near"), moved)
    assert told == [0.5, 0.75, 1]
    scores = lambda e: [(o.peer, o.start, o.end, o.curve) for o in e.outcomes["near"]]
    assert scores(ended) == scores(whole)
    for text in (path for path in moved.rglob("*") if path.is_file()):
        assert str(tmp_path).encode() not in text.read_bytes(), text
    assert not list(moved.glob("runs/*/checkpoints"))
    assert len(read_metrics(ended.runs[0].folder)) == 2 * 5


@pytest.mark.slow
def test_a_crew_with_samplers_far_away_is_simulated(tmp_path: Path, told: list[float]) -> None:
    peers = (
        '[[peer]]\nname = "a"\nmodel = "tiny:0.3m"\nrole = "learner"\n'
        '[[peer]]\nname = "s"\nrole = "sampler"\nfollows = "a"\n'
    )
    config = crew("far", 'pace = "async"', peers)
    late = run(config, tmp_path, "gepo late=gepo:network.delay=60")
    assert {o.arm for o in late.outcomes["far"]} == {"gepo", "late"}
    assert told[-1] == 1
    assert all((one.folder / "metrics.jsonl").exists() for one in late.runs)


# What is the same on two machines


def test_files_count_by_their_content_and_travel_with_the_study(tmp_path: Path) -> None:
    rows = [json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) for i in range(30)]
    here, there = tmp_path / "here", tmp_path / "there"
    keys = []
    for folder in (here, there):
        folder.mkdir()
        (folder / f"{folder.name}.jsonl").write_text("\n".join(rows))
        (folder / "model").mkdir()
        (folder / "model" / "model.safetensors").write_bytes(b"12345")
        config = with_changes(
            crew("near"),
            [
                "crew.task=gsm8k",
                "task={}",
                f"task.file={folder}/{folder.name}.jsonl",
                f"peer.a.model={folder}/model",
            ],
        )
        keys.append(key_of(config))
    assert keys[0] == keys[1]
    copied = with_copies(config, here / "data")
    assert key_of(copied) == keys[0]
    assert with_copies(copied, here / "data") == copied
    (here / "study" / "near").mkdir(parents=True)
    write_beside(copied, here / "study" / "near" / "crew.toml")
    text = (here / "study" / "near" / "crew.toml").read_text()
    assert str(tmp_path) not in text
    moved = here.rename(tmp_path / "moved")
    found = read_config(moved / "study" / "near" / "crew.toml")
    assert Path(found.task["file"]).read_text() == "\n".join(rows)
    assert by_name(found).peer[0].model == "model"
    (there / "there.jsonl").write_text("\n".join(rows[1:]))
    assert key_of(config) != keys[0]
    (there / "there.jsonl").write_text("\n".join(rows))
    (there / "model" / "model.safetensors").write_bytes(b"123456")
    assert key_of(config) != keys[0]


def test_keys_are_of_what_is_said_and_not_of_defaults() -> None:
    plain = crew("near")
    for setting in (
        "learning.grad_clip=1.0",
        "peer.a.device=cpu",
        "learning.token_budget=64",
        "evaluate.traces=0",
    ):
        assert key_of(with_changes(plain, [setting])) == key_of(plain), setting
    for setting in ("learning.grad_clip=2.0", "crew.seed=1", "peer.a.dtype=bfloat16"):
        assert key_of(with_changes(plain, [setting])) != key_of(plain), setting


def test_a_new_default_of_a_key_is_another_run_and_the_old_value_is_the_one_that_is_there() -> None:
    plain = crew("near")
    later = msgspec.defstruct(
        "Learning",
        [
            (f.encode_name, f.type, 7 if f.encode_name == "max_age" else f.default)
            for f in msgspec.structs.fields(plain.learning)
        ],
    )
    said = msgspec.structs.asdict(plain.learning)
    with_later = lambda **keys: msgspec.structs.replace(plain, learning=later(**keys))
    assert key_of(with_later(**said | {"max_age": 7})) != key_of(plain)
    assert key_of(with_later(**said)) == key_of(plain)


def test_a_new_default_of_a_rows_setting_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = with_changes(crew("near"), ["crew.objective=ftis"])
    before, row = key_of(plain), OBJECTIVES["ftis"]
    monkeypatch.setitem(OBJECTIVES, "ftis", row.with_settings({"g": 10.0}))
    assert key_of(plain) != before
    told = msgspec.structs.replace(plain, objective={"g": 10.0})
    assert key_of(told) == key_of(plain)


def test_every_key_of_a_crew_file_has_its_first_default() -> None:
    seen: dict[type, object] = {}

    def look(kind: object) -> None:
        for part in get_args(kind):
            look(part)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
            seen[kind] = None
            for hint in get_type_hints(kind).values():
                look(hint)

    look(CrewConfig)
    missing = [
        f"{kind.__name__}.{field.encode_name}"
        for kind in seen
        for field in msgspec.structs.fields(kind)
        if field.default is not msgspec.NODEFAULT
        and not isinstance(field.default, msgspec.Struct)
        and field.encode_name not in KEYS.get(kind.__name__, {})
    ]
    assert missing == [], "add their defaults to study/defaults.py"


def test_keys_are_those_of_the_runs_that_are_there() -> None:
    said = ["peer.a.train={lora={rank=4}}", "network.delay=5", "crew.objective=uplift"]
    config = with_changes(crew("near"), [*said, "crew.variant=sure", "objective.keep=8"])
    assert [key_of(crew("near"))[:12], key_of(config)[:12]] == ["92fb7dbd0c86", "93310db41fa3"]


def test_folders_of_runs_are_short_and_say_what_is_in_them() -> None:
    config = with_changes(crew("near"), ["crew.objective=uplift", "crew.variant=relative"])
    name = run_name(config, key_of(config))
    assert name.startswith("near-uplift-relative-0-")
    long = with_changes(config, [f"crew.name={'x' * 200}"])
    assert len(run_name(long, key_of(long))) < 110


def test_runs_of_studies_are_saved_on_the_way() -> None:
    every = lambda *settings: (
        often_saved(with_changes(crew("near"), settings)).learning.checkpoint_every
    )
    assert every("crew.rounds=150", "learning.checkpoint_every=150") == 38
    assert every("crew.rounds=150", "learning.checkpoint_every=10") == 10
    assert every() == 1
