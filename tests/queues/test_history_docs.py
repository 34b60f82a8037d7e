"""The snippets of docs/history.md run, in order."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from django_mq import broadcast, handler, handlers, queues
from django_mq.conf import find_errors
from django_mq.testing import drain
from tests.test_docs import ROOT, snippets

pytestmark = pytest.mark.django_db


def test_the_snippets_of_the_page(settings: Any, capsys: Any) -> None:
    confirmed: list[int] = []
    names: dict[str, Any] = {
        "__name__": "mail", "timedelta": timedelta, "handler": handler, "queues": queues,
        "confirmed": confirmed,
    }  # fmt: skip
    config, subscribe, search, replay = snippets(ROOT / "docs/history.md", "python")
    with handlers.isolated():
        exec(config, names)  # noqa: S102
        assert not find_errors(names["DJANGO_MQ"])
        settings.DJANGO_MQ = names["DJANGO_MQ"]
        exec(subscribe, names)  # noqa: S102
        with transaction.atomic():
            (id,) = broadcast("shop.orders.placed", {"order_id": 7}).ids
        assert drain() == 1
        exec(search, names)  # noqa: S102
        assert capsys.readouterr().out.startswith(f"{id} 1 0:00:0")
        exec(replay, names)  # noqa: S102
        assert drain() == 1
    assert confirmed == [7, 7]
