"""NotInTransaction while a block is open on another alias names both."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_mq import NotInTransaction, broadcast, handler
from django_mq.testing import deliver
from tests.other_alias import _other_alias  # noqa: F401  (fixture)

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SAYS = (
    r"^broadcast\(\) writes to the database {to!r}, but the open atomic\(\) block is on {open!r}\."
    r" To commit the message with your data, pass using={open!r}"
)


def test_both_aliases_are_named() -> None:
    with (
        transaction.atomic(using="other"),
        pytest.raises(NotInTransaction, match=SAYS.format(to="default", open="other")),
    ):
        broadcast("shop.orders.placed")


def test_broadcast_of_a_handler_to_another_alias() -> None:
    handler("#", name="shop.chain")(lambda delivery: broadcast("shop.next", using="other"))
    with pytest.raises(NotInTransaction, match=SAYS.format(to="other", open="default")):
        deliver("shop.chain")


def test_without_any_block_one_alias_is_named() -> None:
    with pytest.raises(NotInTransaction, match=r"needs an open.* on the database 'other',"):
        broadcast("shop.orders.placed", using="other")
