"""Signs that nothing is learned, or the wrong thing: each is said once, with the likely cause and
the remedy.

Reads metrics lines, and nothing else of a run: so a resumed run says what it would have said
without the stop, and nothing twice. A sign needs several rounds in a row, so that an ordinary run
has none. docs/metrics.md lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from motley.config import CrewConfig
from motley.runs.history import (
    STANDSTILL,
    Evaluation,
    Expected,
    History,
    finite,
    mean_of,
    mean_over_groups,
    senders_of,
    total,
)
from motley.runs.metrics import LearnerLine, MetricsLine, Sign

UNHEARD = 20  # steps without a word of a sender
TRUNCATED = 0.95  # share of the completions
LEAST_ENTROPY = 0.02  # nats per token
HIGH_ENTROPY = 0.5  # the same, if it was
ENTROPY_GROWTH = 3.0  # times less at first
GOOD = 0.9  # an accuracy at which it is right to be sure
OWN_KL = 1.0  # nats per token, of samples of the learner's own weights
FOREIGN_KL = 4.0  # the same of others' samples, if it was
KL_GROWTH = 3.0  # times less at first
LEAST_WEIGHT = 1e-3
LEAST_LR = 1e-9  # below, Adam's step is lost in the rounding of float32 weights
MOST_LR = 0.05  # above, a step is as large as the weights themselves
FALL = 0.15  # of an accuracy
SWAYING = 20  # steps with a gradient, in which a kind may be down
FALL_OF_REWARD = 0.25  # as a share of where it began
LEAST_PROBLEMS = 20  # held-out problems of which equal figures say something


class Watch:
    """Looks at the lines of a run as they are written; `see` answers with what is new."""

    def __init__(self, config: CrewConfig, lines: Iterable[MetricsLine] = ()) -> None:
        """`lines`: those that a resumed run has already."""
        self._config = config
        self._peers: dict[str, History] = {}
        for line in lines:
            if isinstance(line, LearnerLine):
                self.see(line)

    def see(self, line: LearnerLine) -> list[Sign]:
        history = self._peers.get(line.peer)
        if history is None:
            history = self._peers[line.peer] = History(Expected.of(self._config, line.peer))
        history.add(line)
        for sign in line.warnings or ():
            history.said |= _keys(sign)
        return list(_new_signs(history, line))


def _new_signs(history: History, line: LearnerLine) -> Iterator[Sign]:
    """Those of a line that are not said yet."""
    looks = [*(OF_STEPS if line.num_sequences else OF_IDLENESS)]
    looks += OF_EVALUATIONS if line.heldout else ()
    for look in looks:
        for sign in look(history):
            senders = [name for name in sign.senders if (sign.sign, name) not in history.said]
            is_new = bool(senders) if sign.senders else (sign.sign, "") not in history.said
            history.said |= _keys(sign)
            if is_new:
                yield Sign(sign.sign, sign.words, senders)


def _keys(sign: Sign) -> set[tuple[str, str]]:
    return {(sign.sign, name) for name in sign.senders or [""]}


class Said(NamedTuple):
    """A sign where it stands in a run; of several peers, if they said it in the same round."""

    round: int
    peers: tuple[str, ...]
    sign: Sign

    def __str__(self) -> str:
        about = f" (of {', '.join(self.sign.senders)})" if self.sign.senders else ""
        return (
            f"round {self.round}, {', '.join(self.peers)}: {self.sign.sign}{about}: "
            f"{self.sign.words}"
        )


def signs_of(lines: Iterable[MetricsLine]) -> list[Said]:
    """Every sign of a run, in order; one that several peers said together, once."""
    found: dict[tuple[int, str, str, tuple[str, ...]], Said] = {}
    for line in lines:
        for sign in (line.warnings if isinstance(line, LearnerLine) else None) or ():
            key = (line.round, sign.sign, sign.words, tuple(sign.senders))
            before = found[key].peers if key in found else ()
            found[key] = Said(line.round, (*before, line.peer), sign)
    return list(found.values())


# Signs of steps


def _no_step(history: History) -> Iterator[Sign]:
    """Nothing came of the last rounds, not even a step."""
    if len(history.idle) < history.expected.window:
        return
    line = history.idle[-1]
    told = {
        f"{count} groups of {sender} {what} as {reason!r}": count
        for what, counts in (("refused", line.refused), ("dropped", line.dropped))
        for sender, reasons in (counts or {}).items()
        for reason, count in reasons.items()
    }
    most = max(told, key=lambda words: told[words], default="")
    reason = most.rpartition(" as ")[2].strip("'")
    cause = (
        f"{most}; {REMEDIES.get(reason, 'docs/metrics.md says what that is')}"
        if most
        else "it waits for groups: do they reach the log, and do others send any?"
    )
    yield Sign("no step", f"nothing was learned from {history.rounds}: {cause}")


def _no_contrast(history: History) -> Iterator[Sign]:
    """Every answer to a problem is as good as the others: three causes, three remedies."""
    rewards = [s.reward for line in history.steps for _, s in senders_of(line)]
    known = [value for value in map(finite, rewards) if value is not None]
    if not history.is_full or not known:
        return
    silent = all(line.num_scored == 0 for line in history.steps)
    low, high = min(known), max(known)
    is_one = history.measure == "reward" and high - low <= 1e-6 * max(1.0, abs(high))
    if history.measure == "accuracy" and high == 0:
        yield Sign(
            "all wrong",
            f"no answer was right {history.rounds}, so that nothing can be learned. The problems "
            "are too hard for the model, or its answers are not in the form that is scored: look "
            "at some with motley rollouts; then try easier problems, a warm start, another "
            "prompt or a larger max_tokens",
        )
    elif history.measure == "accuracy" and low == 1:
        yield Sign(
            "all right",
            f"every answer was right {history.rounds}, so that nothing is left to learn: stop "
            "here, or ask harder problems",
        )
    elif is_one and (silent or not any(map(_has_contrast, history.steps))):
        follows = "nothing can be learned" if silent else "the model only repeats its own samples"
        yield Sign(
            "constant reward",
            f"every completion had the same reward, {high:.4g}, {history.rounds}, so that "
            f"{follows}. The reward does not look at the completion, or never gives less or more: "
            "look at some with motley rollouts, and at what motley check says of the task",
        )
    elif silent:
        yield Sign(
            "silent groups",
            f"all answers to a problem had the same reward {history.rounds}, each time, so that "
            "nothing can be learned. Ask problems that are solved sometimes; or raise group_size "
            "or temperature, so that answers differ",
        )


def _has_contrast(line: LearnerLine) -> bool:
    """Whether rewards differed in a group: only there they have an order."""
    return any(s.number("tau_before") is not None for _, s in senders_of(line))


def _truncated(history: History) -> Iterator[Sign]:
    shares = [mean_over_groups(history.mine_of(line), "truncated") for line in history.steps]
    if history.is_full and all(share >= TRUNCATED for share in shares):
        yield Sign(
            "truncated",
            f"{mean_of(shares):.0%} of the completions were cut off at max_tokens = "
            f"{history.expected.max_tokens} {history.rounds}. Raise max_tokens; if the model never "
            "ends an answer, set prompt.stop, or take a model that was taught to end",
        )


def _no_gradient(history: History) -> Iterator[Sign]:
    if history.is_full and all(line.grad_norm == 0 and line.num_scored for line in history.steps):
        yield Sign(
            "no gradient",
            f"the gradient was 0 {history.rounds}, though rewards differed. The weights have run "
            "away: lower lr; or what is clipped, filtered and withheld leaves nothing: see weight, "
            "filtered_* and withheld in docs/metrics.md",
        )


def _odd_lr(history: History) -> Iterator[Sign]:
    lr = history.expected.lr
    if lr < LEAST_LR:
        yield Sign(
            "tiny lr",
            f"lr = {lr:g} is lost in the rounding of the weights, so that they do not change: "
            "raise it, such as to 1e-5",
        )
    if lr > MOST_LR:
        yield Sign(
            "huge lr",
            f"lr = {lr:g} moves every weight by about as much in a step, so that little is left "
            "of the model: lower it, such as to 1e-5",
        )


def _no_entropy(history: History) -> Iterator[Sign]:
    values = [history.own_entropy(line) for line in history.steps]
    if not history.is_full or not all(value < LEAST_ENTROPY for value in values):
        return
    reward = mean_of([history.own_reward(line) for line in history.steps])
    if history.measure == "reward" or reward < GOOD:
        yield Sign(
            "no entropy",
            f"the entropy was {mean_of(values):.1g} nats per token {history.rounds}: the model is "
            "sure of every token, its samples are alike, and it tries nothing new. If its reward "
            "is not as high as it can be, it has collapsed: go back to an earlier checkpoint with "
            "a lower lr, or set beta of [objective]",
        )


def _entropy_rises(history: History) -> Iterator[Sign]:
    """Who imitates others takes over what they drew by chance, too; nothing takes that back."""
    values = [history.own_entropy(line) for line in history.steps]
    if not history.is_full or not all(value > HIGH_ENTROPY for value in values):
        return
    before = mean_of(history.first_entropies)
    if min(values) < ENTROPY_GROWTH * before:
        return
    yield Sign(
        "entropy rises",
        f"the entropy went from {before:.2g} to {mean_of(values):.2g} nats per token: the model "
        "writes more and more by chance. "
        + (
            "It takes over what others drew by chance, as different models that write long answers "
            'do: use objective = "uplift" and variant = "sure", or objective = "ftis"'
            if any(history.others_of(line) for line in history.steps)
            else "Go back to an earlier checkpoint with a lower lr, or set beta of [objective]"
        ),
    )


AGES = (
    "They are too old, or the engine computes something else: lower lr or max_age, and see motley "
    "check"
)
TRUNCATES = (
    "That is what top_k or top_p cut off, and the learner still counts: set logprobs = 'full' "
    "under [sampling], or leave out top_k and top_p"
)


def _kl(history: History) -> Iterator[Sign]:
    far: list[str] = []
    for name, _ in senders_of(history.newest):
        if name in history.expected.mine:
            values = history.always("kl_k1", name, lambda kl: kl > OWN_KL)
            if values:
                yield Sign(
                    "own kl",
                    f"samples of its own weights are {mean_of(values):.2g} nats per token away "
                    f"{history.rounds}. {TRUNCATES if history.expected.truncates else AGES}",
                    [name],
                )
        else:
            values = history.always("kl_k1", name, lambda kl: kl > FOREIGN_KL)
            before = history.first_kl.get(name) or [math.inf]
            if values and mean_of(values) > KL_GROWTH * max(0.0, mean_of(before)):
                far.append(name)
    if far:
        yield Sign(
            "kl",
            f"the learner moves away from these senders: over {FOREIGN_KL:g} nats per token "
            f"{history.rounds}, {KL_GROWTH:g} times what it was. Either of them has gone astray: "
            "compare their held-out scores, lower lr, or set beta of [objective]",
            far,
        )


def _filtered(history: History) -> Iterator[Sign]:
    nothing = [
        name
        for name, _ in senders_of(history.newest)
        if history.always("weight", name, lambda weight: abs(weight) < LEAST_WEIGHT)
    ]
    if nothing:
        yield Sign(
            "filtered",
            f"nothing of these senders counted {history.rounds}: the objective filters or clips "
            "all of it, as too unlikely for the learner. Raise g or C of [objective], warm both "
            "up on the same problems, or use another objective",
            nothing,
        )


REMEDIES = {
    "reward": (
        "its rewards are not those computed here: the reward must be the same everywhere; if "
        "it cannot be, set check_rewards = false"
    ),
    "unscorable": "the reward function fails on its completions: see the error above, and mend it",
    "undecided": "its completions take too long to score: shut it out if it does not stop",
    "vocabulary": "it has another vocabulary, and has not published the bytes of its tokens",
    "sampling": "it samples with other settings than [sampling]: have it join anew",
    "assignment": "it answers other problems: do both have the same task files?",
    "stale": "its groups are too old when they are taken: raise max_age, or set stale = 'pace'",
    "late": "its groups come after the deadline: raise deadline_s",
    "incomplete": "parts of its groups never come: raise max_age",
    "unread": "its completions have special tokens inside, which are no text: look at its prompts",
}


def _not_taken(history: History) -> Iterator[Sign]:
    """Of a sender of whom no group was in a step lately: why?"""
    first, last = history.steps[0], history.newest
    told = {*(last.refused or {}), *(last.dropped or {})}
    others = [name for name in history.expected.others if name in told]
    for name in filter(history.is_unheard, others):
        if (last.suspects or {}).get(name) and (last.suspects or {})[name].muted:
            continue
        for sign, before, now in (
            ("refused", first.refused, last.refused),
            ("dropped", first.dropped, last.dropped),
        ):
            besides = ("not selected", "muted", "revoked") if sign == "dropped" else ("revoked",)
            earlier, counts = total(before, name, besides), total(now, name, besides)
            is_news = sum(counts.values()) > sum(earlier.values()) or name not in history.heard
            if counts and is_news:
                reason = max(counts, key=lambda key: counts[key])
                remedy = REMEDIES.get(reason, "docs/metrics.md says what that is")
                yield Sign(
                    sign,
                    f"nothing of this sender was learned from {history.rounds}: "
                    f"{sum(counts.values())} of its groups were {sign}, most as {reason!r}; "
                    f"{remedy}",
                    [name],
                )


def _muted(history: History) -> Iterator[Sign]:
    for name, suspicion in (history.newest.suspects or {}).items():
        if suspicion.muted:
            yield Sign(
                "muted",
                f"this sender is not learned from until round {suspicion.until}: "
                f"{suspicion.muted[:200]}. If it is honest, motley pardon has it heard again",
                [name],
            )


def _never_heard(history: History) -> Iterator[Sign]:
    last = history.newest
    if history.num_steps < UNHEARD or not history.expected.hears_all:
        return
    for name in history.expected.others:
        told = total(last.refused, name) or total(last.dropped, name)
        if name not in history.heard and not told:
            yield Sign(
                "never heard",
                f"nothing came of this sender in {history.num_steps} rounds: is it running, and "
                "does it reach the hub?",
                [name],
            )


# Signs of evaluations


def _fall(history: History) -> Iterator[Sign]:
    """Held-out scores are far below where they began, twice in a row.

    Greedy answers alone may get worse for a while where sampled ones do not: so the reward in
    training must have fallen too, or clearly risen.
    """
    first, newest = history.first, list(history.evaluations)[-2:]
    if first is None or len(newest) < 2 or newest[0] is first or not history.is_full:
        return
    fall = first.mean - max(evaluation.mean for evaluation in newest)
    if not fall > _most_fall(history, first):
        return
    before = mean_of(history.first_rewards)
    now = mean_of([history.own_reward(line) for line in history.steps])
    moved = (
        f"the held-out {history.measure} fell from {first.mean:.4g} to {newest[-1].mean:.4g}, "
        f"below where it began, and the reward in training went from {before:.4g} to {now:.4g}"
    )
    if now - before > fall / 2:
        yield Sign(
            "overfit",
            f"{moved}: the model learns what pays only there. Use more problems, or a reward that "
            "cannot be tricked (see motley rollouts); go back to an earlier checkpoint",
        )
    elif before - now > fall / 4:
        yield Sign(
            "held-out fell",
            f"{moved}: the lr is probably too high. Start again, or from an earlier checkpoint, "
            "with a third of it",
        )


def _lost_skill(history: History) -> Iterator[Sign]:
    """A kind is far below where it began, twice in a row: where others teach, the mean may hide it.

    In the first steps kinds trade places in any crew.
    """
    first, newest = history.first, list(history.evaluations)[-2:]
    if first is None or history.measure != "accuracy" or newest[0].num_steps < SWAYING:
        return
    others = any(history.others_of(line) for line in history.steps)
    most = _noise(history.expected.num_problems)
    fell = [
        f"{kind} from {began:.2f} to {newest[-1].heldout[kind]:.2f}"
        for kind, began in first.heldout.items()
        if all(began - evaluation.heldout.get(kind, began) > most for evaluation in newest)
    ]
    if fell and others and len(first.heldout) > 1:
        yield Sign(
            "skill lost",
            f"held-out accuracy fell while others' samples were learned from: {', '.join(fell)}. "
            "Perhaps they answer in another way, which does worse here: look at some with motley "
            'rollouts. A lower lr slows it; objective = "ftis" does not take over what the model '
            "would not write",
        )


def _noise(num_problems: int) -> float:
    """What chance makes of an accuracy."""
    return max(FALL, 4 * math.sqrt(0.5 / num_problems))


def _most_fall(history: History, first: Evaluation) -> float:
    """What noise explains: of an accuracy by the number of problems, of a reward by its spread in
    the first rounds.
    """
    if history.measure == "accuracy":
        return _noise(history.expected.num_problems * len(first.heldout))
    rewards = history.first_rewards
    spread = math.sqrt(mean_of([(value - mean_of(rewards)) ** 2 for value in rewards]))
    return max(FALL_OF_REWARD * abs(first.mean), 4 * spread)


def _standstill(history: History) -> Iterator[Sign]:
    evaluations = history.evaluations
    if len(evaluations) < STANDSTILL or len({tuple(e.heldout.items()) for e in evaluations}) > 1:
        return
    newest, num_problems = evaluations[-1], history.expected.num_problems
    num_steps = newest.num_steps - evaluations[0].num_steps
    tells = history.measure == "reward" or any(0 < v < 1 for v in newest.heldout.values())
    if tells and num_steps >= UNHEARD and num_problems * len(newest.heldout) >= LEAST_PROBLEMS:
        yield Sign(
            "standstill",
            f"the held-out {history.measure} is the same to the last digit in {STANDSTILL} "
            f"evaluations over {num_steps} steps: lr = {history.expected.lr:g} hardly moves these "
            "weights; raise it tenfold",
        )


Look = Callable[[History], Iterator[Sign]]
OF_IDLENESS: tuple[Look, ...] = (_no_step,)
OF_STEPS: tuple[Look, ...] = (
    _no_contrast,
    _truncated,
    _no_gradient,
    _odd_lr,
    _no_entropy,
    _entropy_rises,
    _kl,
    _filtered,
    _not_taken,
    _muted,
    _never_heard,
)
OF_EVALUATIONS: tuple[Look, ...] = (_fall, _lost_skill, _standstill)
