"""ReadingBudget: how much of the log a peer reads before it goes on with something else.

Counts records and bytes and no seconds, so that the same log is read in the same parts anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from motley.exchange import Entry

MOST_ENTRIES = 4096
MOST_BYTES = 16 * 2**20  # as tokens and log-probs in memory some 20 times as many


@dataclass(slots=True)
class ReadingBudget:
    num_entries: int = 0
    num_bytes: int = 0

    def is_spent_on(self, entry: Entry) -> bool:
        """Count a record that was read; whether it was the last for now."""
        self.num_entries += 1
        self.num_bytes += len(entry.record)
        return self.num_entries >= MOST_ENTRIES or self.num_bytes >= MOST_BYTES
