from __future__ import annotations

from pathlib import Path

import pytest

from motley.config import ConfigError, CrewConfig, changes, check_changes, parse_config


def crew(model: Path, problems: Path) -> CrewConfig:
    return parse_config(f"""
        [crew]
        name = "c"
        task = "file:{problems}"
        rounds = 1
        objective = "grpo"
        group_size = 2
        problems_per_round = 1
        [task]
        heldout = "{problems}"
        [[peer]]
        name = "a"
        model = "{model}"
    """)


def placed(folder: Path, weights: str, line: str) -> CrewConfig:
    model, problems = folder / "model", folder / "train.jsonl"
    (model / "sub").mkdir(parents=True)
    (model / "sub" / "weights").write_text(weights)
    problems.write_text(line)
    return crew(model, problems)


def test_a_copy_elsewhere_is_the_same(tmp_path: Path) -> None:
    before, after = (placed(tmp_path / name, "1", "2") for name in "ab")
    assert before != after
    assert changes(before, after) == []


@pytest.mark.parametrize(
    ("weights", "line", "keys"),
    [("x", "2", ["peer.a.model"]), ("1", "x", ["crew.task", "task.heldout"])],
)
def test_another_of_the_same_name_is_another(
    tmp_path: Path, weights: str, line: str, keys: list[str]
) -> None:
    before, after = placed(tmp_path / "a", "1", "2"), placed(tmp_path / "b", weights, line)
    found = changes(before, after)
    assert sorted(change.key for change in found) == keys
    assert all(str(tmp_path / "a") in change.before for change in found)
    with pytest.raises(ConfigError, match=found[0].key):
        check_changes(found, "this run")


def test_what_is_no_longer_where_it_was_has_moved(tmp_path: Path) -> None:
    before = placed(tmp_path / "a", "1", "2")
    (tmp_path / "a").rename(tmp_path / "b")
    after = crew(tmp_path / "b" / "model", tmp_path / "b" / "train.jsonl")
    assert changes(before, after) == []
    other = crew(tmp_path / "other", tmp_path / "b" / "train.jsonl")
    assert [change.key for change in changes(before, other)] == ["peer.a.model"]
