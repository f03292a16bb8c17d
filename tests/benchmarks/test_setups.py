from __future__ import annotations

import pytest

from motley.benchmarks.bench import Sizes, sizes_of
from motley.benchmarks.setups import DEFAULT, Setup, setup_of
from motley.config import Lora, TrainPart
from motley.learning.descent import Upkeep


def test_settings_are_those_of_a_crew_file() -> None:
    lean = setup_of(
        "masters=bfloat16 dtype=bfloat16 optimizer=adamw8bit offload=true "
        "gradient_checkpointing=auto learning.token_budget=4096"
    )
    assert (lean.masters, lean.peer.dtype, lean.token_budget) == ("bfloat16", "bfloat16", 4096)
    assert lean.upkeep == Upkeep(kind="adamw8bit", offload=True)
    assert lean.peer.gradient_checkpointing == "auto"
    assert lean.keeps_half
    for text in ("train.lora.rank=16 dtype=bfloat16", "train={lora={rank=16}} dtype=bfloat16"):
        adapted = setup_of(text)
        assert adapted.train == TrainPart(lora=Lora(rank=16))
        assert adapted.lora == Lora(rank=16)
        assert adapted.keeps_half
    assert setup_of(DEFAULT) == Setup()
    assert not setup_of("train.lora.rank=16").keeps_half  # its arithmetic is still to be chosen
    assert setup_of(DEFAULT, "float16").peer.dtype == "float16"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lean", "'lean' is none of its settings; write KEY=VALUE with one of train, dtype"),
        ("lr=3", "'lr=3' is none of its settings"),
        ("masters=bfloat16", 'masters = "bfloat16" is for train = "full" with dtype = "bfloat16"'),
        ("optimizer=sgd", "Invalid enum value 'sgd'"),
        ("learning.token_budget=-1", "learning.token_budget=-1 is no number of tokens; use such"),
        ("learning.token_budget=few", "learning.token_budget='few' is no number of tokens"),
        ("train=[", "is no TOML value"),
    ],
)
def test_what_cannot_be_set_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^--learn ") as refused:
        setup_of(text)
    assert said in str(refused.value)
    assert "--set" not in str(refused.value)


def test_sizes_are_changed_by_name() -> None:
    assert sizes_of(["problems=3", "trl_rows=6"]) == Sizes(problems=3, trl_rows=6)
    for wrong in ("problems", "problems=0", "problems=x", "sequences=4", "ragged_spread=1"):
        with pytest.raises(ValueError, match=f"--size '{wrong}' is no size; write KEY=NUMBER"):
            sizes_of([wrong])
