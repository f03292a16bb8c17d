"""A run folder, the contract with people and tools: what is where, and who writes its metrics.

RUN/config.toml            the crew as it ran
RUN/start/PEER/            a peer's model before the first round, where it was made here: a tiny
                           one, or one with a warm start
RUN/metrics.jsonl          a line per peer and round (docs/metrics.md)
RUN/estimators.jsonl       how far gradients are off, if that was measured (docs/metrics.md)
RUN/groups/                the log of a crew in one process; the outbox of a peer in its own
RUN/groups/fates.jsonl     what became of every group (learning/fates.py)
RUN/groups/traces/PEER/    what steps made of tokens: NNNNNN.zst each, by the round as in
                           fates.jsonl (learning/traces.py)
RUN/checkpoints/round-N/   PEER/model holds what trains: a Hugging Face or PEFT folder; of some
                           layers, these, and what the others are from
RUN/best/PEER/round-N/     the best model of a peer, where the crew may stop early
RUN/engine/PEER/           what an engine of its own needs: weights, and the log of its server
RUN/tensorboard/, wandb/   what reporters write, where the crew file asks for them
RUN/peers/PEER/            a crew of several processes: a run folder for each
RUN/run.lock               held by the one process that trains a crew here
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from motley.clock import Clock, RealClock
from motley.config import (
    REPORTERS,
    ConfigError,
    CrewConfig,
    read_config,
    write_config,
)
from motley.files import NoLocksError, drop_unfinished_line, held_here
from motley.learning.checkpoint import checkpoints, load_training
from motley.learning.fates import FateFile
from motley.learning.learner import StepReport
from motley.learning.traces import TraceFiles
from motley.peers.peer import Peer
from motley.peers.sampling import Sampled
from motley.peers.state import PeerState
from motley.runs.best import keep_best
from motley.runs.evaluation import greedy_answers, mean_by_kind, some_of
from motley.runs.lines import (
    NUM_SAMPLES,
    Accuracies,
    fates_of,
    learner_line,
    sample_answer,
    trace_of,
)
from motley.runs.metrics import (
    FirstLine,
    LearnerLine,
    MetricsLine,
    Timing,
    append_lines,
    mean,
    read_metrics,
)
from motley.runs.signs import Watch
from motley.runs.stopping import Best, Stopping
from motley.tasks import Measure, Scorer, Task, evaluation_set, load_task

LOCK = "run.lock"
# what disks say that know no locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
BROUGHT = {"data", "models"}  # what was given as Python objects, there before a run begins


class Run:
    def __init__(
        self,
        config: CrewConfig,
        folder: Path,
        clock: Clock | None = None,
        started_s: float = 0.0,
        task: Task | None = None,
        mixed: bool = False,
    ) -> None:
        """`started_s`: when on this clock the seconds of the crew file's network begin. `task`:
        where it is at hand as an object. `mixed`: whether peers may have different vocabularies.
        """
        self.config = config
        self.folder = folder
        self.clock = clock or RealClock()
        self.started_s = started_s
        self.mixed = mixed
        self.task = task or load_task(config.crew.task, config.task)
        self._measure: Measure | None = "reward" if self.task.measure == "reward" else None
        self.scorer = Scorer(self.task)  # of all peers in this process
        self._heldout = evaluation_set(self.task, "heldout", config.evaluate.problems)
        self._ood = (
            evaluation_set(self.task, "ood", config.evaluate.problems)
            if "ood" in self.task.splits
            else []
        )
        for part in ("start", "groups", "checkpoints"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        self.metrics = folder / "metrics.jsonl"
        self.metrics.touch()
        drop_unfinished_line(self.metrics)
        self.metrics_bytes = self.metrics.stat().st_size  # as this process left them
        self._watch: Watch | None = None  # from the first line on: the file may be cut before it
        self._fates = FateFile(folder / "groups" / "fates.jsonl")
        self._traces = TraceFiles(folder / "groups" / "traces", config.evaluate.most_trace_bytes)
        self.stopping = Stopping(config.evaluate)

    def restore(self, peer: Peer, checkpoint: Path, state: PeerState) -> None:
        load_training(peer.learner.policy, peer.learner.optimiser, checkpoint / peer.me.name)
        peer.load_state(state)
        self.cut_steps(peer.me.name, state.learned_rounds)

    def cut_steps(self, peer: str, round: int) -> None:
        """Take back what was told of a peer's steps after this round: they are taken again."""
        self._fates.cut(peer, round)
        self._traces.cut(peer, round)

    # Metrics

    def first_line(self, peer: Peer, time_s: float | None = None) -> FirstLine:
        """What a peer can before training."""
        skills = self.accuracies(peer)
        self._keep_if_best(peer, 0, skills)
        return FirstLine(
            round=0,
            peer=peer.me.name,
            time_s=time_s,
            heldout=skills.heldout,
            ood=skills.ood,
            measure=self._measure,
        )

    def line(
        self,
        peer: Peer,
        number: int,
        sampled: Sampled | None,
        report: StepReport | None,
        timing: Timing | None = None,
    ) -> LearnerLine:
        """What a peer has to say of a round.

        What became of the groups it read is written beside it, in groups/fates.jsonl, and what its
        step made of their tokens, in groups/traces.
        """
        line = learner_line(peer, number, sampled, report, timing)
        self._fates.write(fates_of(peer, report))
        if report:
            self._traces.write(trace_of(peer, report))
        if number % self.config.evaluate.every == 0 or number == self.config.crew.rounds:
            skills = self.accuracies(peer)
            self._keep_if_best(peer, number, skills)
            line = msgspec.structs.replace(
                line,
                heldout=skills.heldout,
                ood=skills.ood,
                measure=self._measure,
                samples=skills.samples,
            )
        return self._watched(line)

    def last_line(self, peer: Peer) -> LearnerLine:
        """What closes the file of a peer that ends with fewer steps than rounds."""
        skills = self.accuracies(peer)
        self._keep_if_best(peer, self.config.crew.rounds, skills)
        line = LearnerLine(
            round=self.config.crew.rounds,
            peer=peer.me.name,
            version=peer.learner.policy.version,
            heldout=skills.heldout,
            ood=skills.ood,
            measure=self._measure,
            samples=skills.samples,
        )
        return self._watched(line)

    def _watched(self, line: LearnerLine) -> LearnerLine:
        """With what it shows to be wrong, if that was not said before."""
        if self._watch is None:
            # a file that somebody spoilt costs what was said before, and not the run
            with suppress(ValueError):
                self._watch = Watch(self.config, read_metrics(self.folder))
            self._watch = self._watch or Watch(self.config)
        return msgspec.structs.replace(line, warnings=self._watch.see(line) or None)

    def accuracies(self, peer: Peer) -> Accuracies:
        answer = lambda problems: greedy_answers(
            peer.half.engine, peer.learner.policy.prompts, self.task, problems, self.config.sampling
        )
        heldout = answer(self._heldout)
        return Accuracies(
            mean_by_kind(heldout),
            mean_by_kind(answer(self._ood)) if self._ood else None,
            [sample_answer(one) for one in some_of(heldout, NUM_SAMPLES)],
        )

    def _keep_if_best(self, peer: Peer, number: int, skills: Accuracies) -> None:
        if self.config.evaluate.may_stop:
            now = Best(round=number, heldout=mean(skills.heldout))
            keep_best(self.folder / "best" / peer.me.name, peer.learner.policy, now)

    def write(self, lines: Sequence[MetricsLine | FirstLine]) -> None:
        append_lines(self.metrics, lines)
        self.metrics_bytes = self.metrics.stat().st_size
        for line in lines:
            self.stopping.hear(line)

    def cut_metrics(self, num_bytes: int, say: Callable[[str], None]) -> None:
        """Take back the lines written after a checkpoint: they are written again."""
        if self.metrics.stat().st_size < num_bytes:
            say(f"{self.metrics} has lost lines since the checkpoint; going on without them")
            content = self.metrics.read_bytes()
            num_bytes = content.rfind(b"\n") + 1
        os.truncate(self.metrics, num_bytes)
        self.metrics_bytes = num_bytes
        self.stopping = Stopping(self.config.evaluate)
        for line in read_metrics(self.folder):
            self.stopping.hear(line)

    def cut_last_line(self, say: Callable[[str], None]) -> None:
        """Take back what `last_line` wrote: there are more rounds to come after all."""
        content = self.metrics.read_bytes()
        self.cut_metrics(content.rfind(b"\n", 0, len(content) - 1) + 1, say)


@contextmanager
def new_folder(folder: Path, config: CrewConfig, otherwise: str) -> Iterator[None]:
    """Make a run folder with the crew in it, and hold it.

    What an unfinished start left there is cleared; anything else is not touched.
    """
    _check_free(folder, otherwise)
    folder.mkdir(parents=True, exist_ok=True)
    with held_alone(folder):
        # looked at again: who held it until now may have saved
        for name in _check_free(folder, otherwise):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_config(config, folder / "config.toml")
        yield


def _check_free(folder: Path, otherwise: str) -> set[str]:
    """Refuse a folder that holds something; what an unfinished start left there does not count, and
    is named.
    """
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    left = _left_unfinished(folder, names)
    if names - left - BROUGHT - {LOCK}:
        raise ValueError(
            f"run folder {folder} is not empty; choose another (--out, or folder= in Python), or "
            f"{otherwise}"
        )
    return left


@contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Be the only process that writes into a run folder."""
    with ExitStack() as held:
        try:
            ours = held.enter_context(held_here(folder / LOCK))
        except (OSError, NoLocksError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            ours = True  # a disk or a system that knows no locks may be used all the same
        if not ours:
            raise ValueError(
                f"another process trains a crew in {folder}; wait until it ends, or stop it first, "
                "or choose another folder"
            )
        yield


def _left_unfinished(folder: Path, names: Set[str]) -> set[str]:
    """Of what is there, all that a start left which was stopped before its first checkpoint;
    nothing if there is anything else.
    """
    ours = {"config.toml", "start", "groups", "checkpoints", "best", "metrics.jsonl", "engine"}
    if (
        "config.toml" not in names
        or not names <= {*ours, *BROUGHT, *REPORTERS, LOCK}
        or checkpoints(folder / "checkpoints")
    ):
        return set()
    try:
        read_config(folder / "config.toml")
    except ConfigError:
        return set()
    return set(names - BROUGHT - {LOCK})


def peer_folder(folder: Path, name: str) -> Path:
    """Where a peer's own run folder is: in the crew's, or it is the crew's."""
    own = folder / "peers" / name
    return own if own.exists() else folder


def newest_checkpoint(folder: Path) -> Path:
    if not (folder / "config.toml").exists():
        raise ValueError(
            f"{folder} is not a run folder: it has no config.toml; give the folder that motley "
            "train printed"
        )
    saved = checkpoints(folder / "checkpoints")
    if not saved:
        raise ValueError(f"{folder} has no checkpoint; start the crew anew")
    return saved[-1]
