"""Children: a process of this machine for each of a peer's other devices.

Owns how they start and end. They end with the peer, however it ends. What they do meanwhile is in
`parts`.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from motley.peers.parts import obey
from motley.peers.team import ENDING_S


def places_here(peer: str, first: torch.device, size: int) -> tuple[torch.device, ...]:
    """So many devices of this machine from the first on."""
    if first.type != "cuda":
        return (first,) * size
    start, here = first.index or 0, torch.cuda.device_count()
    if start + size > here:
        raise ValueError(
            f"peer {peer}: devices={size} from {first} on, and there are {here} CUDA GPUs here; "
            f"use devices = {max(1, here - start)}, or more machines by torchrun"
        )
    return tuple(torch.device("cuda", start + rank) for rank in range(size))


@dataclass(frozen=True, slots=True)
class ChildDevice:
    process: BaseProcess
    orders: Connection

    @property
    def life(self) -> int:
        return self.process.sentinel

    def how_ended(self) -> str:
        code = self.process.exitcode
        if code is None:
            return ""
        return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"


@dataclass(frozen=True, slots=True)
class Children:
    devices: list[ChildDevice]
    folder: Path  # where torch has them meet

    @classmethod
    def start(cls, peer: str, size: int) -> Children:
        """One for each device but the first."""
        context = _context()
        devices = []
        for rank in range(1, size):
            here, there = context.Pipe()
            process = context.Process(
                target=_live, args=(there,), name=f"motley {peer} {rank}", daemon=True
            )
            process.start()
            there.close()
            devices.append(ChildDevice(process, here))
        return cls(devices, Path(tempfile.mkdtemp(prefix="motley-devices-")))

    @property
    def rendezvous(self) -> str:
        return f"file://{self.folder / 'meet'}"

    @property
    def threads(self) -> int:
        """Of each, on one machine."""
        return max(1, torch.get_num_threads() // (len(self.devices) + 1))

    def let_go(self) -> None:
        for device in self.devices:
            device.process.join(ENDING_S)
            if device.process.is_alive():
                device.process.kill()
                device.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def _context() -> Any:
    """Windows can only spawn. Elsewhere torch is imported once for all."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["motley.peers.children"])
    return context


def _live(orders: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells everyone; the peer saves first
    threading.Thread(target=_end_with_the_peer, daemon=True).start()
    try:
        obey(orders)
    except ValueError as error:  # which the peer was told
        raise SystemExit(1) from error


def _end_with_the_peer() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
