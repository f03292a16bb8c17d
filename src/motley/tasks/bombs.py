"""What sympy would compute in one long operation, from a few characters: it fails at once instead.

Such an operation has no function calls to be counted, so that the clock would have to end it. Only
for a process of its own: it changes sympy for good. Knows no task.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
from mpmath.libmp import libelefun  # type: ignore[import-untyped]
from sympy.core import evalf  # type: ignore[import-untyped]
from sympy.core.numbers import Integer, Rational  # type: ignore[import-untyped]
from sympy.functions.combinatorial import factorials, numbers  # type: ignore[import-untyped]
from sympy.ntheory import multinomial  # type: ignore[import-untyped]

MAX_BITS = 1 << 17  # of a power; about 40,000 digits
MAX_ROOT_BITS = 1 << 12  # of what a root is taken of: its factors are looked for
MAX_PRECISION = 1 << 14  # bits that a number is worked out to: a huge angle takes as many of pi
MAX_TERMS = 10_000  # of a power of a sum
MAX_ARGUMENT = 10_000  # of a factorial, a binomial and their like


class BombError(ValueError):
    """What nobody needs to compute to tell two answers apart."""


@functools.cache
def defuse() -> None:
    """From here on sympy computes nothing that explodes."""
    for kind in (Integer, Rational):
        kind._eval_power = _bounded_power(kind._eval_power)
    evalf.evalf = _bounded_precision(evalf.evalf, place=1)
    for name in ("pi_fixed", "ln2_fixed"):
        setattr(libelefun, name, _bounded_precision(getattr(libelefun, name), place=0))
    multinomial.multinomial_coefficients = _bounded_terms(multinomial.multinomial_coefficients)
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
            most = MAX_BITS if exponent.is_Integer else MAX_ROOT_BITS
            if bits > 1 and bits * abs(int(exponent.p)) > most:
                raise BombError(f"{bits} bits to the power of {exponent}")
        return power(base, exponent, *others)

    return bounded


def _bounded_precision(work_out: Callable[..., Any], place: int) -> Callable[..., Any]:
    """`place`: of the argument `prec`, which says how many bits."""

    @functools.wraps(work_out)
    def bounded(*arguments: Any, **named: Any) -> Any:
        bits = named["prec"] if "prec" in named else arguments[place]
        if bits > MAX_PRECISION:
            raise BombError(f"a number to {bits} bits")
        return work_out(*arguments, **named)

    return bounded


def _bounded_terms(expand: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expand)
    def bounded(summands: int, power: int) -> Any:
        if (terms := math.comb(power + summands - 1, summands - 1)) > MAX_TERMS:
            raise BombError(f"a sum of {terms} terms")
        return expand(summands, power)

    return bounded


def _bounded_arguments(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(evaluate)
    def bounded(function: Any, *arguments: Any) -> Any:
        for argument in map(sympy.sympify, arguments):
            if argument.is_Rational and abs(argument) > MAX_ARGUMENT:
                raise BombError(f"{function.__name__} of more than {MAX_ARGUMENT}")
        return evaluate(function, *arguments)

    return bounded
