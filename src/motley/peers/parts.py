"""The side of a team's other devices: each holds a part of the model, and does as it is told.

Owns what a device is told first, how it takes its part, and its last words. Orders come by a
connection, answers go back by it. Knows neither who started the process nor what an order does.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from motley.compute.sharding import Shards
from motley.engines import known_engine
from motley.learning.descent import OptimiserRules, optimiser_of
from motley.models.policy import Policy, frozen_copy
from motley.peers.orders import DevicePart

# of one exchange between devices; who has ended is noticed long before
PATIENCE = timedelta(minutes=20)

OpenPolicy = Callable[[], Policy]  # the policy that a peer begins with, on the CPU
Sizes = dict[str, tuple[int, ...]]  # of parameters, by name


class TeamPlan(NamedTuple):
    """What every device of a team is told when it begins."""

    places: tuple[torch.device, ...]  # of every rank, on its own machine
    rendezvous: str  # where torch has them meet: an `init_method`
    meeting: str  # a new name for each team: torchrun's store keeps what ended processes said there
    optimiser: OptimiserRules
    needs_reference: bool
    threads: int  # of each device, on a CPU

    @property
    def size(self) -> int:
        return len(self.places)


class Begin(NamedTuple):
    """The first that another device is told. `open_policy`: what it makes the peer's policy with;
    the sizes of its parameters count, their values come from the peer.
    """

    open_policy: OpenPolicy
    plan: TeamPlan
    rank: int


class LastWords(NamedTuple):
    """What a device says before it ends, if it can."""

    words: str


def tell(connection: Connection, what: Any) -> None:
    connection.send_bytes(pickle.dumps(what))


def hear(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def sizes_of(policy: Policy) -> Sizes:
    return {name: tuple(value.shape) for name, value in policy.model.named_parameters()}


def open_part(policy: Policy, plan: TeamPlan, rank: int) -> DevicePart:
    """Take this device's part of a policy. All devices must do so at a time.

    `policy`: the whole, on the CPU.
    """
    device = plan.places[rank]
    if device.type == "cuda":
        _check_gpu(device)
        torch.cuda.set_device(device)
    store, _, _ = next(rendezvous(plan.rendezvous, rank, plan.size, timeout=PATIENCE))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(plan.meeting, store),
        rank=rank,
        world_size=plan.size,
        timeout=PATIENCE,
    )
    mesh = init_device_mesh(device.type, (plan.size,))
    began = frozen_copy(policy) if plan.needs_reference else None
    shards = Shards(policy, mesh)
    return DevicePart(
        rank=rank,
        shards=shards,
        reference=Shards(began, mesh) if began else None,
        engine=known_engine(policy, shards.decoder),
        optimiser=optimiser_of([p for _, p in shards.trained()], *plan.optimiser),
    )


def _check_gpu(device: torch.device) -> None:
    here = torch.cuda.device_count()
    if (device.index or 0) >= here:
        raise ValueError(
            f"it is to compute on {device}, and its machine has {here} CUDA GPUs; start at most "
            "as many processes there"
        )


def obey(connection: Connection) -> None:
    """Do as the peer says until it says nothing any more.

    Whatever fails is told to the peer, and raised as one line.
    """
    try:
        begin: Begin = hear(connection)
        torch.set_num_threads(begin.plan.threads)
        policy = begin.open_policy()
        tell(connection, sizes_of(policy))
        part = open_part(policy, begin.plan, begin.rank)
        tell(connection, None)
        while True:
            tell(connection, hear(connection).do(part))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the peer has gone, or is done with its devices
    except Exception as error:
        words = one_line(error)
        try:
            tell(connection, LastWords(words))
        except OSError:
            return
        raise ValueError(words) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
