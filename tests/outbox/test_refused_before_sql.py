"""Values that a CHECK would refuse are refused before SQL: the transaction stays usable.

The cases come from the constraints: the columns they name, and values on both sides of each bound.
The table itself tells whether it accepts a value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import FieldError
from django.db import connection, models, transaction
from django.db.models import CheckConstraint, F, Q
from django.db.utils import DatabaseError
from django.test.utils import CaptureQueriesContext

from django_mq import Message, RetryPolicy, broadcast, broadcast_many, queues, request
from django_mq.exceptions import BroadcastError
from django_mq.models import QueuedMessage, QueueState, UniqueKey

pytestmark = pytest.mark.django_db

#: Columns whose option has a different name.
OPTIONS = {"processable_after": "after", "expires_at": "expires"}
#: Columns that producers do not set: workers set them by the server's clock, or routing does.
WORKERS = {
    "attempts",
    "claimed_by",
    "created_at",
    "dead_at",
    "handler",
    "held_since",
    "leased_until",
    "max_attempts",  # a RetryPolicy has its own test
}
#: Columns of UniqueKey that copy or derive from those of its message.
UNIQUE = {"queue", "handler", "type", "unique_id", "unique_for", "quiet_until", "put_aside"}
NEEDED = {"unique_for": {"unique_id": "u"}}


def leaves(node: Any) -> Iterator[tuple[set[str], list[Any]]]:
    """Yield the columns and the values of each comparison of a condition."""
    if isinstance(node, Q):
        for child in node.children:
            yield from leaves(child)
    elif isinstance(node, tuple):
        column, _, lookup = node[0].partition("__")
        values = node[1] if isinstance(node[1], list | tuple) else [node[1]]
        yield {column}, [] if lookup == "isnull" else list(values)
    else:
        columns: set[str] = set()
        values = []
        stack = [node]
        while stack:
            each = stack.pop()
            if isinstance(each, F):
                columns.add(each.name)
            elif hasattr(each, "get_source_expressions"):
                stack += each.get_source_expressions()
                values += [each.value] if hasattr(each, "value") else []
            elif each is not None:
                values.append(each)
        yield columns, values


def checks(model: type[models.Model]) -> dict[str, list[Any]]:
    """Return the columns that the CHECKs of a table name, and the values they compare with."""
    found: dict[str, list[Any]] = {}
    for constraint in model._meta.constraints:
        if isinstance(constraint, CheckConstraint):
            for columns, values in leaves(constraint.condition):
                for column in sorted(columns):
                    found.setdefault(column, []).extend(values)
    return found


def around(bounds: list[Any], field: models.Field[Any, Any]) -> Iterator[Any]:
    """Yield values at, below and above each bound, and values that are invalid for this type."""
    steps: dict[type, Any] = {int: 1, datetime: timedelta(microseconds=1)}
    steps[timedelta] = timedelta(microseconds=1)
    for bound in bounds:
        if type(bound) in steps:
            yield from (bound - steps[type(bound)], bound, bound + steps[type(bound)])
    if isinstance(field, models.DateTimeField):
        yield from (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))
        yield from (0, -1, sys.float_info.max, timedelta.max, float("nan"))
    elif isinstance(field, models.DurationField):
        yield from (
            timedelta.min,
            timedelta.max,
            timedelta(days=366),
            timedelta(days=40_000),
            1e300,
        )
    elif isinstance(field, models.IntegerField):
        yield from (-(2**63), -(2**31), -(2**15), 2**15, 2**31 - 1, 2**31, 2**63, 10**400)
    else:
        yield from ("", " ", "a b", "é", "a\n", "\x00", "x" * 128, "x" * 129, "\ud800")


def cases() -> Iterator[Any]:
    for column, bounds in checks(QueuedMessage).items():
        if column not in WORKERS:
            for value in around(bounds, QueuedMessage._meta.get_field(column)):
                name = f"{OPTIONS.get(column, column)}-{value!r}"[:60]
                yield pytest.param(column, value, id=name.encode("ascii", "replace").decode())


def takes(model: type[models.Model], **columns: Any) -> bool:
    """Ask the table whether it takes a row with these values."""
    try:
        with transaction.atomic():
            model._default_manager.create(**columns)
            transaction.set_rollback(True)
    except (DatabaseError, OverflowError, ValueError, TypeError, FieldError):
        return False
    return True


def stream(**options: Any) -> Any:
    return broadcast_many(Message(**options) for _ in range(60))


CALLS: dict[str, Callable[..., Any]] = {
    "broadcast": broadcast,
    "broadcast_many": lambda **options: broadcast_many([Message(**options)]),
    "stream": stream,
    "request": request,
}


@pytest.mark.parametrize(("column", "value"), list(cases()))
def test_an_option_that_the_table_refuses_is_refused_before_sql(column: str, value: Any) -> None:
    """Guarantee 10."""
    kinds: dict[type, type] = {models.DateTimeField: datetime, models.DurationField: timedelta}
    kind = kinds.get(type(QueuedMessage._meta.get_field(column)), object)
    row = {"queue": "q", "type": "t", "payload": {}, column: value}
    refuses = isinstance(value, kind) and not takes(QueuedMessage, **row)
    options = {"type": "t", OPTIONS.get(column, column): value, **NEEDED.get(column, {})}
    for name, call in CALLS.items():
        if name in ("stream", "request") and column in ("unique_id", "unique_for"):
            continue  # the same id sixty times; requests have no such option
        with transaction.atomic():
            with CaptureQueriesContext(connection) as captured:
                try:
                    call(**options)
                except BroadcastError:
                    assert not [each for each in captured if "SAVEPOINT" not in each["sql"]]
                else:
                    assert not refuses, f"{name} stored what the table refuses"
            with connection.cursor() as cursor:
                cursor.execute("select 1")  # the transaction is usable
            transaction.set_rollback(True)


def test_every_column_that_a_check_names_has_an_option_or_is_not_the_producers() -> None:
    """Every new CHECK needs a refusal: write it, and name its option here."""
    fields = set(Message.__dataclass_fields__)
    for column in set(checks(QueuedMessage)) - WORKERS:
        assert OPTIONS.get(column, column) in fields, column
    assert set(checks(UniqueKey)) <= UNIQUE


@pytest.mark.parametrize("attempts", [-1, 0, 2**31 - 2, 2**31 - 1, 2**31, 2**63])
def test_no_policy_has_more_attempts_than_a_message(attempts: int) -> None:
    if not takes(QueuedMessage, queue="q", type="t", payload={}, max_attempts=attempts):
        with pytest.raises(ValueError, match="max_attempts"):
            RetryPolicy(max_attempts=attempts)


@pytest.mark.parametrize(
    "value", list(around(checks(QueueState)["paused_until"], models.DateTimeField())), ids=repr
)
def test_a_pause_that_the_table_refuses(value: Any) -> None:
    refuses = isinstance(value, datetime) and not takes(QueueState, queue="q", paused_until=value)
    _is_refused_or_done(lambda: queues.pause("mail", until=value), refuses)


@pytest.mark.parametrize("value", [-(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**63, 10**400])
def test_a_limit_that_the_table_refuses(value: int) -> None:
    refuses = not takes(QueueState, queue="q", max_in_flight=value)
    _is_refused_or_done(lambda: queues.limit("mail", value), refuses)


@pytest.mark.parametrize("queue", list(around([], models.CharField())), ids=ascii)
@pytest.mark.parametrize("decide", ["pause", "resume", "limit", "end_backoff"])
def test_a_queue_that_the_table_refuses(decide: str, queue: str) -> None:
    more = {"max_in_flight": 1} if decide == "limit" else {}
    refuses = not takes(QueueState, queue=queue)
    _is_refused_or_done(lambda: getattr(queues, decide)(queue, **more), refuses)


def _is_refused_or_done(decide: Callable[[], Any], refuses: bool) -> None:
    with transaction.atomic():
        try:
            decide()
        except ValueError:  # InvalidName is a subclass
            pass
        else:
            assert not refuses
        with connection.cursor() as cursor:
            cursor.execute("select 1")
        transaction.set_rollback(True)
