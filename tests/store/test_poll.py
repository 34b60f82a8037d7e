"""A look finds lanes and their due messages."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from django_mq.store.poll import poll
from tests.rows import add

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]


def test_look_sees_lanes_and_the_next_due_time(cursor: Cursor) -> None:
    """PMQ-26: the due and the future messages of a lane are not mixed up."""
    add("b", after=-5)
    add("b", after=60)
    add("b", after=600, priority=9)
    add("a", after=30, priority=-100)
    add("c", dead=-1)
    add("d", leased=5)
    add("e", leased=-5)
    add("f", blocked_by=1)
    lanes = {(s.queue, s.number): s for s in poll(cursor) if s.kind == "lane"}
    assert set(lanes) == {("b", 0), ("b", 9), ("a", -100)}
    assert [lanes[lane].due for lane in (("b", 0), ("b", 9), ("a", -100))] == [True, False, False]
    assert [round(lanes[lane].next_in or 0, -1) for lane in (("b", 0), ("b", 9), ("a", -100))] == [
        60,
        600,
        30,
    ]
    assert [s.queue for s in poll(cursor) if s.kind == "leased"] == ["d", "e"]


def test_look_sees_nothing_in_an_empty_table(cursor: Cursor) -> None:
    assert poll(cursor) == []
