"""Lines that a claim leaves, because no thread would run their messages now."""

from __future__ import annotations

import pytest

from tests.rows import add, pks
from tests.worker.fetcher.conftest import Rig

pytestmark = pytest.mark.django_db(transaction=True)


def test_lines_that_are_left_are_claimed_once_a_thread_is_free(rig: Rig) -> None:
    """The claim does not look for them again before, whoever rings."""
    taken, left = add(handler="h", key="a", after=-60), add(handler="h", key="b", after=-50)
    rig.make()
    rig.line_limits = lambda handlers: [1, *[0] * (len(handlers) - 1)]
    rig.fetcher.fetch(rig.cursor)
    assert rig.ids() == pks(taken)
    rig.thread_is_free = False
    for _ in range(3):
        rig.fetcher.on_ring()
        before = rig.cursor.asked.count("keyed")
        rig.fetcher.fetch(rig.cursor)
        assert rig.cursor.asked.count("keyed") == before
    rig.thread_is_free = True
    assert rig.settle() > 0
    assert rig.ids() == pks(left)


def test_full_window_of_left_lines_does_not_spin(rig: Rig) -> None:
    for n in range(300):
        add(handler="h", key=f"k{n}", after=-60)
    rig.make()
    rig.line_limits = lambda handlers: [0] * len(handlers)
    assert rig.settle() > 0.1
    assert rig.ids() == []
