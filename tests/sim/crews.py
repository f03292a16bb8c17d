"""Crews with roles on the dense task: a learner and its samplers, as a user would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fakes import TRAIN
from motley.config import CrewConfig, parse_config
from motley.metrics import MetricsLine, read_metrics
from motley.sim.crew import SimCrew

SAMPLERS = {"s0": "l", "s1": "l"}


def peer_text(
    name: str, role: str = "", follows: str = "", train: str = "full", keys: str = ""
) -> str:
    model = f'follows = "{follows}"\n' if follows else f'model = "tiny:0.3m"\n{TRAIN[train]}'
    return (
        f'[[peer]]\nname = "{name}"\n'
        + (f'role = "{role}"\n' if role else "")
        + model
        + keys
        + "\n"
    )


def crew_text(
    folder: Path,
    samplers: Mapping[str, str] = SAMPLERS,
    peers: Mapping[str, str] = {},
    learning: str = "",
    network: str = "",
    weights: str = "",
    train: str = "full",
    per_peer: Mapping[str, str] = {},
    **crew: Any,
) -> str:
    """`samplers`: name -> its learner; `peers`: further plain ones; `per_peer`: further keys of a
    peer.
    """
    learners = dict.fromkeys(samplers.values())
    settings = {
        "name": "far",
        "task": "spread_reward:spread",
        "rounds": 4,
        "group_size": 4,
        "problems_per_round": 2 * (len(samplers) + len(peers)),
        "objective": "ftis",
        "pace": "async",
    } | crew
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    texts = [
        peer_text(name, "learner", train=train, keys=per_peer.get(name, "")) for name in learners
    ]
    texts += [
        peer_text(name, "sampler", follows, keys=per_peer.get(name, ""))
        for name, follows in samplers.items()
    ]
    texts += [peer_text(name, keys=per_peer.get(name, "")) for name in peers]
    return (
        f'[crew]\n{keys}\n[task]\nfile = "{folder / "problems.jsonl"}"\n\n[sampling]\nmax_tokens '
        "= 5\n\n"
        "[learning]\nlr = "
        f"2e-3\n{learning}\n[weights]\n{weights}\n[network]\n{network}\n[evaluate]\nevery = "
        "2\nproblems = 2\n" + "".join(texts)
    )


def far_crew(folder: Path, **settings: Any) -> CrewConfig:
    return parse_config(crew_text(folder, **settings))


def simulated(config: CrewConfig, folder: Path) -> SimCrew:
    """A crew after its last round."""
    crew = SimCrew(config, folder)
    for _ in crew.rounds():
        pass
    return crew


def lines_of(crew: SimCrew, peer: str) -> list[MetricsLine]:
    return [line for line in read_metrics(crew.folder) if line.peer == peer]
