"""Chores as a worker does them: whose turn it is, and what is said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from django_mq.conf import get_settings
from django_mq.models import QueueState
from django_mq.worker import chores
from tests.database import second_connection
from tests.rows import add, columns
from tests.worker.conftest import Said

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]


@pytest.fixture
def cursor(transactional_db: None) -> Iterator[Cursor]:
    with second_connection() as own, own.cursor() as cursor:
        yield cursor


def turn(cursor: Cursor) -> None:
    """Let the next turn of the fleet come now."""
    QueueState.objects.update(chores_ran_at=None)
    chores.run(cursor, get_settings())


def warnings(said: Said) -> list[tuple[str, int, int]]:
    return [
        (data["queue"], data["depth"], data["warn_depth"])
        for name, _, data in said.all
        if name == "queue_deep"
    ]


def test_a_deep_queue_is_said_once(cursor: Cursor, said: Said, settings: Any, caplog: Any) -> None:
    """CAR-38: by one of the fleet, not again within warn_every, even if it sank meanwhile."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"warn_depth": 2, "warn_every": 3600}}}
    rows = [add() for _ in range(2)]
    add("post")
    turn(cursor)
    assert warnings(said) == []
    rows += [add(after=60), add(blocked_by=rows[0].pk, key="k")]
    chores.run(cursor, get_settings())  # a sibling has just done the chores
    assert warnings(said) == []
    turn(cursor)
    turn(cursor)
    assert warnings(said) == [("mail", 4, 2)]
    [line] = [each for each in caplog.records if getattr(each, "event", "") == "queue_deep"]
    assert (line.levelname, line.queue) == ("WARNING", "mail")
    assert "4 waiting messages" in line.getMessage()
    for row in rows[:3]:
        row.delete()
    turn(cursor)
    rows = [add() for _ in range(5)]
    turn(cursor)
    assert len(warnings(said)) == 1
    QueueState.objects.update(warned_at=columns({"created": -3700})["created_at"])
    turn(cursor)
    assert warnings(said)[1:] == [("mail", 6, 2)]


def test_the_default_is_a_thousand_and_nothing_is_never(
    cursor: Cursor, said: Said, settings: Any
) -> None:
    """CAR-38: a queue that the settings do not list has the defaults; 0 turns it off."""
    settings.DJANGO_MQ = {"QUEUES": {"quiet": {"warn_depth": 0}}}
    for queue, count in (("mail", 1000), ("quiet", 1500)):
        cursor.execute(
            "insert into django_mq_queuedmessage (queue, type, payload)"
            " select %s, 't', '{}' from generate_series(1, %s)",
            [queue, count],
        )
    turn(cursor)
    assert warnings(said) == []
    add()
    turn(cursor)
    assert warnings(said) == [("mail", 1001, 1000)]


def test_a_large_number_is_not_counted_out(
    cursor: Cursor, said: Said, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(chores, "MOST_COUNTED", 1200)
    cursor.execute(
        "insert into django_mq_queuedmessage (queue, type, payload)"
        " select 'mail', 't', '{}' from generate_series(1, 1500)"
    )
    turn(cursor)
    assert warnings(said) == [("mail", 1200, 1000)]
    assert "at least 1,200 waiting messages" in caplog.text
