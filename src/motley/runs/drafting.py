"""A crew file for the models and data that somebody names: chosen values, each with a reason.

Looks at the data's rows and at models' folders, and opens no model. Knows no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from motley.config import check_name, parse_config
from motley.models.named import (
    MAX_POSITIONS,
    NAMED,
    TinyParts,
    has_chat,
    is_tiny,
    local_model,
)
from motley.tasks import load_task
from motley.tasks.collection import HELDOUT_ONE_IN
from motley.tasks.digits import SYMBOLS, WORDS
from motley.tasks.own import FIELDS, USUAL_ANSWERS, USUAL_PROMPTS
from motley.tasks.rows import Fields, placed_rows
from motley.tasks.task import is_heldout

USUAL_KINDS = ("category", "subject", "type")
MOST_KINDS = 12  # more are no kinds
GROUP_SIZE = 8
LONG = 48  # a line with more has its reason above it
_SPELT = re.compile("|".join(re.escape(token) for token in (*WORDS, *SYMBOLS)))
_PART = re.compile(r"(.+):(full|lora\d*|(?:first|last)\d+)")


class DraftModel(NamedTuple):
    """`./my-model:lora`: a model, and what of it trains."""

    model: str
    part: str  # full, lora, lora16, last2, first2

    @staticmethod
    def of(text: str) -> DraftModel:
        match = _PART.fullmatch(text)
        chosen = DraftModel(match[1], match[2]) if match else DraftModel(text, "full")
        if is_tiny(chosen.model):
            TinyParts.of(chosen.model)
        elif chosen.model not in NAMED:
            local_model(chosen.model)  # refuses what is not there
        return chosen

    @property
    def train(self) -> str:
        """As TOML; nothing for the whole model."""
        if self.part == "full":
            return ""
        if self.part.startswith("lora"):
            return f"{{ lora = {{ rank = {self.part.removeprefix('lora') or 8} }} }}"
        where, count = re.fullmatch(r"(first|last)(\d+)", self.part).groups()  # type: ignore[union-attr]
        return f'{{ layers = "{where}:{count}" }}'

    @property
    def lr(self) -> str:
        adapter = self.part.startswith("lora")
        if is_tiny(self.model):
            return "6e-4" if adapter else "1e-4"
        return "1e-4" if adapter else "1e-5"


@dataclass(frozen=True, slots=True)
class DraftData:
    """What somebody's rows hold, under which names."""

    path: Path
    places: list[str]  # of the rows
    prompts: list[str]
    answers: list[str]  # none where there are no answers
    kinds: tuple[str, ...]
    fields: dict[str, str] = field(default_factory=dict)  # that must be mapped

    @staticmethod
    def of(path: Path, named: dict[str, str], scored: bool) -> DraftData:
        """`named`: which fields are meant; `scored`: a reward function needs no answer."""
        placed = placed_rows(path)
        rows, places = [row.fields for row in placed], [row.place for row in placed]
        if len(rows) < 2:
            raise ValueError(
                f"{path} has {len(rows)} problems; at least 2 are needed, one to learn from and "
                "one held out"
            )
        fields = _mapped(path, rows, named, scored)
        read = lambda name: [row.get(fields[name]) if name in fields else None for row in rows]
        answers = ["" if value is None else str(value) for value in read("answer")]
        kinds = ("all",) if all(k is None for k in read("kind")) else _texts(read("kind"))
        prompts = [p if isinstance(p, str) else json.dumps(p) for p in read("prompt")]
        renamed = {name: called for name, called in fields.items() if name != called}
        return DraftData(path, places, prompts, answers if any(answers) else [], kinds, renamed)

    @property
    def is_gsm8k(self) -> bool:
        """Answers are worked out, with the number behind ####, under GSM8K's own names."""
        as_published = self.fields == {"prompt": "question"} and self.answers
        return bool(as_published) and all("####" in answer for answer in self.answers)

    @property
    def has_messages(self) -> bool:
        return any(prompt.startswith('[{"') for prompt in self.prompts)

    def check_spelling(self, by_bytes: bool) -> None:
        """Refuse what tiny models cannot read or write. `by_bytes`: one of them reads bytes, and
        has the longest prompts and answers.
        """
        texts = [*self.prompts, *self.answers]  # there may be no answers
        for place, text in zip(self.places * 2, texts, strict=False):
            if left := _SPELT.sub("", text):
                raise ValueError(
                    f"{place}: tiny models speak digits, {SYMBOLS[10:]} and the words of the "
                    f"digits task only, and this has {left[:40]!r}; name a pretrained model with "
                    "--model, such as smollm2-135m"
                )
        prompts = [num_tokens(text, by_bytes) for text in self.prompts]
        longest = max(prompts) + self.most_tiny_tokens(by_bytes)
        if longest > MAX_POSITIONS:
            raise ValueError(
                f"{self.path}: prompts and answers of up to {longest} tokens do not fit the "
                f"{MAX_POSITIONS} positions of tiny models; name a pretrained model with --model"
            )

    def most_tiny_tokens(self, by_bytes: bool) -> int:
        """Of an answer, with its end."""
        return max((num_tokens(text, by_bytes) for text in self.answers), default=7) + 1


def num_tokens(text: str, by_bytes: bool) -> int:
    """Of a tiny model."""
    return len(text.encode()) if by_bytes else len(_SPELT.findall(text))


def _texts(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(sorted({"all" if value is None else str(value) for value in values}))


def _mapped(
    path: Path, rows: Sequence[Fields], named: dict[str, str], scored: bool
) -> dict[str, str]:
    """What prompt, answer and kind are called: as named, by their own names, or by usual ones."""
    there = list(dict.fromkeys(name for row in rows for name in row))
    for name, called in named.items():
        if name not in FIELDS or called not in there:
            raise ValueError(
                f"--field {name}={called}: expected {', '.join(FIELDS)}, and one of the fields of "
                f"{path}: {', '.join(there)}"
            )
    usual = {"prompt": USUAL_PROMPTS, "answer": USUAL_ANSWERS, "kind": USUAL_KINDS}
    found: dict[str, str] = {}
    for name in FIELDS:
        choices = [named[name]] if name in named else [name, *usual[name]]
        likely = [called for called in choices if called in there]
        if name == "kind" and name not in named:
            likely = [c for c in likely if c == name or _are_kinds(rows, c, found["prompt"])]
        if likely:
            found[name] = likely[0]
        elif name == "prompt" or (name == "answer" and not scored):
            other = ", or score with --reward module:function" if name == "answer" else ""
            raise ValueError(
                f"{path}: no field looks like the {name}; its fields are {', '.join(there)}; name "
                f"it with --field {name}=FIELD{other}"
            )
    return found


def _are_kinds(rows: Sequence[Fields], called: str, prompt: str) -> bool:
    """Whether a field divides the rows into a few kinds, each with some to hold out."""
    kinds = _texts([row.get(called) for row in rows])
    held = [row for row in rows if is_heldout(str(row.get(prompt)), HELDOUT_ONE_IN)]
    both = (held, [row for row in rows if row not in held])
    return 1 < len(kinds) <= MOST_KINDS and all(
        _texts([row.get(called) for row in part]) == kinds for part in both
    )


@dataclass(frozen=True, slots=True)
class Draft:
    """What a crew file is written for."""

    out: Path  # what it names is relative to its folder
    models: tuple[DraftModel, ...]
    data: DraftData | None = None
    rewards: tuple[str, ...] = ()
    name: str = ""

    @property
    def tiny(self) -> bool:
        return any(is_tiny(model.model) for model in self.models)

    @property
    def by_bytes(self) -> bool:
        """Whether a tiny model reads bytes."""
        tiny = [model.model for model in self.models if is_tiny(model.model)]
        return any(TinyParts.of(model).vocabulary == "bytes" for model in tiny)

    @property
    def chat(self) -> bool:
        return all(has_chat(model.model) for model in self.models)

    def text(self) -> str:
        """The crew file. It is checked as any other would be."""
        if self.tiny and not all(is_tiny(model.model) for model in self.models):
            raise ValueError(
                "tiny models know digits only, and cannot read what the others write; name tiny "
                "models only, or none"
            )
        if self.tiny and self.data:
            self.data.check_spelling(self.by_bytes)
        if self.data and self.data.has_messages and not self.chat:
            raise ValueError(
                f"{self.data.path} has prompts of chat messages, and not every model has a chat "
                "template; name instruct models"
            )
        tables = [
            *(_head(self), _crew(self), _task(self), _prompt(self), _sampling(self)),
            *(_learning(self), _evaluate(self), *_peers(self)),
        ]
        text = "\n".join(table for table in tables if table)
        task = parse_config(text, source=str(self.out)).task
        if self.data and not self.data.is_gsm8k:  # every row, as a run would read it
            load_task(f"file:{self.data.path}", task, scores=False)
        return text


def _table(name: str, rows: Sequence[tuple[str, object, str]]) -> str:
    """A table with a reason for every line: behind it, or above a long one.

    A value that is empty text is left out.
    """
    lines = [(f"{key} = {value}", why) for key, value, why in rows if value != ""]
    width = max((len(line) for line, _ in lines if len(line) <= LONG), default=0)
    shown = [
        f"{line:{width}}  # {why}" if len(line) <= LONG else f"# {why}\n{line}"
        for line, why in lines
    ]
    return "\n".join([name, *shown, ""])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _head(draft: Draft) -> str:
    on = f" on {draft.data.path.name}" if draft.data else ""
    file = draft.out.name
    several = (
        f"{len(draft.models)} models that train each other"
        if len(draft.models) > 1
        else ("one model that trains by itself")
    )
    return (
        f"# A crew of {several}{on}; written by motley new.\n#\n"
        f"#     motley check {file}    look at models, task and engines before any training\n"
        f"#     motley train {file}    train; Ctrl-C stops, motley train --resume RUN goes on\n#\n"
        "# docs/crew_file.md has every key. Try one out with --set, such as --set crew.rounds=5.\n"
    )


def _crew(draft: Draft) -> str:
    peers = len(draft.models)
    name = draft.name or (draft.data.path.stem if draft.data else draft.out.stem)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "crew"
    check_name("crew", name)
    least = 24 if draft.tiny else 16
    return _table(
        "[crew]",
        [
            ("name", _quoted(name), "names run folders"),
            ("task", _quoted(_task_of(draft)), "what is learned; its settings are under [task]"),
            ("objective", '"auto"', "how peers learn; motley objectives lists all ways"),
            ("rounds", 100, "turns of sampling and learning; motley train --rounds N"),
            (
                "problems_per_round",
                -(-least // peers) * peers,
                f"of the whole crew: {-(-least // peers)} of each peer",
            ),
            ("group_size", GROUP_SIZE, "answers to each problem, compared with each other"),
        ],
    )


def _task_of(draft: Draft) -> str:
    if draft.data is None:
        return "digits"
    if draft.data.is_gsm8k and not draft.rewards:
        return "gsm8k"
    return f"file:{_beside(draft.data.path, draft.out)}"


def _beside(path: Path, out: Path) -> str:
    """A path as seen from the crew file."""
    if path.is_absolute():
        return path.as_posix()
    try:
        return Path(os.path.relpath(path, out.parent)).as_posix()
    except ValueError:  # another drive
        return path.resolve().as_posix()


def _task(draft: Draft) -> str:
    data = draft.data
    if data is None:
        return _table(
            "[task]",
            [
                ("kinds", json.dumps(list(_DIGITS)), "kinds of problems, measured apart"),
                ("levels", "[4]", "digits of a number"),
            ],
        )
    form = ('"boxed"', "the answer is what \\boxed{} holds")
    if not draft.chat:
        form = ('"line"', "the first line answers")
    if _task_of(draft) == "gsm8k":
        file = ("file", _quoted(_beside(data.path, draft.out)), "answers end with #### NUMBER")
        return _table("[task]", [file, ("form", *form)])
    mapped = ", ".join(f"{name} = {_quoted(called)}" for name, called in data.fields.items())
    rewards = draft.rewards
    reward = _quoted(rewards[0]) if len(rewards) == 1 else json.dumps(list(rewards))
    compared = not rewards and not draft.tiny
    return _table(
        "[task]",
        [
            ("fields", f"{{ {mapped} }}" if mapped else "", "what the file calls them"),
            ("reward", reward if rewards else "", "module:function, beside this file"),
            ("form", form[0] if compared else "", form[1]),
            ("equal", '"exact"' if compared else "", '"math" also takes 1/2 for 0.5'),
        ],
    )


def _prompt(draft: Draft) -> str:
    if draft.chat:
        return _table("[prompt]", [("style", '"chat"', "in each model's own chat template")])
    if draft.tiny or draft.data is None:
        return ""
    return _table(
        "[prompt]",
        [
            ("template", '"Question: {prompt}\\nAnswer: {answer}"', "how a problem is put"),
            ("stop", "" if draft.rewards else '"\\n"', "a new line ends an answer"),
        ],
    )


def _sampling(draft: Draft) -> str:
    if draft.tiny:
        most = draft.data.most_tiny_tokens(draft.by_bytes) if draft.data else 8
        why = "the longest answer, and its end"
    elif draft.data is None:
        most, why = 8, "the longest answer, and its end"
    elif draft.chat or draft.rewards:
        most, why = 256, "room to reason; longer ones are cut off"
    else:
        longest = max((len(answer) for answer in draft.data.answers), default=0)
        most, why = 8 * -(-(longest // 2 + 8) // 8), "more than the longest answer needs"
    return _table(
        "[sampling]",
        [
            ("temperature", "1.0", "1 samples as the model would"),
            ("max_tokens", most, why),
        ],
    )


def _learning(draft: Draft) -> str:
    adapter = draft.models[0].part.startswith("lora")
    why = (
        "usual for adapters"
        if adapter
        else ("usual for tiny models" if draft.tiny else "1e-6 is usual above 1B parameters")
    )
    return _table(
        "[learning]",
        [
            ("lr", draft.models[0].lr, f"Adam's learning rate; {why}"),
            ("checkpoint_every", 10, "rounds; a stopped run goes on from the last one"),
        ],
    )


def _evaluate(draft: Draft) -> str:
    rows = len(draft.data.prompts) if draft.data else 1000
    return _table(
        "[evaluate]",
        [
            ("every", 10, "rounds between looks at problems that nobody learns from"),
            ("problems", min(64, max(8, rows // 10)), "held-out problems of each kind"),
        ],
    )


_DIGITS = ("reverse", "sort", "increment")


def _peers(draft: Draft) -> list[str]:
    names: list[str] = []
    for chosen in draft.models:
        last = re.split(r"[/\\]", chosen.model.removesuffix(".gguf").rstrip("/\\"))[-1]
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", last).strip("-").lower() or "peer"
        stem = "peer-hub" if stem == "hub" else stem
        named = [stem, f"{stem}-{chosen.part}", *(f"{stem}-{n}" for n in range(2, 1000))]
        names.append(next(name for name in named if name not in names))
    return [_peer(draft, number, name) for number, name in enumerate(names)]


def _peer(draft: Draft, number: int, name: str) -> str:
    chosen = draft.models[number]
    folder = not is_tiny(chosen.model) and chosen.model not in NAMED and local_model(chosen.model)
    model = _model_beside(folder, draft.out) if folder else chosen.model
    return _table(
        "[[peer]]",
        [
            ("name", _quoted(name), "names its folder and its curve"),
            ("model", _quoted(model), _about(chosen.model)),
            ("train", chosen.train, _what_trains(chosen.part)),
            (
                "lr",
                chosen.lr if chosen.lr != draft.models[0].lr else "",
                "its own learning rate",
            ),
            ("warm", _warm(draft, number), "first learns from right answers, so that some come"),
        ],
    )


def _model_beside(path: Path, out: Path) -> str:
    """A folder as the crew file must write it: ./ tells it from an id on the hub."""
    seen = _beside(path.expanduser(), out)
    return seen if Path(seen).is_absolute() or seen.startswith("../") else f"./{seen}"


def _about(model: str) -> str:
    if is_tiny(model):
        return "made afresh, for work on a CPU"
    if model in NAMED:
        return f"fetch it once: motley models fetch {model}"
    return "on this machine" if local_model(model) else "from the Hugging Face hub"


def _what_trains(part: str) -> str:
    return "an adapter trains, the model stays" if part.startswith("lora") else "only these layers"


def _warm(draft: Draft, number: int) -> str:
    """Only tiny models know nothing at all."""
    if not draft.tiny or (draft.data and not draft.data.answers):
        return ""
    if draft.data is None:
        best = _DIGITS[number % len(_DIGITS)]
        levels = ", ".join(f"{kind} = {0.55 if kind == best else 0.35}" for kind in _DIGITS)
        return f"{{ accuracy = {{ {levels} }} }}"
    return f"{{ kinds = {json.dumps(list(draft.data.kinds))}, steps = 100 }}"
