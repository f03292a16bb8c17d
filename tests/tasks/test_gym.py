from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest

from motley.records import Problem
from motley.tasks import Task, check_task, load_task
from motley.tasks.gym import UNSTEADY
from motley.tasks.harmless import is_harmless

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SAMPLE = [
    "chain_sum",
    "basic_arithmetic",
    "gcd",
    "products",
    "word_sorting",
    "number_sequence",
    "base_conversion",
    "letter_counting",
    "spell_backward",
    "fraction_simplification",
    "calendar_arithmetic",
    "needle_haystack",
    "propositional_logic",
    "bitwise_arithmetic",
    "countdown",
]


def gym(name: str, **parameters: object) -> Task:
    return load_task(f"reasoning_gym:{name}", parameters)


def draws(task: Task, split: str, count: int, seed: int = 0) -> list[Problem]:
    rng = random.Random(seed)
    return [task.draw(rng, split, task.kinds_of(split)[0]) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_datasets_pass_the_task_check(name: str) -> None:
    task = gym(name)
    assert task.kinds == (name,)
    assert check_task(task, 6) == []


@pytest.mark.slow
def test_answers_of_several_lines_need_a_form_that_has_room() -> None:
    assert check_task(gym("binary_matrix", form="tags"), 6) == []
    with pytest.raises(
        ValueError,
        match=(
            'form="line" of reasoning_gym:binary_matrix: its answers span several lines; use form '
            '= "text" or "tags"'
        ),
    ):
        gym("binary_matrix")


def test_a_problem_is_its_question_its_answer_and_an_index() -> None:
    problem = draws(gym("chain_sum", **SMALL), "train", 1)[0]
    assert problem.kind == "chain_sum"
    assert list(problem.columns) == ["index"]
    expression = problem.prompt.split(": ")[1].removesuffix(" =")
    assert int(problem.answer) == sum(
        int(term) for term in expression.replace("- ", "-").replace("+ ", "").split()
    )


def test_no_seed_trains_on_a_heldout_question_however_few_there_are() -> None:
    task = gym("chain_sum", **SMALL)
    train, heldout = ({p.prompt for p in draws(task, split, 600)} for split in ("train", "heldout"))
    assert train & heldout == set()
    assert len(train) > 100
    assert len(heldout) > 10


def test_the_same_seed_gives_the_same_problems_in_another_task() -> None:
    assert (
        draws(gym("gcd"), "train", 10, seed=3)
        == draws(gym("gcd"), "train", 10, seed=3)
        != draws(gym("gcd"), "train", 10, seed=4)
    )


def test_out_of_distribution_has_its_own_parameters_and_scores_by_them() -> None:
    task = gym("chain_sum", **SMALL, ood={"min_digits": 3, "max_digits": 3})
    assert task.splits == ("train", "heldout", "ood")
    assert gym("chain_sum", **SMALL).splits == ("train", "heldout")
    far = draws(task, "ood", 5)
    assert all(len(p.prompt) > len(draws(task, "train", 1)[0].prompt) for p in far)
    assert task.score(far, [p.answer for p in far]) == [1.0] * 5
    assert check_task(task) == []


def test_only_a_full_score_counts_unless_partial_ones_are_asked_for() -> None:
    problem = draws(gym("chain_sum", **SMALL), "train", 1)[0]
    nearly = f"it is {problem.answer}"
    assert gym("chain_sum", **SMALL).score([problem] * 3, [problem.answer, nearly, ""]) == [
        1.0,
        0.0,
        0.0,
    ]
    full, part, none = gym("chain_sum", **SMALL, partial=True).score(
        [problem] * 3, [problem.answer, nearly, ""]
    )
    assert (full, none) == (1.0, 0.0)
    assert 0 < part < 1


def test_the_form_is_asked_for_and_kept() -> None:
    task = gym("chain_sum", form="tags")
    problem = draws(task, "train", 1)[0]
    assert task.target(problem) == f"<think></think><answer>{problem.answer}</answer>"
    assert task.score([problem] * 2, [task.target(problem), problem.answer]) == [1.0, 0.0]
    assert "<think>" in task.instruction
    assert task.template == "Question: {prompt}\nAnswer: {answer}"


def test_a_problem_without_one_answer_has_no_target() -> None:
    problem = draws(gym("propositional_logic"), "train", 1)[0]
    assert problem.answer == ""
    with pytest.raises(ValueError, match="propositional_logic: reasoning-gym gives no answer to"):
        gym("propositional_logic").target(problem)


def test_the_fingerprint_names_version_dataset_and_parameters() -> None:
    made = {
        gym("gcd").fingerprint,
        gym("lcm").fingerprint,
        gym("gcd", max_value=50).fingerprint,
        gym("gcd", partial=True).fingerprint,
    }
    assert len(made) == 4
    assert gym("gcd").fingerprint == gym("gcd").fingerprint
    assert "0.1." in gym("gcd").fingerprint


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("chain_sums", {}, "no dataset 'chain_sums'; did you mean chain_sum"),
        ("zzzz", {}, "no dataset 'zzzz'; known: ab, acre"),
        ("composite", {}, 'not for crews: use task = "mixture"'),
        ("list_functions", {}, "not for crews: it makes some problems by chance"),
        (
            "chain_sum",
            {"terms": 3},
            "unknown parameter 'terms'; known: form, partial, ood, min_terms, max_terms",
        ),
        (
            "chain_sum",
            {"min_terms": 5, "max_terms": 2},
            "max_terms must be >= min_terms; known: form, partial, ood, min_terms",
        ),
        ("chain_sum", {"min_terms": "2"}, "not supported between.*; known: form"),
        ("chain_sum", {"ood": {"min_terms": 0}}, "min_terms must be positive"),
        ("chain_sum", {"form": "loud"}, "'loud'.*known: form, partial, ood"),
    ],
)
def test_bad_names_and_parameters_are_refused(
    name: str, parameters: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        gym(name, **parameters)


def test_parameters_that_allow_too_few_questions_are_refused() -> None:
    task = gym("gcd", min_numbers=2, max_numbers=2, min_value=1, max_value=2)
    with pytest.raises(
        ValueError,
        match=r"gcd has no heldout problem among 10000 draws: .* too few questions; widen them",
    ):
        draws(task, "heldout", 1)


def test_another_question_of_the_same_index_is_refused() -> None:
    problem = draws(gym("gcd"), "train", 1)[0]
    with pytest.raises(
        ValueError, match=r"another question of index .* here; use the same version and parameters"
    ):
        gym("gcd", min_value=500, max_value=900).score([problem], ["1"])


def test_datasets_that_differ_between_processes_need_a_fixed_hash_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name in UNSTEADY:
        with pytest.raises(
            ValueError, match=f"{name} makes other problems in every process; set PYTHONHASHSEED=0"
        ):
            gym(name)


@pytest.mark.slow
def test_every_process_makes_the_same_problems() -> None:
    code = (
        "import json, random\nfrom motley.tasks import load_task\n"
        f"names = {[name for name in SAMPLE if name != 'countdown']!r}\n"
        "tasks = [load_task(f'reasoning_gym:{name}', {}) for name in names]\n"
        "print(json.dumps([t.draw(random.Random(i), 'train', t.kinds[0]).id for t in tasks for i "
        "in range(3)]))"
    )
    ids = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                check=True,
                env=os.environ | {"PYTHONHASHSEED": seed},
            ).stdout
        )
        for seed in ("1", "2")
    ]
    assert ids[0] == ids[1]


PROGRAM = "__import__('pathlib').Path({path!r}).touch()"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("binary_matrix", {"form": "text"}),
        ("string_insertion", {}),
        ("countdown", {}),
        ("simple_integration", {}),
    ],
)
def test_an_answer_that_is_a_program_is_not_run(
    name: str, parameters: dict[str, str], tmp_path: object
) -> None:
    task = gym(name, **parameters)
    problem = draws(task, "train", 1)[0]
    trace = f"{tmp_path}/ran"
    assert task.score([problem], [PROGRAM.format(path=trace)]) == [0.0]
    assert not os.path.exists(trace)


@pytest.mark.slow
def test_an_answer_that_cannot_be_simplified_holds_nobody_up() -> None:
    task = gym("simple_integration")
    problem = draws(task, "train", 1)[0]
    hard = "tan(x+1)**63*tan(x+2)**61/(tan(x+3)**59+tan(x)**64)"
    assert task.score([problem] * 2, [hard, problem.answer]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "evaluated", "harmless"),
    [
        ("[[0, 1], [-1, 0]]", "python", True),
        ("['a', 'b']", "python", True),
        ("0x1e23456", "python", True),
        ("plain words (P → Q)", "python", True),
        ("[0] * 9", "python", False),
        ("open('x')", "python", False),
        ("().__class__", "python", False),
        ("[x for x in 'ab']", "python", False),
        ("-" * 4000 + "1", "python", False),
        ("3*x**2/2 + sin(2*x) - C", "sympy", True),
        ("(50 - 3)*4/2", "sympy", True),
        ("x**(1/2)", "sympy", True),
        ("9**9**9", "sympy", False),
        ("(9**9)**9", "sympy", False),
        ("9**999", "sympy", False),
        ("factorial(9999)", "sympy", False),
        ("99999!", "sympy", False),
        ("x.__class__", "sympy", False),
        ("S('x')", "sympy", False),
        ("1e999999999", "nothing", False),
        (".5E-99999", "nothing", False),
        ("anything (else)", "nothing", True),
    ],
)
def test_only_text_that_can_do_nothing_is_evaluated(
    answer: str, evaluated: str, harmless: bool
) -> None:
    assert is_harmless(answer, evaluated) == harmless
