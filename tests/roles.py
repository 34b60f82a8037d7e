"""Database roles for the length of a test: made and granted in its transaction, undone with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connection, transaction


def make_role(name: str, *grants: str) -> str:
    """Make a role with these grants alone; `{role}` in them is its name."""
    with connection.cursor() as cursor:
        cursor.execute("select rolcreaterole or rolsuper from pg_roles where rolname = user")
        if not cursor.fetchone()[0]:
            pytest.skip("the login of the test database may not create roles")
        cursor.execute(f"create role {name}")
        for grant in grants:
            cursor.execute(grant.replace("{role}", name))
    return name


@contextmanager
def acting_as(role: str) -> Iterator[None]:
    """Run Django's statements as `role`, behind a savepoint, so that a refusal spoils nothing."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"set local role {role}")
        yield
        cursor.execute("reset role")
