"""A whole crew file, and what its tables must not say together."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import msgspec

from motley.config.choosing import AUTO, choice
from motley.config.peers import PeerConfig
from motley.config.rules import Crew, Evaluate, Learning, Prompt, Teach, Trust, WeightsChannel
from motley.links import Network, Weather
from motley.records import Sampling

COLDEST = 0.01  # of a crew's sampling: below it, rollouts of a group are all but the same


class CrewConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    crew: Crew
    peer: tuple[PeerConfig, ...]
    task: dict[str, Any] = {}  # parameters of the task named in [crew]
    prompt: Prompt = Prompt()
    objective: dict[str, float | str] = {}  # settings of the objective named in [crew]
    sampling: Sampling = Sampling()
    learning: Learning = Learning()
    trust: Trust = Trust()
    teach: Teach = Teach()
    evaluate: Evaluate = Evaluate()
    weights: WeightsChannel = WeightsChannel()
    network: Network = Network()

    def __post_init__(self) -> None:
        if not self.peer:
            raise ValueError("a crew needs at least one [[peer]]")
        _check_sampling(self.sampling)
        self._decide()
        names = [p.name for p in self.peer]
        if len(set(names)) < len(names):
            raise ValueError(f"peer names must differ; got {', '.join(names)}")
        self._check_roles()
        num_authors = len(self.authors)
        if self.crew.layout == "horizontal":
            _must_divide("group_size", self.crew.group_size, num_authors, "horizontal")
        else:
            _must_divide(
                "problems_per_round", self.crew.problems_per_round, num_authors, "vertical"
            )
        if self.crew.quorum > num_authors:
            raise ValueError(
                f"quorum={self.crew.quorum} is more than the {num_authors} peers who sample; use "
                f"at most {num_authors}"
            )
        _check_hearing(self.crew)
        if self.crew.layout == "horizontal" and (self.learning.own_share or self.learning.quota):
            raise ValueError(
                "own_share and quota choose among whole groups, and a horizontal crew shares "
                "every group; remove them or use vertical"
            )
        if self.crew.pace == "async" and self.learning.stale == "pace" and self.learning.own_share:
            raise ValueError(
                "own_share with stale = 'pace' stands still: foreign groups it keeps out stop the "
                "sampler; remove own_share, or use 'drop'"
            )
        self._check_teaching()
        if self.learning.warmup_rounds >= self.crew.rounds:
            raise ValueError(
                f"warmup_rounds={self.learning.warmup_rounds} is not below "
                f"rounds={self.crew.rounds}, so that lr never has its full size; lower the one or "
                "raise the other"
            )
        if self.crew.objective == "alone" and len(names) > 1 and not self.teach.is_on:
            raise ValueError(
                "objective 'alone' means one peer that learns from itself, and this crew has "
                "several; "
                "run the crew with --alone, which trains every peer by itself with all the crew's "
                "sampling, or have others teach by [teach] alone"
            )

    def _check_teaching(self) -> None:
        if not self.teach.is_on:
            return
        if not self.num_met:
            raise ValueError(
                "[teach] needs problems that all peers answer; write meet = 0.25 under [crew], or "
                'layout = "horizontal"'
            )
        if self.num_branches:
            _check_branches(self)
        if len(self.authors) < 2:
            raise ValueError("[teach] needs somebody to learn from; add a [[peer]], or remove it")

    def _decide(self) -> None:
        """Put the row that "auto" stands for in its place, so that a run keeps it."""
        crew = self.crew
        if crew.objective == AUTO:
            if crew.variant:
                raise ValueError(
                    f"crew.variant = {crew.variant!r} is of a row that crew.objective = "
                    f'"{AUTO}" may not take; leave the variant out, or name the row'
                )
            waits = self.has_roles or crew.pace == "async"
            made = choice(len(self.students), waits)
            changes = {"objective": made.objective, "variant": made.variant, "chosen": made.reason}
        elif crew.chosen and not crew.chosen.startswith(f"{AUTO} took {crew.row}:"):
            changes = {"chosen": ""}  # another row was named since
        else:
            return
        msgspec.structs.force_setattr(self, "crew", msgspec.structs.replace(crew, **changes))

    def _check_roles(self) -> None:
        if not self.authors or not self.students:
            raise ValueError(
                "a crew needs someone who samples (a peer or a sampler) and someone who learns (a "
                "peer or a learner)"
            )
        learners = [p.name for p in self.peer if p.role == "learner"]
        for peer in self.peer:
            if peer.role == "sampler" and peer.follows not in learners:
                raise ValueError(
                    f"sampler {peer.name} follows {peer.follows!r}; the learners are "
                    f"{', '.join(learners) or 'none'}"
                )
        if (
            any(p.follows for p in self.peer)
            and self.learning.stale == "pace"
            and self.weights.every > 1
        ):
            raise ValueError(
                f"stale = 'pace' with weights.every = {self.weights.every} stands still: samplers "
                "see how much waits for their learner "
                "when it publishes, and would wait for a version that is not due; use every = 1, "
                "or 'drop'"
            )
        if self.has_roles and self.crew.pace == "lockstep":
            raise ValueError(
                'samplers and learners do not wait for each other; set crew.pace = "async"'
            )
        unknown = sorted(set(self.network.link) - {p.name for p in self.peer})
        if unknown:
            raise ValueError(
                f"network.link names {', '.join(unknown)}; the peers are "
                f"{', '.join(p.name for p in self.peer)}"
            )

    @cached_property
    def authors(self) -> list[str]:
        """Who samples."""
        return [p.name for p in self.peer if p.role != "learner"]

    @property
    def students(self) -> list[PeerConfig]:
        """Who learns."""
        return [p for p in self.peer if p.role != "sampler"]

    @property
    def has_roles(self) -> bool:
        """Whether some only sample or only learn."""
        return any(p.role != "peer" for p in self.peer)

    @property
    def needs_processes(self) -> bool:
        """Whether its peers must run beside each other in real time, and not in turn."""
        shared = any(p.devices > 1 for p in self.peer)  # a peer is the first of its own processes
        return self.crew.processes or self.has_roles or shared or self.network != Network()

    @cached_property
    def _by_name(self) -> dict[str, PeerConfig]:
        return {p.name: p for p in self.peer}

    def named(self, name: str) -> PeerConfig:
        return self._by_name[name]

    def student_of(self, name: str) -> str:
        """Whose model a peer samples with: its own, or its learner's."""
        return self.named(name).follows or name

    def weather(self, peer: str, started_s: float = 0.0) -> Weather:
        """What the network does to a peer's deliveries."""
        return Weather(self.network.of(peer), f"{self.crew.seed}/{peer}", started_s)

    @property
    def problems_per_peer(self) -> int:
        return self.crew.problems_per_round // (
            1 if self.crew.layout == "horizontal" else len(self.authors)
        )

    @property
    def num_met(self) -> int:
        """How many of a peer's problems of a round all peers answer: its first."""
        if self.crew.layout == "horizontal":
            return self.problems_per_peer
        return math.ceil(self.crew.meet * self.problems_per_peer - 1e-9)

    @property
    def num_branches(self) -> int:
        """How many groups of continuations a peer may make in a round."""
        if self.teach.branch == "off":
            return 0
        return self.teach.most_branches or self.num_met

    @property
    def authors_per_group(self) -> int:
        return len(self.authors) if self.crew.layout == "horizontal" else 1

    @property
    def rollouts_per_group(self) -> int:
        """How many completions a peer makes of each of its problems."""
        return self.crew.group_size // self.authors_per_group

    def others(self, student: str) -> list[str]:
        """Who samples with other weights than this student's, in the file's order."""
        return [name for name in self.authors if self.student_of(name) != student]

    def num_heard(self, student: str) -> int:
        """Whose groups of a round reach a student: all who sample with its weights, and others."""
        if self.crew.hear is None:
            return len(self.authors)
        others = len(self.others(student))
        return len(self.authors) - others + min(self.crew.hear, others)

    def problems_per_step(self, student: str) -> int:
        """How many problems a step of a student learns from."""
        if self.crew.hear is None:
            return self.crew.problems_per_round
        return self.problems_per_peer * self.num_heard(student)

    def sender_share(self, student: str) -> float:
        """The most of a step of a student that may be one foreign sender's."""
        return min(1.0, max(self.trust.sender_share, 2 / self.num_heard(student)))

    @property
    def quorum(self) -> int:
        return self.crew.quorum or min(2, len(self.authors))

    def alone(self, name: str, own_share: bool = False) -> CrewConfig:
        """A crew of this one peer, which makes all the sampling of the crew itself.

        `own_share`: only what it samples in the crew, as someone who did not join. On one device,
        since it runs in one process.
        """
        peer = msgspec.structs.replace(self.named(name), role="peer", devices=1)
        changes = {
            "objective": "alone",
            "variant": "",
            "processes": False,
            "deadline_s": 0.0,
            "quorum": 0,
            "meet": 0.0,
            "hear": None,
        }
        if self.has_roles:
            changes["pace"] = "lockstep"
        if own_share:
            changes["problems_per_round"] = self.problems_per_peer
            changes["group_size"] = self.rollouts_per_group
        crew = msgspec.structs.replace(self.crew, name=f"{self.crew.name}-alone-{name}", **changes)
        return msgspec.structs.replace(
            self, crew=crew, peer=(peer,), objective={}, network=Network(), teach=Teach()
        )


def _check_sampling(sampling: Sampling) -> None:
    if sampling.temperature < COLDEST:
        raise ValueError(
            f"temperature={sampling.temperature:g} gives every rollout of a group the same tokens, "
            f"so nothing can be learned; use at least {COLDEST}, 1.0 is usual for training"
        )
    if sampling.top_k == 1:
        raise ValueError(
            "top_k=1 gives every rollout of a group the same tokens, so nothing can be learned; "
            "use 0 to keep every token, or at least 2"
        )


def _check_branches(config: CrewConfig) -> None:
    branch, size = config.teach.branch, config.rollouts_per_group
    if config.has_roles:
        raise ValueError(
            f"branch = {branch!r} is for peers that sample and learn, and this crew has learners "
            "and samplers; remove branch, or the roles"
        )
    if size < 2:
        raise ValueError(
            f"branch = {branch!r} makes groups of {size} here, which have no spread of rewards to "
            f"learn from: a horizontal crew shares group_size={config.crew.group_size} among its "
            f"peers; use a group_size of at least {2 * config.authors_per_group}, or remove branch"
        )


def _must_divide(field: str, value: int, num_peers: int, layout: str) -> None:
    if value % num_peers:
        below, above = value - value % num_peers, value - value % num_peers + num_peers
        choice = f"{below} or {above}" if below else str(above)
        raise ValueError(
            f"{field}={value} is not divisible by the {num_peers} peers of a {layout} crew; use "
            f"{choice}"
        )


def _check_hearing(crew: Crew) -> None:
    hear, quorum = crew.hear, crew.quorum
    if hear is None:
        return
    if crew.layout == "horizontal":
        raise ValueError(
            f"hear={hear} leaves out peers, and a horizontal crew shares every group among all "
            'of them; remove hear, or use layout = "vertical"'
        )
    if quorum > hear + 1:
        raise ValueError(
            f"quorum={quorum} is more than the {hear + 1} peers whom a learner hears, itself "
            f"included; use at most {hear + 1}, or raise hear"
        )
