"""An operation outlives the worker that carries it out."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from django.db import connection

from django_mq import queues
from django_mq.models import Operation, QueuedMessage
from tests.acceptance.processes import Worker
from tests.database import second_connection
from tests.rows import add_all, stored
from tests.slow import slow

STAND = 20_317  # the advisory lock at which a step hangs
MANY = 2500

# Behind this id the change of a message waits for the lock.
STANDING = """
create function stand() returns trigger language plpgsql as $$
begin
    if new.id > {id} then perform pg_advisory_xact_lock_shared({lock}); end if;
    return new;
end $$;
create trigger stand before update on django_mq_queuedmessage
   for each row execute function stand()
"""
STANDS = "select 1 from pg_locks where locktype = 'advisory' and objid = %s and not granted"


@pytest.mark.parametrize("beside", [True, *slow(False)], ids=["beside", "afterwards"])
def test_a_worker_is_killed_in_the_middle(start: Callable[..., Worker], beside: bool) -> None:
    """No message is left out, and none is acted on twice."""
    start_idle = lambda: start("--queue", "another")  # noqa: E731
    killed = start_idle()
    killed.has_started(1)
    add_all({"dead": -1, "attempts": 3, "max_attempts": 3} for _ in range(MANY))
    [middle] = QueuedMessage.objects.order_by("pk").values_list("pk", flat=True)[1700:1701]
    with connection.cursor() as cursor:
        cursor.execute(STANDING.format(id=middle, lock=STAND))
    try:
        with second_connection() as other:
            other.execute("select pg_advisory_lock(%s)", [STAND])
            made = queues.operate("requeue", everything=True)
            stands = lambda: bool(other.execute(STANDS, [STAND]).fetchall())  # noqa: E731
            killed.until(stands, "its second step stands still")
            assert Operation.objects.get().done == 1000
            if beside:
                sibling = start_idle()
                sibling.has_started(1)
            killed.tell_all(signal.SIGKILL)
            killed.ends()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("drop trigger stand on django_mq_queuedmessage; drop function stand")
    if not beside:
        sibling = start_idle()
    sibling.until(lambda: stored(made).state == "done", "the other one goes on")
    assert (made.done, made.skipped) == (MANY, 0)
    assert set(QueuedMessage.objects.values_list("max_attempts", flat=True)) == {4}
