"""Any value that psql writes into one of our columns harms only that row (guarantee 24).

The cases come from the models: each column gets every odd value of its type, so new columns are
covered. Values that the table refuses are no cases; those that it accepts are read by workers,
pages and commands. In each run workers read all of them, and pages a third.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import DEFAULT_DB_ALIAS, IntegrityError, connection, models, transaction
from django.test import Client

from django_mq import Delivery, handler, handlers, queues
from django_mq.conf import get_settings
from django_mq.executor.statements import Statements
from django_mq.models import (
    FailedAttempt,
    HandledMessage,
    HourFigures,
    MinuteFigures,
    Operation,
    QueuedMessage,
    QueueState,
    Result,
    Schedule,
    UniqueKey,
    WorkerCommand,
    WorkerHeartbeat,
)
from django_mq.worker import Worker, chores
from tests import odd_values
from tests.admin.pages import MODELS, url
from tests.rows import add, beat
from tests.samples import third

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.thorough]

Row = tuple[type[models.Model], Any, str]

MESSAGE = {
    "queue": "mail",
    "type": "odd",
    "payload": "{}",
    "handler": "h",
    "processable_after": "2020-01-01",
}
YEAR_2021 = datetime(2021, 1, 1, tzinfo=UTC)
LAPSED = {"leased_until": "2020-01-02", "claimed_by": "w:1", "unique_id": "{}"}
#: Messages in every way of reading them: run, failed, taken over, dead-lettered, ...
WAYS: dict[str, dict[str, str]] = {
    "runs": {"wants_result": "true", "unique_id": "{}"},
    "fails": {"type": "odd.fails"},
    "fails for good": {"type": "odd.fails", "max_attempts": "1", "key": "k"},
    "lapsed": {**LAPSED, "attempts": "0"},
    "lapsed for good": {**LAPSED, "attempts": "20", "wants_result": "true"},
    "lapsed behind another": {**LAPSED, "key": "lapsed"},
    "ordered": {"ordered": "true"},
    "unrouted": {"handler": "", "type": "odd.unrouted", "held_since": "2020-01-02"},
    "expired": {"expires_at": "2020-01-02", "unique_id": "{}"},
    "dead": {"dead_at": "2020-01-02", "dead_reason": "no such order", "unique_id": "{}"},
    "blocked": {"blocked_by": "1", "key": "blocked"},
}
#: A valid row of every other table.
OTHERS: dict[type[models.Model], dict[str, str]] = {
    FailedAttempt: {
        "message_id": "1",
        "queue": "mail",
        "type": "odd",
        "handler": "h",
        "attempt": "1",
        "worker": "w",
        "error_class": "ValueError",
        "error_text": "",
        "traceback": "",
    },
    HandledMessage: {
        "queue": "mail",
        "type": "odd",
        "handler": "h",
        "keep_until": "2020-01-02",
        "payload": "{}",
    },
    Operation: {"action": "cancel", "filter": '{"queues": ["odd"]}', "last_id": "0"},
    QueueState: {"queue": "{}"},
    Result: {"message_id": "{}", "handler": "h", "value": "1"},
    Schedule: {"name": "{}", "type": "odd", "every": "1 hour", "next_at": "2020-01-01"},
    WorkerHeartbeat: {
        "id": "{}",
        "queues": '["mail"]',
        "host": "host",
        "pid": "1",
        "version": "0",
        "wakeup": "notify",
        "running": "[]",
    },
    WorkerCommand: {"worker": "{}", "message_id": "1", "attempt": "1", "action": "stop"},
    UniqueKey: {"queue": "mail", "handler": "h", "type": "odd", "unique_id": "{}"},
    MinuteFigures: {"minute": "yesterday", "worker": "{}", "queue": "mail", "handler": "h"},
    HourFigures: {"hour": "yesterday", "queue": "{}", "handler": "h"},
}

#: Models that only the overview shows.
WITHOUT_PAGE = (MinuteFigures, HourFigures, WorkerCommand)


@pytest.fixture(autouse=True)
def ran(settings: Any) -> Iterator[list[int]]:
    """Only these handlers exist; return the ids of the messages that they received."""
    storage = {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
    settings.STORAGES = {**settings.STORAGES, "staticfiles": storage}
    ran: list[int] = []
    with handlers.isolated():

        @handler("good", "odd", "odd.fails", queue="mail", name="h")
        def h(delivery: Delivery) -> int:
            ran.append(delivery.id)
            if delivery.type == "odd.fails":
                raise ValueError("no")
            return 7

        yield ran


@pytest.fixture
def good() -> list[int]:
    """Ordinary messages, before and behind the odd ones."""
    options = ({"after": -(10**9)}, {"after": -1}, {"key": "good"}, {"wants_result": True})
    return [add(handler="h", type="good", **each).pk for each in options]


def store(model: type[models.Model], row: dict[str, str], column: str, way: str = "") -> list[Row]:
    """Insert the row with every odd value of `column`; return the rows that the table accepted."""
    names = [each.column for each in model._meta.concrete_fields]
    field = model._meta.concrete_fields[names.index(column)]
    found = []
    for number, value in enumerate(odd_values.values(field)):
        columns = {name: text.format(f"{number}.{column}.{way}"[:32].replace(" ", "-"))
                   if text == "{}" and name in NUMBERED else text
                   for name, text in row.items()}  # fmt: skip
        if model is HandledMessage:
            columns.setdefault("id", str(number + 1000 * (1 + names.index(column))))
        if model is Result:
            columns["message_id"] = str(number + 1000 * (1 + names.index(column)))
        key = odd_values.insert(model, {**columns, column: value})
        if key is None:
            continue
        found.append((model, key, f"{way} {column}={str(value)[:40]!r}"))
        if model is QueuedMessage and "unique_id" in row and column not in UNIQUE:
            taken = {name: columns[name] for name in ("queue", "handler", "type", "unique_id")}
            assert odd_values.insert(UniqueKey, {**taken, "message_id": str(key)}) is not None
    return found


NUMBERED = ("id", "queue", "name", "unique_id", "worker")
UNIQUE = ("queue", "handler", "type", "unique_id")


def shown_badly(
    rows: Sequence[Row], lists: Sequence[str] = MODELS, *, asked: Sequence[Row] | None = None
) -> list[str]:
    """Return the errors of pages, commands and functions while these rows exist.

    The pages of a third of `rows` are read, and `mq_why` is asked about a third of the messages in
    `asked`, or in `rows`.
    """
    found = []
    client = Client(raise_request_exception=False)
    boss, _ = User.objects.get_or_create(username="ada", is_staff=True, is_superuser=True)
    client.force_login(boss)
    pages = {f"list of {name}": url(name) for name in lists}
    pages |= {"overview": url("overview"), "of a week": f"{url('overview')}?span=week"}
    for model, key, label in third(rows):
        if model not in WITHOUT_PAGE:
            pages[f"page of {label}"] = url(model.__name__.lower(), "change", key)
    for label, address in pages.items():
        if (status := client.get(address).status_code) != 200:
            found.append(f"{label}: {status}")
    commands = [("mq_status",), ("mq_status", "--json"), ("mq_peek",), ("mq_peek", "--payload")]
    if "schedule" in lists:
        commands += [("mq_schedule",), ("mq_schedule", "--json")]
    asked = rows if asked is None else asked
    commands += [("mq_why", str(key)) for model, key, _ in third(asked) if model is QueuedMessage]
    for command in commands:
        try:
            call_command(*command, stdout=StringIO())
        except (CommandError, RecursionError, ValueError) as error:
            found.append(f"{command}: {error!r}")
    assert queues.state("mail") is not None
    assert queues.counts() is not None
    return found


def run_chores() -> None:
    """Run the chores in full, whichever process had the turn; they did their work."""
    beat("gone", seen=-1000)
    QueueState.objects.filter(pk=":").delete()
    statements = Statements(DEFAULT_DB_ALIAS)
    try:
        assert chores.run(statements.cursor(), get_settings())
    finally:
        statements.close()
    assert not WorkerHeartbeat.objects.filter(pk="gone").exists()


def handle_all(good: list[int], ran: list[int]) -> None:
    """Run a worker until no work is left: it ends, and the good messages are done."""
    lapsed = QueuedMessage.objects.filter(leased_until__lt=YEAR_2021)
    left = -1
    while left != lapsed.count():  # released messages may be left to the next worker
        left = lapsed.count()
        assert Worker(queues=["mail"], max_seconds=120).run(until_empty=True)
    assert set(good) <= set(ran)
    assert not QueuedMessage.objects.filter(pk__in=good).exists()


@pytest.mark.parametrize("column", [each.column for each in QueuedMessage._meta.concrete_fields])
def test_whatever_stands_in_a_message(
    column: str, good: list[int], ran: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    stored = {
        way: store(QueuedMessage, {**MESSAGE, **more}, column, way) for way, more in WAYS.items()
    }
    rows = stored["runs"] + stored["lapsed"]
    # A message's page says the same as mq_why: one of them suffices for each row; lapsed rows get
    # both. The other tables have no row yet.
    shown = rows if column in LAPSED else stored["runs"]
    lists = ["queuedmessage", "uniquekey"]
    assert shown_badly(shown, lists, asked=stored["lapsed"]) == []
    run_chores()
    handle_all(good, ran)
    assert settled_badly(caplog) == []
    lapsed = QueuedMessage.objects.filter(leased_until__lt=YEAR_2021, queue="mail")
    assert not lapsed.exists()  # taken over, or released
    left = QueuedMessage.objects.filter(pk__in=[key for _, key, _ in rows]).values_list("pk")
    lists += ["failedattempt", "result"]
    assert shown_badly([row for row in rows if (row[1],) in left], lists) == []
    call_command("mq_requeue", "--all", "--yes", stdout=StringIO())


@pytest.mark.parametrize("model", OTHERS)
def test_whatever_stands_in_another_table(
    model: type[models.Model],
    good: list[int],
    ran: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = []
    for field in model._meta.concrete_fields:
        rows += store(model, OTHERS[model], field.column)
    if model is QueueState:  # any decision may apply to this one queue
        QueueState.objects.filter(pk__in=["mail", ":"]).delete()
    assert rows
    assert shown_badly(rows) == []
    run_chores()
    handle_all(good, ran)
    assert settled_badly(caplog) == []


def test_whatever_is_decided_about_a_queue(
    settings: Any, good: list[int], ran: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """It is obeyed for that queue; the worker continues with the others."""
    served: dict[str, dict[str, Any]] = {}
    for field in QueueState._meta.concrete_fields:
        rows = store(QueueState, OTHERS[QueueState], field.column)
        options = {"ordered": True} if field.column.startswith("own") else {"backoff": {}}
        served.update({key: options for _, key, _ in rows if key not in ("mail", ":")})
    settings.DJANGO_MQ = {"QUEUES": served}
    for name, options in served.items():
        for type in ("odd", "odd.fails"):
            add(name, type=type, handler="everywhere", ordered="ordered" in options)

    @handler("#", queue="mail", queues=("mail", *served), name="everywhere")
    def everywhere(delivery: Delivery) -> None:
        if delivery.type == "odd.fails":
            raise ValueError("no")

    Worker(queues=["#"], max_seconds=8).run(until_empty=True)
    handle_all(good, ran)
    assert shown_badly([]) == []
    run_chores()
    assert settled_badly(caplog) == []


def settled_badly(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the errors of the workers other than dead letters."""
    events = {
        "loop_failed",
        "scheduler_failed",
        "settle_refused",
        "put_aside_refused",
    }
    return [
        record.getMessage()
        for record in caplog.records
        if getattr(record, "event", "") in events | {"dispatch_failed"}
    ]


@pytest.mark.parametrize("model", [QueuedMessage, *OTHERS])
def test_every_time_is_between_1900_and_9998(model: type[models.Model]) -> None:
    """S17: the driver raises for others, and one such row ends the query that reads it."""
    row = MESSAGE if model is QueuedMessage else OTHERS[model]
    for field in model._meta.concrete_fields:
        if isinstance(field, models.DateTimeField):
            more = {"claimed_by": "w:1"} if field.column == "leased_until" else {}
            got = [label for _, _, label in store(model, {**row, **more}, field.column)]
            years = [label.split("'")[1][:4] for label in got if "None" not in label]
            assert years == ["1900", "9998"], field.column


@pytest.mark.parametrize("aside", ["null", "7", "[]", '[{"payload": 1}]', '"text"'])
def test_put_aside_must_be_an_object(aside: str) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        put_aside(aside)


#: Documents that others may put aside: with missing, wrong or correct members.
ASIDES = [
    "{}",
    '{"metadata": []}',
    '{"metadata": null}',
    '{"max_attempts": "20"}',
    '{"max_attempts": 2147483647}',
    '{"max_attempts": [1]}',
    '{"max_attempts": -1}',
    '{"max_attempts": null}',
    '{"schema_version": 0}',
    '{"priority": 101}',
    '{"priority": 1e400}',
    '{"priority": {}}',
    '{"key": ""}',
    '{"key": "a b"}',
    '{"key": 7}',
    '{"key": ["k"]}',
    '{"wants_result": "maybe"}',
    '{"ordered": 1}',
    '{"due": "2026-02-31"}',
    '{"due": "infinity"}',
    '{"due": 1e20}',
    '{"due": -2208988801}',
    '{"expires": 253370678401}',
    '{"expires": [0]}',
    '{"unique_for": -1}',
    '{"unique_for": 1e12}',
    '{"unique_for": "1 day"}',
    '{"else": {"a": []}}',
    '{"payload": null, "key": null, "retry": null, "due": null, "expires": null}',
    '{"max_attempts": 1.0, "priority": -99.5, "schema_version": 1.0, "due": 1e9}',
    '{"max_attempts": 2147483646, "due": -2208988800, "expires": 253370678400}',
    '{"retry": [7], "unique_for": 3155760000, "wants_result": true, "ordered": true}',
    f'{{"payload": {"1" * 5000}, "retry": {"[" * 2000 + "]" * 2000}}}',
]


def test_malformed_put_aside_messages_are_promoted(good: list[int], ran: list[int]) -> None:
    """Missing or wrong members have defaults; a good message beside it is not held up."""
    asides = {f"u{n}": aside for n, aside in enumerate([*ASIDES, '{"payload": {}}'])}
    for unique_id, aside in asides.items():
        put_aside(aside, unique_id)
    run_chores()
    assert not UniqueKey.objects.filter(put_aside__isnull=False).exists()
    forward = QueuedMessage.objects.filter(type="odd").in_bulk(field_name="pk")
    assert {each.unique_id for each in forward.values()} == asides.keys()
    rows = [(QueuedMessage, pk, asides[each.unique_id][:40]) for pk, each in forward.items()]
    assert shown_badly(rows) == []
    handle_all(good, ran)


def put_aside(aside: str, unique_id: str = "u") -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "insert into django_mq_uniquekey (queue, handler, type, unique_id, put_aside)"
            " values ('mail', 'h', 'odd', %s, %s)",
            [unique_id, aside],
        )
