from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from motley.records import Problem
from motley.tasks import Task, check_task, load_task, own_task


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def numbers(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"say {n}", "answer": str(n), **fields} for n in range(count)]


def all_of(task: Task, split: str, kind: str = "all") -> set[str]:
    rng = random.Random(0)
    return {task.draw(rng, split, kind).prompt for _ in range(2000)}


def test_kinds_and_columns_come_from_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        numbers(40, kind="easy", level=1)
        + [{"prompt": f"hard {n}", "answer": "x", "kind": "hard"} for n in range(40)],
    )
    task = load_task(f"file:{path}", {})
    assert task.kinds == ("easy", "hard")
    problem = task.draw(random.Random(0), "train", "easy")
    assert problem.columns == {"level": 1}
    assert problem.prompt == f"say {problem.answer}"
    assert task.draw(random.Random(0), "train", "hard").answer == "x"


def test_one_problem_in_ten_or_so_is_held_out_and_never_trained_on(tmp_path: Path) -> None:
    task = load_task(f"file:{write(tmp_path / 'p.jsonl', numbers(200))}", {})
    heldout, train = all_of(task, "heldout"), all_of(task, "train")
    assert heldout & train == set()
    assert len(heldout | train) == 200
    assert 8 <= len(heldout) <= 35
    assert task.splits == ("train", "heldout")
    assert check_task(task) == []


def test_a_problem_that_stands_twice_is_not_on_both_sides(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", numbers(60) + numbers(60))
    with pytest.warns(UserWarning, match=r"60 prompts stand more than once.*jsonl:1 and .*:61;"):
        task = load_task(f"file:{path}", {})
    assert all_of(task, "heldout") & all_of(task, "train") == set()


def test_files_for_heldout_and_ood_are_used_as_they_are(tmp_path: Path) -> None:
    train, heldout = (
        write(tmp_path / "t.jsonl", numbers(12)),
        write(tmp_path / "h.jsonl", [{"prompt": p, "answer": p} for p in "ab"]),
    )
    ood = write(tmp_path / "o.jsonl", [{"prompt": p, "answer": p} for p in "cd"])
    task = load_task(f"file:{train}", {"heldout": str(heldout), "ood": str(ood)})
    assert task.splits == ("train", "heldout", "ood")
    assert (all_of(task, "heldout"), all_of(task, "ood")) == ({"a", "b"}, {"c", "d"})
    assert len(all_of(task, "train")) == 12


def test_exact_match_looks_past_spaces_around_the_answer(tmp_path: Path) -> None:
    task = load_task(f"file:{write(tmp_path / 'p.jsonl', numbers(30))}", {})
    problem = Problem(prompt="say 7", answer="7")
    assert task.score([problem] * 4, ["7", " 7\n", "77", ""]) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("third", "words"),
    [
        ("{not json", r"p\.jsonl:3: .*expected one JSON object per line, such as"),
        ("[1, 2]", r"p\.jsonl:3: .*expected one JSON object per line"),
        ('{"answer": "4"}', r'p\.jsonl:3: no "prompt", as text or as messages; .* are answer;'),
        (
            '{"prompt": ""}',
            r'p\.jsonl:3: an empty "prompt", as text or as messages; write one or leave the row',
        ),
        ('{"prompt": 4, "answer": "4"}', r"p\.jsonl:3: the prompt is 4; expected text"),
    ],
)
def test_a_bad_line_is_named_by_its_number(third: str, words: str, tmp_path: Path) -> None:
    # The empty second line counts, as it does in an editor.
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a", "answer": "b"}}\n\n{third}\n')
    with pytest.raises(ValueError, match=words):
        load_task(f"file:{tmp_path / 'p.jsonl'}", {})


def test_too_few_problems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 1 problems; at least 2 are needed"):
        load_task(f"file:{write(tmp_path / 'p.jsonl', numbers(1))}", {})
    for split in ("heldout", "ood"):
        with pytest.raises(ValueError, match=f"^{split} has 0 problems; at least 1 is needed"):
            own_task(numbers(9), **{split: []})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read problems from .*none\.jsonl: No such file"):
        load_task(f"file:{tmp_path / 'none.jsonl'}", {})


def test_a_kind_without_heldout_problems_is_refused(tmp_path: Path) -> None:
    heldout = write(tmp_path / "h.jsonl", [{"prompt": p, "answer": p, "kind": "x"} for p in "ab"])
    rows = [{"prompt": p + k, "answer": p, "kind": k} for p in "ab" for k in "xy"]
    train = write(tmp_path / "t.jsonl", rows)
    with pytest.raises(
        ValueError, match="no heldout problem of kind 'y'; add some, or name a heldout file"
    ):
        load_task(f"file:{train}", {"heldout": str(heldout)})


def test_an_unknown_task_or_parameter_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"'sums' is not known; use digits, gsm8k, math500, svamp, reasoning_gym:NAME, "
            r"mixture, file:PATH or module:function"
        ),
    ):
        load_task("sums", {})
    with pytest.raises(
        ValueError, match=r"unknown field `fiel`.*known: file, heldout, ood, fields, reward"
    ):
        load_task("file:x.jsonl", {"fiel": "y"})


REWARDS = '''
def length(prompts, completions, answer, unit, **columns):
    """Checks that every list belongs to the same samples, then rewards length."""
    assert prompts == [f"say {a}" for a in answer]
    assert unit == [f"u{a}" if int(a) % 2 else None for a in answer]
    assert set(columns) <= {"level"}
    return [len(text) for text in completions]

def two(prompts, completions, **columns):
    return [0.0, 1.0]

number = 3
'''


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module on the path, and a file of problems half of which have a `unit`."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    lines = [
        {"prompt": f"say {n}", "answer": n, **({"unit": f"u{n}"} if n % 2 else {})}
        for n in range(30)
    ]
    write(tmp_path / "p.jsonl", lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path / "p.jsonl")


def test_a_reward_function_is_called_with_prompts_completions_and_columns(rewards: str) -> None:
    task = load_task("my_rewards:length", {"file": rewards})
    rng = random.Random(0)
    problems = [task.draw(rng, "train", "all") for _ in range(8)]
    scores = task.score(problems, ["x" * n for n in range(8)])
    assert scores == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert {type(s) for s in scores} == {float}


def test_a_wrong_number_of_rewards_is_refused(rewards: str) -> None:
    task = load_task("my_rewards:two", {"file": rewards})
    with pytest.raises(ValueError, match="returned 2 rewards for 3 completions; expected one each"):
        task.score([Problem(prompt="p")] * 3, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "no_such_module:f",
            "cannot import no_such_module: .*beside the crew file, or on PYTHONPATH",
        ),
        ("my_rewards:none", "module my_rewards has no none"),
        ("my_rewards:number", r"number is int; expected f\(prompts, completions"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused(spec: str, words: str, rewards: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_task(spec, {"file": rewards})


def test_a_reward_function_needs_a_file_of_problems(rewards: str) -> None:
    with pytest.raises(ValueError, match=r'set task.file = "problems.jsonl"'):
        load_task("my_rewards:length", {})


def test_a_line_separator_inside_a_prompt_does_not_end_the_line(tmp_path: Path) -> None:
    lines = [
        json.dumps({"prompt": f"a\u2028b {n}", "answer": "x"}, ensure_ascii=False)
        for n in range(30)
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(lines), encoding="utf-8")
    load_task(f"file:{tmp_path / 'p.jsonl'}", {})


@pytest.mark.slow
def test_a_file_with_nothing_left_to_train_on_is_refused(tmp_path: Path) -> None:
    lines = [{"prompt": f"say {n}", "answer": str(n)} for n in range(200)]
    task = load_task(f"file:{write(tmp_path / 'p.jsonl', lines)}", {})
    heldout = [line for line in lines if line["prompt"] in all_of(task, "heldout")]
    with pytest.raises(ValueError, match="train"):
        load_task(f"file:{write(tmp_path / 'h.jsonl', heldout)}", {})


def test_a_field_named_like_an_argument_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="completions"):
        load_task(f"file:{write(tmp_path / 'p.jsonl', numbers(30, completions='x'))}", {})


def test_an_ood_file_may_have_kinds_of_its_own(tmp_path: Path) -> None:
    ood = write(tmp_path / "o.jsonl", [{"prompt": p, "answer": p, "kind": "far"} for p in "cd"])
    task = load_task(f"file:{write(tmp_path / 'p.jsonl', numbers(40))}", {"ood": str(ood)})
    assert (task.kinds, task.kinds_of("train"), task.kinds_of("heldout"), task.kinds_of("ood")) == (
        ("all",),
    ) * 3 + (("far",),)
    assert all_of(task, "ood", "far") == {"c", "d"}


def test_a_file_is_put_to_models_as_it_is(tmp_path: Path) -> None:
    task = load_task(f"file:{write(tmp_path / 'p.jsonl', numbers(40))}", {})
    assert (task.template, task.instruction, task.target(Problem(prompt="p", answer="7"))) == (
        "{prompt}{answer}",
        "",
        "7",
    )


def test_answers_can_be_asked_for_in_a_form_and_compared_as_mathematics(tmp_path: Path) -> None:
    task = load_task(
        f"file:{write(tmp_path / 'p.jsonl', numbers(40))}", {"form": "tags", "equal": "math"}
    )
    problem = Problem(prompt="p", answer="1000")
    rewards = task.score(
        [problem] * 3,
        ["<think></think><answer>1,000.0</answer>", "1000", "<think></think><answer>999</answer>"],
    )
    assert rewards == [1.0, 0.0, 0.0]
    assert task.target(problem) == "<think></think><answer>1000</answer>"
    assert "<answer>" in task.instruction
    assert check_task(task) == []


def test_a_form_compared_exactly_is_not_mathematics(tmp_path: Path) -> None:
    task = load_task(f"file:{write(tmp_path / 'p.jsonl', numbers(40))}", {"form": "boxed"})
    assert task.score(
        [Problem(prompt="p", answer="7")] * 2, ["so \\boxed{7}", "so \\boxed{7.0}"]
    ) == [1.0, 0.0]


def test_scoring_changes_the_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", numbers(40))
    made = {
        load_task(f"file:{path}", p).fingerprint for p in ({}, {"form": "tags"}, {"equal": "math"})
    }
    assert len(made) == 3


def test_a_reward_function_beside_a_form_is_refused(rewards: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"task\.form, task\.equal would be ignored: the reward function scores; remove it",
    ):
        load_task("my_rewards:length", {"file": rewards, "form": "tags", "equal": "math"})


# What rows must have


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"prompt": "p", "solution": "4"}, r'no "answer", and answers are compared; its fields are '
         r'prompt, solution; say which it is: fields = \{ answer = "solution" \} of \[task\], or '
         r'in Python fields=\{"answer": "solution"\}'),
        ({"prompt": "p", "answer": ""}, r'an empty "answer", and answers are compared; write '
         "one or leave the row out, or score with a reward function$"),
        ({"prompt": "p", "answer": " \n"}, r'an empty "answer"'),
        ({"prompt": "p", "answer": None}, r'an empty "answer"'),
        ({"prompt": "p", "answer": True}, r"the answer is True; expected text or a number"),
        ({"prompt": "p", "answer": ["4"]}, r"the answer is \['4'\]; expected text or a number"),
        ({"question": "p", "answer": "4"}, r'no "prompt".*fields = \{ prompt = "question" \}'),
    ],
)  # fmt: skip
def test_one_bad_row_among_200_is_refused_where_answers_are_compared(
    bad: dict[str, Any], words: str, tmp_path: Path
) -> None:
    lines = numbers(200)
    lines[149] = bad
    path = write(tmp_path / "p.jsonl", lines)
    with pytest.raises(ValueError, match=rf"p\.jsonl:150: {words}"):
        load_task(f"file:{path}", {})
    with pytest.raises(ValueError, match=f"row 150: {words}"):
        own_task(lines)


def test_a_numbers_text_is_the_answer_and_a_whole_one_has_no_point() -> None:
    rows = [{"prompt": str(n), "answer": answer} for n, answer in enumerate([4, 4.0, 0.5, "4.0"])]
    task = own_task(rows, heldout=[{"prompt": "x", "answer": "y"}])
    rng = random.Random(0)
    answers = {p.prompt: p.answer for p in (task.draw(rng, "train", "all") for _ in range(50))}
    assert answers == {"0": "4", "1": "4", "2": "0.5", "3": "4.0"}


def test_an_empty_answer_is_named_as_its_row_calls_it() -> None:
    rows = [{"prompt": "p", "solution": "4"}, {"prompt": "q", "solution": ""}]
    with pytest.raises(ValueError, match='row 2: an empty "solution", and answers are compared'):
        own_task(rows, fields={"answer": "solution"})


def test_fields_are_mapped_to_what_the_rows_call_them(tmp_path: Path) -> None:
    rows = [{"q": f"say {n}", "a": str(n), "of": "x", "answer": "hidden"} for n in range(30)]
    fields = {"prompt": "q", "answer": "a", "kind": "of"}
    path = write(tmp_path / "p.jsonl", rows)
    for task in (load_task(f"file:{path}", {"fields": fields}), own_task(rows, fields=fields)):
        problem = task.draw(random.Random(0), "train", "x")
        assert problem.prompt == f"say {problem.answer}"
        assert problem.columns == {}
    with pytest.raises(ValueError, match=r"row 1: no field 'z', which fields names as prompt; its"):
        own_task(rows, fields={"prompt": "z"})
    with pytest.raises(ValueError, match=r"fields maps 'promt'; it can map prompt"):
        own_task(rows, fields={"promt": "q"})


def test_a_reward_function_gets_answers_that_are_no_text_as_they_are() -> None:
    rows = [{"prompt": f"p{n}", "answer": {"from": n, "to": [n]}} for n in range(30)]
    seen = []

    def spy(prompts: list[str], answer: list[Any]) -> list[float]:
        seen.extend(zip(prompts, answer, strict=True))
        return [0.0] * len(prompts)

    task = own_task(rows, rewards=spy)
    problem = task.draw(random.Random(0), "train", "all")
    task.score([problem], ["x"])
    number = int(problem.prompt[1:])
    assert seen == [(problem.prompt, {"from": number, "to": [number]})]


def test_duplicates_with_different_answers_are_named() -> None:
    with pytest.warns(
        UserWarning, match="2 prompts stand .*row 2 and row 32; 1 of them with different answers"
    ):
        own_task(
            [*numbers(30), {"prompt": "say 0", "answer": "0"}, {"prompt": "say 1", "answer": "x"}]
        )


def test_held_out_prompts_that_are_trained_on_are_named() -> None:
    with pytest.warns(UserWarning, match="2 held-out prompts are trained on too, such as 'say 0'"):
        own_task(numbers(30), heldout=numbers(2))


# Prompts that are conversations

TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]


def test_a_prompt_may_be_messages_and_its_id_is_of_all_of_them() -> None:
    rows = [
        {"prompt": [*TALK[:1], {"role": "user", "content": f"{n}?"}], "answer": str(n)}
        for n in range(30)
    ]
    task = own_task(rows)
    problem = task.draw(random.Random(0), "train", "all")
    assert [(m.role, m.content) for m in problem.messages] == [
        ("system", "be brief"),
        ("user", f"{problem.answer}?"),
    ]
    assert problem.prompt == f"system: be brief\n\nuser: {problem.answer}?"
    assert problem == own_task(rows).draw(random.Random(0), "train", "all")
    assert problem.id == own_task(rows).draw(random.Random(0), "train", "all").id
    assert problem.id != Problem(prompt=problem.prompt, answer=problem.answer).id


def test_a_reward_function_gets_messages_as_the_row_has_them() -> None:
    seen = []

    def spy(prompts: list[Any], completions: list[str]) -> list[float]:
        seen.extend(prompts)
        return [0.0] * len(prompts)

    task = own_task(
        [{"prompt": TALK}, {"prompt": TALK[1:]}], rewards=spy, heldout=[{"prompt": "x"}]
    )
    rng = random.Random(0)
    task.score([task.draw(rng, "train", "all") for _ in range(20)], ["x"] * 20)
    assert all(prompt in (TALK, TALK[1:]) for prompt in seen)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([{"role": "user"}], "a message of the prompt is .*; expected a role and a content"),
        (["hi"], "a message of the prompt is 'hi'; expected a role and a content"),
        (
            [{"role": "robot", "content": "x"}],
            ".* has role 'robot' and str content; expected",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], ".* role 'user' and list content"),
        (
            [{"role": "user", "content": "x", "tool_calls": [1]}],
            ".* has tool_calls in it;",
        ),
        ([*TALK, {"role": "assistant", "content": "4"}], "the last message .* is of 'assistant'"),
        ([], 'an empty "prompt", as text or as messages'),
    ],
)
def test_messages_with_a_fault_are_refused(prompt: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"row 2: {words}"):
        own_task([{"prompt": "x", "answer": "y"}, {"prompt": prompt, "answer": "z"}])
