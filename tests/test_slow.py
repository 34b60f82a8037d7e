"""A plain run leaves the slow cases to CI, and keeps each value and each kind of fault."""

from __future__ import annotations

import pytest

from tests.faults.kinds import KINDS
from tests.faults.points import third
from tests.faults.slow import few_of_each_kind
from tests.slow import mostly_slow, slow


def plain(cases: list[object]) -> list[tuple[object, ...]]:
    """Return the values of the cases that are not marked."""
    return [
        case.values if isinstance(case, type(pytest.param())) else case
        for case in cases
        if not getattr(case, "marks", ())
    ]


def test_marked_cases_keep_their_values_marks_and_ids() -> None:
    one, two, three = slow(1, ("a", 2), pytest.param(3, id="three", marks=pytest.mark.thorough))
    assert (one.values, two.values, three.values, three.id) == ((1,), ("a", 2), (3,), "three")
    assert [mark.name for mark in three.marks] == ["thorough", "slow"]
    assert plain([one, two, three, 4]) == [4]


@pytest.mark.parametrize("sizes", [(1,), (8, 8), (24, 2, 2), (2, 3, 4), (4, 2), (3, 5, 2, 2)])
def test_of_combinations_a_plain_run_has_each_value(sizes: tuple[int, ...]) -> None:
    axes = [range(size) for size in sizes]
    cases = mostly_slow(*axes)
    assert len({case.values for case in cases}) == len(cases)
    kept = plain(cases)
    assert len(kept) == max(sizes)
    assert [set(values) for values in zip(*kept, strict=True)] == [set(axis) for axis in axes]


@pytest.mark.parametrize("seed", range(3))
def test_a_plain_run_has_every_kind_of_fault(seed: int) -> None:
    pairs = third(list(KINDS), seed=seed)
    kept = plain(few_of_each_kind(pairs))
    assert {kind for _, kind in kept} == {kind for _, kind in pairs}
    assert len(kept) < len(pairs) / 2
