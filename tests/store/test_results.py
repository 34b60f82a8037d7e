"""Answers: stored again when a new one comes, and looked up in one snapshot."""

from __future__ import annotations

from itertools import islice
from typing import Any

import psycopg
import pytest

from django_mq.models import Result
from django_mq.store import results
from django_mq.store.results import Reply, ReplyState
from tests.database import second_connection
from tests.rows import add, stored

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_last_word_counts(cursor: psycopg.Cursor[Any]) -> None:
    failed = Reply(7, "h", None, "ValueError", "no")
    results.store(cursor, [failed, Reply(8, "h", '{"a": 1}')])
    before = Result.objects.get(pk=7).created_at
    results.store(cursor, [Reply(7, "other", "null")])
    after = Result.objects.get(pk=7)
    assert (after.handler, after.error_class, after.error_text) == ("other", "", "")
    assert after.created_at > before  # kept as long as a new one
    assert sorted(results.reply_states(cursor, [7, 8])) == [
        ReplyState(7, True, False, "null", "", ""),
        ReplyState(8, True, False, '{"a": 1}', "", ""),
    ]


def test_it_rings_at_the_commit_if_it_is_to(cursor: psycopg.Cursor[Any], settings: Any) -> None:
    """S06: one separate channel without payloads; one ring for many answers."""
    with second_connection() as other:
        other.execute(results.LISTEN)
        other.execute("listen mark")
        for wakeup in ("poll", "notify"):
            settings.DJANGO_MQ = {"WAKEUP": wakeup}
            results.store(cursor, [Reply(number, "h", "1") for number in range(3)])
        other.execute("notify mark")  # rings come in the order of their commits
        rings = islice(other.notifies(timeout=60), 2)
        heard = [(each.channel, each.payload) for each in rings]
    assert heard == [("django_mq_replies", ""), ("mark", "")]


def test_reply_states_of_messages(cursor: psycopg.Cursor[Any]) -> None:
    waits = add(wants_result=True)
    dead = add(wants_result=True, dead=-1, dead_reason="exhausted", last_error="E: why")
    silent = add(wants_result=True, dead=-1, dead_reason="expired")
    plain = add()
    found = sorted(results.reply_states(cursor, [waits.pk, dead.pk, silent.pk, plain.pk, 2**60]))
    assert found == [
        ReplyState(waits.pk, False, True, None, "Unanswered", ""),
        ReplyState(dead.pk, True, True, None, "Unanswered", "exhausted: E: why"),
        ReplyState(silent.pk, True, True, None, "Unanswered", "expired"),
        ReplyState(plain.pk, False, False, None, "Unanswered", ""),
        ReplyState(2**60, False, False, None, "Unanswered", ""),
    ]
    assert results.reply_states(cursor, []) == []
    assert stored(waits).wants_result


def test_a_look_is_by_the_keys(cursor: psycopg.Cursor[Any]) -> None:
    """However large the tables are."""
    cursor.execute("set enable_seqscan = off")
    cursor.execute("explain " + results.REPLY_STATES, {"ids": [1, 2, 3]})
    plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "django_mq_result_pkey" in plan
    assert "django_mq_queuedmessage_pkey" in plan
    assert "Seq Scan" not in plan
