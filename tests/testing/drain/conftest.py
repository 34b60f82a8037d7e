"""A project with several aliases."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections, transaction

from django_mq import broadcast, handler
from testproject.shop.models import Product


@pytest.fixture(scope="module", autouse=True)
def _two_aliases(django_db_setup: None) -> Iterator[None]:
    """The project has a second alias of the same database, and a read replica that mirrors it."""
    for alias in ("other", "replica"):
        connections.settings[alias] = copy.deepcopy(connections["default"].settings_dict)
    mirror = connections["replica"]
    mirror.settings_dict["TEST"]["MIRROR"] = "default"
    mirror.creation.set_as_test_mirror(connections["default"].settings_dict)
    yield
    for alias in ("other", "replica"):
        connections[alias].close()
        del connections.settings[alias]
        del connections[alias]


def send(type: str, payload: Any = None, **options: Any) -> Any:
    with transaction.atomic():
        return broadcast(type, payload, **options)


def write(name: str, *, using: str = "default") -> None:
    Product.objects.using(using).create(name=name, price=1)


def names(*, using: str = "default") -> set[str]:
    return set(Product.objects.using(using).values_list("name", flat=True))


def _fails(error: BaseException, **options: Any) -> None:
    @handler("test.fails", name="fails", **options)
    def fails(delivery: Any) -> None:
        raise error
