"""The rows that claims leave out: their number and the length of a search are bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import pytest
from psycopg.errors import CheckViolation

from django_mq.store import Cursor
from django_mq.worker import refused_rows
from django_mq.worker.refused_rows import LEAVE_OUT_SECONDS, RefusedRows
from tests.database import second_connection

pytestmark = pytest.mark.django_db(transaction=True)

#: Claims rows of which the database refuses these; it leaves out those of the first argument.
Claim = Callable[[RefusedRows, set[int]], None]


@pytest.fixture
def claim(monkeypatch: pytest.MonkeyPatch) -> Claim:
    def claim(rows: RefusedRows, refused: set[int]) -> None:
        def update(ids: set[int]) -> None:
            if ids & refused:
                raise CheckViolation("no")

        def try_claim(cursor: Cursor, ids: Sequence[int]) -> None:
            update(set(ids))

        monkeypatch.setattr(refused_rows.refused_rows, "try_claim", try_claim)
        with second_connection() as own, own.cursor() as cursor:
            rows.claim_without_refused(
                cursor,
                lambda: update(refused - set(rows.ids())),
                lambda *, excluded: dict.fromkeys(refused - set(excluded), "mail"),
            )

    return claim


def test_so_many_rows_are_left_out_at_most(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more, it is no matter of single rows: the error is raised."""
    monkeypatch.setattr(refused_rows, "MAX_LEFT_OUT", 2)
    rows = RefusedRows()
    with pytest.raises(CheckViolation):
        claim(rows, {1, 2, 3})
    assert len(rows.ids()) == 2


def test_a_search_without_time_finds_nothing(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_rows, "SEARCH_SECONDS", 0.0)
    rows = RefusedRows()
    with pytest.raises(CheckViolation):
        claim(rows, {1})
    assert not rows.ids()


def test_the_time_of_all_searches_is_added_up(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan takes what is left: without that, each search would put off the next full scan."""
    ticks = count()
    monkeypatch.setattr(refused_rows, "perf_counter", lambda: float(next(ticks)))
    rows = RefusedRows()
    claim(rows, {1})
    claim(rows, {1, 2})
    assert rows.searched_for == 2.0


def test_ever_new_rows_take_no_ever_more_memory(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(refused_rows, "monotonic", lambda: now)
    monkeypatch.setattr(refused_rows, "MAX_LEFT_OUT", 2)
    rows = RefusedRows()
    for id in range(1, 6):
        claim(rows, {id})
        now += LEAVE_OUT_SECONDS
        assert not rows.ids()
        assert len(rows._reported_at) <= 2
