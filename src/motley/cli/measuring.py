"""motley eval, check and bench: figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from motley.cli.common import (
    AsJson,
    Best,
    CrewFile,
    Settings,
    app,
    bench_app,
    plain_errors,
    print_rows,
    stderr,
    warn,
)
from motley.cli.progress import timed_bars
from motley.config import PeerConfig, Prompt, read_config
from motley.records import Sampling
from motley.tasks import Split, Task

if TYPE_CHECKING:
    from motley.benchmarks.bench import Row
    from motley.models.policy import Policy


@app.command("eval")
def evaluate_command(
    target: Annotated[
        str,
        typer.Argument(
            help=(
                "A run folder, or a model: tiny:1m, smollm2-135m, a folder, a .gguf file, a hub id."
            )
        ),
    ],
    task: Annotated[str, typer.Option(help="A task; the run's own otherwise.")] = "",
    crew_file: Annotated[
        Path | None, typer.Option("--crew", help="Task, prompt and sampling of this crew file.")
    ] = None,
    split: Annotated[Split, typer.Option(help="heldout, ood or train.")] = "heldout",
    problems: Annotated[int, typer.Option(min=2, help="Problems per kind.")] = 200,
    samples: Annotated[int, typer.Option(min=1, help="k of avg@k and pass@k.")] = 8,
    peer: Annotated[str, typer.Option(help="Only this peer of the run.")] = "",
    settings: Settings = None,
    best: Best = False,
    as_json: AsJson = False,
) -> None:
    """Measure how good a run's models, or any model, are on a task's problems."""
    from motley.engines import torch_engine
    from motley.runs.evaluation import evaluate

    with plain_errors():
        asked = _settings(target, task, crew_file, settings or ())
        if split not in asked.task.splits:
            raise ValueError(
                f"split {split!r} is not in this task; it has {', '.join(asked.task.splits)}"
            )
        policies = _policies(target, asked, best)
        if peer and peer not in policies:
            raise ValueError(f"{target} has no peer {peer!r}; it has {', '.join(policies)}")
        rows = [
            {"peer": name, **line.row()}
            for name, policy in policies.items()
            if peer in ("", name)
            for line in evaluate(
                torch_engine(policy),
                policy.prompts,
                asked.task,
                split,
                asked.sampling,
                problems,
                samples,
            )
        ]
        print_rows(rows, f"{target} on {split}: {asked.task.measure}", as_json)


@dataclass(frozen=True, slots=True)
class _Settings:
    """How a model is asked."""

    task: Task
    sampling: Sampling
    prompt: Prompt


def _settings(target: str, task: str, crew_file: Path | None, changes: Sequence[str]) -> _Settings:
    """Those of a crew file, else of the run; those that are usual for another task than theirs."""
    from motley.tasks import load_task

    own = Path(target) / "config.toml"
    path = crew_file or (own if own.exists() else None)
    if changes and path is None:
        raise ValueError(
            f"--set {changes[0]} changes a crew file, and {target} has none; give one with --crew"
        )
    config = read_config(path, changes) if path else None
    if config and task in ("", config.crew.task):
        chosen = load_task(config.crew.task, config.task)
        return _Settings(chosen, config.sampling, config.prompt)
    return _Settings(load_task(task or "digits", {}), Sampling(), Prompt())


def _policies(target: str, settings: _Settings, best: bool) -> dict[str, Policy]:
    """By name: every peer of a run, or a model."""
    from motley.models.opening import initial_policy, saved_policy
    from motley.runs.building import trained_policies

    folder = Path(target)
    if (folder / "config.toml").exists():
        return trained_policies(folder, settings.task, settings.prompt, best)
    if best:
        raise ValueError(f"{target} is no run folder, so that it has no --best; leave it out")
    if folder.is_dir():
        return {folder.name: saved_policy(folder, settings.prompt, settings.task)}
    peer = PeerConfig(name="model", model=target)
    return {target: initial_policy(peer, 0, settings.prompt, settings.task)}


@app.command()
def check(crew_file: CrewFile, settings: Settings = None, as_json: AsJson = False) -> None:
    """Check a crew file, its task, and each peer's engine against its trainer; where vocabularies
    differ, also what each peer can make of each other's answers.
    """
    from motley.runs.conformance import check_crew

    with plain_errors():
        rows, pairs = check_crew(read_config(crew_file, settings or ()))
        told = {"pairs": [msgspec.to_builtins(pair) for pair in pairs]} if pairs else {}
        print_rows(rows, f"check of {crew_file}", as_json, **told)
        if any(row["result"] != "ok" for row in rows):
            raise typer.Exit(1)


@bench_app.command("local")
def bench_local(
    repeats: Annotated[
        int, typer.Option(min=1, help="Measurements of each; the median counts.")
    ] = 9,
    as_json: AsJson = False,
) -> None:
    """Measure sampling and training on this machine against transformers and TRL."""
    from motley.benchmarks.local import local_benchmark

    with plain_errors(), _progress() as show:
        rows = local_benchmark(repeats, show)
    print_rows(rows, "tokens per second, this machine", as_json)


GpuSections = Annotated[
    list[str] | None, typer.Option(help="Only this section; may be given several times.")
]
GpuModels = Annotated[
    list[str] | None,
    typer.Option(
        help="Instead of smollm2-135m and random-360m: a model, or random-1.4b, "
        "random-1.5b or random-7b; may be given several times."
    ),
]
HowOursLearns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SETTINGS",
        help="How ours takes whole steps, as a crew file says it: 'masters=bfloat16 "
        "dtype=bfloat16 learning.token_budget=8192'. May be given several times, for rows beside "
        "each other; default is what a crew file has that says nothing.",
    ),
]
TrlWeights = Annotated[
    list[str] | None,
    typer.Option(
        help="What TRL keeps its weights in for whole steps: float32 or bfloat16; none: ours "
        "alone. May be given several times."
    ),
]
GpuSizes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=NUMBER",
        help="How much work, such as problems=32, samples=8, new_tokens=128, repeats=2 or "
        "trl_rows=64. Repeatable.",
    ),
]


@bench_app.command("gpu")
def bench_gpu(
    only: GpuSections = None,
    model: GpuModels = None,
    device: Annotated[
        str, typer.Option(help="cuda, cuda:1; cpu for large machines only.")
    ] = "cuda",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the arithmetic.")
    ] = "auto",
    vllm: Annotated[str, typer.Option(help="Also against vLLM: the interpreter that has it.")] = "",
    learn: HowOursLearns = None,
    trl: TrlWeights = None,
    size: GpuSizes = None,
    vocabulary: Annotated[
        str, typer.Option(help="A model, or its folder, whose vocabulary random models borrow.")
    ] = "smollm2-135m",
    as_json: AsJson = False,
) -> None:
    """Measure sampling, training and whole steps on a GPU against transformers, TRL and vLLM."""
    from motley.benchmarks.bench import sizes_of
    from motley.benchmarks.gpu import MODELS, SECTIONS, GpuWork, gpu_benchmark

    with plain_errors(), _progress() as show:
        work = GpuWork(
            device=device,
            models=model or MODELS,
            dtype=dtype,
            sizes=sizes_of(size or ()),
            sections=only or (),
            vllm=vllm,
            learn=learn or (),
            trl=trl or (),
            vocabulary=vocabulary,
        )
        rows = gpu_benchmark(show, work)
    if as_json:
        print_rows(rows, "speed, this GPU", as_json)
        return
    for name, section in SECTIONS.items():
        measured = [
            {key: value for key, value in row.items() if key != "section"}
            for row in rows
            if row["section"] == name
        ]
        if measured:
            print_rows(measured, section.title, as_json)


@bench_app.command("estimators")
def bench_estimators(
    run: Annotated[Path, typer.Argument(help="A run folder that has its checkpoints.")],
    rows: Annotated[
        str, typer.Option(help="Rows separated by spaces, such as 'tis:C=4 uplift/relative'.")
    ] = "",
    rounds: Annotated[
        list[int] | None,
        typer.Option(
            "--round", min=0, help="A kept checkpoint; 0 is the beginning. May be given again."
        ),
    ] = None,
    batches: Annotated[int, typer.Option(help="Batches of fresh problems, for every peer.")] = 32,
    groups: Annotated[
        int, typer.Option(min=0, help="Groups of a batch; 0: as many as a step of the crew has.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure bias and variance of each row's gradient against that of the expected reward, at
    checkpoints of a run. The numbers are also kept in RUN/estimators.jsonl.
    """
    from motley.runs.replay import kept_rounds
    from motley.study.estimators import keep_estimators, noisy, shown
    from motley.study.gradients import USUAL_ROWS, ProbeSize, measure, rows_of

    with plain_errors():
        chosen, size = rows_of(rows or USUAL_ROWS), ProbeSize(batches, groups)
        lines = []
        with _progress() as show:
            for number in rounds or [0, kept_rounds(run)[-1]]:
                lines += measure(run, number, chosen, size, show)
        keep_estimators(run, lines)
        print_rows([shown(line) for line in lines], f"gradients of {run}", as_json)
        if hidden := list(dict.fromkeys(noisy(lines))):
            warn(
                f"the reference is hardly larger than its error for {', '.join(hidden)}; give "
                f"more --batches than {batches}, or more --groups"
            )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar of what is being measured (what, done, total), with the time that is left."""
    console = stderr()
    with timed_bars(
        "{task.description}", console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("measuring", total=None)
        yield lambda what, done, total: progress.update(
            bar, description=what, completed=done, total=total
        )


@bench_app.command("wire")
def bench_wire(as_json: AsJson = False) -> None:
    """Measure what rollouts cost on the wire: bytes, rounding, admission, throughput."""
    from motley.benchmarks.wire import wire_benchmark

    _bench(wire_benchmark, "about 10 s in all", "the wire, this machine", as_json)


@bench_app.command("weights")
def bench_weights(as_json: AsJson = False) -> None:
    """Measure what a learner's weights cost on the wire, and compare every version bit for bit."""
    from motley.benchmarks.weights import weights_benchmark

    _bench(weights_benchmark, "about a minute in all", "weights on their way to samplers", as_json)


@bench_app.command("watch")
def bench_watch(
    rounds: Annotated[int, typer.Option(min=1, help="Of the run that is looked at.")] = 10_000,
    peers: Annotated[int, typer.Option(min=1, help="Of its crew.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Make a long run of a large crew, and measure how quickly its page opens and answers.

    It trains nothing. 10,000 rounds of 20 peers take some minutes and 5 GB of the temporary folder
    to make.
    """
    from motley.benchmarks.asking import watch_benchmark

    with plain_errors(), _progress() as show:
        rows = watch_benchmark(show, rounds, peers)
    print_rows(rows, f"the page of {rounds:,} rounds of {peers} peers, this machine", as_json)


@bench_app.command("crowd")
def bench_crowd(
    peers: Annotated[
        list[int] | None,
        typer.Option(min=4, help="Instead of 10, 30, 100, 300 and 1,000; may be given again."),
    ] = None,
    hear: Annotated[int, typer.Option(min=1, help="Others whom a peer hears in a round.")] = 8,
    rounds: Annotated[int, typer.Option(min=3, help="Of each crew.")] = 8,
    real: Annotated[int, typer.Option(min=1, help="Peers that train; others are recorded.")] = 4,
    pace: Annotated[Literal["lockstep", "async"], typer.Option(help="Of the crews.")] = "lockstep",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the quickest counts.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Also draw it: .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a peer's round costs in crews of any size, of which it hears a few.

    A few peers train on virtual time, the others are recorded. It takes some minutes.
    """
    from motley.benchmarks.crowd import SIZES, crowd_costs, draw_costs, rows_of

    with plain_errors(), _progress() as show:
        costs = crowd_costs(peers or SIZES, hear, rounds, real, pace, repeats, show)
        if plot:
            draw_costs(costs, plot)
    print_rows(rows_of(costs), f"a peer's round, hearing {hear} others, {pace}", as_json)


@bench_app.command("hub")
def bench_hub(
    peers: Annotated[int, typer.Option(min=4, help="Of the crew, each with its model.")] = 200,
    rounds: Annotated[int, typer.Option(min=4, help="Of each peer.")] = 8,
    pace: Annotated[Literal["lockstep", "async"], typer.Option(help="Of the crew.")] = "lockstep",
    hear: Annotated[int, typer.Option(min=1, help="Others whom a peer hears in a round.")] = 8,
    churn: Annotated[
        int,
        typer.Option(
            min=0,
            help="Peers that are killed and come back, twice; as many leave, as many come late.",
        ),
    ] = 10,
    processes: Annotated[int, typer.Option(min=1, help="That share the other peers.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Have a large crew train at one hub of this machine, and see that nothing is lost or doubled.

    Hub, server and peers are real; peers share processes. 200 take some minutes and 6 GB of memory.
    """
    from motley.benchmarks.hub import HubPlan, try_hub
    from motley.benchmarks.hub_figures import check_rows, checks_of, figure_rows

    with plain_errors(), _progress() as show:
        plan = HubPlan(
            peers=peers, rounds=rounds, pace=pace, hear=hear, churn=churn, processes=processes
        )
        trial = try_hub(plan, show)
        checks = checks_of(trial)
    title = f"{peers} peers at one hub, {rounds} rounds, {pace}"
    print_rows(figure_rows(trial), title, as_json, checks=check_rows(checks))
    if not checks.hold:
        warn("something was lost, doubled or not heard: see the checks")
        raise typer.Exit(1)


def _bench(
    measure: Callable[[Callable[[str], None]], list[Row]],
    takes: str,
    title: str,
    as_json: bool,
) -> None:
    """Measure with a word on what is being measured, and print the rows."""
    with (
        plain_errors(),
        Progress(
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=stderr(),
            transient=True,
        ) as bar,
    ):
        step = bar.add_task("measuring")
        rows = measure(lambda what: bar.update(step, description=f"measuring {what} ({takes})"))
    print_rows(rows, title, as_json)
