"""Exports of the list of messages: their content, permission and formats."""

from __future__ import annotations

import json

import pytest
from asgiref.sync import async_to_sync
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test import AsyncClient

from django_mq.admin import QueuedMessageAdmin, bounds, exports, windows
from tests.admin.pages import LIST, exported
from tests.pages_read import pages_read
from tests.rows import add, add_all, insert_all
from tests.slow import slow

pytestmark = pytest.mark.django_db


def export(client, kind="json", query=""):
    response = client.post(f"{LIST}export/{kind}/{query}")
    assert "attachment" in response["Content-Disposition"]
    return exported(response, kind)


@pytest.mark.parametrize("kind", ["csv", *slow("json")])
def test_a_file_has_every_message_that_matches(boss, monkeypatch, kind):
    """All of them, not just a window of the list, read in parts smaller than the table."""
    for module in (bounds, windows):
        monkeypatch.setattr(module, "MAX_COUNT", 2)
    monkeypatch.setattr(windows, "MAX_SCANNED_ROWS", 2)
    monkeypatch.setattr(exports, "SCANNED", 3)
    monkeypatch.setattr(exports, "READ", 2)
    rows = add_all({"type": "t" if n % 2 else "u"} for n in range(14))
    wanted = [str(row.pk) for row in reversed(rows) if row.type == "t"]
    assert [str(row["id"]) for row in export(boss, kind, "?type=t")] == wanted
    assert len(export(boss, kind)) == 14
    assert export(boss, kind, "?type=none") == []
    assert len(export(boss, kind, f"?after={rows[5].pk}&p=1&q=t")) == 7


def test_the_columns(boss):
    row = add(dead=-5, last_error="KeyError: 'x'", payload={"user": 7, "password": "abc"}, key="k")
    (found,) = export(boss)
    assert found["id"] == row.pk
    assert found["state"] == "dead"
    assert found["dead_at"] == row.dead_at.isoformat()
    assert found["payload"]["user"] == 7
    assert found["last_error"] == "KeyError: 'x'"
    assert "abc" not in str(found)
    (line,) = export(boss, "csv")
    assert json.loads(line["payload"])["user"] == 7
    assert (line["key"], line["leased_until"]) == ("k", "")


def test_a_file_without_the_right_to_payloads_has_none(login):
    add(payload={"user": "ada"}, metadata={"m": "eva"}, dead=-5, last_error="no", dead_reason="bad")
    client = login("view_queuedmessage", "export_message")
    (row,) = export(client)
    assert set(row) == set(QueuedMessageAdmin.exported)
    assert not {"ada", "eva", "no", "bad"} & set(map(str, row.values()))


@pytest.mark.parametrize("rights", [("view_queuedmessage",), ("export_message",)])
def test_an_export_needs_a_right_of_its_own(login, rights):
    client = login(*rights)
    assert client.post(f"{LIST}export/csv/").status_code == 403
    if "view_queuedmessage" in rights:
        assert "Export" not in client.get(LIST).content.decode()
    assert not LogEntry.objects.exists()


def test_an_export_is_logged_with_its_filters(boss):
    assert "export/csv/?type=t" in boss.get(LIST, {"type": "t", "p": "0"}).content.decode()
    export(boss, "csv", "?type=t")
    entry = LogEntry.objects.get()
    assert entry.user == boss.user
    assert entry.change_message == "Exported messages as csv, with payloads. Filters: type=t."
    assert boss.get(f"{LIST}export/csv/").url == LIST
    assert boss.post(f"{LIST}export/xls/").status_code == 404
    assert LogEntry.objects.count() == 1


def test_the_log_of_an_export_has_no_value_of_a_payload(boss):
    add(payload={"card": "4111"})
    assert len(export(boss, "csv", "?q=+payload.card:4111")) == 1
    note = LogEntry.objects.get().change_message
    assert note.endswith("Filters: q=payload.card%3A....")


@pytest.mark.parametrize("query", ["priority=x", "fingerprint=x", "state=x", "id=x", "key=%00"])
def test_a_filter_that_can_match_nothing_is_refused(boss, query):
    assert boss.post(f"{LIST}export/csv/?{query}").status_code == 400
    assert not LogEntry.objects.exists()


def test_a_spreadsheet_runs_no_formula(boss):
    """S31."""
    add(key="=HYPERLINK(1)", unique_id=" @SUM(1)", last_error="+1", type="t", priority=-3)
    (row,) = export(boss, "csv")
    assert row["key"] == "'=HYPERLINK(1)"
    assert row["unique_id"] == "' @SUM(1)"
    assert row["last_error"] == "'+1"
    assert row["priority"] == "-3"


def test_no_statement_reads_more_than_a_part(boss, monkeypatch):
    for module in (bounds, windows):
        monkeypatch.setattr(module, "MAX_COUNT", 2)
    monkeypatch.setattr(exports, "SCANNED", 100)
    monkeypatch.setattr(exports, "READ", 50)
    insert_all({"payload": {"n": n}} for n in range(1000))
    with connection.cursor() as cursor:
        cursor.execute("analyze django_mq_queuedmessage")
        # The planner may read such a small table whole; without an index it always would.
        cursor.execute("set local enable_seqscan = off; set local enable_sort = off")
    with pages_read() as read:
        assert len(export(boss)) == 1000
    assert read.most_rows <= 400


@pytest.mark.django_db(transaction=True)
def test_an_asynchronous_server_streams_too(boss, monkeypatch):
    insert_all({} for _ in range(3))
    client = AsyncClient()

    async def read():
        await client.aforce_login(boss.user)
        response = await client.post(f"{LIST}export/json/")
        return b"".join([part async for part in response.streaming_content])

    assert len(json.loads(async_to_sync(read)())) == 3
