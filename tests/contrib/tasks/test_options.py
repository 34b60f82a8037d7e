"""The options of tasks: as keywords of the decorators, and of `using()` on every Django."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import django
import pytest
from django.db import transaction

from django_mq import (
    DuplicateMessage,
    InvalidPayload,
    PayloadTooLarge,
    RetryPolicy,
    fixed,
    handlers,
    queues,
)
from django_mq.contrib.tasks import MessageTask
from django_mq.contrib.tasks.compat import InvalidTask, Task, TaskResultStatus, task_enqueued
from django_mq.models import QueuedMessage
from django_mq.testing import drain, due
from django_mq.worker import Worker
from tests.contrib.tasks import jobs, own_jobs
from tests.contrib.tasks.conftest import BACKEND, TASKS

pytestmark = pytest.mark.django_db(transaction=True)

READY, FAILED = TaskResultStatus.READY, TaskResultStatus.FAILED
SUCCESSFUL = TaskResultStatus.SUCCESSFUL


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The ids of the tasks for which the signal of enqueueing was sent."""
    heard: list[str] = []

    def hear(sender: Any, task_result: Any, **kwargs: Any) -> None:
        heard.append(task_result.id)

    task_enqueued.connect(hear)
    yield heard
    task_enqueued.disconnect(hear)


def with_options(settings: Any, **options: Any) -> None:
    default = {"BACKEND": BACKEND, "OPTIONS": options}
    settings.TASKS = {**TASKS, "default": default}


def run() -> None:
    assert Worker(max_seconds=60).run(until_empty=True)


# ---- attempts


def test_one_attempt_is_the_default() -> None:
    result = jobs.second_time_lucky.enqueue()
    assert QueuedMessage.objects.get().max_attempts == 1
    drain(errors="keep")
    due()
    assert drain() == 0
    result.refresh()
    assert (result.status, result.attempts) == (FAILED, 1)


def test_retries_are_opted_into() -> None:
    """Each attempt sees those before it, and the result has the error of each."""
    task = jobs.second_time_lucky.using(max_attempts=3, backoff=fixed(60))
    result = task.enqueue()
    drain(errors="keep")
    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == (READY, 1, 1)
    assert result.last_attempted_at is not None
    due()
    drain()
    result.refresh()
    assert (result.status, result.attempts, result.return_value) == (SUCCESSFUL, 2, 2)
    assert [each.exception_class for each in result.errors] == [ValueError]
    assert result.started_at < result.last_attempted_at <= result.finished_at
    first, second = jobs.ran
    assert (first.attempts, first.errors) == (1, [])
    assert (second.attempts, len(second.errors)) == (2, 1)
    assert second.started_at < second.last_attempted_at


def test_the_retries_of_a_backend(settings: Any) -> None:
    with_options(settings, retry=RetryPolicy(max_attempts=2, backoff=fixed(9)))
    jobs.fail.enqueue()
    jobs.fail.using(max_attempts=5).enqueue()
    jobs.fail.using(backoff=fixed(5)).enqueue()
    rows = QueuedMessage.objects.order_by("id").values_list("max_attempts", "retry__seconds")
    assert list(rows) == [(2, 9.0), (5, 9.0), (2, 5.0)]


# ---- timeout, atomic


def test_the_timeout_travels_with_the_message() -> None:
    result = jobs.sleep.using(timeout=0.2).enqueue(60)
    run()
    result.refresh()
    [error] = result.errors
    assert error.exception_class.__name__ == "TimedOut"


def test_the_timeout_of_a_backend(settings: Any) -> None:
    with_options(settings, timeout=timedelta(milliseconds=200))
    result = jobs.sleep.enqueue(60)
    run()
    result.refresh()
    assert result.status == FAILED


def test_the_timeout_of_a_backend_does_not_apply_to_tasks_of_another(settings: Any) -> None:
    with_options(settings, timeout=0.2)
    with handlers.isolated():
        jobs.sleep.get_backend().validate_task(jobs.sleep)
        hasty, patient = jobs.sleep.enqueue(0.5), jobs.sleep.using(backend="other").enqueue(0.5)
        run()
        for result, status in ((hasty, FAILED), (patient, SUCCESSFUL)):
            result.refresh()
            assert result.status == status


def test_declared_options_are_not_stored_in_the_message() -> None:
    """So a change of the code also applies to the tasks that wait."""
    own_jobs.unbound.enqueue()
    own_jobs.retried.enqueue()
    rows = QueuedMessage.objects.order_by("id").values_list("metadata", "retry")
    assert list(rows) == [({}, None)] * 2


def test_whether_it_is_atomic_travels_with_the_message() -> None:
    atomic, unbound = jobs.in_block.enqueue(), jobs.in_block.using(atomic=False).enqueue()
    run()
    assert jobs.in_block.get_result(atomic.id).return_value is True
    assert jobs.in_block.get_result(unbound.id).return_value is False


# ---- keys and unique ids


def test_keys_are_texts_or_functions_of_the_arguments() -> None:
    own_jobs.per_order.enqueue(7, text="a")
    jobs.note.using(key="account/1").enqueue()
    assert list(QueuedMessage.objects.order_by("id").values_list("key", "unique_id")) == [
        ("order/7", "order-7"),
        ("account/1", None),
    ]


def test_wrong_setting_is_reported_by_the_checks_only(settings: Any) -> None:
    """It runs while Django sets up: an error there would end every command."""
    settings.DJANGO_MQ = {"LEESE": 5}
    jobs.note.using(unique_id=lambda *args: None, unique_for=60, expires=60)


def test_a_function_that_returns_none_gives_no_id() -> None:
    task = jobs.note.using(unique_id=lambda *args: None, on_duplicate="raise", unique_for=60)
    assert task.enqueue().id != task.enqueue().id


def test_a_duplicate_answers_with_the_result_that_is_there(heard: list[str]) -> None:
    first = own_jobs.per_order.enqueue(7, text="first")
    again = own_jobs.per_order.enqueue(7, text="again")
    other = own_jobs.per_order.enqueue(8)
    assert again.id == first.id != other.id
    assert again.kwargs == {"text": "first"}
    assert heard == [first.id, other.id]
    drain()
    later = own_jobs.per_order.enqueue(7)
    assert later.id != first.id


def test_a_duplicate_of_another_backends_task() -> None:
    """The id belongs to the function and the queue, whichever backend stored the task."""
    first = jobs.note.using(unique_id="one").enqueue(1)
    other = jobs.note.using(unique_id="one", backend="other", queue_name="default").enqueue(2)
    assert (other.id, other.args, other.backend) == (first.id, [1], "default")


def test_other_ways_with_duplicates(heard: list[str]) -> None:
    first = own_jobs.per_order.enqueue(7, text="first")
    with pytest.raises(DuplicateMessage):
        own_jobs.per_order.using(on_duplicate="raise").enqueue(7)
    updated = own_jobs.per_order.using(on_duplicate="update").enqueue(7, text="second")
    assert (updated.id, updated.kwargs) == (first.id, {"text": "second"})
    assert heard == [first.id, first.id]
    drain()
    first.refresh()
    assert first.return_value == "second"


def test_an_update_answers_with_the_attempts_so_far() -> None:
    task = jobs.fail.using(
        unique_id="one", on_duplicate="update", max_attempts=3, backoff=fixed(600)
    )
    first = task.enqueue()
    drain(errors="keep")
    again = task.enqueue()
    assert (again.id, again.attempts, len(again.errors)) == (first.id, 1, 1)


def test_a_debounce_answers_with_the_task_that_is_there(heard: list[str]) -> None:
    first = jobs.note.using(unique_id="one").enqueue(1)
    debounced = jobs.note.using(
        unique_id="one", on_duplicate="debounce", priority=7, run_after=jobs.in_an_hour()
    ).enqueue(2)
    assert (debounced.id, debounced.args, debounced.task.priority) == (first.id, [1], 0)
    assert heard == [first.id]


def test_a_duplicate_may_move_the_due_time() -> None:
    later = jobs.in_an_hour()
    first = jobs.note.using(unique_id="one").enqueue(1)
    for way, args in (("debounce", [1]), ("replace", [2])):
        task = jobs.note.using(unique_id="one", on_duplicate=way, run_after=later)
        again = task.enqueue(2)
        assert again.id == first.id
        assert task.get_result(first.id).args == args
        assert (again.task.run_after, task.get_result(first.id).task.run_after) == (later, later)
        assert drain() == 0


def test_result_of_a_waiting_task_has_its_due_time() -> None:
    """An update changes the content, not the due time; an operator may move that, too."""
    soon, later = jobs.in_an_hour(), jobs.in_an_hour() + timedelta(hours=1)
    task = jobs.note.using(unique_id="one", on_duplicate="update")
    first = task.using(run_after=soon).enqueue(1)
    again = task.using(run_after=later).enqueue(2)
    assert (again.id, again.args, again.task.run_after) == (first.id, [2], soon)
    queues.edit(int(first.id), due=later)
    assert task.get_result(first.id).task.run_after == later
    queues.run_now(int(first.id))
    run_after = task.get_result(first.id).task.run_after
    assert run_after is not None
    assert run_after < soon


def test_in_a_quiet_time_there_is_no_result_to_answer_with(heard: list[str]) -> None:
    task = jobs.note.using(unique_id="daily", unique_for=60)
    task.enqueue()
    drain()
    heard.clear()
    with pytest.raises(DuplicateMessage, match="stays taken after a success"):
        task.enqueue()
    assert heard == []


# ---- refusals


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_attempts": 0}, "max_attempts must be 1"),
        ({"max_attempts": 2, "backoff": lambda attempt: 1}, "stored as data"),
        ({"backoff": fixed(1)}, "without max_attempts"),
        ({"timeout": 0}, "timeout="),
        ({"timeout": "5"}, "timeout="),
        ({"atomic": 1}, "atomic= must be True or False"),
        ({"on_duplicate": "raise"}, "without unique_id="),
        ({"unique_for": 5}, "without unique_id="),
        ({"unique_id": "a", "on_duplicate": "requeue"}, "no id yet"),
        (
            {"unique_id": "a", "on_duplicate": "no"},
            "one of skip, raise, update, debounce, replace,",
        ),
        ({"unique_id": "a", "unique_for": "5"}, "unique_for must be"),
        ({"unique_id": 5}, "unique id of type int"),
        ({"key": ""}, "key ''"),
        ({"expires": "tomorrow"}, "expires= 'tomorrow' is not a valid wait"),
        ({"expires": -5}, "expires= -5 is not a valid wait"),
        ({"expires": timedelta(days=400)}, r"expires .* \(MAX_DELAY\)"),
        ({"expires": datetime.now(UTC) + timedelta(days=400)}, r"expires .* \(MAX_DELAY\)"),
        ({"run_after": datetime.now(UTC) + timedelta(days=400)}, "MAX_DELAY"),
        ({"run_after": datetime.min.replace(tzinfo=UTC)}, "run_after .* a time from 1900 on"),
        (
            {"expires": 60, "run_after": datetime.now(UTC) + timedelta(days=1)},
            "no attempt could ever start",
        ),
        (
            {
                "expires": datetime.now(UTC) + timedelta(days=1),
                "run_after": datetime.now(UTC) + timedelta(days=2),
            },
            "no attempt could ever start",
        ),
        (
            dict.fromkeys(("expires", "run_after"), datetime.now(UTC) + timedelta(days=1)),
            "no attempt could ever start",
        ),
    ],
)
def test_bad_options_are_djangos_own_error(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidTask, match=text):
        jobs.note.using(**options)


def test_times_that_have_passed_are_no_mistake_of_a_declaration() -> None:
    """A module is imported at any time."""
    past = datetime.now(UTC) - timedelta(days=1)
    assert jobs.note.using(expires=past - timedelta(days=1), run_after=past).run_after == past


@pytest.mark.parametrize("name", ["key", "unique_id"])
def test_a_function_that_does_not_take_the_arguments_is_named(name: str) -> None:
    task = jobs.note.using(**{name: lambda: "a"})
    with pytest.raises(TypeError, match="positional") as caught:
        task.enqueue(1)
    [note] = caught.value.__notes__
    path = jobs.note.module_path
    assert note == f"raised by {name}= of {path}, which gets the arguments of the task"


@pytest.mark.parametrize("name", ["key", "unique_id"])
@pytest.mark.parametrize("value", [5, "", "a\nb", "x" * 129])
def test_function_that_returns_an_invalid_key_is_named(name: str, value: Any) -> None:
    task = jobs.note.using(**{name: lambda n: value})
    with transaction.atomic():
        with pytest.raises(InvalidTask, match=f"{jobs.note.module_path}: {name}="):
            task.enqueue(1)
        fine = jobs.note.using(**{name: lambda n: None}).enqueue(1)
    assert jobs.note.get_result(fine.id).status == READY


def test_a_coroutine_is_never_atomic() -> None:
    with pytest.raises(InvalidTask, match="no async transactions"):
        jobs.coroutine.using(atomic=True)


def test_values_that_the_database_would_refuse_leave_the_transaction_usable() -> None:
    with transaction.atomic():
        for args, error in (((float("nan"),), InvalidPayload), (("\0",), InvalidPayload)):
            with pytest.raises(error):
                jobs.note.enqueue(*args)
        with pytest.raises(PayloadTooLarge):
            jobs.note.enqueue("x" * 2_000_000)
        fine = jobs.note.enqueue()
    assert jobs.note.get_result(fine.id).status == READY


# ---- decorators


def test_the_packages_own_decorator() -> None:
    assert isinstance(own_jobs.retried, MessageTask)
    assert (own_jobs.retried.max_attempts, own_jobs.retried.queue_name) == (3, "second")
    assert own_jobs.unbound.atomic is False
    assert own_jobs.unbound.timeout == 7
    assert own_jobs.bare.takes_context
    result = own_jobs.retried.enqueue()
    [row] = QueuedMessage.objects.all()
    assert (row.queue, row.priority, row.max_attempts) == ("second", 7, 3)
    assert row.metadata == {}
    assert own_jobs.retried.get_result(result.id).task == own_jobs.retried


@pytest.mark.parametrize("option", ["retries", "takes_context", "func"])
def test_an_option_that_a_task_does_not_have_is_refused(option: str) -> None:
    with pytest.raises(TypeError, match=f"no option '{option}': use atomic, backend"):
        own_jobs.retried.using(**{option: None})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no option 'retries': use .*, takes_context, timeout"):
        own_jobs.task(retries=3)  # type: ignore[call-overload]


def test_an_option_names_the_backend_that_does_not_have_it(settings: Any) -> None:
    """Many projects run tasks at once in development and in tests."""
    package = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
    immediate = f"{package}.backends.immediate.ImmediateBackend"
    settings.TASKS = {"default": {"BACKEND": immediate}}
    with pytest.raises(TypeError) as refused:
        own_jobs.task(timeout=7, atomic=False)(jobs.not_a_task)
    assert str(refused.value) == (
        f"the backend 'default' of TASKS is {immediate}, whose tasks have no option atomic,"
        " timeout: the options of django_mq need django_mq.contrib.tasks.MessageQueueBackend"
    )
    assert own_jobs.task(priority=7)(jobs.not_a_task).priority == 7


@pytest.mark.parametrize("moment", [timedelta(hours=1), 60, "2030-01-01"])
def test_a_run_after_that_is_no_moment_is_refused(moment: object) -> None:
    with pytest.raises(InvalidTask, match="run_after must be an aware datetime, not"):
        jobs.note.using(run_after=moment)


def test_djangos_decorator_takes_the_options_where_it_passes_them_on() -> None:
    if (6, 0) <= django.VERSION < (6, 1):
        pytest.skip("Django 6.0 takes no further keywords")
    made = jobs.task(max_attempts=4, key="k")(jobs.not_a_task)
    assert (made.max_attempts, made.key) == (4, "k")


def test_a_task_of_another_class_has_no_options() -> None:
    """This happens when `using(backend=...)` sends a task of another backend here."""
    plain = Task(
        func=jobs.note.func,
        priority=0,
        backend="default",
        queue_name="default",
        run_after=None,
        takes_context=False,
    )
    result = plain.enqueue(1)
    drain()
    assert plain.get_result(result.id).return_value == {"args": [1], "kwargs": {}}


def test_using_keeps_the_other_options() -> None:
    task = jobs.note.using(max_attempts=3).using(priority=2).using(timeout=5)
    assert (task.max_attempts, task.priority, task.timeout) == (3, 2, 5)
    assert jobs.note.max_attempts is None
