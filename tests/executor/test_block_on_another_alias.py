"""NotInTransaction while a block is open on another alias names both."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from django.db import connections, transaction

from django_mq import NotInTransaction, broadcast, handler
from django_mq.testing import deliver

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SAYS = (
    r"^broadcast\(\) writes to the database {to!r}, but the open atomic\(\) block is on {open!r}\."
    r" To commit the message with your data, pass using={open!r}"
)


@pytest.fixture(scope="module", autouse=True)
def _two_aliases(django_db_setup: None) -> Iterator[None]:
    connections.settings["other"] = copy.deepcopy(connections["default"].settings_dict)
    yield
    connections["other"].close()
    del connections.settings["other"]
    del connections["other"]


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
