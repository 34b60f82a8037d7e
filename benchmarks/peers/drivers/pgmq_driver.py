"""pgmq: https://github.com/pgmq/pgmq

Sent by its SQL functions through Django's cursor. The worker is tuned: psycopg with its own
defaults and orjson; batches of as many as the bare loop has, each read by one statement and deleted
by another; insert notifications, and a poll for what the throttle withholds.
"""

from __future__ import annotations

import json
from threading import Event
from time import monotonic
from typing import Any

import orjson
import psycopg
from common import Work, main
from django_project import producers, real_work, setup
from pgmq.install import install_pgmq_from_sql
from psycopg.types.json import set_json_loads

setup()

from django.db import connection, transaction  # noqa: E402

BATCH = 100
CHUNK = 1_000
#: Seconds for which messages that were read are invisible to others.
TIMEOUT = 30
#: Without a throttle each row of a bulk updates one and the same row, which is quadratic.
THROTTLE_MS = 10
#: Seconds between two polls: as often as `read_with_poll` does by default.
POLL = 0.1

READ = "select msg_id, message from pgmq.read('bench', %s, %s)"
DELETE = "select pgmq.delete('bench', %b::bigint[])"
SEND = "select pgmq.send('bench', %s::jsonb)"
SEND_BATCH = "select pgmq.send_batch('bench', %s::jsonb[])"

work = Work()
act = real_work()
set_json_loads(orjson.loads)


def noop(id: int, message: dict[str, Any]) -> None:
    work.handled(id)


def orm(id: int, message: dict[str, Any]) -> None:
    work.handled(id)
    act(message["number"])


def schema() -> None:
    with psycopg.connect() as bare:
        install_pgmq_from_sql(conn=bare)
        bare.execute("select pgmq.create('bench')")
        bare.execute("select pgmq.enable_notify_insert('bench', %s)", (THROTTLE_MS,))


def _adder() -> Any:
    def add(payload: dict[str, Any]) -> int:
        with connection.cursor() as cursor:
            cursor.execute(SEND, [json.dumps(payload)])
            return cursor.fetchone()[0]

    return add


def bulk(count: int, payload: dict[str, Any]) -> dict[str, Any]:
    connection.ensure_connection()
    ids: list[int] = []
    began = monotonic()
    with transaction.atomic(), connection.cursor() as cursor:
        for at in range(0, count, CHUNK):
            numbers = range(at, min(at + CHUNK, count))
            chunk = [json.dumps({**payload, "number": number}) for number in numbers]
            cursor.execute(SEND_BATCH, [chunk])
            ids += [id for (id,) in cursor.fetchall()]
    return {"seconds": monotonic() - began, "ids": ids}


def work_on(task: str = "noop") -> dict[str, Any]:
    handle = orm if task == "orm" else noop
    stopped = Event()
    with psycopg.connect(autocommit=True) as bare:
        bare.execute('listen "pgmq.q_bench.INSERT"')
        work.wait(stopped.set)
        while not stopped.is_set():
            work.claiming()
            messages = bare.execute(READ, (TIMEOUT, BATCH)).fetchall()
            for id, message in messages:
                handle(id, message)
            if messages:
                bare.execute(DELETE, ([id for id, _ in messages],))
                work.settled(len(messages))
            else:
                next(bare.notifies(timeout=POLL, stop_after=1), None)
    return work.seen()


main({"schema": schema, "bulk": bulk, "work": work_on, **producers(_adder)})
