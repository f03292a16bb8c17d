"""Tables that show themselves: as text in a terminal, as HTML in a notebook, as pandas on request.

Knows no run.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table as RichTable

from motley.reports.display import svg_of
from motley.reports.scores import cell_text

if TYPE_CHECKING:
    import pandas

Value = str | int | float | bool | None
Row = Mapping[str, Value]

MOST_SHOWN = 60


class Table(Sequence[Row]):
    """Rows with named columns.

    >>> table = Table([{"peer": "ann", "greedy": 0.5}])
    >>> table[0]["greedy"], table.column("peer")
    (0.5, ['ann'])
    """

    def __init__(self, rows: Sequence[Row], title: str = "") -> None:
        self.rows, self.title = list(rows), title

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def column(self, name: str) -> list[Value]:
        """The values of a column; None where a row has none."""
        if name not in self.columns:
            raise KeyError(f"no column {name!r}; there are {', '.join(self.columns) or 'none'}")
        return [row.get(name) for row in self.rows]

    def to_pandas(self) -> pandas.DataFrame:
        try:
            import pandas
        except ImportError:
            raise ImportError(
                "to_pandas() needs pandas, which is not installed: pip install pandas"
            ) from None
        return pandas.DataFrame(self.rows, columns=self.columns)

    def to_csv(self, path: str | Path) -> Path:
        """Write a CSV file; its path."""
        written = io.StringIO()
        writer = csv.DictWriter(written, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        Path(path).write_text(written.getvalue(), encoding="utf-8")
        return Path(path)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Table: ...
    def __getitem__(self, index: int | slice) -> Row | Table:
        if isinstance(index, str):
            raise TypeError(f"rows are numbered; for a column write .column({index!r})")
        if isinstance(index, slice):
            return Table(self.rows[index], self.title)
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        if not self.rows:
            return f"{self.title or 'table'}: no rows"
        shown = RichTable(title=self.title or None)
        for name in self.columns:
            shown.add_column(name)
        for row in self.rows[:MOST_SHOWN]:
            shown.add_row(*(cell_text(row.get(name)) for name in self.columns))
        console = Console(file=io.StringIO(), width=160)
        console.print(shown)
        written = console.file.getvalue()  # type: ignore[attr-defined]
        return f"{written}{self._more()}".rstrip()

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>"
            + "".join(f"<td>{html.escape(cell_text(row.get(name)))}</td>" for name in self.columns)
            + "</tr>"
            for row in self.rows[:MOST_SHOWN]
        )
        title = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{title}<tr>{head}</tr>{body}</table><p>{self._more()}</p>"

    def _more(self) -> str:
        left = len(self.rows) - MOST_SHOWN
        return f"and {left} more rows" if left > 0 else ""


class Curves(Table):
    """The numbers of a run: round, peer, key, value. In a notebook it draws itself."""

    def __init__(self, rows: Sequence[Row], draw: Callable[[Sequence[str]], Figure]) -> None:
        super().__init__(rows, "curves")
        self._draw = draw

    def figure(self, *keys: str) -> Figure:
        """A picture of some keys, such as "heldout/*"; of those that most ask for otherwise."""
        return self._draw(keys)

    def _repr_html_(self) -> str:
        return svg_of(self.figure())
