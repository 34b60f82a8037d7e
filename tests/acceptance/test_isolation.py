"""Guarantee 17: workers at another isolation level of the database lose and repeat nothing."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable

import pytest
from django.db import connection
from psycopg import IsolationLevel

from django_mq import RetryPolicy, fixed
from django_mq.executor.settlement import MAX_CONFLICTS
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker
from tests.slow import slow

LEVELS = {
    IsolationLevel.REPEATABLE_READ: "repeatable-read",
    IsolationLevel.SERIALIZABLE: "serializable",
}
#: Enough attempts, however many conflicts there are: most commits fail where the server scans
#: tables, which it may choose to do.
OFTEN = RetryPolicy(max_attempts=1000, backoff=fixed(0.02))


@pytest.mark.parametrize(
    "level",
    [IsolationLevel.SERIALIZABLE, *slow(IsolationLevel.REPEATABLE_READ)],
    ids=lambda level: LEVELS[level],
)
def test_every_kind_of_message(
    start: Callable[..., Worker], queue: Queue, witness: Witness, level: IsolationLevel
) -> None:
    """Handlers read each other's writes, so some become victims of a conflict."""
    names = [f"m{n}" for n in range(300)]
    witness.open("open")
    atomic = names[:160]
    for kind, share in (
        ("write", atomic[:80]),
        ("tally", atomic[80:]),
        ("call", names[160:200]),
        ("acall", names[200:240]),
        ("list", names[240:280]),
    ):
        queue.send(kind, *share, gate="open", retry=OFTEN)
    queue.send("line", *names[280:], line="one", queue="keyed")
    failing = [f"f{n}" for n in range(20)]
    queue.send("fail", *failing, until=2)

    given = connection.get_connection_params()
    place = {key: given[key] for key in ("host", "port") if given.get(key)}
    worker = start(
        *("--processes", 2, "--threads", 2),
        database={"OPTIONS": {**place, "isolation_level": int(level)}},
    )

    queue.wait_empty(worker)
    assert queue.done() == dict.fromkeys([*names, *failing], 1)
    charged = {name: a for name, a, _ in queue.effects() if a != 1 and name in atomic}
    ran = Counter((name, attempt) for name, attempt, _ in witness.started())
    # A message that loses every time fails in the end: no handler runs for ever. Outside a
    # transaction, one conflict fails the attempt.
    assert all(ran[name, 1] > MAX_CONFLICTS for name in charged), charged
    assert witness.started(LEVELS[level])
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
