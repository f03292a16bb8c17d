"""One learner and two samplers, each a process, on a real hub with delayed deliveries; kill -9 at
random, and nothing published is lost.

    python tests/samplers.py --kills 40 --delay 5 --seed 0

A seeded killer strikes learner, samplers, server and hub. In every run: each sampler's batches are
on the log without a gap and once, chains are whole, what its outbox marked as sampled is there; the
learner took every step once and no group twice, and its final weights are those that its journal's
steps make from the log when they are taken again by somebody whom nobody disturbs. Exits with 1
otherwise.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from chaos import OneRun, disturbed_run, read_log, struggle, weights
from motley.config import CrewConfig, parse_config
from motley.exchange import Entry, MemoryLog, Outbox, Signer, decode, unpack
from motley.learning.checkpoint import save_training
from motley.learning.journal import Journal
from motley.learning.waiting import Wait
from motley.records import Group, Weights
from motley.runs.building import build_peer
from motley.runs.folder import Run
from motley.runs.metrics import read_metrics
from motley.trust import Identity
from motley.trust.chain import Chain

SAMPLERS = ("one", "two")


def roles_crew(
    folder: Path,
    delay_s: float,
    rounds: int,
    checkpoint_every: int = 1000,
    seed: int = 0,
    learning: str = "",
) -> CrewConfig:
    """On the dense task of `folder`.

    With a checkpoint at the start and the end only, the journal keeps every step.
    """
    peers = "".join(
        f'[[peer]]\nname = "{name}"\nrole = "sampler"\nfollows = "learner"\n' for name in SAMPLERS
    )
    return parse_config(
        f"""
[crew]
name = "spread"
task = "spread_reward:spread"
objective = "gepo"
pace = "async"
rounds = {rounds}
group_size = 4
problems_per_round = 4
seed = {seed}
[task]
file = "{folder / "problems.jsonl"}"
[sampling]
max_tokens = 5
[learning]
lr = 2e-3
max_age = 1000
checkpoint_every = {checkpoint_every}
{learning}
[evaluate]
every = 1000
problems = 2
[weights]
anchor_every = 4
[network]
delay = {delay_s}
[network.link.learner]
delay = 0
[[peer]]
name = "learner"
role = "learner"
model = "tiny:0.3m"
{peers}"""
    )


def faults_of(config: CrewConfig, folder: Path) -> list[str]:
    entries = read_log(folder / "hub")
    faults = log_faults(config, entries)
    for name in SAMPLERS:
        faults += outbox_faults(config, folder, name, {entry.id for entry in entries})
    rounds = [line.round for line in read_metrics(folder / "learner")]
    if rounds != list(range(config.crew.rounds + 1)):
        faults.append(f"the learner has rounds {rounds}")
    return faults + learner_faults(config, folder, entries)


def log_faults(config: CrewConfig, entries: list[Entry]) -> list[str]:
    """Every id once, every chain whole, every sampler's batches without a gap, the first and the
    last version of the weights.
    """
    faults, chains, versions = [], {}, set()
    batches: dict[str, Counter[int]] = {name: Counter() for name in SAMPLERS}
    for entry in entries:
        sealed = unpack(entry.record)
        stamp, content = decode(sealed.body)
        fault = chains.setdefault(stamp.key, Chain()).add(stamp, sealed.hash)
        faults += [f"{entry.id} is a {fault}"] if fault else []
        if isinstance(content, Group):
            batches[content.origin.peer][content.round] += 1
        elif isinstance(content, Weights):
            versions.add(content.version)
    faults += [
        f"{len(chain.missing)} records of a chain are missing"
        for chain in chains.values()
        if chain.missing
    ]
    for name, found in batches.items():
        if found != dict.fromkeys(range(len(found)), config.problems_per_peer):
            faults.append(f"batches of {name} have gaps: {sorted(found.items())}")
    # while one is on its way the next are left out
    if not {0, config.crew.rounds} <= versions <= set(range(config.crew.rounds + 1)):
        faults.append(f"versions on the log: {sorted(versions)}")
    return faults


def outbox_faults(config: CrewConfig, folder: Path, name: str, ids: set[str]) -> list[str]:
    """What was marked as sampled is on the log."""
    outbox = Outbox(
        folder / name / "groups" / "outbox.sqlite", Signer(bytes(32), lambda message: b"")
    )
    marked = {
        f"{name}.{round}.{slot}"
        for round in range(outbox.last_round + 1)
        for slot in range(config.problems_per_peer)
    }
    faults = [f"{len(outbox)} records of {name} are unsent"] if len(outbox) else []
    outbox.close()
    return faults + ([f"lost of {name}: {sorted(marked - ids)}"] if marked - ids else [])


def learner_faults(config: CrewConfig, folder: Path, entries: list[Entry]) -> list[str]:
    journal = Journal(folder / "learner" / "journal.jsonl")
    steps = [step for round in range(config.crew.rounds) if (step := journal.of(round))]
    used = Counter(position for step in steps for position in step.positions)
    faults = (
        [f"groups learned from twice: {[p for p, count in used.items() if count > 1]}"]
        if max(used.values(), default=0) > 1
        else []
    )
    if len(steps) < config.crew.rounds:  # checkpoints on the way have made the journal forget
        return faults
    with tempfile.TemporaryDirectory() as place:
        again = Path(place) / "again"
        shutil.copytree(folder / "learner" / "start", again / "start")
        log = MemoryLog()
        log.append([(entry.id, entry.record) for entry in entries])
        if [entry.position for entry in log.read(0, len(entries))] != [
            entry.position for entry in entries
        ]:
            return [*faults, "the log has holes"]
        hub = Identity.kept_at(folder / "hub" / "hub.key").public
        peer = build_peer(
            Run(config, again),
            config.named("learner"),
            log,
            Outbox(None, Signer(bytes(32), lambda message: b"")),
            hub,
        )
        for step in steps:
            peer.receive(until=step.cursor)
            chosen = peer.choose(step.closed)
            if isinstance(chosen, Wait) or chosen.positions != step.positions:
                return [*faults, f"step {step.round} would be taken from other groups"]
            peer.step(chosen)
        save_training(
            peer.learner.policy,
            peer.learner.optimiser,
            again / "checkpoints" / f"round-{config.crew.rounds:06d}" / "learner",
        )
        (again / "config.toml").touch()
        if weights(again, "learner") != weights(folder / "learner", "learner"):
            faults.append("the learner's weights are not those that its steps make")
    return faults


def one_run(wanted: argparse.Namespace) -> OneRun:
    def run(
        root: Path, number: int, rng: random.Random, kills: int
    ) -> tuple[Counter[str], list[str]]:
        config = roles_crew(
            root, wanted.delay, wanted.rounds, (1000, 4)[number % 2], wanted.seed + number
        )
        folder = root / f"run{number}"
        return disturbed_run(config, folder, rng, kills, timeout_s=600), faults_of(config, folder)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--delay", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=30)
    struggle(parser, one_run)


if __name__ == "__main__":
    main()
