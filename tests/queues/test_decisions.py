"""Decisions of operators about a queue: limits, the end of a backoff, dry runs."""

from __future__ import annotations

import logging

import pytest
from django.db import OperationalError, connection, transaction

from django_mq import queues, signals
from django_mq.exceptions import InvalidName
from django_mq.models import QueueState
from django_mq.store import decisions
from tests.database import second_connection
from tests.rows import decide

pytestmark = pytest.mark.django_db


@pytest.fixture
def heard():
    """The signals backoff_ended."""
    found = []

    def receive(signal, **data):
        found.append(data)

    signals.backoff_ended.connect(receive)
    yield found
    signals.backoff_ended.disconnect(receive)


class TestLimit:
    """NSQ-23: 0 holds all messages; the limit may change at run time."""

    @pytest.mark.parametrize("maximum", [0, 1, 2500, 2**31 - 1])
    def test_a_number(self, rings, maximum):
        assert queues.limit("mail", maximum) == maximum
        assert QueueState.objects.get().max_in_flight == maximum
        counts = queues.counts("mail")
        assert (counts.max_in_flight, counts.limited) == (maximum, True)
        assert rings == [connection]

    @pytest.mark.parametrize("configured", [None, 7])
    def test_limit_of_none_restores_the_settings(self, settings, configured):
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": configured}}}
        queues.limit("mail", 0)
        assert queues.limit("mail", None) == configured
        assert QueueState.objects.get().max_in_flight is None
        counts = queues.counts("mail")
        assert (counts.max_in_flight, counts.limited) == (configured, False)

    def test_a_queue_about_which_nothing_is_decided_stays_so(self):
        assert queues.limit("mail", None) is None
        assert not QueueState.objects.exists()

    def test_it_changes_nothing_else(self):
        before = decide(paused=-1, backoff=60, backoff_level=2)
        queues.limit("mail", 5)
        after = QueueState.objects.get()
        assert (after.paused_at, after.backoff_until) == (before.paused_at, before.backoff_until)
        assert after.backoff_level == 2

    @pytest.mark.parametrize("maximum", [-1, 2**31, 1.0, "5", True, object()])
    def test_invalid_limit_is_refused(self, maximum, django_assert_num_queries):
        with django_assert_num_queries(0), pytest.raises(ValueError, match="a whole number from 0"):
            queues.limit("mail", maximum)

    def test_it_is_logged(self, caplog):
        with caplog.at_level(logging.INFO, "django_mq"):
            queues.limit("mail", 5)
        [record] = caplog.records
        assert (record.event, record.queue, record.max_in_flight) == ("queue_limited", "mail", 5)


class TestEndOfABackoff:
    @pytest.mark.parametrize("until", [60, -1], ids=["waits", "probes"])
    def test_by_hand(self, rings, heard, caplog, django_capture_on_commit_callbacks, until):
        decide(backoff_level=3, backoff=until, probe_by="worker:1")
        with (
            caplog.at_level(logging.INFO, "django_mq"),
            django_capture_on_commit_callbacks(execute=True),
        ):
            assert queues.end_backoff("mail") is True
            assert heard == []  # the signal follows the commit
        state = QueueState.objects.get()
        assert (state.backoff_level, state.backoff_until, state.probe_by) == (0, None, None)
        assert heard == [{"sender": "mail", "queue": "mail", "level": 0, "until": None}]
        assert [record.event for record in caplog.records] == ["backoff_ended"]
        assert rings == [connection]

    def test_of_a_queue_at_full_rate(self, rings, heard, django_capture_on_commit_callbacks):
        decide(paused=-1)
        with django_capture_on_commit_callbacks(execute=True):
            assert queues.end_backoff("mail") is False
            assert queues.end_backoff("nowhere") is False
        assert (heard, rings) == ([], [])

    def test_pause_continues_after_the_backoff(self):
        decide(paused=-1, backoff_level=1, backoff=60)
        queues.end_backoff("mail")
        assert queues.state("mail").paused

    def test_a_resume_leaves_it(self):
        decide(paused=-1, backoff_level=1, backoff=60)
        queues.resume("mail")
        assert queues.state("mail").backoff_level == 1


DEEDS = {
    "pause": lambda **options: queues.pause("mail", until=60, **options),
    "resume": lambda **options: queues.resume("mail", **options),
    "limit": lambda **options: queues.limit("mail", 5, **options),
    "end_backoff": lambda **options: queues.end_backoff("mail", **options),
}


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("within", [False, True], ids=["alone", "in-atomic"])
def test_a_dry_run_answers_and_changes_nothing(
    transactional_db, rings, heard, caplog, deed, within
):
    decide(paused=-1, backoff_level=1, backoff=60)
    before = QueueState.objects.values().get()
    with caplog.at_level(logging.INFO, "django_mq"):
        if within:
            with transaction.atomic():
                assert DEEDS[deed](dry_run=True)
                assert QueueState.objects.values().get() == before
        else:
            assert DEEDS[deed](dry_run=True)
    assert QueueState.objects.values().get() == before
    assert (rings, heard, caplog.records) == ([], [], [])


@pytest.mark.parametrize("deed", DEEDS)
def test_shorter_lock_timeout_of_the_caller_applies(transactional_db, other, deed):
    decide(paused=-1, backoff_level=1, backoff=60)
    other.execute("select 1 from django_mq_queuestate for update")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("set local lock_timeout = '20ms'")
        with pytest.raises(OperationalError, match="lock timeout"):
            DEEDS[deed]()


@pytest.mark.parametrize("deed", DEEDS)
def test_an_unknown_queue_is_changed_with_a_warning(settings, caplog, deed):
    """Its name may be misspelt, but a deploy may also add the queue later."""
    decide(paused=-1, backoff_level=1, backoff=60)
    settings.DJANGO_MQ = {"QUEUES": {"malls": {}}}
    QueueState.objects.update(queue="mall")
    change = getattr(queues, deed)
    arguments = (5,) if deed == "limit" else ()
    for known in ("mall", "malls"):  # by a decision about it, and by the settings
        change(known, *arguments)
    change("mals", *arguments, dry_run=True)
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
    change("mals", *arguments)
    [record] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert (record.event, record.queue) == ("unknown_queue", "mals")
    assert record.getMessage() == (
        "no handler here names the queue 'mals', and it has no messages: did you mean 'malls'?"
    )
    assert QueueState.objects.filter(queue="mals").exists() is (deed in ("pause", "limit"))


@pytest.mark.parametrize("action", [queues.end_backoff, lambda name: queues.limit(name, 5)])
def test_a_bad_name(action):
    with pytest.raises(InvalidName):
        action("no such name")


def test_with_parameters_that_the_server_binds(transactional_db):
    """OPTIONS = {"server_side_binding": True}: like the bare driver."""
    with second_connection() as other, other.cursor() as cursor:
        decisions.limit(cursor, queue="mail", max_in_flight=5)
        assert decisions.pause(cursor, queue="mail", at=None, delay=60.0) is not None
        assert decisions.resume(cursor, queue="mail")
        decisions.limit(cursor, queue="mail", max_in_flight=7)
    assert QueueState.objects.get().max_in_flight == 7
