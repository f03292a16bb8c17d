"""What a run's metrics lines say: who is in the crew and learns from whom, its curves, whom it
trusts. Questions may come from other threads than `refresh`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from motley.clock import Clock, RealClock
from motley.config import CrewConfig
from motley.dashboard import telling
from motley.dashboard.alone import AloneRuns
from motley.dashboard.answers import Arrow, Crew, Curve, Curves, PeerCard, Point, TrustView
from motley.dashboard.cards import adapter_of, config_file, crew_of, member_of, num_parameters
from motley.dashboard.lines import HELDOUT
from motley.dashboard.numbers import check_key, is_score
from motley.dashboard.records import NewestGroup
from motley.dashboard.run_lines import PeerLines, RunLines
from motley.dashboard.suspicion import suspects_of
from motley.dashboard.tempo import Tempo, is_silent, told_seconds
from motley.runs.metrics import ByKind, LearnerLine
from motley.runs.stopping import Stopping

MOST_KEYS = 50  # of one answer
MOST_LINES = 4000  # that are read for one: about 0.1 s
# Of what senders sent, for one answer: about 0.1 s, and half of it.
CURVE_BYTES, ARROW_BYTES = 30_000_000, 3_000_000
ARROW_LINES = 60  # of a learner, that tell from whom it learned
REAL_S = 1e8  # an earlier moment is a simulation's
SHORT = 12  # characters of a vocabulary's fingerprint that tell it from others


class MetricsView:
    def __init__(self, folder: Path, clock: Clock = RealClock()) -> None:
        self._folder, self._clock = folder, clock
        self._lines = RunLines(folder, clock)
        self._alone = AloneRuns(folder, clock)
        self._tempo = Tempo()
        self._config: CrewConfig | None = None
        self._config_time_ns = -1
        self._member = ""  # whose own folder it is, of a crew at a hub
        self._sizes: dict[str, int | None] = {}
        self._keys = telling.KnownKeys()
        self._read_config()

    def refresh(self, seconds: float = 0.2) -> bool:
        """Look at what files have grown by, for about so long; True if something is new."""
        is_new = self._read_config()
        is_new |= self._lines.refresh(seconds)
        is_new |= self._alone.refresh(seconds / 4)
        if self.indexed == 1:
            self._tempo.see(self._done, self._clock.elapsed_s())
        return is_new

    def _read_config(self) -> bool:
        path = config_file(self._folder)
        changed_ns = path.stat().st_mtime_ns if path.is_file() else 0
        if changed_ns == self._config_time_ns:
            return False
        self._config, self._config_time_ns = crew_of(self._folder), changed_ns
        self._member = member_of(self._folder)
        return True

    # Where it stands

    @property
    def indexed(self) -> float:
        return self._lines.indexed

    @property
    def round(self) -> int:
        """The newest of anybody who learns; in a sampler's own folder, of its batches."""
        newest = self._newest_rounds()
        learners = [newest[name] for name in self._learners if name in newest]
        return max(learners or newest.values(), default=0)

    @property
    def is_over(self) -> bool:
        """Whether everyone who learns here has its last line, or all stopped as the crew file has
        it. A run that was killed is not over: it can go on.
        """
        if self._config is None or not self._learners:
            return False
        return self._done >= self._config.crew.rounds or bool(self._stopped())

    @property
    def _peers(self) -> dict[str, PeerLines]:
        """Those who have lines, in the order of the crew file."""
        known = self._lines.peers
        names = [peer.name for peer in self._config.peer] if self._config else sorted(known)
        return {name: known[name] for name in dict.fromkeys([*names, *known]) if name in known}

    def _newest_rounds(self) -> dict[str, int]:
        return {name: lines.newest_round for name, lines in self._peers.items()}

    @property
    def _learners(self) -> list[str]:
        """Whose lines are to be expected here: of all who learn, or of whose folder it is."""
        if self._config is None:
            return list(self._peers)
        learners = [peer.name for peer in self._config.students]
        return [name for name in learners if name == self._member] if self._member else learners

    @property
    def _done(self) -> int:
        """Rounds that everyone who learns has done."""
        newest = self._newest_rounds()
        return min((newest.get(name, 0) for name in self._learners), default=0)

    def _stopped(self) -> str:
        """Why the crew is over before its last round, by the rules of its file."""
        if self._config is None or not self._config.evaluate.may_stop:
            return ""
        stopping, peers = Stopping(self._config.evaluate), self._peers
        for name in self._learners:
            if name not in peers:
                return ""
            for number, found in self._lines.numbers(peers[name].marked(HELDOUT), ["heldout"]):
                if mean := found["heldout"]:
                    stopping.hear(LearnerLine(round=number, peer=name, heldout=mean))
        return stopping.reason

    # Who is here

    def crew(self, rounds: tuple[float, float], newest: Mapping[str, NewestGroup]) -> Crew:
        peers, config = self._peers, self._config
        scores = {name: telling.newest_scores(lines) for name, lines in peers.items()}
        seconds, is_over = self._seconds(), self.is_over
        left = config.crew.rounds - self._done if config else 0
        is_known = seconds is not None and not is_over and not self._silence(seconds)
        return Crew(
            name=config.crew.name if config else self._folder.name,
            task=config.crew.task if config else "",
            objective=config.crew.row if config else "",
            pace=config.crew.pace if config else "",
            rounds=config.crew.rounds if config else self.round,
            round=self.round,
            is_over=is_over,
            left_s=left * (seconds or 0.0) if config and is_known else None,
            seconds=seconds,
            measure="reward" if any(one.is_reward for one in scores.values()) else "accuracy",
            kinds=list(dict.fromkeys(kind for one in scores.values() for kind in one.heldout)),
            peers=[
                self._card(name, scores.get(name, telling.NewestScores()).heldout, newest.get(name))
                for name in self._names(newest)
            ],
            arrows=self._arrows(rounds),
            warnings=telling.warnings(peers),
            notes=list(self._notes(seconds)),
            indexed=self.indexed,
            keys=self._keys.of(peers),
        )

    def _arrows(self, rounds: tuple[float, float]) -> list[Arrow]:
        known = {name: lines.within(rounds) for name, lines in self._peers.items()}
        most = _affordable(known.values(), ARROW_LINES, ARROW_BYTES)
        size = self._config.rollouts_per_group if self._config else 1
        return [
            arrow
            for name, lines in known.items()
            if name in self._learners
            for arrow in telling.arrows(self._lines, name, lines, most, size)
        ]

    def _names(self, newest: Mapping[str, NewestGroup]) -> list[str]:
        if self._config:
            return [peer.name for peer in self._config.peer]
        return list(dict.fromkeys([*self._peers, *newest]))

    def _card(self, name: str, heldout: ByKind, seen: NewestGroup | None) -> PeerCard:
        config, lines = self._config, self._peers.get(name)
        me = config.named(name) if config else None
        student = config.named(config.student_of(name)) if config else None
        line = telling.newest_line(lines) if lines else telling.NewestLine()
        if student and not self._sizes.get(name):  # its files may not be there yet
            self._sizes[name] = num_parameters(self._folder, student)
        version = seen.version if seen and line.version is None else line.version
        return PeerCard(
            name=name,
            role=me.role if me else "peer",
            model=student.model if student else seen.model if seen else "",
            adapter=adapter_of(student) if student else "",
            size=self._sizes.get(name),
            vocabulary=seen.vocabulary[:SHORT] if seen else None,
            device=line.device or (me.device if me else ""),
            version=version,
            round=lines.newest_round if lines else None,
            last_seen_s=self._last_seen_s(name, seen),
            reward=line.reward,
            heldout=heldout,
            follows=me.follows if me else "",
        )

    def _last_seen_s(self, name: str, seen: NewestGroup | None) -> float | None:
        lines = self._peers.get(name)
        known = [seen.created_s] if seen and seen.created_s > REAL_S else []
        if lines and lines.newest_round == lines.lines.round[-1]:  # it is in the newest of the file
            known.append(self._lines.written_s(lines))
        return max(known, default=None)

    def _seconds(self) -> float | None:
        """That a round takes lately."""
        if (seen_s := self._tempo.seconds()) is not None:
            return seen_s
        newest = [telling.newest_line(lines) for lines in self._peers.values()]
        in_turn = not self._member and not (self._config and self._config.needs_processes)
        return told_seconds((line.took_s for line in newest if line.took_s is not None), in_turn)

    def _silence(self, seconds: float | None) -> float:
        """For how long nothing was written, if that is so long that the run may have stopped."""
        written_s = max(map(self._lines.written_s, self._peers.values()), default=None)
        since_s = self._clock.now_s() - written_s if written_s else 0.0
        return since_s if is_silent(seconds, since_s) else 0.0

    def _notes(self, seconds: float | None) -> Iterator[str]:
        folder, config = self._folder, self._config
        if config is None:
            yield (
                f"{config_file(folder)} is not there or cannot be read, so that models, roles and "
                "rounds are not known"
            )
        if not self._peers:
            is_hub = (folder / "hub.json").is_file()
            yield (
                "A hub's folder has no metrics, so that there are no curves; watch the folder of a "
                "peer for its own"
                if is_hub
                else "There are no metrics yet: the first lines come when every model was opened "
                "and measured"
            )
        elif self._member and config and len(config.peer) > 1:
            yield f"This is the folder of {self._member}: the others' metrics are in their own"
        if self.indexed < 1:
            yield f"{self.indexed:.0%} of the metrics were looked at so far"
        if reason := self._stopped():
            yield f"The crew stopped before its last round: {reason}"
        elif not self.is_over and (silent_s := self._silence(seconds)):
            yield (
                f"Nothing was written for {silent_s / 60:.0f} minutes: the run was stopped, or "
                "takes unusually long"
            )

    # Its numbers

    def curves(
        self, keys: Sequence[str], points: int, rounds: tuple[float, float], peer: str = ""
    ) -> Curves:
        """About so many points of every number, evenly over the rounds; fewer of what was measured
        by sender, where a line is long. With `peer`, only those of this one.
        """
        if not 0 < len(keys) <= MOST_KEYS:
            raise ValueError(f"{len(keys)} keys were asked for; ask for 1 to {MOST_KEYS} at once")
        for key in keys:
            check_key(key)
        points = max(points, 2)
        peers = {name: one for name, one in self._peers.items() if peer in ("", name)}
        drawn, every = _draw(self._lines, peers, keys, points, rounds)
        for name, run in self._alone.runs.items():
            own = {name: run.peers[name]} if name in run.peers and peer in ("", name) else {}
            plain = [key for key in keys if not key.startswith("senders")]
            drawn += _draw(run, own, plain, points, rounds, is_alone=True)[0]
        first, last = max(0.0, rounds[0]), min(float(self.round), rounds[1])
        levels = [one for one in self._alone.levels(keys, first, last) if peer in ("", one.peer)]
        return Curves(curves=[*drawn, *levels], every=every)

    # Whom it trusts

    def trust(self, faults: dict[str, dict[str, int]]) -> TrustView:
        peers = self._peers
        return TrustView(
            suspects=[
                suspect
                for name in self._learners
                if name in peers
                for suspect in suspects_of(name, peers[name], len(self._learners))
            ],
            alarm=_alarm(self._config.trust.alpha) if self._config else None,
            faults=faults,
        )


def _alarm(alpha: float) -> float | None:
    """Powers of ten of evidence at which a sender is caught; either of two questions may be wrong
    with half the chance.
    """
    return math.log10(2 / alpha) if alpha else None


def _draw(
    run: RunLines,
    peers: Mapping[str, PeerLines],
    keys: Sequence[str],
    points: int,
    rounds: tuple[float, float],
    is_alone: bool = False,
) -> tuple[list[Curve], int]:
    """Curves, and how many rounds at most lie between two points of them."""
    scores = [key for key in keys if is_score(key)]
    by_sender = [key for key in keys if key.startswith("senders")]
    plain = [key for key in keys if key not in scores and key not in by_sender]
    asked = [some for some in (scores, plain, by_sender) if some]
    curves: list[Curve] = []
    every = 1
    for some in asked:
        lines = {
            name: (one.marked(HELDOUT) if some is scores else one.steps).within(rounds)
            for name, one in peers.items()
        }
        most = min(points, max(2, MOST_LINES // (len(asked) * max(1, len(lines)))))
        if some is by_sender:
            most = _affordable(lines.values(), most, CURVE_BYTES // len(asked))
        for name, one in lines.items():
            chosen, step = one.spread(most)
            curves += _curves_of(run, name, chosen, some, is_alone)
            every = max(every, step)
    return curves, every


def _affordable(lines: Iterable[PeerLines], points: int, num_bytes: int) -> int:
    """As many points, or fewer: so that not too much is decoded for one answer."""
    a_round = sum(one.num_bytes / len(one) for one in lines if len(one))
    return min(points, max(2, int(num_bytes / a_round))) if a_round else points


def _curves_of(
    run: RunLines, peer: str, lines: PeerLines, keys: Sequence[str], is_alone: bool
) -> Iterator[Curve]:
    points: dict[tuple[str, str], list[Point]] = {}  # by key and sender
    for number, found in run.numbers(lines, keys):
        for key, values in found.items():
            for sender, value in values.items():
                points.setdefault((key, sender), []).append((number, value))
    for (key, sender), drawn in points.items():
        yield Curve(key=key, peer=peer, sender=sender, points=drawn, is_alone=is_alone)
