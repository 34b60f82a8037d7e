"""The roles of docs/roles.md: its SQL unchanged, and every public function as every role."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import ProgrammingError, connection, transaction
from django.db.models.functions import Now
from psycopg.errors import InsufficientPrivilege

import django_mq
from django_mq import (
    BroadcastBusy,
    DuplicateMessage,
    Message,
    broadcast,
    broadcast_many,
    cancel,
    handler,
    queues,
    request,
)
from django_mq.conf.inboxes import AmqpInbox
from django_mq.contrib.prometheus import QueueCollector
from django_mq.contrib.relays.consumer import Consumer
from django_mq.contrib.relays.incoming import Incoming
from django_mq.handlers import isolated
from django_mq.messages import OnDuplicate
from django_mq.models import (
    FailedAttempt,
    HandledMessage,
    QueuedMessage,
    QueueState,
    Result,
    Schedule,
    UniqueKey,
)
from django_mq.outbox import backlog
from django_mq.store import free_unique_ids, kept_results, promotion, results
from tests.management.conftest import run
from tests.roles import acting_as, documented, documented_names, skip_unless_able
from tests.rows import add, beat
from tests.slow import slow

pytestmark = pytest.mark.django_db

Call = Callable[[], object]


@pytest.fixture
def roles() -> None:
    skip_unless_able()
    with connection.cursor() as cursor:
        for block in documented():
            cursor.execute(block)


@pytest.fixture(autouse=True)
def rows(settings: Any) -> None:
    """A message in each state, with its related rows; ids from 1."""
    settings.DJANGO_MQ = {"QUEUES": {"limited": {"max_backlog": 2}}, "REQUIRE_ATOMIC": False}
    backlog._counts.clear()
    with connection.cursor() as cursor:
        cursor.execute("alter sequence django_mq_queuedmessage_id_seq restart with 1000")
    with transaction.atomic():
        waiting = [
            broadcast("a.b", unique_id=f"u{n}", key="k", queue="mail").ids[0] for n in range(3)
        ]
    QueuedMessage.objects.filter(pk=waiting[1]).update(leased_until=Now(), claimed_by="w:1")
    broadcast("a.b", unique_id="u1", on_duplicate="requeue", queue="mail", payload={"aside": 1})
    add(id=1, after=60, last_error="secret", wants_result=True)
    add(id=2, dead=-9, unique_id="dead", last_error="secret", dead_reason="secret", key="k2")
    add(id=3, blocked_by=2, key="k2")
    add(id=4, held=-9)
    add(id=5, leased=60)
    add("limited", id=6)
    add("tasks", id=8, type="tasks.t", handler="t", wants_result=True)
    add("requeued", id=10, after=60, wants_result=True)
    Result.objects.create(message_id=10, error_class="E", error_text="of its first life")
    FailedAttempt.objects.create(message_id=7, queue="q", type="t", attempt=1)
    Result.objects.create(message_id=7, value={"secret": 1})
    HandledMessage.objects.create(
        id=9, queue="q", type="t", handler="t", payload={"secret": 1}, keep_until=Now()
    )
    beat(running=[5])
    Schedule.objects.create(name="s", type="a.b", every=timedelta(hours=1))
    QueueState.objects.create(queue="slow", backoff_level=2, backoff_until=Now())


def duplicate(how: OnDuplicate, id: str = "u0") -> object:
    return broadcast("a.b", {"n": 1}, unique_id=id, on_duplicate=how, queue="mail", key="k")


def raises_duplicate() -> None:
    with pytest.raises(DuplicateMessage):
        duplicate("raise")


def meets_the_limit() -> None:
    broadcast("a.b", queue="limited")
    with pytest.raises(BroadcastBusy):
        broadcast("a.b", queue="limited")


def reply() -> None:
    with connection.cursor() as cursor:
        cursor.execute(results.LISTEN)
        results.reply_states(cursor, [1, 7])


def read_task() -> None:
    with connection.cursor() as cursor:
        assert kept_results.find(cursor, 8) is not None
        kept_results.failed_attempts(cursor, 8)


def replay() -> None:
    with isolated():
        handler("t", name="t")(lambda delivery: None)
        queues.replay(ids=9)


def dry_replay() -> None:
    with isolated():
        handler("t", name="t")(lambda delivery: None)
        queues.replay(ids=9, dry_run=True)


def promote_put_aside() -> None:
    """The steps of a broadcast if a message was put aside for an id that is free by now."""
    with connection.cursor() as cursor:
        id = free_unique_ids.UniqueId("mail", "", "a.b", "u1")
        promotion.lock(cursor, [id])
        promotion.promote_put_aside(cursor, [id])


def sql(text: str) -> Call:
    def run() -> None:
        with connection.cursor() as cursor:
            cursor.execute(text)

    return run


def consume() -> None:
    """Store a message that came in, and one that cannot be decoded."""
    inbox = AmqpInbox(kind="amqp", url="amqp://localhost", source="crm")
    bodies = (b"{}", b"no JSON")
    Consumer("crm", inbox).store([Incoming(body, {}, "", body.decode()) for body in bodies])


def many() -> None:
    broadcast_many(Message("a.b", after=n) for n in range(60))
    broadcast_many([Message("a.b", {"n": n}) for n in range(60)])
    broadcast_many([Message("a.b", key="k", priority=n, expires=60) for n in range(5)])


#: The calls that each role may make beyond those of the roles that it includes.
CALLS: dict[str, dict[str, Call]] = {
    "anybody": {"queues.horizon": queues.horizon},
    "producer": {
        "broadcast": lambda: broadcast("a.b", {"n": 1}, key="k", metadata={"a": 1}, after=9),
        "broadcast_many": many,
        "broadcast_many few": lambda: broadcast_many([Message("a.b")] * 3),
        "request": lambda: request("a.b"),
        "mq_broadcast": sql("select mq_broadcast('q', 't', '{}', '{}', now())"),
    },
    "limited": {"broadcast max_backlog": meets_the_limit},
    "asker": {"reply": reply, "read results": sql("select value from django_mq_result")},
    "unique": {
        "broadcast skip": lambda: duplicate("skip"),
        "broadcast raise": raises_duplicate,
        "broadcast requeue": lambda: duplicate("requeue", "u1"),
        "broadcast rerun in flight": lambda: duplicate("rerun", "u1"),
        "broadcast new": lambda: duplicate("skip", "new"),
        "broadcast promotes": promote_put_aside,
        "read asides": sql("select put_aside from django_mq_uniquekey"),
    },
    "consumer": {"mq_consume": consume},
    "due times": {
        "broadcast debounce": lambda: duplicate("debounce"),
        "queues.run_now": lambda: queues.run_now([1, 4]),
    },
    "replacing": {
        "broadcast update": lambda: duplicate("update"),
        "broadcast replace": lambda: duplicate("replace"),
        "broadcast rerun": lambda: duplicate("rerun"),
    },
    "written payloads": {
        "write payloads": sql("update django_mq_queuedmessage set payload = '{}'"),
    },
    "canceller": {
        "cancel": lambda: cancel(id=1),
        "cancel unique": lambda: cancel(unique_id="u1"),
        "cancel type": lambda: cancel(type="a.b"),
        "queues.cancel": lambda: queues.cancel([1, 1000, 1001]),
        "queues.cancel requeued": lambda: queues.cancel(10),
        "queues.discard": lambda: queues.discard(2),
        "delete": sql("delete from django_mq_queuedmessage"),
    },
    "monitor": {
        "queues.counts": queues.counts,
        "queues.names": queues.names,
        "queues.state": lambda: queues.state("mail"),
        "queues.peek": queues.peek,
        "queues.peek free": lambda: queues.peek(skip_locked=True),
        "queues.peek dead": lambda: queues.peek(dead=True),
        "queues.heads": queues.heads,
        "queues.workers": queues.workers,
        "queues.running": queues.running,
        "queues.timings": queues.timings,
        "queues.figures": queues.figures,
        "queues.rates": queues.rates,
        "prometheus": lambda: list(QueueCollector().collect()),
    },
    "operator": {
        **{f"queues.why {n}": lambda n=n: queues.why(n) for n in range(1, 8)},  # type: ignore[misc]
        "queues.requeue": queues.requeue,
        "queues.pause": lambda: queues.pause("mail"),
        "queues.resume": lambda: queues.resume("mail"),
        "queues.limit": lambda: queues.limit("mail", 5),
        "queues.end_backoff": lambda: queues.end_backoff("slow"),
        "queues.topology": queues.topology,
        "queues.chain": lambda: queues.chain(9),
        "queues.history": queues.history,
        "queues.replay dry_run": dry_replay,
        "queues.schedules": queues.schedules,
        "queues.run_schedule": lambda: queues.run_schedule("s"),
        "queues.enable_schedule": lambda: queues.enable_schedule("s"),
        "queues.disable_schedule": lambda: queues.disable_schedule("s"),
        "queues.next_times": lambda: queues.next_times("s"),
        "queues.requeue fingerprint": lambda: queues.requeue(fingerprint="0" * 16),
        "queues.operate": lambda: queues.operate("cancel", queue="mail"),
        "queues.operations": queues.operations,
        "queues.stop": lambda: queues.stop(3, by="ana"),
        "queues.ask_stack": lambda: queues.ask_stack(3),
        "queues.commands": lambda: queues.commands(3),
        "queues.quiet_workers": lambda: queues.quiet_workers("w", by="ana"),
        "queues.resume_workers": lambda: queues.resume_workers("w"),
        "queues.stop_workers": lambda: queues.stop_workers("w"),
        "queues.worker_orders": lambda: queues.worker_orders("w"),
        "queues.cancel_operation": lambda: queues.cancel_operation(1),
    },
    "dry purge": {"queues.purge dry_run": lambda: queues.purge("mail", waiting=True, dry_run=True)},
    "purge": {"queues.purge": lambda: queues.purge("mail", waiting=True)},
    "errors": {
        "read errors": sql("select last_error, dead_reason, metadata from django_mq_queuedmessage"),
        "read attempts": sql("select traceback from django_mq_failedattempt"),
        "queues.errors": queues.errors,
    },
    "tasks": {"read a task": read_task},
    "task ends": {"cancel a task": lambda: queues.cancel(8), "cancel its id": lambda: cancel(id=8)},
    "payloads": {"read payloads": sql("select payload from django_mq_queuedmessage")},
    "replays": {"queues.replay": replay},
    "edits": {"queues.edit": lambda: queues.edit(4, payload={"n": 1}, priority=1)},
    "handlers": {"name handlers": sql("update django_mq_queuedmessage set handler = 'h'")},
    "claims": {"claim": sql("update django_mq_queuedmessage set suspect = true")},
}
UNIQUE = ("producer", "unique")
REPLACING = (*UNIQUE, "replacing", "written payloads", "due times", "limited")
CANCELLER = (*UNIQUE, "canceller")
TASK_READER = ("tasks", "payloads", "asker", "errors", "dry purge")
OPERATOR = (
    *(*CANCELLER, "limited", "monitor", "operator", "due times"),
    *("dry purge", "purge", "errors"),
)
#: Cancelling, for example, includes the columns that `max_backlog` needs.
MAY: dict[str, tuple[str, ...]] = {
    "mq_producer": ("producer",),
    "mq_limited_producer": ("producer", "limited"),
    "mq_asker": ("producer", "asker"),
    "mq_unique_producer": UNIQUE,
    "mq_replacing_producer": REPLACING,
    "mq_consumer": (*UNIQUE, "consumer"),
    "mq_canceller": (*CANCELLER, "limited"),
    "mq_task_reader": TASK_READER,
    "mq_unique_task_producer": (*REPLACING, *TASK_READER, "edits"),
    "mq_task_canceller": (*CANCELLER, "limited", *TASK_READER, "purge", "task ends"),
    "mq_monitor": ("monitor", "dry purge"),
    "mq_operator": OPERATOR,
    "mq_admin": (*OPERATOR, *TASK_READER, "task ends", "replays", "edits", "written payloads"),
    "mq_worker": tuple(CALLS),
}


class _Undone(Exception):
    """Rolls a call back."""


def allowed(role: str, call: Call) -> bool:
    """Say whether the call succeeds as `role`; its effects are undone."""
    backlog._counts.clear()
    try:
        with acting_as(role):
            call()
            raise _Undone
    except _Undone:
        return True
    except ProgrammingError as error:
        if not isinstance(error.__cause__, InsufficientPrivilege):
            raise
        return False


#: The roles that a plain run tries; the others have parts of the rights of these.
PLAIN = ("mq_producer", "mq_monitor", "mq_operator", "mq_admin", "mq_worker")


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize("role", [*PLAIN, *slow(*(each for each in MAY if each not in PLAIN))])
def test_role_has_exactly_the_documented_rights(role: str) -> None:
    wrong = {
        name: may
        for kind, calls in CALLS.items()
        for name, call in calls.items()
        if (may := allowed(role, call)) != (kind in (*MAY[role], "anybody"))
    }
    assert wrong == {}


def test_every_role_of_the_page_is_tried() -> None:
    assert documented_names() == list(MAY)


def test_every_public_function_is_tried() -> None:
    """Functions without statements are left out, and async versions of the others."""
    declares = {"handler", "message", "upcast", "periodic"}
    silent = {*declares, "exponential", "fixed", "intervals", "redacted"}
    waits = {"ask", "gather", "aask", "agather", "arequest", "abroadcast"}
    called = {name.split()[0] for calls in CALLS.values() for name in calls}
    for module, prefix in ((django_mq, ""), (queues, "queues.")):
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found) and not isinstance(found, type) and name not in silent | waits:
                assert prefix + name in called


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize(
    "role",
    [role if role in PLAIN else slow(role)[0] for role in MAY if role != "mq_worker"],
)
def test_only_workers_name_a_handler_or_hold_a_message(role: str) -> None:
    """A stolen login cannot insert rows that the library does not insert."""
    for column, value in (
        ("claimed_by", "'w:1'"), ("attempts", "-1"), ("suspect", "true"), ("last_error", "'e'"),
        ("dead_at", "now()"), ("blocked_by", "1"), ("held_since", "now()"),
    ):  # fmt: skip
        insert = sql(
            f"insert into django_mq_queuedmessage (queue, type, payload, {column})"
            f" values ('q', 't', '{{}}', {value})"
        )
        stores_dead_letters = role == "mq_consumer" and column in ("dead_at", "last_error")
        assert allowed(role, insert) is stores_dead_letters, column


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize(
    ("role", "command", "needed"),
    [
        ("mq_producer", ("mq_status",), "mq_monitor"),
        ("mq_producer", ("mq_peek",), "mq_monitor"),
        ("mq_monitor", ("mq_pause", "mail"), "mq_operator"),
        ("mq_operator", ("mq_peek", "--payload"), "mq_admin"),
        ("mq_operator", ("mq_purge", "--id", 8, "--waiting", "--yes"), "mq_admin"),
        ("mq_operator", ("mq_replay", "--id", 9, "--yes"), "mq_admin"),
    ],
)
def test_a_command_that_is_refused_names_the_role_that_allows_it(
    role: str, command: tuple[str, ...], needed: str
) -> None:
    with isolated():
        handler("t", name="t")(lambda delivery: None)
        shown = StringIO()
        with pytest.raises(CommandError) as refused, acting_as(role):
            call_command(*command, stdout=shown)
        assert shown.getvalue() == ""
        assert re.search(rf"^permission denied .*\b{needed}\b.* documentation$", str(refused.value))
        assert allowed(needed, lambda: run(*command))


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize(
    ("role", "call", "needed"),
    [
        ("mq_task_reader", lambda: broadcast("a.b"), ["mq_producer"]),
        ("mq_task_reader", many, ["mq_producer"]),
        ("mq_producer", lambda: broadcast("a.b", queue="limited"), ["mq_limited_producer"]),
        ("mq_producer", lambda: duplicate("skip"), ["mq_unique_producer"]),
        ("mq_producer", lambda: duplicate("debounce"), ["mq_replacing_producer"]),
        ("mq_unique_producer", lambda: duplicate("replace"), ["mq_replacing_producer"]),
        (
            "mq_unique_producer",
            lambda: broadcast("a.b", queue="limited", unique_id="x"),
            ["mq_unique_producer", "mq_limited_producer"],
        ),
    ],
)
def test_a_broadcast_that_is_refused_names_the_roles_that_allow_it(
    role: str, call: Call, needed: list[str]
) -> None:
    with pytest.raises(ProgrammingError, match="permission denied") as refused, acting_as(role):
        call()
    [note] = refused.value.__notes__
    assert re.findall(r"\bmq_\w+", note) == needed
    with connection.cursor() as cursor:
        cursor.execute(f"create role enough; grant {', '.join(needed)} to enough")
    assert allowed("enough", call)


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize(
    ("role", "call", "needed"),
    [
        ("mq_monitor", lambda: queues.stop(7), "mq_operator"),
        ("mq_monitor", lambda: queues.pause("mail"), "mq_operator"),
        ("mq_monitor", lambda: queues.requeue([7]), "mq_operator"),
        ("mq_operator", lambda: queues.edit(7, priority=3), "mq_admin"),
    ],
)
def test_an_action_that_is_refused_names_the_role_that_allows_it(
    role: str, call: Call, needed: str
) -> None:
    with pytest.raises(ProgrammingError, match="permission denied") as refused, acting_as(role):
        call()
    [note] = refused.value.__notes__
    assert note.startswith(f"The login needs the role {needed}")


@pytest.mark.usefixtures("roles")
def test_monitoring_works_in_a_read_only_transaction() -> None:
    """Like a replica."""
    for name, call in CALLS["monitor"].items():
        try:
            with acting_as("mq_monitor"), connection.cursor() as cursor:
                cursor.execute("set transaction read only")
                call()
                raise _Undone
        except _Undone:
            continue
        except ProgrammingError as error:  # pragma: no cover
            pytest.fail(f"{name}: {error}")


@pytest.mark.usefixtures("roles")
def test_reader_sees_the_same_as_a_writer() -> None:
    with acting_as("mq_monitor"):
        seen = queues.state("mail"), queues.peek("mail"), queues.peek(skip_locked=True)
    assert seen == (
        queues.state("mail"),
        queues.peek("mail"),
        queues.peek(skip_locked=True),
    )
    assert UniqueKey.objects.filter(put_aside__isnull=False).exists()
