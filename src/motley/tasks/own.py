"""A user's own rows as a task, scored by comparing answers or by the user's reward functions.

A row has `prompt`, as text or as chat messages, and usually `answer` and `kind`; every other field
is a column that a reward function may ask for. Owns what a row must have; formats are in rows.py,
calls of reward functions in rewards.py.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from motley.records import Message, Problem
from motley.tasks.answers import INSTRUCTIONS, Form, find_answer, math_reward, wrap
from motley.tasks.collection import Collection, split_sets
from motley.tasks.extras import need
from motley.tasks.rewards import Reward, RewardFunction, Rewards, load_reward
from motley.tasks.rows import Fields, PlacedRow, placed_rows
from motley.tasks.task import AS_IT_IS, Measure, Scoring

Equal = Literal["exact", "math"]
Rows = object  # whatever read_rows takes

FIELDS = ("prompt", "answer", "kind")
ROLES = ("system", "user", "assistant", "tool")
_TAKEN = {"prompts", "completions"}  # what a reward function is called with beside its columns
# what answers are called in published data
USUAL_ANSWERS = ("solution", "final_answer", "ground_truth", "target", "label", "gold", "output")
USUAL_PROMPTS = ("question", "problem", "query", "instruction", "input", "text", "messages")


class OwnConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: str = ""
    heldout: str = ""  # a file of its own; without it one problem in ten is held out by its hash
    ood: str = ""
    fields: dict[str, str] = {}  # what prompt, answer and kind are called in the files
    reward: str | list[str] = []  # module:function; without one, answers are compared
    reward_weights: list[float] = []  # of several; 1 each
    # call reward functions in several threads, for a group each; otherwise once for a round
    parallel: bool = False
    form: Form = "text"  # where in a completion its answer is
    equal: Equal = "exact"


class OwnTask(Collection):
    """Use `own_task` or `task_of_file` to make one."""

    template = AS_IT_IS

    def __init__(
        self,
        sets: Mapping[str, Rows],
        source: str,
        rewards: Rewards | None,
        fields: Mapping[str, str],
        form: Form,
        equal: Equal,
        named: str,
        parallel: bool = False,
    ) -> None:
        """`named` is what stands for the rewards in the fingerprint."""
        if equal == "math":
            need("math_verify", 'equal = "math"')
        self.measure: Measure = "reward" if rewards else "accuracy"
        self._rewards = rewards
        self.scoring: Scoring = _way(rewards, equal, parallel)
        self._form, self._equal = form, equal
        self.instruction = INSTRUCTIONS[form]
        reader = _Reader(fields, compared=rewards is None)
        least = 1 if "heldout" in sets else 2
        train = reader.problems(sets["train"], "the data", least)
        heldout, ood = (
            reader.problems(sets[split], split, least=1) if split in sets else []
            for split in ("heldout", "ood")
        )
        self._columns = sorted({name for p in (*train, *heldout, *ood) for name in p.columns})
        _name_leaks(train, heldout)
        if rewards:
            has_answers = any(p.answer for p in (*train, *heldout, *ood))
            rewards.check([*self._columns, *(["answer"] if has_answers else [])])
        super().__init__(split_sets(train, heldout, ood, source), source, named)

    def target(self, problem: Problem) -> str:
        return wrap(problem.answer, self._form)

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        if len(problems) != len(completions):
            raise ValueError(
                f"{len(completions)} completions for {len(problems)} problems; expected one each"
            )
        if self._rewards is None:
            return [
                self._right(completion, p.answer)
                for p, completion in zip(problems, completions, strict=True)
            ]
        columns = {name: [p.columns.get(name) for p in problems] for name in self._columns}
        columns["answer"] = [p.columns.get("answer", p.answer) for p in problems]
        return self._rewards([_asked(p) for p in problems], completions, columns)

    def _right(self, completion: str, gold: str) -> float:
        """1 where the answer found in the completion is the right one."""
        answer = find_answer(completion, self._form)
        if answer is None or self._equal == "exact":
            return float(answer == gold.strip())
        return math_reward(answer, gold)


def own_task(
    rows: Rows,
    *,
    rewards: Reward | Sequence[Reward] = (),
    weights: Sequence[float] = (),
    heldout: Rows | None = None,
    ood: Rows | None = None,
    fields: Mapping[str, str] | None = None,
    form: Form = "text",
    equal: Equal = "exact",
    parallel: bool = False,
) -> OwnTask:
    """A task of rows and functions. Without rewards, completions are compared with `answer`.

    >>> own_task([{"prompt": "2+2=", "answer": "4"}, ...])
    >>> own_task("problems.csv", rewards=[correct, short], weights=[1.0, 0.1],
    ...          fields={"prompt": "question"})
    """
    functions = [rewards] if callable(rewards) else list(rewards)
    own = weighted([RewardFunction(f) for f in functions], weights)
    sets = {"train": rows, "heldout": heldout, "ood": ood}
    return OwnTask(
        {split: given for split, given in sets.items() if given is not None},
        str(rows) if isinstance(rows, str | Path) else "the rows",
        own,
        fields or {},
        form,
        equal,
        _named(own, form, equal),
        parallel,
    )


def task_of_file(
    config: OwnConfig, reward: str = "", load: Callable[[str], RewardFunction] = load_reward
) -> OwnTask:
    """The task of a crew file: "file:PATH", or "module:function" as `reward`."""
    if not config.file:
        raise ValueError('this task needs its problems: set task.file = "problems.jsonl"')
    specs = [config.reward] if isinstance(config.reward, str) else config.reward
    if reward and specs:
        raise ValueError(
            f'task = "{reward}" is a reward, and [task] names reward too; write task = '
            f'"file:{config.file}" and name all of them there'
        )
    functions = [load(spec) for spec in ([reward] if reward else specs)]
    own = weighted(functions, config.reward_weights)
    named = _named(own, config.form, config.equal)
    sets = {"train": config.file, "heldout": config.heldout, "ood": config.ood}
    return OwnTask(
        {split: name for split, name in sets.items() if name},
        config.file,
        own,
        config.fields,
        config.form,
        config.equal,
        # a crew whose task is one function names it there
        "" if reward else named,
        config.parallel,
    )


def weighted(functions: Sequence[RewardFunction], weights: Sequence[float]) -> Rewards | None:
    """The functions with their weights; None if there are no functions."""
    if weights and len(weights) != len(functions):
        raise ValueError(
            f"{len(weights)} weights for {len(functions)} reward functions; expected one each"
        )
    names = [f.name for f in functions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice and not all("<lambda>" in name for name in twice):
        raise ValueError(f"reward {twice[0]} is named twice; name it once, with the sum of weights")
    for function, weight in zip(functions, weights, strict=False):
        function.weigh(weight)
    return Rewards(functions) if functions else None


def _named(rewards: Rewards | None, form: Form, equal: Equal) -> str:
    """What else than the problems decides over rewards, as text."""
    said = {
        name: value
        for name, value in (("form", form), ("equal", equal))
        if value not in ("text", "exact")
    }
    if rewards and said:
        raise ValueError(
            f"{', '.join(f'task.{name}' for name in said)} would be ignored: the reward function "
            "scores; remove it, or use file:PATH without a reward"
        )
    return rewards.names if rewards else str(said) if said else ""


def _way(rewards: Rewards | None, equal: Equal, parallel: bool) -> Scoring:
    """A function of the user's runs where it would without us, unless it is said to stand threads:
    one may set an alarm, which only the main thread can.
    """
    if rewards is None:
        return "each" if equal == "math" else "in turn"
    return "groups" if parallel else "beside" if rewards.only_promise else "in turn"


# Problems of rows


class _Reader:
    """Makes problems of rows, and says in which row something is wrong."""

    def __init__(self, fields: Mapping[str, str], compared: bool) -> None:
        unknown = sorted(fields.keys() - set(FIELDS))
        if unknown:
            raise ValueError(
                f"fields maps {unknown[0]!r}; it can map {', '.join(FIELDS)}, as in "
                'fields = { prompt = "question" }'
            )
        self._fields, self._compared = fields, compared

    def problems(self, source: Rows, called: str, least: int) -> list[Problem]:
        rows = placed_rows(source)
        if len(rows) < least:
            named = source if isinstance(source, str | Path) else called
            raise ValueError(
                f"{named} has {len(rows)} problems; at least {least} "
                + ("are needed, one to learn from and one held out" if least > 1 else "is needed")
            )
        problems = [self._problem(row) for row in rows]
        _name_duplicates(problems, rows, self._compared)
        return problems

    def _problem(self, row: PlacedRow) -> Problem:
        fields = dict(row.fields)
        taken = {name: self._taken(fields, name, row) for name in FIELDS}
        if strange := sorted(_TAKEN & fields.keys()):
            raise ValueError(
                f"{row.place}: the field {strange[0]!r} is a name the reward function is called "
                "with; rename it"
            )
        text, messages = self._prompt(taken["prompt"], row)
        kind = "all" if taken["kind"] is None else str(taken["kind"])
        answer = taken["answer"]
        if self._compared or answer is None or isinstance(answer, str | int | float):
            answer = "" if answer is None else self._answer(answer, row)
        else:  # no text, but perhaps what a reward function wants
            fields["answer"], answer = answer, ""
        if self._compared and not answer.strip():
            raise self._lacks("answer", row, "and answers are compared")
        return Problem(prompt=text, answer=answer, kind=kind, columns=fields, messages=messages)

    def _taken(self, fields: Fields, name: str, row: PlacedRow) -> Any:
        called = self._fields.get(name, name)
        if called not in fields and name in self._fields:
            raise ValueError(
                f"{row.place}: no field {called!r}, which fields names as {name}; its fields are "
                f"{_listed(row.fields)}"
            )
        value = fields.pop(called, None)
        fields.pop(name, None)  # another one that is called so is hidden by the one that is named
        return value

    def _prompt(self, prompt: Any, row: PlacedRow) -> tuple[str, tuple[Message, ...]]:
        if isinstance(prompt, str) and prompt:
            return prompt, ()
        if isinstance(prompt, list) and prompt:
            messages = tuple(_message(turn, row) for turn in prompt)
            if messages[-1].role not in ("user", "tool"):
                raise ValueError(
                    f"{row.place}: the last message of the prompt is of {messages[-1].role!r}; "
                    "expected the user's, which the model answers"
                )
            return spoken(messages), messages
        if prompt not in (None, "", []):
            raise ValueError(
                f"{row.place}: the prompt is {prompt!r}; expected text or messages: write text in "
                "quotes"
            )
        raise self._lacks("prompt", row, "as text or as messages")

    def _answer(self, answer: Any, row: PlacedRow) -> str:
        """Text as it is, a number as its text. 4.0 is written 4: JSON makes no difference."""
        if isinstance(answer, str):
            return answer
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            if not self._compared:
                return str(answer)
            raise ValueError(
                f"{row.place}: the answer is {answer!r}; expected text or a number: write it as "
                "the model should, in quotes"
            )
        whole = isinstance(answer, float) and answer.is_integer()
        return str(int(answer)) if whole else str(answer)

    def _lacks(self, name: str, row: PlacedRow, why: str) -> ValueError:
        scored = ", or score with a reward function" if name == "answer" else ""
        if name in row.fields or name in self._fields:
            called = self._fields.get(name, name)
            return ValueError(
                f'{row.place}: an empty "{called}", {why}; write one or leave the row out{scored}'
            )
        usual = USUAL_PROMPTS if name == "prompt" else USUAL_ANSWERS
        likely = next((known for known in usual if known in row.fields), "NAME")
        return ValueError(
            f'{row.place}: no "{name}", {why}; its fields are {_listed(row.fields)}; say '
            f'which it is: fields = {{ {name} = "{likely}" }} of [task], or in Python '
            f'fields={{"{name}": "{likely}"}}{scored}'
        )


def _message(turn: Any, row: PlacedRow) -> Message:
    if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
        raise ValueError(
            f"{row.place}: a message of the prompt is {str(turn)[:80]!r}; expected a role and a "
            "content"
        )
    more = sorted(k for k, v in turn.items() if k not in ("role", "content") and v)
    role, content = turn["role"], turn["content"]
    if role not in ROLES or not isinstance(content, str) or more:
        got = f"{more[0]} in it" if more else f"role {role!r} and {type(content).__name__} content"
        raise ValueError(
            f"{row.place}: a message of the prompt has {got}; expected a role of "
            f"{', '.join(ROLES)}, content that is text, and nothing else"
        )
    return Message(role=role, content=content)


def spoken(messages: Sequence[Message]) -> str:
    """A conversation as one text, for people and hashes; one question is just that."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{m.role}: {m.content}" for m in messages)


def _asked(problem: Problem) -> Any:
    """A prompt as a reward function gets it: as it stands in the row."""
    if problem.messages:
        return [{"role": m.role, "content": m.content} for m in problem.messages]
    return problem.prompt


def _name_duplicates(
    problems: Sequence[Problem], rows: Sequence[PlacedRow], compared: bool
) -> None:
    places: dict[str, list[int]] = defaultdict(list)
    for number, problem in enumerate(problems):
        places[problem.prompt].append(number)
    twice = [numbers for numbers in places.values() if len(numbers) > 1]
    if not twice:
        return
    at_odds = [n for n in twice if compared and len({problems[i].answer for i in n}) > 1]
    first, second, *_ = (at_odds or twice)[0]
    but = f"; {len(at_odds)} of them with different answers" if at_odds else ""
    warnings.warn(
        f"{len(twice)} prompts stand more than once, such as in {rows[first].place} and "
        f"{rows[second].place}{but}; each row counts as a problem",
        stacklevel=2,
    )


def _name_leaks(train: Sequence[Problem], heldout: Sequence[Problem]) -> None:
    both = {p.prompt for p in train} & {p.prompt for p in heldout}
    if both:
        warnings.warn(
            f"{len(both)} held-out prompts are trained on too, such as {min(both)[:80]!r}; what is "
            "held out then measures what was learned by heart",
            stacklevel=2,
        )


def _listed(fields: Fields) -> str:
    return ", ".join(fields) or "none"
