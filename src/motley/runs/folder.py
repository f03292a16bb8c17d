"""A run folder, the contract with people and tools: who builds a peer from it, measures it, and
writes its metrics.

    RUN/config.toml            the crew as it ran
    RUN/start/PEER/            a peer's model before the first round, where it was made here: a tiny
                               one, or one with a warm start
    RUN/metrics.jsonl          a line per peer and round (docs/metrics.md)
    RUN/groups/                the log of a crew in one process; the outbox of a peer in its own
    RUN/groups/fates.jsonl     what became of every group (learning/fates.py)
    RUN/checkpoints/round-N/   PEER/model holds what trains: a Hugging Face or PEFT folder; of some
                               layers, these, and what the others are from
    RUN/best/PEER/round-N/     the best model of a peer, where the crew may stop early
    RUN/engine/PEER/           what an engine of its own needs: weights, and the log of its server
    RUN/tensorboard/, wandb/   what reporters write, where the crew file asks for them
    RUN/peers/PEER/            a crew of several processes: a run folder for each
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec

from motley.clock import Clock, RealClock
from motley.config import (
    REPORTERS,
    ConfigError,
    CrewConfig,
    PeerConfig,
    Prompt,
    TrainPart,
    read_config,
    write_config,
)
from motley.engines import open_engine
from motley.engines.judge import Judge
from motley.exchange import Log, Outbox
from motley.exchange.blobs import Blobs
from motley.files import drop_unfinished_line, whole
from motley.learning.checkpoint import AnyState, checkpoints, load_manifest, load_training
from motley.learning.fates import FateFile, StepFates
from motley.learning.fitting import check_supported
from motley.learning.learner import Learner, StepReport
from motley.learning.warm import check_warm, warm_start
from motley.models.devices import choose_device
from motley.models.opening import check_peer, initial_policy, is_tiny, peer_seed
from motley.models.policy import MadeOf, Policy, with_trained_part
from motley.models.returning import check_part_returns, check_returns
from motley.models.vocabulary import Vocabulary
from motley.objectives import objective
from motley.peers.follower import Sampler
from motley.peers.peer import Peer
from motley.peers.sampling import Sampled, SamplerHalf
from motley.peers.state import PeerState
from motley.runs.evaluation import GradedAnswer, greedy_answers, mean_by_kind, some_of
from motley.runs.metrics import (
    Counts,
    FirstLine,
    LearnerLine,
    MetProblems,
    MetricsLine,
    SampleAnswer,
    SamplerLine,
    Timing,
    append_lines,
    mean,
    read_metrics,
)
from motley.runs.signs import Watch
from motley.runs.stopping import Best, Stopping, best_checkpoint, keep_best
from motley.tasks import Measure, Scorer, Task, evaluation_set, load_task

logger = logging.getLogger(__name__)
Made = TypeVar("Made")
NOBODY = ""  # a peer no crew has
BROUGHT = {"data", "models"}  # what was given as Python objects, there before a run begins
NUM_SAMPLES, MOST_CHARACTERS = 4, 1000  # of the answers that a line shows
WarmProgress = Callable[[str, int, dict[str, float]], None]  # (peer, steps, accuracy per kind)


def check_config(config: CrewConfig, mine: str | None = None, task: Task | None = None) -> None:
    """Look up every name a crew file uses, so that a mistake shows before any model loads.

    `mine`: the only peer whose model must be on this machine; what others bring is theirs. None:
    all of them. `task`: where it is at hand as an object.
    """
    task = task or load_task(config.crew.task, config.task)
    objective(config.crew.objective, config.crew.variant, config.objective)
    _check_success(config, task)
    problems = [p for split in task.splits for p in evaluation_set(task, split, per_kind=8)]
    vocabularies = {}
    for peer in config.students:
        if mine in (None, peer.name) or is_tiny(peer.model):
            vocabularies[peer.name] = check_peer(
                peer, config.prompt, task, problems, config.sampling.max_tokens
            )
        if mine in (None, peer.name):
            choose_device(peer.device, small=False)
        if peer.warm:
            check_warm(task, peer.warm)
    _check_vocabularies(vocabularies)


def _check_success(config: CrewConfig, task: Task) -> None:
    if config.teach.is_on and config.teach.success is None and task.measure == "reward":
        raise ValueError(
            f"[teach] must know a success, and task {config.crew.task} gives rewards of any size; "
            "write success = the least reward of a good answer under [teach]"
        )


def _check_vocabularies(vocabularies: dict[str, Vocabulary]) -> None:
    if not vocabularies:
        return
    (first, own), *others = vocabularies.items()
    for name, vocabulary in others:
        if vocabulary.fingerprint != own.fingerprint:
            raise ValueError(
                f"peers {first} and {name} have different vocabularies ({own.size} and "
                f"{vocabulary.size} tokens), so that neither could "
                "score the other's tokens; use models that share a tokenizer, such as sizes of "
                "one family"
            )
        if set(vocabulary.end_ids) != set(own.end_ids):
            raise ValueError(
                f"peers {first} and {name} end their answers with different tokens, {own.end_ids} "
                f"and {vocabulary.end_ids}; "
                "give both models' generation_config.json the same eos_token_id"
            )


@dataclass(frozen=True, slots=True)
class Accuracies:
    """Of greedy answers, by kind, or mean rewards; `ood` is None for a task without such
    problems.
    """

    heldout: dict[str, float]
    ood: dict[str, float] | None
    samples: list[SampleAnswer]  # a few of the held-out ones


class Run:
    def __init__(
        self,
        config: CrewConfig,
        folder: Path,
        clock: Clock | None = None,
        started_s: float = 0.0,
        task: Task | None = None,
    ) -> None:
        """`started_s`: when on this clock the seconds of the crew file's network begin. `task`:
        where it is at hand as an object.
        """
        self.config = config
        self.folder = folder
        self.clock = clock or RealClock()
        self.started_s = started_s
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
        self._watch: Watch | None = None  # from the first line on: the file may be cut before it
        self._fates = FateFile(folder / "groups" / "fates.jsonl")
        self._returned: set[str] = set()  # models that came back from disk, by fingerprint
        self.stopping = Stopping(config.evaluate)

    def build(
        self,
        me: PeerConfig,
        log: Log,
        outbox: Outbox,
        hub: bytes,
        warm_progress: WarmProgress | None = None,
    ) -> Peer:
        """A peer with the model of start/, which is made and warmed first if it is not there."""
        config = self.config
        start = self.folder / "start" / me.name
        if not start.exists() and (me.warm or is_tiny(me.model)):
            _make_start(config, me, self.task, start, warm_progress)
        policy = self._checked_policy(me, start)
        learner = _learner(config, me, policy)
        return Peer(self._half(me, policy, outbox), learner, log, hub)

    def _checked_policy(self, me: PeerConfig, start: Path) -> Policy:
        """What a peer begins with, tried out: what is computed wrongly is refused, and before the
        first round also what would not come back from disk.
        """
        policy = _opened_policy(self.config, me, start, self.task)
        resumes = bool(checkpoints(self.folder / "checkpoints"))
        known = resumes or policy.fingerprint in self._returned
        # an adapter's base is where it was, unless it was made here
        written = start.exists() or me.keep_layers or not _is_lora(me)
        with TemporaryDirectory(dir=self.folder / "start", prefix=".tried-") as place:
            if written and not known:
                check_returns(policy, Path(place) / "whole")
                self._returned.add(policy.fingerprint)
            policy = _with_trained_part(self.config, me, policy)
            if not resumes and (policy.is_adapted or policy.is_partial):
                check_part_returns(policy, Path(place) / "part")
        check_supported(policy)
        return policy

    def build_sampler(
        self, me: PeerConfig, log: Log, outbox: Outbox, blobs: Blobs, hub: bytes
    ) -> Sampler:
        """A sampler with its learner's model, whose weights are still to come."""
        followed = self.config.named(me.follows)
        # the learner's model on the sampler's machine
        here = msgspec.structs.replace(followed, device=me.device, dtype=me.dtype)
        policy = initial_policy(here, self.config.crew.seed, self.config.prompt, self.task)
        policy = with_trained_part(
            policy, followed.train, peer_seed(followed.name, self.config.crew.seed)
        )
        return Sampler(self._half(me, policy, outbox), log, blobs, hub)

    def _half(self, me: PeerConfig, policy: Policy, outbox: Outbox) -> SamplerHalf:
        weather = self.config.weather(me.name, self.started_s)
        engine = open_engine(policy, me.engine, self.folder / "engine" / me.name)
        logger.info(
            "%s: %s from %s, on %s in %s, sampled by %s",
            *(me.name, me.model, policy.base.name_or_path or "here", policy.device, policy.dtype),
            me.engine,
        )
        half = SamplerHalf(
            self.config,
            me,
            self.task,
            policy,
            engine,
            outbox,
            self.clock,
            weather,
            scorer=self.scorer,
        )
        half.judge = Judge(me.judge) if me.judge else None
        return half

    def restore(self, peer: Peer, checkpoint: Path, state: PeerState) -> None:
        load_training(peer.learner.policy, peer.learner.optimiser, checkpoint / peer.me.name)
        peer.load_state(state)
        self._fates.cut(peer.me.name, state.learned_rounds)

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

        What became of the groups it read is written beside it, in groups/fates.jsonl.
        """
        line = LearnerLine(
            round=number,
            peer=peer.me.name,
            version=peer.learner.policy.version,
            reward=sampled.reward if sampled else None,
            waiting=len(peer.waiting),
            refused=by_sender(peer.admission.refused),
            dropped=by_sender(peer.waiting.dropped),
            missing=peer.admission.missing or None,
            suspects=peer.scrutiny.suspicions() or None,
            timing=_with_rates(timing, sampled, report) if timing else None,
        )
        if line.timing and sampled and sampled.fresh:
            waited = msgspec.structs.replace(line.timing, reward_s=peer.half.reward_s)
            line = msgspec.structs.replace(line, timing=waited)
        line = _with_met(_with_step(line, report) if report else line, sampled, report)
        self._fates.write(_fates_of(peer, report))
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

    def sampler_line(self, sampler: Sampler, sampled: Sampled) -> SamplerLine:
        """What a sampler has to say of a round."""
        return SamplerLine(
            round=sampler.half.sampled_rounds,
            peer=sampler.me.name,
            version=sampled.version,
            reward=sampled.reward,
            sampled_tokens=sampled.num_tokens,
            behind=sampler.newest.version - sampled.version if sampler.newest else None,
            failed_transfers=sampler.failed or None,
        )

    def accuracies(self, peer: Peer) -> Accuracies:
        answer = lambda problems: greedy_answers(
            peer.half.engine, peer.learner.policy.prompts, self.task, problems, self.config.sampling
        )
        heldout = answer(self._heldout)
        return Accuracies(
            mean_by_kind(heldout),
            mean_by_kind(answer(self._ood)) if self._ood else None,
            [_sample_answer(one) for one in some_of(heldout, NUM_SAMPLES)],
        )

    def _keep_if_best(self, peer: Peer, number: int, skills: Accuracies) -> None:
        if self.config.evaluate.may_stop:
            now = Best(round=number, heldout=mean(skills.heldout))
            keep_best(self.folder / "best" / peer.me.name, peer.learner.policy, now)

    def write(self, lines: Sequence[MetricsLine | FirstLine]) -> None:
        append_lines(self.metrics, lines)
        for line in lines:
            self.stopping.hear(line)

    def cut_metrics(self, num_bytes: int, say: Callable[[str], None]) -> None:
        """Take back the lines written after a checkpoint: they are written again."""
        if self.metrics.stat().st_size < num_bytes:
            say(f"{self.metrics} has lost lines since the checkpoint; going on without them")
            content = self.metrics.read_bytes()
            num_bytes = content.rfind(b"\n") + 1
        os.truncate(self.metrics, num_bytes)
        self.stopping = Stopping(self.config.evaluate)
        for line in read_metrics(self.folder):
            self.stopping.hear(line)

    def cut_last_line(self, say: Callable[[str], None]) -> None:
        """Take back what `last_line` wrote: there are more rounds to come after all."""
        content = self.metrics.read_bytes()
        self.cut_metrics(content.rfind(b"\n", 0, len(content) - 1) + 1, say)


def _learner(config: CrewConfig, me: PeerConfig, policy: Policy) -> Learner:
    return Learner(
        policy,
        objective(config.crew.objective, config.crew.variant, config.objective),
        config.learning,
        me.lr or config.learning.lr,
        config.trust,
        config.teach,
        rounds=config.crew.rounds,
        seed=config.crew.seed,
    )


def new_folder(folder: Path, config: CrewConfig, otherwise: str) -> None:
    """Make a run folder with the crew in it.

    What an unfinished start left there is cleared; anything else is not touched.
    """
    _discard_unfinished(folder)
    if folder.exists() and any(path.name not in BROUGHT for path in folder.iterdir()):
        raise ValueError(
            f"run folder {folder} is not empty; choose another with --out, or {otherwise}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_config(config, folder / "config.toml")


def _discard_unfinished(folder: Path) -> None:
    """Clear what a start left that was stopped before its first checkpoint.

    A folder with anything else in it is not touched.
    """
    ours = {"config.toml", "start", "groups", "checkpoints", "best", "metrics.jsonl", "engine"}
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if (
        "config.toml" not in names
        or not names <= {*ours, *BROUGHT, *REPORTERS}
        or checkpoints(folder / "checkpoints")
    ):
        return
    try:
        read_config(folder / "config.toml")
    except ConfigError:
        return
    for name in names - BROUGHT:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _opened_policy(config: CrewConfig, me: PeerConfig, start: Path, task: Task) -> Policy:
    """The policy a peer begins with, from its folder if it has one; all of it trains."""
    policy = initial_policy(me, config.crew.seed, config.prompt, task)
    if start.exists():
        try:
            policy.load(start)
        except ValueError as error:
            raise ValueError(f"{error}; or delete {start}, which is then made again") from error
        # where an adapter's folder says its base is
        policy.base.name_or_path = str(start.resolve())
        policy.made_of = MadeOf(model=f"../../../../start/{me.name}")  # seen from a checkpoint
    return policy


def _with_trained_part(config: CrewConfig, me: PeerConfig, policy: Policy) -> Policy:
    return with_trained_part(policy, me.train, peer_seed(me.name, config.crew.seed))


def _is_lora(me: PeerConfig) -> bool:
    return isinstance(me.train, TrainPart) and me.train.lora is not None


def _make_start(
    config: CrewConfig,
    me: PeerConfig,
    task: Task,
    start: Path,
    warm_progress: WarmProgress | None,
) -> None:
    """Make the model that a peer begins with, and warm it."""
    policy = initial_policy(me, config.crew.seed, config.prompt, task)
    if me.warm:
        progress = (
            (lambda steps, accuracy: warm_progress(me.name, steps, accuracy))
            if warm_progress
            else None
        )
        warm_start(policy, task, me.warm, peer_seed(me.name, config.crew.seed), progress)
    with whole(start) as partial:
        policy.save(partial)


def peer_folder(folder: Path, name: str) -> Path:
    """Where a peer's own run folder is: in the crew's, or it is the crew's."""
    own = folder / "peers" / name
    return own if own.exists() else folder


def trained_policies(
    folder: Path, task: Task | None = None, rules: Prompt | None = None, best: bool = False
) -> dict[str, Policy]:
    """Every peer's policy at the newest checkpoint of a run, which is only read; for another task,
    or asked in another way. `best`: each at the one that was the best on held-out problems.
    """
    config = read_config(folder / "config.toml")
    config = msgspec.structs.replace(config, prompt=rules or config.prompt)
    task = task or load_task(config.crew.task, config.task)
    policies = {}
    for me in config.students:
        own = peer_folder(folder, me.name)
        newest = newest_checkpoint(own)
        if not (newest / me.name).exists():  # a peer's own folder holds that peer alone
            continue
        chosen = best_checkpoint(own, me.name) if best else newest
        load_manifest(chosen, AnyState)
        opened = _opened_policy(config, me, own / "start" / me.name, task)
        policies[me.name] = _with_trained_part(config, me, opened)
        policies[me.name].load(chosen / "model" if best else newest / me.name / "model")
    return policies


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


def _fates_of(peer: Peer, report: StepReport | None) -> StepFates:
    """What became of the groups that a peer read since this was last asked."""
    refused = peer.admission.lately.items()
    let_go = peer.waiting.let_go | {place: f"refused: {reason}" for place, reason in refused}
    peer.waiting.let_go, peer.admission.lately = {}, {}
    return StepFates(
        round=peer.learned_rounds,
        peer=peer.me.name,
        cursor=peer.cursor,
        groups=report.fates if report else {},
        let_go=let_go,
    )


def _sample_answer(answered: GradedAnswer) -> SampleAnswer:
    problem, text, reward = answered
    return SampleAnswer(
        problem.kind, problem.prompt[:MOST_CHARACTERS], text[:MOST_CHARACTERS], reward
    )


def by_sender(counts: dict[tuple[str, str], int]) -> Counts:
    table: Counts = {}
    for (sender, reason), count in sorted(counts.items()):
        table.setdefault(sender, {})[reason] = count
    return table


def _with_step(line: LearnerLine, report: StepReport) -> LearnerLine:
    return msgspec.structs.replace(
        line,
        loss=report.loss,
        grad_norm=report.grad_norm,
        lr=report.lr,
        num_sequences=report.num_sequences,
        num_scored=report.num_scored,
        num_tokens=report.num_tokens,
        ages=report.ages,
        senders=report.senders,
        blamed=list(report.blamed) or None,
        inner_steps=report.inner.steps if report.inner else None,
        inner_clipped=report.inner.clipped if report.inner else None,
        inner_kl=report.inner.kl if report.inner else None,
        reference_kl=report.reference_kl,
    )


def _with_met(line: LearnerLine, sampled: Sampled | None, report: StepReport | None) -> LearnerLine:
    """With what came of problems that all peers answer, in sampling and in learning."""
    branches, met = sampled.branches if sampled else None, report.met if report else None
    told = MetProblems(
        problems=met.problems if met else None,
        failed=met.failed if met else None,
        rescued=met.rescued if met else None,
        rescued_tokens=met.rescued_tokens if met else None,
        branched=met.branched or None if met else None,
        branched_tokens=met.branched_tokens or None if met else None,
        unfit=met.unfit or None if met else None,
        branches=len(branches.places) if branches else None,
        branch_tokens=branches.num_tokens if branches else None,
        branch_reward=branches.reward if branches else None,
    )
    return msgspec.structs.replace(line, met=told) if branches or met else line


def _with_rates(took: Timing, sampled: Sampled | None, report: StepReport | None) -> Timing:
    """Tokens per second; 0 of what was not done, or was found in the outbox after a crash."""
    fresh = sampled.num_tokens / took.sample_s if sampled and sampled.fresh else 0.0
    learned = report.num_tokens / took.learn_s if report and took.learn_s else 0.0
    return msgspec.structs.replace(
        took,
        sampled_tokens_per_s=fresh,
        learned_tokens_per_s=learned,
        overlap_s=took.overlap_s or None,
    )
