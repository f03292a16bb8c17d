"""A slip in Python is an error at once, in one line that says what was expected."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import motley
from motley.api.given import as_written
from motley.tasks import load_task

DATA = [{"prompt": f"say {n}", "answer": str(n)} for n in range(40)]
ANN = motley.Peer("tiny:0.3m", name="ann")


def right(completions: list[str], answer: list[str]) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"peers": None}, "peers is a NoneType; expected a motley.Peer, a model by its name"),
        ({"peers": 5}, "peers is a int; expected a motley.Peer"),
        ({"peers": motley.Peer}, "peers is the class Peer; expected a motley.Peer"),
        ({"peers": {"ann": ANN}}, "peers is a dict; expected a motley.Peer"),
        ({"peers": {ANN}}, "peers is a set; expected a motley.Peer"),
        ({"peers": [ANN, {"model": "tiny:1m"}]}, r"peers\[1\] is a dict; expected a motley.Peer"),
        ({"peers": [[ANN]]}, r"peers\[0\] is a list; expected a motley.Peer"),
        ({"data": None}, "got neither"),
        ({"data": "gsm8k"}, "gsm8k is a task, and no data; write task='gsm8k'"),
        ({"data": right}, "the data is a function; expected a list of dicts"),
        ({"data": None, "task": 5}, "task is a int; expected a task by name"),
        ({"data": None, "task": DATA}, "task is a list; expected a task by name"),
        ({"data": None, "task": "digits", "reward_weights": [1.0]}, "reward_weights, heldout, ood"),
        ({"rewards": right, "reward_weights": 1.0}, "reward_weights=1.0; expected a list of num"),
        ({"rewards": right, "reward_weights": ["a"]}, r"reward_weights=\['a'\]; expected a list"),
        ({"fields": "question"}, "fields is 'question'; expected which field of the data"),
        ({"objective": 5}, "objective is a int; expected one by name"),
        ({"rounds": None}, "crew.rounds is None; expected text, a number"),
        ({"rounds": "40"}, "Expected `int`, got `str` .in crew.rounds."),
        ({"name": None}, "crew.name is None; expected text"),
        ({"settings": [1]}, "settings is a list; expected tables of a crew file"),
        ({"settings": {5: {}}}, "settings has a table 5, which a crew file does not"),
        ({"settings": {"task": 5}}, "settings has task=5; expected a table"),
        ({"settings": {"task": {"form": "xml"}}}, "settings of task: Invalid enum value 'xml'"),
        ({"settings": {"task": {"fields": {}}}}, "settings has task.fields; beside data it takes"),
        ({"settings": {"learning": {"lr": object()}}}, "learning.lr is a object; expected text"),
        ({"settings": {"learning": {3: 4}}}, "learning has the key 3; expected names that are"),
        ({"peers": [motley.Peer("tiny:1m", judge={"a": right})]}, "judge.a is a function; expect"),
        ({"peers": [motley.Peer("tiny:1m", device=0)]}, "Expected `str`, got `int` .in peer.1m.de"),
    ],
)
def test_a_slip_is_refused_when_the_crew_is_made(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        motley.Crew(**({"peers": [ANN], "data": DATA} | given))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"round": 3}, "Crew has no 'round'; did you mean rounds"),
        ({"num_generations": 8}, "Crew has no 'num_generations'; did you mean group_size"),
        ({"schedule": "cosine"}, "Crew has no 'schedule'; it takes peers, data, .* settings"),
    ],
)
def test_a_keyword_that_is_not_known_names_the_one_that_is_meant(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        motley.Crew([ANN], DATA, **given)


def test_more_values_than_have_a_place_are_to_be_named() -> None:
    with pytest.raises(TypeError, match="Crew takes only peers, data, rewards without a name"):
        motley.Crew([ANN], DATA, right, 40)  # type: ignore[call-arg,arg-type]


@pytest.mark.parametrize("peers", [ANN, "tiny:0.3m", Path("tiny:0.3m"), ["tiny:0.3m"], (ANN,)])
def test_a_model_by_name_is_a_peer_and_one_peer_a_crew(peers: Any) -> None:
    config = motley.Crew(peers, DATA)._config_in(None)
    assert [peer.model for peer in config.peer] == ["tiny:0.3m"]


def test_numbers_and_words_of_libraries_are_what_they_say() -> None:
    peer = motley.Peer(
        "tiny:0.3m", lr=np.float32(0.5), dtype=torch.float32, device=torch.device("cpu")
    )  # type: ignore[arg-type]
    crew = motley.Crew(peer, DATA, right, rounds=np.int64(4), reward_weights=np.array([2.0]))  # type: ignore[arg-type]
    config = crew._config_in(None)
    me = config.peer[0]
    assert (me.lr, me.dtype, me.device, config.crew.rounds) == (0.5, "float32", "cpu", 4)
    assert config.task["reward_weights"] == [2.0]
    assert as_written({"a": (np.float64(1), Path("b"))}, "x") == {"a": [1.0, "b"]}


class Word(str, Enum):  # noqa: UP042 (libraries have them that began before StrEnum)
    COSINE = "cosine"


def test_words_of_enums_and_sets_of_words_are_what_they_say() -> None:
    assert as_written({"a": Word.COSINE, "b": {"v", "q"}}, "x") == {"a": "cosine", "b": ["q", "v"]}
    adapter = {"lora": {"rank": 4, "targets": {"q_proj", "v_proj"}}}
    peer = motley.Peer("tiny:0.3m", train=adapter, warm=np.float32(0.5))  # type: ignore[arg-type]
    crew = motley.Crew(peer, DATA, settings={"learning": {"schedule": Word.COSINE}})
    assert crew._config_in(None).learning.schedule == "cosine"


def test_what_is_empty_is_not_given_and_ordered_views_are_lists() -> None:
    crew = motley.Crew({ANN.model: 1}.keys(), task="digits", rewards=[], fields={})  # type: ignore[arg-type]
    assert len(crew._config_in(None).peer) == 1


def test_too_many_values_are_refused_where_all_have_a_place() -> None:
    with pytest.raises(TypeError, match=r"Run takes only folder, task .* leave the others out"):
        motley.Run("folder", None, 1)  # type: ignore[call-arg]


def test_counts_of_libraries_are_counts_and_a_wrong_one_begins_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    crew = motley.Crew([ANN], task="digits", settings={"task": {"kinds": ["sort"]}}, rounds=1)
    with pytest.raises(ValueError, match="problems=1 and samples=8 measure nothing"):
        crew.evaluate(problems=1)
    assert not (tmp_path / "runs").exists()
    table = crew.evaluate(problems=np.int64(2), samples=np.int64(1))  # type: ignore[arg-type]
    assert table.rows
    crew.train(progress=False)
    some = crew.run.rollouts(rounds=np.array([1, 1]), rewards=(0, np.float32(1)))
    assert some.rows
    assert some.rows == crew.run.rollouts(rounds=(np.int64(1), 1)).rows
    with pytest.raises(ValueError, match=r"rounds=\[1\]; expected the least and the most"):
        crew.run.rollouts(rounds=(1,))


def test_a_task_object_and_settings_of_scoring_are_taken() -> None:
    task = load_task("digits", {})
    assert motley.Crew([ANN], task=task).task is task
    crew = motley.Crew([ANN], DATA, settings={"task": {"form": "boxed"}})
    assert crew._config_in(None).task["form"] == "boxed"


def test_a_place_that_is_none_is_refused_in_words(tmp_path: Path) -> None:
    crew = motley.Crew([ANN], DATA)
    with pytest.raises(ValueError, match="the run folder is 5; expected the path"):
        crew.train(5)  # type: ignore[arg-type]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes.txt is a file; expected the folder of a run"):
        crew.train(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match="the run folder is a Crew; expected the path"):
        motley.Run(crew)  # type: ignore[arg-type]
    for of_file in (motley.Crew.read, crew.write):
        with pytest.raises(ValueError, match="the crew file is 5; expected the path"):
            of_file(5)  # type: ignore[operator]
