"""A crew made of Python objects is the crew of a file."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

import motley
from motley.api.recipe import USUAL
from motley.models.tiny import tiny_model, tiny_vocabulary
from motley.runs.metrics import read_metrics

pytestmark = pytest.mark.slow

DATA = [
    {"prompt": f"sort {n:02d}=", "answer": "".join(sorted(f"{n:02d}")), "note": n}
    for n in range(100)
]


class Scale:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def score(self, completions: list[str]) -> list[float]:
        return [self.scale] * len(completions)

    __call__ = score


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def small(**changes: Any) -> motley.Crew:
    given: dict[str, Any] = {
        "peers": [motley.Peer("tiny:0.3m", name="ann"), motley.Peer("tiny:0.3m", name="ben")],
        "data": DATA,
        "rewards": right,
        "rounds": 2,
        "group_size": 2,
        "problems_per_round": 2,
        "max_tokens": 4,
        "settings": {"evaluate": {"problems": 4, "every": 1}},
    }
    return motley.Crew(**(given | changes))


def metrics(folder: Path) -> list[Any]:
    """All but the time it took."""
    from msgspec.structs import replace

    return [replace(line, timing=None) for line in read_metrics(folder)]


@pytest.mark.quick
def test_a_crew_trains_and_its_run_says_how(tmp_path: Path) -> None:
    run = small().train(tmp_path / "run", progress=False)
    assert run.peers == ["ann", "ben"]
    assert {line.round for line in run.lines()} == {0, 1, 2}
    assert set(run.summary().column("peer")) == {"ann", "ben"}
    curves = run.curves()
    assert {"round", "peer", "key", "value"} == set(curves.columns)
    assert "<svg" in curves._repr_html_()
    rollouts = run.rollouts(sender="ann")
    assert len(rollouts) == 2 * 1 * 2  # rounds, problems, rollouts
    assert {"prompt", "completion", "reward", "for ann", "for ben"} <= set(rollouts.columns)
    assert len(run.rollouts(grep="sort")) == 8
    with pytest.raises(TypeError, match=r"rollouts\(\) has no 'sendr'; did you mean sender"):
        run.rollouts(sendr="ann")
    with pytest.raises(ValueError, match="rounds=3; expected the least and the most"):
        run.rollouts(rounds=3)
    with pytest.raises(ValueError, match=r"grep='\(' .*; expected a regular expression"):
        run.rollouts(grep="(")
    with pytest.raises(ValueError, match="problems='4' and samples=2 measure nothing"):
        run.evaluate(problems="4", samples=2)  # type: ignore[arg-type]
    table = run.evaluate(problems=4, samples=2)
    assert [row["peer"] for row in table] == ["ann", "ben"]
    assert all(0 <= row["greedy"] <= 1 for row in table)


def test_a_loop_of_ones_own_sees_every_round(tmp_path: Path) -> None:
    crew = small()
    seen = [(r.number, set(r.rewards), r["ann"].version) for r in crew.rounds(tmp_path / "run")]
    assert seen == [(1, {"ann", "ben"}, 1), (2, {"ann", "ben"}, 2)]
    assert set(crew.run.lines()[-1].heldout or {}) == {"all"}


def test_who_leaves_the_loop_goes_on_where_it_was(tmp_path: Path) -> None:
    small().train(tmp_path / "whole", progress=False)
    for _ in small().rounds(tmp_path / "run"):
        break
    small().train(tmp_path / "run", progress=False)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_loop_that_another_crew_has_overtaken_is_left_in_peace(tmp_path: Path) -> None:
    left = small().rounds(tmp_path / "run")
    next(left)
    small().train(tmp_path / "run", progress=False)
    before = metrics(tmp_path / "run")
    left.close()
    assert metrics(tmp_path / "run") == before
    overtaken = small().rounds(tmp_path / "other")
    next(overtaken)
    small().train(tmp_path / "other", progress=False)
    with pytest.raises(ValueError, match="another crew or process has gone on with"):
        list(overtaken)


def test_the_same_crew_goes_on_in_the_same_object(tmp_path: Path) -> None:
    crew = small()
    next(iter(crew.rounds(tmp_path / "run")))
    run = crew.train(progress=False)
    small().train(tmp_path / "whole", progress=False)
    assert metrics(run.folder) == metrics(tmp_path / "whole")


def test_the_crew_file_it_writes_trains_the_same(tmp_path: Path) -> None:
    path = small(rewards=None).write(tmp_path / "crew.toml")
    motley.Crew.read(path).train(tmp_path / "read", progress=False)
    small(rewards=None).train(tmp_path / "made", progress=False)
    assert metrics(tmp_path / "read") == metrics(tmp_path / "made")


def test_a_crew_with_a_lambda_trains_and_is_not_written(tmp_path: Path) -> None:
    crew = small(rewards=lambda completions, **_: [float(len(c)) for c in completions])
    crew.train(tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match="cannot be written to a file"):
        crew.write(tmp_path / "crew.toml")


def test_other_data_in_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    small(rounds=1).train(tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"holds other data than this crew has"):
        small(rounds=1, data=DATA[:50]).train(tmp_path / "run", progress=False)


def test_other_settings_in_the_folder_of_a_run_are_refused(tmp_path: Path) -> None:
    small(rounds=1).train(tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"holds a run of other settings"):
        small(rounds=1, group_size=4).train(tmp_path / "run", progress=False)


def test_a_model_object_is_where_training_begins_and_is_not_changed(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("0.3m", seed=3), tiny_vocabulary().tokenizer
    before = {name: p.clone() for name, p in model.named_parameters()}
    peers = [motley.Peer(model, tokenizer=tokenizer, name="mine"), motley.Peer("tiny:0.3m")]
    length = lambda completions: [len(c) for c in completions]
    run = small(peers=peers, rewards=length).train(tmp_path / "run", progress=False)
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    trained, same = run.model("mine")
    assert isinstance(trained, LlamaForCausalLM)
    assert same.get_vocab() == tokenizer.get_vocab()
    assert not all(p.equal(before[name]) for name, p in trained.named_parameters())


def test_an_exported_model_loads_in_plain_transformers(tmp_path: Path) -> None:
    run = small().train(tmp_path / "run", progress=False)
    out = run.export("ann", tmp_path / "ann")
    assert LlamaForCausalLM.from_pretrained(out).config.vocab_size > 0
    with pytest.raises(ValueError, match=r"no peer 'carl' that learns; it has ann, ben"):
        run.export("carl", tmp_path / "carl")


def test_evaluating_before_training_measures_the_start(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    crew = small()
    before = crew.evaluate(problems=8, samples=1)
    assert [row["peer"] for row in before] == ["ann", "ben"]
    assert crew.run.folder == Path("runs/crew-001")
    crew.train(progress=False)
    assert {line.round for line in crew.run.lines()} == {0, 1, 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": []}, "a crew needs peers; give at least one"),
        ({"data": None, "rewards": None}, "either data, as rows"),
        ({"task": "digits"}, "got both"),
        ({"data": None, "task": "digits"}, "rewards, reward_weights, heldout, ood and fields are"),
        ({"settings": {"sampling": {"temperature": 0.5}}, "temperature": 0.7}, "said twice"),
        ({"settings": {"lerning": {}}}, "did you mean learning"),
        ({"settings": {"learning": 3}}, "settings has learning=3; expected a table"),
        ({"settings": {"peer": [{"name": "x"}]}}, "given by itself"),
        ({"rewards": 3}, "rewards is a int; expected a function"),
        ({"rounds": 0}, "rounds=0 trains nothing"),
        ({"peers": ["tiny:0.3m"], "objective": "uplift/relativ"}, "relativ"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        small(**changes).train(tmp_path / "run", progress=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.quick
def test_settings_say_otherwise_than_what_is_usual(tmp_path: Path) -> None:
    crew = small(settings={"crew": {"seed": 3}, "sampling": {"temperature": 0.7}})
    config = crew._config_in(None)
    assert (config.crew.seed, config.sampling.temperature) == (3, 0.7)


@pytest.mark.quick
def test_what_is_usual_is_what_the_signature_says() -> None:
    said = inspect.signature(motley.Crew.__init__).parameters
    assert {key: said[key].default for key in USUAL} == USUAL


def test_after_a_failure_the_same_crew_goes_on_in_its_folder(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = 0

    def failing(completions: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("the judge is away")
        return [float(len(c)) for c in completions]

    crew = small(rewards=failing)
    with pytest.raises(ValueError, match="the judge is away"):
        crew.train(progress=False)
    assert crew.train(progress=False).folder == Path("runs/crew-001")
    assert {line.round for line in crew.run.lines()} == {0, 1, 2}


def test_one_peer_needs_no_list(tmp_path: Path) -> None:
    for peer in ("tiny:0.3m", motley.Peer("tiny:0.3m")):
        assert [p.model for p in small(peers=peer)._config_in(None).peer] == ["tiny:0.3m"]


def test_rows_of_a_generator_are_read_once(tmp_path: Path) -> None:
    run = small(data=(row for row in DATA), rounds=1).train(tmp_path / "run", progress=False)
    assert len((run.folder / "data" / "train.jsonl").read_text().splitlines()) == len(DATA)


@pytest.mark.parametrize(
    "reward", [functools.partial(right, scale=5.0), Scale(2.0).score, Scale(2.0), lambda **_: []]
)
def test_a_reward_that_is_more_than_its_name_is_not_written(reward: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written to a file"):
        small(rewards=reward).write(tmp_path / "crew.toml")
    assert list(tmp_path.iterdir()) == []


def test_a_crew_is_written_to_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    crew = motley.Crew("tiny:0.3m", task="digits")
    assert motley.Crew.read(crew.write(tmp_path / "new" / "crew.toml")).name == crew.name


def test_a_written_crew_can_be_moved(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    model, tokenizer = tiny_model("0.3m", seed=3), tiny_vocabulary().tokenizer
    peers = [motley.Peer(model, tokenizer=tokenizer, name="mine"), motley.Peer("tiny:0.3m")]
    small(rewards=None, peers=peers).write(tmp_path / "one" / "crew")
    (tmp_path / "one").rename(tmp_path / "two")
    crew = motley.Crew.read(tmp_path / "two" / "crew")
    assert crew.train(tmp_path / "run", progress=False).peers == ["mine", "0-3m"]


@pytest.mark.parametrize("place", ["./models/mine", "../work/models/mine"])
def test_a_model_given_by_a_relative_path_is_found_from_the_run(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work" / "models" / "mine"
    tiny_model("0.3m", seed=3).save_pretrained(folder)
    tiny_vocabulary().tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path / "work")
    crew = small(rewards=None, peers=[motley.Peer(place, name="mine", train="lora")], rounds=1)
    path = crew.write("sub/crew.toml").resolve()
    run = motley.Run(crew.train("run", progress=False).folder.resolve())
    monkeypatch.chdir(tmp_path)
    assert run.model("mine")[0].config.vocab_size > 0
    assert len(run.evaluate(problems=2, samples=1)) == 1
    assert Path(motley.Crew.read(path)._config_in(None).peer[0].model).samefile(folder)


def test_an_adapter_of_a_model_object_takes_its_base_along(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("0.3m", seed=3), tiny_vocabulary().tokenizer
    peer = motley.Peer(model, tokenizer=tokenizer, name="mine", train="lora")
    run = small(peers=[peer], rounds=1).train(tmp_path / "run", progress=False)
    out = run.export("mine", tmp_path / "out")
    assert (out / "base" / "config.json").exists()
    assert "/models/" not in (out / "adapter_config.json").read_text()


def test_a_model_with_adapters_is_refused_in_words(tmp_path: Path) -> None:
    adapted = get_peft_model(tiny_model("0.3m", 0), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="has adapters already; give its base"):
        small(peers=[motley.Peer(adapted, tokenizer=tiny_vocabulary().tokenizer)])


def test_a_run_of_a_program_names_the_remedy_elsewhere(tmp_path: Path) -> None:
    run = small(rewards=lambda completions: [0.0] * len(completions), rounds=1).train(
        tmp_path / "run", progress=False
    )
    opened = motley.Run(run.folder)
    assert opened.model("ann")[0].config.vocab_size > 0
    with pytest.raises(ValueError, match=r"go on from there with motley\.Crew"):
        opened.evaluate(problems=2, samples=1)
    assert len(motley.Run(run.folder, small().task).evaluate(problems=2, samples=1)) == 2


def test_a_task_by_name_and_one_peer(tmp_path: Path) -> None:
    crew = small(
        peers=["tiny:0.3m"],
        data=None,
        rewards=None,
        task="digits",
        max_tokens=8,
        settings={"task": {"kinds": ["sort"], "levels": [2]}, "evaluate": {"problems": 4}},
    )
    run = crew.train(tmp_path / "run", progress=False)
    assert run.config.crew.objective == "alone"
    assert run.peers == ["0-3m"]
