from __future__ import annotations

import importlib.util
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from motley.tasks import decided, load_task, sandbox
from motley.tasks.answers import INSTRUCTIONS, Form, find_answer, math_reward, wrap
from motley.tasks.sandbox import BUDGET, PARSER_BUDGET, WALL_S, Reply, call


@pytest.mark.parametrize(
    ("completion", "form", "answer"),
    [
        ("\n\n  42 \nQuestion: next", "line", "42"),
        (" \n ", "line", None),
        ("<think>a</think><answer> 4 </answer>", "tags", "4"),
        (" \n<think>a\nb</think>\n<answer>4</answer>\n", "tags", "4"),
        ("<think></think><answer></answer>", "tags", ""),
        ("so <think>a</think><answer>4</answer>", "tags", None),
        ("<think>a</think><answer>4</answer>.", "tags", None),
        ("<think>a</think> then <answer>4</answer>", "tags", None),
        ("<answer>4</answer>", "tags", None),
        ("<answer>4</answer><think>a</think>", "tags", None),
        ("<think>a</think><answer>4</answer><answer>5</answer>", "tags", None),
        ("<think>a <answer> </think><answer>4</answer>", "tags", None),
        ("<think>a</think><answer>4", "tags", None),
        ("\\boxed{1} so \\boxed{\\frac{1}{2}}.", "boxed", "\\frac{1}{2}"),
        ("\\boxed{1} so \\boxed{2", "boxed", "1"),
        ("\\boxed{1 + \\boxed{2} + 3}", "boxed", "2"),
        ("} \\boxed{1} {\\boxed{2} } \\boxed", "boxed", "2"),
        ("the answer is 4", "boxed", None),
        ("  a\nb ", "text", "a\nb"),
        ("", "text", ""),
    ],
)
def test_an_answer_is_found_only_in_its_form(
    completion: str, form: Form, answer: str | None
) -> None:
    assert find_answer(completion, form) == answer


def test_boxes_opened_in_each_other_without_end_cost_a_look_at_each_character() -> None:
    completion = "\\boxed{" * 100_000  # what looks from each box to the end is at it for days

    assert find_answer(completion + "4}", "boxed") == "4"
    assert find_answer(completion, "boxed") is None


@pytest.mark.parametrize("form", ["line", "tags", "boxed", "text"])
def test_what_is_wrapped_is_found_again(form: Form) -> None:
    assert find_answer(wrap("\\frac{1}{2}", form, reasoning="half of 1"), form) == "\\frac{1}{2}"
    assert find_answer(wrap("4", form), form) == "4"


def test_reasoning_stands_where_the_form_has_room() -> None:
    assert wrap("4", "tags", "2+2") == "<think>2+2</think><answer>4</answer>"
    assert wrap("4", "boxed", "2+2") == "2+2\n\\boxed{4}"
    assert wrap("4", "line", "2+2") == wrap("4", "text", "2+2") == "4"


def test_only_forms_that_must_be_asked_for_have_instructions() -> None:
    assert (INSTRUCTIONS["line"], INSTRUCTIONS["text"]) == ("", "")
    assert all(
        tag in INSTRUCTIONS["tags"] for tag in ("<think>", "</think>", "<answer>", "</answer>")
    )
    assert "\\boxed{}" in INSTRUCTIONS["boxed"]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("1,234.00", "1234"),
        ("\\$18", "18"),
        ("$18$", "18"),
        ("50\\%", "50"),
        ("+7.", "7"),
        ("\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("\\left( 3, \\pi \\right)", "(3,\\pi)"),
        ("\\text{Evelyn}", "Evelyn"),
        ("1/2", "0.5"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("2**3", "8"),
        ("x=5", "5"),
        ("\\sin(\\frac{\\pi}{6})", "0.5"),
        ("e^{2}", "7.38905609893065"),
        ("\\sum_{n=1}^{3} \\frac{1}{n}", "\\frac{11}{6}"),
        ("\\prod_{k=1}^{4} k", "24"),
        ("\\int_0^1 x^{2.5} dx", "\\frac{2}{7}"),
        ("\\sqrt[3]{27}", "3"),
        ("2^{100}", "1267650600228229401496703205376"),
    ],
)
def test_equal_mathematics_is_equal(answer: str, gold: str) -> None:
    assert math_reward(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("", "5"),
        ("5", "6"),
        ("0.3333", "1/3"),
        ("71, 72", "72"),
        ("I think 72", "72"),
        ("1" * 300, "1" * 300),
        ("(1,2)", "[1,2]"),
    ],
)
def test_other_mathematics_is_not(answer: str, gold: str) -> None:
    assert not math_reward(answer, gold)


HOSTILE = [
    "9**9**9**9",
    "10^{10^{10}}",
    "99999999!",
    "9!!!!!!!!",
    "1e999999999",
    "((9^{999})^{999})^{999}",  # from here on it is left to the limits of the process
    "\\binom{10^9}{5^9}",
    "\\sin(((9.5^{9999})^{9999})^{999})",
    "\\sin(\\exp(\\exp(99.5)))",
    "\\sin(\\pi^{\\pi^{\\pi^{\\pi}}})",
    "\\sqrt{9^{9999}+1}",
    "(\\sqrt{2}+\\sqrt{3}+\\sqrt{5}+\\sqrt{7})^{999}",
    "{" * 250,
    "\\frac{" * 40,
    "\ud800\0",
]


@pytest.mark.slow
def test_hostile_answers_hold_nobody_up_in_any_thread() -> None:
    verdicts: list[bool] = []

    def judge() -> None:
        verdicts.extend(math_reward(answer, "x+1") for answer in HOSTILE)
        verdicts.append(math_reward("1+x", "x+1"))

    thread = threading.Thread(target=judge, daemon=True)
    thread.start()
    thread.join(timeout=len(HOSTILE) * WALL_S)
    assert not thread.is_alive(), f"held up after {len(verdicts)} answers"
    assert verdicts == [False] * len(HOSTILE) + [True]


def test_towers_are_refused_without_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []

    def call(name: str, answer: str, gold: str) -> Reply:
        computed.append(answer)
        return Reply("failed")

    monkeypatch.setattr(sandbox, "call", call)
    assert not any(math_reward(answer, "gold") for answer in HOSTILE)
    assert computed == [*HOSTILE[5:12], HOSTILE[-1]]


def test_a_call_that_fails_leaves_the_process_working() -> None:
    assert call("motley.tasks.answers:no_such_function", "a") == Reply("failed")
    assert call("motley.tasks.answers:verify", "1/2", "0.5") == Reply("value", True)


WORK = """
import os
from pathlib import Path

def calls(number):
    def one(): pass
    def work():
        for _ in range(number): one()
        return number
    return work

def once(path):
    \"\"\"Ends the first process that tries.\"\"\"
    def work():
        if not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), 9)
        return "later"
    return work

def never():
    return lambda: os.kill(os.getpid(), 9)

def raises():
    return lambda: 1 / 0
"""


@pytest.fixture
def caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sandbox._Caller]:
    (tmp_path / "work.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    caller = sandbox._Caller()
    yield caller
    caller.stop()


@pytest.mark.slow
def test_what_goes_beyond_the_budget_of_work_fails_and_does_so_again(
    caller: sandbox._Caller,
) -> None:
    for number in (BUDGET // 100, BUDGET - 10):
        assert caller.call(["work:calls", number]) == Reply("value", number)
    for _ in range(2):
        assert caller.call(["work:calls", 20 * BUDGET]) == Reply("failed")
    assert caller.call(["work:raises"]) == Reply("failed")


@pytest.mark.slow
def test_what_a_parser_does_has_a_budget_of_its_own(
    caller: sandbox._Caller, tmp_path: Path
) -> None:
    (tmp_path / f"{sandbox.LEARNS}.py").write_text(WORK)
    most = PARSER_BUDGET - 10
    assert caller.call([f"{sandbox.LEARNS}:calls", most]) == Reply("value", most)
    assert caller.call([f"{sandbox.LEARNS}:calls", 20 * PARSER_BUDGET]) == Reply("failed")


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["|a|b" * 60, "(" * 11 + "a" + ")" * 11 + "b", "\\sin " * 40])
def test_an_answer_that_is_hard_to_parse_is_wrong_on_every_machine(answer: str) -> None:
    assert math_reward(answer, "x+1") == 0.0


def test_what_ends_the_worker_is_asked_again_and_what_ends_both_is_undecided(
    caller: sandbox._Caller, tmp_path: Path
) -> None:
    assert caller.call(["work:once", str(tmp_path / "tried")]) == Reply("value", "later")
    assert caller.call(["work:never"]) == Reply("undecided")
    assert caller.call(["work:calls", 1]) == Reply("value", 1)


def test_what_could_not_be_found_out_is_no_number_and_counts_as_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "call", lambda *question: Reply("undecided"))
    reward = math_reward("x+2", "x+one")
    assert math.isnan(reward)
    assert decided([1.0, reward, 0.5]) == [1.0, 0.0, 0.5]


def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for spec, parameters in (
        ("gsm8k", {}),
        ("file:x.jsonl", {"equal": "math"}),
        ("reasoning_gym:gcd", {}),
    ):
        with pytest.raises(
            ValueError,
            match=(
                r"needs the package \w+, which is not installed; pip install 'motley-rl\[tasks\]'"
            ),
        ):
            load_task(spec, parameters)
