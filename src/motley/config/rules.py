"""What holds for a whole crew: [crew], [prompt], [learning], [trust], [teach], [weights],
[evaluate].
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from motley.config.peers import MOST_LR, check_name
from motley.records import Precision

Reporter = Literal["trackio", "wandb", "tensorboard"]
REPORTERS: tuple[Reporter, ...] = get_args(Reporter)


class Crew(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    task: str
    rounds: int
    group_size: int
    problems_per_round: int  # over the whole crew
    objective: str = "auto"  # how a peer learns from what was sampled: motley objectives
    variant: str = ""
    chosen: str = ""  # why "auto" took the row; Motley writes it
    layout: Literal["vertical", "horizontal"] = "vertical"
    pace: Literal["lockstep", "async"] = "lockstep"
    seed: int = 0
    # share of each peer's problems of a round that all peers answer alike; horizontal: all of them
    meet: float = 0.0
    # whom a learner hears in a round beside itself: so many others, drawn anew; None: everyone
    hear: int | None = None
    processes: bool = False  # one process per peer, with a NATS server between them
    # a round goes on without who is late by this much; 0: waits for everyone
    deadline_s: float = 0.0
    quorum: int = 0  # peers without whose groups no round goes on; 0: two, or one in a crew of one
    # compute every received reward again; off for rewards that cannot be
    check_rewards: bool = True
    lossless: bool = False  # log-probs travel as float32, not rounded to 1/1700
    # where metrics also go; nothing leaves the machine unless the reporter is told to
    report: tuple[Reporter, ...] = ()
    report_all: bool = False  # every number of a line, not the few that reports/series.py names

    @property
    def row(self) -> str:
        """The objective, with its variant."""
        return f"{self.objective}/{self.variant}" if self.variant else self.objective

    def __post_init__(self) -> None:
        check_name("crew", self.name)
        for name in ("rounds", "problems_per_round"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} trains nothing; use at least 1")
        if not self.deadline_s >= 0 or self.quorum < 0:
            raise ValueError(
                f"deadline_s={self.deadline_s} and quorum={self.quorum} must not be negative; "
                "leave them out to wait for everyone"
            )
        if not 0 <= self.meet <= 1:
            raise ValueError(
                f"meet={self.meet} is outside 0..1: it is a share of a peer's problems, such as "
                "0.25"
            )
        if self.hear is not None and self.hear < 1:
            raise ValueError(
                f"hear={self.hear} leaves a learner alone with itself; use at least 1, or leave it "
                "out to hear everyone"
            )
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} has no spread of rewards to learn from; use at "
                "least 2, 8 to 16 is usual"
            )


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a problem is put to a model. What is left out is the task's own way."""

    style: Literal["plain", "chat"] = "plain"  # chat: in each model's own chat template
    # plain: text with {prompt} and {answer}; space before {answer} belongs to the answer
    template: str = ""
    system: str = ""  # what is asked for in general: the system turn, or the first paragraph
    shots: int = 0  # answered problems of the same kind before the one to answer
    # a token whose text begins with this ends an answer, such as "\n" after few-shot examples
    stop: str = ""

    def __post_init__(self) -> None:
        if self.template and (self.template.count("{prompt}"), self.template.count("{answer}")) != (
            1,
            1,
        ):
            raise ValueError(
                f"template={self.template!r} must have {{prompt}} and {{answer}} once each"
            )
        if self.template.find("{answer}") < self.template.find("{prompt}"):
            raise ValueError(
                f"template={self.template!r} must have {{prompt}} before {{answer}}: a model "
                "writes only what comes last"
            )
        if self.template and self.style == "chat":
            raise ValueError(
                "template is for style = 'plain'; the chat template comes with the model"
            )
        if self.shots < 0:
            raise ValueError(f"shots={self.shots} must not be negative")


class Learning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lr: float = 5e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of lr, over all rounds
    warmup_rounds: int = 0  # in which lr rises to its full size
    final_lr: float = 0.0  # what linear and cosine leave of lr, as a share of it
    weight_decay: float = 0.0  # decoupled, on matrices only: not on norms and biases
    grad_clip: float = 1.0
    epochs: int = 1  # how often a round learns from its batch
    groups_per_step: int = 0  # most groups of one optimiser step; 0: all of the batch
    # a round takes no further step once the policy is this far from where it began; 0: no limit
    inner_kl: float = 0.0
    # packed tokens of one micro-batch; 0: as many as memory holds, measured at the start
    token_budget: int = 0
    own_share: float = 0.0  # least share of own groups in a step
    quota: int = 0  # most groups of one foreign sender in a step; 0: no limit
    max_age: int = 8  # staleness window, in the consumer's own versions
    max_age_s: float = 0.0  # above 0: the window is in seconds on the consumer's clock instead
    stale: Literal["drop", "pace"] = "drop"  # what is too old; or samplers wait before it can be
    success_memory: float = 0.9  # of the running mean of own rewards per kind
    checkpoint_every: int = 10  # rounds

    def __post_init__(self) -> None:
        if not 0 < self.lr <= MOST_LR:
            raise ValueError(
                f"lr={self.lr} must be above 0 and at most {MOST_LR:g}; 5e-4 is the default, and "
                "pretrained models start at 1e-4 or less"
            )
        if not self.grad_clip > 0:
            raise ValueError(f"grad_clip={self.grad_clip} must be above 0; 1.0 is usual")
        if not 0 <= self.final_lr <= 1:
            raise ValueError(
                f"final_lr={self.final_lr} is outside 0..1: it is a share of lr, such as 0.1"
            )
        if self.epochs < 1:
            raise ValueError(f"epochs={self.epochs} learns nothing; use at least 1")
        if not 0 <= self.own_share <= 1:
            raise ValueError(
                f"own_share={self.own_share} is outside 0..1; 0 takes what comes, 1 learns from "
                "own groups only"
            )
        if not 0 <= self.success_memory < 1:
            raise ValueError(
                f"success_memory={self.success_memory} is outside [0, 1); 0.9 is usual"
            )
        if self.checkpoint_every < 1:
            raise ValueError(f"checkpoint_every={self.checkpoint_every} must be at least 1")
        for name in (
            "warmup_rounds",
            "weight_decay",
            "groups_per_step",
            "inner_kl",
            "token_budget",
            "quota",
            "max_age",
            "max_age_s",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")


class Trust(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a peer goes along with what others send."""

    # chance of ever taking an honest sender's log-probs for false; 0: they are believed
    alpha: float = 1e-3
    # what one sender alone keeps saying, whatever the problem, is not pushed up
    habits: bool = True
    # a sender that is caught is not learned from for so long, twice that the second time; 0: never
    mute_rounds: int = 10
    # most share of a step's sequences and tokens that one foreign sender may have; twice its even
    # share of the crew is always allowed
    sender_share: float = 0.5
    # most pull of a stranger's gradient, in medians of strangers' or own pulls; 0: no limit
    grad_share: float = 4.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(
                f"alpha={self.alpha} is outside [0, 1); 0.001 is usual, 0 believes every log-prob"
            )
        if self.mute_rounds < 0:
            raise ValueError(f"mute_rounds={self.mute_rounds} must not be negative; 0 mutes nobody")
        if not 0 < self.sender_share <= 1:
            raise ValueError(
                f"sender_share={self.sender_share} is outside 0..1; 0.5 is usual, 1 sets no limit"
            )
        if self.grad_share and not self.grad_share >= 1:
            raise ValueError(
                f"grad_share={self.grad_share} must be at least 1, since an ordinary sender has 1; "
                "4.0 is usual, 0 sets no limit"
            )


class Teach(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer learns from others' successes on problems that it failed itself."""

    rescue: float = 0.0  # lambda of a likelihood step on such a success; 0: none is taken
    gamma: float = 0.0  # above 0: its tokens weigh gamma p / (p + gamma)^2, not 1
    # own continuations of a prefix of such a success: its length is drawn, or bisected until some
    # of them succeed and some fail
    branch: Literal["off", "drawn", "bisected"] = "off"
    most_branches: int = 0  # groups of continuations in a round; 0: as many as problems are met
    # a reward of at least this is a success; None: 1, where the task measures accuracy
    success: float | None = None

    @property
    def is_on(self) -> bool:
        return self.rescue > 0 or self.branch != "off"

    @property
    def least_success(self) -> float:
        return 1.0 if self.success is None else self.success

    def __post_init__(self) -> None:
        if not 0 <= self.rescue < math.inf:
            raise ValueError(f"rescue={self.rescue} must not be negative; 1.0 is usual, 0 is off")
        if not 0 <= self.gamma < math.inf:
            raise ValueError(f"gamma={self.gamma} must not be negative; 0.1 is usual, 0 is off")
        if self.most_branches < 0:
            raise ValueError(
                f"most_branches={self.most_branches} must not be negative; 0 is one for each met "
                "problem of a round"
            )
        if self.success is not None and not math.isfinite(self.success):
            raise ValueError(f"success={self.success} is no reward; 1.0 is usual")


class WeightsChannel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a learner's weights reach its samplers."""

    every: int = 1  # versions
    precision: Precision = "bfloat16"
    deltas: bool = True  # only what changed, between anchors
    anchor_every: int = 16  # versions: everything that trains
    max_gib: float = 64.0  # the most that a learner's store on the hub may hold

    def __post_init__(self) -> None:
        if self.every < 1 or self.anchor_every < 1 or self.anchor_every % self.every:
            raise ValueError(
                "weights need every >= 1 and an anchor_every that it divides; got "
                f"every={self.every}, anchor_every={self.anchor_every}"
            )
        if not 0 < self.max_gib < 2**20:
            raise ValueError(f"weights max_gib={self.max_gib} must be above 0; 64 is usual")


class Evaluate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    every: int = 10  # rounds; the last round is always evaluated
    problems: int = 64  # per kind
    # a crew is over once no peer has done better on held-out for so many evaluations; 0: never
    stop_after: int = 0
    stop_at: float | None = None  # a mean held-out reward that is enough; None: none is
    traces: int = 64  # MiB a peer, of what steps made of tokens (learning/traces.py); 0: none

    @property
    def most_trace_bytes(self) -> int:
        return self.traces << 20

    @property
    def may_stop(self) -> bool:
        """Whether a crew can be over before its last round."""
        return self.stop_after > 0 or self.stop_at is not None

    def __post_init__(self) -> None:
        if self.every < 1 or self.problems < 1:
            raise ValueError(
                f"evaluate needs every >= 1 and problems >= 1; got every={self.every}, "
                f"problems={self.problems}"
            )
        if self.stop_after < 0:
            raise ValueError(
                f"stop_after={self.stop_after} must not be negative; 0 trains to the last round"
            )
        if self.traces < 0:
            raise ValueError(
                f"traces={self.traces} must not be negative; give MiB a peer, or 0 for none"
            )
        if self.stop_at is not None and not math.isfinite(self.stop_at):
            raise ValueError(
                f"stop_at={self.stop_at} is no reward; leave it out to train to the last round"
            )
