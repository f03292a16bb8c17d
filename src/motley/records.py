"""The nouns of a crew: Problem, Rollout, Group, Origin; the Table of a sender's vocabulary; a
learner's Weights for its samplers; what its hub says: Charter, Roster; and the Stamp under which
all of it is published. Frozen data, no behaviour that needs torch, a task or a transport.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

Ending = Literal["stop", "length"]
Convention = Literal["sampled", "full"]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and what its answer is scored against.

    >>> Problem(kind="reverse", prompt="reverse 4821=", answer="1284")
    """

    prompt: str
    answer: str = ""
    kind: str = "all"
    columns: dict[str, Any] = {}  # further fields a reward function may ask for
    # a conversation for the model's chat template; `prompt` is then what it says, as text
    messages: tuple[Message, ...] = ()

    @property
    def id(self) -> str:
        """Content hash: equal problems have equal ids on every machine."""
        told = [self.kind, self.prompt, self.answer, self.columns, *self.messages]
        content = msgspec.json.encode(told, order="sorted")
        return hashlib.sha256(content).hexdigest()[:16]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens were drawn, and under which convention their log-probs are reported.

    logprobs "sampled": under the distribution really drawn from, temperature and truncation
    included. "full": under the full softmax at that temperature. top_k = 0 and top_p = 1 truncate
    nothing; temperature 0 is greedy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    logprobs: Convention = "sampled"

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 10:
            raise ValueError(
                f"temperature={self.temperature} is outside 0..10; 1.0 is usual for training"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} is negative; 0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]; 1.0 keeps every token")
        if self.max_tokens < 1:
            raise ValueError(
                f"max_tokens={self.max_tokens} leaves no room for an answer; use at least 1"
            )

    @property
    def raises_logprobs(self) -> bool:
        """Whether what is reported is above the full softmax, by what truncation cut off."""
        return self.logprobs == "sampled" and (self.top_k > 0 or self.top_p < 1)


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One completion. `tokens` includes the end token when `ending` is "stop"."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # the sampler's, one per token
    reward: float
    ending: Ending
    # whether these are the tokens that the sender's own tokenizer makes of the text, and the end is
    # the one that its answers are taught: said in crews of several vocabularies only
    canonical: bool = True


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Who made a group, with what."""

    peer: str
    model: str  # fingerprint of architecture and size
    vocabulary: str  # fingerprint of the id -> bytes table
    version: int  # learner steps behind the weights that sampled
    sampling: Sampling


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rollouts of a group begin, which are not answers but ends of one: behind a prefix
    of another peer's success, on a problem that the author had before and failed.
    """

    round: int  # of the author's own group on the problem
    slot: int
    prefix: tuple[int, ...]


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All rollouts of one problem by one policy version: what is shared and learned from."""

    crew: str
    problem: str  # Problem.id
    round: int
    slot: int  # which of the peer's problems of the round
    origin: Origin
    rollouts: tuple[Rollout, ...]
    created_s: float
    branch: Branch | None = None  # not None: only its author learns from it

    @property
    def id(self) -> str:
        return f"{self.origin.peer}.{self.round}.{self.slot}"

    @property
    def place(self) -> tuple[int, int]:
        """The round and slot in which its author was given the problem."""
        return (self.branch.round, self.branch.slot) if self.branch else (self.round, self.slot)

    @property
    def prefix(self) -> tuple[int, ...]:
        """What stands between the prompt and the rollouts."""
        return self.branch.prefix if self.branch else ()


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """What a sender's tokens stand for, for those who have another vocabulary. Once, before its
    first group.
    """

    crew: str
    peer: str
    vocabulary: str  # as its groups name it
    ends: tuple[int, ...]  # tokens that end an answer, the one that is taught first
    encoded: bytes  # Spelling.encode: the bytes of each token

    @property
    def id(self) -> str:
        return f"{self.peer}.table"


class Charter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every peer of a crew agreed to: its file, and what its task asks.

    The first record of a crew's log.
    """

    crew: str
    config: str  # TOML
    task: str  # Task.fingerprint
    lots: bool = False  # groups stand in lots: readers get the one that they listen to

    @property
    def id(self) -> str:
        return f"{HUB}.charter"


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """Whose key counts from here on in the log. Every roster replaces the one before it."""

    crew: str
    number: int
    keys: dict[str, bytes]  # peer -> public key
    revoked: tuple[str, ...] = ()  # peers shut out, which nobody waits for

    @property
    def id(self) -> str:
        return f"{HUB}.roster.{self.number}"


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """A file of weights: zstd around safetensors. Its name in the store is its hash."""

    sha256: str  # hex, of the compressed bytes
    num_bytes: int  # compressed
    raw_bytes: int  # uncompressed


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """What waits for a learner."""

    waiting: tuple[tuple[str, int], ...]  # author, groups
    oldest_s: float  # age of the oldest of them


Precision = Literal["bfloat16", "float32"]
NO_BASE = -1


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a learner's weights, for its samplers: which blobs make it up, and what must
    come out of them.

    `base` -1: the blobs hold everything that trains. Otherwise they overwrite what changed since
    that version. `frozen` is what never trains, the same in every record.
    """

    crew: str
    peer: str  # the learner
    version: int
    precision: Precision  # of what trains
    base: int
    base_state: bytes  # sha256 of the base's trained values; nothing without a base
    state: bytes  # sha256 of the trained values that come out
    blobs: tuple[Blob, ...]
    frozen: tuple[Blob, ...]
    backlog: Backlog  # when the version was made
    created_s: float

    @property
    def id(self) -> str:
        return f"{self.peer}.weights.{self.version}"


HUB = "hub"  # the name under which a hub publishes; no peer may have it
FIRST_PREVIOUS = bytes(32)  # what stands for the hash of the record before a publisher's first

Content = Group | Table | Weights | Charter | Roster


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Who publishes a record, and its place in the chain of all that publisher's records."""

    key: bytes  # public, ed25519
    counter: int = 0
    previous: bytes = FIRST_PREVIOUS  # sha256 of the body of the record before
