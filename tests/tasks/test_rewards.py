"""Reward functions of a user's own: how they are called, and what their answers mean."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hubs import PATIENCE_S
from motley.config import parse_config, read_config, with_files_in
from motley.records import Problem
from motley.tasks import RewardError, Task, load_task, own_task, rewards

ROWS = [{"prompt": f"say {n}", "answer": str(n), "level": n % 3} for n in range(30)]


def length(completions: list[str]) -> list[int]:
    return [len(text) for text in completions]


def level(prompts: list[str], completions: list[str], level: list[int]) -> list[float | None]:
    return [None if known == 0 else float(known) for known in level]


async def judge(prompts: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0.05)
    return [0.25] * len(prompts)


def problems(task: Task, count: int = 4) -> list[Problem]:
    rng = random.Random(0)
    return [task.draw(rng, "train", "all") for _ in range(count)]


def scored(*rewards: Callable[..., Any], texts: tuple[str, ...] = ("", "ab"), **more: Any) -> list:
    task = own_task(ROWS, rewards=rewards, **more)
    return task.score(problems(task, len(texts)), list(texts))


def test_a_function_gets_only_the_arguments_it_names() -> None:
    assert scored(length) == [0.0, 2.0]


def test_what_a_function_does_to_its_arguments_changes_no_problem() -> None:
    def spent(prompts: list[Any], cases: list[list[int]]) -> list[float]:
        for turns in prompts:
            turns.pop()
        return [float(case.pop()) for case in cases]

    def also(prompts: list[Any], cases: list[list[int]]) -> list[float]:
        return spent(prompts, cases)

    rows = [
        {"prompt": [{"role": "user", "content": f"count {n}"}], "cases": [n, n]}
        for n in range(1, 31)
    ]
    task = own_task(rows, rewards=[spent, also])
    (problem,) = problems(task, 1)
    id, first = problem.id, float(problem.columns["cases"][0])
    for _ in range(2):
        assert task.score([problem] * 3, ["a", "b", "c"]) == [2 * first] * 3
    assert problem.id == id


def test_rewards_are_summed_by_their_weights_and_none_is_left_out() -> None:
    task = own_task(ROWS, rewards=[length, level], weights=[1.0, 0.5])
    asked = problems(task, 8)
    expected = [1.0 + 0.5 * (p.columns["level"] or 0) for p in asked]
    assert task.score(asked, ["x"] * 8) == expected
    assert {p.columns["level"] for p in asked} == {0, 1, 2}


def test_where_no_function_applies_the_reward_is_zero() -> None:
    assert scored(lambda completions: [None, None]) == [0.0, 0.0]


@pytest.mark.parametrize(
    "returned",
    [
        [0, 1],
        (False, True),
        np.array([0.0, 1.0], dtype=np.float32),
        [np.float64(0), np.int64(1)],
        iter([0.0, 1.0]),
        (float(n) for n in range(2)),
        {0.0: "a", 1.0: "b"}.keys(),
    ],
)
def test_numbers_of_any_kind_are_rewards(returned: Any) -> None:
    rewards = scored(lambda completions: returned)
    assert rewards == [0.0, 1.0]
    assert {type(reward) for reward in rewards} == {float}


def test_a_tensor_is_rewards() -> None:
    torch = pytest.importorskip("torch")
    assert scored(lambda completions: torch.tensor([0.5, 1.0])) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([0.5], r"returned 1 rewards for 2 completions; expected one each"),
        (0.5, r"returned 0\.5; expected a list of 2 numbers"),
        (None, r"returned None; expected a list of 2 numbers"),
        ("ab", r"returned 'ab'; expected a list of 2"),
        ([1.0, float("nan")], r"returned nan; expected numbers, or None where it does not apply"),
        ([1.0, float("inf")], r"returned inf; expected numbers"),
        (["a", "b"], r"failed: ValueError: could not convert string to float"),
    ],
)
def test_an_answer_that_is_no_rewards_is_refused_with_the_functions_name(
    returned: Any, words: str
) -> None:
    def odd(completions: list[str]) -> Any:
        return returned

    with pytest.raises(RewardError, match=rf"reward tasks.test_rewards:.*odd {words}"):
        scored(odd)


def broken(completions: list[str]) -> list[float]:
    return [1 / len(text) for text in completions]


def test_what_a_function_raises_is_kept_with_its_traceback() -> None:
    with pytest.raises(RewardError, match="broken failed: ZeroDivisionError") as caught:
        scored(broken)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    details = caught.value.details
    assert "return [1 / len(text)" in details
    assert "tasks/rewards.py" not in details
    assert details.endswith("ZeroDivisionError: division by zero")


async def leaving(completions: list[str]) -> list[float]:
    sys.exit("no judge")


async def leaving_within(completions: list[str]) -> list[float]:
    await asyncio.create_task(leaving(completions))
    return []


def leaving_between(completions: list[str]) -> Iterator[float]:
    yield 1.0
    sys.exit("no judge")


@pytest.mark.parametrize(
    "reward",
    [
        pytest.param(lambda completions: sys.exit("no judge"), id="a function"),
        leaving_between,
        leaving,
        leaving_within,
    ],
)
def test_a_function_that_exits_has_failed_and_the_next_call_is_answered(
    reward: Callable[..., Any],
) -> None:
    for _ in range(2):
        with pytest.raises(RewardError, match="failed: SystemExit: no judge; expected f") as caught:
            scored(reward)
        assert "sys.exit" in caught.value.details
    assert scored(judge) == [0.25, 0.25]


def test_who_interrupts_a_function_interrupts_the_run() -> None:
    def interrupted(completions: list[str]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(interrupted)


def test_promises_of_several_functions_are_awaited_together() -> None:
    waiting: list[asyncio.Event] = []

    async def meet(completions: list[str]) -> list[float]:
        """Goes on when all ten wait."""
        waiting.append(asyncio.Event())
        if len(waiting) == 10:
            for event in waiting:
                event.set()
        await asyncio.wait_for(waiting[0].wait(), PATIENCE_S)
        return [0.25] * len(completions)

    functions = [lambda completions, i=i: meet(completions) for i in range(10)]
    assert scored(*functions) == [2.5, 2.5]


def test_threads_that_ask_at_once_have_one_loop() -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    meeting = threading.Barrier(8, timeout=PATIENCE_S)

    async def where(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    def ask() -> None:
        meeting.wait()
        scored(where)

    rewards._loop_of.cache_clear()  # as in a process that has just begun
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(loops) == 8
    assert len(set(loops)) == 1


def test_a_promise_is_kept_where_a_loop_is_running_already() -> None:
    async def notebook() -> list[float]:
        return scored(judge, length)

    assert asyncio.run(notebook()) == [0.25, 2.25]


def test_what_a_promise_raises_is_named_and_a_clients_loop_stays() -> None:
    loops = []

    async def client(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        raise TimeoutError("no judge")

    for _ in range(2):
        with pytest.raises(RewardError, match="client failed: TimeoutError: no judge"):
            scored(client)
    assert loops[0] is loops[1]


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda completions, soluton: [], r"asks for soluton, which no row has; .*answer, compl"),
        (lambda p, /: [], r"has arguments without names; expected f\(prompts, completions"),
        (3, r"a reward is int; expected f\(prompts"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_when_the_task_is_made(
    reward: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        own_task(ROWS, rewards=[reward])


def test_a_function_that_asks_for_answers_which_no_row_has_is_refused() -> None:
    rows = [{"prompt": f"{n}+1=", "solution": str(n + 1)} for n in range(20)]

    def right(completions: list[str], answer: list[str]) -> list[float]:
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    with pytest.raises(ValueError, match=r"asks for answer, which no row has; .*solution; name it"):
        own_task(rows, rewards=right)
    task = own_task(rows, rewards=right, fields={"answer": "solution"})
    problem = task.draw(random.Random(0), "train", "all")
    assert task.score([problem], [problem.answer]) == [1.0]
    own_task(rows, rewards=lambda completions, answer="": [0.0])  # which it need not have


def test_nothing_to_score_is_not_asked_for() -> None:
    def never(**given: Any) -> list[float]:
        raise AssertionError

    assert own_task(ROWS, rewards=never).score([], []) == []


@pytest.mark.parametrize(
    ("weights", "words"),
    [([1.0], "1 weights for 2 reward functions"), ([1.0, float("nan")], "level is nan; expected")],
)
def test_weights_must_fit(weights: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        own_task(ROWS, rewards=[length, level], weights=weights)


def test_the_fingerprint_depends_on_rows_functions_and_weights() -> None:
    made = [
        own_task(ROWS).fingerprint,
        own_task(ROWS[:-1]).fingerprint,
        own_task(ROWS, rewards=length).fingerprint,
        own_task(ROWS, rewards=level).fingerprint,
        own_task(ROWS, rewards=[length, level]).fingerprint,
        own_task(ROWS, rewards=[length, level], weights=[1.0, 0.5]).fingerprint,
    ]
    assert len(set(made)) == len(made)
    assert own_task(list(ROWS), rewards=length).fingerprint == made[2]


def test_what_functions_set_of_torch_is_put_back_behind_the_last_of_them() -> None:
    import torch

    first_is_in, second_is_in = threading.Event(), threading.Event()

    def first(completions: list[str]) -> list[float]:
        torch.set_default_dtype(torch.float64)
        first_is_in.set()
        assert second_is_in.wait(PATIENCE_S)
        return [0.0] * len(completions)

    def second(completions: list[str]) -> list[float]:
        torch.set_grad_enabled(False)
        second_is_in.set()
        thread.join(PATIENCE_S)
        return [0.0] * len(completions)

    thread = threading.Thread(target=scored, args=(first,))
    thread.start()
    assert first_is_in.wait(PATIENCE_S)
    scored(second)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


# Crew files


def crew(folder: Path, reward: str, body: str) -> Path:
    folder.mkdir()
    (folder / "marks.py").write_text(body)
    lines = "".join(f'{{"prompt": "say {n}", "answer": "{n}"}}\n' for n in range(30))
    (folder / "p.jsonl").write_text(lines)
    (folder / "crew.toml").write_text(
        '[crew]\nname = "c"\ntask = "file:p.jsonl"\nobjective = "grpo"\nrounds = 1\n'
        f"group_size = 2\nproblems_per_round = 1\n[task]\nreward = {reward}\n"
        '[[peer]]\nname = "a"\nmodel = "tiny:0.3m"\n'
    )
    return folder / "crew.toml"


def task_of(path: Path) -> Task:
    config = read_config(path)
    return load_task(config.crew.task, config.task)


BY_HELPER = "from helper import VALUE\ndef f(completions):\n    return [VALUE] * len(completions)\n"


def test_reward_modules_are_found_beside_the_crew_file_and_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "marks.py").write_text("def f(completions):\n    return [9] * len(completions)\n")
    monkeypatch.chdir(elsewhere)
    tasks = []
    for number in (1, 2):
        path = crew(tmp_path / f"crew{number}", '"marks:f"', BY_HELPER)
        (path.parent / "helper.py").write_text(f"VALUE = {number}\n")
        tasks.append(task_of(path))
    assert [task.score(problems(task, 1), ["x"]) for task in tasks] == [[1.0], [2.0]]
    assert tasks[0].fingerprint == tasks[1].fingerprint


def test_a_module_of_anybodys_with_the_same_name_is_neither_taken_nor_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "marks.py").write_text("f = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "marks", raising=False)
    before = importlib.import_module("marks")
    body = "def f(completions):\n    return [4] * len(completions)\n"
    task = task_of(crew(tmp_path / "crew", '"marks:f"', body))
    assert task.score(problems(task, 1), ["x"]) == [4.0]
    assert sys.modules["marks"] is before


def test_a_module_that_was_changed_is_imported_again_and_otherwise_once(tmp_path: Path) -> None:
    path = crew(tmp_path / "crew", '"marks:f"', "def f(completions):\n    return [1]\n")
    first, again = task_of(path), task_of(path)
    of = lambda task: task._rewards.functions[0].function
    assert of(first) is of(again)
    (path.parent / "marks.py").write_text("def f(completions):\n    return [1, 2, 3]\n")
    assert of(task_of(path))([]) == [1, 2, 3]


def test_a_module_named_like_one_of_pythons_is_refused(tmp_path: Path) -> None:
    path = crew(tmp_path / "crew", '"random:f"', "")
    (path.parent / "random.py").write_text("def f(completions):\n    return []\n")
    with pytest.raises(ValueError, match="Python has a module random itself; rename yours"):
        task_of(path)


def test_several_rewards_of_a_crew_file_have_weights(tmp_path: Path) -> None:
    body = "def f(completions):\n    return [1] * len(completions)\ndef g(completions, answer):\n"
    path = crew(
        tmp_path / "crew",
        '["marks:f", "marks.py:g"]\nreward_weights = [0.5, 2]',
        body + "    return [float(c == a) for c, a in zip(completions, answer)]\n",
    )
    task = task_of(path)
    (problem,) = problems(task, 1)
    assert task.score([problem] * 2, [problem.answer, "?"]) == [2.5, 0.5]


def test_a_module_that_fails_on_import_shows_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"importing marks failed: ZeroDivisionError") as caught:
        task_of(crew(tmp_path / "crew", '"marks:f"', "x = 1\ny = x / 0\n"))
    assert "y = x / 0" in caught.value.details


def test_what_a_module_sets_of_torch_holds_for_itself_only(tmp_path: Path) -> None:
    import torch

    body = (
        "import torch\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)\n"
        "def f(completions):\n    return [0] * len(completions)\n"
    )
    task_of(crew(tmp_path / "crew", '"marks:f"', body))
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_a_module_that_exits_on_import_has_failed(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"importing marks failed: SystemExit: 3") as caught:
        task_of(crew(tmp_path / "crew", '"marks:f"', "import sys\nsys.exit(3)\n"))
    assert "sys.exit(3)" in caught.value.details


@pytest.mark.parametrize("spec", ['"marks"', '":f"', '"marks:"'])
def test_a_spec_that_names_no_function_is_refused(spec: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no function; write it as module:function"):
        task_of(crew(tmp_path / "crew", spec, ""))


def test_a_module_that_needs_a_package_says_which(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="marks needs No module named 'no_such_package'; install"):
        task_of(crew(tmp_path / "crew", '"marks:f"', "import no_such_package\n"))


def test_another_machines_folder_of_a_module_is_not_taken(tmp_path: Path) -> None:
    path = crew(tmp_path / "crew", '["marks:f", "json:dumps"]', BY_HELPER)
    config = read_config(path)
    assert config.task["reward"] == [f"{path.parent}/marks:f", "json:dumps"]
    assert with_files_in(config, None).task["reward"] == ["marks:f", "json:dumps"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "marks.py").write_text("")
    assert with_files_in(config, mine).task["reward"] == [f"{mine}/marks:f", "json:dumps"]
    assert parse_config(path.read_text()).task["reward"] == ["marks:f", "json:dumps"]


def test_problems_are_known_without_importing_the_rewards(tmp_path: Path) -> None:
    path = crew(tmp_path / "crew", '["marks:f"]', "raise SystemExit('imported')\n")
    config = read_config(path)
    task = load_task(config.crew.task, config.task, scores=False)
    (path.parent / "marks.py").write_text("def f(completions):\n    return []\n")
    assert task.fingerprint == task_of(path).fingerprint
