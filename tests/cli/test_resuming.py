"""motley train --resume: longer, elsewhere, and what is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import pytest

from cli.test_cli import CREW as UNTAUGHT
from cli.test_cli import error, motley
from motley.config import MAY_CHANGE, read_config
from motley.learning.checkpoint import checkpoints
from motley.runs.metrics import learner_lines, read_metrics
from motley.runs.resuming import read_changes

pytestmark = pytest.mark.slow

# with something to learn from
CREW = UNTAUGHT.replace(
    'model = "tiny:0.3m"', 'model = "tiny:0.3m"\nwarm = { kinds = ["compare"], steps = 20 }'
)
ASYNC = CREW.replace('objective = "ftis"', 'objective = "ftis"\npace = "async"')
PROCESSES = CREW.replace('objective = "ftis"', 'objective = "ftis"\nprocesses = true')


PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"


def test_the_page_lists_what_may_change() -> None:
    table = PAGE.read_text().partition("| key | may change because |")[2].partition("\n\n")[0]
    listed = {key for row in table.splitlines() for key in re.findall(r"`([^`]+)`", row)}
    assert listed == set(MAY_CHANGE)


def crew_in(folder: Path, text: str = CREW) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "crew.toml").write_text(text)
    return folder / "crew.toml"


def without_timing(run: Path) -> list[str]:
    """Metrics lines, times aside."""
    return [
        msgspec.json.encode(
            {k: v for k, v in msgspec.json.decode(line).items() if k != "timing"}
        ).decode()
        for line in (run / "metrics.jsonl").read_bytes().splitlines()
    ]


def steps_of(run: Path) -> list[object]:
    """What does not depend on when something arrived."""
    return [
        (line.round, line.peer, line.loss, line.grad_norm, line.heldout)
        for line in learner_lines(read_metrics(run))
    ]


def weights(folder: Path) -> dict[str, bytes]:
    """Everything that trains, and the optimiser's moments, at the newest checkpoint."""
    newest = checkpoints(folder / "checkpoints")[-1]
    return {
        str(path.relative_to(newest)): path.read_bytes()
        for path in sorted(newest.rglob("*.safetensors"))
    }


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rounds from the start."""
    folder = tmp_path_factory.mktemp("long")
    motley("train", crew_in(folder), "--rounds", 4, "--out", folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds."""
    folder = tmp_path_factory.mktemp("short")
    motley("train", crew_in(folder), "--out", folder / "run")
    return folder / "run"


@pytest.fixture
def short_run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def test_an_extended_run_is_that_which_was_longer_from_the_start(
    long_run: Path, short_run: Path
) -> None:
    out = motley("train", "--resume", short_run, "--rounds", 4).stdout
    assert f"run folder: {short_run}" in out
    assert weights(short_run) == weights(long_run)
    assert all(line.grad_norm for line in learner_lines(read_metrics(long_run))[2:])
    assert without_timing(short_run) == without_timing(long_run)
    assert read_config(short_run / "config.toml") == read_config(long_run / "config.toml")
    (change,) = read_changes(short_run)
    assert (change.after_round, change.key, change.before, change.after) == (2, "crew.rounds", 2, 4)


def test_an_asynchronous_run_is_extended_alike(tmp_path: Path) -> None:
    crew = crew_in(tmp_path, ASYNC)
    motley("train", crew, "--rounds", 4, "--out", tmp_path / "long")
    motley("train", crew, "--out", tmp_path / "run")
    motley("train", "--resume", tmp_path / "run", "--rounds", 4)
    assert weights(tmp_path / "run") == weights(tmp_path / "long")
    assert without_timing(tmp_path / "run") == without_timing(tmp_path / "long")


def test_a_run_of_several_processes_is_extended_alike(tmp_path: Path) -> None:
    crew = crew_in(tmp_path, PROCESSES)
    motley("train", crew, "--rounds", 4, "--out", tmp_path / "long")
    motley("train", crew, "--out", tmp_path / "run")
    motley("train", "--resume", tmp_path / "run", "--set", "crew.rounds=4")
    for peer in "ab":
        own, other = (tmp_path / run / "peers" / peer for run in ("run", "long"))
        assert weights(own) == weights(other)
        assert read_config(own / "config.toml").crew.rounds == 4
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "long")
    assert [change.key for change in read_changes(tmp_path / "run")] == ["crew.rounds"]


def test_an_asynchronous_run_of_several_processes_goes_on_to_its_new_end(tmp_path: Path) -> None:
    crew = crew_in(tmp_path, PROCESSES.replace("processes", 'pace = "async"\nprocesses'))
    motley("train", crew, "--out", tmp_path / "run")
    motley("train", "--resume", tmp_path / "run", "--rounds", 5)
    rounds = [line.round for line in read_metrics(tmp_path / "run")]
    assert max(rounds) == 5
    assert rounds == sorted(rounds)


def test_what_only_concerns_how_a_run_is_watched_may_change(short_run: Path) -> None:
    more = ["evaluate.problems=6", "learning.checkpoint_every=1", "peer.*.device=cpu"]
    motley("train", "--resume", short_run, "--rounds", 3, *(f"--set={one}" for one in more))
    config = read_config(short_run / "config.toml")
    assert (config.evaluate.problems, config.learning.checkpoint_every) == (6, 1)
    assert [peer.device for peer in config.peer] == ["cpu", "cpu"]
    assert [change.key for change in read_changes(short_run)] == [
        "crew.rounds",
        "learning.checkpoint_every",
        "evaluate.problems",
        "peer.a.device",
        "peer.b.device",
    ]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("learning.grad_clip=2", "steps before and after would be of two methods"),
        ("crew.seed=5", "the crew agreed on it"),
        ("task.levels=[3]", "its problems or rewards would be others"),
        ("sampling.temperature=0.5", "rollouts before and after would be of two kinds"),
        ("peer.a.model=tiny:1m", "the peer would be another"),
        ("crew.objective=tis", "the crew agreed on it"),
    ],
)
def test_what_a_run_learns_from_may_not_change(long_run: Path, setting: str, reason: str) -> None:
    before = (long_run / "config.toml").read_bytes()
    words = error("train", "--resume", long_run, "--set", setting)
    assert setting.split("=")[0] in words
    assert reason in words
    assert "begin a new run" in words
    assert (long_run / "config.toml").read_bytes() == before


def test_a_crew_file_that_was_edited_in_a_run_folder_is_refused(short_run: Path) -> None:
    path = short_run / "config.toml"
    path.write_text(path.read_text().replace("temperature = 1.0", "temperature = 0.5"))
    assert "sampling.temperature was 1.0 and cannot become 0.5" in error(
        "train", "--resume", short_run
    )


def test_a_lower_learning_rate_counts_and_is_noted(short_run: Path) -> None:
    before = weights(short_run)
    settings = ["--set", "learning.lr=1e-30", "--set", "peer.b.lr=1e-30"]
    motley("train", "--resume", short_run, "--rounds", 3, *settings)
    moved = [name for name, values in weights(short_run).items() if values != before[name]]
    assert {Path(name).name for name in moved} == {"optimiser.safetensors"}
    noted = [(one.after_round, one.key, one.after) for one in read_changes(short_run)]
    assert (2, "learning.lr", 1e-30) in noted


def test_rounds_that_were_edited_in_a_run_folder_count_and_are_noted(short_run: Path) -> None:
    path = short_run / "config.toml"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 3"))
    motley("train", "--resume", short_run)
    assert max(line.round for line in read_metrics(short_run)) == 3
    assert [(one.key, one.after) for one in read_changes(short_run)] == [("crew.rounds", 3)]


def test_what_peers_reach_alone_is_named_where_its_file_is_spoilt(short_run: Path) -> None:
    (short_run / "alone.json").write_text('{"command": "motley tr')
    said = error("train", "--resume", short_run)
    assert "alone.json cannot be read" in said
    assert "delete it, and make it again with: motley train --resume" in said


def test_a_run_is_not_made_shorter_than_it_is(long_run: Path) -> None:
    assert "has 4 rounds already and cannot end after 3; give --rounds 4 or more" in error(
        "train", "--resume", long_run, "--rounds", 3
    )


def test_nonsense_on_resume_is_one_line(long_run: Path, tmp_path: Path) -> None:
    assert "is not a run folder: it has no config.toml" in error("train", "--resume", tmp_path)
    assert "is not a run folder" in error("train", "--resume", tmp_path / "none", "--rounds", 9)
    for rounds in (-3, 0):
        said = error("train", "--resume", long_run, "--rounds", rounds)
        assert f"rounds={rounds} trains nothing" in said
    assert "did you mean rounds?" in error("train", "--resume", long_run, "--set", "crew.round=9")
    (tmp_path / "config.toml").write_text(CREW)
    assert "has no checkpoint; start the crew anew" in error("train", "--resume", tmp_path)
    (tmp_path / "member.json").write_text("{}")
    assert "go on with the line that the hub printed" in error("train", "--resume", tmp_path)


def test_problems_that_changed_since_a_run_began_are_refused(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "sort {n}=", "answer": "{n % 10}"}}' for n in range(10, 60)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    text = UNTAUGHT.replace('"digits"', '"file:p.jsonl"').replace(
        'kinds = ["compare"]\nlevels = [2]', ""
    )
    motley("train", crew_in(tmp_path, text), "--rounds", 1, "--out", tmp_path / "run")
    (tmp_path / "p.jsonl").write_text("\n".join(lines[:-1]))
    assert "asks other problems than when the run began" in error(
        "train", "--resume", tmp_path / "run", "--rounds", 2
    )
