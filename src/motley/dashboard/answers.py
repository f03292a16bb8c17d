"""What the page asks for and gets: the structs of its JSON. docs/watch.md has the addresses.

Numbers that are not finite are None. Texts are as peers wrote them: who shows them escapes them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Point = tuple[float, float | None]  # (round, value)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Served(Answer, frozen=True):
    """A run, or the report of a study or sweep, that the page can show."""

    id: str  # in addresses
    name: str
    kind: Literal["run", "report"]
    place: str  # the folder as it was given, for people


class PeerCard(Answer, frozen=True):
    name: str
    role: str  # "peer", "learner", "sampler"
    model: str
    adapter: str  # "full", "LoRA r=8", ...
    size: int | None  # parameters, where they are known
    vocabulary: str | None  # of the newest group, shortened
    device: str
    version: int | None
    round: int | None
    last_seen_s: float | None  # of the newest group or line, in seconds since 1970
    reward: float | None
    heldout: dict[str, float]  # the newest, by kind
    follows: str  # of a sampler: its learner


class Arrow(Answer, frozen=True):
    """Who learned how much from whom, over the rounds asked for."""

    sender: str
    learner: str
    sequences: int  # admitted and taken into steps
    share: float  # of all sequences of the learner's steps
    weight: float | None  # mean weight of its tokens


class Warned(Answer, frozen=True):
    round: int
    peer: str
    sign: str
    words: str
    senders: list[str]


class Crew(Answer, frozen=True):
    name: str
    task: str
    objective: str
    pace: str
    rounds: int  # to be trained
    round: int  # the newest
    is_over: bool
    left_s: float | None  # None: not known, or over
    seconds: float | None  # that a round takes lately
    measure: str  # "accuracy" or "reward"
    kinds: list[str]
    peers: list[PeerCard]
    arrows: list[Arrow]
    warnings: list[Warned]
    notes: list[str]  # what cannot be shown, and why
    indexed: float  # 0..1: how much of the run's files was looked at
    keys: list[str]  # numbers that `curves` knows


class Curve(Answer, frozen=True):
    key: str
    peer: str
    sender: str  # of whom it is measured; "" where that is no question
    points: list[Point]
    is_alone: bool = False  # of the peer trained by itself


class Curves(Answer, frozen=True):
    curves: list[Curve]
    every: int  # rounds between two points; 1: all are there


class RolloutDot(Answer, frozen=True):
    number: int
    reward: float | None
    num_tokens: int
    ending: str
    fates: dict[str, str]  # learner -> what became of it


class GroupLine(Answer, frozen=True):
    position: int
    round: int
    slot: int
    sender: str
    version: int
    kind: str | None
    prompt: str | None  # cut
    fault: str  # why it is believed by nobody; "": sound
    rollouts: list[RolloutDot]


class GroupPage(Answer, frozen=True):
    groups: list[GroupLine]
    next: int | None  # `after` of the next page; None: that was all
    looked_at: int  # groups that this page went through
    total: int  # groups of the log


class TokenTrace(Answer, frozen=True):
    """What a step of one learner made of a rollout's tokens; one entry per token of the learner's
    own cut, or per span where there are spans.
    """

    learner: str
    round: int
    fate: str
    advantage: float
    kept: bool
    filter_kl: float | None
    tokens: list[str]  # the learner's own cut of the text
    spans: list[int] | None  # first token of each span; None: every token is one
    log_ratio: list[float | None]  # log p - log q; of a span on each of its tokens
    weight: list[float | None]  # used
    free: list[float | None]  # before truncation, clip and filter
    entropy: list[float | None]
    push: list[float | None]  # -d loss / d log p: what the step added to this token's log-prob


class RolloutText(Answer, frozen=True):
    number: int
    reward: float | None
    ending: str
    canonical: bool
    completion: str | None
    tokens: list[str]  # the sender's
    logprobs: list[float | None]
    fates: dict[str, str]
    traces: list[TokenTrace]


class GroupText(Answer, frozen=True):
    position: int
    id: str
    round: int
    slot: int
    sender: str
    model: str
    version: int
    created_s: float | None
    temperature: float
    kind: str | None
    prompt: str | None
    answer: str | None
    fault: str
    fault_words: str
    rollouts: list[RolloutText]
    before: int | None  # position of the group before it in the log
    after: int | None
    # learners some of whose traces are not shown: they are too large beside the others
    left_out: list[str] = []


class FormulaLine(Answer, frozen=True):
    symbol: str  # "ρ"
    formula: str  # "exp(log p − log q)"
    values: str  # "exp(−1.20 − (−1.35))"
    result: str  # "1.16"
    words: str  # a sentence for people


class Formula(Answer, frozen=True):
    objective: str
    about: str
    lines: list[FormulaLine]
    verdict: str  # a sentence: what became of this token, and why


class Reason(Answer, frozen=True):
    reason: str
    words: str  # what it means, and what to do
    count: int  # rollouts
    points: list[Point]  # rollouts by round, downsampled as sums


class Discarded(Answer, frozen=True):
    learner: str
    reasons: list[Reason]  # those of what was learned too, called "learned"
    total: int


class Histogram(Answer, frozen=True):
    sender: str
    learner: str
    edges: list[float]  # of log10 of the ratio
    before: list[int]  # tokens, by their ratio
    after: list[int]  # tokens, by the weight that was used; weight 0 counts in `zero`
    zero: int
    rounds: tuple[int, int]  # the first and the last that are counted, of those with traces
    num_tokens: int
    left: int = 0  # rounds that are not counted yet: ask again


class Histograms(Answer, frozen=True):
    histograms: list[Histogram]


class Suspect(Answer, frozen=True):
    learner: str
    sender: str
    refused: dict[str, int]
    dropped: dict[str, int]
    missing: int
    evidence: list[Point]
    strikes: list[Point]
    muted: str
    until: int | None


class TrustView(Answer, frozen=True):
    suspects: list[Suspect]
    alarm: float | None  # powers of ten of evidence at which a sender is muted; None: nobody is
    faults: dict[str, dict[str, int]]  # sender -> fault -> records of the log


class Wire(Answer, frozen=True):
    """What the log is like, by sender."""

    sender: str
    groups: int
    num_bytes: int
    bytes_per_token: float | None
    outbox: int | None  # records that wait to be sent
    lag: dict[str, int]  # learner -> records that it has not read


class Speed(Answer, frozen=True):
    wires: list[Wire]
    records: int


class Changed(Answer, frozen=True):
    """Said whenever something of a run is new: how things stand."""

    round: int
    indexed: float
    is_over: bool


class Refused(Answer, frozen=True):
    """What came of a question that cannot be answered: what, got, expected, remedy."""

    error: str
