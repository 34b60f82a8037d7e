"""Figures are stored once however often they are written, added up once, and forgotten."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from django_mq.conf import get_settings
from django_mq.models import HourFigures, MinuteFigures
from django_mq.store import Cursor, figures
from django_mq.store.figures import ArrivalCount, MinuteRow
from django_mq.worker import retention

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


@pytest.fixture
def cursor(db: None) -> Any:
    with connection.cursor() as cursor:
        yield cursor


def this_hour() -> datetime:
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


def row(at: datetime, *, queue: str = "mail", handler: str = "h", **given: Any) -> MinuteRow:
    counts = {"acked": 0, "failed": 0, "retried": 0, "dead": 0, "waited": {}, "ran": {}, **given}
    return MinuteRow(int(at.timestamp()), queue, handler, **counts)


def test_a_row_is_written_again_and_counts_once(cursor: Cursor) -> None:
    """The answer may be lost, and the statement repeated."""
    at = this_hour()
    for acked in (1, 5, 5):
        rows = [row(at, acked=acked, ran={40: acked}), row(at, queue="", handler="", dead=1)]
        figures.write(cursor, worker="w", rows=rows)
        arrived = [ArrivalCount(int(at.timestamp()), "mail", "h", acked + 1)]
        figures.write_arrived(cursor, worker="w", rows=arrived)
    figures.write(cursor, worker="v", rows=[row(at, acked=7)])
    found = MinuteFigures.objects.filter(queue="mail").order_by("worker").values()
    assert [(each["worker"], each["acked"], each["broadcast"], each["ran"]) for each in found] == [
        ("v", 7, 0, {}),
        ("w", 5, 6, {"40": 5}),
    ]
    assert MinuteFigures.objects.get(queue="").dead == 1


def test_messages_may_arrive_in_a_minute_without_a_row(cursor: Cursor) -> None:
    at = this_hour()
    figures.write_arrived(
        cursor, worker="w", rows=[ArrivalCount(int(at.timestamp()), "mail", "h", 3)]
    )
    found = MinuteFigures.objects.get()
    assert (found.minute, found.acked, found.broadcast, found.waited) == (at, 0, 3, {})


def test_hours_are_added_up_once_their_minutes_are_final(cursor: Cursor) -> None:
    hour = this_hour() - 5 * HOUR
    first, last = hour, hour + timedelta(minutes=59)
    figures.write(cursor, worker="w", rows=[row(first, acked=2, ran={40: 2}, waited={9: 1})])
    figures.write(cursor, worker="v", rows=[row(last, acked=3, dead=1, ran={40: 1, 120: 2})])
    figures.write(cursor, worker="v", rows=[row(last, queue="post", failed=1, retried=1)])
    arrived = [ArrivalCount(int(last.timestamp()), "mail", "h", 9)]
    figures.write_arrived(cursor, worker="v", rows=arrived)
    figures.write(cursor, worker="v", rows=[row(hour + 3 * HOUR, acked=1)])
    # Workers may still write minutes of this hour.
    figures.write(cursor, worker="v", rows=[row(this_hour() - HOUR, acked=8)])
    assert [figures.roll_up(cursor) for _ in range(4)] == [True, True, False, False]
    mail, post, later = HourFigures.objects.order_by("hour", "queue")
    assert (mail.hour, mail.queue, mail.handler, mail.acked, mail.dead) == (hour, "mail", "h", 5, 1)
    assert (mail.broadcast, mail.waited, mail.ran) == (9, {"9": 1}, {"40": 3, "120": 2})
    assert (post.queue, post.failed, post.retried, post.ran) == ("post", 1, 1, {})
    assert (later.hour, later.acked) == (hour + 3 * HOUR, 1)
    assert MinuteFigures.objects.count() == 5  # the minutes stay


def test_an_hour_that_is_added_up_stays_as_it_is(cursor: Cursor) -> None:
    """Some of its minutes may be deleted, and odd rows of others lie in the future."""
    hour = this_hour() - 5 * HOUR
    HourFigures.objects.create(hour=this_hour() + 1000 * HOUR, queue="odd")
    figures.write(cursor, worker="w", rows=[row(hour, acked=2)])
    assert figures.roll_up(cursor)
    MinuteFigures.objects.all().delete()
    figures.write(cursor, worker="w", rows=[row(hour, acked=1)])
    assert not figures.roll_up(cursor)
    assert HourFigures.objects.get(queue="mail").acked == 2


def test_old_figures_are_forgotten_after_they_are_added_up(
    cursor: Cursor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PIECE_ROWS", 2)
    old = this_hour() - timedelta(seconds=retention.MINUTES_KEPT) - 2 * HOUR
    figures.write(cursor, worker="w", rows=[row(old, acked=2), row(this_hour(), acked=1)])
    HourFigures.objects.create(
        hour=this_hour() - timedelta(seconds=retention.HOURS_KEPT) - HOUR, queue="mail"
    )
    MinuteFigures.objects.create(minute=this_hour() + 48 * HOUR, worker="odd")
    while retention.roll_up_figures(cursor, get_settings(), None):
        pass
    assert [each.acked for each in HourFigures.objects.all()] == [2]
    assert [each.acked for each in MinuteFigures.objects.all()] == [1]
