"""From Python objects to a crew file's words: what is given as objects is written to a folder, and
named there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from motley.api.given import as_written
from motley.api.peer import Peer, Store, names_of
from motley.config import CrewConfig, meant, parse_config, with_models_in
from motley.files import replace, whole
from motley.tasks import KNOWN, Task, load_task, own_task, read_rows
from motley.tasks.answers import Form
from motley.tasks.own import Equal, Rows
from motley.tasks.rewards import Reward, RewardFunction

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DATA, MODELS = "data", "models"  # folders for what was given as objects
IN_PYTHON = "python:task"  # a task that no file can name
USUAL = {
    "rounds": 50,
    "group_size": 8,
    "problems_per_round": 0,
    "seed": 0,
    "max_tokens": 0,
    "temperature": 1.0,
    "lr": 0.0,
}
FULL_LR, PART_LR = 2e-6, 2e-5  # of pretrained models: all of one, and adapters or some layers


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What `motley.Crew` was given."""

    peers: Sequence[Peer]
    data: Rows | None
    rewards: Reward | Sequence[Reward] | None
    task: str | Task
    heldout: Rows | None
    ood: Rows | None
    fields: Mapping[str, str] | None
    reward_weights: Sequence[float] | None
    name: str
    objective: str
    rounds: int
    group_size: int
    problems_per_round: int
    max_tokens: int
    temperature: float
    lr: float
    seed: int
    settings: Mapping[str, Mapping[str, Any]]

    def task_object(self) -> Task:
        """The task, with everything wrong in data and rewards said at once."""
        self._check_given()
        if self.data is None:
            if isinstance(self.task, str):
                return load_task(self.task, dict(self.settings.get("task", {})))
            return self.task
        chosen = self._way_to_score()
        return own_task(
            self.data,
            rewards=self._rewards,
            weights=self._weights,
            heldout=self.heldout,
            ood=self.ood,
            fields=self.fields,
            form=chosen.form,
            equal=chosen.equal,
            parallel=chosen.parallel,
        )

    def _check_given(self) -> None:
        """That everything is of its kind, and that nothing is given which would be ignored."""
        if not self.peers:
            raise ValueError(
                "a crew needs peers; give at least one, such as motley.Peer('tiny:1m')"
            )
        if isinstance(self.data, str) and self.data in KNOWN:
            raise ValueError(f"{self.data} is a task, and no data; write task={self.data!r}")
        if (self.data is None) == (not self.task):
            raise ValueError(
                "a crew needs either data, as rows with a prompt and an answer, or task='gsm8k' "
                f"or another task by name; got {'neither' if self.data is None else 'both'}"
            )
        if not isinstance(self.task, str | Task):
            raise ValueError(
                f"task is a {type(self.task).__name__}; expected a task by name, such as 'gsm8k', "
                "or a motley.Task; rows are given as data"
            )
        own = (self.rewards, self.reward_weights, self.heldout, self.ood, self.fields)
        if self.data is None and any(map(_is_given, own)):
            raise ValueError(
                "rewards, reward_weights, heldout, ood and fields are for data of your own; leave "
                "them out with task=…"
            )
        if not isinstance(self.objective or "", str):
            raise ValueError(
                f"objective is a {type(self.objective).__name__}; expected one by name, such as "
                "'uplift/sure'"
            )
        if not isinstance(self.fields or {}, Mapping):
            raise ValueError(
                f"fields is {self.fields!r}; expected which field of the data is which, such as "
                "{'prompt': 'question'}"
            )
        self._check_settings()

    def _way_to_score(self) -> _WayToScore:
        """What [task] says of data of one's own beside what a crew is given by itself."""
        said = dict(self.settings.get("task", {}))
        known = _WayToScore.__struct_fields__
        for name in said:
            if name not in known:
                raise ValueError(
                    f"settings has task.{name}; beside data it takes {', '.join(known)}, and "
                    "fields, heldout, ood, rewards and reward_weights are given by themselves"
                )
        try:
            return msgspec.convert(said, _WayToScore)
        except msgspec.ValidationError as error:
            raise ValueError(f"settings of task: {error}") from None

    def config(self, place: Path | None, task: Task) -> CrewConfig:
        """The crew as its file says it. What was given as objects is written to `place`; None:
        nothing is written yet.
        """
        store: Store = lambda model, tokenizer, name: _store(model, tokenizer, place, name)
        peers = [
            {**peer.table(name, store, task), **self._lr_of(peer)}
            for name, peer in zip(names_of(self.peers), self.peers, strict=True)
        ]
        spec, own = self._task_tables(place)
        usual, said = self._usual_tables(), self._said_tables()
        said["crew"]["task"] = spec
        settings = {**self.settings, "task": own}
        tables = {
            name: _joined(usual.get(name, {}), settings.get(name, {}), said.get(name, {}), name)
            for name in {*usual, *settings}
        }
        written = {name: as_written(table, name) for name, table in tables.items()}
        written["peer"] = [as_written(peer, f"peer.{peer['name']}") for peer in peers]
        config = parse_config(msgspec.toml.encode(written).decode(), "this crew")
        return with_models_in(config, Path.cwd())  # the run is read from anywhere

    def _check_settings(self) -> None:
        if not isinstance(self.settings, Mapping):
            raise ValueError(
                f"settings is a {type(self.settings).__name__}; expected tables of a crew file, "
                "such as {'learning': {'grad_clip': 0.5}}"
            )
        known = [name for name in CrewConfig.__struct_fields__ if name != "peer"]
        for name, table in self.settings.items():
            if name not in known:
                close = meant(str(name), known)
                raise ValueError(
                    f"settings has a table {name!r}, which a crew file does not, or which is given "
                    f"by itself; did you mean {close or ', '.join(known)}?"
                )
            if not isinstance(table, Mapping):
                raise ValueError(
                    f"settings has {name}={table!r}; expected a table, such as "
                    "{'learning': {'grad_clip': 0.5}}"
                )

    def _usual_tables(self) -> dict[str, dict[str, Any]]:
        """What holds where nobody says otherwise."""
        objective, _, variant = self._objective.partition("/")
        return {
            "crew": {
                "name": self.name,
                "objective": objective,
                "variant": variant,
                "rounds": self.rounds,
                "group_size": self.group_size,
                "problems_per_round": 4 * len(self._authors),
                "seed": self.seed,
            },
            "sampling": {"max_tokens": self._max_tokens, "temperature": self.temperature},
            "learning": {},
        }

    def _said_tables(self) -> dict[str, dict[str, Any]]:
        """What was given by itself, and is not as usual."""
        given = {key: getattr(self, key) for key, usual in USUAL.items()}
        said = {key: value for key, value in given.items() if value != USUAL[key]}
        of_crew = ("rounds", "group_size", "problems_per_round", "seed")
        return {
            "crew": {key: said[key] for key in of_crew if key in said},
            "sampling": {key: said[key] for key in ("max_tokens", "temperature") if key in said},
            "learning": {"lr": said["lr"]} if "lr" in said else {},
        }

    @property
    def unnamed(self) -> list[str]:
        """What only this program knows, and no file can name."""
        if self.data is None:
            return [] if isinstance(self.task, str) else ["its task"]
        return [RewardFunction(one).name for one in self._rewards if not _has_name(one)]

    @property
    def _rewards(self) -> list[Reward]:
        given = self.rewards or []
        if not callable(given) and not isinstance(given, Sequence):
            raise ValueError(
                f"rewards is a {type(given).__name__}; expected a function, or a list of them"
            )
        return [given] if callable(given) else list(given)

    @property
    def _weights(self) -> list[float]:
        given = (
            [] if self.reward_weights is None else as_written(self.reward_weights, "reward_weights")
        )
        if not isinstance(given, list) or not all(map(_is_number, given)):
            raise ValueError(
                f"reward_weights={self.reward_weights!r}; expected a list of numbers, one for each "
                "reward function, such as [1.0, 0.5]"
            )
        return given

    # What is usual where nothing is said

    @property
    def _authors(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.role != "learner"]

    @property
    def _objective(self) -> str:
        return self.objective or "auto"

    @property
    def _max_tokens(self) -> int:
        return self.max_tokens or (16 if all(peer.is_tiny for peer in self.peers) else 256)

    def _lr_of(self, peer: Peer) -> dict[str, float]:
        """A pretrained model needs a smaller one than a crew file's default."""
        said = peer.lr or self.lr or self.settings.get("learning", {}).get("lr")
        if said or peer.is_tiny or peer.role == "sampler":
            return {}
        return {"lr": FULL_LR if peer.train == "full" else PART_LR}

    def _task_tables(self, place: Path | None) -> tuple[str, dict[str, Any]]:
        """`task` of [crew], and [task]."""
        settings = dict(self.settings.get("task", {}))
        if self.data is None:
            return self.task if isinstance(self.task, str) else IN_PYTHON, settings
        files = {"train": self.data, "heldout": self.heldout, "ood": self.ood}
        paths = {
            name: _store_rows(data, place, f"{name}.jsonl")
            for name, data in files.items()
            if data is not None
        }
        settings |= {name: path for name, path in paths.items() if name != "train"}
        if self.fields:
            settings["fields"] = dict(self.fields)
        if self.rewards:
            settings["reward"] = [RewardFunction(reward).name for reward in self._rewards]
        if self._weights:
            settings["reward_weights"] = self._weights
        return f"file:{paths['train']}", settings


class _WayToScore(msgspec.Struct, frozen=True):
    form: Form = "text"
    equal: Equal = "exact"
    parallel: bool = False


def _is_given(value: object) -> bool:
    """Not None, and not empty, as where a caller passes on what it has."""
    return value is not None and not (isinstance(value, Sized) and len(value) == 0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _store(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, place: Path | None, name: str
) -> str:
    """Write a model object as an ordinary folder, once."""
    if place is None:
        return name
    folder = place.resolve() / MODELS / name
    if not folder.exists():
        with whole(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    return str(folder)


def _store_rows(data: Rows, place: Path | None, name: str) -> str:
    """The file of some rows: the one that was given, or one that is written now."""
    if isinstance(data, str | Path):
        return str(Path(data).expanduser().resolve())
    if place is None:
        return name
    content = b"".join(msgspec.json.encode(row) + b"\n" for row in read_rows(data))
    path = place.resolve() / DATA / name
    if path.exists() and path.read_bytes() != content:
        raise ValueError(
            f"{path} holds other data than this crew has; choose another folder, or delete it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, content)
    return str(path)


def _has_name(reward: Reward) -> bool:
    """Whether a file can name a reward: a function that its module has under its own name."""
    module, name = getattr(reward, "__module__", ""), getattr(reward, "__qualname__", "")
    found: Any = sys.modules.get(module) if module != "__main__" else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is reward


def beside(config: CrewConfig, folder: Path) -> CrewConfig:
    """A crew whose files lie below a folder, with their places as seen from there."""
    here = f"{folder.resolve()}/"
    task = {
        key: value.removeprefix(here) if isinstance(value, str) else value
        for key, value in config.task.items()
    }
    file = config.crew.task.removeprefix("file:")
    crew = config.crew
    if file.startswith(here):
        crew = msgspec.structs.replace(crew, task=f"file:{file.removeprefix(here)}")
    peers = tuple(
        msgspec.structs.replace(peer, model=f"./{peer.model.removeprefix(here)}")
        if peer.model.startswith(here)
        else peer
        for peer in config.peer
    )
    return msgspec.structs.replace(config, task=task, crew=crew, peer=peers)


def _joined(
    usual: Mapping[str, Any], settings: Mapping[str, Any], said: Mapping[str, Any], name: str
) -> dict[str, Any]:
    twice = sorted(key for key in settings if key in said and settings[key] != said[key])
    if twice:
        raise ValueError(
            f"{', '.join(twice)} of [{name}] is said twice, in settings and by itself; say it once"
        )
    return {**usual, **settings, **said}
