"""One way to write a moment and a duration on all pages: that of `admin/texts.py`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.utils import timezone

import django_mq
from django_mq.admin.texts import clock, moment_text
from tests.admin.pages import text, url
from tests.admin.test_permissions import addresses, rows  # noqa: F401
from tests.rows import add

TEMPLATES = Path(django_mq.__file__).parent / "templates"


@pytest.mark.parametrize("template", sorted(TEMPLATES.rglob("*.html")), ids=lambda path: path.name)
def test_no_template_writes_a_time_by_itself(template):
    assert not re.search(
        r"\|\s*(date|time|timesince|timeuntil|naturaltime)\b", template.read_text()
    )


#: How the stock admin writes a moment and a duration.
STOCK = re.compile(r"[A-Z][a-z]+\.? \d{1,2}, \d{4}|\d [ap]\.m\.|\d+:\d\d:\d\d\.\d+|days?, \d+:\d\d")


@pytest.mark.django_db
def test_no_page_leaves_a_time_to_the_stock_admin(boss, rows):  # noqa: F811
    for address in addresses(rows):
        if "/history/" not in address:
            found = STOCK.search(text(boss.get(address)))
            assert not found, (address, found)


@pytest.mark.django_db
def test_a_moment_is_in_the_current_time_zone(boss, settings):
    row = add(after=600)
    page = url("queuedmessage", "change", row.pk)
    seen = set()
    for zone in ("Asia/Kolkata", "America/Lima"):
        settings.TIME_ZONE = zone
        seen.add(moment_text(row.processable_after))
        assert moment_text(row.processable_after) in text(boss.get(page))
    assert len(seen) == 2


def test_moments_and_times_of_day():
    at = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)
    with timezone.override("Europe/Berlin"):
        assert moment_text(at) == clock(at) == "2026-03-02 00:30:00"
    now = timezone.now()
    assert clock(now) == f"{timezone.localtime(now):%H:%M:%S}"
    assert clock(now - timedelta(days=2)) == moment_text(now - timedelta(days=2))
