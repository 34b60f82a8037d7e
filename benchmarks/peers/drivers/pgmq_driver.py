"""pgmq: https://github.com/pgmq/pgmq

Tuned: its SQL functions by psycopg, with binary arrays and orjson; batches of as many as the bare
loop has, each read by one statement and deleted by another; insert notifications, and a poll for
what the throttle withholds.
"""

from __future__ import annotations

from functools import partial
from threading import Event
from time import monotonic
from typing import Any

import orjson
import psycopg
from common import Work, main, producers
from pgmq.install import install_pgmq_from_sql
from psycopg.types.json import Jsonb, set_json_dumps, set_json_loads

BATCH = 100
CHUNK = 1_000
#: Seconds for which messages that were read are nobody else's.
TIMEOUT = 30
#: Without a throttle each row of a bulk updates one and the same row, which is quadratic.
THROTTLE_MS = 10
#: Seconds between two polls: as often as `read_with_poll` does by default.
POLL = 0.1

READ = "select msg_id, message from pgmq.read('bench', %s, %s)"
DELETE = "select pgmq.delete('bench', %b::bigint[])"
SEND = "select pgmq.send('bench', %s)"
SEND_BATCH = "select pgmq.send_batch('bench', %b)"

work = Work()
set_json_dumps(orjson.dumps)
set_json_loads(orjson.loads)


def noop(id: int, message: dict[str, Any]) -> None:
    work.handled(id)


def schema() -> None:
    with psycopg.connect() as connection:
        install_pgmq_from_sql(conn=connection)
        connection.execute("select pgmq.create('bench')")
        connection.execute("select pgmq.enable_notify_insert('bench', %s)", (THROTTLE_MS,))


def _one(connection: psycopg.Connection, insert: str, payload: dict[str, Any]) -> Any:
    def enqueue() -> tuple[Any, Any]:
        with connection.transaction():
            order = connection.execute(insert, ("both",)).fetchone()[0]
            message = Jsonb({**payload, "number": order})
            return order, connection.execute(SEND, (message,)).fetchone()[0]

    return enqueue


def bulk(count: int, payload: dict[str, Any]) -> dict[str, Any]:
    messages = [{**payload, "number": number} for number in range(count)]
    ids: list[int] = []
    with psycopg.connect() as connection:
        began = monotonic()
        for at in range(0, count, CHUNK):
            chunk = [Jsonb(message) for message in messages[at : at + CHUNK]]
            ids += [id for (id,) in connection.execute(SEND_BATCH, (chunk,))]
        connection.commit()
        return {"seconds": monotonic() - began, "ids": ids}


def work_on() -> dict[str, Any]:
    stopped = Event()
    with psycopg.connect(autocommit=True) as connection:
        connection.execute('listen "pgmq.q_bench.INSERT"')
        work.wait(stopped.set)
        while not stopped.is_set():
            work.claiming()
            messages = connection.execute(READ, (TIMEOUT, BATCH)).fetchall()
            for id, message in messages:
                noop(id, message)
            if messages:
                connection.execute(DELETE, ([id for id, _ in messages],))
                work.settled(len(messages))
            else:
                next(connection.notifies(timeout=POLL, stop_after=1), None)
    return work.seen()


if __name__ == "__main__":
    connect = partial(psycopg.connect, autocommit=True)
    main({"schema": schema, "bulk": bulk, "work": work_on, **producers(connect, _one)})
