"""How a run ends before its last round: by which errors, and with which words to go on.

Knows no run.
"""

from __future__ import annotations

import shlex
from pathlib import Path

PLAIN = (ValueError, FloatingPointError, OSError)  # whose own words say enough


def resume_command(folder: Path, *options: str) -> str:
    """The command that goes on with the run of a folder, to be pasted.

    >>> resume_command(Path("runs/my crew"), "--alone")
    "motley train --resume 'runs/my crew' --alone"
    """
    return shlex.join(["motley", "train", "--resume", str(folder), *options])
