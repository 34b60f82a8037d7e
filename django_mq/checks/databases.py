"""Checks of the database of the messages: its alias, its server, routers and poolers."""

from __future__ import annotations

from collections import defaultdict

from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, NotSupportedError, connections, router
from django.utils.version import get_version_tuple

from django_mq.checks.registering import TAG, CheckMessages, check, database_check
from django_mq.conf import Settings, alias_of, is_postgresql
from django_mq.policy.plain_text import one_line
from django_mq.store.driver import may_prepare
from django_mq.store.session_facts import is_pooled

MIN_SERVER_VERSION = 15
UPGRADE = f"Upgrade the server to PostgreSQL {MIN_SERVER_VERSION} or later."
#: Older versions lose a NOTIFY that arrives while another statement runs on the connection.
MIN_DRIVER_VERSION = (3, 2, 6)
#: The warning about an alias and its hint, which the doctor and workers show, too.
POOLED = "{!r} connects through a pooler, and workers use prepared statements."
POOLED_HINT = (
    "With transaction pooling, set DISABLE_SERVER_SIDE_CURSORS for this alias, and WAKEUP to 'poll'"
    " or to a direct alias; with session pooling, ignore this."
)


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


def _unfit(alias: str) -> str:
    """Say why the database of `alias` cannot have messages; empty if it can."""
    try:
        vendor = connections[alias].vendor
    except ImproperlyConfigured as error:  # Django imports the backend only now
        return f"whose backend cannot be loaded: {one_line(str(error.__cause__ or error), 200)}"
    return "" if vendor == "postgresql" else "which is not PostgreSQL"


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


def _driver_version() -> str:
    try:
        import psycopg
    except ImportError:
        return "0 (not installed; psycopg2 is not supported)"
    return psycopg.__version__


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
def check_router(settings: Settings) -> CheckMessages:
    """E009: the router sends some of our tables to another database than the messages."""
    elsewhere: dict[str, list[str]] = defaultdict(list)
    for model in apps.get_app_config("django_mq").get_models():
        elsewhere[router.db_for_write(model)].append(model.__name__)
    home = alias_of()
    elsewhere.pop(home, None)
    for alias, models in sorted(elsewhere.items()):
        yield checks.Error(
            f"The database router writes {', '.join(models)} to {alias!r},"
            f" but messages are stored in {home!r}.",
            hint="Route the whole app django_mq to one alias, and set DATABASE to that alias or"
            " None.",
            id="django_mq.E009",
        )


@check(TAG)
def check_migrations(settings: Settings) -> CheckMessages:
    """E009: the router lets some of our tables be created in other databases only.

    Aliases with the same NAME count as one database: migrations may run past a pooler. No error if
    no alias allows the migrations, since they may be run by another project.
    """
    home = alias_of()
    if home not in connections:
        return  # E002
    elsewhere: dict[str, list[str]] = defaultdict(list)
    for model in apps.get_app_config("django_mq").get_models():
        created = [alias for alias in connections if router.allow_migrate_model(alias, model)]
        names = {connections.settings[alias]["NAME"] for alias in created}
        if connections.settings[home]["NAME"] not in names:
            for alias in created:
                elsewhere[alias].append(model.__name__)
    for alias, models in sorted(elsewhere.items()):
        yield checks.Error(
            f"The database router lets the tables of {', '.join(models)} be created in {alias!r},"
            f" but not in {home!r}, where messages are stored.",
            hint=f"Let its allow_migrate() return True or None for django_mq in {home!r}, or set"
            f" DATABASE to {alias!r}.",
            id="django_mq.E009",
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


@database_check
def check_pooler(alias: str) -> CheckMessages:
    """W007: the settings for a pooler are missing."""
    if not may_prepare(connections[alias]):
        return
    try:
        connections[alias].ensure_connection()
    except DatabaseError as error:
        yield checks.Warning(
            f"Cannot find out whether {alias!r} connects through a pooler:"
            f" {one_line(str(error), 200)}",
            hint="Check that the server runs and that HOST, PORT, USER and PASSWORD are right.",
            id="django_mq.W007",
        )
        return
    with connections[alias].wrap_database_errors:
        pooled = is_pooled(connections[alias].connection)
    if pooled:
        yield checks.Warning(POOLED.format(alias), hint=POOLED_HINT, id="django_mq.W007")
