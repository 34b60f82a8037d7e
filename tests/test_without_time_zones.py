"""A project with USE_TZ off: Django and its cursors return naive datetimes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.db.models.functions import Now

from django_mq import handler, handlers, queues
from django_mq.models import HandledMessage
from tests.admin.conftest import boss, login  # noqa: F401
from tests.admin.pages import text, told, url
from tests.admin.test_editing import change
from tests.admin.test_permissions import addresses, rows  # noqa: F401
from tests.management.conftest import run
from tests.rows import add, beat, decide, stored, tally

pytestmark = pytest.mark.django_db

#: Far from UTC, so that a moment which is taken for another zone's shows.
ZONE = "Asia/Tokyo"
LIST = "/admin/django_mq/queuedmessage/"


@pytest.fixture(autouse=True)
def _naive(settings):
    settings.TIME_ZONE = ZONE
    settings.USE_TZ = False


def in_the_zone(seconds: float) -> datetime:
    return datetime.now(ZoneInfo(ZONE)).replace(tzinfo=None) + timedelta(seconds=seconds)


def test_all_pages_can_be_read(boss, rows):  # noqa: F811
    decide("mail", paused=-1, until=600)
    decide("other", backoff_level=2, backoff=600)
    for address in addresses(rows):
        assert boss.get(address).status_code == 200, address


@pytest.mark.parametrize(
    "query", ["created_at_from=24h", "processable_after_to=2126-01-01T00:00", "created_at_to=0m"]
)
def test_filters_by_time(boss, query):  # noqa: F811
    row = add(created=-60, after=-60)
    found = boss.get(f"{LIST}?{query}")
    assert [each.pk for each in found.context["cl"].result_list] == [row.pk]


def test_times_of_pages_are_those_of_the_zone(boss):  # noqa: F811
    row = add(after=7200)
    page = text(boss.get(url("queuedmessage", "change", row.pk)))
    assert (
        f"{in_the_zone(7200):%Y-%m-%d %H:}" in page or f"{in_the_zone(7190):%Y-%m-%d %H:}" in page
    )
    assert "in 1 h 59 min" in page or "in 2 h" in page


def test_exports(boss):  # noqa: F811
    row = add()
    found = boss.post(f"{LIST}export/csv/")
    assert str(row.pk) in b"".join(found.streaming_content).decode()


def test_a_due_time_is_edited(boss):  # noqa: F811
    row = add(after=600, expires=90_000)
    due = in_the_zone(3600).replace(microsecond=0)
    done = change(boss, row, due=f"{due:%Y-%m-%dT%H:%M:%S}")
    assert told(done) == [f"Message {row.pk} has been changed."]
    assert stored(row).processable_after == due


def test_a_replay_since_some_time_ago():
    with handlers.isolated():
        handler("t", queue="mail", name="h")(print)
        HandledMessage.objects.create(
            id=1, queue="mail", type="t", payload={}, metadata={}, keep_until=Now()
        )
        found = run("mq_replay", "--since", "1h", "--to", "h", "--dry-run")
    assert found == "Would replay 1 message.\n"


def test_the_last_call_of_a_handler():
    """Live workers say it in UTC, stored figures in the zone."""
    called = datetime.now(UTC) - timedelta(hours=1)
    with handlers.isolated():
        handler("t", queue="mail", name="h")(print)
        beat(timings={"h": tally(acked=3, last_at=called)})
        (subscriber,) = queues.topology().handlers
    assert subscriber.last_at == called
