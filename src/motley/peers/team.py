"""Team: the processes of one peer on several devices, as the first of them sees the others.

The first is the peer's own. It alone talks to the log, the journal and the disk. The others hold a
part of the model, follow its orders, and end with it. Orders and answers go through a connection to
each; weights and gradients go from device to device, by gloo on CPUs and by nccl on GPUs. Who
started the others, on this machine (`children`) or on several (`torchrun`), it does not know.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch
import torch.distributed as dist

from motley.models.devices import OUT_OF_MEMORY
from motley.models.policy import Policy
from motley.peers.orders import DevicePart, TeamOrder
from motley.peers.parts import (
    Begin,
    LastWords,
    OpenPolicy,
    Sizes,
    TeamPlan,
    hear,
    open_part,
    sizes_of,
    tell,
)

GRACE_S = 60.0  # in which whoever computes notices by itself that a device has gone
ENDING_S = 10.0


class OtherDevice(Protocol):
    """The process of another device."""

    @property
    def orders(self) -> Connection:
        """Where it hears orders, and answers."""
        ...

    @property
    def life(self) -> Connection | int:
        """What is ready, to `wait`, as soon as the process has ended."""
        ...

    def how_ended(self) -> str:
        """In words; empty while it runs."""
        ...


class Others(Protocol):
    """The processes of all devices but the first, in the order of their ranks."""

    @property
    def devices(self) -> Sequence[OtherDevice]: ...

    def let_go(self) -> None:
        """Have nothing more for them to do."""
        ...


@dataclass(slots=True)
class Team:
    peer: str
    plan: TeamPlan
    others: Others
    busy: bool = True  # it begins, or an order is being done
    part: DevicePart = field(init=False)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def size(self) -> int:
        return self.plan.size

    @classmethod
    def open(
        cls, peer: str, policy: Policy, open_policy: OpenPolicy, plan: TeamPlan, others: Others
    ) -> Team:
        """Have the other devices begin, and take the first part.

        `policy`: the peer's own, of which its part is made. `open_policy`: what another process
        makes the same with.
        """
        torch.set_num_threads(plan.threads)
        team = cls(peer, plan, others)
        try:
            team._begin(policy, open_policy)
        except BaseException:
            team.close()
            raise
        return team

    def _begin(self, policy: Policy, open_policy: OpenPolicy) -> None:
        for rank, device in enumerate(self.others.devices, 1):
            with suppress(OSError):  # it has ended; why is heard below
                tell(device.orders, Begin(open_policy, self.plan, rank))
        here = sizes_of(policy)
        for rank, there in enumerate(self._hear_all(), 1):
            _check_alike(self.peer, rank, here, there)
        threading.Thread(target=_watch, args=(self,), daemon=True).start()
        try:
            self.part = open_part(policy, self.plan, 0)
        except RuntimeError as error:
            raise self._lost() or error from error
        self._hear_all()
        self.busy = False

    def all_do(self, order: TeamOrder) -> list[Any]:
        return self.do([order] * self.size)

    def do(self, orders: Sequence[TeamOrder]) -> list[Any]:
        """Have every device do its order, and give what came of each."""
        self.busy = True
        try:
            for device, order in zip(self.others.devices, orders[1:], strict=True):
                tell(device.orders, order)
            own = orders[0].do(self.part)
            return [own, *self._hear_all()]
        except (RuntimeError, OSError) as error:
            # whoever computes with a device that has ended fails, too
            raise self._lost() or _failure(self.peer, 0, str(error)) from error
        finally:
            self.busy = False

    def _hear_all(self) -> list[Any]:
        return [
            _heard(self.peer, rank, device) for rank, device in enumerate(self.others.devices, 1)
        ]

    def _lost(self) -> ValueError | None:
        """Why a device has ended, if one has; of several, one that could not say it."""
        devices = self.others.devices
        wait([device.life for device in devices], timeout=ENDING_S)
        ended = [
            (_last_words(device), rank, device)
            for rank, device in enumerate(devices, 1)
            if device.how_ended()
        ]
        if not ended:
            return None
        words, rank, device = min(ended, key=lambda one: bool(one[0]))
        return _ended(self.peer, rank, device, words)

    def close(self) -> None:
        """Let the others go."""
        if self.over.is_set():
            return
        self.over.set()
        for device in self.others.devices:
            device.orders.close()
        self.others.let_go()
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_alike(peer: str, rank: int, here: Sizes, there: Sizes) -> None:
    """Parts of a tensor of another size would not fit together."""
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            raise ValueError(
                f"peer {peer}: its device {rank} has another model: {name} is "
                f"{there.get(name, 'not')} there and {here.get(name, 'not')} here; put the same "
                "model on that machine, under the same name or path"
            )


def _heard(peer: str, rank: int, device: OtherDevice) -> Any:
    """What a device answers."""
    try:
        answer = hear(device.orders)
    except (EOFError, OSError):
        wait([device.life], timeout=ENDING_S)
        raise _ended(peer, rank, device, "") from None
    if isinstance(answer, LastWords):
        raise _failure(peer, rank, answer.words)
    return answer


def _failure(peer: str, rank: int, words: str) -> ValueError:
    memory = any(said in words for said in OUT_OF_MEMORY)
    remedy = "; set a lower learning.token_budget, or use more devices" if memory else ""
    return ValueError(f"peer {peer}: its device {rank} failed: {words}{remedy}")


def _last_words(device: OtherDevice) -> str:
    """What a device that has ended said before; empty if nothing."""
    with suppress(EOFError, OSError):
        while device.orders.poll():
            answer = hear(device.orders)
            if isinstance(answer, LastWords):
                return answer.words
    return ""


def _ended(peer: str, rank: int, device: OtherDevice, words: str) -> ValueError:
    if words:
        return _failure(peer, rank, words)
    return ValueError(
        f"peer {peer}: its process for device {rank} {device.how_ended() or 'answers no more'}, "
        "and the others cannot go on without it; nothing before the newest checkpoint is lost: go "
        "on with the same line or --resume, with as many devices or with others"
    )


def _watch(team: Team) -> None:
    """End this process where a device has ended and nobody notices, as with nccl on GPUs."""
    wait([device.life for device in team.others.devices])
    while not team.over.wait(GRACE_S):
        if team.busy:  # with an order, perhaps one of later
            sys.stderr.write(f"{team._lost()}\n")
            sys.stderr.flush()
            os._exit(2)
