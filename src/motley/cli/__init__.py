"""The command line. Owns words and exit codes; every piece of work belongs to a module it calls."""

from motley.cli import (
    attacking,
    exporting,
    history,
    joining,
    measuring,
    models,
    plotting,
    rollouts,
    simulating,
    training,
    trusting,
)
from motley.cli.common import app

__all__ = [
    "app",
    "attacking",
    "exporting",
    "history",
    "joining",
    "measuring",
    "models",
    "plotting",
    "rollouts",
    "simulating",
    "training",
    "trusting",
]
