"""System checks: what is wrong, or unwise, with the settings, seen before a worker starts.

All run with `manage.py check --database ALIAS`, those that ask no server with
`--tag django_mq` too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.utils.version import get_version_tuple

from django_mq.conf import Settings, find_errors, get_settings
from django_mq.handlers import all_handlers, allowed_queues

TAG = "django_mq"
OLDEST_SERVER = 15
#: Older ones lose a NOTIFY that arrives while another statement runs on the connection.
OLDEST_DRIVER = (3, 2, 6)
#: A lease is renewed every third of it; a slice that lasts longer misses a renewal.
RENEWALS = 3

Found = Iterator[checks.CheckMessage]


def _check(
    *tags: str, deploy: bool = False
) -> Callable[[Callable[[Settings, Collection[str]], Found]], object]:
    """Register a check that gets the settings, if they can be read, and the databases to ask."""

    def register(function: Callable[[Settings, Collection[str]], Found]) -> object:
        def run(
            app_configs: object, databases: Collection[str] | None = None, **kwargs: Any
        ) -> list[checks.CheckMessage]:
            try:
                settings = get_settings()
            except ImproperlyConfigured:
                return []  # E001 says why
            return list(function(settings, databases or ()))

        return checks.register(run, *tags, deploy=deploy)

    return register


@checks.register(TAG)
def check_settings(app_configs: object, **kwargs: Any) -> list[checks.CheckMessage]:
    """E001: an unknown or wrong setting."""
    return [
        checks.Error(f"{error.where} {error.problem}", hint=error.hint, id="django_mq.E001")
        for error in find_errors(getattr(django_settings, "DJANGO_MQ", {}))
    ]


@_check(TAG)
def check_aliases(settings: Settings, databases: Collection[str]) -> Found:
    """E002: an alias that is missing or not PostgreSQL; connects to none."""
    used = {_outbox(settings): "DATABASE" if settings.database else "The database router"}
    if settings.wakeup not in ("notify", "poll"):
        used.setdefault(settings.wakeup, "WAKEUP ('notify', 'poll' or an alias)")
    for alias, source in used.items():
        if alias not in connections:
            yield checks.Error(
                f"{source} names the database {alias!r}, which is not in DATABASES.",
                hint=f"DATABASES has {', '.join(map(repr, connections))}.",
                id="django_mq.E002",
            )
        elif connections[alias].vendor != "postgresql":
            yield checks.Error(
                f"{source} names the database {alias!r}, which is not PostgreSQL.",
                hint="Messages live in PostgreSQL only: name an alias that is.",
                id="django_mq.E002",
            )


# Not under our tag: from Django 6.1 on, asking for a tag asks every database.
@_check(checks.Tags.database)
def check_versions(settings: Settings, databases: Collection[str]) -> Found:
    """E003: a server or driver that is too old; only with `--database`."""
    alias = _outbox(settings)
    if alias not in databases or not _is_postgresql(alias):
        return
    driver = _driver_version()
    if get_version_tuple(driver) < OLDEST_DRIVER:
        yield checks.Error(
            f"The installed psycopg is {driver}.",
            hint='Install "psycopg>=3.2.6".',
            id="django_mq.E003",
        )
    server = connections[alias].pg_version // 10000  # type: ignore[attr-defined]
    if server < OLDEST_SERVER:
        yield checks.Error(
            f"The database {alias!r} is PostgreSQL {server}.",
            hint=f"Use PostgreSQL {OLDEST_SERVER} or later.",
            id="django_mq.E003",
        )


@_check(TAG)
def check_encoder(settings: Settings, databases: Collection[str]) -> Found:
    """E008: an encoder that cannot be imported or is none."""
    try:
        settings.encoder_class  # noqa: B018  (asking imports it)
    except ImproperlyConfigured as error:
        yield checks.Error(str(error), hint="Give the dotted path of a class.", id="django_mq.E008")


@_check(TAG)
def check_router(settings: Settings, databases: Collection[str]) -> Found:
    """E009: tables that are not all where the messages are kept."""
    elsewhere: dict[str, list[str]] = defaultdict(list)
    for model in apps.get_app_config("django_mq").get_models():
        elsewhere[router.db_for_write(model)].append(model.__name__)
    home = _outbox(settings)
    elsewhere.pop(home, None)
    for alias, models in sorted(elsewhere.items()):
        yield checks.Error(
            f"The database router writes {', '.join(models)} to {alias!r},"
            f" but messages are kept in {home!r}.",
            hint="Let the router send the whole app django_mq to one alias,"
            " and DATABASE be that alias or None.",
            id="django_mq.E009",
        )


@_check(TAG)
def check_outbox_alias(settings: Settings, databases: Collection[str]) -> Found:
    """W001: messages beside the data they speak of."""
    alias = _outbox(settings)
    if alias != "default":
        yield checks.Warning(
            f"Messages are kept in {alias!r}: they do not commit together with data in 'default'.",
            hint="Keep them in the database of the data they are about, or silence this check.",
            id="django_mq.W001",
        )


@_check(TAG)
def check_wakeup(settings: Settings, databases: Collection[str]) -> Found:
    """W002: LISTEN through a pool or pooler. I001: no NOTIFY at all."""
    if settings.wakeup == "poll":
        yield checks.Info(
            f"WAKEUP is 'poll': a message may wait {settings.poll_interval:g} s before it is seen.",
            id="django_mq.I001",
        )
        return
    alias = _outbox(settings) if settings.wakeup == "notify" else settings.wakeup
    if not _is_postgresql(alias):
        return
    options = connections[alias].settings_dict
    signs = {
        "DISABLE_SERVER_SIDE_CURSORS": options.get("DISABLE_SERVER_SIDE_CURSORS"),
        "OPTIONS['pool']": options["OPTIONS"].get("pool"),
    }
    for sign in (sign for sign, is_set in signs.items() if is_set):
        yield checks.Warning(
            f"Workers LISTEN on {alias!r}, which is pooled ({sign} is set).",
            hint="Set WAKEUP to an alias that connects to the server directly, or to 'poll'.",
            id="django_mq.W002",
        )


@_check(TAG)
def check_handlers(settings: Settings, databases: Collection[str]) -> Found:
    """W003: atomic and non-atomic handlers share a queue."""
    names: dict[str, dict[bool, list[str]]] = defaultdict(lambda: {True: [], False: []})
    for handler in all_handlers():
        for queue in allowed_queues(handler, settings):
            names[queue][handler.atomic].append(handler.name)
    for queue, by_mode in sorted(names.items()):
        if by_mode[True] and by_mode[False]:
            yield checks.Warning(
                f"The queue {queue!r} has atomic handlers ({', '.join(by_mode[True])})"
                f" and others ({', '.join(by_mode[False])}): each slows the other down.",
                hint="Give the others a queue of their own: @handler(..., queue=...).",
                id="django_mq.W003",
            )


@_check(TAG, checks.Tags.security, deploy=True)
def check_deployment(settings: Settings, databases: Collection[str]) -> Found:
    """W005: what is kept for ever, or shown in full."""
    for name in ("result_retention", "attempt_retention"):
        if getattr(settings, name) is None:
            yield checks.Warning(
                f"{name.upper()} is None: its table grows for ever.",
                hint="Set a duration, or purge the table yourself and silence this check.",
                id="django_mq.W005",
            )
    if settings.redact is None:
        yield checks.Warning(
            "REDACT is None: secrets in payloads are shown to whoever may view payloads.",
            hint="Leave REDACT out to hide what Django hides, or extend that pattern.",
            id="django_mq.W005",
        )


@_check(TAG)
def check_slice(settings: Settings, databases: Collection[str]) -> Found:
    """W006: slices that are long against the lease."""
    leases = {"LEASE": settings.lease}
    for name, each in settings.queues.items():
        if each.lease != settings.lease:
            leases[f"QUEUES[{name!r}]['lease']"] = each.lease
    for where, lease in leases.items():
        if settings.slice_seconds * RENEWALS > lease:
            yield checks.Warning(
                f"SLICE_SECONDS ({settings.slice_seconds:g} s) is not well below"
                f" {where} ({lease:g} s).",
                hint=f"Keep it to a third of the lease at most, {lease / RENEWALS:g} s.",
                id="django_mq.W006",
            )


def _outbox(settings: Settings) -> str:
    """Return the alias that messages are kept in."""
    return settings.database or router.db_for_write(apps.get_model("django_mq", "QueuedMessage"))


def _is_postgresql(alias: str) -> bool:
    return alias in connections and connections[alias].vendor == "postgresql"


def _driver_version() -> str:
    try:
        import psycopg
    except ImportError:
        return "0 (none; psycopg2 does not do)"
    return psycopg.__version__
