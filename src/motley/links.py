"""Network: what the links between peers and hub do to what travels on them, as pure functions of a
seed. Knows no transport and no clock.

A link is one peer's way to the hub and back. What it does to a delivery depends on the crew's seed,
the peer, the direction and the delivery's name, and on nothing else: the same crew has the same
weather in a simulation, in a real run and after a restart.
"""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist
from typing import Literal

import msgspec

BETWEEN = 0.995  # the share of delays between low_s and high_s
LONGEST_S = 1e12
_LOW, _HIGH = (1 - BETWEEN) / 2, (1 + BETWEEN) / 2
_PARAMETERS = {
    "lognormal": ("mu", "sigma"),
    "weibull": ("k", "scale_s"),
    "exponential": ("mean_s",),
}

Direction = Literal["up", "down"]


class Delay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A distribution of seconds, by two quantiles or by its parameters.

    >>> Delay(shape="lognormal", low_s=60, high_s=1920).quantile(0.5)  # exp(5.827) = 339.4
    """

    shape: Literal["lognormal", "weibull", "exponential"]
    low_s: float = 0.0
    high_s: float = 0.0
    mu: float | None = None
    sigma: float | None = None
    k: float | None = None
    scale_s: float | None = None
    mean_s: float | None = None

    def __post_init__(self) -> None:
        needed = _PARAMETERS[self.shape]
        given = {
            name
            for names in _PARAMETERS.values()
            for name in names
            if getattr(self, name) is not None
        }
        by_quantiles = bool(self.low_s or self.high_s)
        if given - set(needed) or bool(given) == by_quantiles or (given and given != set(needed)):
            got = (
                ", ".join(sorted(given | {n for n in ("low_s", "high_s") if getattr(self, n)}))
                or "nothing"
            )
            quantiles = "high_s" if self.shape == "exponential" else "low_s and high_s"
            raise ValueError(
                f"a delay of shape {self.shape} takes either {quantiles} or "
                f"{' and '.join(needed)}; got {got}"
            )
        if by_quantiles and self.shape == "exponential" and self.low_s:
            raise ValueError(
                "an exponential delay has one parameter: give high_s alone, or mean_s; got "
                f"low_s={self.low_s} too"
            )
        if by_quantiles and not (
            0 <= self.low_s < self.high_s < math.inf and (self.low_s or self.shape == "exponential")
        ):
            raise ValueError(
                f"low_s={self.low_s} and high_s={self.high_s} must be above 0 and in this order, "
                "such as 60 and 1920"
            )
        if given and not all(0 < getattr(self, name) < math.inf for name in given - {"mu"}):
            raise ValueError(
                f"{' and '.join(sorted(given))} of a {self.shape} delay must be above 0"
            )
        if self.mu is not None and not abs(self.mu) < 50:
            raise ValueError(
                f"mu={self.mu} is the mean of the logarithm of seconds; 5.8 is about 6 minutes"
            )

        self._check_longest()

    def _check_longest(self) -> None:
        try:
            longest_s = self.quantile(1 - 2**-48)
        except OverflowError:
            longest_s = math.inf
        if longest_s > LONGEST_S:
            raise ValueError(
                f"this {self.shape} delay may take more than {LONGEST_S:.0e} s; use a narrower one"
            )

    def quantile(self, share: float) -> float:
        """The seconds that this share of delays stays below."""
        first, *rest = self._parameters()
        tail = -math.log1p(-share)  # the same quantile of a unit exponential
        if self.shape == "exponential":
            return first * tail
        if self.shape == "weibull":
            return rest[0] * tail ** (1 / first)
        return math.exp(first + rest[0] * NormalDist().inv_cdf(share)) if share > 0 else 0.0

    def _parameters(self) -> list[float]:
        """In the order of their names; fitted where quantiles are given."""
        if not self.high_s:
            return [getattr(self, name) for name in _PARAMETERS[self.shape]]
        low, high = -math.log1p(-_LOW), -math.log1p(-_HIGH)
        if self.shape == "exponential":
            return [self.high_s / high]
        ratio = math.log(self.high_s / self.low_s)
        if self.shape == "weibull":
            k = math.log(high / low) / ratio
            return [k, self.high_s / high ** (1 / k)]
        return [math.log(self.low_s) + ratio / 2, ratio / (2 * NormalDist().inv_cdf(_HIGH))]


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one link does.

    A lost delivery is sent again, and its second try takes a delay of its own.
    """

    delay: float | Delay = 0.0  # both ways; a number is constant seconds
    up: float | Delay | None = None  # to the hub, where it differs
    down: float | Delay | None = None  # from the hub
    loss: float = 0.0  # share of tries that are lost
    # [from, to) in seconds since the start: nothing leaves and nothing arrives
    outages: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("delay", "up", "down"):
            delay = getattr(self, name)
            if isinstance(delay, int | float) and not 0 <= delay < math.inf:
                raise ValueError(f"{name}={delay} must be seconds of at least 0")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss={self.loss} is outside [0, 1); 0.05 loses one try in twenty")
        if any(not 0 <= start < stop < math.inf for start, stop in self.outages):
            raise ValueError(
                f"outages={[list(o) for o in self.outages]} must be pairs of seconds [from, to] "
                "with from before to"
            )

    @property
    def instant(self) -> bool:
        """Whether everything arrives at once."""
        return not self.outages and all(not d for d in (self.delay, self.up, self.down))

    def arrival(self, seed: str, direction: Direction, start_s: float) -> float:
        """When a delivery that is ready at `start_s` arrives. `seed` names the delivery."""
        delay = self.up if direction == "up" else self.down
        delay = self.delay if delay is None else delay
        now_s, attempt = self._over(start_s), 0
        while True:
            lost, share = (
                _uniform(f"{seed}/{direction}/{attempt}/lost"),
                _uniform(f"{seed}/{direction}/{attempt}/delay"),
            )
            now_s = self._over(
                now_s + (delay.quantile(share) if isinstance(delay, Delay) else delay)
            )
            if lost >= self.loss:
                return now_s
            attempt += 1

    def _over(self, at_s: float) -> float:
        """The moment itself, or the end of the outage it falls into."""
        for start, stop in sorted(self.outages):
            if start <= at_s < stop:
                at_s = stop
        return at_s


class Network(Link, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every link does, and in `link` what some do instead."""

    link: dict[str, Link] = {}  # peer -> its own

    def of(self, peer: str) -> Link:
        return self.link.get(peer, self)


class Weather(msgspec.Struct, frozen=True):
    """One peer's link in one crew: which delays its deliveries really get."""

    link: Link
    seed: str  # of the crew and the peer
    started_s: float = 0.0  # when the peer's seconds began to count

    def sent(self, what: str, at_s: float) -> float:
        """When what this peer sends at a moment is on the log."""
        return self._arrival(what, "up", at_s)

    def fetched(self, what: str, at_s: float) -> float:
        """When what this peer asks for at a moment is there."""
        return self._arrival(what, "down", at_s)

    def _arrival(self, what: str, direction: Direction, at_s: float) -> float:
        return self.started_s + self.link.arrival(
            f"{self.seed}/{what}", direction, at_s - self.started_s
        )


def _uniform(seed: str) -> float:
    """In [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"network/{seed}".encode()).digest()[:6], "big") / 2**48
