"""Prompts: how a problem is put to a model, and how its answer is spelled.

Knows tasks and vocabularies; knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from motley.config import Prompt
from motley.models.vocabulary import NoTemplateError, Turn, Vocabulary
from motley.records import Message, Problem
from motley.tasks import Task
from motley.tasks.task import AS_IT_IS

BETWEEN_SHOTS = "\n\n"


@dataclass(frozen=True, slots=True)
class Shot:
    """A problem with a perfect answer."""

    prompt: str
    answer: str


@dataclass(slots=True)
class Prompts:
    """Plain: few-shot examples and the problem in one template.

    Chat: the same as turns of the model's own chat template. A problem that is a conversation is
    put so in either case.

    >>> Prompts(vocabulary, template="Question: {prompt}\\nAnswer: {answer}")  # the prompt ends
    with "Answer:", answers begin with a space
    """

    vocabulary: Vocabulary
    chat: bool = False
    template: str = AS_IT_IS
    system: str = ""
    shots: Mapping[str, list[Shot]] = field(default_factory=dict)  # kind -> examples
    task: Task | None = None
    _known: dict[tuple[str, str, tuple[Message, ...]], tuple[int, ...]] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, vocabulary: Vocabulary, rules: Prompt, task: Task) -> Prompts:
        """The crew file's way, and where it is silent the task's own."""
        template, system = rules.template or task.template, rules.system or task.instruction
        if template is None and rules.style == "plain":
            raise ValueError(
                "the parts of the mixture put their problems differently; set prompt.template "
                "for all of them"
            )
        if system is None:
            raise ValueError(
                "the parts of the mixture want answers of different forms; give them one form, or "
                "set prompt.system"
            )
        return cls(
            vocabulary,
            chat=rules.style == "chat",
            template=template or AS_IT_IS,
            system=system,
            shots={kind: _shots(task, kind, rules.shots) for kind in task.kinds}
            if rules.shots
            else {},
            task=task,
        )

    def ids(self, problem: Problem) -> tuple[int, ...]:
        """What the model is given. Any thread may ask."""
        key = problem.kind, problem.prompt, problem.messages
        known = self._known.get(key)
        if known is None:
            known = tuple(
                self._chat_ids(problem) if self._is_chat(problem) else self._plain_ids(problem)
            )
            if len(self._known) >= 4096:
                self._known.clear()
            self._known[key] = known
        return known

    def answer_ids(self, problem: Problem) -> tuple[int, ...]:
        """A perfect completion, the end token included."""
        answer = self.task.target(problem) if self.task else problem.answer
        gap = "" if self._is_chat(problem) else self._gap
        return (*self.vocabulary.encode(gap + answer), self.end_id(problem))

    def end_id(self, problem: Problem) -> int:
        """What its answers are taught to end with."""
        return self.vocabulary.turn_end_id if self._is_chat(problem) else self.vocabulary.end_id

    def _is_chat(self, problem: Problem) -> bool:
        """A conversation is put to a model as one, whatever the style."""
        if problem.messages and not self.vocabulary.has_chat:
            raise NoTemplateError(
                f"the prompt {problem.prompt[:40]!r} is chat messages, and the model has no chat "
                "template; make the prompts text, or use an instruct model"
            )
        return self.chat or bool(problem.messages)

    @property
    def _head(self) -> str:
        """The template up to where the answer begins; the space there belongs to the answer, as
        tokenizers see it.
        """
        return self.template.partition("{answer}")[0].rstrip(" ")

    @property
    def _gap(self) -> str:
        before = self.template.partition("{answer}")[0]
        return before[len(before.rstrip(" ")) :]

    def _plain_ids(self, problem: Problem) -> list[int]:
        after = self.template.partition("{answer}")[2] or BETWEEN_SHOTS
        filled = [
            self._head.replace("{prompt}", s.prompt) + self._gap + s.answer + after
            for s in self._examples(problem)
        ]
        opening = f"{self.system}\n\n" if self.system else ""
        return [
            *self.vocabulary.begin,
            *self.vocabulary.encode(
                opening + "".join(filled) + self._head.replace("{prompt}", problem.prompt)
            ),
        ]

    def _chat_ids(self, problem: Problem) -> list[int]:
        asked: list[Turn] = [
            {"role": message.role, "content": message.content} for message in problem.messages
        ] or [{"role": "user", "content": problem.prompt}]
        turns: list[Turn] = []
        if self.system and asked[0]["role"] != "system":
            turns.append({"role": "system", "content": self.system})
        for shot in self._examples(problem):
            turns += [
                {"role": "user", "content": shot.prompt},
                {"role": "assistant", "content": shot.answer},
            ]
        return self.vocabulary.chat([*turns, *asked])

    def _examples(self, problem: Problem) -> list[Shot]:
        """Of the problem's kind, or for a kind that is never trained of the first; never the
        problem itself.
        """
        if not self.shots:
            return []
        shots = self.shots.get(problem.kind) or next(iter(self.shots.values()))
        return [shot for shot in shots if shot.prompt != problem.prompt]


def _shots(task: Task, kind: str, count: int) -> list[Shot]:
    """Different training problems, the same for every peer and in every run."""
    shots: dict[str, Shot] = {}
    for number in range(100 * count):
        problem = task.draw(random.Random(f"shot/{number}"), "train", kind)
        if problem.messages:
            raise ValueError(
                f"shots={count} with prompts that are chat messages; put the examples into the "
                "messages, or make the prompts text"
            )
        if problem.answer:
            shots.setdefault(problem.prompt, Shot(problem.prompt, task.target(problem)))
        if len(shots) == count:
            return list(shots.values())
    raise ValueError(
        f"shots={count}, and kind {kind!r} has only {len(shots)} different problems with "
        "answers to show; use fewer"
    )
