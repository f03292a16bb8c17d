"""From Python objects to a crew file's words: what is given as objects is written to a folder, and
named there.
"""

from __future__ import annotations

import difflib
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

    def config(self, place: Path, task: Task) -> CrewConfig:
        """The crew as its file says it. What was given as objects is written to `place`."""
        names = names_of(self.peers)
        store: Store = lambda model, tokenizer, name: _store(model, tokenizer, place, name)
        peers = [
            {**peer.table(name, store, task), **self._lr_of(peer)}
            for name, peer in zip(names, self.peers, strict=True)
        ]
        objective, _, variant = self._objective.partition("/")
        tables: dict[str, Any] = {
            "crew": {
                "name": self.name,
                "objective": objective,
                "variant": variant,
                "rounds": self.rounds,
                "group_size": self.group_size,
                "problems_per_round": self.problems_per_round or 4 * len(self._authors),
                "seed": self.seed,
            },
            "sampling": {"max_tokens": self._max_tokens, "temperature": self.temperature},
            "learning": {"lr": self.lr} if self.lr else {},
        }
        for name in self.settings.keys() - set(CrewConfig.__struct_fields__):
            close = difflib.get_close_matches(name, CrewConfig.__struct_fields__, n=1)
            raise ValueError(
                f"settings has a table {name!r}, which a crew file does not; "
                + (f"did you mean {close[0]}?" if close else "see docs/crew_file.md")
            )
        tables["crew"]["task"], own = self._task_tables(place)
        for name, table in {**self.settings, "task": own}.items():
            _join(tables.setdefault(name, {}), table, name)
        return parse_config(msgspec.toml.encode({**tables, "peer": peers}).decode(), "this crew")

    @property
    def _rewards(self) -> list[Reward]:
        given = self.rewards or []
        return [given] if callable(given) else list(given)

    # What is usual where nothing is said

    @property
    def _authors(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.role != "learner"]

    @property
    def _objective(self) -> str:
        if self.objective:
            return self.objective
        return "alone" if len(self.peers) == 1 else "uplift/relative"

    @property
    def _max_tokens(self) -> int:
        return self.max_tokens or (16 if all(peer.is_tiny for peer in self.peers) else 256)

    def _lr_of(self, peer: Peer) -> dict[str, float]:
        """A pretrained model needs a smaller one than a crew file's default."""
        said = peer.lr or self.lr or self.settings.get("learning", {}).get("lr")
        if said or peer.is_tiny or peer.role == "sampler":
            return {}
        return {"lr": FULL_LR if peer.train == "full" else PART_LR}

    def _task_tables(self, place: Path) -> tuple[str, dict[str, Any]]:
        """`task` of [crew], and [task]."""
        settings = dict(self.settings.get("task", {}))
        if self.data is None:
            return self.task if isinstance(self.task, str) else IN_PYTHON, settings
        files = {"train": self.data, "heldout": self.heldout, "ood": self.ood}
        paths = {
            name: _store_rows(data, place / DATA / f"{name}.jsonl")
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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, place: Path, name: str
) -> str:
    """Write a model object as an ordinary folder, once."""
    folder = place.resolve() / MODELS / name
    if not folder.exists():
        with whole(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    return str(folder)


def _store_rows(data: Rows, path: Path) -> str:
    """The file of some rows: the one that was given, or one that is written now."""
    if isinstance(data, str | Path):
        return str(Path(data).resolve())
    content = b"".join(msgspec.json.encode(row) + b"\n" for row in read_rows(data))
    path = path.resolve()
    if path.exists() and path.read_bytes() != content:
        raise ValueError(
            f"{path} holds other data than this crew has; choose another folder, or delete it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, content)
    return str(path)


def reads_as(config: CrewConfig, task: Task) -> None:
    """Refuse what another process could not make of the crew's file: rewards that have no name."""
    rewards = config.task.get("reward", [])
    here = [name for name in rewards if name.startswith("__main__:")]
    if here or config.crew.task == IN_PYTHON:
        raise ValueError(
            f"this crew cannot be written to a file: {', '.join(here) or 'its task'} is known to "
            "this program only; put it into a module of its own, and import it from there"
        )
    try:
        again = load_task(config.crew.task, config.task)
    except ValueError as error:
        raise ValueError(
            f"this crew cannot be written to a file: {error}; define reward functions at the top "
            "level of a module"
        ) from error
    if again.fingerprint != task.fingerprint:
        raise ValueError(
            "this crew cannot be written to a file: its rewards are not the functions that their "
            "names stand for; define them at the top level of a module"
        )


def _join(table: dict[str, Any], more: Mapping[str, Any], name: str) -> None:
    twice = sorted(key for key in more if key in table and table[key] not in ("", more[key]))
    if twice:
        raise ValueError(
            f"{', '.join(twice)} of [{name}] is said twice, in settings and by itself; say it once"
        )
    table.update(more)
