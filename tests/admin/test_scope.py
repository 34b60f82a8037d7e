"""S33: a user restricted to some queues sees and touches nothing in the others."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.db.models.functions import Now
from django.test import Client, override_settings
from django.urls import path, reverse

from django_mq import handlers
from django_mq.admin import (
    FailedAttemptAdmin,
    HandledMessageAdmin,
    OperationAdmin,
    QueuedMessageAdmin,
    QueueScopeMixin,
    QueueStateAdmin,
    ResultAdmin,
    ScheduleAdmin,
    UniqueKeyAdmin,
    WorkerHeartbeatAdmin,
)
from django_mq.models import (
    FailedAttempt,
    HandledMessage,
    Operation,
    QueuedMessage,
    QueueState,
    Result,
    Schedule,
    UniqueKey,
    WorkerCommand,
    WorkerHeartbeat,
)
from tests.admin.pages import MODELS, text, told
from tests.rows import add, beat, decide, tally


class Scoped(QueueScopeMixin):
    """Users see the queue that has their name."""

    def get_queues(self, request):
        return {request.user.username}


site = admin.AdminSite(name="scoped")
for model, base in (
    (QueuedMessage, QueuedMessageAdmin),
    (FailedAttempt, FailedAttemptAdmin),
    (HandledMessage, HandledMessageAdmin),
    (Operation, OperationAdmin),
    (QueueState, QueueStateAdmin),
    (Result, ResultAdmin),
    (Schedule, ScheduleAdmin),
    (UniqueKey, UniqueKeyAdmin),
    (WorkerHeartbeat, WorkerHeartbeatAdmin),
):
    site.register(model, type(base.__name__, (Scoped, base), {}))

urlpatterns = [path("scoped/", site.urls), path("admin/", admin.site.urls)]

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("_scoped_site"),
]


@pytest.fixture
def _scoped_site():
    with override_settings(ROOT_URLCONF=__name__), handlers.isolated():
        yield


@pytest.fixture
def mine(login) -> Client:
    """A user with all rights, but for a single queue."""
    return login(boss=True, name="mine")


@pytest.fixture
def rows():
    """Two equal sets of rows, one for the user's own queue and one for somebody else's."""
    found = {}
    for queue in ("mine", "theirs"):
        message = add(queue, type=f"type.{queue}", key=f"key-{queue}", dead=-5, attempts=1)
        running = add(queue, type=f"runs.{queue}", leased=30)
        FailedAttempt.objects.create(
            message_id=message.pk,
            queue=queue,
            type=f"type.{queue}",
            handler="h",
            attempt=1,
            error_class=f"{queue}.Error",
        )
        HandledMessage.objects.create(
            id=10**9 + len(found), queue=queue, type=f"type.{queue}", keep_until=Now()
        )
        add(queue, type=f"type.{queue}", key=f"key-{queue}", blocked_by=message.pk)
        UniqueKey.objects.create(queue=queue, type=f"type.{queue}", unique_id=f"once-{queue}")
        Schedule.objects.create(name=f"s-{queue}", type="t", queue=queue, every=timedelta(days=1))
        decide(queue, paused=-5)
        beat(f"worker-{queue}", queues=[queue], host=f"host-{queue}", running=[running.pk])
        found[queue] = message
    return found


def scoped(model, page="changelist", *args):
    return reverse(f"scoped:django_mq_{model}_{page}", args=args)


def test_lists_filters_and_counts(rows, mine):
    for model in MODELS:
        page = text(mine.get(scoped(model)))
        assert "theirs" not in page, model
        if model not in ("result", "operation"):
            assert "mine" in page.replace("Welcome, mine", ""), model
    assert mine.get(scoped("queuedmessage")).context["cl"].result_count == 3
    assert mine.get(scoped("queuedmessage"), {"queue": "theirs"}).context["cl"].result_count == 0


@pytest.mark.parametrize("field", ["pk", "type", "key"])
def test_search_and_lookups(rows, mine, field):
    """Autocomplete gets its answers from the same two methods."""
    for queue, count in (("mine", 1 if field == "pk" else 2), ("theirs", 0)):
        found = mine.get(scoped("queuedmessage"), {"q": getattr(rows[queue], field)})
        assert found.context["cl"].result_count == count


def test_pages(rows, mine):
    for queue, status in (("mine", 200), ("theirs", 302)):
        message = rows[queue]
        attempt = FailedAttempt.objects.get(queue=queue)
        for model, key in (
            ("queuedmessage", message.pk),
            ("failedattempt", attempt.pk),
            ("handledmessage", HandledMessage.objects.get(queue=queue).pk),
            ("queuestate", queue),
            ("workerheartbeat", f"worker-{queue}"),
        ):
            assert mine.get(scoped(model, "change", key)).status_code == status, model
            assert mine.get(scoped(model, "history", key)).status_code == status, model


def test_a_message_of_others_is_as_one_that_is_not(rows, mine):
    """The two cannot be told apart: no reason, no failed attempts."""
    theirs = rows["theirs"].pk
    FailedAttempt.objects.create(message_id=10**6, queue="theirs", type="t", attempt=1)
    answers = []
    for id in (theirs, 10**6, 10**7):
        response = mine.get(scoped("queuedmessage", "change", id))
        answers.append((response.url, told(response)[-1].replace(str(id), "N")))
    assert len(set(answers)) == 1


@pytest.mark.parametrize("action", ["requeue", "run_now", "cancel", "discard"])
def test_actions(mine, action):
    columns = {"dead": -5} if action in ("requeue", "discard") else {"after": 60}
    theirs, own = add("theirs", **columns), add("mine", **columns)
    before = QueuedMessage.objects.filter(pk=theirs.pk).values().get()
    ids = f"{theirs.pk},{own.pk}"
    address = scoped("queuedmessage", "action", action)
    if action in ("cancel", "discard"):
        page = mine.post(address, {"ids": ids})
        assert page.context["count"] == 1
        assert page.context["others"] == [("gone", 1)]
        assert "theirs" not in text(page)
    mine.post(address, {"ids": ids, "confirmed": "yes"})
    assert QueuedMessage.objects.filter(pk=theirs.pk).values().get() == before
    assert [entry.object_id for entry in LogEntry.objects.all()] == [str(own.pk)]


@pytest.mark.parametrize("page", ["pause", "resume", "limit", "end_backoff"])
def test_other_queues_cannot_be_changed(rows, mine, page):
    QueueState.objects.update(backoff_level=2)
    before = QueueState.objects.filter(pk="theirs").values().get()
    data = {"queue": "theirs", "max_in_flight": "5"}
    for more in ({}, {"confirmed": "yes"}, {"queue": "unknown"}):
        assert mine.post(scoped("queuestate", page), {**data, **more}).status_code == 404
    assert QueueState.objects.filter(pk="theirs").values().get() == before
    assert mine.post(scoped("queuestate", page), {**data, "queue": "mine"}).status_code == 302


def test_worker_of_several_queues_shows_only_our_messages(rows, mine):
    running = list(QueuedMessage.objects.filter(leased_until__isnull=False))
    beat("both", queues=["mine", "theirs"], host="shared", running=[each.pk for each in running])
    for address in (scoped("workerheartbeat"), scoped("workerheartbeat", "change", "both")):
        page = text(mine.get(address))
        assert "shared" in page
        assert "runs.mine" in page
        assert "theirs" not in page
        assert f"#{next(each.pk for each in running if each.queue == 'theirs')}" not in page


def test_worker_of_several_queues_shows_only_our_handlers(rows, mine):
    with handlers.isolated():
        for name in ("mine", "theirs"):
            handlers.handler("a", name=f"handler-{name}", queue=name)(lambda delivery: None)
        timings = {f"handler-{name}": tally(acked=12) for name in ("mine", "theirs", "unknown")}
        beat("both", queues=["mine", "theirs"], timings=timings)
        for address in (scoped("workerheartbeat"), scoped("workerheartbeat", "change", "both")):
            page = text(mine.get(address))
            assert "handler-mine 12" in page
            assert "handler-theirs" not in page
            assert "handler-unknown" not in page


def test_orders_to_workers(mine):
    """A worker that also serves another queue, or a pattern, is not the user's alone."""
    for id, served, status in (
        ("own", ["mine"], 302),
        ("both", ["mine", "theirs"], 403),
        ("every", ["#"], 403),
        ("any", [], 403),
    ):
        beat(id, queues=served)
        data = {"worker": id, "confirmed": "yes"}
        assert mine.post(scoped("workerheartbeat", "order", "stop"), data).status_code == status
        offered = scoped("workerheartbeat", "order", "stop")
        page = mine.get(scoped("workerheartbeat", "change", id)).content.decode()
        assert (offered in page) is (status == 302)
    beat("theirs", queues=["theirs"])
    data = {"worker": "theirs", "confirmed": "yes"}
    response = mine.post(scoped("workerheartbeat", "order", "stop"), data)
    assert told(response)[-1] == "This worker has ended."
    assert [each.worker for each in WorkerCommand.objects.all()] == ["own"]


def test_results_know_no_queue_and_are_not_shown(mine):
    Result.objects.create(message_id=5, handler="theirs", value=1)
    assert mine.get(scoped("result")).context["cl"].result_count == 0
    assert mine.get(scoped("result", "change", 5)).status_code == 302


def test_handlers_of_other_queues_are_not_offered(mine):
    with handlers.isolated():

        @handlers.handler("a.b", queue="theirs", name="secret.handler")
        def secret(delivery): ...

        @handlers.handler("a.b", queue="mine", name="own.handler")
        def own(delivery): ...

        page = text(mine.get(scoped("queuedmessage")))
    assert "own.handler" in page
    assert "secret.handler" not in page
