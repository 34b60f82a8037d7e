"""System checks: find wrong or unwise settings before a worker starts.

All run with `manage.py check --database ALIAS`; checks that need no connection also run with `--tag
django_mq`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, NotSupportedError, connections
from django.utils.version import get_version_tuple

from django_mq.checks import (  # noqa: F401  (they register)
    message_classes,
    misspelt,
    pooler,
    routers,
)
from django_mq.checks.registering import TAG, CheckMessages, check, database_check
from django_mq.conf import Settings, alias_of, find_errors, is_postgresql
from django_mq.conf.broker_options import missing_package
from django_mq.handlers import all_handlers, allowed_queues
from django_mq.handlers.periodic import problems
from django_mq.policy.plain_text import one_line

MIN_SERVER_VERSION = 15
UPGRADE = f"Upgrade the server to PostgreSQL {MIN_SERVER_VERSION} or later."
#: Older versions lose a NOTIFY that arrives while another statement runs on the connection.
MIN_DRIVER_VERSION = (3, 2, 6)
#: A lease is renewed after a third of its length; a slice that lasts longer misses a renewal.
RENEWALS = 3


@checks.register(TAG)
def check_settings(app_configs: object, **kwargs: Any) -> list[checks.CheckMessage]:
    """E001: an unknown or invalid setting."""
    return [
        checks.Error(f"{error.where} {error.problem}", hint=error.hint, id="django_mq.E001")
        for error in find_errors(getattr(django_settings, "DJANGO_MQ", {}))
    ]


@check(TAG)
def check_aliases(settings: Settings) -> CheckMessages:
    """E002: an alias that is missing, not PostgreSQL, or unusable. Opens no connection."""
    used = {alias_of(): "DATABASE" if settings.database else "The database router"}
    if settings.wakeup not in ("notify", "poll"):
        used.setdefault(settings.wakeup, "WAKEUP ('notify', 'poll' or an alias)")
    for alias, source in used.items():
        if alias not in connections:
            yield checks.Error(
                f"{source} names the database {alias!r}, which is not in DATABASES.",
                hint=f"Use one of the aliases in DATABASES: {', '.join(map(repr, connections))}.",
                id="django_mq.E002",
            )
        elif problem := _unfit(alias):
            yield checks.Error(
                f"{source} names the database {alias!r}, {problem}.",
                hint="Messages need PostgreSQL: name an alias whose ENGINE is one for PostgreSQL.",
                id="django_mq.E002",
            )


@database_check
def check_versions(alias: str) -> CheckMessages:
    """E003: a server or driver that is too old, or no server."""
    driver = _driver_version()
    if get_version_tuple(driver) < MIN_DRIVER_VERSION:
        yield checks.Error(
            f"The installed psycopg version is {driver}; django_mq needs 3.2.6 or later.",
            hint='Install "psycopg>=3.2.6".',
            id="django_mq.E003",
        )
    try:
        server = connections[alias].pg_version // 10000  # type: ignore[attr-defined]
    except DatabaseError as error:
        yield checks.Error(
            f"The database {alias!r} cannot be used: {one_line(str(error))}",
            hint=UPGRADE
            if isinstance(error, NotSupportedError)
            else "Start its server, or correct HOST, PORT, NAME, USER and PASSWORD of the alias.",
            id="django_mq.E003",
        )
        return
    if server < MIN_SERVER_VERSION:
        yield checks.Error(
            f"The database {alias!r} runs PostgreSQL {server}, which django_mq does not support.",
            hint=UPGRADE,
            id="django_mq.E003",
        )


@check(TAG)
def check_autocommit(settings: Settings) -> CheckMessages:
    """E013: without autocommit, nobody commits what a worker writes between transactions."""
    alias = alias_of()
    if is_postgresql(alias) and not connections[alias].settings_dict["AUTOCOMMIT"]:
        yield checks.Error(
            f"AUTOCOMMIT is off for the database {alias!r}: a worker could not commit its work.",
            hint="Remove AUTOCOMMIT from this alias and use transaction.atomic(), or set DATABASE"
            " to an alias without it.",
            id="django_mq.E013",
        )


@check(TAG)
def check_packages(settings: Settings) -> CheckMessages:
    """E007: the package for a kind of broker is not installed."""
    brokers = [(f"['RELAYS'][{name!r}]", each.kind) for name, each in settings.relays.items()]
    brokers += [(f"['INBOXES'][{name!r}]", each.kind) for name, each in settings.inboxes.items()]
    for where, kind in brokers:
        if missing := missing_package(kind):
            yield checks.Error(
                f"DJANGO_MQ{where} is of the kind {kind!r}, and {missing}.", id="django_mq.E007"
            )


@check(TAG)
def check_encoder(settings: Settings) -> CheckMessages:
    """E008: ENCODER cannot be imported or is not an encoder class."""
    try:
        settings.encoder_class  # noqa: B018  (the property imports it)
    except ImproperlyConfigured as error:
        hint = "Set ENCODER to the dotted path of a JSONEncoder class."
        yield checks.Error(str(error), hint=hint, id="django_mq.E008")


@check(TAG)
def check_schedules(settings: Settings) -> CheckMessages:
    """E010: a declared schedule that cannot run."""
    for name, problem in problems(settings):
        yield checks.Error(
            f"The schedule {name!r} cannot run: {problem}.",
            hint="Correct its periodic(...) or @handler(..., cron=...) in handlers.py.",
            id="django_mq.E010",
        )


@check(TAG)
def check_outbox_alias(settings: Settings) -> CheckMessages:
    """W001: messages are in another database than the data that they concern."""
    alias = alias_of()
    if alias != "default":
        yield checks.Warning(
            f"Messages are stored in {alias!r}, so they do not commit together with data in"
            " 'default'.",
            hint="Store messages in the same database as the data they concern, or silence this"
            " check.",
            id="django_mq.W001",
        )


@check(TAG)
def check_wakeup(settings: Settings) -> CheckMessages:
    """W002: LISTEN through a pooler. I001: no NOTIFY.

    Django's own pool does not count as one: workers and waiters LISTEN on plain connections.
    """
    alias = settings.listen_alias(alias_of())
    if alias is None:
        yield checks.Info(
            "WAKEUP is 'poll', so a message may wait up to POLL_INTERVAL"
            f" ({settings.poll_interval:g} s) before a worker sees it.",
            id="django_mq.I001",
        )
        return
    if not is_postgresql(alias):
        return
    if connections[alias].settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
        yield checks.Warning(
            f"Workers LISTEN on {alias!r}, which seems to be behind a transaction pooler:"
            " DISABLE_SERVER_SIDE_CURSORS is set.",
            hint="Set WAKEUP to an alias that connects to the server directly, or to 'poll'.",
            id="django_mq.W002",
        )


@check(TAG)
def check_handlers(settings: Settings) -> CheckMessages:
    """W003: atomic and non-atomic handlers share a queue."""
    names: dict[str, dict[bool, list[str]]] = defaultdict(lambda: {True: [], False: []})
    for handler in all_handlers():
        if not handler.patterns:
            continue  # a task: the code that enqueues it chooses the queue
        for queue in allowed_queues(handler, settings):
            names[queue][handler.atomic].append(handler.name)
    for queue, by_mode in sorted(names.items()):
        if by_mode[True] and by_mode[False]:
            yield checks.Warning(
                f"The queue {queue!r} has both atomic handlers ({', '.join(by_mode[True])}) and"
                f" non-atomic ones ({', '.join(by_mode[False])}), which slow each other down.",
                hint="Move the non-atomic handlers to a queue of their own:"
                " @handler(..., queue=...).",
                id="django_mq.W003",
            )


@check(TAG, checks.Tags.security, deploy=True)
def check_deployment(settings: Settings) -> CheckMessages:
    """W005: rows are kept for ever, or payloads are shown in full. W011: retries without a wait."""
    for name in ("result_retention", "attempt_retention"):
        if getattr(settings, name) is None:
            yield checks.Warning(
                f"{name.upper()} is None, so its table grows without bound.",
                hint="Set a duration, or delete old rows yourself and silence this check.",
                id="django_mq.W005",
            )
    if settings.redact is None:
        yield checks.Warning(
            "REDACT is None, so every user who may view payloads sees the secrets in them.",
            hint="Remove REDACT to hide the keys that Django hides, or set a pattern of your own.",
            id="django_mq.W005",
        )
    if settings.retry_floor == 0:
        yield checks.Warning(
            "RETRY_FLOOR is 0, so a failing message whose policy does not wait runs in a tight"
            " loop, and logs as fast.",
            hint="Remove RETRY_FLOOR, or set the shortest wait that you can bear, such as 0.01.",
            id="django_mq.W011",
        )


@check(TAG)
def check_slice(settings: Settings) -> CheckMessages:
    """W006: slices are too long for the lease."""
    leases = {"LEASE": settings.lease}
    for name, each in settings.queues.items():
        if each.lease != settings.lease:
            leases[f"QUEUES[{name!r}]['lease']"] = each.lease
    for where, lease in leases.items():
        if settings.slice_seconds * RENEWALS > lease:
            yield checks.Warning(
                f"SLICE_SECONDS ({settings.slice_seconds:g} s) is too long for {where}"
                f" ({lease:g} s): a slice may outlast a renewal of the lease.",
                hint=f"Set SLICE_SECONDS to a third of the lease or less: {lease / RENEWALS:g} s.",
                id="django_mq.W006",
            )


def _unfit(alias: str) -> str:
    """Say why the database of `alias` cannot have messages; empty if it can."""
    try:
        vendor = connections[alias].vendor
    except ImproperlyConfigured as error:  # Django imports the backend only now
        return f"whose backend cannot be loaded: {one_line(str(error.__cause__ or error), 200)}"
    return "" if vendor == "postgresql" else "which is not PostgreSQL"


def _driver_version() -> str:
    try:
        import psycopg
    except ImportError:
        return "0 (not installed; psycopg2 is not supported)"
    return psycopg.__version__
