"""The page of a message put aside."""

from __future__ import annotations

from datetime import UTC, datetime
from html import unescape

import pytest

from django_mq.models import UniqueKey
from tests.admin.pages import text, url

pytestmark = pytest.mark.django_db


@pytest.fixture
def page(boss, settings):
    settings.TIME_ZONE = "Europe/Berlin"

    def page(**aside):
        row = UniqueKey.objects.create(queue="mail", type="t", unique_id="u", put_aside=aside)
        return unescape(text(boss.get(url("uniquekey", "change", row.pk))))

    return page


def test_its_moments_are_shown_as_times(page):
    """They are stored as seconds since 1970, which mean nothing to an operator."""
    due = datetime(2031, 5, 4, 9, 30, 15, tzinfo=UTC).timestamp()
    shown = page(payload={"due": due}, due=due, expires=None, unique_for=90.0)
    assert '"due": "2031-05-04 11:30:15"' in shown
    assert '"expires": null' in shown
    assert f'"due": {due}' in shown, "the payload is as it was sent"
    assert '"unique_for": 90.0' in shown


@pytest.mark.parametrize("due", [1e300, -1e300, "soon", True, [7], {"a": 1}])
def test_invalid_due_time_does_not_break_the_page(page, due):
    assert '"payload": 1' in page(payload=1, due=due)
