"""Publisher: what a learner publishes of each version.

Owns which publication is whole and which a change. Knows no store, no log and no signature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motley.models.policy import Policy
from motley.records import NO_BASE, Backlog, Blob, Precision, Weights
from motley.weights.encoding import (
    State,
    describe,
    encode_change,
    encode_whole,
    frozen_state,
    state_hash,
    trained_state,
)


@dataclass(frozen=True, slots=True)
class Made:
    """One publication: the fields of a Weights record that come from tensors, and the bytes to
    store.
    """

    base: int
    base_state: bytes
    state: bytes
    blobs: dict[Blob, bytes]
    frozen: tuple[Blob, ...]

    def record(
        self,
        crew: str,
        peer: str,
        version: int,
        precision: Precision,
        backlog: Backlog,
        created_s: float,
    ) -> Weights:
        """The manifest of this publication."""
        return Weights(
            crew=crew,
            peer=peer,
            version=version,
            precision=precision,
            base=self.base,
            base_state=self.base_state,
            state=self.state,
            blobs=tuple(self.blobs),
            frozen=self.frozen,
            backlog=backlog,
            created_s=created_s,
        )


class Publisher:
    """Makes a learner's publications: whole at anchors and where a change would not be smaller,
    otherwise what changed since the last.
    """

    def __init__(
        self, policy: Policy, precision: Precision, anchor_every: int, deltas: bool
    ) -> None:
        if anchor_every < 1:
            raise ValueError(
                f"anchor_every={anchor_every} makes no anchor; use at least 1, which makes every "
                "version one"
            )
        self._policy = policy
        self._precision = precision
        self._anchor_every = anchor_every
        self._deltas = deltas
        # What never trains, until somebody has stored it: large next to an adapter.
        self.unstored = _described(encode_whole(frozen_state(policy)))
        self._frozen = tuple(self.unstored)
        self.version = NO_BASE  # the last made
        self._state: State = {}
        self._made: Made | None = None
        self.num_anchors = 0
        self._whole_bytes = 0  # of the last anchor; the next would be about as large
        self._since_anchor: set[str] = set()
        self._before_anchor: set[str] = set()

    def make(self) -> Made:
        """The publication of the policy's present version; asked again, the same."""
        version = self._policy.version
        if self._made is None or version != self.version:
            state = trained_state(self._policy, self._precision)
            self._made = self._change(version, state) or self._whole(state)
            self.version, self._state = version, state
            self._since_anchor |= by_hash(self._made.blobs).keys()
        return self._made

    def _change(self, version: int, state: State) -> Made | None:
        # Versions may be left out: an anchor is due when a multiple of anchor_every was passed, not
        # only when it is hit.
        due = version // self._anchor_every > self.version // self._anchor_every
        if self._made is None or not self._deltas or due or version < self.version:
            return None
        blobs = encode_change(self._state, state)
        if _num_bytes(blobs) >= self._whole_bytes:
            return None
        return Made(
            self.version, self._made.state, state_hash(state), _described(blobs), self._frozen
        )

    def _whole(self, state: State) -> Made:
        blobs = encode_whole(state)
        self._whole_bytes = _num_bytes(blobs)
        self.num_anchors += 1
        self._before_anchor, self._since_anchor = self._since_anchor, set()
        return Made(NO_BASE, b"", state_hash(state), _described(blobs), self._frozen)

    def needed(self) -> set[str]:
        """Hashes of the blobs that must stay fetchable: what never trains, and everything since the
        anchor before the last.
        """
        return {b.sha256 for b in self._frozen} | self._before_anchor | self._since_anchor


def by_hash(blobs: Mapping[Blob, bytes]) -> dict[str, bytes]:
    """As stores take them."""
    return {blob.sha256: content for blob, content in blobs.items()}


def _described(blobs: Sequence[bytes]) -> dict[Blob, bytes]:
    return dict(zip(describe(blobs), blobs, strict=True))


def _num_bytes(blobs: Sequence[bytes]) -> int:
    return sum(map(len, blobs))
