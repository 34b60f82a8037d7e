"""The known tasks, the names they reserve, and the checks of a backend."""

from __future__ import annotations

import sys
import types
from importlib import import_module
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction

from django_mq import (
    InvalidHandler,
    InvalidName,
    Message,
    RetryPolicy,
    broadcast,
    broadcast_many,
    fixed,
    handler,
    handlers,
    queues,
)
from django_mq.contrib.tasks import MessageQueueBackend
from django_mq.contrib.tasks.compat import InvalidTask, task_backends
from django_mq.handlers import nearest
from django_mq.models import QueuedMessage
from django_mq.policy.routing import RoutingTable
from django_mq.testing import drain
from tests.contrib.tasks import jobs
from tests.contrib.tasks.conftest import BACKEND, DUMMY, TASKS

NOTE = "tests.contrib.tasks.jobs.note"


def configure(settings: Any, **params: Any) -> MessageQueueBackend:
    settings.TASKS = {"default": {"BACKEND": BACKEND, **params}}
    found = task_backends["default"]
    assert isinstance(found, MessageQueueBackend)
    return found


# ---- the registry


def test_a_task_is_a_handler_without_patterns() -> None:
    found = handlers.get(NOTE)
    assert found is not None
    assert (found.patterns, found.atomic, found.is_async) == ((), True, False)
    coroutine = handlers.get("tests.contrib.tasks.jobs.coroutine")
    assert coroutine is not None
    assert (coroutine.atomic, coroutine.is_async) == (False, True)


def test_a_task_is_registered_once(backend: handlers.Registry) -> None:
    before = backend.all()
    jobs.note.using(priority=3).using(queue_name="second")
    assert backend.all() == before


def test_a_module_that_is_reloaded_replaces_its_tasks() -> None:
    source = "def job(): ...\n"
    for _ in range(2):
        module = types.ModuleType("reloaded_jobs")
        exec(source, vars(module))  # noqa: S102
        job = jobs.task(module.job)
    found = handlers.get("reloaded_jobs.job")
    assert found is not None
    assert found.function.__self__.task is job  # type: ignore[attr-defined]


def test_a_name_belongs_to_one() -> None:
    with pytest.raises(InvalidHandler, match=f"the name {NOTE}"):
        handler("a.b", name=NOTE)(lambda delivery: None)


def test_modules_beside_tasks_py_are_imported(settings: Any) -> None:
    configure(settings, OPTIONS={"modules": ["tests.contrib.tasks.more_jobs"]})
    sys.modules.pop("tests.contrib.tasks.more_jobs", None)
    MessageQueueBackend.load_tasks()
    assert handlers.get("tests.contrib.tasks.more_jobs.extra") is not None


def test_a_backend_that_cannot_be_loaded_keeps_no_tasks_of_another_out(settings: Any) -> None:
    """It is an error of Django's checks, and the app starts."""
    settings.TASKS = {
        "a-broken": {"BACKEND": "nowhere.Backend"},
        "default": {"BACKEND": BACKEND, "OPTIONS": {"modules": ["tests.contrib.tasks.more_jobs"]}},
    }
    sys.modules.pop("tests.contrib.tasks.more_jobs", None)
    MessageQueueBackend.load_tasks()
    assert handlers.get("tests.contrib.tasks.more_jobs.extra") is not None


@pytest.mark.django_db(transaction=True)
def test_a_worker_knows_the_tasks_of_other_backends(settings: Any) -> None:
    """`using(backend=...)` may send one here from any process."""
    module = "tests.contrib.tasks.elsewhere_jobs"
    settings.TASKS = {
        "elsewhere": {"BACKEND": DUMMY},
        "default": {"BACKEND": BACKEND, "OPTIONS": {"modules": [module]}},
    }
    note = import_module(module).note
    with handlers.isolated():  # the process that enqueues
        result = note.using(backend="default").enqueue(7)
    with handlers.isolated():  # a worker
        MessageQueueBackend.load_tasks()
        assert note.module_path not in {each.name for each in handlers.all_handlers()}
        assert drain() == 1
        assert task_backends["default"].get_result(result.id).return_value == 7


@pytest.mark.django_db(transaction=True)
def test_a_task_of_another_backend_carries_the_options_of_the_one_it_is_sent_to(
    settings: Any,
) -> None:
    """A worker registers the task with the options of the first backend."""
    module = "tests.contrib.tasks.elsewhere_jobs"
    patient = {"retry": RetryPolicy(5, fixed(9)), "timeout": 40}
    settings.TASKS = {
        "elsewhere": {"BACKEND": DUMMY},
        "default": {"BACKEND": BACKEND, "OPTIONS": {"modules": [module]}},
        "patient": {"BACKEND": BACKEND, "OPTIONS": patient},
    }
    with handlers.isolated():
        MessageQueueBackend.load_tasks()
        import_module(module).note.using(backend="patient").enqueue(7)
    row = QueuedMessage.objects.get()
    assert row.retry is not None
    assert row.metadata["mq.task"]["timeout"] == 40


@pytest.mark.parametrize("path", ["nowhere.note", "os.path.join", "note", "", f"{NOTE}.nothing"])
def test_a_row_finds_declared_tasks_and_nothing_else(backend: handlers.Registry, path: str) -> None:
    before = backend.all()
    assert handlers.get(path) is None
    assert backend.all() == before


@pytest.mark.django_db(transaction=True)
def test_a_queue_of_overridden_settings(settings: Any) -> None:
    """The task was registered with the queues of other settings."""
    special = {"BACKEND": BACKEND, "QUEUES": ["default", "special"]}
    settings.TASKS = {**TASKS, "default": special}
    jobs.note.using(queue_name="special").enqueue(1)
    assert drain() == 1
    settings.TASKS = TASKS
    found = handlers.get(NOTE)
    assert found is not None
    assert (set(found.queues), found.any_queue) == ({"default", "second", "own"}, False)


@pytest.mark.parametrize("name", ["große_aufgabe", "x" * 128])
def test_paths_that_are_no_types_are_refused(name: str) -> None:
    def function() -> None: ...

    function.__qualname__ = name
    with pytest.raises(InvalidTask, match="is not a name"):
        jobs.task(function)


def test_where_any_queue_is_allowed_its_name_must_be_one(settings: Any) -> None:
    configure(settings, QUEUES=[])
    assert jobs.note.using(queue_name="any").queue_name == "any"
    with pytest.raises(InvalidTask, match="queue 'a b' is not a name"):
        jobs.note.using(queue_name="a b")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("queues", "runs"), [([], 1), (["default"], 0)])
def test_a_task_runs_in_the_queues_of_its_backends(
    settings: Any, queues: list[str], runs: int
) -> None:
    """Without a list it runs in any queue."""
    configure(settings, QUEUES=queues)
    with handlers.isolated():
        jobs.note.get_backend().validate_task(jobs.note)
        jobs.note.enqueue()
        QueuedMessage.objects.update(queue="elsewhere")
        assert drain() == runs


# ---- the reserved types


def test_no_pattern_matches_a_task() -> None:
    @handler("#", name="everything")
    def everything(delivery: Any) -> None: ...

    assert handlers.table().match(f"tasks.{NOTE}", {}) == ()
    assert [each.name for each in handlers.table().match("a.b", {})] == ["everything"]
    told = {each.subscription.name: each for each in handlers.table().explain(f"tasks.{NOTE}", {})}
    assert told[NOTE].matches
    assert not told["everything"].matches
    known = [each.subscription for each in told.values()]
    other = {each.subscription.name: each for each in RoutingTable(known).explain("a.b", {})}
    assert other[NOTE].reason == "it is a task, which subscribes to nothing"


def test_a_pattern_for_tasks_is_refused() -> None:
    with pytest.raises(InvalidHandler, match="would match nothing"):
        handler("tasks.shop.#")


@pytest.mark.django_db(transaction=True)
def test_the_type_of_a_task_cannot_be_broadcast() -> None:
    for send in (
        lambda: broadcast(f"tasks.{NOTE}", {"args": [], "kwargs": {}}),
        lambda: broadcast_many([Message(f"tasks.{NOTE}")]),
    ):
        with transaction.atomic(), pytest.raises(InvalidName, match="enqueue"):
            send()
    assert not QueuedMessage.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_row_of_a_task_without_its_name_is_held() -> None:
    """SQL may write such rows: no pattern matches the type, so no code is found by it."""
    QueuedMessage.objects.create(
        queue="default", type=f"tasks.{NOTE}", payload={"args": [], "kwargs": {}}
    )
    assert drain() == 0
    held = QueuedMessage.objects.with_state().get()
    assert held.state == "held"
    assert "(only enqueue() writes rows that run this task)" in held.last_error
    assert jobs.ran == []


@pytest.mark.django_db(transaction=True)
def test_a_held_task_names_the_places_of_tasks() -> None:
    """Tasks are not in handlers.py, and nobody means a pattern here."""
    handler("tests.contrib.tasks.jobs.notes", name="tests.contrib.tasks.jobs.notes")(len)
    for name in ("", f"{NOTE}s.x"):
        QueuedMessage.objects.create(
            queue="default", type=f"tasks.{NOTE}s.x", payload={}, handler=name
        )
    assert drain() == 0
    place = "tasks are looked for in tasks.py of each installed app and in OPTIONS['modules'])"
    typed, named = QueuedMessage.objects.order_by("id")
    assert f"(did you mean tasks.{NOTE}" in typed.last_error
    assert f"(did you mean {NOTE}" in named.last_error
    for each in (typed, named):
        assert place in each.last_error
        assert place in str(queues.why(each.pk))


def test_a_misspelt_name_names_the_places_of_tasks_too() -> None:
    """`mq_requeue --handler NAME` knows no message that would show whether a task is meant."""
    remark = nearest.nearest_handlers(f"{NOTE}s.x")
    assert f"(did you mean {NOTE}" in remark
    assert remark.endswith(f"? {nearest.IN_HANDLERS}; {nearest.IN_TASKS})")


def test_the_path_of_a_task_is_not_a_type() -> None:
    """Other queues call functions by their names."""
    assert nearest.probable_types(NOTE) == [f"{NOTE}.enqueue()"]
    assert f"did you mean {NOTE}.enqueue()?" in nearest.nearest_types(NOTE)


def test_an_unknown_queue_names_a_similar_one(settings: Any) -> None:
    configure(settings, QUEUES=["exports", "mail"])
    text = r"Queue 'exprts' is not valid for backend\. Did you mean exports\? TASKS\['default'\]"
    with pytest.raises(InvalidTask, match=text):
        jobs.note.using(queue_name="exprts")


# ---- checks


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"databse": "default"}, "TASKS['default']['OPTIONS']['databse'] is unknown."),
        ({"retry": 3}, "must be a django_mq.RetryPolicy"),
        ({"timeout": 0}, "must be seconds or a timedelta"),
        ({"result_retention": "day"}, "must be seconds or a timedelta"),
        ({"modules": "shop.jobs"}, "must be a list of dotted module paths"),
        ({"database": "nowhere"}, "not in DATABASES"),
    ],
)
def test_bad_options_are_errors_of_the_checks(
    settings: Any, options: dict[str, Any], text: str
) -> None:
    [error] = configure(settings, OPTIONS=options).check()
    assert error.id == "django_mq.E020"
    assert text in error.msg


def test_attempts_belong_into_the_retry_policy(settings: Any) -> None:
    [error] = configure(settings, OPTIONS={"max_attempts": 5}).check()
    assert error.hint == "It is part of 'retry': RetryPolicy(max_attempts=..., backoff=...)."


def test_errors_in_the_settings_are_reported_once(settings: Any) -> None:
    """E001 has them; the error of the backend says only that there are some."""
    found = configure(settings)
    settings.DJANGO_MQ = {"THREADS": 0, "LEESE": 5}
    [error] = found.check()
    assert (error.id, error.msg) == (
        "django_mq.E020",
        "TASKS['default']: DJANGO_MQ is wrong, see django_mq.E001.",
    )
    every = run_checks(databases=["default"])
    assert sum("LEESE" in each.msg for each in every) == 1
    assert sum("THREADS" in each.msg for each in every) == 1


@pytest.mark.parametrize("options", [None, [], "database", 7])
def test_options_that_are_no_dict_are_an_error_of_the_checks(settings: Any, options: Any) -> None:
    """Django does not look at them; each use of the tasks would raise an error of Python's."""
    [error] = configure(settings, OPTIONS=options).check()
    assert error.id == "django_mq.E020"
    assert f"TASKS['default']['OPTIONS'] is {options!r}: must be a dict." in error.msg


@pytest.mark.django_db
@pytest.mark.parametrize("alias", ["nowhere", "lite", "broken"])
@pytest.mark.parametrize("setting", ["DATABASE", "WAKEUP"])
def test_an_alias_without_postgresql_ends_no_check(
    settings: Any, monkeypatch: pytest.MonkeyPatch, setting: str, alias: str
) -> None:
    """It does not exist, is of another vendor, or its backend cannot be loaded."""
    for name, engine in (("lite", "django.db.backends.sqlite3"), ("broken", "nowhere.engine")):
        other = {**connections.settings["default"], "ENGINE": engine, "NAME": ":memory:"}
        monkeypatch.setitem(connections.settings, name, other)
    backend = configure(settings)
    settings.DJANGO_MQ = {setting: alias}
    errors = backend.check()
    assert [each.id for each in errors] == ["django_mq.E020"] * (setting == "DATABASE")
    assert all("TASKS['default']" in each.msg for each in errors)
    assert "django_mq.E002" in {each.id for each in run_checks(databases=["default"])}


def test_a_policy_with_code_is_an_error(settings: Any) -> None:
    policy = RetryPolicy(backoff=lambda attempt: attempt)
    [error] = configure(settings, OPTIONS={"retry": policy}).check()
    assert "stored as data" in error.msg


def test_good_options_are_fine(settings: Any) -> None:
    assert configure(settings, OPTIONS={"timeout": 5, "database": "default"}).check() == []
    assert settings.TASKS != TASKS


def test_a_database_that_is_not_postgresql(settings: Any, monkeypatch: Any) -> None:
    found = configure(settings)
    monkeypatch.setattr(connection, "vendor", "sqlite")
    with pytest.raises(ImproperlyConfigured):
        jobs.note.enqueue()
    [error] = found.check()
    assert "PostgreSQL" in error.msg
