"""Migrations, indexes, rights, the encoding, read-only sessions, and formats of values."""

from __future__ import annotations

from collections.abc import Iterator

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import BigAutoField, Index, Model, UniqueConstraint

from django_mq.models import (
    FailedAttempt,
    HandledMessage,
    Operation,
    QueuedMessage,
    QueueState,
    Result,
    Schedule,
)
from django_mq.queues.doctor.findings import Finding, own_tables, short_cursor
from django_mq.store import server_facts

ALL = ("select", "insert", "update", "delete")
#: The tables on which workers need fewer rights, like the role in docs/roles.md.
NARROWER_RIGHTS: dict[type[Model], tuple[str, ...]] = {
    FailedAttempt: ("select", "insert", "delete"),
    HandledMessage: ("select", "insert", "delete"),
    Operation: ("select", "insert", "update"),
    QueueState: ("select", "insert", "update"),
    Schedule: ("select", "insert", "update"),
}
#: The hint if no table exists: usually a router has refused them all.
NO_TABLES = (
    "If '{0}' is not the alias of the messages, name theirs: --database. If it is, let the"
    " allow_migrate() of each router accept django_mq there, then run manage.py migrate django_mq"
    " zero --fake --database {0} and manage.py migrate django_mq --database {0}."
)

#: Where ids of messages remain after the message, with an index on each.
ENDED_MESSAGES = ((FailedAttempt, "message_id"), (HandledMessage, "id"), (Result, "message_id"))


def unapplied_migrations(connection: BaseDatabaseWrapper) -> list[str]:
    """Return the names of the migrations of django_mq that have not been applied."""
    executor = MigrationExecutor(connection)
    app = [key for key in executor.loader.graph.leaf_nodes() if key[0] == "django_mq"]
    return [
        migration.name
        for migration, _ in executor.migration_plan(app)
        if migration.app_label == "django_mq"
    ]


def migrate_command(alias: str) -> str:
    """Return the command that migrates `alias`; Django's own default is not the DATABASE setting.

    >>> migrate_command("default"), migrate_command("other")
    ('manage.py migrate', 'manage.py migrate --database other')
    """
    return "manage.py migrate" + ("" if alias == DEFAULT_DB_ALIAS else f" --database {alias}")


def migrations(alias: str) -> Iterator[Finding]:
    """D002: the tables are older than the code, or missing."""
    with short_cursor(alias) as cursor:
        unapplied = unapplied_migrations(connections[alias])
        missing = server_facts.missing_tables(cursor, tables=own_tables())
    if unapplied:
        yield Finding(
            id="D002",
            level="error",
            text=f"Migrations have not been applied: {', '.join(unapplied)}.",
            hint=f"Run {migrate_command(alias)}.",
        )
    elif missing:
        # migrate records a migration also where a router refused its tables.
        yield Finding(
            id="D002",
            level="error",
            text="Migrations are recorded as applied, but these tables do not exist:"
            f" {', '.join(missing)}.",
            hint=NO_TABLES.format(alias)
            if missing == sorted(own_tables())
            else "Restore them from a backup, or create them as the migrations do: manage.py"
            " sqlmigrate django_mq shows the statements of a migration.",
        )


def indexes(alias: str) -> Iterator[Finding]:
    """D003: an index is missing, or a failed CREATE INDEX CONCURRENTLY left it invalid."""
    with short_cursor(alias) as cursor:
        found = server_facts.indexes(cursor, tables=own_tables())
    for name, table in sorted(_declared_indexes().items()):
        valid = found[table].get(name) if table in found else True  # D002 reports the table
        if not valid:
            invalid = valid is not None
            yield Finding(
                id="D003",
                level="error",
                text=f"The index {name} of {table} is {'invalid' if invalid else 'missing'}.",
                hint=f"Run REINDEX INDEX CONCURRENTLY {name}."
                if invalid
                else "Create it as the migration does: manage.py sqlmigrate django_mq 0001 shows"
                " the statement.",
            )


def _declared_indexes() -> dict[str, str]:
    """Return the table of each index that the models declare."""
    return {
        each.name: model._meta.db_table
        for model in apps.get_app_config("django_mq").get_models()
        for each in (*model._meta.indexes, *model._meta.constraints)
        if isinstance(each, Index | UniqueConstraint)
    }


def rights(alias: str) -> Iterator[Finding]:
    """D004: this login lacks rights that a worker needs."""
    models = list(apps.get_app_config("django_mq").get_models())
    needed = {model._meta.db_table: NARROWER_RIGHTS.get(model, ALL) for model in models}
    needed[MigrationRecorder.Migration._meta.db_table] = ("select",)
    with short_cursor(alias) as cursor:
        missing = server_facts.missing_rights(
            cursor, needed, sequences_of=[each._meta.db_table for each in models]
        )
    if missing:
        listed = "; ".join(f"{', '.join(rights)} on {name}" for name, rights in missing.items())
        yield Finding(
            id="D004",
            level="error",
            text=f"This login lacks rights that a worker needs: {listed}.",
            hint="Grant them: see 'Database roles' in the documentation. Or run mq_doctor with the"
            " workers' login.",
        )


def row_security(alias: str) -> Iterator[Finding]:
    """D030: policies may hide rows from a worker, without any error."""
    with short_cursor(alias) as cursor:
        found = server_facts.secured_tables(cursor, tables=own_tables())
    if found:
        yield Finding(
            id="D030",
            level="error",
            text=f"Row-level security applies to this login on {', '.join(found)}: a worker with it"
            " does not see the rows that no policy admits.",
            hint="Let the workers' login own the tables, give it BYPASSRLS, or create a policy that"
            " admits all rows for it and leave this finding out (--ignore D030). Or run mq_doctor"
            " with the workers' login.",
        )


def sequences(alias: str) -> Iterator[Finding]:
    """D029: a sequence gives ids that are in use, as after a switch to a logical replica."""
    models = apps.get_app_config("django_mq").get_models()
    tables = [each._meta.db_table for each in models if isinstance(each._meta.pk, BigAutoField)]
    ids = {table: [(table, "id")] for table in tables}
    ids[QueuedMessage._meta.db_table] += [
        (model._meta.db_table, column) for model, column in ENDED_MESSAGES
    ]
    with short_cursor(alias) as cursor:
        found = server_facts.sequences_behind(cursor, ids)
    for each in found:
        yield Finding(
            id="D029",
            level="error",
            text=f"The next id of {each.table} is {each.next:,}, but ids up to {each.highest:,} are"
            " in use: rows with an id that is taken are refused, such as broadcasts and failed"
            " attempts.",
            hint="Logical replication and copies of rows leave sequences behind. Run select"
            f" setval(pg_get_serial_sequence('{each.table}', 'id'), {each.highest}); if other"
            " services have seen later message ids, add a gap: see 'Disaster recovery' in the"
            " documentation.",
        )


def encoding(alias: str) -> Iterator[Finding]:
    """D021: the database cannot store every character.

    A payload with another character aborts the producer's transaction, and an error text with one
    cannot be stored. SQL_ASCII stores any bytes.
    """
    with short_cursor(alias) as cursor:
        name = server_facts.encoding(cursor)
    if name not in ("UTF8", "SQL_ASCII"):
        yield Finding(
            id="D021",
            level="warning",
            text=f"The database's encoding is {name}: it refuses messages and error texts with"
            " characters that this encoding lacks.",
            hint="Move the data to a database with the encoding UTF8, which Django expects too.",
        )


def read_only(alias: str) -> Iterator[Finding]:
    """D022: nothing can be written: no message is stored, and no worker claims any."""
    with short_cursor(alias) as cursor:
        is_standby, by_default = server_facts.read_only(cursor)
    if is_standby:
        yield Finding(
            id="D022",
            level="error",
            text="The server is a standby, which is read only.",
            hint="Connect to the primary, for example with target_session_attrs=read-write in"
            f" OPTIONS of {alias!r}. Other findings may be out of date: a standby that lags shows"
            " live workers as gone.",
        )
    elif by_default:
        yield Finding(
            id="D022",
            level="error",
            text="Transactions of this login are read only: default_transaction_read_only is on.",
            hint="Turn it off where it is set: for the role, the database or the server, or in"
            f" OPTIONS of {alias!r}.",
        )


def formats(alias: str) -> Iterator[Finding]:
    """D023: values do not pass unchanged between the driver and this login's sessions."""
    with short_cursor(alias) as cursor:
        found = server_facts.formats(cursor)
    texts = []
    if not found.date_style.startswith("ISO"):
        texts.append(
            f"The DateStyle of this login is {found.date_style!r}: the driver, and so Django, reads"
            " times only with ISO."
        )
    if found.float_digits < 0:
        texts.append(
            f"extra_float_digits of this login is {found.float_digits}: the server rounds numbers,"
            " so times that workers read are wrong."
        )
    if not found.array_nulls:
        texts.append(
            "array_nulls of this login is off: the server misreads lists with nulls, so workers"
            " cannot record failed attempts."
        )
    hint = "Change it where it is set: for the role, the database or the server, or in OPTIONS of"
    for text in texts:
        yield Finding(id="D023", level="error", text=text, hint=f"{hint} {alias!r}.")
