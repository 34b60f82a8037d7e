"""Document paths that the search box suggests."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mq.admin import suggesting
from tests.admin.conftest import VIEW
from tests.admin.pages import LIST
from tests.rows import add, insert_all

pytestmark = pytest.mark.django_db

PATHS = LIST + "paths/"


def paths(client):
    return client.get(PATHS).json()["paths"]


def test_the_paths_of_the_newest_messages(boss, monkeypatch):
    add(payload={"old": 1})
    monkeypatch.setattr(suggesting, "NEWEST", 4)
    add(payload={"user": {"id": 7, "api_token": "x"}, "lines": [1]}, metadata={"tenant": "acme"})
    add(payload={"user": {"name": "Ada"}, "password": {"deep": 1}, "odd.key": 1, "a:b": 1})
    add(payload={"large": "x" * 100_000, "other": 1})
    add(payload=[{"n": 1}])
    assert paths(boss) == ["metadata.tenant:", "payload.user.id:", "payload.user.name:"]
    for path in paths(boss):
        assert boss.get(LIST, {"q": f"{path}7"}).status_code == 200


def test_number_and_depth_of_paths_are_limited(boss):
    deep = {}
    for n in range(60):
        deep = {f"n{n}": deep, "leaf": 1}
    add(payload=deep), add(payload={f"k{n}": 1 for n in range(200)})
    found = paths(boss)
    assert len(found) == 50
    assert max(each.count(".") for each in found) <= 5


def test_undecodable_payload_is_skipped(boss):
    add(payload={"user": 7})
    with connection.cursor() as cursor:
        cursor.execute(
            "insert into django_mq_queuedmessage (queue, type, payload)"
            " values ('mail', 't', (repeat('[', 2000) || repeat(']', 2000))::jsonb)"
        )
    assert paths(boss) == ["payload.user:"]


def test_they_need_the_right_to_see_payloads(login, boss, monkeypatch):
    from django_mq.admin import QueuedMessageAdmin

    add("post", payload={"secret_of_post": 1}), add("mail", payload={"order": 1})
    for rights in (VIEW, ("view_payload",)):
        client = login(*rights, name=str(len(rights)))
        assert client.get(PATHS).status_code == 403
        assert PATHS not in client.get(LIST).content.decode()
    assert PATHS in boss.get(LIST).content.decode()
    monkeypatch.setattr(QueuedMessageAdmin, "get_queues", lambda self, request: {"mail"})
    assert paths(boss) == ["payload.order:"]


def test_the_cost_does_not_grow(boss):
    """Only the newest messages are read, by their keys."""
    insert_all({"payload": {"n": n}} for n in range(1000))
    with CaptureQueriesContext(
        connection,
    ) as found:
        assert paths(boss) == ["payload.n:"]
    assert len(found) < 12
    assert any(f"LIMIT {suggesting.NEWEST}" in each["sql"] for each in found)
