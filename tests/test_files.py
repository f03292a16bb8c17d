from __future__ import annotations

from pathlib import Path

import pytest

from motley.files import cache_folder, whole


def test_the_cache_is_where_the_environment_says_and_else_under_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in (
        lambda: monkeypatch.setenv("MOTLEY_CACHE", ""),
        lambda: monkeypatch.delenv("MOTLEY_CACHE"),
    ):
        unset()
        assert cache_folder() == tmp_path / ".cache" / "motley"


def test_a_folder_gets_its_name_when_all_of_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder"
    with whole(path) as partial:
        partial.mkdir()
        (partial / "one").write_text("1")
        assert not path.exists()
    assert (path / "one").read_text() == "1"
    assert [p.name for p in path.parent.iterdir()] == ["folder"]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with whole(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_fails_half_way_leaves_nothing_new(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with whole(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    with whole(tmp_path / "folder") as partial:
        partial.mkdir()
    plain = tmp_path / "plain"
    plain.mkdir()
    assert (tmp_path / "folder").stat().st_mode == plain.stat().st_mode
