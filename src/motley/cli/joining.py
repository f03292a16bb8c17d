"""motley hub and join: a crew on several machines."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from motley.cli.common import (
    app,
    console,
    plain_errors,
    say,
    stop_on_interrupt,
    tell,
)
from motley.cli.watching import Watch, page_beside
from motley.config import REPORTERS, EnginePart, OpenAI, Vllm, check_name
from motley.reports.saying import recall_signs, show_signs

if TYPE_CHECKING:
    from motley.distributed.join import Brings
    from motley.distributed.participant import Participant
    from motley.reports.trackers import Reports
    from motley.runs.metrics import LearnerLine, SamplerLine

Trackers = Annotated[
    list[str] | None,
    typer.Option(
        help=(
            "Tell this tracker of this peer's metrics, instead of those the crew file names: "
            "tensorboard, wandb, trackio or none; may be given several times."
        )
    ),
]


@app.command()
def join(
    url: Annotated[str, typer.Argument(help="The hub's address, from the line it printed.")],
    crew: Annotated[str, typer.Option(help="The crew's name.")],
    invite: Annotated[
        str,
        typer.Option(
            help="The invitation, from the line the hub printed; @FILE reads it from a file.",
            envvar="MOTLEY_INVITE",
        ),
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="Folder with the crew's problem files, if it has any.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="This peer's model, instead of the one its crew file names for it.")
    ] = "",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1 or mps, instead of what the crew file says.")
    ] = "",
    devices: Annotated[
        int, typer.Option(help="So many of them share the model, instead of the crew file's.")
    ] = 0,
    vllm: Annotated[str, typer.Option(help="Sample with vLLM: the interpreter that has it.")] = "",
    openai: Annotated[
        str, typer.Option(help="Sample with the completions server at this address.")
    ] = "",
    judge: Annotated[
        str, typer.Option(help="Have the server at this address judge what is learned from.")
    ] = "",
    report: Trackers = None,
    out: Annotated[
        Path | None, typer.Option(help="This peer's run folder; runs/CREW-PEER otherwise.")
    ] = None,
    watch: Watch = False,
) -> None:
    """Take part in a crew from this machine.

    Ctrl-C leaves; the same line comes back and goes on where it was.
    """
    with plain_errors():
        from motley.distributed.join import Brings
        from motley.peers.torchrun import Launched, follow, gathered

        launched = Launched.of(os.environ)
        if launched and launched.rank:
            follow(launched)
            return
        with gathered(launched) as ranks:
            check_name("crew", crew)
            trackers = _trackers(report)
            brings = Brings(
                data, model, device, devices, _engine(vllm, openai), _judge(judge), ranks=ranks
            )
            called = _Called(url, crew, _invitation(invite), out)
            participant = _join_and_stay(called, brings, trackers, watch)
        if not participant.finished:
            tell(f"left after round {participant.finished_rounds}; come back with the same line")
            raise typer.Exit(130)
        tell(f"finished; run folder: {participant.station.folder}")


class _Called(NamedTuple):
    """Which crew to join, and as whom."""

    url: str
    crew: str
    invite: str
    out: Path | None

    @property
    def folder(self) -> Path:
        from motley.trust.invitation import Invitation

        return self.out or Path("runs") / f"{self.crew}-{Invitation.read(self.invite).peer}"


def _join_and_stay(
    called: _Called, brings: Brings, trackers: list[str] | None, watch: bool
) -> Participant:
    """Take part to the end, or until a stop is asked for."""
    from motley.reports.trackers import Reports

    folder = called.folder
    with page_beside(folder, watch), ExitStack() as held:
        try:
            participant = _join(called, brings)
        except KeyboardInterrupt:  # on its way in there is nothing to save
            tell("stopped before it had joined; come back with the same line")
            raise typer.Exit(130) from None
        stop_asked = held.enter_context(stop_on_interrupt())
        reports = Reports(participant.station.config, folder, trackers)
        try:
            with closing(reports):
                _take_part(participant, stop_asked, reports)
        finally:
            participant.close()
    recall_signs(folder, console)
    return participant


def _trackers(given: list[str] | None) -> list[str] | None:
    """What --report names; None: as the crew file says."""
    names = [name for name in given or () if name != "none"]
    if unknown := [name for name in names if name not in REPORTERS]:
        raise ValueError(f"--report {unknown[0]}: use {', '.join(REPORTERS)} or none")
    return names if given else None


def _invitation(given: str) -> str:
    """An invitation as it is, or from @FILE: other users of the machine see what a command says."""
    if not given:
        raise ValueError(
            "there is no invitation; give --invite INVITATION, --invite @FILE or set MOTLEY_INVITE"
        )
    if not given.startswith("@"):
        return given
    try:
        words = Path(given[1:]).read_text(errors="replace").split()
    except OSError as error:
        raise ValueError(
            f"--invite {given}: {error.strerror}; give the file that has the invitation"
        ) from None
    return words[-1] if words else ""  # the whole line of the hub will do


def _judge(url: str) -> OpenAI | None:
    return OpenAI(url=url) if url else None


def _engine(vllm: str, openai: str) -> EnginePart | None:
    if not (vllm or openai):
        return None
    return EnginePart(
        vllm=Vllm(python=vllm) if vllm else None, openai=OpenAI(url=openai) if openai else None
    )


def _join(called: _Called, brings: Brings) -> Participant:
    from motley.distributed.join import join as join_crew

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[skill]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("joining", total=None, skill="")

        def show(peer: str, steps: int, accuracy: dict[str, float]) -> None:
            progress.update(
                bar,
                description=f"warm start of {peer}",
                skill=" ".join(f"{k} {v:.0%}" for k, v in accuracy.items()),
            )

        url, crew, invite, _ = called
        return join_crew(url, crew, invite, called.folder, say, brings, show)


def _take_part(participant: Participant, stop_asked: Callable[[], bool], reports: Reports) -> None:
    """Take part, and say what it waits for whenever that changes; long waits once a minute."""
    from motley.runs.metrics import LearnerLine

    station, first = participant.station, participant.finished_rounds
    rounds, elapsed_s = station.config.crew.rounds, station.clock.elapsed_s
    started_s, said_s, said = elapsed_s(), -math.inf, ""
    for event in participant.rounds():
        if stop_asked():
            participant.save()
            return
        if isinstance(event, str):
            what, since_s = event.split(" for ")[0], elapsed_s() - said_s
            if (what != said and since_s > 5) or since_s > 60:
                say(event)
                said_s, said = elapsed_s(), what
            continue
        said_s, said = elapsed_s(), ""
        show_signs([event], console)
        reports.log([event])
        per_round_s = (elapsed_s() - started_s) / max(1, event.round - first)
        line = (
            _learned(event, rounds, per_round_s)
            if isinstance(event, LearnerLine)
            else _sampled(event, rounds)
        )
        if line:
            say(line)


def _learned(line: LearnerLine, rounds: int, per_round_s: float) -> str:
    from motley.reports.scores import score_text
    from motley.runs.metrics import mean, measure_of

    measure = measure_of([line])
    skill = (
        f", held-out {measure} {score_text(mean(line.heldout), measure)}" if line.heldout else ""
    )
    gone = f", without {', '.join(line.without)}" if line.without else ""
    refused = sum(sum(reasons.values()) for reasons in (line.refused or {}).values())
    bad = f", {refused} records refused" if refused else ""
    muted = _muted(line)
    if not (skill or gone or muted or line.round % 10 == 1):
        return ""
    reward = "" if line.reward is None else f" reward {score_text(line.reward, 'reward')}"
    return (
        f"round {line.round} of {rounds}:{reward}{skill}{gone}{muted}{bad}; "
        f"{per_round_s * (rounds - line.round):.0f} s left"
    )


def _muted(line: LearnerLine) -> str:
    """Whom this peer does not learn from at present, why, and until when."""
    return "".join(
        f", {name} muted until round {suspicion.until}: {suspicion.muted}"
        for name, suspicion in (line.suspects or {}).items()
        if suspicion.muted
    )


def _sampled(line: SamplerLine, rounds: int) -> str:
    """A sampler counts no rounds: its learner's versions say how far the crew is."""
    from motley.reports.scores import score_text

    if line.round % 10 != 1:
        return ""
    newest = line.version + (line.behind or 0)
    reward = "" if line.reward is None else f" reward {score_text(line.reward, 'reward')},"
    return (
        f"batch {line.round}:{reward} with version {line.version}; "
        f"its learner is at {newest} of {rounds}"
    )
