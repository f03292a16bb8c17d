"""Tables show themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.api.tables import MOST_SHOWN, Table

ROWS = [{"peer": "ann", "greedy": 0.51234}, {"peer": "<b>", "kind": "sort", "greedy": None}]


def test_columns_are_those_of_any_row_in_order() -> None:
    table = Table(ROWS)
    assert table.columns == ["peer", "greedy", "kind"]
    assert table.column("kind") == [None, "sort"]
    with pytest.raises(KeyError, match="no column 'x'; there are peer, greedy, kind"):
        table.column("x")


def test_text_and_html_show_the_same_cells() -> None:
    table = Table(ROWS, "how good")
    assert "0.512" in repr(table)
    assert "how good" in repr(table)
    assert "<td>0.512</td>" in table._repr_html_()
    assert "&lt;b&gt;" in table._repr_html_()


def test_a_long_table_says_what_it_leaves_out() -> None:
    table = Table([{"n": n} for n in range(MOST_SHOWN + 7)])
    assert repr(table).endswith("and 7 more rows")
    assert "and 7 more rows" in table._repr_html_()
    assert len(table[5:10]) == 5


@pytest.mark.slow
def test_a_table_as_csv_and_pandas(tmp_path: Path) -> None:
    table = Table(ROWS)
    assert table.to_csv(tmp_path / "t.csv").read_text().splitlines() == [
        "peer,greedy,kind",
        "ann,0.51234,",
        "<b>,,sort",
    ]
    frame = pytest.importorskip("pandas", reason="pandas is not installed")
    assert list(table.to_pandas().columns) == table.columns
    assert isinstance(table.to_pandas(), frame.DataFrame)
