"""Spreading a peer over several devices: its learner and its engine give orders to a `Team`.

All that concerns a whole batch stays where it was: advantages, groups, losses and metrics are
computed by the peer's own process, from the log-probs of all devices. Only forward and backward
passes are shared out, by micro-batches, and a round's problems for sampling. So no objective knows
of it, and a step comes out as on one device but for rounding.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from motley.compute.logprobs import Scores
from motley.compute.packed import Packed
from motley.compute.sharding import why_unsharded
from motley.engines import Completion
from motley.learning.batches import waves
from motley.learning.descent import LossScale
from motley.learning.learner import Learner, Means
from motley.learning.reference import Reference
from motley.learning.sequences import StepPlan, Unscored
from motley.models.policy import Policy
from motley.peers.children import Children, places_here
from motley.peers.orders import (
    BackwardOrder,
    ClipOrder,
    FetchMomentsOrder,
    FetchOrder,
    Moments,
    Policies,
    RefreshOrder,
    SampleOrder,
    ScoreOrder,
    StepOrder,
    TakeMomentsOrder,
    TakeOrder,
    TeamOrder,
    ZeroGradOrder,
)
from motley.peers.parts import OpenPolicy, TeamPlan
from motley.peers.peer import Peer
from motley.peers.team import Team
from motley.peers.torchrun import Ranks
from motley.records import Sampling


def spread(peer: Peer, open_policy: OpenPolicy, ranks: Ranks | None = None) -> Team:
    """Have a peer that has not learned yet compute on as many devices as it asks for.

    Its policy stays as a whole copy in the memory of the host, which is brought up to date where
    weights are saved or published. `open_policy`: what another process makes the same policy with.
    `ranks`: the processes that torchrun started; without them they are started here.
    """
    team = spread_learner(peer.me.name, peer.learner, peer.me.devices, open_policy, ranks)
    peer.half.engine = SpreadEngine(team)
    peer.half.refresh()
    return team


def spread_learner(
    peer: str, learner: Learner, size: int, open_policy: OpenPolicy, ranks: Ranks | None = None
) -> Team:
    policy = learner.policy
    _check(peer, policy, size)
    first = policy.device
    places = ranks.places(peer, first) if ranks else places_here(peer, first, size)
    others = ranks or Children.start(peer, size)
    plan = TeamPlan(
        places=places,
        rendezvous=others.rendezvous,
        meeting=secrets.token_hex(8),
        optimiser=learner.optimiser_rules,
        needs_reference=learner.needs_reference,
        threads=others.threads,
    )
    policy.model.to("cpu")
    shared = replace(policy, model=copy.deepcopy(policy.model))
    team = Team.open(peer, shared, open_policy, plan, others)
    for of in ("learner", "reference") if plan.needs_reference else ("learner",):
        for name, value in policy.model.named_parameters():
            team.do(_taking(team, name, value.detach(), of))
    policy.remote = _RemotePolicy(team, policy)
    learner.compute_with(
        Means(
            score=SpreadScore(team),
            reference=SpreadReference(team) if plan.needs_reference else Reference(policy, False),
            scale=SpreadScale(team, policy.dtype),
            optimiser=SpreadOptimiser(team, policy),
        )
    )
    return team


def _check(peer: str, policy: Policy, size: int) -> None:
    if reason := why_unsharded(policy):
        raise ValueError(
            f"peer {peer}: devices={size}, and {policy.config.model_type!r} computes on one "
            f"device: {reason}; use devices = 1"
        )
    if dist.is_initialized():
        raise ValueError(
            f"peer {peer}: this process has a group of devices already; a peer with several "
            "devices needs a process of its own"
        )


def _taking(team: Team, name: str, value: Tensor, of: Policies) -> list[TeamOrder]:
    return [TakeOrder(name, value, of), *[TakeOrder(name, None, of)] * (team.size - 1)]


class _RemotePolicy:
    """The whole copy of a policy that trains on a team's devices."""

    def __init__(self, team: Team, policy: Policy) -> None:
        self._team, self._policy = team, policy

    @torch.no_grad()
    def fetch(self) -> None:
        for name, value in self._policy.trained():
            value.copy_(self._team.all_do(FetchOrder(name))[0])

    def push(self) -> None:
        for name, value in self._policy.trained():
            self._team.do(_taking(self._team, name, value.detach(), "learner"))

    def is_finite(self, policy: Policy, packed: Packed) -> bool:
        """By one device's log-probs, and everyone's gradient of them, which is then forgotten."""
        team = self._team
        team.all_do(ZeroGradOrder())
        logp_M = team.all_do(ScoreOrder(packed, learns=True))[0].logp_M
        others: list[TeamOrder] = [BackwardOrder(None, 1.0)] * (team.size - 1)
        team.do([BackwardOrder(torch.ones_like(logp_M), 1.0), *others])
        norm = team.all_do(ClipOrder(1.0, 1.0))[0]
        team.all_do(ZeroGradOrder())
        return bool(logp_M.isfinite().all() and norm.isfinite())


class SpreadScore:
    """As many micro-batches at once as there are devices."""

    holds = False

    def __init__(self, team: Team, by: Policies = "learner") -> None:
        self._team, self._by = team, by
        self.width = team.size

    def begin(self) -> None:
        """Nothing to prepare."""

    def forget(self) -> bool:
        return False

    def __call__(self, packed: Packed) -> Scores:
        return self.together([packed])[0]

    def together(self, wave: Sequence[Packed]) -> list[Scores]:
        # who has none computes another's beside it, since all must walk through the layers
        least = min(wave, key=lambda packed: len(packed.token_N))
        learns = torch.is_grad_enabled()
        filled = [*wave, *[least] * (self.width - len(wave))]
        made = self._team.do([ScoreOrder(packed, learns, self._by) for packed in filled])
        return made[: len(wave)]


class SpreadReference(Reference):
    def __init__(self, team: Team) -> None:
        self._score = self._wide = SpreadScore(team, "reference")

    @torch.no_grad()
    def known_all(self, plan: StepPlan, some: Sequence[Unscored]) -> list[Unscored]:
        if plan.ref:
            return list(some)
        made: list[Unscored] = []
        for wave in waves(some, self._wide.width):
            scored = self._wide.together([one.micro.packed for one in wave])
            for one, scores in zip(wave, scored, strict=True):
                ref_BT = one.micro.unpack(scores.logp_M)
                made.append(one._replace(known=partial(one.known, logp_ref_BT=ref_BT)))
        return made


class SpreadScale(LossScale):
    def __init__(self, team: Team, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._team = team

    def backward_all(self, values: Sequence[Tensor], dlosses: Sequence[Tensor]) -> None:
        none = [None] * (self._team.size - len(dlosses))
        self._team.do([BackwardOrder(dloss_M, self.value) for dloss_M in (*dlosses, *none)])

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        norm: Tensor = self._team.all_do(ClipOrder(self.value, limit))[0]
        return norm


class SpreadOptimiser:
    """The optimisers of all devices as one."""

    def __init__(self, team: Team, policy: Policy) -> None:
        self._team = team
        own = team.part.optimiser
        self.param_groups, self.defaults = own.param_groups, own.defaults
        self.state = _SpreadMoments(team, policy)

    def zero_grad(self) -> None:
        self._team.all_do(ZeroGradOrder())

    def step(self) -> None:
        self._team.all_do(StepOrder(self.param_groups[0]["lr"]))


class _SpreadMoments:
    """What optimisers remember, by parameter of the whole copy; gathered where it is asked for."""

    def __init__(self, team: Team, policy: Policy) -> None:
        self._team, self._policy = team, policy

    def _name_of(self, parameter: Tensor) -> str:
        return next(name for name, p in self._policy.trained() if p is parameter)

    def get(self, parameter: Tensor, default: Moments) -> Moments:
        known: Moments = self._team.all_do(FetchMomentsOrder(self._name_of(parameter)))[0]
        return known or default

    def __setitem__(self, parameter: Tensor, moments: Moments) -> None:
        name = self._name_of(parameter)
        alike: dict[str, Tensor | None] = {
            key: value for key, value in moments.items() if value.shape == parameter.shape
        }
        others = {key: value for key, value in moments.items() if key not in alike}
        rest = TakeMomentsOrder(name, dict.fromkeys(alike), others)
        self._team.do([TakeMomentsOrder(name, alike, others), *[rest] * (self._team.size - 1)])


class SpreadEngine:
    """Every device samples its share of the prompts, each with the random numbers of its place."""

    keeps_snapshot = False  # orders are done one after the other: nothing is sampled beside a step

    def __init__(self, team: Team) -> None:
        self._team = team

    def refresh(self) -> None:
        self._team.all_do(RefreshOrder())

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        orders = [
            SampleOrder(prompts[share], num_samples, sampling, seed, share.start)
            for share in _shares(len(prompts), self._team.size)
        ]
        return [row for part in self._team.do(orders) for row in part]


def _shares(count: int, size: int) -> Iterator[slice]:
    """Where to cut so that parts follow each other and are as alike in size as can be."""
    start = 0
    for part in np.array_split(np.arange(count), size):
        yield slice(start, start + len(part))
        start += len(part)
