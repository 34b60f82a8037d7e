"""Figures over time, and the rates at which queues fill and drain."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from django_mq import queues
from django_mq.exceptions import InvalidName
from django_mq.models import HourFigures, MinuteFigures
from django_mq.queues import Rate
from django_mq.store import figures, read_figures
from tests.rows import add, insert_all
from tests.test_docs import ROOT, snippets

pytestmark = pytest.mark.django_db

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
#: What a rate loses when it is turned back into seconds.
CLOSE = timedelta(milliseconds=1)


def now() -> datetime:
    """The database's time, as in the rows; the next call may be in the next minute."""
    with connection.cursor() as cursor:
        cursor.execute("select statement_timestamp()")
        return cursor.fetchone()[0]


def minute(at: datetime, worker: str = "w", queue: str = "mail", handler: str = "h", **given):
    at = at.replace(second=0, microsecond=0)
    MinuteFigures.objects.create(minute=at, worker=worker, queue=queue, handler=handler, **given)


def test_figures_by_step_and_by_handler():
    at = now()
    minute(at, acked=2, ran={"40": 2}, waited={"30": 2})
    minute(at, worker="v", acked=1, failed=1, retried=1, ran={"40": 1, "67": 1})
    minute(now() - 30 * MINUTE, queue="post", handler="", dead=4, broadcast=5)
    minute(now() - 70 * MINUTE, acked=99)
    found = queues.figures()
    assert (found.span, found.step, len(found.steps)) == ("hour", MINUTE, 60)
    ats = list(found.steps)
    assert ats == sorted(ats)
    assert ats[-1] <= found.now < ats[-1] + MINUTE
    last = [each for each in found.steps.values() if each.acked][-1]
    assert (last.acked, last.failed, last.retried, last.dead) == (3, 1, 1, 0)
    assert last.ran.count == 4
    assert last.ran.p50 == pytest.approx(0.009, rel=0.13)
    assert last.ran.p99 == pytest.approx(4.47, rel=0.13)
    assert last.waited.count == 2
    assert set(found.handlers) == {("mail", "h"), ("post", "")}
    assert found.handlers["mail", "h"].ran == last.ran
    assert (found.total.acked, found.total.dead, found.total.broadcast) == (3, 4, 5)
    empty = found.steps[ats[0]]
    assert (empty.acked, empty.ran, empty.waited) == (0, None, None)


@pytest.mark.parametrize(("span", "count", "step"), [("day", 24, HOUR), ("week", 56, 3 * HOUR)])
def test_longer_spans_have_hours(span, count, step):
    """Hours that are added up, then the newer minutes, each counted once."""
    hour = now().replace(minute=0, second=0, microsecond=0)
    for ago in (200, 20, 5):
        HourFigures.objects.create(hour=hour - ago * HOUR, queue="mail", handler="h", acked=10)
        minute(hour - ago * HOUR, acked=10)  # added up already
    minute(hour - 2 * HOUR, acked=3, ran={"40": 3})
    minute(now(), acked=1)
    found = queues.figures(span)
    assert (len(found.steps), found.step) == (count, step)
    assert found.total.acked == 24
    assert found.handlers["mail", "h"].acked == 24
    assert found.total.ran.count == 3


def test_figures_of_some_queues():
    for name in ("mail", "post", "other"):
        minute(now(), queue=name, acked=1)
    assert queues.figures(queue="mail").total.acked == 1
    found = queues.figures("week", queue={"mail", "post"})
    assert (found.total.acked, len(found.handlers)) == (2, 2)
    assert queues.figures(queue=[]).total.acked == 0
    with pytest.raises(InvalidName):
        queues.figures(queue="no such name")
    with pytest.raises(ValueError, match="hour, day or week"):
        queues.figures("year")


def test_messages_whose_first_attempt_has_not_ended_came_in_too():
    """Waiting, or running for the first time; a worker counts all others."""
    minute(now() - 2 * MINUTE, broadcast=5)
    add(created=-60), add(created=-60, leased=60, attempts=1), add("post", created=-1)
    add(created=-60, attempts=1), add(created=-60, dead=-1), add(created=-8000)
    found = queues.figures()
    assert found.total.broadcast == 8
    assert sum(each.broadcast for each in found.handlers.values()) == 5
    assert queues.figures(queue="post").total.broadcast == 1


def test_rates_are_those_of_about_five_minutes():
    minute(now() - 2 * MINUTE, acked=500, dead=100, broadcast=300)
    minute(now() - 20 * MINUTE, acked=7000, broadcast=7000)
    for ago in (4, 3):  # the next minute may begin before the rates are read
        minute(now() - ago * MINUTE, queue="other", acked=1)
    minute(now(), queue="post", acked=30)
    insert_all([{"created": -1}] * 60)
    found = queues.rates()
    assert set(found) == {"mail", "other", "post"}
    mail = found["mail"]
    assert 600 / 300 <= mail.outgoing <= 600 / 240
    assert mail.incoming == pytest.approx(mail.outgoing * 360 / 600)
    assert not mail.at_least
    assert found["post"].incoming == 0
    assert set(queues.rates(queue="post")) == {"post"}


def test_soon_after_a_start_rates_are_those_since_the_first_counted_minute():
    """Whichever queue it is of: in a busy fleet, a queue may have nothing to do for minutes."""
    minute(now() - 20 * MINUTE, acked=7000)
    first = (now() - 2 * MINUTE).replace(second=0, microsecond=0)
    minute(first, acked=600, broadcast=300)
    minute(now(), queue="post", acked=30)
    add("post", created=-1)
    for queue in None, ["mail", "post"]:
        before, found, after = now(), queues.rates(queue=queue), now()
        seconds = timedelta(seconds=600 / found["mail"].outgoing)
        assert before - CLOSE <= first + seconds <= after + CLOSE
        assert found["mail"].incoming == pytest.approx(found["mail"].outgoing / 2)
        assert found["post"].outgoing == pytest.approx(found["mail"].outgoing / 20)
        assert found["post"].incoming == pytest.approx(found["mail"].outgoing / 600)
    alone, all_ = queues.rates(queue="post")["post"], queues.rates()["post"]
    assert alone.outgoing == pytest.approx(all_.outgoing, rel=0.1)


def test_the_seconds_of_a_first_minute_are_no_rate():
    """A message in the first second of a minute is not one per second."""
    minute(now(), acked=60)
    assert queues.rates()["mail"].outgoing <= 1.0


def test_messages_that_waited_for_the_start_came_in_before_it():
    minute(now(), acked=60)
    insert_all([{"created": -200}] * 60)
    assert queues.rates()["mail"].incoming <= 60 / 180


def test_a_flood_is_counted_as_far_as_it_is_looked_at(monkeypatch):
    """The newest messages alone give the rate."""
    monkeypatch.setattr(read_figures, "NEWEST", 50)
    insert_all([{"created": -10}] * 80)
    found = queues.rates()["mail"]
    assert found.at_least
    assert 50 / 20 < found.incoming <= 50 / 10


@pytest.mark.parametrize(
    ("rate", "depth", "seconds"),
    [
        (Rate(incoming=1.0, outgoing=3.0), 20, 10),
        (Rate(incoming=3.0, outgoing=3.0), 20, None),
        (Rate(incoming=3.0, outgoing=1.0), 20, None),
        (Rate(outgoing=1e-9), 20, None),
        (Rate(incoming=9.0), 0, 0),
    ],
)
def test_when_a_queue_will_be_empty(rate, depth, seconds):
    wanted = None if seconds is None else timedelta(seconds=seconds)
    assert rate.empty_in(depth) == wanted


def test_figures_of_a_worker_can_be_read():
    at = int(datetime.now(UTC).timestamp()) // 60 * 60
    row = figures.MinuteRow(at, "mail", "h", 3, 1, 1, 0, {40: 3}, {54: 4})
    with connection.cursor() as cursor:
        figures.write(cursor, worker="w", rows=[row])
    total = queues.figures().total
    assert (total.acked, total.waits, total.runs) == (3, {40: 3}, {54: 4})


def test_the_snippet_of_the_manual_runs(capsys):
    minute(now(), acked=3, dead=1, waited={"40": 3})
    [code] = [each for each in snippets(ROOT / "docs/operating.md", "python") if "figures(" in each]
    exec(compile(code, "operating.md", "exec"), {})  # noqa: S102
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("3 0.008")
    assert told[-1].startswith("mail 0.0 0.0")
