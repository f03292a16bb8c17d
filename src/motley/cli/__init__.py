"""The command line. Owns words and exit codes; every piece of work belongs to a module it calls."""

from motley.cli import (
    attacking,
    drafting,
    exporting,
    fitting,
    history,
    hosting,
    joining,
    measuring,
    methods,
    models,
    plotting,
    rollouts,
    simulating,
    studying,
    training,
    trusting,
    watching,
)
from motley.cli.shell import app

app.put_first()

__all__ = [
    "app",
    "attacking",
    "drafting",
    "exporting",
    "fitting",
    "history",
    "hosting",
    "joining",
    "measuring",
    "methods",
    "models",
    "plotting",
    "rollouts",
    "simulating",
    "studying",
    "training",
    "trusting",
    "watching",
]
