"""Results of tasks: their content, the lookup, and the retention."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from django_mq.messages import ClaimedRow
from django_mq.models import FailedAttempt, QueuedMessage, Result
from django_mq.store import cancel, kept_results, message_changes, pruning
from django_mq.store.claimed_row import claimed_columns
from django_mq.store.conditions import BEGINNING
from django_mq.store.kept_results import MAX_KEPT_ATTEMPTS, KeptResult
from django_mq.store.results import Reply
from tests.rows import add
from tests.store.plans import generic_plan, plan

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]
ARGUMENTS = {"args": [1], "kwargs": {}}


def task(**given: Any) -> QueuedMessage:
    given = {"type": "tasks.shop.tasks.send", "handler": "shop.tasks.send", **given}
    return add(payload=ARGUMENTS, wants_result=True, **given)


def row_of(cursor: Cursor, message: QueuedMessage) -> ClaimedRow:
    columns = claimed_columns()
    cursor.execute(f"select {columns} from django_mq_queuedmessage m where id = %s", [message.pk])
    return ClaimedRow._make(cursor.fetchone() or ())


def fail(message: QueuedMessage, attempt: int, **given: Any) -> None:
    FailedAttempt.objects.create(
        message_id=message.pk, queue="mail", type="t", attempt=attempt, worker=f"w{attempt}",
        **{"error_class": "ValueError", "error_text": "no", "traceback": "Traceback", **given},
    )  # fmt: skip


def keep(cursor: Cursor, message: QueuedMessage, seconds: float | None = 0.5) -> None:
    row = row_of(cursor, message)
    value = None if seconds is None else '{"done": true}'
    kept_results.keep(cursor, [KeptResult(Reply(row.id, row.handler, value), row, seconds)])


def found(cursor: Cursor, message: QueuedMessage) -> kept_results.StoredTask:
    found = kept_results.find(cursor, message.pk)
    assert found is not None
    return found


def test_the_row_counts_while_it_is_there(cursor: Cursor) -> None:
    """A requeued task still has the result of its death."""
    message = task(priority=7, attempts=1, leased=30)
    keep(cursor, message)
    here = found(cursor, message)
    assert (here.stored, here.queue, here.priority, here.used) == (True, "mail", 7, 1)
    assert (here.ended, here.value, here.worker) == (None, None, "worker")
    QueuedMessage.objects.all().delete()
    kept = found(cursor, message)
    assert (kept.stored, kept.queue, kept.priority, kept.used) == (False, "mail", 7, 1)
    assert json.loads(kept.value or "") == {"done": True}
    assert json.loads(kept.payload) == ARGUMENTS
    assert kept.enqueued == here.enqueued
    assert (kept.ended or 0) > kept.enqueued


def test_attempts_are_in_order_and_the_last_are_kept(cursor: Cursor) -> None:
    message = task(attempts=3, leased=30)
    fail(message, 2, traceback="")
    fail(message, 1)
    keep(cursor, message)
    QueuedMessage.objects.all().delete()
    kept = json.loads(found(cursor, message).attempts)
    assert [each["worker"] for each in kept] == ["w1", "w2", "worker"]
    assert [each.get("traceback") for each in kept] == ["Traceback", "no", None]
    busy = task()
    for attempt in range(1, MAX_KEPT_ATTEMPTS + 3):
        fail(busy, attempt)
    workers = [each["worker"] for each in json.loads(kept_results.failed_attempts(cursor, busy.pk))]
    assert workers == [f"w{n}" for n in range(3, MAX_KEPT_ATTEMPTS + 3)]


@pytest.mark.parametrize("how", ["removed", "cancelled"])
def test_removed_tasks_are_answered(cursor: Cursor, how: str) -> None:
    message, request, plain = task(), add(wants_result=True, handler="h"), add()
    ids = [message.pk, request.pk, plain.pk]
    for id in ids:
        if how == "removed":
            message_changes.remove(cursor, ids=[id], waiting=True, dead=True, reason=how)
        else:
            cancel.cancel(cursor, id=id, type=None, unique_id=None)
    answers = {each.pk: each for each in Result.objects.all()}
    assert set(answers) == {message.pk, request.pk}
    assert {each.error_text for each in answers.values()} == {how}
    assert answers[message.pk].payload == ARGUMENTS
    assert (answers[request.pk].payload, answers[request.pk].queue) == (None, "")


def test_only_removed_tasks_get_a_result(cursor: Cursor) -> None:
    """No task of another type, in flight, or waiting when only the dead are asked for."""
    spared = [task(), task(leased=30, attempts=1)]
    for each in spared:
        assert cancel.cancel(cursor, id=each.pk, type="tasks.other", unique_id=None) == ([], 0)
        assert not message_changes.remove(
            cursor, ids=[each.pk], waiting=False, dead=True, reason="r"
        )
    assert cancel.cancel(cursor, id=spared[1].pk, type=None, unique_id=None) == ([], 1)
    assert not Result.objects.exists()
    assert QueuedMessage.objects.count() == 2


@pytest.mark.parametrize(
    ("retention", "is_kept"),
    [(60, True), (1e300, True), (-5, True), ("long", False), (None, False)],
)
def test_a_retention_of_its_own(cursor: Cursor, retention: object, is_kept: bool) -> None:
    """Whatever the metadata say: other programs may have written them."""
    message = task(metadata={"mq.task": {"retention": retention}})
    keep(cursor, message)
    [result] = Result.objects.all()
    assert (result.keep_until is not None) == is_kept
    for metadata in ([], {"mq.task": 5}, "text", 7):
        keep(cursor, task(metadata=metadata))
    assert Result.objects.filter(keep_until=None).count() == 4 + (not is_kept)


def test_expired_results_are_pruned_in_pieces(cursor: Cursor) -> None:
    for retention in (0, 0, 0, 3600):
        keep(cursor, task(metadata={"mq.task": {"retention": retention}}))
    keep(cursor, task())
    assert pruning.prune(cursor, "kept results", limit=2) is not None
    assert Result.objects.count() == 3
    assert pruning.prune(cursor, "kept results", limit=2) is None
    assert Result.objects.count() == 2


def test_everything_is_found_by_a_key(cursor: Cursor) -> None:
    """However large the tables are, and even with a cached plan."""
    cursor.execute("set enable_seqscan = off")
    piece: dict[str, Any] = {"limit": 10, "after": BEGINNING}
    for text in (
        plan(cursor, kept_results.FIND, id=1),
        plan(cursor, kept_results.ATTEMPTS, id=1),
        plan(cursor, pruning.PRUNE["kept results"], **piece),
        generic_plan(cursor, pruning.PRUNE["kept results"], **piece),
    ):
        assert "Seq Scan" not in text
    assert "mq_result_keep" in plan(cursor, pruning.PRUNE["kept results"], **piece)
