"""Study plans: what is asked, of which crews, under which arms and seeds, and what is claimed.

Those in motley/studies/ are found by their names. A plan says what a study is; study/running.py
makes its runs, and study/judging.py holds its claims against them.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from motley.config import CrewConfig, check_name, read_config
from motley.files import replace
from motley.study.arms import Arm, parse_arms
from motley.tasks import load_task

SHIPPED = Path(__file__).parents[1] / "studies"
PLAN = "plan.toml"  # in the folder of a study: the plan as it was run

PLACES = ("file", "heldout", "ood", "model")  # keys whose values can be files or folders
FEWEST_BATCHES = 4  # for an error that means something
_QUOTED = re.compile(r'"([^"]*)"')

Relation = Literal["better", "equivalent", "not worse"]
# what a claim can be on, beside peers and kinds
RESERVED = MEAN, OOD, EVERY_PEER = "mean", "ood", "every peer"


class Side(NamedTuple):
    """An arm that a claim compares: "gepo in far" is the arm gepo of the crew far."""

    label: str
    crew: str  # empty: any, or that of the other side

    @staticmethod
    def of(text: str) -> Side:
        label, _, crew = text.partition(" in ")
        return Side(label, crew)

    def is_same(self, other: Side) -> bool:
        named_apart = self.crew and other.crew and self.crew != other.crew
        return self.label == other.label and not named_apart


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an arm is said to be against another, and by how much."""

    text: str
    arm: str
    against: str
    is_: Relation = msgspec.field(name="is")
    margin: float = 0.0
    on: str = "mean"

    def __post_init__(self) -> None:
        if Side.of(self.arm).is_same(Side.of(self.against)):
            raise ValueError(
                f"claim {self.text!r} is about {self.arm!r} against {self.against!r}: the same "
                "runs; name another arm, or two crews as in 'gepo in far' and 'gepo in near'"
            )
        if not self.margin >= 0:
            raise ValueError(f"claim {self.text!r}: margin={self.margin} must not be negative")
        if self.is_ != "better" and not self.margin:
            raise ValueError(
                f'claim {self.text!r}: is = "{self.is_}" needs a margin above 0, such as 0.03: '
                "without one nothing could show it"
            )


class EstimatorPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which runs of a study are measured, and by which rows: [estimators] of a plan."""

    arm: str  # whose runs, of the first seeds
    rows: str  # as arms are written, separated by spaces
    seeds: int = 1
    batches: int = 32
    groups: int = 0  # of a batch; 0: as many as a step of the crew has

    def __post_init__(self) -> None:
        if self.batches < FEWEST_BATCHES:
            raise ValueError(
                f"[estimators] batches={self.batches} say nothing of their own error; use at least "
                f"{FEWEST_BATCHES}, 32 is usual"
            )
        if self.seeds < 1:
            raise ValueError(f"[estimators] seeds={self.seeds} measures nothing; use at least 1")

    def due(self, rounds: int, every: int) -> list[int]:
        """The rounds of a run after which it is measured: its beginning, middle and end, where
        there are checkpoints.

        >>> EstimatorPlan(arm="ftis", rows="tis").due(rounds=40, every=15)
        [0, 30, 40]
        """
        middle = -(-rounds // (2 * every)) * every
        return sorted({0, min(middle, rounds), rounds})


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    question: str
    crews: tuple[str, ...]  # crew files, named from the folder of the plan
    quick: tuple[str, ...] = ()  # tiny ones, for --quick
    quick_time: str = ""  # how long that takes
    arms: tuple[str, ...]
    seeds: int = 5
    quick_seeds: int = 2
    first_seed: int = 0
    more_arms: tuple[str, ...] = ()  # worth a look, but not so many seeds
    more_seeds: int = 1
    settings: tuple[str, ...] = ()  # of all crews, written as for --set
    saved: bool = True  # whether runs write checkpoints, to go on from if they are stopped
    claim: tuple[Claim, ...] = ()
    estimators: EstimatorPlan | None = None  # gradients that are measured on the way

    def __post_init__(self) -> None:
        check_name("study", self.name)
        if not self.crews:
            raise ValueError(f'study {self.name} has no crews; name some, as crews = ["crew.toml"]')
        for key in ("seeds", "quick_seeds", "more_seeds"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} runs nothing; use at least 1")
        if self.first_seed < 0:
            raise ValueError(f"first_seed={self.first_seed} must not be negative; 0 is usual")
        labels = [arm.label for arm in parse_arms(" ".join((*self.arms, *self.more_arms)))]
        if self.estimators and self.estimators.arm not in labels:
            arm = self.estimators.arm
            raise ValueError(
                f"[estimators] names arm {arm!r}, which the plan does not run; "
                f"{_guess(arm, labels)}"
            )
        for claim in self.claim:
            for named in (claim.arm, claim.against):
                arm = Side.of(named).label
                if arm not in labels:
                    raise ValueError(
                        f"claim {claim.text!r} is about arm {arm!r}, which the plan does not run; "
                        f"{_guess(arm, labels)}"
                    )


@dataclass(frozen=True, slots=True)
class Study:
    """A plan as it is to be run."""

    plan: Plan
    crews: list[CrewConfig]
    arms: list[tuple[Arm, Sequence[int]]]  # each with its seeds
    quick: bool
    place: Path | None  # the folder that it was begun in; None: a new one
    is_part: bool = False  # whether arms or seeds were asked for beside the plan

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.plan.name}-quick" if self.quick else self.plan.name

    @property
    def labels(self) -> set[str]:
        return {arm.label for arm, _ in self.arms}

    @property
    def claims(self) -> list[Claim]:
        """Those about arms that are run."""
        labels = lambda claim: {Side.of(claim.arm).label, Side.of(claim.against).label}
        return [claim for claim in self.plan.claim if labels(claim) <= self.labels]

    @property
    def measured(self) -> EstimatorPlan | None:
        """Of which runs gradients are measured; of none, if its arm is not run, or in haste."""
        asked = self.plan.estimators
        return asked if asked and asked.arm in self.labels and not self.quick else None

    def write(self, folder: Path) -> None:
        """The plan as it is run, beside crew files: what is needed to go on with it elsewhere. To
        look at a part of what was begun here leaves it as it is.
        """
        if self.is_part and (folder / PLAN).exists():
            return
        seeds = self.arms[0][1]
        plan = msgspec.structs.replace(
            self.plan,
            crews=tuple(f"{config.crew.name}/crew.toml" for config in self.crews),
            quick=(),
            quick_time="",
            arms=tuple(_written(arm) for arm, its in self.arms if its == seeds),
            seeds=len(seeds),
            first_seed=seeds[0],
            more_arms=tuple(_written(arm) for arm, its in self.arms if its != seeds),
            settings=(),
            claim=tuple(self.claims),
            estimators=self.measured,
        )
        folder.mkdir(parents=True, exist_ok=True)
        said = {key: one for key, one in msgspec.to_builtins(plan).items() if one is not None}
        replace(folder / PLAN, msgspec.toml.encode(said))


def _written(arm: Arm) -> str:
    return f"{arm.label}={arm.text}" if arm.made else arm.text


def shipped_plans() -> dict[str, Path]:
    """Files by their names."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def plan_file(what: str) -> Path | None:
    """The plan that a word means: a name of ours, a file of a user's, the folder of a study; None
    if it is the path of something else.
    """
    path = Path(what)
    if (path / PLAN).is_file():
        return path / PLAN
    if path.suffix == ".toml" and path.is_file():
        return path if _is_plan(path) else None
    if path.exists() or path.suffix or "/" in what:
        return None
    known = shipped_plans()
    if what not in known:
        raise ValueError(f"there is no study {what!r}; {_guess(what, list(known))}")
    return known[what]


def _is_plan(path: Path) -> bool:
    """A plan has crews, and a crew file is one."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False  # whoever reads it as a crew file says what is wrong
    return "crew" not in found and bool({"crews", "question", "claim"} & set(found))


def read_plan(path: Path) -> Plan:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Plan)
    except (msgspec.ValidationError, msgspec.DecodeError, OSError) as error:
        words = str(error).replace(" - at `$", " (in `").replace("(in `.", "(in `")
        raise ValueError(
            f"study plan {path}: {words}; docs/studies.md explains a plan line by line"
        ) from None


def study_of(
    path: Path,
    quick: bool = False,
    arms: str = "",
    seeds: int | None = None,
    first_seed: int | None = None,
    settings: Sequence[str] = (),
    unsaved: bool = False,
) -> Study:
    """What a plan asks for, with other arms, seeds and settings if they are given."""
    plan = read_plan(path)
    plan = msgspec.structs.replace(plan, saved=plan.saved and not unsaved)
    if quick and not plan.quick:
        raise ValueError(f"study {plan.name} has no quick crews; run it without --quick")
    told = [*plan.settings, *map(_from_here, settings)]
    crews = [
        read_config(path.parent / file, told) for file in (plan.quick if quick else plan.crews)
    ]
    plan = msgspec.structs.replace(plan, claim=_askable(plan.claim, crews, quick))
    first = plan.first_seed if first_seed is None else first_seed
    many = seeds or (plan.quick_seeds if quick else plan.seeds)
    few = many if quick or seeds else plan.more_seeds
    if arms:
        chosen = [(arm, many) for arm in _chosen(plan, arms)]
    else:
        parsed = parse_arms(" ".join((*plan.arms, *plan.more_arms)))
        chosen = [(arm, many if i < len(plan.arms) else few) for i, arm in enumerate(parsed)]
    return Study(
        plan,
        crews,
        [(arm, range(first, first + number)) for arm, number in chosen],
        quick,
        path.parent if path.name == PLAN else None,
        bool(arms or seeds or first_seed is not None),
    )


def _askable(
    claims: Sequence[Claim], crews: Sequence[CrewConfig], quick: bool
) -> tuple[Claim, ...]:
    """Claims about crews, peers and kinds that there are. Another is refused; `quick` crews may
    lack what a claim is about, which is then left out.
    """
    found = []
    for claim in claims:
        try:
            _check_claim(claim, crews)
        except ValueError:
            if not quick:
                raise
        else:
            found.append(claim)
    return tuple(found)


def _check_claim(claim: Claim, crews: Sequence[CrewConfig]) -> None:
    by_name = {config.crew.name: config for config in crews}
    named = [name for name in (Side.of(claim.arm).crew, Side.of(claim.against).crew) if name]
    for name in named:
        if name not in by_name:
            raise ValueError(
                f"claim {claim.text!r} is about crew {name!r}, which the study does not have; "
                f"{_guess(name, list(by_name))}"
            )
    # of crews that are compared with each other, both must have it
    each = [by_name[name] for name in named] or list(crews)
    known = [[peer.name for peer in config.students] for config in each]
    for config, peers in zip(each, known, strict=True):
        if taken := [name for name in RESERVED if name in peers]:
            raise ValueError(
                f"claim {claim.text!r}: crew {config.crew.name} has a peer {taken[0]!r}, and a "
                "claim means something else by that word; give the peer another name"
            )
    enough = all if named else any
    where = " and ".join(config.crew.name for config in each)
    if claim.on == OOD and not enough(_may_have_ood(config) for config in each):
        raise ValueError(
            f"claim {claim.text!r} is on {OOD!r}, and the task of {where} has no problems out of "
            "distribution; leave the claim out, or give the task such problems"
        )
    if claim.on in RESERVED or enough(claim.on in peers for peers in known):
        return
    known = [[*peers, *_kinds_of(config)] for peers, config in zip(known, each, strict=True)]
    if not enough(claim.on in names for names in known):
        every = list(dict.fromkeys([*RESERVED, *(n for names in known for n in names)]))
        raise ValueError(
            f"claim {claim.text!r} is on {claim.on!r}, which is no peer and no kind of {where}; "
            f"{_guess(claim.on, every)}"
        )


def _may_have_ood(config: CrewConfig) -> bool:
    """Whether there are problems out of distribution, or no saying without the task's files. Those
    of a crew that names its own may be far away, and are not fetched for it.
    """
    if _names_ood(config.task):
        return True
    try:
        return "ood" in load_task(config.crew.task, config.task, scores=False).splits
    except ValueError:
        return True


def _names_ood(parameters: Mapping[str, object]) -> bool:
    parts = [part for part in parameters.values() if isinstance(part, Mapping)]
    return any(parameters.get(key) for key in ("ood", "ood_task")) or any(map(_names_ood, parts))


def _kinds_of(config: CrewConfig) -> tuple[str, ...]:
    return load_task(config.crew.task, config.task, scores=False).kinds_of("heldout")


def _chosen(plan: Plan, arms: str) -> list[Arm]:
    """Arms of a command line; a plan's own may be called by their names alone."""
    own = {arm.label: _written(arm) for arm in parse_arms(" ".join((*plan.arms, *plan.more_arms)))}
    return parse_arms(" ".join(own.get(word, word) for word in arms.split()))


def _from_here(setting: str) -> str:
    """Files and models are named from where the command is given, not from where plans lie."""
    key, equals, value = setting.partition("=")
    if key.rpartition(".")[2].strip() not in PLACES or not equals:
        return setting
    if value.strip().startswith("["):
        return f"{key}=" + _QUOTED.sub(lambda found: f'"{_place(found[1])}"', value)
    return f"{key}={_place(value.strip())}"


def _place(name: str) -> str:
    return str(Path(name).resolve()) if name and Path(name).exists() else name


def _guess(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
