"""docs/guides/multi-tenant.md: a worker for one tenant's database."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from django_mq import broadcast, handler
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.worker import Worker
from testproject.shop.models import Product
from tests.docs.pages import story
from tests.other_alias import _other_alias  # noqa: F401  (fixture)

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def test_handlers_and_their_broadcasts_stay_in_the_tenants_database(settings: Any) -> None:
    environment = {"TENANT_DATABASE": "other"}
    with story("guides/multi-tenant.md", env=lambda name, default: environment[name]) as page:
        settings.DJANGO_MQ = page.DJANGO_MQ
        settings.DATABASE_ROUTERS = [page.TenantRouter()]
        aliases = []

        @handler("shop.tenants.opened", queue="tenants")
        def opened(delivery: Any) -> None:
            aliases.append(Product.objects.create(name="first", price=1)._state.db)
            broadcast("shop.tenants.welcomed")

        @handler("shop.tenants.welcomed", queue="tenants")
        def welcomed(delivery: Any) -> None:
            aliases.append(Product.objects.get()._state.db)

        with transaction.atomic(using="other"):
            broadcast("shop.tenants.opened", using="other")
        assert Worker(queues=["tenants"], max_seconds=60).run(until_empty=True)
    assert aliases == ["other", "other"]
    assert not QueuedMessage.objects.exists()
    assert not FailedAttempt.objects.exists()
