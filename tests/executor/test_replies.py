"""Replies to requests: the end of a slice, and the statements that settle with the reply."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq import RetryPolicy, handler
from django_mq.executor import replies
from django_mq.executor.ended import failure_end
from django_mq.executor.settle_rows import settle_all
from django_mq.models import Result
from django_mq.policy.outcomes import WorkerLost
from django_mq.store import settle
from tests.database import second_connection
from tests.rows import add
from tests.worker.conftest import Bench, Running, effect, effects, waiting

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_slice_ends_after_an_answer_that_is_waited_for(bench: Bench) -> None:
    """The rest of the batch does not delay the asker; its slice comes after it."""

    ran: list[int] = []

    @handler("#", name="h")
    def h(delivery: Any) -> int:
        ran.append(delivery.id)
        return int(delivery.id)

    rows = [add(handler="h", wants_result=number == 2, after=-60 + number) for number in range(5)]
    tasks = bench.claim()
    remainder = bench.run(tasks)
    assert ran == [row.pk for row in rows[:3]]
    assert [task.delivery.id for task in remainder.left] == [row.pk for row in rows[3:]]
    assert list(Result.objects.values_list("message_id", "handler", "value")) == [
        (rows[2].pk, "h", rows[2].pk)
    ]


def test_an_answer_and_its_writes_are_one(bench: Bench) -> None:
    """Guarantee 1: a lost lease undoes the answer together with the writes."""

    @handler("#", name="h")
    def h(delivery: Any) -> int:
        effect(delivery)
        return 1

    row = add(handler="h", wants_result=True)
    [task] = bench.claim()
    with second_connection() as other:
        other.execute(
            "update django_mq_queuedmessage set claimed_by = 'other:1' where id = %s", [row.pk]
        )
    bench.run([task])
    assert (effects(), Result.objects.count()) == (set(), 0)
    assert waiting() == {row.pk}


def test_an_attempt_that_died_with_its_process_answers_when_it_was_the_last(bench: Bench) -> None:
    """The keeper settles it, and the asker gets the process's failure."""

    @handler("#", name="h")
    def h(delivery: Any) -> None: ...

    add(handler="h", wants_result=True, max_attempts=1)
    [task] = bench.claim()
    ended = failure_end(task.delivery, RetryPolicy(), WorkerLost("killed by signal 9"), seconds=0.0)
    with second_connection() as own:
        assert not settle_all(own.cursor(), [ended])
        assert not settle.still_ours(own.cursor(), [task.delivery.fence])
    [result] = Result.objects.all()
    assert result.error_class.endswith("WorkerLost")
    assert result.error_text == "killed by signal 9"


def test_unrequested_results_are_not_encoded(bench: Bench) -> None:
    """No copy, no encoding, no statement: any object may be returned."""

    @handler("#", name="h", batch=True)
    def h(deliveries: list[Any]) -> object:
        return object()

    rows = [add(handler="h") for _ in range(3)]
    [one, *_] = tasks = bench.claim()
    value = object()
    assert replies.encoded(value, one.delivery) is value
    assert replies.encoded(value, [task.delivery for task in tasks]) is value
    bench.run_all(tasks)
    assert waiting().isdisjoint(row.pk for row in rows)
    assert not Result.objects.exists()


def test_reply_is_reported_as_an_ack(start: Any, said: Any) -> None:
    """An ack like any other."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Any) -> str:
        return "value"

    row = add(handler="h", wants_result=True)
    running: Running = start(until_empty=True)
    assert running.join()
    assert said.ids("message_acked") == [row.pk]
    assert Result.objects.get().value == "value"
