"""Team: the processes of one peer on several devices.

The first is the peer's own. It alone talks to the log, the journal and the disk. The others hold a
part of the model, follow its orders, and end with it. Orders and answers go through a pipe to each;
weights and gradients go from device to device, by gloo on CPUs and by nccl on GPUs.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from motley.compute.sharding import Shards
from motley.engines import known_engine
from motley.learning.descent import OptimiserRules, optimiser_of
from motley.models.devices import OUT_OF_MEMORY
from motley.models.policy import Policy, frozen_copy
from motley.peers.orders import DevicePart, TeamOrder

# of one exchange between devices; who has ended is noticed long before
PATIENCE = timedelta(minutes=20)
GRACE_S = 60.0  # in which whoever computes notices by itself that a device has gone
ENDING_S = 10.0

OpenPolicy = Callable[[], Policy]  # the policy that a peer begins with, on the CPU


class TeamPlan(NamedTuple):
    """What every device of a team is told when it begins."""

    size: int
    device: torch.device  # of the first; GPUs follow each other
    rendezvous: str  # a file that does not exist yet
    optimiser: OptimiserRules
    needs_reference: bool
    threads: int  # of each device, on a CPU

    def device_of(self, rank: int) -> torch.device:
        if self.device.type != "cuda":
            return self.device
        return torch.device("cuda", (self.device.index or 0) + rank)


class _LastWords(NamedTuple):
    """The last words of a device."""

    words: str


def open_part(policy: Policy, plan: TeamPlan, rank: int) -> DevicePart:
    """Take this device's part of a policy. All devices must do so at a time.

    `policy`: the whole, on the CPU.
    """
    device = plan.device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{plan.rendezvous}",
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


@dataclass(slots=True)
class Team:
    peer: str
    plan: TeamPlan
    processes: list[BaseProcess]
    pipes: list[Connection]
    busy: bool = True  # it begins, or an order is being done
    part: DevicePart = field(init=False)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def size(self) -> int:
        return self.plan.size

    @classmethod
    def open(cls, peer: str, policy: Policy, open_policy: OpenPolicy, plan: TeamPlan) -> Team:
        """Start the other devices and take the first part.

        `policy`: the peer's own, of which its part is made. `open_policy`: what another process
        makes the same with.
        """
        if dist.is_initialized():
            raise ValueError(
                f"peer {peer}: this process has a group of devices already; a peer with several "
                "devices needs a process of its own"
            )
        context = _context()
        processes, pipes = [], []
        for rank in range(1, plan.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_follow,
                args=(there, open_policy, plan, rank),
                name=f"motley {peer} {rank}",
                daemon=True,
            )
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        torch.set_num_threads(plan.threads)
        team = cls(peer, plan, processes, pipes)
        try:
            team._begin(policy)
        except BaseException:
            team.close()
            raise
        return team

    def _begin(self, policy: Policy) -> None:
        self._hear_all()  # their models are there
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
            for pipe, order in zip(self.pipes, orders[1:], strict=True):
                pipe.send_bytes(pickle.dumps(order))
            own = orders[0].do(self.part)
        except (RuntimeError, OSError) as error:
            # whoever computes with a device that has ended fails, too
            raise self._lost() or _failure(self.peer, 0, str(error)) from error
        finally:
            self.busy = False
        return [own, *self._hear_all()]

    def _hear_all(self) -> list[Any]:
        pairs = zip(self.processes, self.pipes, strict=True)
        return [_heard(self.peer, rank, *pair) for rank, pair in enumerate(pairs, 1)]

    def _lost(self) -> ValueError | None:
        """Why a device has ended, if one has; of several, one that was killed."""
        wait([process.sentinel for process in self.processes], timeout=ENDING_S)
        ended = [
            (process.exitcode, rank)
            for rank, process in enumerate(self.processes, 1)
            if process.exitcode is not None
        ]
        if not ended:
            return None
        _, rank = min(ended)
        return _ended(self.peer, rank, self.processes[rank - 1], self.pipes[rank - 1])

    def close(self) -> None:
        """Let the others go."""
        if self.over.is_set():
            return
        self.over.set()
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(ENDING_S)
            if process.is_alive():
                process.kill()
                process.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(Path(self.plan.rendezvous).parent, ignore_errors=True)


def new_rendezvous() -> str:
    return str(Path(tempfile.mkdtemp(prefix="motley-devices-")) / "meet")


def _heard(peer: str, rank: int, process: BaseProcess, pipe: Connection) -> Any:
    """What a device answers."""
    try:
        answer = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        process.join(ENDING_S)
        raise _ended(peer, rank, process, pipe) from None
    if isinstance(answer, _LastWords):
        raise _failure(peer, rank, answer.words)
    return answer


def _failure(peer: str, rank: int, words: str) -> ValueError:
    memory = any(said in words for said in OUT_OF_MEMORY)
    remedy = "; set a lower learning.token_budget, or use more devices" if memory else ""
    return ValueError(f"peer {peer}: its device {rank} failed: {words}{remedy}")


def _ended(peer: str, rank: int, process: BaseProcess, pipe: Connection) -> ValueError:
    code = process.exitcode
    why = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
    with suppress(EOFError, OSError):
        while pipe.poll():
            answer = pickle.loads(pipe.recv_bytes())
            if isinstance(answer, _LastWords):
                return _failure(peer, rank, answer.words)
    return ValueError(
        f"peer {peer}: its process for device {rank} {why}, and the others cannot go on without "
        "it; nothing before the newest checkpoint is lost: go on with --resume, with as many "
        "devices or with others"
    )


def _watch(team: Team) -> None:
    """End this process where a device has ended and nobody notices, as with nccl on GPUs."""
    wait([process.sentinel for process in team.processes])
    if not team.over.wait(GRACE_S) and team.busy:
        sys.stderr.write(f"{team._lost()}\n")
        sys.stderr.flush()
        os._exit(2)


def _context() -> Any:
    """Windows can only spawn. Elsewhere torch is imported once for all."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["motley.peers.team"])
    return context


def _follow(pipe: Connection, open_policy: OpenPolicy, plan: TeamPlan, rank: int) -> None:
    """The life of another device's process: do what it is told until the peer has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells everyone; the peer saves first
    threading.Thread(target=_end_with_the_peer, daemon=True).start()
    torch.set_num_threads(plan.threads)
    try:
        policy = open_policy()
        pipe.send_bytes(pickle.dumps(None))
        part = open_part(policy, plan, rank)
        pipe.send_bytes(pickle.dumps(None))
        while True:
            order: TeamOrder = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(order.do(part)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the peer has gone
    except Exception as error:
        words = str(error).splitlines() or [type(error).__name__]
        try:
            pipe.send_bytes(pickle.dumps(_LastWords(words[0])))
        except OSError:
            return
        raise SystemExit(1) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_with_the_peer() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
