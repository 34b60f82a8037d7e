"""Long lines of a key, and the plans of a keyed claim."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_mq.executor.statements import ONE_PLAN
from django_mq.models import QueuedMessage
from django_mq.store import claim_keyed as with_keys
from django_mq.store import key_lines
from django_mq.store.claim_lines import CLAIM_LINES, CLAIM_UNLOCKED_LINES
from django_mq.store.key_lines import LOCK_LINES, LOCK_UNLOCKED_LINES
from tests.rows import pks
from tests.slow import mostly_slow
from tests.store.keyed import Cursor, ack, claim_params, ids, keyed, line_params, take
from tests.store.plans import generic_plan, plan, touched_pages

pytestmark = pytest.mark.django_db(transaction=True)


# ---- long lines


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(with_keys, "WINDOW", 10)
    return 10


def test_a_long_line_is_parked_out_of_the_way(cursor: Cursor, small_window: int) -> None:
    """A million messages of one key do not slow the others: a claim looks at `WINDOW` rows."""
    long = [keyed("long", after=-60) for _ in range(30)]
    other = keyed("other", after=-1)
    order: list[int] = []
    claims = 0
    while claimed := take(cursor, limit=4):
        if not claimed.rows:
            break
        claims += 1
        if other.pk in ids(claimed):
            assert claims <= 4  # three windows come before it
        order += [id for id in ids(claimed) if id != other.pk]
        ack(cursor, claimed)
    assert order == pks(*long)
    assert QueuedMessage.objects.count() == 0


def test_another_is_reached_while_a_long_line_runs(cursor: Cursor, small_window: int) -> None:
    """Its first message is in flight for long: the followers are parked, window by window."""
    [head, *_] = [keyed("long", after=-60) for _ in range(30)]
    other = keyed("other", after=-1)
    assert ids(take(cursor, limit=1)) == [head.pk]
    found: list[int] = []
    for _ in range(4):
        found += ids(take(cursor, limit=4))
    assert found == [other.pk]


# ---- the plan


@pytest.fixture
def crowd(cursor: Cursor) -> Cursor:
    """Many keys, one of them with a dead head and a long line behind it."""
    cursor.execute(
        """
        insert into django_mq_queuedmessage
               (queue, type, handler, key, payload, processable_after, leased_until, claimed_by,
                dead_at)
        select 'mail', 'a', 'h', case when n <= 20000 then 'long' else 'k' || n % 1000 end, '{}',
               now() - interval '1 h' + n * interval '1 ms',
               case when n % 1000 = 999 then now() + interval '1 h' end,
               case when n % 1000 = 999 then 'x:1' end,
               case when n = 1 then now() end
          from generate_series(1, 22000) n
        """
    )
    cursor.execute("update django_mq_queuedmessage set leased_until = null, claimed_by = null"
                   " where key = 'long'")  # fmt: skip
    cursor.execute("analyze django_mq_queuedmessage")
    return cursor


LOCKS, CLAIMS = (LOCK_LINES, LOCK_UNLOCKED_LINES), (CLAIM_LINES, CLAIM_UNLOCKED_LINES)


@pytest.mark.parametrize(
    ("statement", "explain", "setting"),
    mostly_slow([*LOCKS, *CLAIMS], [plan, generic_plan], ["", ONE_PLAN]),
    ids=lambda each: each[:12] if isinstance(each, str) else None,
)
def test_the_plans_of_a_claim_name_their_indexes(
    crowd: Cursor, statement: str, explain: Callable[..., str], setting: str
) -> None:
    if setting:
        crowd.execute(setting)
    params = claim_params(window=100)  # a scan of this table may well find a whole window
    if statement in CLAIMS:
        lines = [("mail", "h", key, n) for n, key in enumerate(("k1", "k2", "long"), 1)]
        params = line_params(*lines, window=100)
    if statement in (LOCK_UNLOCKED_LINES, CLAIM_UNLOCKED_LINES):
        tried = key_lines.columns("tried", [("mail", "h", "k3", 1)])
        params |= {name: tried[name] for name in tried if name in statement}
    text = explain(crowd, statement, **params)
    assert "using mq_claim on" in text
    assert "using mq_key on" in text or statement in LOCKS
    assert "using mq_key_leased on" in text
    assert "hashed SubPlan" in text or statement in (LOCK_LINES, CLAIM_LINES)
    if setting or explain is plan:
        assert "Seq Scan on django_mq_queuedmessage" not in text


def touched(cursor: Cursor) -> int:
    """Return the number of pages that a claim touches, without taking rows."""
    total = 0
    with cursor.connection.transaction(force_rollback=True):
        for statement in (LOCK_LINES, CLAIM_LINES):
            total += touched_pages(cursor, statement, line_params())
    return total


def vacuum(cursor: Cursor) -> None:
    """Remove all dead rows, once no session has a snapshot that would keep them."""
    cursor.execute(
        """
        select pg_terminate_backend(pid, 10000)
          from pg_stat_activity
         where datname = current_database() and pid <> pg_backend_pid()
           and (backend_xmin is not null or backend_xid is not null)
        """
    )
    cursor.execute("vacuum (analyze, index_cleanup on) django_mq_queuedmessage")


def test_followers_of_a_dead_head_cost_a_claim_nothing_once_parked(crowd: Cursor) -> None:
    """Counted in buffers that a claim touches, which are the same on a busy machine."""
    crowd.execute("delete from django_mq_queuedmessage where key <> 'long'")
    vacuum(crowd)
    for _ in range(20_000 // with_keys.WINDOW + 1):
        assert take(crowd).rows == []
    crowd.execute("select count(*) from django_mq_queuedmessage where blocked_by is null")
    assert crowd.fetchone() == (1,)  # the head
    for _ in range(5):
        keyed("other", after=-1)
    vacuum(crowd)
    with_line = touched(crowd)
    crowd.execute("delete from django_mq_queuedmessage where key = 'long'")
    vacuum(crowd)
    without = touched(crowd)
    assert with_line <= 2 * without + 20
