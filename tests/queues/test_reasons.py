"""The exact reason why a message does not run now, in each state."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.utils import timezone

from django_mq import handlers, queues
from django_mq.models import FailedAttempt, QueueState, Result
from django_mq.testing import drain
from tests.database import second_connection
from tests.queues.explained import why
from tests.rows import add, beat, decide

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


def shown(at):
    return f"{timezone.localtime(at):%Y-%m-%d %H:%M:%S %Z}"


def test_next_to_be_taken():
    beat()
    message = add()
    why(message, "processable", "has been due since", "and is next to be claimed")


def test_a_worker_with_room_does_not_claim_it():
    """It lacks a right, for example: only its log says so."""
    hour = timezone.now() - timedelta(hours=1)
    message = add(after=-60)
    beat("young", threads=2, threads_used=0.0)
    beat("working", started_at=hour, threads=2, threads_used=1.5)
    beat("alone", running=[1], started_at=hour, threads=8, threads_used=1.0)
    why(message, "processable", "and is next to be claimed.")
    beat("idle", started_at=hour, host="h", pid=9, threads=2, threads_used=0.1)
    why(
        message,
        "processable",
        "next to be claimed; worker idle (host h, process 9) has room for it: if it does not"
        " claim it in a moment, its log says why.",
    )
    why(add(priority=9, after=-1), "processable", "and is next to be claimed.")


def test_behind_others():
    beat()
    add(priority=5)
    add(priority=5, after=60)
    add(after=-90)
    add("other", priority=9)
    for columns in ({"after": 60}, {"dead": -1}, {"leased": 60}, {"after": -30}):
        add(priority=0, **columns)
    why(add(), "processable", "and is behind 2 other messages of its queue")


def test_among_equals_by_id():
    beat()
    first = add()
    second = add(processable_after=first.processable_after)
    why(first, "processable", "is next")
    why(second, "processable", "behind 1 other message of")


def test_no_live_worker():
    beat("elsewhere", queues=["other"])
    answer = why(add(), "processable", "no live worker serves its queue: start mq_worker.")
    assert "heartbeat" not in answer.text
    beat("older", seen=-99)
    gone = beat("frozen", seen=-31, host="h", pid=9)
    beat("other", seen=-30, queues=["other"])
    why(
        add(),
        "processable",
        "start mq_worker. The last one was worker frozen (host h, process 9), whose last heartbeat"
        f" came at {shown(gone.last_seen)}.",
    )


def test_only_draining_workers():
    beat(draining=True)
    why(add(), "processable", "every worker of its queue is draining")
    beat("fresh")
    why(add(), "processable", "other message of its queue")


@pytest.mark.parametrize(
    ("configured", "decided", "stopped_at"), [(1, None, 1), (None, 1, 1), (5, 1, 1), (1, 5, None)]
)
def test_as_many_in_flight_as_may_be(settings, configured, decided, stopped_at):
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": configured}}}
    if decided:
        decide(max_in_flight=decided)
    beat()
    add(leased=60)
    text = f"reached its limit of messages in flight: {stopped_at}"
    assert (text in queues.why(add().pk).text) is (stopped_at is not None)


def test_part_of_the_limit_is_held_by_workers_that_are_gone():
    """One of them has been gone for so long that its heartbeat was removed."""
    decide(max_in_flight=3)
    beat()
    beat("lost", seen=-60)
    add(leased=60)
    add(leased=-1, claimed_by="lapsed:1")
    first = add(leased=60, claimed_by="lost:1")
    text = "reached its limit of messages in flight: 3. "
    held = f"1 of them is held by a worker that is gone, until {shown(first.leased_until)}."
    assert queues.why(add().pk).text.endswith(text + held)
    last = add(leased=3600, claimed_by="removed:1")
    held = "2 of them are held by workers that are gone, the last until"
    assert queues.why(add().pk).text.endswith(f"{text}{held} {shown(last.leased_until)}.")


def test_delayed():
    message = add(after=60)
    why(message, "delayed", f"is delayed until {shown(message.processable_after)}")


def test_delayed_without_a_handler():
    """Its handler was renamed in a deploy; workers find out only when it is due."""
    handlers.handler("shop.orders.*", name="shop.mail", queue="mail")(print)
    message = add(handler="shop.mails", after=60)
    text = (
        f"A worker with the code of this process would then hold message {message.pk}: no handler"
        " named shop.mails"
    )
    assert text in why(message, "delayed", "is delayed until").text
    retried = why(add(handler="shop.mails", after=60, attempts=1), "retrying", "")
    assert "would then hold message" in retried.text
    assert "would then hold" not in why(add(handler="shop.mail", after=60), "delayed", "").text


def test_snoozed():
    message = add(after=60, last_error="Snooze: the bank is closed")
    answer = why(message, "delayed", f"is delayed until {shown(message.processable_after)}")
    assert answer.error == "Snooze: the bank is closed"
    due = add(attempts=1, last_error="Snooze: the bank is closed")
    assert why(due, "processable", "has been due since").error == "Snooze: the bank is closed"


def test_retrying():
    message = add(after=60, attempts=2, max_attempts=5, last_error="ValueError: 451 busy")
    answer = why(
        message,
        "retrying",
        f"failed attempt 2 of 5 and runs again after {shown(message.processable_after)}",
    )
    assert "451 busy" not in answer.text
    assert answer.error == "ValueError: 451 busy"
    assert str(answer) == f"{answer.text} Last error: ValueError: 451 busy"


def test_leased():
    beat("worker", host="web1", pid=99)
    message = add(leased=60, claimed_by="worker:17")
    why(
        message,
        "leased",
        f"until {shown(message.leased_until)}",
        "by worker worker (host web1, process 99)",
    )


TAKES_OVER = (
    "Another worker takes the message over when the lease lapses; no command can shorten it."
)


def test_lease_of_a_worker_that_is_gone():
    """It had extended its lease, and nothing tells whether it comes back."""
    worker = beat("worker", host="web1", pid=99, seen=-31)
    message = add(leased=3600, claimed_by="worker:17")
    beat("other")
    answer = why(message, "leased", f"is leased until {shown(message.leased_until)}, by worker")
    assert answer.text.endswith(
        "by worker worker (host web1, process 99), which is gone: its last heartbeat came at"
        f" {shown(worker.last_seen)}. {TAKES_OVER}"
    )


def test_lease_of_an_unknown_worker():
    """Its heartbeat was removed before its lease lapsed."""
    answer = why(add(leased=3600, claimed_by="stranger:1"), "leased", "stranger, of which no")
    assert answer.text.endswith(
        f"no heartbeat is stored: it is gone, unless it has just started. {TAKES_OVER}"
    )


def test_running():
    message = add(leased=60, attempts=3)
    beat(running=[message.pk])
    why(message, "running", "runs now, attempt 3 of 20, by worker worker (host host, process 7)")


@pytest.mark.parametrize(("leased", "seen"), [(25, -22), (-1, -22)])
def test_running_without_a_sign_of_life(leased, seen):
    """Until the third missed heartbeat a killed worker counts as alive."""
    message = add(leased=leased, attempts=1)
    worker = beat(running=[message.pk], ran={str(message.pk): 95.0}, seen=seen)
    free = max(message.leased_until, worker.last_seen + timedelta(seconds=30))
    answer = why(message, "running", "runs now, attempt 1 of 20, for", "by worker worker")
    assert answer.text.endswith(
        f". The last heartbeat of its worker came at {shown(worker.last_seen)}, and one is due"
        " every 10 s. If the worker is gone, another one takes the message over after"
        f" {shown(free)}, and no command can do so earlier."
    )


def test_running_past_its_lease():
    message = add(leased=-1)
    beat(running=[message.pk])
    why(message, "running", f"it lapsed at {shown(message.leased_until)}, and the worker keeps")


def test_lapsed():
    beat("next")
    message = add(leased=-1)
    text = f"the lease of worker worker lapsed at {shown(message.leased_until)}"
    why(message, "processable", text, "is next to be claimed")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("given", [{}, {"leased": -60}])
def test_late_and_locked_by_a_session(given):
    """A worker that froze in a handler keeps its row locked; so does a forgotten psql."""
    beat("next")
    message = add(**given)
    select = "select from django_mq_queuedmessage where id = %s for update"
    with second_connection(application_name="psql") as other, other.transaction():
        other.execute(select, [message.pk])
        pid = other.info.backend_pid
        why(message, "processable", f"but session {pid} of the server (psql) has its row locked")
    text = str(queues.why(message.pk))
    assert "locked" not in text
    assert "is next to be claimed" in text


def test_paused():
    state = decide(paused=-5)
    message = add()
    since = f"(since {shown(state.paused_at)}). mq_resume mail ends the pause."
    why(message, "paused", f"its queue is paused until it is resumed {since}")
    state.delete()
    state = decide(paused=-5, until=60)
    since = f"(since {shown(state.paused_at)}). mq_resume mail ends the pause."
    why(message, "paused", f"its queue is paused until {shown(state.paused_until)} {since}")
    state.delete()
    state = decide(backoff=60, backoff_level=4, paused=-9, until=-1)
    why(message, "paused", f"is backing off until {shown(state.backoff_until)} (level 4)")


def test_its_last_error_is_the_reason_for_a_backoff():
    decide(backoff=60, backoff_level=4)
    message = add(last_error="Snooze: the bank is closed")
    answer = why(message, "paused", "is backing off until")
    assert answer.error == "Snooze: the bank is closed"
    assert "closed" not in answer.text
    QueueState.objects.update(paused_at=Now(), paused_until=None)
    assert why(message, "paused", "is paused until it is resumed").error == ""


def test_a_probe_of_its_queue():
    """NSQ-7: the wait is over, and one message tests whether the others may run."""
    beat()
    message = add()
    state = decide(backoff=-1, backoff_level=4)
    why(message, "processable", "is backing off (level 4): the next message claimed is the probe")
    soon = {"probe_until": Now() + timedelta(seconds=9), "probe_by": "worker:7"}
    QueueState.objects.update(**soon)
    why(
        message,
        "processable",
        "is backing off (level 4): worker worker runs one message as a probe,",
    )
    QueueState.objects.update(probe_until=Now() - timedelta(seconds=9))
    why(message, "processable", "the next message claimed is the probe")
    state.delete()
    why(message, "processable", "is next to be claimed")


def test_expired():
    message = add(expires=-1)
    why(message, "expired", f"expired at {shown(message.expires_at)}")


class TestHeld:
    def why(self, *parts, **columns):
        message = add(held=-60, after=30, last_error="no such handler", **columns)
        held = f"has been held since {shown(message.held_since)}"
        again = f"Workers check it again at {shown(message.processable_after)}"
        assert why(message, "held", held, again, *parts).error == "no such handler"

    def test_its_handler_is_not_here(self):
        renamed = "if it was renamed, give it aliases=('shop.mail',)."
        self.why("no handler named shop.mail is registered here", renamed, handler="shop.mail")

    def test_its_task_is_not_here(self):
        """Tasks have no aliases."""
        message = add(held=-60, handler="shop.tasks.old", type="tasks.shop.tasks.old")
        text = queues.why(message.pk).text
        assert "no handler named shop.tasks.old is registered here" in text
        assert "; if it was renamed, leave a task at its old path that calls the new one." in text

    def test_no_handler_takes_it(self):
        self.why("no handler registered here takes shop.orders.placed")

    def test_no_handler_takes_it_from_this_queue(self):
        handlers.handler("#", name="h", queue="other")(lambda delivery: None)
        self.why("takes messages from queue mail; unless the queue is misspelt, allow it with")
        self.why("no matching handler (h) takes messages from queue mail", handler="h")

    @pytest.mark.parametrize("handler", ["", "h"])
    def test_it_is_newer_than_its_handler(self, handler):
        handlers.handler("#", name="h", queue="mail", schema_version=2)(lambda delivery: None)
        text = "its schema version 3 is newer than version 2 that handler h understands"
        self.why(text, handler=handler, schema_version=3)

    @pytest.mark.parametrize(
        ("pattern", "queue", "columns", "text"),
        [
            ("#", "mail", {"handler": "gone"}, "no handler named gone is registered here"),
            ("other", "mail", {}, "no handler registered here takes shop.orders.placed"),
            ("#", "other", {}, "no matching handler (h) takes messages from queue mail"),
            ("#", "other", {"handler": "h"}, "(h) takes messages from queue mail"),
            ("other", "mail", {"handler": "h"}, "matches no pattern of handler h"),
            ("#", "mail", {"schema_version": 3}, "its schema version 3 is newer"),
        ],
    )
    def test_the_reason_is_given_once(self, pattern, queue, columns, text):
        """The worker that holds it stores the same reason, in words of its own."""
        handlers.handler(pattern, name="h", queue=queue)(print)
        message = add(**columns)
        drain()
        message.refresh_from_db()
        assert message.last_error
        answer = why(message, "held", text)
        assert (answer.error, "Last error" in str(answer)) == ("", False)

    def test_another_reason_of_the_worker_is_the_error(self):
        """The code of the worker is not that of this process."""
        error = "this worker has no handler named h (handlers are looked for in handlers.py)"
        handlers.handler("#", name="h", queue="other")(print)
        message = add(held=-60, handler="h", last_error=error)
        assert why(message, "held", "no matching handler (h) takes").error == error

    def test_it_could_run_here(self):
        handlers.handler("#", name="h", queue="mail")(lambda delivery: None)
        self.why("though handler h is registered here", handler="h")


@pytest.mark.parametrize(
    ("reason", "text", "error"),
    [
        ("exhausted", "its last attempt failed (20 of 20 attempts used)", "ValueError: no"),
        ("expired", "it expired before an attempt could start", "ValueError: no"),
        (
            "held for too long: no h",
            "no worker could run it within the allowed time",
            "held for too long: no h",
        ),
        ("expired card 4111", "its handler rejected it", "expired card 4111"),
        ("card 4111 refused", "its handler rejected it (20 of", "card 4111 refused"),
        ("InvalidPayload: n 4111", "its payload is not what its", "InvalidPayload: n 4111"),
        ("", "no more attempts will be made", ""),
    ],
)
def test_dead(reason, text, error):
    """S08: the handler's own text is not in the text that everybody may read."""
    message = add(dead=-5, attempts=20, dead_reason=reason, last_error="ValueError: no")
    answer = why(
        message, "dead", f"has been dead since {shown(message.dead_at)}", text, "discard it"
    )
    assert ("Requeue it to run it again" in answer.text) != reason.startswith("InvalidPayload")
    assert f"mq_requeue --id {message.pk}" in answer.text
    assert f"mq_purge --id {message.pk}" in answer.text
    assert answer.error == error
    assert "4111" not in answer.text


def test_a_dead_message_that_does_not_fit_would_die_again():
    """So something comes before the requeue; others may wait behind it."""
    dead = add(key="k", dead=-5, dead_reason="InvalidPayload: OrderPlaced: order_id is missing")
    behind = add(key="k", blocked_by=dead.pk)
    why(
        dead,
        "dead",
        "it would die again. First deploy a handler or an upcast that takes its payload",
        f"or run mq_pause mail and mq_requeue --id {dead.pk}, edit it, and run mq_resume mail. Or",
    )
    why(
        behind,
        "blocked",
        "Deploy a handler or an upcast that takes its payload, and requeue that message, or discard"
        " it, so that the others proceed",
    )


def test_gone():
    answer = queues.why(10**9)
    assert (answer.state, answer.error) == ("gone", "")
    assert "is not stored: it was acked, cancelled or purged" in str(answer)
    assert str(answer).endswith(
        " Acked messages are kept only where the option history is on. If the project logs INFO of"
        " django_mq, the log record of a removal by an operator has its first 1,000 ids."
    )
    assert queues.why(2**80).state == "gone"


@pytest.mark.parametrize(
    ("reply", "text", "error"),
    [
        ({"value": 4111}, "7 was acked. Its reply {}: handler h returned a value.", ""),
        (
            {"error_class": "KeyError", "error_text": "4111"},
            "7 is not stored: it was acked, cancelled or purged, or was never committed. Its reply"
            " {}: handler h failed with KeyError.",
            "4111",
        ),
        (
            {"error_class": "Unanswered", "error_text": "expired"},
            "7 is not stored: it was acked, cancelled or purged, or was never committed. Its reply"
            " {}: no reply will come.",
            "expired",
        ),
    ],
)
def test_gone_with_a_reply(reply, text, error):
    """RMQ-20, S08: the text says that there is an answer, and does not quote it."""
    stored = Result.objects.create(message_id=7, handler="h", **reply)
    stored.refresh_from_db()
    answer = queues.why(7)
    assert answer.text == f"Message {text.format(f'was stored at {shown(stored.created_at)}')}"
    assert answer.error == error
    assert "4111" not in answer.text


def test_gone_with_a_history():
    for attempt in (1, 3, 2):
        FailedAttempt.objects.create(
            message_id=7,
            queue="mail",
            type="t",
            handler="h",
            attempt=attempt,
            error_class="ValueError",
            error_text=f"no {attempt}",
        )
    answer = queues.why(7)
    assert "last failed attempt, number 3 (t, queue mail), ended in handler h" in answer.text
    assert answer.error == "ValueError: no 3"


def test_undecodable_message_gets_a_reason():
    """A row with JSON that this interpreter cannot read still gets an explanation."""
    message = add(held=-5)
    deep = "[" * 10_000 + "]" * 10_000
    with connection.cursor() as cursor:
        cursor.execute("set local max_stack_depth = '6MB'")
        cursor.execute(
            "update django_mq_queuedmessage set payload = %s::jsonb, metadata = %s::jsonb",
            [deep, deep],
        )
    assert queues.why(message.pk).state == "held"
    assert queues.peek("mail") == [message]


def test_held_by_a_worker_that_runs_other_code():
    """Half of the fleet was not restarted after a deploy."""
    handlers.handler("shop.orders.*", name="h", queue="mail")(print)
    message = add(handler="h", held=-9, last_error="this worker has no handler named h")
    text = "a worker could not run it, although handler h is registered here: "
    why(message, "held", f"{text}no live worker serves its queue, so start mq_worker")
    beat("new", started_at=timezone.now() - timedelta(minutes=1))
    old = beat("old", started_at=timezone.now() - timedelta(days=3), host="h", pid=9)
    beat("elsewhere", queues=["other"])
    answer = why(
        message,
        "held",
        f"{text}restart the workers of its queue that run older code. The one that has run longest"
        f" is worker old (host h, process 9), started at {shown(old.started_at)}",
    )
    assert answer.error == "this worker has no handler named h"
