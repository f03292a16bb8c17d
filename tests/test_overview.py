"""docs/overview.py prints the README's table of crews from the outcomes of studies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from motley.study.outcomes import CrewOutcome, Outcome

SCRIPT = Path(__file__).parents[1] / "docs" / "overview.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("overview", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["overview"] = module
    spec.loader.exec_module(module)
    return module


def lines(ends: dict[str, float], crew: str = "") -> bytes:
    made = [
        CrewOutcome(
            crew=crew, arm=arm, seed=seed, peer=peer, start={"x": 0.1},
            end={"x": end + shift}, lowest={"x": 0.1}, ood={},
        )
        for arm, end in ends.items()
        for seed in (0, 1)
        for peer, shift in (("a", 0.0), ("b", 0.2))
    ]  # fmt: skip
    found = [one if crew else Outcome(**outcome_of(one)) for one in made]
    return b"".join(msgspec.json.encode(one) + b"\n" for one in found)


def outcome_of(one: CrewOutcome) -> dict[str, object]:
    return {name: getattr(one, name) for name in Outcome.__struct_fields__}


def test_the_table_has_a_row_per_crew_and_peer_and_an_empty_cell_where_nothing_was_run(
    script: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "results.jsonl").write_bytes(
        lines({"alone/own": 0.1, "alone": 0.2, "ftis": 0.3, "auto": 0.4, "best": 0.5}, "near")
        + lines({"alone": 0.2, "best": 0.5}, "far")
    )
    (tmp_path / "old.jsonl").write_bytes(lines({"alone": 0.25, "ftis": 0.35}))
    crews = script.read_crews([tmp_path / "study", tmp_path / "old.jsonl"])
    cells = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in script.overview(crews, ["auto", "best"]).splitlines()
    ]
    assert cells[0] == ["crew", "peer", "alone/own", "alone", "ftis", "ours", "which is"]
    means = [[cell.split(" ")[0] for cell in row] for row in cells[2:]]
    assert means == [
        ["near", "all", "0.20", "0.30", "0.40", "0.50", "auto"],
        ["near", "a", "0.10", "0.20", "0.30", "0.40", "auto"],
        ["near", "b", "0.30", "0.40", "0.50", "0.60", "auto"],
        ["far", "all", "", "0.30", "", "0.60", "best"],
        ["far", "a", "", "0.20", "", "0.50", "best"],
        ["far", "b", "", "0.40", "", "0.70", "best"],
        ["old", "all", "", "0.35", "0.45", "", ""],
        ["old", "a", "", "0.25", "0.35", "", ""],
        ["old", "b", "", "0.45", "0.55", "", ""],
    ]


def test_a_crew_counts_once_and_a_missing_file_is_named(script: ModuleType, tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_bytes(lines({"alone": 0.2}, "near"))
    with pytest.raises(ValueError, match=r"two\.jsonl: crew near was in another file too"):
        script.read_crews([tmp_path / "one.jsonl", tmp_path / "two.jsonl"])
    with pytest.raises(ValueError, match=r"none\.jsonl is not there"):
        script.read_crews([tmp_path / "none.jsonl"])


def test_rewards_have_intervals_of_rewards(script: ModuleType, tmp_path: Path) -> None:
    rows = {}
    for measure in ("accuracy", "reward"):
        path = tmp_path / f"{measure}.jsonl"
        path.write_bytes(lines({"alone": 0.05}, measure).replace(b'"seed":1', b'"seed":2'))
        far = [msgspec.json.decode(one, type=CrewOutcome) for one in path.read_bytes().splitlines()]
        far = [msgspec.structs.replace(o, end={"x": o.end["x"] + o.seed / 20}) for o in far]
        told = [msgspec.structs.replace(one, measure=measure) for one in far]
        path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in told))
        rows[measure] = script.overview(script.read_crews([path]), [])
    assert " to " in rows["accuracy"]  # lopsided: on the scale of log odds
    assert " to " not in rows["reward"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b'{"arm":"ft', "line 1 cannot be read"), (b"", "is empty"), (None, "is not there")],
)
def test_what_cannot_be_read_is_one_line(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    words: str,
) -> None:
    path = tmp_path / "results.jsonl"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["overview.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert f"error: {path}" in said
    assert words in said
