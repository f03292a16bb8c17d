"""From Python objects to a crew file's words: what is given as objects is written to a folder, and
named there.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from motley.api.peer import Peer, Store, names_of
from motley.config import CrewConfig, parse_config
from motley.files import replace, whole
from motley.tasks import Task, load_task, own_task, read_rows
from motley.tasks.own import Rows
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
        if not self.peers:
            raise ValueError(
                "a crew needs peers; give at least one, such as motley.Peer('tiny:1m')"
            )
        if (self.data is None) == (not self.task):
            raise ValueError(
                "a crew needs either data, as rows with a prompt and an answer, or task='gsm8k' "
                "or another task by name; not both"
            )
        if self.data is None:
            if self.rewards or self.heldout is not None or self.ood is not None or self.fields:
                raise ValueError(
                    "rewards, heldout, ood and fields are for data of your own; leave them out "
                    "with task=…"
                )
            if isinstance(self.task, str):
                return load_task(self.task, dict(self.settings.get("task", {})))
            return self.task
        return own_task(
            self.data,
            rewards=self._rewards,
            weights=self.reward_weights or (),
            heldout=self.heldout,
            ood=self.ood,
            fields=self.fields,
            **self.settings.get("task", {}),
        )

    def config(self, place: Path | None, task: Task) -> CrewConfig:
        """The crew as its file says it. What was given as objects is written to `place`; None:
        nothing is written yet.
        """
        self._check_settings()
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
        return parse_config(msgspec.toml.encode({**tables, "peer": peers}).decode(), "this crew")

    def _check_settings(self) -> None:
        known = [name for name in CrewConfig.__struct_fields__ if name != "peer"]
        for name, table in self.settings.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                raise ValueError(
                    f"settings has a table {name!r}, which a crew file does not, or which is given "
                    f"by itself; did you mean {close[0] if close else ', '.join(known)}?"
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
        if self.reward_weights:
            settings["reward_weights"] = list(self.reward_weights)
        return f"file:{paths['train']}", settings


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
