"""Marks for some of a test's cases.

`make test` leaves out what is `slow`, unless it is also `quick`: one of a slow module that stands
for the others.
"""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet


def slow(*values: object) -> ParameterSet:
    return pytest.param(*values, marks=pytest.mark.slow)


def quick(*values: object) -> ParameterSet:
    return pytest.param(*values, marks=pytest.mark.quick)
