"""motley objectives: the rows a crew file may name."""

from __future__ import annotations

from typing import Annotated

import typer

from motley.cli.common import AsJson, app, plain_errors, print_rows


@app.command("objectives")
def list_objectives(
    name: Annotated[
        str, typer.Argument(help="A row: its variants with their settings. None: all rows.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List what `objective =` and `variant =` may name, and where it comes from."""
    from motley.objectives import OBJECTIVES, VARIANTS, about, objective

    with plain_errors():
        if name:
            objective(name)
        chosen = [
            (row, variant)
            for row in ([name] if name else OBJECTIVES)
            for variant in ("", *VARIANTS.get(row, {}))
        ]
        rows = []
        for row, variant in chosen:
            line, source = about(row, variant)
            found = {"objective": row, "variant": variant, "about": line, "source": source}
            if name or as_json:
                found["settings"] = _settings(objective(row, variant).settings())
            rows.append(found)
        print_rows(rows, 'rows of methods; objective = "..." in [crew], and variant', as_json)


def _settings(settings: dict[str, float | str]) -> str:
    return ", ".join(f"{name} = {_value(value)}" for name, value in settings.items())


def _value(value: float | str) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"
