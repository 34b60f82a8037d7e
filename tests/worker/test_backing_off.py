"""A failing queue, and the workers of a fleet that ease off it and come back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import connections, transaction
from django.db.models.functions import Now
from django.test import Client

from django_mq import Reject, Retry, RetryPolicy, Snooze, broadcast, fixed, handler, queues
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.messages import Delivery, Fence
from django_mq.models import FailedAttempt, QueuedMessage, QueueState
from django_mq.policy.outcomes import TimedOut
from django_mq.worker import DeadWorker
from tests.database import second_connection
from tests.rows import add, add_all, decide, stored
from tests.worker.conftest import PATIENCE, Bench, Running, Said, add_many, proxied, waiting
from tests.worker.proxy import Proxy
from tests.worker.service import Service, until
from tests.worker.test_gates import FAR, in_flight, never_stuck  # noqa: F401  (a fixture)

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]
#: Failed attempts are due again at once: only the backoff of the queue holds them.
AT_ONCE = RetryPolicy(max_attempts=1000, backoff=fixed(0))
#: Nobody waits for the end of it.
LONG = {"multiplier": 1000, "maximum": 1000, "jitter": 0}


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.error = None
    service.pause = 0.0
    service.gate.set()


def backing_off(settings: Any, multiplier: float = 0.15, **options: Any) -> None:
    """Let queue `mail` back off: 2, 4, 8 ... `multiplier`s."""
    backoff = {"multiplier": multiplier, "maximum": 100 * multiplier, "jitter": 0}
    queue = {"backoff": backoff, **options.pop("mail", {})}
    settings.DJANGO_MQ = {"LEASE": 300, **options, "QUEUES": {"mail": queue}}


def later(seconds: float) -> Any:
    """A moment of the database, for columns that rows.MOMENTS does not name."""
    return Now() + timedelta(seconds=seconds)


def level() -> int:
    state = QueueState.objects.filter(queue="mail").first()
    return state.backoff_level if state else 0


def changes(said: Said) -> list[tuple[str, int]]:
    """What was said of backoffs: the signal and the new level."""
    return [(name, data["level"]) for name, _, data in said.all if name.startswith("backoff_")]


def rest(seconds: float) -> None:
    """For what nothing announces, since nothing happens."""
    threading.Event().wait(seconds)


# ---- up


@pytest.mark.parametrize("kind", ["plain", "keyed", "unbound", "async", "batch"])
def test_after_the_first_failure_nothing_else_starts(
    start: Start, said: Said, service: Service, settings: Any, kind: str
) -> None:
    """NSQ-5, NSQ-16: not in the same slice either; waiting messages are released, refunded."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"backoff": LONG}}}
    if kind == "async":

        @handler("#", queue="mail", name="h")
        async def h(delivery: Delivery) -> None:
            await service.acall(delivery)

    elif kind == "batch":

        @handler("#", queue="mail", name="h", batch=True)
        def together(deliveries: list[Delivery]) -> None:
            for delivery in deliveries:
                service(delivery)

    else:
        service.handle(atomic=kind != "unbound")
    add_all(
        {
            "handler": "h",
            "after": -60 + n / 1000,
            "key": f"k{n % 50}" if kind == "keyed" else None,
        }
        for n in range(200)
    )
    worker = start(threads=1, async_slots=8)
    until(lambda: len(service.calls) > 50)
    service.error = KeyError("host")
    until(level)
    until(lambda: in_flight() == 0)
    rest(0.5)
    assert worker.stop()
    most = {"async": 8, "batch": 2}.get(kind, 1)  # a batch fails, then its first by itself
    assert 1 <= service.failed <= most
    assert FailedAttempt.objects.count() == service.failed - (kind == "batch")
    left = QueuedMessage.objects.all()
    assert sum(message.attempts for message in left) == FailedAttempt.objects.count()
    assert changes(said) == [("backoff_started", 1)]


def test_other_processes_give_back_what_they_hold_at_their_next_look(
    start: Start,
    service: Service,
    settings: Any,
    never_stuck: None,  # noqa: F811
) -> None:
    """Only what runs goes on."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"backoff": LONG}}}
    service.gate.clear()
    service.handle()
    add_many(30, handler="h")
    other = start(threads=2)
    until(lambda: service.running == 2 and in_flight() > 2)

    @handler("#", queue="mail", name="bad")
    def bad(delivery: Delivery) -> None:
        raise KeyError("host")

    add(handler="bad", after=-100)
    failing = start(threads=1)
    until(level)
    until(lambda: in_flight() == service.running)
    service.gate.set()
    until(lambda: in_flight() == 0)
    assert failing.stop()
    assert other.stop()
    assert len(service.calls) <= 4
    assert sum(message.attempts for message in QueuedMessage.objects.all()) == 1


@pytest.mark.parametrize("error", [Retry(), Retry(0), Snooze(1), Reject("no"), TimedOut("slow")])
def test_what_says_nothing_of_the_service_changes_nothing(
    start: Start, service: Service, settings: Any, error: BaseException
) -> None:
    """NSQ-2, NSQ-12, NSQ-13, NSQ-14, NSQ-20."""
    backing_off(settings)
    service.handle(retry=AT_ONCE)
    service.error = error
    add_many(10, handler="h")
    worker = start(threads=2)
    until(lambda: service.failed >= 10)
    assert worker.stop()
    assert not QueueState.objects.filter(queue="mail").exists()


def test_a_timeout_of_a_coroutine_changes_nothing(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """NSQ-20."""
    backing_off(settings)
    service.gate.clear()

    @handler("#", queue="mail", name="h", timeout=0.05)
    async def h(delivery: Delivery) -> None:
        await service.acall(delivery)

    add(handler="h")
    worker = start()
    said.wait("message_retried")
    service.gate.set()
    assert worker.stop()
    assert level() == 0


def test_retry_says_so(start: Start, said: Said, service: Service, settings: Any) -> None:
    """NSQ-13: Retry(after, backoff=True) is a step up."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"backoff": LONG}}}
    service.handle()
    service.error = Retry(60, backoff=True)
    add_many(10, handler="h")
    worker = start()
    said.wait("backoff_started")
    rest(0.3)
    assert worker.stop()
    assert service.failed == 1


# ---- and down


def test_the_sequence_over_a_fleet(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """NSQ-4, NSQ-5, NSQ-7, NSQ-8, NSQ-9: all, none, one, none, one, none, one, all; each change
    is said once.
    """
    backing_off(settings, 0.5, POLL_INTERVAL=0.3)
    service.handle(retry=AT_ONCE)
    add(handler="h")
    workers = [start(threads=4) for _ in range(2)]
    said.wait("message_acked")
    assert not QueueState.objects.filter(
        queue="mail"
    ).exists()  # a success at full rate writes nothing
    service.error = KeyError("host")
    service.gate.clear()
    add_many(100, handler="h")
    until(lambda: service.running == 8)  # both are full: none begins while the gate is open
    service.gate.set()
    until(level)
    service.gate.clear()
    until(lambda: in_flight() <= 1)
    at_once = service.failed
    assert at_once == 8  # what ran already, over the fleet
    for error, after in ((KeyError("host"), 2), (None, 1), (None, 0)):
        until(lambda: service.running)
        rest(0.5)  # more than a poll of each worker: none takes another one
        assert service.running == in_flight() == 1
        service.error = error
        service.gate.set()
        until(lambda after=after: level() == after)
        if after:
            service.gate.clear()
            assert in_flight() == 0
    until(lambda: not waiting())
    assert all(worker.stop() for worker in workers)
    assert changes(said) == [
        ("backoff_started", 1),
        ("backoff_changed", 2),
        ("backoff_changed", 1),
        ("backoff_ended", 0),
    ]
    assert FailedAttempt.objects.count() == at_once + 1  # what waited burnt no attempt


@pytest.mark.parametrize("error", [Retry(), Snooze(60), TimedOut("slow")])
def test_a_probe_that_says_nothing_waits_anew(
    start: Start, said: Said, service: Service, settings: Any, error: BaseException
) -> None:
    """NSQ-2, NSQ-5, NSQ-12: the same level; then another probes."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1)
    service.handle(retry=AT_ONCE)
    service.error = error
    add_many(5, handler="h")
    worker = start()
    until(lambda: service.failed >= 2)
    assert level() == 1
    assert changes(said) == []
    service.error = None
    said.wait("backoff_ended")
    assert worker.stop()


def test_a_rejected_probe_is_a_handler_that_works(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """NSQ-14."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1)
    service.handle()
    service.error = Reject("no such user")
    add(handler="h")
    worker = start()
    said.wait("backoff_ended")
    assert worker.stop()


def test_at_full_rate_again_the_backlog_drains_at_once(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """NSQ-4: neither a ring nor the poll is waited for."""
    backing_off(settings, **FAR)
    decide(backoff_level=1, backoff=0.5)
    service.gate.clear()
    service.handle()
    add_many(300, handler="h")
    worker = start(threads=2)
    until(lambda: service.running)
    rest(0.2)
    service.gate.set()
    until(lambda: not waiting())
    assert worker.stop()
    assert changes(said) == [("backoff_ended", 0)]


def test_64_failures_at_once_are_over_soon(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """They are one step, and with the service back all is done within minutes (here: seconds)."""
    backing_off(settings)
    service.gate.clear()
    service.error = KeyError("host")

    @handler("#", queue="mail", name="h", retry=AT_ONCE)
    async def h(delivery: Delivery) -> None:
        await service.acall(delivery)

    add_many(64, handler="h")
    workers = [start(async_slots=32) for _ in range(2)]
    until(lambda: service.running == 64)
    service.gate.set()
    until(lambda: service.failed == 64)
    service.error = None
    until(lambda: not waiting())
    assert all(worker.stop() for worker in workers)
    assert changes(said)[0] == ("backoff_started", 1)
    assert changes(said)[-1] == ("backoff_ended", 0)
    assert max(level for _, level in changes(said)) <= 2


def test_during_an_outage_no_message_burns_its_attempts(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """64 messages, a service that is down for long: only the probes are charged."""
    backing_off(settings, 0.05)
    service.error = KeyError("host")
    service.handle(retry=AT_ONCE)
    messages = add_many(64, handler="h")
    workers = [start(threads=2) for _ in range(2)]
    until(lambda: level() >= 5)
    assert FailedAttempt.objects.count() <= 4 + 5
    attempts = [stored(message).attempts for message in messages]
    assert sum(attempts) <= 4 + 5 + 1
    service.error = None
    assert all(worker.stop() for worker in workers)


def test_other_queues_go_on(start: Start, service: Service, settings: Any) -> None:
    """At their full rate, in the same worker."""
    settings.DJANGO_MQ = {**FAR, "QUEUES": {"mail": {"backoff": LONG}}}
    service.error = KeyError("host")
    handler("bad", queue="mail", name="bad")(lambda delivery: service(delivery))
    good = Service()
    handler("good", queue="other", name="good")(lambda delivery: good(delivery))
    add_many(50, handler="bad")
    worker = start(threads=1)
    until(level)
    add_many(300, queue="other", handler="good")
    with transaction.atomic():
        broadcast("good")
    until(lambda: len(good.calls) == 301)
    assert worker.stop()
    assert service.failed == 1


@pytest.mark.parametrize("kind", ["keyed", "ordered"])
def test_lines_keep_their_order(
    start: Start, said: Said, service: Service, settings: Any, kind: str
) -> None:
    """Their heads probe, again and again; what comes behind them waits."""
    backing_off(settings, 0.05, mail={"ordered": kind == "ordered"})
    service.handle(retry=AT_ONCE)
    with transaction.atomic():
        for n in range(40):
            broadcast("a", key=f"k{n % 2}" if kind == "keyed" else None)
    keys = dict(QueuedMessage.objects.values_list("pk", "key"))
    worker = start(threads=2)
    until(lambda: len(service.calls) > 5)
    service.error = KeyError("host")
    until(lambda: level() >= 3)
    service.error = None
    until(lambda: not waiting())
    assert worker.stop()
    runs: dict[str | None, list[int]] = {}
    for id, _ in service.calls:
        runs.setdefault(keys[id], []).append(id)
    for line in runs.values():
        assert line == sorted(line)
        assert len(set(line)) == 40 // len(runs)
    assert changes(said)[-1] == ("backoff_ended", 0)


def test_with_a_limit_too(start: Start, said: Said, service: Service, settings: Any) -> None:
    """NSQ-10: the limit holds at full rate, and changes nothing in the backoff."""
    backing_off(settings, 0.05, mail={"max_in_flight": 3})
    service.pause = 0.002
    service.handle(retry=AT_ONCE)
    add_many(100, handler="h")
    workers = [start(threads=4) for _ in range(2)]
    until(lambda: len(service.calls) > 20)
    service.error = KeyError("host")
    until(lambda: level() >= 2)
    queues.limit("mail", 500)
    queues.limit("mail", None)
    assert level() >= 2
    service.error = None
    until(lambda: not waiting())
    assert all(worker.stop() for worker in workers)
    assert max(service.in_flight) <= 3


# ---- probes that do not come back


def test_a_probe_whose_worker_is_gone_is_not_kept(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """Its supervisor says so: the next message probes at once, not after the lease."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1, probe_by="gone:1", probe_until=later(3600))
    service.handle()
    lost = add(handler="h", leased=3600, claimed_by="gone:1", attempts=1)
    add_many(3, handler="h")
    worker = start()
    said.wait("worker_started")
    rest(1.2)
    assert service.calls == []
    recovered = threading.Event()
    worker.worker.recover(
        DeadWorker("gone", "was killed by SIGKILL", lost=[Fence(lost.pk, 1, "gone:1")]),
        recovered.set,
    )
    until(lambda: not waiting())
    assert recovered.wait(PATIENCE)
    assert worker.stop()
    assert changes(said) == [("backoff_ended", 0)]


def test_a_probe_lapses_with_its_host(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """Also when its message is all there is: that one probes again, though it lapsed."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1, probe_by="gone:1", probe_until=later(0.3))
    service.handle()
    message = add(handler="h", leased=0.3, claimed_by="gone:1", attempts=1)
    worker = start()
    until(lambda: not waiting())
    assert worker.stop()
    assert service.calls == [(message.pk, 2)]
    assert changes(said) == [("backoff_ended", 0)]


def test_a_lapsed_message_that_kills_workers_is_not_taken_over_in_the_wait(
    start: Start, service: Service, settings: Any
) -> None:
    """It waits like all others, and then it is the one probe."""
    backing_off(settings)
    decide(backoff_level=1, backoff=3600)
    service.handle()
    message = add(handler="h", leased=-1, attempts=1)
    worker = start()
    until(lambda: worker.worker.sleeps > 3)
    rest(1.2)
    assert service.calls == []
    QueueState.objects.filter(queue="mail").update(backoff_until=None)
    until(lambda: service.ids == [message.pk])
    assert worker.stop()


def test_a_probe_that_nobody_can_run_makes_room_for_the_next(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """A message without a handler here is held, and says nothing of the service."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1)
    service.handle()
    held = add(handler="unknown", after=-100)
    good = add(handler="h")
    worker = start()
    said.wait("backoff_ended")
    assert worker.stop()
    assert service.ids == [good.pk]
    assert waiting() == {held.pk}


def test_a_probe_whose_claim_was_not_answered_is_given_back(
    start: Start, said: Said, service: Service, settings: Any, proxy: Proxy
) -> None:
    """It was committed, and no worker holds its message."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1, paused=-1)
    service.handle()
    message = add(handler="h")
    with proxied(proxy):
        worker = start()
        until(lambda: worker.worker.sleeps > 3)
        rest(1.2)  # the chores of its start are over
        proxy.cut_at("COMMIT", arrives=True)  # the next is that of the probe's claim
        assert queues.resume("mail")
        until(lambda: not waiting())
        assert worker.stop()
        connections["default"].close()
    assert proxy.cuts == 1
    assert service.calls == [(message.pk, 1)]
    assert changes(said) == [("backoff_ended", 0)]


def test_a_drain_gives_the_probe_back(
    start: Start,
    service: Service,
    settings: Any,
    never_stuck: None,  # noqa: F811
) -> None:
    """It was claimed and did not start."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1)
    service.gate.clear()
    slow = Service()
    slow.gate.clear()
    slow.handle("other", "slow")
    service.handle()
    add("other", handler="slow")
    worker = start(threads=1)
    until(lambda: slow.running)
    message = add(handler="h")
    until(lambda: stored(message).attempts == 1)
    worker.worker.ask_to_stop()
    until(lambda: stored(message).attempts == 0)
    assert QueueState.objects.get(queue="mail").probe_by is None
    slow.gate.set()
    assert worker.join()
    assert service.calls == []


# ---- the database, and idleness


def test_a_lost_database_loses_no_step(
    start: Start, said: Said, service: Service, settings: Any, proxy: Proxy
) -> None:
    """What could not be written down is written later; until then nothing starts."""
    backing_off(settings, 0.5)
    service.handle(retry=AT_ONCE)
    add_many(50, handler="h")
    service.error = KeyError("host")
    proxy.cut_at("backoff_level = 1", arrives=False)
    with proxied(proxy):
        worker = start(threads=1)
        said.wait("backoff_started")
        assert service.failed == 1
        service.error = None
        until(lambda: not waiting())
        assert worker.stop()
        connections["default"].close()
    assert proxy.cuts == 1
    assert changes(said) == [("backoff_started", 1), ("backoff_ended", 0)]


def test_a_locked_row_delays_a_step(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """An operator may have it; nothing else of the queue starts meanwhile."""
    settings.DJANGO_MQ = {**FAR, "QUEUES": {"mail": {"backoff": LONG}}}
    decide()
    service.error = KeyError("host")
    service.handle(retry=AT_ONCE)
    add_many(50, handler="h")
    with second_connection() as other:
        other.autocommit = False
        other.execute("select from django_mq_queuestate for update")
        worker = start(threads=1)
        until(lambda: service.failed)
        before = worker.worker.sleeps
        rest(1.5)
        assert worker.worker.sleeps - before < 50  # it does not claim and give back in turn
        assert service.failed == 1
        assert changes(said) == []
        other.rollback()
    said.wait("backoff_started")
    assert worker.stop()
    assert service.failed == 1


@pytest.mark.parametrize("waits", ["nothing", "the probe", "the wait", "a dead head"])
def test_a_queue_that_backs_off_does_not_spin(
    start: Start, service: Service, settings: Any, waits: str
) -> None:
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.5, "QUEUES": {"mail": {"backoff": LONG}}}
    decide(backoff_level=1, backoff=3600 if waits == "the wait" else -1)
    service.gate.clear()
    service.handle()
    if waits == "a dead head":
        head = add(handler="h", key="k", dead=-1)
        add(handler="h", key="k")
        add(handler="h", key="k", blocked_by=head.pk)
    elif waits != "nothing":
        add_many(20, handler="h")
    worker = start(threads=3)
    until(lambda: service.running if waits == "the probe" else worker.worker.sleeps > 5)
    before = worker.worker.sleeps
    rest(1.0)
    assert worker.worker.sleeps - before < 25
    assert service.running == (waits == "the probe")
    service.gate.set()
    assert worker.stop()


def test_until_empty_does_not_wait_for_a_backoff(
    start: Start, service: Service, settings: Any
) -> None:
    """Nothing is due while the queue waits; as with a retry."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"backoff": LONG}}}
    service.error = KeyError("host")
    service.handle()
    add_many(5, handler="h")
    assert start(until_empty=True).join()
    assert len(waiting()) == 5
    assert service.failed == 1


# ---- what operators see


def test_status_why_and_admin_show_it(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """From a queue that backs off, by its probe, to one that an operator lets go."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"backoff": LONG}}}
    service.error = KeyError("host")
    service.handle()
    add_many(5, handler="h")
    worker = start(threads=1)
    said.wait("backoff_started")
    until(lambda: in_flight() == 0)
    last = QueuedMessage.objects.order_by("processable_after")[2]
    [mail] = (each for each in told("mq_status")["queues"] if each["queue"] == "mail")
    assert mail["backoff_level"] == 1
    assert mail["backoff_until"]
    assert "backing off" in told("mq_why", last.pk)["text"]
    page = admin_of_queues()
    assert "level 1" in page
    service.gate.clear()
    QueueState.objects.filter(queue="mail").update(backoff_until=None)
    until(lambda: service.running)
    assert (
        f"worker {worker.worker.id} runs one message as a probe" in told("mq_why", last.pk)["text"]
    )
    service.error = None
    service.gate.set()
    said.wait("backoff_ended")
    until(lambda: len(waiting()) <= 1)  # the one that failed is due later
    assert worker.stop()
    assert "level 1" not in admin_of_queues()


def told(*command: Any) -> Any:
    out = StringIO()
    call_command(*map(str, command), "--json", stdout=out)
    return json.loads(out.getvalue())


def admin_of_queues() -> str:
    boss, client = get_user_model().objects.create_superuser("boss"), Client()
    try:
        client.force_login(boss)
        return client.get("/admin/django_mq/queuestate/").content.decode()
    finally:
        client.logout()
        boss.delete()


def test_a_batch_of_a_stopped_queue_does_not_start(bench: Bench) -> None:
    """Another thread's message failed after the batch left the local queue."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        ran.extend(delivery.id for delivery in deliveries)

    for _ in range(3):
        add(handler="h")
    tasks = bench.claim()
    bench.slices._stopped = stopped = StoppedQueues()
    stopped.queue("mail")
    assert bench.run(tasks).left == tasks
    assert ran == []
