"""A crew as a user writes it: TOML to frozen structs. Everything that can be judged without a model is judged here.

Names of tasks and objectives are looked up by those who own them (tasks, objectives), also before any model loads.
"""

from motley.config.crew import CrewConfig
from motley.config.files import ConfigError, config_text, parse_config, read_config, with_files_in, write_config
from motley.config.peers import Churn, Lora, PeerConfig, Speed, TrainPart, Warm
from motley.config.rules import Crew, Evaluate, Learning, WeightsChannel

__all__ = [
    "Churn",
    "ConfigError",
    "Crew",
    "CrewConfig",
    "Evaluate",
    "Learning",
    "Lora",
    "PeerConfig",
    "Speed",
    "TrainPart",
    "Warm",
    "WeightsChannel",
    "config_text",
    "parse_config",
    "read_config",
    "with_files_in",
    "write_config",
]
