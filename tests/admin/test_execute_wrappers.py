"""Packages that put a query before each statement, such as those that record who changed a row."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.db import connection

from django_mq.models import QueuedMessage, QueueState
from tests.admin.pages import LIST, confirm, url
from tests.admin.test_windows import small  # noqa: F401  (fixture)
from tests.rows import add, add_all

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def queried_first():
    """Send a query before each statement that may have one before it, as one text."""

    def wrapper(execute, sql, params, many, context):
        if not sql.strip().lower().startswith(("select", "set transaction", "with")):
            sql = f"select set_config('shop.user', 'ann', true); {sql}"
        found = execute(sql, params, many, context)
        while found is not None and found.nextset():
            pass
        return found

    with connection.execute_wrapper(wrapper):
        yield


def test_a_change_in_the_admin(boss):
    add(queue="mail")
    message = add(queue="mail", attempts=20, dead=True)
    boss.post(url("queuestate", "pause"), {"queue": "mail"})
    assert QueueState.objects.get(queue="mail").paused_at is not None
    confirm(boss, "discard", [message.pk])
    assert not QueuedMessage.objects.filter(pk=message.pk).exists()


def test_a_list_whose_window_is_looked_for(boss, small):  # noqa: F811
    add_all({"created": (n - 60) * 3600 + 60} for n in range(60))
    page = boss.get(LIST, {"created_at_from": "40h", "created_at_to": "38h"})
    assert page.context["cl"].result_count == 2


@pytest.mark.parametrize("command", ["mq_peek", "mq_pause"])
def test_a_command(command, capsys):
    add(queue="mail")
    call_command(command, "mail")
    assert "mail" in capsys.readouterr().out
