"""Cases of parametrized tests that a plain run leaves to CI."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Return these cases, marked `slow`: a plain run tests the promise with the others.

    A tuple has the values of several arguments, as in `pytest.mark.parametrize`.
    """
    return [
        pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
        if isinstance(case, type(pytest.param()))
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def mostly_slow(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of values, in which a plain run has each value at least once.

    >>> [case.values for case in mostly_slow("abc", [1, 2]) if not case.marks]
    [('a', 1), ('b', 2), ('c', 2)]
    """
    plain = {
        tuple((n + place * (n // len(axis))) % len(axis) for place, axis in enumerate(axes))
        for n in range(max(map(len, axes)))
    }
    return [
        pytest.param(*values, marks=() if numbers in plain else pytest.mark.slow)
        for numbers, values in zip(
            product(*(range(len(axis)) for axis in axes)), product(*axes), strict=True
        )
    ]
