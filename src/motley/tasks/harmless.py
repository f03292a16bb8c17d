"""Which answers may be handed to a scorer that evaluates text as Python or through sympy.

Knows no dataset by name.

Some of reasoning-gym's scorers do so with whatever a model wrote: in a crew that is a stranger's
program. Only text that can do nothing when evaluated passes; for the others the scorer is not
called, and the answer is wrong.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import warnings
from typing import Literal

Evaluates = Literal["nothing", "python", "sympy"]

# characters
MAX_EVALUATED: dict[Evaluates, int] = {"nothing": 1 << 16, "python": 4096, "sympy": 1024}
MAX_EXPONENT = 64

_FUNCTIONS = {"sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan"}
_LITERAL = (
    ast.Expression,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.Name,
    ast.UnaryOp,
    ast.unaryop,
    ast.Load,
)
_ARITHMETIC = (
    ast.Expression,
    ast.Constant,
    ast.Name,
    ast.UnaryOp,
    ast.unaryop,
    ast.BinOp,
    ast.operator,
    ast.Call,
    ast.Load,
)
# As a fraction or an integer, such a number fills the memory.
_HUGE_EXPONENT = re.compile(r"(?<![\w.])(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?[\d_]{4,}")


def evaluates(scorer: type) -> Evaluates:
    """What a scorer's module does with text, judged by its source.

    The worst is assumed where there is none.
    """
    try:
        source = inspect.getsource(sys.modules[scorer.__module__])
    except OSError:
        return "python"
    if re.search(r"\b(eval|exec)\(", source):
        return "python"
    return (
        "sympy"
        if "sympy" in source and re.search(r"\b(parse_expr|sympify)\(", source)
        else "nothing"
    )


def is_harmless(answer: str, evaluated: Evaluates) -> bool:
    """Whether evaluating an answer in that way can do no more than fail.

    >>> is_harmless("[[0, 1], [1, 0]]", "python")  # True
    >>> is_harmless("__import__('os').abort()", "python")  # False
    """
    if len(answer) > MAX_EVALUATED[evaluated] or _HUGE_EXPONENT.search(answer):
        return False
    if evaluated == "nothing":
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's remarks on a stranger's spelling
            tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError):
        # evaluating fails in the same way; sympy reads more than Python does
        return evaluated == "python"
    except (RecursionError, MemoryError):
        return False
    nodes = list(ast.walk(tree))
    if evaluated == "python":
        return all(isinstance(node, _LITERAL) for node in nodes)
    return all(isinstance(node, _ARITHMETIC) and _is_tame(node) for node in nodes)


def _is_tame(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.Name(id=name):
            return len(name) == 1 or name in _FUNCTIONS
        case ast.Call(func=ast.Name(id=name), args=[_], keywords=[]):
            return name in _FUNCTIONS
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            return _is_small(exponent) and not any(
                isinstance(part, ast.Pow) for part in ast.walk(base)
            )
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
            return True
        case ast.BinOp() | ast.Call():
            return False
    return True


def _is_small(exponent: ast.AST) -> bool:
    match exponent:
        case ast.UnaryOp(operand=operand):
            return _is_small(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _is_small(left) and _is_small(right)
        case ast.Constant(value=int() | float() as value):
            return abs(value) <= MAX_EXPONENT
    return False
