"""The history as a file: its content, the permission for it, and how it is read."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.test import RequestFactory

from django_mq.admin import HandledMessageAdmin, exports
from django_mq.models import HandledMessage
from tests.admin.pages import exported, text, told, url
from tests.pages_read import pages_read

pytestmark = pytest.mark.django_db

NOW = datetime.now(UTC).replace(microsecond=0)
LIST = url("handledmessage")


def kept(id, *, minutes=1, **given):
    given = {"queue": "mail", "type": "t", "handler": "h", "payload": {"n": id}, **given}
    ended = NOW - timedelta(minutes=minutes)
    return HandledMessage(id=id, ended_at=ended, keep_until=NOW + timedelta(days=1), **given)


def keep(*rows):
    HandledMessage.objects.bulk_create(rows)


def export(client, kind="json", query=""):
    response = client.post(f"{LIST}export/{kind}/{query}")
    assert 'filename="handled-messages-' in response["Content-Disposition"]
    return exported(response, kind)


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_file_has_every_message_that_matches(boss, monkeypatch, kind):
    """Over several days, with many that ended at one moment; read in smaller parts than these."""
    monkeypatch.setattr(exports, "SCANNED", 3)
    monkeypatch.setattr(exports, "READ", 2)
    together = [kept(n, type="t" if n % 2 else "u") for n in range(1, 12)]
    earlier = [kept(n, minutes=n * 1000) for n in range(20, 24)]
    keep(*together, *earlier)
    wanted = [11, 9, 7, 5, 3, 1, 20, 21, 22, 23]
    assert [int(row["id"]) for row in export(boss, kind, "?type=t")] == wanted
    assert len(export(boss, kind)) == 15
    assert export(boss, kind, "?type=none") == []
    assert len(export(boss, kind, "?queue=mail&handler=h&ended_at_from=1h&p=1")) == 11
    assert [int(row["id"]) for row in export(boss, kind, "?q=%2322")] == [22]


def test_two_messages_with_one_id_are_both_exported_once(boss, monkeypatch):
    """This happens after a reset of the sequence."""
    monkeypatch.setattr(exports, "READ", 2)
    keep(kept(1, minutes=30, key="old"), kept(2, minutes=20), kept(3, minutes=10), kept(1, key="k"))
    assert [(row["id"], row["key"]) for row in export(boss)] == [
        (1, "k"),
        (3, None),
        (2, None),
        (1, "old"),
    ]


def test_the_columns(boss):
    content = {"payload": {"user": 7, "password": "abc"}, "metadata": {"api_key": "xyz", "m": 1}}
    keep(kept(1, correlation_id="9", causation_id=9, key="=1+1", **content))
    keep(kept(2, minutes=2, payload=None))
    first, second = export(boss)
    assert first["payload"]["user"] == 7
    assert first["metadata"]["m"] == 1
    assert (first["correlation_id"], first["causation_id"]) == ("9", 9)
    assert first["ended_at"] == (NOW - timedelta(minutes=1)).isoformat()
    assert not {"abc", "xyz"} & set(str(first).split("'"))
    assert second["payload"] is None
    first, second = export(boss, "csv")
    assert json.loads(first["payload"])["user"] == 7
    assert first["key"] == "'=1+1"


def test_a_file_without_the_right_to_payloads_has_none(login):
    keep(kept(1, payload={"user": "ada"}, metadata={"m": "eva"}))
    (row,) = export(login("view_handledmessage", "export_message"))
    assert set(row) == set(HandledMessageAdmin.exported)
    assert not {"ada", "eva"} & set(map(str, row.values()))


@pytest.mark.parametrize("rights", [("view_handledmessage",), ("export_message",)])
def test_an_export_needs_a_right_of_its_own(login, rights):
    client = login(*rights)
    assert client.post(f"{LIST}export/csv/").status_code == 403
    if "view_handledmessage" in rights:
        assert "Export" not in text(client.get(LIST))
    assert not LogEntry.objects.exists()


def test_an_export_is_logged_with_its_filters(boss):
    page = boss.get(LIST, {"type": "t", "p": "0"}).content.decode()
    assert f"{LIST}export/csv/?type=t" in page
    assert "Export CSV: all handled messages that match" in page
    export(boss, "csv", "?type=t")
    entry = LogEntry.objects.get()
    assert entry.user == boss.user
    assert entry.content_type == ContentType.objects.get_for_model(HandledMessage)
    note = "Exported handled messages as csv, with payloads. Filters: type=t."
    assert entry.change_message == note
    assert boss.get(f"{LIST}export/csv/").url == LIST
    assert boss.post(f"{LIST}export/xls/").status_code == 404
    assert LogEntry.objects.count() == 1


def test_a_user_of_some_queues_exports_these_alone(boss):
    class Scoped(HandledMessageAdmin):
        def get_queues(self, request):
            return {"mail"}

    keep(kept(1), kept(2, queue="theirs"))
    request = RequestFactory().post("/")
    request.user = boss.user
    response = Scoped(HandledMessage, admin.site).export_view(request, "json")
    assert [row["id"] for row in json.loads(b"".join(response.streaming_content))] == [1]


def test_filters_that_take_too_long_end_in_a_hint(boss, monkeypatch):
    def cancelled(admin, request):
        with connection.cursor() as cursor:
            cursor.execute("set local statement_timeout = 1")
            cursor.execute("select pg_sleep(60)")

    monkeypatch.setattr(HandledMessageAdmin, "seen_queues", cancelled)
    response = boss.post(f"{LIST}export/csv/")
    assert response.url == LIST
    assert "took too long" in told(response)[0]
    assert not LogEntry.objects.exists()


def test_no_statement_reads_more_than_a_part(boss, monkeypatch):
    monkeypatch.setattr(exports, "SCANNED", 100)
    monkeypatch.setattr(exports, "READ", 50)
    keep(*(kept(n, minutes=n / 100) for n in range(1, 1001)))
    with connection.cursor() as cursor:
        cursor.execute("analyze django_mq_handledmessage")
        # The planner may read such a small table whole; without an index it always would.
        cursor.execute("set local enable_seqscan = off; set local enable_sort = off")
    with pages_read() as read:
        assert len(export(boss)) == 1000
    assert read.most_rows <= 500
