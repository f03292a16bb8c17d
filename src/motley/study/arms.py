"""Arms: the ways one crew is run in a study.

An arm is an objective, perhaps with a variant and settings; or `alone`, every peer by itself with
all the crew's sampling; or `alone/own`, with no more than it samples in the crew: what someone has
who does not join. `alone` with settings of [teach] is a crew whose peers learn from others by that
alone. A setting such as `learning.epochs=2` is a key of a table of the crew file. What
stands before a first `=` is a name: `best=uplift/relative:g=10`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from motley.config import CrewConfig, with_changes

ALONE = "alone"
OWN = "own"  # with the own share of the sampling only
OPPONENTS = (ALONE, f"{ALONE}/{OWN}")  # what a crew must be better than
NOT_AN_ARMS = {
    "crew.name": "it is the crew file's",
    "crew.seed": "--seeds says how many there are",
    "crew.objective": "an arm begins with it",
    "crew.variant": "it follows the objective, as in uplift/relative",
}
_NAME = re.compile(r"[\w.+/-]+")
_COMMA = re.compile(r",(?![^\[\]{}]*[\]}])")  # outside of lists and tables


@dataclass(frozen=True, slots=True)
class Arm:
    """>>> parse_arm("uplift/relative:scale=1,crew.meet=0.25")
    Arm("uplift/relative:scale=1,crew.meet=0.25", "uplift", "relative", {"scale": 1.0},
        ("crew.meet=0.25",), "uplift/relative:scale=1,crew.meet=0.25")
    """

    label: str  # its name if it has one, or else `text`
    objective: str
    variant: str
    settings: dict[str, float | str]  # of the objective
    changes: tuple[str, ...]  # TABLE.KEY=VALUE, of the crew file
    text: str  # what is run

    @property
    def made(self) -> str:
        """What its name stands for; nothing if it has none."""
        return "" if self.label == self.text else self.text

    @property
    def is_alone(self) -> bool:
        """Whether peers are by themselves. An arm that sets [teach] has others who teach."""
        return self.objective == ALONE and not any(c.startswith("teach.") for c in self.changes)


def parse_arm(written: str) -> Arm:
    head = written.partition(":")[0]
    label, named, _ = head.partition("=")
    text = written[len(label) + 1 :] if named else written
    head, _, tail = text.partition(":")
    name, _, variant = head.partition("/")
    settings: dict[str, float | str] = {}
    changes = []
    for pair in filter(None, _COMMA.split(tail)):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(
                f"arm {written!r}: {pair!r} is not key=value; write arms like "
                "uplift/relative:scale=1,learning.epochs=2"
            )
        if "." in key:
            changes.append(pair)
        else:
            settings[key] = _number_or_word(value)
    arm = Arm(label if named else text, name, variant, settings, tuple(changes), text)
    _check(arm, written)
    return arm


def _number_or_word(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def _check(arm: Arm, written: str) -> None:
    keys = [change.partition("=")[0] for change in arm.changes]
    for key in keys:
        if key in NOT_AN_ARMS:
            raise ValueError(f"arm {written!r}: {key} is not an arm's to set; {NOT_AN_ARMS[key]}")
    if arm.label != arm.text and not _NAME.fullmatch(arm.label):
        raise ValueError(
            f"arm {written!r}: its name {arm.label!r} may have letters, digits and . + / - _ only"
        )
    own = arm.settings or any(key.startswith("objective.") for key in keys)
    variants = ("", OWN) if arm.is_alone else ("",)
    if arm.objective == ALONE and (arm.variant not in variants or own):
        raise ValueError(
            f"arm {written!r}: alone takes no variant but /own and no settings but those of the "
            "crew file's tables, such as learning.epochs=2; it is every peer by itself, on its own "
            "rollouts"
        )
    if arm.label in OPPONENTS and (arm.label != arm.text.partition(":")[0] or not arm.is_alone):
        raise ValueError(
            f"arm {written!r}: {arm.label} is what arms are compared with, so that nothing else "
            "may have its name; choose another"
        )


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
    config = msgspec.structs.replace(config, crew=msgspec.structs.replace(config.crew, seed=seed))
    if arm.is_alone:
        config = _changed(config, arm.changes, arm)
        return [config.alone(peer.name, arm.variant == OWN) for peer in config.students]
    config = msgspec.structs.replace(config, objective=arm.settings)
    row = (f'crew.objective="{arm.objective}"', f'crew.variant="{arm.variant}"')
    return [_changed(config, (*row, *arm.changes), arm)]


def _changed(config: CrewConfig, changes: tuple[str, ...], arm: Arm) -> CrewConfig:
    try:
        return with_changes(config, changes)
    except ValueError as error:
        words = str(error).replace("--set ", "")  # as who sets keys on a command line is told
        raise ValueError(f"arm {arm.label!r}: {words}; docs/crew_file.md has the keys") from None
