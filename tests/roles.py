"""Database roles for the length of a test: created in its transaction, and undone with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.db import connection, transaction

#: The page with the SQL that users run.
PAGE = Path(__file__).resolve().parent.parent / "docs/roles.md"


def documented() -> list[str]:
    """Return the page's SQL, without the parts that need a newer server."""
    blocks = re.findall(r"^```sql\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    version = connection.pg_version // 10000

    def fits(block: str) -> bool:
        since = re.match(r"-- PostgreSQL (\d+) and newer\n", block)
        return since is None or version >= int(since[1])

    return [block for block in blocks if fits(block)]


def documented_names() -> list[str]:
    return re.findall(r"^create role (\w+);", PAGE.read_text(), re.MULTILINE)


def skip_unless_able() -> None:
    """Skip the test if the login of the test database may not create roles."""
    with connection.cursor() as cursor:
        cursor.execute("select rolcreaterole or rolsuper from pg_roles where rolname = user")
        if not cursor.fetchone()[0]:
            pytest.skip("the login of the test database may not create roles")


def make_role(name: str, *grants: str) -> str:
    """Make a role with only these grants; `{role}` in them is its name."""
    skip_unless_able()
    with connection.cursor() as cursor:
        cursor.execute(f"create role {name}")
        for grant in grants:
            cursor.execute(grant.replace("{role}", name))
    return name


@contextmanager
def acting_as(role: str) -> Iterator[None]:
    """Run Django's statements as `role`, behind a savepoint, so that a refusal breaks nothing."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"set local role {role}")
        yield
        cursor.execute("reset role")
