"""Bad arguments are refused before any SQL, with a text that says what would be valid."""

from __future__ import annotations

import enum
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial

import pytest

from django_mq import PendingReply, ask, broadcast, queues
from django_mq.exceptions import InvalidName, InvalidOption, InvalidPayload
from django_mq.models import Operation
from django_mq.policy.message_filter import MessageFilter
from django_mq.testing import due
from tests.rows import add, beat, stored

pytestmark = pytest.mark.django_db

NOT_NUMBERS = [None, "7", "seven", True, 1.5, b"7", [7], object()]


@pytest.mark.parametrize("id", [*NOT_NUMBERS, "7" * 10_000])
def test_why_wants_an_id(django_assert_num_queries, id):
    with django_assert_num_queries(0), pytest.raises(ValueError, match="is not the id") as caught:
        queues.why(id)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("id", [2**63 - 1, 2**63, -(2**70), 0, -5])
def test_why_of_an_unknown_number_is_gone(id):
    assert queues.why(id).state == "gone"


@pytest.mark.parametrize("limit", [*NOT_NUMBERS, 0, -1, 2**63])
def test_horizon_wants_a_limit(django_assert_num_queries, limit):
    with django_assert_num_queries(0), pytest.raises(ValueError, match="limit must be"):
        queues.horizon(limit=limit)


@pytest.mark.parametrize("age", [None, "60", -1, True, float("nan"), float("inf"), 10**400, 2e11])
def test_horizon_wants_a_duration(django_assert_num_queries, age):
    with django_assert_num_queries(0), pytest.raises(ValueError, match="older_than must be"):
        queues.horizon(older_than=age)


@pytest.mark.parametrize("age", ["60", -1, True, float("nan"), float("inf"), 10**400, 2e11])
def test_purge_wants_a_duration(django_assert_num_queries, age):
    with django_assert_num_queries(0), pytest.raises(ValueError, match="older_than must be"):
        queues.purge(older_than=age)


@pytest.mark.parametrize("age", [0, Decimal("1.5"), 1e11])
def test_durations_that_the_server_can_count_with(age):
    queues.horizon(older_than=age, limit=2**63 - 1)
    assert not queues.purge(older_than=age, limit=2**63 - 1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (queues.cancel, "is not the id"),
        (lambda value: queues.peek(limit=value), "limit must be"),
        (lambda value: queues.purge(older_than=value), "older_than must be"),
        (lambda value: queues.limit("mail", value), "max_in_flight must be"),
        (lambda value: queues.errors(fingerprint=value), "is not a fingerprint"),
        (lambda value: queues.operate("cancel", priority=value), "is not a priority"),
        (queues.figures, "span must be"),
    ],
)
def test_a_number_that_python_does_not_print_is_named_by_its_type(call, text):
    with pytest.raises(ValueError, match=text) as caught:
        call(10**5000)
    assert "a value of type int" in str(caught.value)


@pytest.mark.parametrize("waiting", [None, "no", "maybe", 0, 1])
def test_purge_takes_only_true_or_false_for_waiting(waiting):
    """A text that the server reads as true would remove rows by mistake."""
    message = add()
    with pytest.raises(ValueError, match="waiting must be True or False"):
        queues.purge(waiting=waiting)
    assert queues.why(message.pk).state == "processable"


@pytest.mark.parametrize("worker", [7, b"w", ["w"], "", "w\0", "\ud800"])
def test_timings_want_the_id_of_a_worker(django_assert_num_queries, worker):
    beat("w")
    with django_assert_num_queries(0), pytest.raises(ValueError, match="id of a worker"):
        queues.timings(worker=worker)
    assert queues.timings(worker="another") == {}


@pytest.mark.parametrize("using", ["", -1, 0, False, b"default", ["default"], object()])
@pytest.mark.parametrize(
    "call",
    [
        queues.counts,
        queues.schedules,
        queues.names,
        partial(broadcast, "a"),
        partial(ask, "a"),
        partial(PendingReply, 7),
    ],
)
def test_using_is_the_alias_of_a_database(django_assert_num_queries, call, using):
    """A false value is none: a variable that was left empty would mean another database."""
    with django_assert_num_queries(0), pytest.raises(InvalidOption, match="using must be the"):
        call(using=using)


NOT_NAMES = ["", "a b!", "a\0", "ä", "\ud800", "x" * 129, 7, True, b"q"]
#: Functions that take the name of a queue, or several.
OF_QUEUES = (
    queues.errors,
    queues.figures,
    queues.rates,
    lambda queue: queues.topology(only=queue),
)


@pytest.mark.parametrize("of_queues", OF_QUEUES)
@pytest.mark.parametrize("queue", [*NOT_NAMES, ["mail", "a b!"], [None], {1: 2}])
def test_a_queue_or_several_have_names(django_assert_num_queries, of_queues, queue):
    with django_assert_num_queries(0), pytest.raises(InvalidName, match=r"queue .* is not a name"):
        of_queues(queue=queue)


@pytest.mark.parametrize("of_queues", OF_QUEUES)
@pytest.mark.parametrize("queue", ["mail", ["mail"], {"mail", "other"}, ("mail",), ()])
def test_a_queue_or_several(of_queues, queue):
    of_queues(queue=queue)


BAD_NAMES = [(what, value) for what in ("queue", "handler", "type") for value in NOT_NAMES]
BAD_NAMES += [("key", value) for value in NOT_NAMES if value not in ("a b!", "ä")]


@pytest.mark.parametrize(("what", "value"), BAD_NAMES)
def test_an_operation_on_a_bad_name_is_refused(django_assert_num_queries, what, value):
    """It would be stored, match nothing, and be reported as done."""
    with django_assert_num_queries(0), pytest.raises(InvalidName, match=what):
        queues.operate("discard", **{what: value})


@pytest.mark.parametrize("type", ["no such!*x", "a b*", "a**", "*a", "#"])
def test_the_type_of_an_operation_is_a_name_or_the_beginning_of_one(type):
    with pytest.raises(InvalidName, match=r"type .* is not a name"):
        queues.operate("discard", type=type)


class Named(enum.StrEnum):
    IT = "shop"


@pytest.mark.parametrize("type", ["shop.placed", "shop.*", "shop*", "*", Named.IT])
def test_an_operation_stores_plain_names(type):
    made = queues.operate("discard", type=type, queue=Named.IT, handler=Named.IT, key=Named.IT)
    named = {"queues": ["shop"], "handler": "shop", "key": "shop"}
    assert stored(made).filter == {**named, "type": str(type)}


@pytest.mark.parametrize(
    "bad",
    [
        *({"action": action} for action in (None, "drop", [], {})),
        *({"wanted": wanted} for wanted in ("x", {}, 7)),
        *({"heads": heads} for heads in (None, "no", 0, [])),
        *({"by": by} for by in (None, 7, b"ada")),
        *({"user_id": user} for user in ("a\0", "\ud800", "a\nb")),
        *({"matched": count} for count in (-1, 2**63, True, 1.5, "7", float("inf"))),
        *({"metadata": value} for value in ("x", [], {"a": "\0"}, {"a": "\ud800"}, {"a": set()})),
        {"wanted": MessageFilter(metadata={"a": float("nan")})},
    ],
)
def test_an_operation_that_cannot_be_stored_is_refused(django_assert_num_queries, bad):
    """A caller's transaction would be aborted by the database's own error."""
    chosen = {} if "wanted" in bad else {"queue": "mail"}
    with django_assert_num_queries(0), pytest.raises(ValueError, match=r"."):
        queues.operate(**{"action": "discard", **chosen, **bad})


@pytest.mark.parametrize(
    "ask",
    [
        lambda at: queues.errors(since=at),
        lambda at: queues.history(since=at, until=at),
        lambda at: queues.replay(since=at, until=at),
        lambda at: queues.pause("mail", until=at),
        lambda at: due(until=at),
    ],
    ids=["errors", "history", "replay", "pause", "due"],
)
def test_a_moment_may_have_an_offset_that_the_server_refuses(ask):
    """The database's own error would abort a caller's transaction."""
    ask(datetime.now(timezone(timedelta(hours=23))) + timedelta(hours=1))


def test_an_operation_stores_moments_in_utc():
    at = datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=23)))
    made = queues.operate("discard", since=at)
    assert stored(made).filter == {"since": "2025-12-31T01:00:00+00:00"}


def test_an_operation_compares_metadata_as_it_is_stored():
    at = datetime(2026, 1, 1, tzinfo=UTC)
    made = queues.operate("discard", metadata={"at": at, 1: (2,)}, by="a\0", user_id=7, matched=0)
    assert stored(made).filter == {"metadata": {"at": "2026-01-01T00:00:00Z", "1": [2]}}
    assert (made.by, made.user_id, made.matched) == ("a\ufffd", "7", 0)
    with pytest.raises(InvalidPayload, match="metadata"):
        queues.operate("discard", metadata={"at": object()})
    assert Operation.objects.get() == made


@pytest.mark.parametrize(
    "order", [queues.quiet_workers, queues.resume_workers, queues.stop_workers]
)
@pytest.mark.parametrize("workers", [None, 7, "a\0", ["w", 7]])
def test_orders_want_the_ids_of_workers(django_assert_num_queries, order, workers):
    with django_assert_num_queries(0), pytest.raises(InvalidName, match="worker"):
        order(workers)


@pytest.mark.parametrize("worker", [*NOT_NAMES, None])
def test_worker_orders_want_the_id_of_a_worker(django_assert_num_queries, worker):
    with django_assert_num_queries(0), pytest.raises(InvalidName, match="worker"):
        queues.worker_orders(worker)


@pytest.mark.parametrize("by", [None, 7, b"ada"])
@pytest.mark.parametrize(
    "ask",
    [
        partial(queues.stop, 1),
        partial(queues.ask_stack, 1),
        partial(queues.quiet_workers, "w"),
    ],
)
def test_the_name_of_an_operator_is_text(django_assert_num_queries, ask, by):
    with django_assert_num_queries(0), pytest.raises(ValueError, match="by must be text"):
        ask(by=by)


@pytest.mark.parametrize("span", [None, [], "month", 7])
def test_figures_want_a_span(django_assert_num_queries, span):
    with django_assert_num_queries(0), pytest.raises(ValueError, match="span must be"):
        queues.figures(span)


@pytest.mark.parametrize("ids", ["", "mail", b"12", bytearray(b"12")])
@pytest.mark.parametrize("act", [queues.cancel, queues.discard, queues.requeue, queues.run_now])
def test_a_text_is_no_list_of_ids(django_assert_num_queries, act, ids):
    """Bytes are numbers: b"12" would have meant the messages 49 and 50."""
    with django_assert_num_queries(0), pytest.raises(ValueError, match=r"is not the id") as raised:
        act(ids)
    assert str(raised.value).startswith(repr(ids))


@pytest.mark.parametrize("ids", ["7", [None], [0], [1.5], 2**63])
def test_running_wants_ids(django_assert_num_queries, ids):
    with django_assert_num_queries(0), pytest.raises(ValueError, match="is not the id"):
        queues.running(ids=ids)


@pytest.mark.parametrize(
    "call",
    [
        lambda: queues.errors(60, limit=0),
        lambda: queues.cancel_operation(0),
        lambda: queues.next_times("a b!"),
        lambda: queues.run_schedule("a b!"),
        lambda: queues.enable_schedule("a b!"),
        lambda: queues.disable_schedule("a b!"),
        lambda: queues.history(since=60, until="x"),
        lambda: queues.replay(since=60, until=date(2026, 1, 1)),
    ],
)
def test_no_statement_comes_before_the_last_check(django_assert_num_queries, call):
    with django_assert_num_queries(0), pytest.raises(ValueError, match=r"."):
        call()
