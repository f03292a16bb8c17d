"""What `objective = "auto"` stands for: the row that the evidence supports for a crew, and why.

Knows names of rows, not what they compute.
"""

from __future__ import annotations

from typing import NamedTuple

AUTO = "auto"


class Choice(NamedTuple):
    objective: str
    variant: str
    why: str

    @property
    def reason(self) -> str:
        """One line, kept with the crew."""
        row = f"{self.objective}/{self.variant}" if self.variant else self.objective
        return f"{AUTO} took {row}: {self.why}"


def choice(num_students: int, waits_for_samplers: bool) -> Choice:
    """The row for as many who learn; `waits_for_samplers`: from samples of their older versions."""
    if num_students > 1:
        return Choice(
            "uplift",
            "sure",
            "peers that differ learn from each other what works and was no accident, and keep what "
            "they know (docs/results/joining.md)",
        )
    if waits_for_samplers:
        return Choice(
            "gepo", "", "it loses nothing to the age of its samples (docs/results/delay.md)"
        )
    return Choice("alone", "", "one peer learns from its own samples")
