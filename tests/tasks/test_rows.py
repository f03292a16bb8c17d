"""A user's data, whatever it comes as, is the same rows; what is wrong is named by its place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.tasks import extras
from motley.tasks.rows import placed_rows, read_rows

ROWS = [{"prompt": f"say {n}", "answer": str(n)} for n in range(3)]


def as_pandas(tmp_path: Path) -> Any:
    return pytest.importorskip("pandas").DataFrame(ROWS)


def as_dataset(tmp_path: Path) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(ROWS)


def as_arrow(tmp_path: Path) -> Any:
    return pytest.importorskip("pyarrow").Table.from_pylist(ROWS)


def as_parquet(tmp_path: Path) -> str:
    pytest.importorskip("pyarrow.parquet").write_table(as_arrow(tmp_path), tmp_path / "p.parquet")
    return str(tmp_path / "p.parquet")


def as_jsonl(tmp_path: Path) -> Path:
    (tmp_path / "p.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)))
    return tmp_path / "p.jsonl"


def as_json(tmp_path: Path) -> str:
    (tmp_path / "p.JSON").write_text(json.dumps(ROWS, indent=2))
    return str(tmp_path / "p.JSON")


def as_lines_called_json(tmp_path: Path) -> str:
    (tmp_path / "p.json").write_text("\n".join(map(json.dumps, ROWS)))
    return str(tmp_path / "p.json")


def as_csv(tmp_path: Path) -> Path:
    text = "prompt,answer\r\n" + "".join(f'"{r["prompt"]}",{r["answer"]}\r\n' for r in ROWS)
    (tmp_path / "p.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    return tmp_path / "p.csv"


def as_generator(tmp_path: Path) -> Any:
    return (row for row in ROWS)


@pytest.mark.parametrize(
    "made",
    [
        as_pandas,
        as_dataset,
        as_arrow,
        as_parquet,
        as_jsonl,
        as_json,
        as_lines_called_json,
        as_csv,
        as_generator,
        lambda tmp_path: ROWS,
    ],
)
def test_the_same_rows_come_of_every_kind_of_data(
    made: Callable[[Path], Any], tmp_path: Path
) -> None:
    assert read_rows(made(tmp_path)) == ROWS


def test_values_of_numpy_and_missing_ones_of_pandas_are_plain() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "answer": [4, None],
            "level": pandas.array([1, None], dtype="Int64"),
            "when": pandas.to_datetime(["2026-01-01", None]),
            "parts": [np.array([1.5, 2.0]), {"a": np.int64(3)}],
        }
    )
    first, second = read_rows(frame)
    assert first == {"answer": 4.0, "level": 1, "when": "2026-01-01 00:00:00", "parts": [1.5, 2.0]}
    assert second == {"answer": None, "level": None, "when": None, "parts": {"a": 3}}
    assert read_rows([{"x": math.nan}]) == [{"x": None}]


def test_nested_columns_of_parquet_are_lists_and_tables(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "meta": {"level": 1, "tags": ["a"]}}]
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet"
    )
    ((fields, place),) = placed_rows(tmp_path / "p.parquet")
    assert [fields] == rows
    assert place == f"{tmp_path / 'p.parquet'} row 1"


def test_a_cell_may_hold_newlines_commas_and_quotes_and_the_next_place_is_right(
    tmp_path: Path,
) -> None:
    path = tmp_path / "p.csv"
    path.write_text('prompt,answer\n"one\ntwo, ""three""",4\n\nlast,\n', newline="")
    rows = placed_rows(path)
    assert rows[0].fields == {"prompt": 'one\ntwo, "three"', "answer": "4"}
    assert rows[1].fields == {"prompt": "last", "answer": None}
    assert [row.place for row in rows] == [f"{path}:2", f"{path}:5"] or [
        row.place for row in rows
    ] == [f"{path}:2", f"{path}:4"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.csv", b"prompt,answer\na,b,c\n", r"p\.csv:2: 3 cells, and the first line names 2"),
        ("p.csv", b"prompt,answer\nx,y\na\n", r"p\.csv:3: 1 cells, .* \(prompt, answer\)"),
        ("p.csv", b"a,a\n1,2\n", r"p\.csv:1: the first line must name every field, none twice"),
        ("p.csv", b"prompt;answer\na;b\n", r"p\.csv:1: .*'prompt;answer'; separate cells with co"),
        ("p.csv", b"prompt\tanswer\na\tb\n", r"p\.csv:1: .*; separate cells with commas"),
        ("p.csv", b'prompt,answer\n"a,b\n', r"p\.csv:\d: unexpected end of data; expected CSV"),
        ("p.csv", "prompt,answer\nä,b\n".encode("latin-1"), r"p\.csv:2: this is not UTF-8"),
        ("p.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"p\.jsonl:2: this is not UTF-8"),
        ("p.jsonl", b'{"a": 1}\n{"a": \n', r"p\.jsonl:2: .*expected one JSON object per line"),
        (
            "p.json",
            b'{"data": [{"a": 1}],\n"b": 2}',
            r"one object, with the fields data, b;",
        ),
        ("p.json", b'[{"a": 1}, 2]', r"p\.json row 2: this is a int; expected an array of objects"),
        (
            "p.jsonl",
            b'{"a": 1}\n{"a": "\\ud800"}\n',
            r"p\.jsonl:2: the field 'a' has '\\ud800', which",
        ),
        (
            "p.json",
            b'[{}, {"a": ["x\\udc00 y"]}]',
            r"p\.json row 2: the field 'a' .* half of a character",
        ),
        ("p.json", b'[{"\\ud800": 1}]', r"p\.json row 1: .* write the whole one, or leave it out"),
        (
            "p.jsonl",
            b'{"a": "\\ud800", "b": NaN',
            r"p\.jsonl:1: .*expected one JSON object per line",
        ),
        ("p.jsonl", b'["\\ud800"]', r"p\.jsonl:1: .*expected one JSON object per line"),
        ("p.json", b'[{"a": 1}', r"p\.json: .*; expected an array of objects"),
        ("p.parquet", b"PAR", r"cannot read .*p\.parquet as Parquet"),
        ("p.txt", b"", r"cannot tell the format .*\.jsonl, \.json, \.csv, \.parquet"),
    ],
)
def test_a_file_with_a_fault_is_refused_by_its_place(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_rows(tmp_path / name)


@pytest.mark.parametrize("name", ["none.jsonl", "none.csv", "none.json", "none.parquet"])
def test_a_file_that_is_not_there_is_said_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read problems from .*none.*: No such file"):
        read_rows(tmp_path / name)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"train": [], "test": []}, r"a table of train, test; .*give one split, such as data"),
        (7, "the data is a int; expected a list of dicts"),
        (["a"], "row 1 of the data is a str; expected a list of dicts"),
        ([{"a": object()}], "row 1: the field 'a' is of type object; expected text, numbers"),
        ([{"a": "\ud800"}], "row 1: the field 'a' has .* which is half of a character"),
        ([{1: "a"}], "row 1: a field is called 1; expected names that are text"),
    ],
)
def test_data_that_is_no_rows_is_refused(data: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_rows(data)


def test_without_pyarrow_both_ways_to_install_it_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"needs the package pyarrow.*'motley-rl\[parquet\]', or in a clone .*'\.\[parquet\]'",
    ):
        read_rows(tmp_path / "p.parquet")
