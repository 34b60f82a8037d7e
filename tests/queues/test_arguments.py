"""Bad arguments are refused before any SQL, with a text that says what would be valid."""

from __future__ import annotations

from decimal import Decimal

import pytest

from django_mq import queues
from tests.rows import add, beat

pytestmark = pytest.mark.django_db

NOT_NUMBERS = [None, "7", "seven", True, 1.5, b"7", [7], object()]


@pytest.mark.parametrize("id", NOT_NUMBERS)
def test_why_wants_an_id(django_assert_num_queries, id):
    with django_assert_num_queries(0), pytest.raises(ValueError, match="is not the id"):
        queues.why(id)


@pytest.mark.parametrize("id", [2**63 - 1, 2**63, -(2**70), 0, -5])
def test_why_says_that_a_number_is_not_stored(id):
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


@pytest.mark.parametrize("waiting", [None, "no", "maybe", 0, 1])
def test_purge_is_told_by_true_that_waiting_messages_go(waiting):
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
