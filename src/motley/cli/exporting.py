"""motley export: a trained peer as a folder that other tools load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from motley.cli.common import Best, app, plain_errors, tell

Dtype = Literal["float32", "bfloat16"]
Merge = Annotated[
    bool,
    typer.Option(
        "--merge",
        help=(
            "Add a LoRA adapter into its base. Otherwise it stays one, and names its base; one "
            "that only the run has goes to OUT/base."
        ),
    ),
]


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[
        Path, typer.Argument(help="The folder to write; it must not exist, or be empty.")
    ],
    peer: Annotated[
        str, typer.Option(help="Whose model; may be left out where one peer learns.")
    ] = "",
    merge: Merge = False,
    best: Best = False,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Of the weights. float32 is what trained; bfloat16 is half the size, rounded."
        ),
    ] = "float32",
) -> None:
    """Write a trained peer as an ordinary Hugging Face or PEFT folder, with a model card."""
    with plain_errors():
        from motley.reports.export import export_model, learners_of

        known = learners_of(run)
        if not peer and len(known) != 1:
            raise ValueError(
                f"{run} has {len(known)} peers that learn; choose one with --peer: "
                f"{', '.join(known)}"
            )
        folder = export_model(run, peer or known[0], out, merge, dtype, best)
        tell(
            f"{peer or known[0]} of {run} in {folder}; how it was trained and how to load it: "
            f"{folder / 'README.md'}"
        )
