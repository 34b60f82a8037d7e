"""Only logins that may vacuum the tables try to: each refused try is a warning."""

from __future__ import annotations

import psycopg
import pytest
from django.db import connection

from django_mq.store import vacuum
from tests.roles import acting_as, make_role

BOTH = set(vacuum.VACUUM)


def tables() -> set[str]:
    """Return the tables that this login may vacuum, by its own answer."""
    with connection.cursor() as cursor:
        return {table for table, each in vacuum.versions(cursor).items() if each.may_vacuum}


def server_says() -> set[str]:
    """Return them by the server's answer: it warns of tables it may not vacuum, and skips them."""
    refused: list[str] = []

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        refused.append(str(diagnostic.message_primary))

    driver = connection.connection
    driver.add_notice_handler(note)
    try:
        # ANALYZE needs the same right, and may run in a transaction.
        for table in BOTH:
            driver.execute(f"analyze {table}")
    finally:
        driver.remove_notice_handler(note)
    return {table for table in BOTH if not any(f'"{table}"' in text for text in refused)}


@pytest.mark.django_db
class TestWho:
    def test_a_login_that_may_only_read_and_write(self) -> None:
        role = make_role("mq_test_writer", *(f"grant all on {each} to {{role}}" for each in BOTH))
        if connection.pg_version >= 170000:
            with connection.cursor() as cursor:
                cursor.execute(f"revoke maintain on {', '.join(BOTH)} from {role}")
        with acting_as(role):
            assert tables() == server_says() == set()

    def test_a_login_with_maintain(self) -> None:
        if connection.pg_version < 170000:
            pytest.skip("PostgreSQL 17 is the first with this privilege")
        role = make_role("mq_test_keeper", "grant maintain on django_mq_uniquekey to {role}")
        with acting_as(role):
            assert tables() == server_says() == {"django_mq_uniquekey"}

    def test_the_owner_of_the_tables(self) -> None:
        role = make_role(
            "mq_test_owner", *(f"alter table {each} owner to {{role}}" for each in BOTH)
        )
        member = make_role("mq_test_member", f"grant {role} to {{role}}")
        for each in (role, member):
            with acting_as(each):
                assert tables() == server_says() == BOTH

    def test_the_owner_of_the_database(self) -> None:
        name = connection.settings_dict["NAME"]
        role = make_role("mq_test_host", f'alter database "{name}" owner to {{role}}')
        with acting_as(role):
            assert tables() == server_says() == BOTH
