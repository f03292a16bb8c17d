"""The app: its version, short help, completion, how much its commands say (-q, -v), and how they
warn.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape

import motley

# what is done, as it is done: nothing with -q
console = Console()
# what was asked for
results = Console()

Command = TypeVar("Command", bound=Callable[..., Any])

FIRST = ("demo", "new", "train", "eval", "export")  # the commands that matter, in that order

VERSION = f"motley {motley.__version__}"

SHORT_HELP = f"""{VERSION}: a crew of different language models that train each other

  motley demo                   three tiny models learn from each other, in minutes on a CPU
  motley new --model ID --data problems.csv --out crew.toml
                                write a crew file, with comments, for your models and data
  motley train crew.toml        train the crew; Ctrl-C stops it, --resume RUN goes on
  motley eval RUN               how good its models are on held-out problems
  motley export RUN OUT --peer NAME
                                a trained model as an ordinary Hugging Face folder

motley --help lists every command, motley COMMAND -h explains one."""

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and the result.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also what is loaded, and where.")]


def warn(text: str) -> None:
    """A line as it is, of what may be wrong: on stderr, and -q leaves it."""
    Console(stderr=True, soft_wrap=True).print(
        f"[yellow]warning:[/yellow] {escape(text)}", highlight=False
    )


_as_python_does = warnings.showwarning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Ours in one line, without its place in the code; a library's as Python does.

    What a library says of a line of ours counts as ours, if it is of the plain kind.
    """
    ours = Path(filename).is_relative_to(Path(motley.__file__).parent)
    if ours and category is UserWarning:
        warn(str(message))
    else:
        _as_python_does(message, category, filename, lineno, file, line)


# here, and not in a command: the processes that commands start import this too
warnings.showwarning = _show_warning


def set_loudness(quiet: bool, verbose: bool) -> None:
    """How much the command that runs now says."""
    if quiet and verbose:
        raise typer.BadParameter("-q and -v exclude each other; give one of them")
    console.quiet = quiet
    logging.getLogger("motley.kept").setLevel(logging.ERROR if quiet else logging.NOTSET)
    logger = logging.getLogger("motley")
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    for handler in [*logger.handlers]:
        logger.removeHandler(handler)
    if verbose:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


class App(typer.Typer):
    """A Typer whose commands all take -q and -v, before their name or after it.

    They stand in one of two panels of its help.
    """

    def command(self, name: str | None = None, **options: Any) -> Callable[[Command], Command]:
        def register(function: Command) -> Command:
            called = name or function.__name__.replace("_", "-")
            if self is app:
                options.setdefault("rich_help_panel", "Begin here" if called in FIRST else "More")
            typer.Typer.command(self, called, **options)(_with_loudness(function))
            return function

        return register

    def put_first(self) -> None:
        """List the commands that matter before the others."""
        order = {name: number for number, name in enumerate(FIRST)}
        self.registered_commands.sort(key=lambda one: order.get(one.name or "", len(order)))


def _with_loudness(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def command(*, called: typer.Context, quiet: bool, verbose: bool, **given: Any) -> Any:
        before = called.find_root().params  # what stands before the command
        set_loudness(quiet or before["quiet"], verbose or before["verbose"])
        return function(**given)

    # Typer reads types from here, and not the words that stand for them in the function's module
    types = get_type_hints(function, include_extras=True)
    own = inspect.signature(function)
    given = [one.replace(annotation=types[name]) for name, one in own.parameters.items()]
    more = {"called": typer.Context, "quiet": Quiet, "verbose": Verbose}
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(name, keyword, default=False, annotation=kind)
        for name, kind in more.items()
    ]
    command.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*given, *added]
    )
    command.__annotations__ = types | more
    return command


app = App(
    help="A crew of different language models that train each other.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        results.print(VERSION, highlight=False)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def begin(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """A crew of different language models that train each other."""
    if context.invoked_subcommand is None:
        set_loudness(quiet, verbose)
        results.print(SHORT_HELP, highlight=False, soft_wrap=True, markup=False)
