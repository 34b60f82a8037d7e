"""A pooler between the workers and the server, of which Django's settings say nothing."""

from __future__ import annotations

from django.core import checks
from django.db import DatabaseError, connections

from django_mq.checks.registering import CheckMessages, database_check
from django_mq.policy.plain_text import one_line
from django_mq.store.driver import may_prepare
from django_mq.store.session_facts import is_pooled

#: The warning about an alias and its hint, which the doctor and workers show, too.
POOLED = "{!r} connects through a pooler, and workers use prepared statements."
POOLED_HINT = (
    "With transaction pooling, set DISABLE_SERVER_SIDE_CURSORS for this alias, and WAKEUP to 'poll'"
    " or to a direct alias; with session pooling, ignore this."
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
            f" {one_line(str(error), 200)}.",
            hint="Check that the server runs and that HOST, PORT, USER and PASSWORD are right.",
            id="django_mq.W007",
        )
        return
    with connections[alias].wrap_database_errors:
        pooled = is_pooled(connections[alias].connection)
    if pooled:
        yield checks.Warning(POOLED.format(alias), hint=POOLED_HINT, id="django_mq.W007")
