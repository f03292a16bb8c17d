"""A crew whose peers live in one process and take turns; owns the run directory, its metrics and its checkpoints.

RUN/config.toml            the crew as it ran
RUN/start/PEER/            every peer's model before the first round
RUN/metrics.jsonl          a line per peer and round (docs/metrics.md)
RUN/groups/log.bin         the log
RUN/checkpoints/round-N/   PEER/model is an ordinary Hugging Face or PEFT folder
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from motley.clock import RealClock
from motley.config import ConfigError, CrewConfig, PeerConfig, read_config, write_config
from motley.engines import TorchEngine
from motley.evaluation import greedy_by_kind
from motley.exchange import MemoryLog, cut_log
from motley.learning.checkpoint import checkpoints, load_manifest, load_training, save_checkpoint, save_training, sync
from motley.learning.learner import Learner, StepReport
from motley.learning.warm import check_warm, warm_start
from motley.objectives import objective
from motley.peer import Peer, Sampled
from motley.policies import Policy, check_peer, choose_trained, initial_policy, peer_seed
from motley.tasks import evaluation_set, load_task

MetricsLine = dict[str, Any]
WarmProgress = Callable[[str, int, dict[str, float]], None]  # (peer, steps, accuracy per kind)


def check_config(config: CrewConfig) -> None:
    """Look up every name a crew file uses, so that a mistake shows before any model loads."""
    task = load_task(config.crew.task, config.task)
    objective(config.crew.objective, config.crew.variant, config.objective)
    problems = [p for split in task.splits for p in evaluation_set(task, split, per_kind=8)]
    for peer in config.peer:
        check_peer(peer, problems, config.sampling.max_tokens)
        if peer.warm:
            check_warm(task, peer.warm)


@dataclass(frozen=True, slots=True)
class _Timing:
    sample_s: float
    learn_s: float


class LocalCrew:
    """Peers in turn. `rounds()` trains; every yielded list has one metrics line per peer."""

    def __init__(self, config: CrewConfig, folder: Path, warm_progress: WarmProgress | None = None) -> None:
        self.config = config
        self.folder = folder
        self.finished_rounds = 0
        self.task = load_task(config.crew.task, config.task)
        self._heldout = evaluation_set(self.task, "heldout", config.evaluate.problems)
        self._ood = evaluation_set(self.task, "ood", config.evaluate.problems) if "ood" in self.task.splits else []
        for part in ("start", "groups", "checkpoints"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._log = MemoryLog(folder / "groups" / "log.bin")
        self.peers = [self._build(peer, warm_progress) for peer in config.peer]
        self._metrics = folder / "metrics.jsonl"
        self._metrics.touch()

    @classmethod
    def start(cls, config: CrewConfig, folder: Path, warm_progress: WarmProgress | None = None) -> LocalCrew:
        """A new run in a new folder, with the skills before training as its first metrics lines."""
        check_config(config)
        _discard_unfinished(folder)
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"run folder {folder} is not empty; choose another with --out, or go on with: motley train --resume {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder / "config.toml")
        crew = cls(config, folder, warm_progress)
        crew._write([{"round": 0, "peer": p.me.name, **crew._accuracies(p)} for p in crew.peers])
        crew.save()
        return crew

    @classmethod
    def start_or_resume(cls, config: CrewConfig, folder: Path, warm_progress: WarmProgress | None = None) -> LocalCrew:
        """Go on with a run of this folder, or begin it."""
        if not checkpoints(folder / "checkpoints"):
            return cls.start(config, folder, warm_progress)
        if read_config(folder / "config.toml") != config:
            raise ValueError(f"{folder} holds a run of other settings; choose another folder, or delete it")
        return cls.resume(folder)

    @classmethod
    def resume(cls, folder: Path) -> LocalCrew:
        """Go on from the newest checkpoint. What was written after it is cut off and done again."""
        newest = newest_checkpoint(folder)
        state = load_manifest(newest)
        cut_log(folder / "groups" / "log.bin", state["log_records"])
        metrics = folder / "metrics.jsonl"
        if metrics.stat().st_size < state["metrics_bytes"]:
            raise ValueError(f"{metrics} is shorter than when {newest} was saved; delete {newest} to resume from the checkpoint before it")
        os.truncate(metrics, state["metrics_bytes"])
        crew = cls(read_config(folder / "config.toml"), folder)
        crew.finished_rounds = state["round"]
        for peer in crew.peers:
            load_training(peer.learner.policy, peer.learner.optimiser, newest / peer.me.name)
            peer.load_state(state["peers"][peer.me.name])
        return crew

    def rounds(self) -> Iterator[list[MetricsLine]]:
        """Train to the last round. Stopping between two yields loses nothing once `save` is called."""
        while self.finished_rounds < self.config.crew.rounds:
            lines = self._lockstep_round() if self.config.crew.pace == "lockstep" else self._async_round()
            self.finished_rounds += 1
            self._write(lines)
            last = self.finished_rounds == self.config.crew.rounds
            if last or self.finished_rounds % self.config.learning.checkpoint_every == 0:
                self.save()
            yield lines

    def save(self) -> None:
        for path in (self._metrics, self.folder / "groups" / "log.bin"):  # the checkpoint counts on what they hold
            if path.exists():
                sync(path)
        state = {
            "round": self.finished_rounds,
            "log_records": len(self._log),
            "metrics_bytes": self._metrics.stat().st_size,
            "peers": {p.me.name: p.state() for p in self.peers},
        }

        def write(folder: Path) -> None:
            for peer in self.peers:
                save_training(peer.learner.policy, peer.learner.optimiser, folder / peer.me.name)

        save_checkpoint(self.folder / "checkpoints", self.finished_rounds, state, write)

    def _build(self, me: PeerConfig, warm_progress: WarmProgress | None) -> Peer:
        config = self.config
        start = self.folder / "start" / me.name
        if not start.exists():
            policy = initial_policy(me, config.crew.seed)
            if me.warm:
                progress = (lambda steps, accuracy: warm_progress(me.name, steps, accuracy)) if warm_progress else None
                warm_start(policy, self.task, me.warm, peer_seed(me.name, config.crew.seed), progress)
            policy.save(start)
        policy = _starting_policy(config, me, start)
        row = objective(config.crew.objective, config.crew.variant, config.objective)
        learner = Learner(policy, row, config.learning, me.lr or config.learning.lr)
        return Peer(config=config, me=me, task=self.task, learner=learner, engine=TorchEngine(policy), log=self._log, clock=RealClock())

    def _lockstep_round(self) -> list[MetricsLine]:
        sampled = [_timed(peer.sample) for peer in self.peers]
        learned = [_timed(peer.receive_and_learn) for peer in self.peers]
        for peer, (report, _) in zip(self.peers, learned, strict=True):
            if report is None:
                raise ValueError(
                    f"peer {peer.me.name} has only {len(peer.waiting)} groups of round {self.finished_rounds + 1} and cannot go on: "
                    f"refused so far {_by_sender(peer.admission.refused)}; a lockstep crew needs every peer's groups"
                )
        return [self._line(p, s, r, _Timing(s_s, r_s)) for p, (s, s_s), (r, r_s) in zip(self.peers, sampled, learned, strict=True)]

    def _async_round(self) -> list[MetricsLine]:
        lines = []
        for peer in self.peers:
            sampled, sample_s = _timed(peer.sample) if peer.may_sample() else (None, 0.0)
            report, learn_s = _timed(peer.receive_and_learn)
            lines.append(self._line(peer, sampled, report, _Timing(sample_s, learn_s)))
        return lines

    def _line(self, peer: Peer, sampled: Sampled | None, report: StepReport | None, timing: _Timing) -> MetricsLine:
        number = self.finished_rounds + 1
        line: MetricsLine = {"round": number, "peer": peer.me.name, "version": peer.learner.policy.version}
        if sampled:
            line["reward"] = sampled.reward
        if report:
            line |= {name: getattr(report, name) for name in ("loss", "grad_norm", "num_sequences", "num_scored", "num_tokens", "senders")}
        line["waiting"] = len(peer.waiting)
        line["refused"] = _by_sender(peer.admission.refused)
        line["dropped"] = _by_sender(peer.dropped)
        if number % self.config.evaluate.every == 0 or number == self.config.crew.rounds:
            line |= self._accuracies(peer)
        line["timing"] = {
            "sample_s": timing.sample_s,
            "learn_s": timing.learn_s,
            "sampled_tokens_per_s": sampled.num_tokens / timing.sample_s if sampled else 0.0,
            "learned_tokens_per_s": report.num_tokens / timing.learn_s if report else 0.0,
        }
        return line

    def _accuracies(self, peer: Peer) -> MetricsLine:
        measure = lambda problems: greedy_by_kind(peer.engine, peer.learner.policy.vocabulary, self.task, problems, self.config.sampling)
        found = {"heldout": measure(self._heldout)}
        return found | ({"ood": measure(self._ood)} if self._ood else {})

    def _write(self, lines: list[MetricsLine]) -> None:
        with self._metrics.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _discard_unfinished(folder: Path) -> None:
    """Clear what a start left that was stopped before its first checkpoint; a folder with anything else in it is not touched."""
    ours = {"config.toml", "start", "groups", "checkpoints", "metrics.jsonl"}
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if "config.toml" not in found or not found <= ours or checkpoints(folder / "checkpoints"):
        return
    try:
        read_config(folder / "config.toml")
    except ConfigError:
        return
    shutil.rmtree(folder)


def _starting_policy(config: CrewConfig, me: PeerConfig, start: Path) -> Policy:
    """The policy a peer begins with, from its saved folder, with what trains chosen."""
    policy = initial_policy(me, config.crew.seed)
    policy.load(start)
    policy.base.name_or_path = str(start.resolve())  # where an adapter's folder says its base is
    return Policy(choose_trained(policy.base, me.train, peer_seed(me.name, config.crew.seed)), policy.vocabulary)


def trained_policies(folder: Path) -> dict[str, Policy]:
    """Every peer's policy at the newest checkpoint of a run, which is only read."""
    config, newest = read_config(folder / "config.toml"), newest_checkpoint(folder)
    load_manifest(newest)
    policies = {me.name: _starting_policy(config, me, folder / "start" / me.name) for me in config.peer}
    for name, policy in policies.items():
        policy.load(newest / name / "model")
    return policies


def newest_checkpoint(folder: Path) -> Path:
    if not (folder / "config.toml").exists():
        raise ValueError(f"{folder} is not a run folder: it has no config.toml; give the folder that motley train printed")
    found = checkpoints(folder / "checkpoints")
    if not found:
        raise ValueError(f"{folder} has no checkpoint; start the crew anew")
    return found[-1]


def read_metrics(folder: Path) -> list[MetricsLine]:
    return [msgspec.json.decode(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def _by_sender(counts: dict[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (sender, reason), count in sorted(counts.items()):
        found.setdefault(sender, {})[reason] = count
    return found
