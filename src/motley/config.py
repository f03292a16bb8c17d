"""A crew as a user writes it: TOML to frozen structs. Everything that can be judged without a model is judged here.

Names of tasks and objectives are looked up by those who own them (tasks, objectives), also before any model loads.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from motley.records import HUB, Sampling


class ConfigError(ValueError):
    """One line that says what is wrong in a crew file, and the remedy."""


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rank: int = 8
    alpha: float = 0.0  # 0: twice the rank
    targets: tuple[Projection, ...] = get_args(Projection)

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.targets or self.alpha < 0:
            got = f"rank={self.rank}, alpha={self.alpha}, targets={list(self.targets)}"
            raise ValueError(f"lora needs rank >= 1, alpha >= 0 and at least one target; got {got}")


class TrainPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`train = { lora = { rank = 8 } }` or `train = { layers = "last:2" }`."""

    lora: Lora | None = None
    layers: str = ""  # "last:N", "first:N" or parameter-name prefixes separated by commas

    def __post_init__(self) -> None:
        if (self.lora is None) == (self.layers == ""):
            raise ValueError('train takes exactly one of lora and layers; for the whole model write train = "full"')
        if re.fullmatch(r"(first|last):0+", self.layers):
            raise ValueError(f"train layers={self.layers!r} trains nothing; use at least 1 layer")


class Warm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised warm start on the task's own answers, until each kind's answers have the chosen probability."""

    accuracy: dict[str, float]  # kind -> expected accuracy of sampled answers
    lr: float = 1e-3
    batch: int = 64
    max_steps: int = 3000

    def __post_init__(self) -> None:
        if not self.accuracy:
            raise ValueError("warm accuracy names no kind; write such as { sort = 0.5 }, or remove warm")
        if not self.lr > 0 or self.batch < 1 or self.max_steps < 1:
            raise ValueError(
                f"warm needs lr > 0, batch >= 1 and max_steps >= 1; got lr={self.lr}, batch={self.batch}, max_steps={self.max_steps}"
            )
        for kind, target in self.accuracy.items():
            if not 0 < target < 1:
                raise ValueError(f"warm accuracy of {kind} is {target}; expected a number between 0 and 1, such as 0.5")


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    model: str
    train: Literal["full"] | TrainPart = "full"
    warm: Warm | None = None
    lr: float = 0.0  # 0: the crew's

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ValueError(f"peer name {self.name!r} must be letters, digits, - and _ only; it names folders and subjects")
        if self.name == HUB:
            raise ValueError(f"peer name {HUB!r} is taken: the crew's own records are published under it; choose another")
        if not self.lr >= 0:
            raise ValueError(f"peer {self.name}: lr={self.lr} is negative; leave it out to use the crew's")


class Crew(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    task: str
    rounds: int
    group_size: int
    problems_per_round: int  # over the whole crew
    objective: str
    variant: str = ""
    layout: Literal["vertical", "horizontal"] = "vertical"
    pace: Literal["lockstep", "async"] = "lockstep"
    seed: int = 0
    processes: bool = False  # one process per peer, with a NATS server between them
    deadline_s: float = 0.0  # a round goes on without who is late by this much; 0: waits for everyone
    quorum: int = 0  # peers without whose groups no round goes on; 0: two, or one in a crew of one
    check_rewards: bool = True  # compute every received reward again; off for rewards that cannot be
    lossless: bool = False  # log-probs travel as float32, not rounded to 1/1700

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ValueError(f"crew name {self.name!r} must be letters, digits, - and _ only; it names folders and subjects")
        for name in ("rounds", "problems_per_round"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} trains nothing; use at least 1")
        if not self.deadline_s >= 0 or self.quorum < 0:
            raise ValueError(
                f"deadline_s={self.deadline_s} and quorum={self.quorum} must not be negative; leave them out to wait for everyone"
            )
        if self.group_size < 2:
            raise ValueError(f"group_size={self.group_size} has no spread of rewards to learn from; use at least 2, 8 to 16 is usual")


class Learning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lr: float = 5e-4
    grad_clip: float = 1.0
    token_budget: int = 16384  # packed tokens of one micro-batch
    own_share: float = 0.0  # least share of own groups in a step
    quota: int = 0  # most groups of one foreign sender in a step; 0: no limit
    max_age: int = 8  # staleness window, in the consumer's own versions
    stale: Literal["drop", "pace"] = "drop"
    success_memory: float = 0.9  # of the running mean of own rewards per kind
    checkpoint_every: int = 10  # rounds

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr} must be above 0")
        if not self.grad_clip > 0:
            raise ValueError(f"grad_clip={self.grad_clip} must be above 0; 1.0 is usual")
        if not 0 <= self.own_share <= 1:
            raise ValueError(f"own_share={self.own_share} is outside 0..1; 0 takes what comes, 1 learns from own groups only")
        if not 0 <= self.success_memory < 1:
            raise ValueError(f"success_memory={self.success_memory} is outside [0, 1); 0.9 is usual")
        for name in ("token_budget", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("quota", "max_age"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")


class Evaluate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    every: int = 10  # rounds; the last round is always evaluated
    problems: int = 64  # per kind

    def __post_init__(self) -> None:
        if self.every < 1 or self.problems < 1:
            raise ValueError(f"evaluate needs every >= 1 and problems >= 1; got every={self.every}, problems={self.problems}")


class CrewConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    crew: Crew
    peer: tuple[PeerConfig, ...]
    task: dict[str, Any] = {}  # parameters of the task named in [crew]
    objective: dict[str, float | str] = {}  # settings of the objective named in [crew]
    sampling: Sampling = Sampling()
    learning: Learning = Learning()
    evaluate: Evaluate = Evaluate()

    def __post_init__(self) -> None:
        if not self.peer:
            raise ValueError("a crew needs at least one [[peer]]")
        if self.sampling.temperature == 0:
            raise ValueError(
                "temperature=0 gives every rollout of a group the same tokens, so nothing can be learned; 1.0 is usual for training"
            )
        names = [p.name for p in self.peer]
        if len(set(names)) < len(names):
            raise ValueError(f"peer names must differ; got {', '.join(names)}")
        if self.crew.layout == "horizontal":
            _must_divide("group_size", self.crew.group_size, len(names), "horizontal")
        else:
            _must_divide("problems_per_round", self.crew.problems_per_round, len(names), "vertical")
        if self.crew.quorum > len(names):
            raise ValueError(f"quorum={self.crew.quorum} is more than the {len(names)} peers of the crew; use at most {len(names)}")
        if self.crew.layout == "horizontal" and (self.learning.own_share or self.learning.quota):
            raise ValueError(
                "own_share and quota choose among whole groups, and a horizontal crew shares every group; remove them or use vertical"
            )
        if self.crew.pace == "async" and self.learning.stale == "pace" and self.learning.own_share:
            raise ValueError(
                "own_share with stale = 'pace' stands still: foreign groups it keeps out stop the sampler; remove own_share, or use 'drop'"
            )
        if self.crew.objective == "alone" and len(names) > 1:
            raise ValueError(
                "objective 'alone' means one peer that learns from itself, and this crew has several; "
                "run the crew with --alone, which trains every peer by itself with all the crew's sampling"
            )

    @property
    def problems_per_peer(self) -> int:
        return self.crew.problems_per_round // (1 if self.crew.layout == "horizontal" else len(self.peer))

    @property
    def authors_per_group(self) -> int:
        return len(self.peer) if self.crew.layout == "horizontal" else 1

    @property
    def rollouts_per_group(self) -> int:
        """How many completions a peer makes of each of its problems."""
        return self.crew.group_size // self.authors_per_group

    @property
    def quorum(self) -> int:
        return self.crew.quorum or min(2, len(self.peer))

    def alone(self, name: str) -> CrewConfig:
        """A crew of this one peer, which makes all the sampling of the crew itself."""
        peer = next(p for p in self.peer if p.name == name)
        changes = {"objective": "alone", "variant": "", "processes": False, "deadline_s": 0.0, "quorum": 0}
        crew = msgspec.structs.replace(self.crew, name=f"{self.crew.name}-alone-{name}", **changes)
        return msgspec.structs.replace(self, crew=crew, peer=(peer,), objective={})


def _must_divide(field: str, value: int, num_peers: int, layout: str) -> None:
    if value % num_peers:
        below, above = value - value % num_peers, value - value % num_peers + num_peers
        choice = f"{below} or {above}" if below else str(above)
        raise ValueError(f"{field}={value} is not divisible by the {num_peers} peers of a {layout} crew; use {choice}")


def read_config(path: Path) -> CrewConfig:
    """Read and check a crew file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read crew file {path}: {error.strerror}; give the path of a TOML file, such as crews/specialists.toml"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"crew file {path} is not UTF-8 text: {error.reason} at byte {error.start}; give a TOML file") from None
    return _with_absolute_paths(parse_config(text, source=str(path)), path.resolve().parent)


_FILES = ("file", "heldout", "ood")  # keys of [task] that name files


def _with_absolute_paths(config: CrewConfig, folder: Path) -> CrewConfig:
    """Files of problems are named relative to the crew file; a run must find them from anywhere."""
    return _with_files(config, lambda name: folder / name)


def with_files_in(config: CrewConfig, folder: Path | None) -> CrewConfig:
    """The crew with its files of problems looked for in a folder of this machine, by their names."""
    return config if folder is None else _with_files(config, lambda name: folder.resolve() / Path(name).name)


def _with_files(config: CrewConfig, place: Callable[[str], Path]) -> CrewConfig:
    files = {key: str(place(value)) for key, value in config.task.items() if key in _FILES and isinstance(value, str)}
    name = config.crew.task
    if name.startswith("file:"):
        name = f"file:{place(name.removeprefix('file:'))}"
    return msgspec.structs.replace(config, task=config.task | files, crew=msgspec.structs.replace(config.crew, task=name))


def parse_config(text: str, source: str = "crew file") -> CrewConfig:
    try:
        return msgspec.toml.decode(text, type=CrewConfig)
    except msgspec.DecodeError as error:  # also ValidationError
        raise ConfigError(f"{source}: {_explain(str(error))}") from None


def write_config(config: CrewConfig, path: Path) -> None:
    path.write_text(config_text(config), encoding="utf-8")


def config_text(config: CrewConfig) -> str:
    """The crew as TOML."""
    return msgspec.toml.encode(_without_none(msgspec.to_builtins(config))).decode()


def _without_none(value: Any) -> Any:
    """TOML has no null: an absent key says the same."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None and v != ""}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


_TABLES: dict[str, type[msgspec.Struct]] = {
    "warm": Warm,
    "lora": Lora,
    "train": TrainPart,
    "[[peer]]": PeerConfig,
    "[evaluate]": Evaluate,
    "[learning]": Learning,
    "[sampling]": Sampling,
    "[crew]": Crew,
}


def _explain(message: str) -> str:
    """msgspec's words, with the place named as in the file and a suggestion for a misspelt key."""
    message = re.sub(r" - at `\$\.?(.*)`", lambda m: f" (in {m[1] or 'the file'})", message)
    unknown = re.search(r"unknown field `([^`]*)`", message)
    if unknown:
        home = {field: name for name, table in _TABLES.items() for field in table.__struct_fields__}
        close = difflib.get_close_matches(unknown[1], home, n=1)
        if unknown[1] in home:
            message += f"; it belongs under {home[unknown[1]]}"
        else:
            message += f"; did you mean {close[0]}?" if close else "; remove it, or see docs/architecture.md for the keys"
    if "Invalid enum value 'lora'" in message:
        message += "; write train = { lora = { rank = 8 } }"
    return message
