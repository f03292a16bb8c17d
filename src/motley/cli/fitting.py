"""motley fit: whether a crew's models fit their devices, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from motley.cli.common import AsJson, CrewFile, Settings, app, plain_errors, print_rows, tell
from motley.config import read_config

if TYPE_CHECKING:
    from motley.runs.memory import PeerMemory


@app.command("fit")
def fit_command(
    crew_file: CrewFile,
    memory: Annotated[
        str,
        typer.Option(help="What the GPU has, such as 139GiB or 80GB; otherwise what is free here."),
    ] = "",
    peer: Annotated[str, typer.Option(help="Only this peer.")] = "",
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Say what each peer takes of its device's memory, by part, and what to change if that is too
    much. Loads no weights. Exits with 1 if a peer does not fit.
    """
    from motley.runs.memory import crew_memory, parse_memory

    with plain_errors():
        config = read_config(crew_file, settings or ())
        taken = crew_memory(config, parse_memory(memory) if memory else 0, peer)
        changes = [msgspec.to_builtins(change) for one in taken for change in one.changes]
        told = {"changes": changes} if changes else {}
        parts = [row for one in taken for row in _parts(one)]
        rows = [_total(one) for one in taken]
        print_rows(rows + _together(taken), f"memory of {crew_file}", as_json, parts=parts, **told)
        if not as_json:
            _tell_remedies(taken)
        if not all(one.fits for one in taken):
            raise typer.Exit(1)


def _total(one: PeerMemory) -> dict[str, Any]:
    return {
        "peer": one.peer,
        "takes_gib": _gib(one.takes.nbytes),
        "has_gib": _gib(one.device.nbytes),
        "device": "GPU" if one.device.is_gpu else "CPU",
        "token_budget": one.token_budget,
        "result": "fits" if one.fits else "too large",
    }


def _together(taken: list[PeerMemory]) -> list[dict[str, Any]]:
    """What peers take that name the same device, if they run on one machine."""
    rows = []
    for place in dict.fromkeys((one.device.name, one.device.is_gpu) for one in taken):
        there = [one for one in taken if (one.device.name, one.device.is_gpu) == place]
        if len(there) > 1:
            takes = sum(one.takes.nbytes for one in there)
            fits = takes <= there[0].device.nbytes
            row = {"peer": f"{len(there)} peers", "takes_gib": _gib(takes), "token_budget": ""}
            row["result"] = "fit together" if fits else "too large together"
            rows.append(_total(there[0]) | row)
    return rows


def _parts(one: PeerMemory) -> list[dict[str, Any]]:
    return [
        {"peer": one.peer, "part": part.name, "gib": _gib(part.nbytes), "when": part.when}
        for part in one.takes.parts
    ]


def _tell_remedies(taken: list[PeerMemory]) -> None:
    for one in taken:
        if one.fits:
            continue
        if one.changes and one.changes[-1].fits:
            words = ", ".join(change.change for change in one.changes)
            tell(f"{one.peer} does not fit; write: {words}")
        else:
            tell(
                f"{one.peer} does not fit, whatever is changed above; use a smaller model, fewer "
                "max_tokens or a smaller group_size"
            )


def _gib(nbytes: int) -> float:
    return round(nbytes / 2**30, 3)
