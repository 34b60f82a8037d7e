"""A router that reads from a replica, which does not have the rows yet."""

from __future__ import annotations

import pytest

from django_mq import queues
from django_mq.models import FailedAttempt
from tests.admin.pages import text, url
from tests.rows import add

pytestmark = pytest.mark.django_db


class ReadsElsewhere:
    """Reads the tables of messages from an alias that cannot be used."""

    def db_for_read(self, model, **hints):
        return "replica" if model._meta.app_label == "django_mq" else None

    def db_for_write(self, model, **hints):
        return "default"


@pytest.fixture
def elsewhere(settings):
    settings.DATABASE_ROUTERS = [ReadsElsewhere()]


def test_an_attempt_is_shown_with_its_traceback(boss, elsewhere):
    attempt = FailedAttempt.objects.using("default").create(
        message_id=1, queue="mail", type="a", attempt=1, traceback="File orders.py"
    )
    page = boss.get(url("failedattempt", "change", attempt.pk))
    assert "File orders.py" in text(page)


def test_the_reason_of_a_held_message_is_found(settings):
    message = add(handler="", held=60)
    settings.DATABASE_ROUTERS = [ReadsElsewhere()]
    assert "has been held since" in queues.why(message.pk).text
