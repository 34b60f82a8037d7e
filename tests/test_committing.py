"""The clean-up after tests that commit, and the check for leftovers."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.contrib.contenttypes.models import ContentType
from django.db import connection

from django_mq.models import QueueState
from testproject.shop.models import Invoice, Order, Product
from tests.committing import empty_the_tables, left
from tests.database import second_connection
from tests.rows import add

pytestmark = pytest.mark.django_db(transaction=True)


def test_rows_of_every_table_are_found_and_deleted() -> None:
    """Rows that reference others too, in any order; the rows of `migrate` stay."""
    made = Permission.objects.count(), ContentType.objects.count()
    user = User.objects.create(username="ada")
    user.groups.add(Group.objects.create(name="staff"))
    user.user_permissions.add(*Permission.objects.all()[:2])
    order = Order.objects.create(
        product=Product.objects.create(name="tea", price=1), quantity=1, price=1
    )
    Invoice.objects.create(order=order, number="1", total=1)
    QueueState.objects.create(queue="mail")
    assert left() == {
        "auth_group": 1,
        "auth_user": 1,
        "auth_user_groups": 1,
        "auth_user_user_permissions": 2,
        "django_mq_queuestate": 1,
        "shop_invoice": 1,
        "shop_order": 1,
        "shop_product": 1,
    }
    empty_the_tables()
    assert left() == {}
    assert made == (Permission.objects.count(), ContentType.objects.count())


def test_a_table_that_no_app_has_is_looked_at_too() -> None:
    with second_connection() as other:
        other.execute("create table somebodys as select 1 as n")
        assert left() == {"somebodys": 1}
        other.execute("drop table somebodys")


def test_a_large_table_is_small_again() -> None:
    """Its dead rows would change the plans of later tests."""
    size = "select pg_relation_size('django_mq_queuedmessage')"
    with second_connection() as other:
        other.execute(
            "insert into django_mq_queuedmessage (queue, type, payload)"
            " select 'mail', 't', '{}' from generate_series(1, 20000)"
        )
        empty_the_tables()
        assert other.execute(size).fetchone() == (0,)


def test_an_open_transaction_of_the_test_is_not_waited_for() -> None:
    message = add()
    connection.set_autocommit(False)
    with connection.cursor() as cursor:
        cursor.execute("select from django_mq_queuedmessage where id = %s for update", [message.pk])
    empty_the_tables()
    assert left() == {}
