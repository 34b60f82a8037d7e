"""A role or database with an IntervalStyle that the driver does not read: guarantee 24."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, models
from psycopg.types.numeric import FloatLoader

from django_mq import queues
from django_mq.models import QueuedMessage, Schedule, UniqueKey
from django_mq.models.columns import DurationColumn
from tests.admin.conftest import boss, login  # noqa: F401
from tests.admin.pages import text, url
from tests.admin.test_permissions import addresses, rows  # noqa: F401
from tests.management.conftest import run_json
from tests.outbox.schedules.conftest import put
from tests.rows import add

pytestmark = [pytest.mark.django_db, pytest.mark.thorough]

SPAN = timedelta(days=400, hours=3, microseconds=7)


@pytest.fixture(params=["sql_standard", "postgres_verbose", "iso_8601"])
def style(request):
    """Return a function that sets the style, for what was written before."""

    def set_style():
        with connection.cursor() as cursor:
            cursor.execute(f"set local intervalstyle = {request.param}")

    return set_style


def test_all_pages_can_be_read(style, boss, rows):  # noqa: F811
    put("a", expires=SPAN)
    message = add(unique_id="u", unique_for=SPAN)
    key = UniqueKey.objects.create(queue="mail", type="t", unique_id="v", unique_for=SPAN)
    style()
    for address in [
        *addresses(rows),
        url("schedule", "change", "a"),
        url("queuedmessage", "change", message.pk),
        url("uniquekey", "change", key.pk),
    ]:
        assert boss.get(address).status_code == 200, address


def test_a_schedule_is_edited(style, boss):  # noqa: F811
    put("a", every=timedelta(hours=2), source="admin", type="shop.ping")
    style()
    form = boss.get(url("schedule", "change", "a")).context["adminform"].form
    given = {name: form[name].value() for name in form.fields}
    assert given["every"] == "02:00:00"
    sent = {name: "" if value is None else value for name, value in given.items()}
    response = boss.post(
        url("schedule", "change", "a"), {**sent, "every": "03:00:00", "enabled": "on"}
    )
    assert response.status_code == 302, text(response)
    assert Schedule.objects.get(name="a").every == timedelta(hours=3)


def test_schedules_are_listed_by_the_command(style):
    put("a", expires=SPAN)
    style()
    (listed,) = run_json("mq_schedule")
    assert (listed["every"], listed["expires"]) == (3600, SPAN.total_seconds())
    assert queues.next_times("a")


def test_a_duration_is_read_to_the_microsecond(style):
    message = add(unique_id="u", unique_for=SPAN)
    style()
    found = QueuedMessage.objects.filter(pk=message.pk)
    assert found.get().unique_for == SPAN
    assert found.values_list("unique_for", flat=True).get() == SPAN
    assert found.filter(unique_for=SPAN, unique_for__gt=timedelta(days=399)).exists()
    assert found.aggregate(models.Max("unique_for")) == {"unique_for__max": SPAN}
    assert found.distinct().aggregate(models.Max("unique_for")) == {"unique_for__max": SPAN}


def test_a_duration_can_be_part_of_a_subquery(style):
    message = add(unique_id="u", unique_for=SPAN)
    style()
    found = QueuedMessage.objects.filter(pk=message.pk)
    same = models.Subquery(found.values("unique_for"))
    assert found.annotate(same=same).get().same == SPAN
    assert found.filter(unique_for__in=found.values("unique_for")).exists()
    other = found.order_by().values_list("unique_for", flat=True)
    assert list(other.union(other, all=True)) == [SPAN, SPAN]


def test_a_duration_beyond_that_of_python_is_its_longest():
    column = DurationColumn()
    assert column.from_db_value(None, None, connection) is None
    with connection.cursor() as cursor:
        for years, longest in ((170_000_000, timedelta.max), (-170_000_000, timedelta.min)):
            cursor.execute("select extract(epoch from make_interval(years => %s))", [years])
            assert column.from_db_value(*cursor.fetchone(), None, connection) == longest


def test_a_project_may_load_numbers_as_floats():
    """By a loader that psycopg's documentation shows."""
    QueuedMessage.objects.all().delete()
    add(unique_id="u", unique_for=SPAN)
    connection.connection.adapters.register_loader("numeric", FloatLoader)
    try:
        assert QueuedMessage.objects.get().unique_for == SPAN
    finally:
        connection.close()


def test_migrations_have_djangos_own_field():
    assert DurationColumn().deconstruct()[1] == "django.db.models.DurationField"
    mine = [
        field
        for model in (QueuedMessage, UniqueKey, Schedule)
        for field in model._meta.get_fields()
        if isinstance(field, models.DurationField)
    ]
    assert {type(field) for field in mine} == {DurationColumn}
    assert len(mine) == 4
