"""What sympy would compute in one long operation, from a few characters: it fails at once instead.

Such an operation has no function calls to be counted, so that the clock would have to end it. Only
for a process of its own: it changes sympy for good. Knows no task.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
from sympy.core.numbers import Integer, Rational  # type: ignore[import-untyped]
from sympy.functions.combinatorial import factorials, numbers  # type: ignore[import-untyped]

MAX_BITS = 1 << 17  # of a power; about 40,000 digits
MAX_ARGUMENT = 10_000  # of a factorial, a binomial and their like


class BombError(ValueError):
    """What nobody needs to compute to tell two answers apart."""


@functools.cache
def defuse() -> None:
    """From here on sympy computes nothing that explodes."""
    for kind in (Integer, Rational):
        kind._eval_power = _bounded_power(kind._eval_power)
    for module in (factorials, numbers):
        for name in module.__dict__.copy():
            if _is_function(function := getattr(module, name)):
                function.eval = classmethod(_bounded_arguments(function.eval.__func__))


def _is_function(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, sympy.Function)


def _bounded_power(power: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(power)
    def bounded(base: Any, exponent: Any, *others: Any) -> Any:
        if exponent.is_Rational:
            bits = max(int(base.p).bit_length(), int(base.q).bit_length())
            if bits > 1 and bits * abs(int(exponent.p)) > MAX_BITS:
                raise BombError(f"{bits} bits to the power of {exponent}")
        return power(base, exponent, *others)

    return bounded


def _bounded_arguments(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(evaluate)
    def bounded(function: Any, *arguments: Any) -> Any:
        for argument in map(sympy.sympify, arguments):
            if argument.is_Rational and abs(argument) > MAX_ARGUMENT:
                raise BombError(f"{function.__name__} of more than {MAX_ARGUMENT}")
        return evaluate(function, *arguments)

    return bounded
