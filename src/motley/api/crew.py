"""A crew in Python: peers, data and rewards as objects; the same run as a crew file's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from motley.api.given import as_path, well_called
from motley.api.peer import Peer
from motley.api.recipe import Recipe, beside
from motley.api.run import Round, Run, accuracies, check_counts
from motley.api.tables import Table
from motley.config import CrewConfig, read_config, write_config
from motley.distributed.processes import ProcessCrew
from motley.files import new_run_folder
from motley.objectives import objective as known_objective
from motley.reports.watching import watched
from motley.runs.local import GoneOnError, LocalCrew
from motley.tasks import Split, Task, load_task, read_rows
from motley.tasks.own import Rows
from motley.tasks.rewards import Reward


@well_called
class Crew:
    """Peers that learn from each other, on some problems, by some rewards.

    `data`: a list of dicts, a pandas DataFrame, a `datasets.Dataset`, or a .jsonl, .json, .csv or
    .parquet file. Each row has a `prompt` (text, or chat messages) and usually an `answer`;
    `fields` maps other names. `rewards`: a function `f(prompts, completions, **columns) -> list`,
    or several with `reward_weights`; none: a completion must be the answer. `task`: instead of
    data, a task by name, such as "gsm8k". `settings`: further tables of a crew file, such as
    `{"learning": {"schedule": "cosine"}}`.

    >>> crew = Crew([Peer("tiny:0.3m"), Peer("tiny:1m", train="lora")], task="digits", rounds=20)
    >>> run = crew.train()
    """

    def __init__(
        self,
        peers: Peer | str | Path | Iterable[Peer | str | Path],
        data: Rows | None = None,
        rewards: Reward | Sequence[Reward] | None = None,
        *,
        task: str | Task = "",
        heldout: Rows | None = None,
        ood: Rows | None = None,
        fields: Mapping[str, str] | None = None,
        reward_weights: Sequence[float] | None = None,
        name: str = "crew",
        objective: str = "",
        rounds: int = 50,
        group_size: int = 8,
        problems_per_round: int = 0,
        max_tokens: int = 0,
        temperature: float = 1.0,
        lr: float = 0.0,
        seed: int = 0,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        recipe = Recipe(
            peers=_each(peers),
            data=_rows(data),
            rewards=rewards,
            task=task,
            heldout=_rows(heldout),
            ood=_rows(ood),
            fields=fields,
            reward_weights=reward_weights,
            name=name,
            objective=objective,
            rounds=rounds,
            group_size=group_size,
            problems_per_round=problems_per_round,
            max_tokens=max_tokens,
            temperature=temperature,
            lr=lr,
            seed=seed,
            settings={} if settings is None else settings,
        )
        chosen = recipe.task_object()
        config = recipe.config(None, chosen)  # what is wrong is said now
        known_objective(config.crew.objective, config.crew.variant, config.objective)
        self._prepare(
            chosen, name, lambda place: recipe.config(place, chosen), unnamed=recipe.unnamed
        )

    def _prepare(
        self,
        task: Task,
        name: str,
        config_in: Callable[[Path | None], CrewConfig],
        unnamed: Sequence[str] = (),
    ) -> None:
        """`config_in`: the crew, with what it brings as objects written to a folder, or not yet.
        `unnamed`: what no file can name.
        """
        self._unnamed = unnamed
        self.task, self.name = task, name
        self._config_in = config_in
        self._crew: LocalCrew | ProcessCrew | None = None
        self._folder: Path | None = None  # of the run, once there is one

    @classmethod
    def read(cls, path: str | Path) -> Crew:
        """The crew of a crew file."""
        config = read_config(as_path(path, "the crew file"))
        crew = cls.__new__(cls)
        task = load_task(config.crew.task, config.task)
        crew._prepare(task, config.crew.name, lambda place: config)
        return crew

    def write(self, path: str | Path) -> Path:
        """Write a crew file that `motley train` reads.

        Data and models that were given as objects go into a folder beside it.
        """
        path = as_path(path, "the crew file")
        self._check_named("be written to a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        config = self._config_in(path.parent / f"{path.stem}_files")
        write_config(beside(config, path.parent), path)
        return path

    # Training

    def train(self, folder: str | Path | None = None, *, progress: bool = True) -> Run:
        """Train to the last round, in a new folder under runs/ or in this one.

        A folder with a run of this crew is gone on with; docs/command_line.md has what may change.
        """
        for _ in self.rounds(folder, progress=progress):
            pass
        return self.run

    def rounds(
        self, folder: str | Path | None = None, *, progress: bool = False
    ) -> Iterator[Round]:
        """The same as a loop of one's own. Whoever leaves it loses nothing: the crew is saved."""
        crew = self._open(folder)
        try:
            for lines in watched(crew, Console(), progress):
                if lines:
                    yield Round(lines[0].round, lines)
        except GeneratorExit:
            with suppress(GoneOnError):  # another crew has, from where this one was
                crew.save()
            if isinstance(crew, ProcessCrew):
                self._crew = None  # its processes have ended
            raise
        except BaseException:
            self._crew = None  # in the middle of a round: the newest checkpoint counts
            raise

    def evaluate(self, split: Split = "heldout", *, problems: int = 200, samples: int = 8) -> Table:
        """How good every peer is now: greedy and sampled, with standard errors."""
        check_counts(problems, samples)
        crew = self._open(None)
        if isinstance(crew, ProcessCrew):
            if not crew.finished:  # it was started for this; train() goes on
                crew.close()
                self._crew = None
            return self.run.evaluate(split, problems=problems, samples=samples)
        asked = [(p.me.name, p.half.engine, p.learner.policy.prompts) for p in crew.peers]
        sampling = crew.config.sampling
        return accuracies(asked, self.task, split, sampling, problems, samples)

    @property
    def run(self) -> Run:
        """What the run has so far."""
        if self._folder is None:
            raise ValueError("this crew has no run yet; call train(), or motley.Run(folder)")
        return Run(self._folder, self.task)

    def _open(self, folder: str | Path | None) -> LocalCrew | ProcessCrew:
        if folder is not None:
            return self._open_in(as_path(folder, "the run folder"))
        if self._folder is not None:
            return self._open_in(self._folder)
        with new_run_folder(self.name) as place:
            return self._open_in(place)

    def _open_in(self, place: Path) -> LocalCrew | ProcessCrew:
        if self._crew is not None and place == self._folder:
            return self._crew
        if place.exists() and not place.is_dir():
            raise ValueError(f"{place} is a file; expected the folder of a run, or of a new one")
        config = self._config_in(place)
        if config.needs_processes:
            self._check_named("run in several processes")
            self._crew = _processes(config, place)
        else:
            self._crew = LocalCrew.start_or_resume(config, place, task=self.task)
        self._folder = place
        return self._crew

    def _check_named(self, wanted: str) -> None:
        if self._unnamed:
            raise ValueError(
                f"this crew cannot {wanted}: {', '.join(self._unnamed)} is known to this program "
                "only; put it into a module of its own as a function, and import it from there"
            )

    def __repr__(self) -> str:
        place = f" in {self._folder}" if self._folder else ""
        return f"<motley.Crew {self.name}{place}>"


def _rows(data: Rows | None) -> Rows | None:
    """Read once: a generator has nothing left the second time."""
    return data if data is None or isinstance(data, str | Path) else read_rows(data)


def _each(peers: object) -> list[Peer]:
    if isinstance(peers, Peer | str | Path):
        return [_peer(peers, "peers")]
    if not isinstance(peers, Iterable) or isinstance(peers, Mapping | set | frozenset | bytes):
        raise _no_peer(peers, "peers")
    return [_peer(one, f"peers[{number}]") for number, one in enumerate(peers)]


def _peer(given: object, place: str) -> Peer:
    if isinstance(given, str | Path):
        return Peer(given)
    if not isinstance(given, Peer):
        raise _no_peer(given, place)
    return given


def _no_peer(given: object, place: str) -> ValueError:
    got = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
    return ValueError(
        f"{place} is {got}; expected a motley.Peer, a model by its name, or a list of these, such "
        "as [motley.Peer('tiny:1m')]"
    )


def _processes(config: CrewConfig, folder: Path) -> ProcessCrew:
    crew = (
        ProcessCrew.resume(folder, config=config)
        if (folder / "peers").exists()
        else ProcessCrew.start(config, folder)
    )
    for _ in crew.gather():
        pass
    return crew
