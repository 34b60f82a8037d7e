"""The baseline of all measurements: the driver alone, directly on the database.

Its connections have psycopg's own defaults: statements are prepared after five uses, and jsonb is
fetched as text, which is faster than psycopg's loader (and what the worker does, too).
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, NamedTuple

import psycopg

#: The plainest possible table: an identity and a jsonb.
TABLE = "bench_bare"
CHANNEL = "mq_bench_bare"
BATCH = 100

#: 170 to 200 bytes of JSON text, as in the experiments of the design.
PAYLOAD = {
    "number": 0,
    "customer": "6a1f0e52-8a33-4f0e-9f6c-2b1d7c1f9a01",
    "items": [{"sku": "A-1001", "quantity": 2}, {"sku": "B-2002", "quantity": 1}],
    "note": "leave it with a neighbour",
}
PAYLOAD_TEXT = json.dumps(PAYLOAD)

# In the order in which a worker takes them, by the index that it uses.
FROM_MESSAGES = """
delete from django_mq_queuedmessage
 where id in (
    select id from django_mq_queuedmessage
     where queue = 'bench' and priority = 0 and leased_until is null and blocked_by is null
       and dead_at is null and processable_after <= statement_timestamp()
     order by processable_after, id
     limit %s
       for update skip locked)
returning id, payload::text
"""
FROM_PLAIN = f"""
delete from {TABLE}
 where id in (select id from {TABLE} order by id limit %s for update skip locked)
returning id, payload::text
"""
#: The same insert as that of a handler that writes one row.
WRITE = "insert into bench_entry (message, note) values (%s, 'handled')"


class Run(NamedTuple):
    """The result of one loop; times are of the machine's monotonic clock."""

    begin: float
    end: float
    ids: list[int]


def drain(params: dict[str, Any], statement: str = FROM_MESSAGES) -> Run:
    """Take all messages, a hundred per transaction."""
    with psycopg.connect(**params) as connection:
        return drain_on(connection, statement)


def drain_on(connection: psycopg.Connection[Any], statement: str = FROM_MESSAGES) -> Run:
    """Take all messages, a hundred a transaction, on a connection that is open."""
    ids: list[int] = []
    with connection.cursor() as cursor:
        begin = end = monotonic()
        while rows := cursor.execute(statement, (BATCH,)).fetchall():
            connection.commit()
            ids.extend([row[0] for row in rows])
            end = monotonic()
    return Run(begin, end, ids)


def drain_together(params: dict[str, Any], processes: int) -> Run:
    """Take all messages, a hundred a transaction, in several processes."""
    return _together(_drain, params, processes)


def write(params: dict[str, Any]) -> Run:
    """Take all messages, a hundred a transaction, and write a row for each, in a savepoint."""
    ids: list[int] = []
    with psycopg.connect(**params) as connection, connection.cursor() as cursor:
        begin = end = monotonic()
        while rows := cursor.execute(FROM_MESSAGES, (BATCH,)).fetchall():
            for id, _ in rows:
                cursor.execute("savepoint one")
                cursor.execute(WRITE, (id,))
                cursor.execute("release savepoint one")
            connection.commit()
            ids.extend([row[0] for row in rows])
            end = monotonic()
    return Run(begin, end, ids)


def copy(params: dict[str, Any], statement: str, rows: Iterable[tuple[Any, ...]]) -> Run:
    """COPY rows; making them counts where they are made as they are asked for."""
    with psycopg.connect(**params) as connection, connection.cursor() as cursor:
        begin = monotonic()
        with cursor.copy(statement) as copying:
            for row in rows:
                copying.write_row(row)
        connection.commit()
        return Run(begin, monotonic(), [])


def contend(params: dict[str, Any], processes: int) -> Run:
    """Take messages one a transaction, in several processes, each updating the row it names."""
    return _together(_contend, params, processes)


def _together(target: Callable[..., None], params: dict[str, Any], processes: int) -> Run:
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(processes), context.Queue()
    arguments = (params, together, answers)
    started = [context.Process(target=target, args=arguments) for _ in range(processes)]
    for process in started:
        process.start()
    try:
        runs = [Run(*answers.get(timeout=600)) for _ in started]
    finally:
        for process in started:
            process.terminate()
            process.join()
    ids = [id for run in runs for id in run.ids]
    return Run(min(run.begin for run in runs), max(run.end for run in runs), ids)


def _drain(params: dict[str, Any], together: Any, answers: Any) -> None:
    with psycopg.connect(**params) as connection:
        together.wait()
        done = drain_on(connection)
    answers.put(tuple(done))


def _contend(params: dict[str, Any], together: Any, answers: Any) -> None:
    ids: list[int] = []
    take = FROM_MESSAGES.replace("payload::text", "(payload->>'counter')::int")
    with psycopg.connect(**params) as connection, connection.cursor() as cursor:
        together.wait()
        begin = end = monotonic()
        while row := cursor.execute(take, (1,)).fetchone():
            cursor.execute("update bench_counter set value = value + 1 where id = %s", (row[1],))
            connection.commit()
            ids.append(row[0])
            end = monotonic()
    answers.put((begin, end, ids))


def listen(params: dict[str, Any], ready: Any, answers: Any) -> None:
    """Delete each message as soon as its NOTIFY comes, noting when; "end" ends it."""
    starts: list[tuple[int, float]] = []
    with psycopg.connect(**params, autocommit=True) as connection:
        connection.execute(f"listen {CHANNEL}")
        ready.set()
        while True:
            # One at a time: while its generator is open, notifies() has the connection.
            heard = {each.payload for each in connection.notifies(stop_after=1)}
            for id, _ in connection.execute(FROM_PLAIN, (BATCH,)).fetchall():
                starts.append((id, monotonic()))
            if "end" in heard:
                break
    answers.put(starts)
