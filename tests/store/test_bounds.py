"""A chore reads a bounded number of rows, however many it changes or the tables hold.

Pages are counted, which are the same on a busy machine. Among 200,000 rows of each kind a piece
touches hardly more of them than among a few thousand.
"""

from __future__ import annotations

from typing import Any

import pytest

from django_mq.store import adopt, chores, expiry, figures, keys, pruning
from django_mq.store import claim_lapsed as lapsed
from django_mq.store import put_aside as aside
from django_mq.store.conditions import BEGINNING
from django_mq.store.unique_ids import UniqueId
from tests.database import second_connection
from tests.store.plans import pages

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.thorough]

#: The rows that one piece looks at, and the pages that it may touch per row.
PIECE, PAGES = 100, 60
FEW, MANY = 2_000, 200_000
#: An age, in seconds, that no row reaches during the test.
DAY = 86_400.0

#: Waiting lines, each behind an existing row; taken ids, with a message put aside; delayed ones,
#: expired ones in flight, followers in a line; and rows that are too new to be removed.
FILL = """
insert into django_mq_queuedmessage
       (id, queue, handler, type, key, payload, processable_after, blocked_by)
select 1000000000 * place + n, 'keys', 'h', 't', 'k' || n, '{}', now() + interval '1 day',
       case place when 2 then 1000000000 + n end
  from generate_series(%(first)s::int, %(last)s::int, 2) n, unnest('{1,2}'::bigint[]) place;
insert into django_mq_queuedmessage
       (queue, type, payload, processable_after, expires_at, unique_id)
select 'later', 't', '{}', now() + interval '1 day', now() + interval '2 days', n::text
  from generate_series(%(first)s::int, %(last)s::int) n;
insert into django_mq_queuedmessage
       (queue, type, payload, expires_at, attempts, claimed_by, leased_until)
select 'flying', 't', '{}', now() - interval '1 day' + n * interval '1 s' / 10, 1, 'w:1',
       now() + interval '1 day'
  from generate_series(%(first)s::int, %(last)s::int, 10) n;
insert into django_mq_queuedmessage (queue, type, payload, attempts, claimed_by, leased_until)
select queue, 't', '{}', 1, 'w:1', now() - n * interval '1 s'
  from unnest('{lapsed,paused}'::text[]) as queue,
       generate_series(%(first)s::int, %(last)s::int, 10) n;
insert into django_mq_queuestate (queue, paused_at) values ('paused', now()) on conflict do nothing;
insert into django_mq_queuedmessage (queue, type, payload, ordered)
select 'line', 't', '{}', true from generate_series(%(first)s::int, %(last)s::int) n;
insert into django_mq_queuedmessage (queue, type, payload, dead_at)
select 'dead', 't', '{}', now() from generate_series(%(first)s::int, %(last)s::int, 10) n;
insert into django_mq_uniquekey (queue, handler, type, unique_id, message_id)
select queue, '', type, unique_id, id from django_mq_queuedmessage
 where queue = 'later' and unique_id::int >= %(first)s::int;
insert into django_mq_uniquekey (queue, handler, type, unique_id, put_aside)
select 'later', '', 't', n::text, '{}'
  from generate_series(%(first)s::int, %(last)s::int) n;
insert into django_mq_uniquekey (queue, handler, type, unique_id, quiet_until)
select 'quiet', '', 't', n::text, now() + interval '1 day'
  from generate_series(%(first)s::int, %(last)s::int, 10) n;
insert into django_mq_failedattempt
       (message_id, queue, type, handler, attempt, worker, error_class, error_text, traceback)
select n, 'q', 't', 'h', 1, 'w', '', '', ''
  from generate_series(%(first)s::int, %(last)s::int, 10) n;
insert into django_mq_result (message_id, handler, value)
select n, '', '1' from generate_series(%(first)s::int, %(last)s::int, 10) n;
insert into django_mq_workerheartbeat (id, queues, host, pid, version, wakeup, running)
select 'w' || n, '[]', 'h', 1, '1', 'poll', '[]'
  from generate_series(%(first)s::int, %(last)s::int, 10) n;
insert into django_mq_minutefigures (minute, worker, queue, handler)
select now() - interval '1 minute' * (n % 100), 'w', 'q' || n, 'h'
  from generate_series(%(first)s::int, %(last)s::int) n;
insert into django_mq_hourfigures (hour, queue, handler)
select now() - interval '1 hour' * (n % 100), 'q' || n, 'h'
  from generate_series(%(first)s::int, %(last)s::int) n
"""

#: Each piece, from the beginning and from the middle of its walk.
MIDDLE = UniqueId("later", "", "t", "5")
PIECES: dict[str, tuple[str, dict[str, Any]]] = {
    "stranded": (keys.FREE_STRANDED, {"skipping": ["keys"], "limit": PIECE, "after": 0}),
    "stranded, on": (keys.FREE_STRANDED, {"skipping": [], "limit": PIECE, "after": 1000}),
    "aside": (
        aside.FREE_PUT_ASIDE,
        {"limit": PIECE, "queue": "", "handler": "", "type": "", "unique_id": ""},
    ),
    "aside, on": (aside.FREE_PUT_ASIDE, {"limit": PIECE, **MIDDLE._asdict()}),
    "expire": (expiry.EXPIRE, {"limit": 50, "window": PIECE, "after": BEGINNING}),
    "expire one": (expiry.EXPIRE_ONE, {"id": 1, "limit": 1}),
    "next expired": (expiry.NEXT_EXPIRED, {"window": PIECE, "after": BEGINNING}),
    "expiry walked": (expiry.EXPIRY_WALKED, {"window": PIECE, "after": BEGINNING}),
    **{
        what: (statement, {"limit": PIECE, "older_than": DAY, "after": BEGINNING})
        for what, statement in pruning.PRUNE.items()
    },
    "dead": (
        pruning.PRUNE_DEAD,
        {"queue": "dead", "limit": PIECE, "older_than": DAY, "after": BEGINNING},
    ),
    "dead queues": (chores.DEAD_QUEUES, {"limit": PIECE, "after": ""}),
    "waiting queues": (chores.WAITING_QUEUES, {"limit": PIECE, "after": ""}),
    "deep": (chores.WAITING, {"queues": ["keys", "later", "line"], "limits": [PIECE] * 3}),
    "workers": (chores.PRUNE_WORKERS, {"limit": PIECE, "after": "", "older_than": DAY}),
    "minutes": (figures.PRUNE_MINUTES, {"limit": PIECE, "older_than": 1e6}),
    "hours": (figures.PRUNE_HOURS, {"limit": PIECE, "older_than": 1e6}),
    "lapsed": (
        lapsed.CLAIM_LAPSED,
        {
            "queues": ["paused", "lapsed"],
            "ats": [float("-inf")] * 2,
            "ids": [0, 0],
            "claimer": "w:2",
            "lease": 30.0,
            "limit": PIECE,
            "window": PIECE,
            "bytes": 1 << 20,
            "skip_dead": False,
            "admitted": False,
            "suspects": True,
            "nonatomic": "{}",
        },
    ),
    "adopt": (
        adopt.ADOPT,
        {"queue": "line", "limit": PIECE, **adopt.AdoptResume()._asdict()},
    ),
    "adopt keys": (
        adopt.ADOPT,
        {"queue": "keys", "limit": PIECE, **adopt.AdoptResume()._asdict()},
    ),
}


def fill(first: int, last: int) -> None:
    with second_connection() as own:
        for statement in FILL.split(";\n"):
            own.execute(statement.replace("%(first)s", str(first)).replace("%(last)s", str(last)))
        tables = (
            "django_mq_queuedmessage, django_mq_uniquekey, django_mq_failedattempt,"
            " django_mq_result, django_mq_workerheartbeat, django_mq_minutefigures,"
            " django_mq_hourfigures"
        )
        own.execute(f"vacuum analyze {tables}")


def test_no_chore_walks_over_more_among_many_rows(transactional_db: None) -> None:
    fill(1, FEW)
    few = {name: pages(*piece) for name, piece in PIECES.items()}
    fill(FEW + 1, MANY)
    many = {name: pages(*piece) for name, piece in PIECES.items()}
    assert {name: found for name, found in many.items() if found > PIECE * PAGES} == {}
    grown = {
        name: (few[name], found) for name, found in many.items() if found > 3 * few[name] + PIECE
    }
    assert grown == {}
