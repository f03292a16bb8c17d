"""motley new: a crew file to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.common import app, plain_errors, say, tell, warn


@app.command()
def new(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A model as after model = in a crew file, one for each peer. :lora, :lora16 or "
                ":last2 behind it says what of it trains. Repeatable."
            )
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Problems: a .jsonl, .json, .csv or .parquet file.")
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="module:function that scores; else answers are compared. Repeatable."),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FIELD", help="What the data calls prompt, answer or kind. Repeatable."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The crew's name; the data's otherwise.")] = "",
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("crew.toml"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Write a crew file, with comments, for your models and data.

    Without options it is an example of three tiny models.
    """
    from motley.files import replace
    from motley.runs.drafting import Draft, DraftData, DraftModel

    with plain_errors():
        if out.exists() and not force:
            raise ValueError(f"{out} exists; choose another file with --out, or give --force")
        rewards = tuple(reward or ())
        _check_rewards(rewards, data)
        looked = DraftData.of(data, _fields(field or []), bool(rewards)) if data else None
        chosen = model or (["tiny:0.3m", "tiny:1m"] if data else ["tiny:0.3m", "tiny:deep", _WIDE])
        draft = Draft(out, tuple(map(DraftModel.of, chosen)), looked, rewards, name)
        text = draft.text()
        out.parent.mkdir(parents=True, exist_ok=True)
        replace(out, text.encode())
        for module in {spec.rpartition(":")[0].partition(".")[0] for spec in rewards}:
            if not any((out.parent / there).exists() for there in (f"{module}.py", module)):
                warn(f"there is no {module}.py beside {out} yet; the reward is looked for there")
        for renamed, called in (looked.fields if looked else {}).items():
            say(f"{renamed} is {called} in {data}")
        named = shlex.quote(str(out))
        tell(f"wrote {out}; next: motley check {named}, then motley train {named}")


_WIDE = "tiny:1m:lora16"


def _check_rewards(rewards: tuple[str, ...], data: Path | None) -> None:
    for spec in rewards:
        module, _, function = spec.rpartition(":")
        if not module or not function.isidentifier():
            raise ValueError(f"--reward {spec} is not module:function; write such as mine:score")
        if data is None:
            raise ValueError(f"--reward {spec} scores answers to problems; give them with --data")


def _fields(pairs: list[str]) -> dict[str, str]:
    fields = {}
    for pair in pairs:
        name, equals, called = pair.partition("=")
        if not equals:
            raise ValueError(f"--field {pair} is not NAME=FIELD; write such as prompt=question")
        fields[name] = called
    return fields
