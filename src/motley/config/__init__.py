"""A crew as a user writes it: TOML to frozen structs. Everything that can be judged without a model
is judged here.

Names of tasks and objectives are looked up by those who own them (tasks, objectives), also before
any model loads.
"""

from motley.config.choosing import AUTO
from motley.config.crew import CrewConfig
from motley.config.guessing import meant
from motley.config.peers import (
    Churn,
    EnginePart,
    Lora,
    Masters,
    OpenAI,
    Optimizer,
    PeerConfig,
    Speed,
    TrainPart,
    Vllm,
    Warm,
    check_name,
)
from motley.config.reading import (
    ConfigError,
    by_name,
    config_text,
    parse_config,
    read_config,
    with_changes,
    with_each_file,
    with_files_in,
    with_models_in,
    write_beside,
    write_config,
)
from motley.config.resuming import (
    MAY_CHANGE,
    Change,
    changes,
    check_changes,
    may_become,
    values_of,
)
from motley.config.rules import (
    REPORTERS,
    Crew,
    Evaluate,
    Learning,
    Prompt,
    Reporter,
    Teach,
    Trust,
    WeightsChannel,
)

__all__ = [
    "AUTO",
    "MAY_CHANGE",
    "REPORTERS",
    "Change",
    "Churn",
    "ConfigError",
    "Crew",
    "CrewConfig",
    "EnginePart",
    "Evaluate",
    "Learning",
    "Lora",
    "Masters",
    "OpenAI",
    "Optimizer",
    "PeerConfig",
    "Prompt",
    "Reporter",
    "Speed",
    "Teach",
    "TrainPart",
    "Trust",
    "Vllm",
    "Warm",
    "WeightsChannel",
    "by_name",
    "changes",
    "check_changes",
    "check_name",
    "config_text",
    "may_become",
    "meant",
    "parse_config",
    "read_config",
    "values_of",
    "with_changes",
    "with_each_file",
    "with_files_in",
    "with_models_in",
    "write_beside",
    "write_config",
]
