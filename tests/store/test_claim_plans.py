"""Claims take no more than requested, under any plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_mq.store.claim import CLAIM, Lane, lane_columns
from django_mq.store.claim_lapsed import CLAIM_LAPSED
from tests.slow import mostly_slow
from tests.store.claiming import Cursor, take
from tests.store.conftest import take_lapsed
from tests.store.plans import generic_plan, plan

pytestmark = pytest.mark.django_db(transaction=True)


HOSTILE = [
    "enable_hashjoin",
    "enable_nestloop",
    "enable_indexscan",
    "enable_mergejoin",
    "enable_material",
    "enable_sort",
    "enable_seqscan",
]


@pytest.mark.parametrize(
    ("off", "mode"),
    mostly_slow(
        [[], *[[name] for name in HOSTILE[:4]], HOSTILE[:3], HOSTILE],
        ["force_custom_plan", "force_generic_plan"],
    ),
)
def test_a_batch_is_never_exceeded_whatever_the_plan(
    cursor: Cursor, off: list[str], mode: str
) -> None:
    """Guarantee 15: with hash joins off one statement of a naive form took 19,490 rows."""
    cursor.execute(
        "insert into django_mq_queuedmessage (queue, type, payload, priority, processable_after)"
        " select 'mail', 'a', '\"12345678\"', n % 3, now() - interval '1 h' + n * interval '1 ms'"
        " from generate_series(1, 300) n"
    )
    cursor.execute("analyze django_mq_queuedmessage")
    for name in [*off, "enable_indexonlyscan", "enable_bitmapscan"] if off else []:
        cursor.execute(f"set {name} = off")
    cursor.execute(f"set plan_cache_mode = {mode}")
    cursor.connection.prepare_threshold = 0
    lanes = [Lane("mail", 2), Lane("mail", 1), Lane("mail", 0)]
    seen: set[int] = set()
    priorities: list[int] = []
    for limit, max_bytes, maximum in ((7, 1000, 7), (7, 30, 3), (1, 1, 1), (120, 10_000, 120)):
        rows = take(cursor, *lanes, limit=limit, max_bytes=max_bytes).rows
        assert len(rows) == maximum
        assert seen.isdisjoint(row.id for row in rows)
        seen.update(row.id for row in rows)
        priorities += [row.priority for row in rows]
    cursor.execute("select count(*) from django_mq_queuedmessage where leased_until is not null")
    assert cursor.fetchone() == (131,)
    assert priorities == [2] * 100 + [1] * 31
    cursor.execute("update django_mq_queuedmessage set leased_until = now() - interval '1 s'"
                   " where leased_until is not null")  # fmt: skip
    assert len(take_lapsed(cursor, limit=5).taken) == 5


@pytest.fixture
def crowd(cursor: Cursor) -> Cursor:
    """Many rows of each kind, so that a bad plan shows."""
    cursor.execute(
        """
        insert into django_mq_queuedmessage
               (queue, type, payload, processable_after, leased_until, claimed_by, dead_at)
        select 'q' || n % 20, 'a', '{}', now() + (n - 10000) * interval '1 s',
               case when n % 100 = 0 then now() end, case when n % 100 = 0 then 'x:1' end,
               case when n % 3 = 0 and n % 100 <> 0 then now() end
          from generate_series(1, 20000) n
        """
    )
    cursor.execute("analyze django_mq_queuedmessage")
    return cursor


@pytest.mark.parametrize("explain", [plan, generic_plan])
def test_the_plan_of_a_claim_names_its_index(crowd: Cursor, explain: Callable[..., str]) -> None:
    text = explain(
        crowd,
        CLAIM,
        **lane_columns([Lane("q1", 0), Lane("q2", 0)]),
        claimers="{me:1}",
        per_claimer=100,
        lease=30.0,
        limit=100,
        bytes=1 << 20,
        admitted=False,
        nonatomic="{}",
    )
    assert "Index Scan using mq_claim" in text or "Bitmap Index Scan on mq_claim" in text
    assert "Seq Scan on django_mq_queuedmessage" not in text


@pytest.mark.parametrize("explain", [plan, generic_plan])
def test_the_plan_for_lapsed_rows_names_its_index(
    crowd: Cursor, explain: Callable[..., str]
) -> None:
    params = {
        "queues": ["q1", "q2"],
        "ats": [float("-inf")] * 2,
        "ids": [0, 0],
        "limit": 100,
        "window": 100,
    }
    params.update(claimer="me:1", lease=30.0, nonatomic="{}")
    params |= {"bytes": 4 << 20, "skip_dead": False, "admitted": False, "suspects": True}
    text = explain(crowd, CLAIM_LAPSED, **params)
    assert "mq_lease" in text
    assert "Seq Scan on django_mq_queuedmessage" not in text
