"""Follower: how a sampler gets from the version it has to the newest it can reach.

Owns which manifests lead there, and which may be trusted. Knows no store, no log and no signature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from motley.models.policy import Policy
from motley.records import NO_BASE, Blob, Weights
from motley.weights.encoding import (
    State,
    WeightsError,
    apply_change,
    check_blob,
    check_finite,
    check_precision,
    check_shapes,
    decode_whole,
    frozen_parameters,
    most_bytes,
    state_hash,
    take_state,
)

NOTHING_LOADED = -1
MAX_MISSES = 3

Fetch = Callable[[Blob], bytes | None]  # None: not there, now


class Follower:
    """Keeps a policy at a learner's newest version that can be reached and proves to be what its
    manifest says.
    """

    def __init__(self, policy: Policy) -> None:
        self.version = NOTHING_LOADED
        self.bad: set[Weights] = set()  # manifests that are never used again
        self._policy = policy
        self._misses: Counter[Weights] = Counter()
        self._state: State = {}
        self._state_hash = b""
        self._frozen: tuple[Blob, ...] | None = None

    def plan(self, known: Sequence[Weights]) -> list[Weights]:
        """The fewest manifests that lead, in order, to the newest version that can be reached; none
        if that is the present one.

        At version 3, with 5 (whole), 6 (on 5) and 8 (on 7) known: [5, 6].
        """
        start = _Path(0, 0, None, None)
        reached = {(self.version, self._state_hash): start}
        for manifest in sorted(set(known) - self.bad, key=lambda m: (m.version, m.state)):
            before = (
                start
                if manifest.base == NO_BASE
                else reached.get((manifest.base, manifest.base_state))
            )
            if before is not None:
                path = before.then(manifest)
                place = (manifest.version, manifest.state)
                reached[place] = min(path, reached.get(place, path), key=_Path.cost)
        newest = max(version for version, _ in reached)
        return min(
            (path for (version, _), path in reached.items() if version == newest), key=_Path.cost
        ).manifests()

    def blobs_of(self, plan: Sequence[Weights]) -> list[Blob]:
        """What a plan takes, each once; what never trains only as long as it is not loaded.

        A manifest that claims too much is left out.
        """
        most = most_bytes(dict(self._policy.model.named_parameters()).values())
        wanted = [(*m.blobs, *(m.frozen if m.frozen != self._frozen else ())) for m in plan]
        return list(
            dict.fromkeys(
                blob
                for blobs in wanted
                if sum(b.num_bytes for b in blobs) <= 2 * most
                for blob in blobs
            )
        )

    def apply(self, plan: Sequence[Weights], fetch: Fetch) -> int | None:
        """Take a plan's steps and load what comes out.

        None: done. Otherwise the version that failed, and nothing has changed.

        Its manifest is not planned with again: at once if its blobs are wrong, after a few tries if
        they are missing.
        """
        state, present, loaded = self._state, (self.version, self._state_hash), self._frozen
        never_trained: State = {}
        for manifest in plan:
            if manifest.base != NO_BASE and (manifest.base, manifest.base_state) != present:
                raise ValueError(
                    f"{manifest.id} stands on version {manifest.base}, the plan is at "
                    f"{present[0]}; make a new plan"
                )
            try:
                if manifest.frozen != loaded:
                    never_trained, loaded = self._decode_frozen(manifest, fetch), manifest.frozen
                state = self._step(state, manifest, fetch)
            except _MissingError:
                self._miss(manifest)
                return manifest.version
            except WeightsError:
                self.bad.add(manifest)
                return manifest.version
            present = (manifest.version, manifest.state)
        self._load(state, never_trained, present)
        self._frozen = loaded
        return None

    def _decode_frozen(self, manifest: Weights, fetch: Fetch) -> State:
        expected = dict(frozen_parameters(self._policy))
        state = decode_whole(_fetched(manifest.frozen, most_bytes(expected.values()), fetch))
        check_shapes(state, expected)
        check_finite(state)
        return state

    def _step(self, state: State, manifest: Weights, fetch: Fetch) -> State:
        expected = dict(self._policy.trained())
        blobs = _fetched(manifest.blobs, most_bytes(expected.values()), fetch)
        new = decode_whole(blobs) if manifest.base == NO_BASE else apply_change(state, blobs)
        check_shapes(new, expected)
        check_precision(new, manifest.precision)
        check_finite(new)
        got = state_hash(new)
        if got != manifest.state:
            raise WeightsError(
                f"{manifest.id} makes values of hash {got.hex()}; expected {manifest.state.hex()}"
            )
        return new

    def _miss(self, manifest: Weights) -> None:
        self._misses[manifest] += 1
        if self._misses[manifest] >= MAX_MISSES:
            self.bad.add(manifest)

    def _load(self, state: State, never_trained: State, present: tuple[int, bytes]) -> None:
        take_state(self._policy, never_trained | state)
        self._state = state
        self.version, self._state_hash = present
        self._policy.version = self.version


class _MissingError(LookupError):
    """A blob that could not be fetched."""


def _fetched(blobs: Sequence[Blob], limit: int, fetch: Fetch) -> list[bytes]:
    """The blobs' bytes, each as its manifest says."""
    claimed = max(sum(blob.num_bytes for blob in blobs), sum(blob.raw_bytes for blob in blobs))
    if claimed > limit:
        raise WeightsError(f"blobs claim {claimed} bytes; expected at most {limit} for this model")
    return [_fetched_one(blob, fetch) for blob in blobs]


def _fetched_one(blob: Blob, fetch: Fetch) -> bytes:
    content = fetch(blob)
    if content is None:
        raise _MissingError(blob.sha256)
    check_blob(blob, content)
    return content


class _Path(NamedTuple):
    """How a version is reached, and at which cost."""

    num_manifests: int
    num_bytes: int
    last: Weights | None
    before: _Path | None

    def then(self, manifest: Weights) -> _Path:
        return _Path(
            self.num_manifests + 1,
            self.num_bytes + sum(b.num_bytes for b in manifest.blobs),
            manifest,
            self,
        )

    def cost(self) -> tuple[int, int]:
        return self.num_manifests, self.num_bytes

    def manifests(self) -> list[Weights]:
        records = []
        path: _Path | None = self
        while path is not None and path.last is not None:
            records.append(path.last)
            path = path.before
        return records[::-1]
