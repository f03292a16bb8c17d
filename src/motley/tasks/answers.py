"""How an answer is found in a completion, and when two answers are equal. Knows no task.

Forms: "line" is the first line that is not empty; "tags" is F-TIS's
`<think>...</think><answer>...</answer>` and nothing outside; "boxed" is the last \\boxed{...};
"text" is the whole completion.
"""

from __future__ import annotations

import importlib
import re
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from motley.tasks import limited

Form = Literal["line", "tags", "boxed", "text"]

# characters; what is longer is no final answer, and costs a stranger nothing to send
MAX_ANSWER = 256

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
    """Of the boxes that are closed, the one that begins last."""
    start = completion.rfind(_BOX)
    while start >= 0:
        inside = _balanced(completion[start + len(_BOX) :])
        if inside is not None:
            return inside.strip()
        start = completion.rfind(_BOX, 0, start)
    return None


def _balanced(text: str) -> str | None:
    """The text up to the brace that closes one opened before it."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return None


def math_equal(answer: str, gold: str) -> bool:
    """Whether two answers say the same in mathematics.

    Safe for any text: what is too long or explodes is not equal.

    >>> math_equal("\\frac{1}{2}", "0.5")  # True
    """
    if len(answer) > MAX_ANSWER:
        return False
    plain, plain_gold = _normalised(answer), _normalised(gold)
    if not plain or plain == plain_gold:
        return bool(plain)
    number, number_gold = _number(plain), _number(plain_gold)
    if number is not None and number_gold is not None:
        return number == number_gold
    return not _explodes(answer) and _verified(_spelt(answer), _spelt(gold))


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
    """Whether working it out would take forever.

    A first sieve, the same on every machine; the limits of the process are the wall.
    """
    return bool(_EXPLOSIVE.search(answer))


def _spelt(text: str) -> str:
    """As math-verify wants it: LaTeX without dollar signs, powers with ^."""
    return text.replace("\\$", "").replace("$", "").replace("**", "^").strip()


# the answers of a group are often the same, and admission asks again what the sampler asked
@lru_cache(maxsize=1 << 16)
def _verified(answer: str, gold: str) -> bool:
    return limited.call("motley.tasks.answers:verify", answer, gold) is True


def verify(answer: str, gold: str) -> bool:
    """What math-verify says of two answers.

    Only for a limited process: on a stranger's text it may never end.
    """
    math_verify = importlib.import_module("math_verify")
    limited.limit()
    parsed = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in (gold, answer)]
    return bool(math_verify.verify(*parsed, timeout_seconds=None))
