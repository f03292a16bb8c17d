"""A crew's log as people and tools read it: where it is, who sent what, what is wrong with a
record, and export. Imports without torch.

A log is only read: a live run's file is left as it is, and a server that has to be started for
reading is stopped again.
"""

from motley.archive.examine import UNKNOWN, Examiner, Seen, Tally
from motley.archive.left import is_stopped, open_left
from motley.archive.opening import find_log, hub_of, open_log
from motley.archive.reading import Archive
from motley.archive.rollouts import (
    LoggedRollout,
    RolloutFilter,
    RolloutReader,
    read_range,
    read_rollouts,
    rollouts,
)
from motley.archive.tables import ExportCount, crew_of, export, problems_of
from motley.archive.texts import LogTexts

__all__ = [
    "UNKNOWN",
    "Archive",
    "Examiner",
    "ExportCount",
    "LogTexts",
    "LoggedRollout",
    "RolloutFilter",
    "RolloutReader",
    "Seen",
    "Tally",
    "crew_of",
    "export",
    "find_log",
    "hub_of",
    "is_stopped",
    "open_left",
    "open_log",
    "problems_of",
    "read_range",
    "read_rollouts",
    "rollouts",
]
