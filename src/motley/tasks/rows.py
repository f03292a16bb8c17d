"""Rows: what a user's data becomes, whatever it comes as.

Owns formats and what counts as missing; knows no field by name, no problem and no score. Nothing
here is imported that the data does not need.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from motley.tasks.extras import load

Fields = dict[str, Any]
Decoded = TypeVar("Decoded", Fields, list[Any])

_MISSING = ("NAType", "NaTType")  # what pandas has for what is not there
_HALF = re.compile("[\ud800-\udfff]")  # a surrogate without its other one
MAX_CELL = 1 << 26  # characters of one cell of a CSV file
_EXPECTED = (
    "expected a list of dicts, a pandas DataFrame, a datasets.Dataset, or the path of a .jsonl, "
    ".json, .csv or .parquet file"
)


class PlacedRow(NamedTuple):
    """The fields of a row, and its place for what is wrong in it: rows are counted from 1."""

    fields: Fields
    place: str


def read_rows(source: object) -> list[Fields]:
    """Rows as dicts of a list of dicts, a DataFrame, a datasets.Dataset, or a file's path.

    >>> read_rows("problems.csv")  # [{"prompt": "2+2=", "answer": "4"}, ...]
    """
    return [row.fields for row in placed_rows(source)]


def placed_rows(source: object) -> list[PlacedRow]:
    """The same with places. A value that is no number (NaN) counts as missing: it becomes None."""
    rows = _of_file(Path(source)) if isinstance(source, str | Path) else list(_of_object(source))
    return [
        PlacedRow(
            {_name(key, place): _plain(value, key, place) for key, value in fields.items()}, place
        )
        for fields, place in rows
    ]


def _name(key: object, place: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{place}: a field is called {key!r}; expected names that are text")
    return _text(key, key, place)


def _text(value: str, key: str, place: str) -> str:
    if half := _HALF.search(value):
        raise ValueError(
            f"{place}: the field {key!r} has {half[0]!r}, which is half of a character; write the "
            "whole one, or leave it out"
        )
    return str(value)


def _plain(value: Any, key: str, place: str) -> Any:
    """A value as JSON knows it, so that it can be hashed the same everywhere."""
    if value is None or type(value).__name__ in _MISSING:
        return None
    if isinstance(value, str):
        return _text(value, key, place)
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return {_name(k, place): _plain(v, key, place) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, key, place) for v in value]
    if callable(listed := getattr(value, "tolist", None)):  # numpy, torch
        return _plain(listed(), key, place)
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    raise ValueError(
        f"{place}: the field {key!r} is of type {type(value).__name__}; expected text, numbers, "
        "lists or tables of them: convert it, or leave the field out"
    )


# Objects


def _of_object(source: Any) -> Iterable[PlacedRow]:
    if isinstance(source, Mapping):
        raise ValueError(
            f"the data is a table of {', '.join(map(str, source)) or 'nothing'}; {_EXPECTED}; of a "
            'DatasetDict give one split, such as data["train"]'
        )
    if hasattr(source, "to_dict") and hasattr(source, "columns"):  # pandas
        listed: Any = source.to_dict("records")
    elif hasattr(source, "to_dicts") or hasattr(source, "to_pylist"):  # polars, arrow
        listed = source.to_dicts() if hasattr(source, "to_dicts") else source.to_pylist()
    else:  # a list, a generator, a datasets.Dataset
        listed = source
    try:
        rows = list(listed)
    except TypeError:
        raise ValueError(f"the data is a {type(source).__name__}; {_EXPECTED}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ValueError(f"row {number} of the data is a {type(row).__name__}; {_EXPECTED}")
    return [PlacedRow(dict(row), f"row {number}") for number, row in enumerate(rows, 1)]


# Files


def _of_file(path: Path) -> list[PlacedRow]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(
            f"cannot tell the format of {path} by its name; expected it to end in "
            f"{', '.join(_READERS)}"
        )
    try:
        return reader(path)
    except OSError as error:
        raise ValueError(f"cannot read problems from {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}:{line}: this is not UTF-8 text ({error.reason}); save the file as UTF-8"
        ) from None


def _of_lines(path: Path) -> list[PlacedRow]:
    return _lines(path, path.read_bytes().decode("utf-8-sig"))


def _lines(path: Path, text: str) -> list[PlacedRow]:
    # not splitlines: a JSON text may hold what it takes for the end of a line
    places = [(line, f"{path}:{number}") for number, line in enumerate(text.split("\n"), 1)]
    return [PlacedRow(_fields(line, place), place) for line, place in places if line.strip()]


def _of_json(path: Path) -> list[PlacedRow]:
    """An array of objects; or an object a line, as some call JSON what is JSONL."""
    text = path.read_bytes().decode("utf-8-sig")
    if not text.lstrip().startswith("["):
        with suppress(msgspec.DecodeError):
            whole = _decoded(text, dict)
            raise ValueError(
                f"{path}: this is one object, with the fields {', '.join(whole) or 'none'}; "
                "expected an array of objects"
            )
        return _lines(path, text)
    try:
        rows = _decoded(text, list)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}; expected an array of objects") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(
                f"{path} row {number}: this is a {type(row).__name__}; expected an array of objects"
            )
    return [PlacedRow(row, f"{path} row {number}") for number, row in enumerate(rows, 1)]


def _fields(line: str, place: str) -> Fields:
    try:
        return _decoded(line, dict)
    except msgspec.DecodeError as error:
        raise ValueError(
            f'{place}: {error}; expected one JSON object per line, such as {{"prompt": "2+2=", '
            f'"answer": "4"}}'
        ) from None


def _decoded(text: str, kind: type[Decoded]) -> Decoded:
    """JSON. What has half of a character is handed on: `_text` says in which field it is."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError:
        with suppress(ValueError, RecursionError):
            loose = json.loads(text)
            if isinstance(loose, kind) and _HALF.search(json.dumps(loose, ensure_ascii=False)):
                return loose
        raise


def _of_csv(path: Path) -> list[PlacedRow]:
    """The first line names the fields. All values are text, and an empty cell is missing."""
    before = csv.field_size_limit(MAX_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _csv_rows(path, file)
    finally:
        csv.field_size_limit(before)


def _csv_rows(path: Path, file: Iterable[str]) -> list[PlacedRow]:
    reader = csv.reader(file, strict=True)
    rows: list[PlacedRow] = []
    try:
        names = next(reader, [])
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not all(names):
            raise ValueError(
                f"{path}:1: the first line must name every field, none twice; got {names}"
            )
        if len(names) == 1 and any(mark in names[0] for mark in ";\t"):
            raise ValueError(
                f"{path}:1: the first line names one field, {names[0]!r}; separate cells with "
                "commas"
            )
        begin = reader.line_num + 1
        for cells in reader:
            place, begin = f"{path}:{begin}", reader.line_num + 1
            if not cells:  # an empty line
                continue
            if len(cells) != len(names):
                raise ValueError(
                    f"{place}: {len(cells)} cells, and the first line names {len(names)} fields "
                    f"({', '.join(names)}); quote cells that hold a comma"
                )
            rows.append(
                PlacedRow({n: cell or None for n, cell in zip(names, cells, strict=True)}, place)
            )
    except csv.Error as error:
        raise ValueError(
            f"{path}:{reader.line_num}: {error}; expected CSV with commas and double quotes"
        ) from None
    return rows


def _of_parquet(path: Path) -> list[PlacedRow]:
    wanted_by = f"reading {path.name}"
    arrow = load("pyarrow", wanted_by, extra="parquet")
    parquet = load("pyarrow.parquet", wanted_by, extra="parquet")
    content = io.BytesIO(path.read_bytes())
    try:
        rows = parquet.read_table(content).to_pylist()
    except (arrow.lib.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {path} as Parquet: {error}") from None
    return [PlacedRow(row, f"{path} row {number}") for number, row in enumerate(rows, 1)]


_READERS: dict[str, Callable[[Path], list[PlacedRow]]] = {
    ".jsonl": _of_lines,
    ".json": _of_json,
    ".csv": _of_csv,
    ".parquet": _of_parquet,
}
