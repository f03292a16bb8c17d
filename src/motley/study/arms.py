"""Arms: the ways one crew is run in a study.

An arm is an objective, perhaps with a variant and settings; or `alone`, every peer by itself with
all the crew's sampling; or `alone/own`, with no more than it samples in the crew: what someone has
who does not join.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from motley.config import CrewConfig

OWN = "own"  # with the own share of the sampling only


@dataclass(frozen=True, slots=True)
class Arm:
    """>>> parse_arm("uplift/relative:scale=1,g=10")  # Arm("...", "uplift", "relative", {"scale":
    1.0, "g": 10.0})
    """

    label: str
    objective: str
    variant: str
    settings: dict[str, float | str]


def parse_arm(text: str) -> Arm:
    head, _, tail = text.partition(":")
    name, _, variant = head.partition("/")
    settings: dict[str, float | str] = {}
    for pair in filter(None, tail.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(
                f"arm {text!r}: {pair!r} is not key=value; write arms like "
                "uplift/relative:scale=1,g=10"
            )
        try:
            settings[key] = float(value)
        except ValueError:
            settings[key] = value
    if name == "alone" and (variant not in ("", OWN) or settings):
        raise ValueError(
            f"arm {text!r}: alone takes no variant but /own and no settings; it is every peer by "
            "itself, on its own rollouts"
        )
    return Arm(text, name, variant, settings)


def parse_arms(text: str) -> list[Arm]:
    """Arms separated by spaces."""
    arms = [parse_arm(part) for part in text.split()]
    if not arms or len({arm.label for arm in arms}) < len(arms):
        raise ValueError(
            f"arms {text!r}: name at least one arm, none twice, such as 'alone ftis "
            "uplift/relative'"
        )
    return arms


def crews_of(config: CrewConfig, arm: Arm, seed: int) -> list[CrewConfig]:
    """The crews an arm runs: the crew, or for `alone` one per peer."""
    crew = msgspec.structs.replace(config.crew, seed=seed)
    config = msgspec.structs.replace(config, crew=crew)
    if arm.objective == "alone":
        return [config.alone(peer.name, arm.variant == OWN) for peer in config.students]
    crew = msgspec.structs.replace(crew, objective=arm.objective, variant=arm.variant)
    return [msgspec.structs.replace(config, crew=crew, objective=arm.settings)]
