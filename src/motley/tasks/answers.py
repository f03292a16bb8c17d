"""How an answer is found in a completion, and when two answers are equal. Knows no task.

Forms: "line" is the first line that is not empty; "tags" is F-TIS's
`<think>...</think><answer>...</answer>` and nothing outside; "boxed" is the last \\boxed{...};
"text" is the whole completion.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any, Literal

from motley.tasks import sandbox
from motley.tasks.task import UNDECIDED

Form = Literal["line", "tags", "boxed", "text"]

# characters; what is longer is no final answer, and costs a stranger nothing to send
MAX_ANSWER = 256
MAX_DEPTH = 12  # of brackets in brackets

INSTRUCTIONS: dict[Form, str] = {
    "line": "",
    "tags": (
        "First work the problem out between <think> and </think>. Then give only the final answer "
        "between <answer> and </answer>. "
        "Use each of the four tags once, and write nothing before, between or after the two blocks."
    ),
    "boxed": "Work the problem out, then finish with the final answer alone inside \\boxed{}.",
    "text": "",
}

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TAGGED = re.compile(r"\s*<think>.*</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_BOX = "\\boxed{"
_BRACE = re.compile(r"[{}]")


def find_answer(completion: str, form: Form) -> str | None:
    """The answer in a completion; None where the form is not kept.

    >>> find_answer("<think>2+2</think><answer> 4 </answer>", "tags")  # "4"
    """
    match form:
        case "line":
            return next((line.strip() for line in completion.split("\n") if line.strip()), None)
        case "tags":
            return _tagged(completion)
        case "boxed":
            return _last_boxed(completion)
        case "text":
            return completion.strip()


def wrap(answer: str, form: Form, reasoning: str = "") -> str:
    """A perfect completion. Forms that leave no room for reasoning drop it."""
    match form:
        case "line" | "text":
            return answer
        case "tags":
            return f"<think>{reasoning}</think><answer>{answer}</answer>"
        case "boxed":
            return f"{reasoning}\n{_BOX}{answer}}}" if reasoning else f"{_BOX}{answer}}}"


def _tagged(completion: str) -> str | None:
    if any(completion.count(tag) != 1 for tag in _TAGS):
        return None
    tagged = _TAGGED.fullmatch(completion)
    return tagged[1].strip() if tagged else None


def _last_boxed(completion: str) -> str | None:
    """Of the boxes that are closed, the one that begins last. Each brace is looked at once: a
    stranger may open a box in a box as often as there is room.
    """
    opened: list[int] = []  # behind each brace that is not closed yet
    start, stop = -1, -1
    for brace in _BRACE.finditer(completion):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and (inside := opened.pop()) > start and completion.endswith(_BOX, 0, inside):
            start, stop = inside, brace.start()
    return None if start < 0 else completion[start:stop].strip()


def math_reward(answer: str, gold: str) -> float:
    """1 where two answers say the same in mathematics, 0 where not, or UNDECIDED.

    Safe for any text: what is too long, explodes or takes more than its budget of work is not
    equal.

    >>> math_reward("\\frac{1}{2}", "0.5")  # 1.0
    """
    if len(answer) > MAX_ANSWER:
        return 0.0
    plain, plain_gold = _normalised(answer), _normalised(gold)
    if not plain or plain == plain_gold:
        return float(bool(plain))
    number, number_gold = _number(plain), _number(plain_gold)
    if number is not None and number_gold is not None:
        return float(number == number_gold)
    return 0.0 if _explodes(answer) else _verified(_spelt(answer), _spelt(gold))


_REWRITES = [
    (re.compile(r"\\\$|\$|\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\s|\^\{?\\circ\}?"), ""),
    (re.compile(r"\\[dt]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<=.)\.$"), ""),
]
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)


def _normalised(text: str) -> str:
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _number(plain: str) -> Fraction | None:
    """The exact value of a plain decimal number; a percent sign is taken for a unit."""
    digits = plain.removesuffix("%")
    return Fraction(digits) if _DECIMAL.fullmatch(digits) else None


# Powers in exponents, exponents and factorials beyond any answer to a problem, and numbers written
# with such exponents.
_EXPLOSIVE = re.compile(
    r"(?:\^|\*\*)\s*(?:[{(][^})]*\d|[-+]?\d+)\s*(?:\^|\*\*)"
    r"|(?:\^|\*\*)\s*[{(]?\s*[-+]?\d{5,}"
    r"|\d{4,}\s*!|!\s*!\s*!"
    r"|\d\.?[eE][-+]?\d{4,}"
)


def _explodes(answer: str) -> bool:
    """Whether working it out would take forever, perhaps within one call.

    A first sieve; behind it are the budget of the process, and its limits.
    """
    return _depth(answer) > MAX_DEPTH or bool(_EXPLOSIVE.search(answer))


def _depth(text: str) -> int:
    """How deep brackets are opened in each other."""
    steps = ((character in "{([") - (character in "})]") for character in text)
    return max(accumulate(steps), default=0)


def _spelt(text: str) -> str:
    """As math-verify wants it: LaTeX without dollar signs, powers with ^."""
    return text.replace("\\$", "").replace("$", "").replace("**", "^").strip()


class _Verdict:
    """Of two answers; found once, however many threads ask."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reward: float | None = None


# the answers of a group are often the same, and admission asks again what the sampler asked
@lru_cache(maxsize=1 << 16)
def _verdict(answer: str, gold: str) -> _Verdict:
    return _Verdict()


def _verified(answer: str, gold: str) -> float:
    verdict = _verdict(answer, gold)
    with verdict.lock:
        if verdict.reward is None:
            reply = sandbox.call("motley.tasks.answers:verify", answer, gold)
            undecided = reply.outcome == "undecided"
            verdict.reward = UNDECIDED if undecided else float(reply.value is True)
        return verdict.reward


def verify(answer: str, gold: str) -> Callable[[], bool]:
    """What math-verify says of two answers, once it is called.

    Only for a limited process: on a stranger's text it may never end.
    """
    math_verify, bombs = _prepared()

    def equal() -> bool:
        bombs.defuse()
        parsed = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in (gold, answer)]
        return bool(math_verify.verify(*parsed, timeout_seconds=None))

    return equal


# A little of everything, for a parser that is fast on what it has seen.
_USUAL = (
    "\\frac{1}{2}x^2+2x-1",
    "(x+1)^2",
    "2\\sqrt{3}+\\sqrt[3]{2}",
    "\\sin(x)^2+\\cos x",
    "(1, 2)",
    "[1, 2)\\cup(3, \\infty)",
    "\\{1, 2\\}",
    "y=2x+1",
    "1 < x",
    "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
    "\\pi r^2",
    "e^{2x}",
    "\\log_2 8+\\ln x",
    "10\\%",
    "3!+\\binom{5}{2}",
    "|x|",
    "3+4i",
    "5\\cdot 10^3",
    "90^\\circ",
    "\\text{yes}",
)


@cache
def _prepared() -> tuple[Any, ModuleType]:
    """math-verify, with all that it loads when it is used for the first time."""
    math_verify = importlib.import_module("math_verify")
    parsed = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in _USUAL]
    for one, other in pairwise(parsed):
        math_verify.verify(one, other, timeout_seconds=None)
    return math_verify, importlib.import_module("motley.tasks.bombs")
