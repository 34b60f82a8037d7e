"""System checks: each id where it belongs, and nowhere else.

Except for the marked one, these tests may not touch a database: the checks do not connect.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.core.checks import CheckMessage, Tags, run_checks
from django.db import NotSupportedError, connections
from django.test import override_settings

from django_mq.checks.databases import UPGRADE
from django_mq.checks.registering import TAG
from django_mq.conf import get_settings
from django_mq.handlers import add, all_handlers, handler, isolated, periodic

AddAlias = Callable[..., None]


@pytest.fixture(autouse=True)
def no_handlers() -> Iterator[None]:
    with isolated():
        yield
    get_settings.cache_clear()


@pytest.fixture
def add_alias(monkeypatch: pytest.MonkeyPatch) -> Iterator[AddAlias]:
    """Add a database alias, equal to `default` except for the given values."""
    added = []

    def add(alias: str, **changes: object) -> None:
        monkeypatch.setitem(
            connections.settings, alias, {**connections.settings["default"], **changes}
        )
        added.append(alias)

    yield add
    for alias in added:
        if hasattr(connections._connections, alias):
            del connections[alias]


def found(*, deploy: bool = False, databases: Any = None, **raw: Any) -> list[CheckMessage]:
    """Return our checks' messages, in the order of their ids."""
    tags = [TAG, Tags.database] if databases else [TAG]
    with override_settings(DJANGO_MQ=raw):
        messages = run_checks(tags=tags, include_deployment_checks=deploy, databases=databases)
    return sorted(messages, key=lambda each: str(each.id))


def ids(**options: Any) -> list[str]:
    return [str(each.id).removeprefix("django_mq.") for each in found(**options)]


class Router:
    """Routes writes of the named models of django_mq, or of all, to an alias."""

    def __init__(self, alias: str, *models: str) -> None:
        self.alias, self.models = alias, models

    def db_for_write(self, model: Any, **hints: object) -> str | None:
        ours = model._meta.app_label == "django_mq"
        return self.alias if ours and (not self.models or model.__name__ in self.models) else None


def test_defaults_are_without_remark() -> None:
    assert found(deploy=True) == []


@pytest.mark.django_db
def test_the_database_of_these_tests_is_new_enough() -> None:
    assert found(databases=["default"]) == []


def test_checks_run_with_all_others() -> None:
    with override_settings(DJANGO_MQ={"LEESE": 5}):
        assert "django_mq.E001" in [each.id for each in run_checks()]


def test_e001_reports_each_wrong_setting_and_the_other_checks_wait() -> None:
    errors = found(LEESE=5, BATCH_SIZE=0, WAKEUP="nowhere")
    assert [each.id for each in errors] == ["django_mq.E001"] * 2
    assert errors[0].msg == "DJANGO_MQ['LEESE'] is unknown."
    assert errors[0].hint == "Did you mean 'LEASE'?"
    assert "DJANGO_MQ['BATCH_SIZE'] is 0: must be" in errors[1].msg


@pytest.mark.parametrize("setting", ["DATABASE", "WAKEUP"])
def test_e002_alias_is_missing(setting: str) -> None:
    errors = [each for each in found(**{setting: "nowhere"}) if each.id == "django_mq.E002"]
    assert len(errors) == 1
    assert errors[0].msg.startswith(setting)
    assert "'nowhere'" in errors[0].msg
    assert "'default'" in str(errors[0].hint)


@pytest.mark.parametrize("setting", ["DATABASE", "WAKEUP"])
def test_e002_alias_is_not_postgresql(setting: str, add_alias: AddAlias) -> None:
    add_alias("lite", ENGINE="django.db.backends.sqlite3", NAME=":memory:")
    assert "E002" in ids(**{setting: "lite"})


@pytest.mark.parametrize("setting", ["DATABASE", "WAKEUP"])
def test_e002_backend_of_the_alias_cannot_be_loaded(setting: str, add_alias: AddAlias) -> None:
    """Django raises as soon as somebody asks for its vendor; the other checks survive that."""
    add_alias("broken", ENGINE="nowhere.engine")
    errors = [each for each in found(**{setting: "broken"}) if each.id == "django_mq.E002"]
    assert len(errors) == 1
    assert errors[0].msg.startswith(setting)
    assert "'broken'" in errors[0].msg
    assert "No module named 'nowhere'" in errors[0].msg
    assert "ENGINE" in str(errors[0].hint)


def test_e002_router_writes_to_another_engine(add_alias: AddAlias) -> None:
    add_alias("lite", ENGINE="django.db.backends.sqlite3", NAME=":memory:")
    with override_settings(DATABASE_ROUTERS=[Router("lite")]):
        assert ids() == ["E002", "W001"]


@pytest.mark.django_db
def test_e003_server_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections["default"].__dict__, "pg_version", 140010)
    (error,) = found(databases=["default"])
    assert error.id == "django_mq.E003"
    assert "PostgreSQL 14" in error.msg
    monkeypatch.setitem(connections["default"].__dict__, "pg_version", 150000)
    assert found(databases=["default"]) == []


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("version", "expected"),
    [("3.2.5", ["E003"]), ("3.1.19", ["E003"]), ("3.2.6", []), ("3.10.0.dev1", []), ("4.0", [])],
)
def test_e003_driver_is_too_old(
    version: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections["default"].__dict__, "pg_version", 150000)
    monkeypatch.setattr(psycopg, "__version__", version)
    assert ids(databases=["default"]) == expected


def test_e003_server_is_away() -> None:
    """A line instead of a traceback: the pages on recovery and PgBouncer tell to run it."""
    away = {**os.environ, "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/nothing"}
    command = [sys.executable, "manage.py", "check", "--database", "default"]
    ended = subprocess.run(command, cwd=settings.BASE_DIR, env=away, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "(django_mq.E003) The database 'default' cannot be used: connection" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.django_db
def test_e003_server_is_too_old_for_django(monkeypatch: pytest.MonkeyPatch) -> None:
    """Django refuses to connect to it, so its version is not known."""
    wrapper = connections["default"]
    monkeypatch.delitem(wrapper.__dict__, "pg_version", raising=False)

    def refuse(*args: object) -> None:
        raise NotSupportedError("PostgreSQL 14 or later is required (found 12.22).")

    monkeypatch.setattr(type(wrapper), "temporary_connection", refuse)
    error, *_ = found(databases=["default"])
    assert (error.id, error.hint) == ("django_mq.E003", UPGRADE)
    assert "found 12.22" in error.msg


def test_e003_is_asked_of_no_database_but_the_named(
    monkeypatch: pytest.MonkeyPatch, add_alias: AddAlias
) -> None:
    monkeypatch.setitem(connections["default"].__dict__, "pg_version", 140010)
    add_alias("other")
    assert ids() == []
    assert ids(databases=["other"]) == []


@pytest.mark.parametrize("path", ["nowhere.Encoder", "json.dumps"])
def test_e008_encoder_is_none(path: str) -> None:
    with isolated():
        periodic("daily", "shop.day.ended", every=86400)  # its payload needs an encoder
        (error,) = found(ENCODER=path)
    assert error.id == "django_mq.E008"
    assert path in error.msg


def test_e009_router_writes_to_another_database(add_alias: AddAlias) -> None:
    """Guarantee 12."""
    add_alias("other")
    errors = found(DATABASE="other")
    assert [each.id for each in errors] == ["django_mq.E009", "django_mq.W001"]
    assert "QueuedMessage" in errors[0].msg
    with override_settings(DATABASE_ROUTERS=[Router("other")]):
        assert ids(DATABASE="other") == ["W001"]
        assert "E009" in ids(DATABASE="default")
        assert "E009" not in ids()


def test_e009_router_is_at_odds_with_itself(add_alias: AddAlias) -> None:
    add_alias("other")
    with override_settings(DATABASE_ROUTERS=[Router("other", "Result", "UniqueKey")]):
        (error,) = found()
    assert error.id == "django_mq.E009"
    assert "Result, UniqueKey to 'other'" in error.msg


class Migrations:
    """Allows migrations of django_mq in the named aliases only."""

    def __init__(self, *aliases: str) -> None:
        self.aliases = aliases

    def allow_migrate(self, db: str, app_label: str, **hints: object) -> bool | None:
        return db in self.aliases if app_label == "django_mq" else None


def test_e009_router_creates_the_tables_in_another_database(add_alias: AddAlias) -> None:
    """Guarantee 12."""
    add_alias("other", NAME="other")
    with override_settings(DATABASE_ROUTERS=[Migrations("other")]):
        (error,) = found()
    assert error.id == "django_mq.E009"
    assert "QueuedMessage" in error.msg
    assert "in 'other', but not in 'default'" in error.msg
    with override_settings(DATABASE_ROUTERS=[Migrations("other"), Router("other")]):
        assert ids() == ["W001"]
    with override_settings(DATABASE_ROUTERS=[Migrations("default", "other")]):
        assert ids() == []


def test_migrations_may_run_past_a_pooler_or_by_another_project(add_alias: AddAlias) -> None:
    add_alias("direct")
    with override_settings(DATABASE_ROUTERS=[Migrations("direct")]):
        assert ids() == []
    with override_settings(DATABASE_ROUTERS=[Migrations()]):
        assert ids() == []


def test_e013_autocommit_is_off(add_alias: AddAlias) -> None:
    add_alias("manual", AUTOCOMMIT=False)
    assert ids() == []
    with override_settings(DATABASE_ROUTERS=[Router("manual")]):
        assert ids(DATABASE="manual") == ["E013", "W001"]


def test_w001_messages_are_kept_beside_the_data(add_alias: AddAlias) -> None:
    add_alias("other")
    with override_settings(DATABASE_ROUTERS=[Router("other")]):
        (warning,) = found()
    assert warning.id == "django_mq.W001"
    assert "'other'" in warning.msg


def test_w002_listens_through_a_pooler(add_alias: AddAlias) -> None:
    add_alias("pooled", DISABLE_SERVER_SIDE_CURSORS=True)
    add_alias("direct")
    with override_settings(DATABASE_ROUTERS=[Router("pooled")]):
        assert ids() == ["W001", "W002"]
        assert ids(WAKEUP="direct") == ["W001"]
        assert ids(WAKEUP="poll") == ["I001", "W001"]
    assert ids(WAKEUP="pooled") == ["W002"]


def test_djangos_own_pool_is_no_pooler(add_alias: AddAlias) -> None:
    """Listeners connect past it: see worker/test_listener.py."""
    add_alias("pooled", OPTIONS={"pool": True})
    assert ids(WAKEUP="pooled") == []


def test_w003_atomic_and_other_handlers_share_a_queue() -> None:
    @handler("a", queue="mail", name="writes")
    def writes(delivery: object) -> None: ...

    @handler("a", queue="calls", name="calls", atomic=False)
    def calls(delivery: object) -> None: ...

    assert found() == []

    @handler("a", queue="other", queues=("mail",), name="awaits")
    async def awaits(delivery: object) -> None: ...

    (warning,) = found()
    assert warning.id == "django_mq.W003"
    assert "'mail'" in warning.msg
    assert "(writes)" in warning.msg
    assert "(awaits)" in warning.msg


def test_w003_counts_handlers_that_name_no_queue() -> None:
    @handler("a", name="writes")
    def writes(delivery: object) -> None: ...

    @handler("a", queue="mail", name="calls", atomic=False)
    def calls(delivery: object) -> None: ...

    assert ids() == []
    assert ids(DEFAULT_QUEUE="mail") == ["W003"]


@pytest.mark.parametrize("setting", ["RESULT_RETENTION", "ATTEMPT_RETENTION", "REDACT"])
def test_w005_kept_for_ever_or_shown_in_full_only_with_deploy(setting: str) -> None:
    """S22, S12, S35."""
    assert ids(**{setting: None}) == []
    (warning,) = found(deploy=True, **{setting: None})
    assert warning.id == "django_mq.W005"
    assert setting in warning.msg


def test_w011_retries_without_a_wait_only_with_deploy() -> None:
    """S15, S35."""
    assert ids(RETRY_FLOOR=0) == []
    (warning,) = found(deploy=True, RETRY_FLOOR=0)
    assert warning.id == "django_mq.W011"
    assert found(deploy=True, RETRY_FLOOR=0.01) == []


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"SLICE_SECONDS": 30}, 1),
        ({"SLICE_SECONDS": 11}, 1),
        ({"SLICE_SECONDS": 10}, 0),
        ({"LEASE": 0.2}, 1),
        ({"QUEUES": {"mail": {"lease": 0.2}, "slow": {"lease": 60}}}, 1),
        ({"LEASE": 0.2, "QUEUES": {"slow": {"lease": 60}}}, 1),
        ({"LEASE": 0.2, "QUEUES": {"mail": {}}}, 1),
    ],
)
def test_w006_slice_is_long_against_the_lease(raw: dict[str, Any], expected: int) -> None:
    assert ids(**raw) == ["W006"] * expected


def take(pattern: str, queue: str | None = None) -> None:
    handler(pattern, queue=queue, name=f"takes-{len(all_handlers())}")(lambda delivery: None)


def test_w008_a_queue_of_the_settings_that_is_misspelt() -> None:
    take("a", "ledger")
    queues = {"legder": {"ordered": True}}
    (warning,) = found(QUEUES=queues)
    assert warning.id == "django_mq.W008"
    assert "QUEUES has options for 'legder'" in warning.msg
    assert str(warning.hint).startswith("Did you mean 'ledger'?")


@pytest.mark.parametrize(
    "queues",
    [
        {"ledger": {}},
        {"reports": {}},  # like none: other projects may use it
        {"default": {}},
        {"ledger": {}, "ledger2": {}},  # the queue that is like it has options of its own
        {"clocks": {}},
    ],
    ids=str,
)
def test_w008_is_silent_about_queues_that_others_may_use(queues: dict[str, Any]) -> None:
    take("a", "ledger")
    take("b", "defaults")
    take("c", "clock")
    periodic("hourly", "a", every=3600, queue="clocks")
    assert "W008" not in ids(QUEUES=queues)


def test_w008_is_silent_beside_a_handler_that_takes_any_queue() -> None:
    """Such a handler runs tasks: their calls choose the queues."""
    take("a", "ledger")
    add(replace(all_handlers()[0], name="tasks", any_queue=True))
    assert "W008" not in ids(QUEUES={"legder": {}})


def test_w009_a_schedule_whose_type_is_misspelt() -> None:
    take("shop.tick")
    periodic("hourly", "shop.tickk", every=3600)
    (warning,) = found()
    assert warning.id == "django_mq.W009"
    assert "The schedule 'hourly' broadcasts shop.tickk" in warning.msg
    assert str(warning.hint).startswith("Did you mean shop.tick?")


def test_w009_is_silent_about_types_that_others_may_take() -> None:
    take("shop.tick")
    take("shop.tack.*")
    periodic("here", "shop.tick", every=3600)
    periodic("by-pattern", "shop.tack.tick", every=3600)
    periodic("elsewhere", "mail.digest.due", every=3600)
    assert found() == []


def test_i001_polling_only() -> None:
    (info,) = found(WAKEUP="poll", POLL_INTERVAL=2.5)
    assert info.id == "django_mq.I001"
    assert "2.5 s" in info.msg
    assert not info.is_serious()


def test_missing_packages_of_brokers_are_reported_without_any_relay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A project that only has inboxes imports nothing of the relays before it consumes."""
    monkeypatch.setattr("django_mq.conf.broker_options.find_spec", lambda name: None)
    inbox = {"kind": "redis", "url": "redis://localhost", "source": "crm"}
    with override_settings(DJANGO_MQ={"INBOXES": {"crm": inbox}}):
        found = [each for each in run_checks(tags=[TAG]) if each.id == "django_mq.E007"]
    assert [each.msg for each in found] == [
        "DJANGO_MQ['INBOXES']['crm'] is of the kind 'redis', and it needs the package redis: pip"
        " install 'django-mq[redis]'."
    ]
