"""A server that takes long to settle or commit: slices grow all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from django_mq import handler
from django_mq.messages import Delivery
from tests.database import second_connection
from tests.slow import slow
from tests.worker.conftest import Start, add_many, waiting

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def settled(settings: Any) -> Iterator[str]:
    """Let every statement that removes messages take longer than SLICE_SECONDS, and count them."""
    settings.DJANGO_MQ = {"SLICE_SECONDS": 0.2}
    with second_connection() as other:
        other.execute("""
            create sequence settled;
            create function slow_settle() returns trigger language plpgsql as $$
            begin
                if exists (select from removed) then
                    perform nextval('settled'), pg_sleep(0.22);
                end if;
                return null;
            end $$;
            create trigger slow_settle after delete on django_mq_queuedmessage
                referencing old table as removed for each statement execute function slow_settle();
        """)
        yield "select last_value from settled"
        other.execute("drop function slow_settle() cascade; drop sequence settled")


@pytest.mark.parametrize("uses", [True, *slow(False)], ids=["uses-the-connection", "uses-nothing"])
def test_a_slow_settle_does_not_make_slices_small(start: Start, settled: str, uses: bool) -> None:
    """A settle takes as long for one message as for a hundred."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if uses:
            connection.cursor().execute("select 1")

    add_many(64, handler="h")
    assert start(until_empty=True, threads=1).join()
    assert waiting() == set()
    with second_connection() as other:
        (settles,) = other.execute(settled).fetchone() or ()
    # 1 + 2 + 4 ... messages make 7; one by one it would be 64. On a busy machine, handlers may take
    # longer than SLICE_SECONDS.
    assert settles < 50
