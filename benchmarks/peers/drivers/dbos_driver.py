"""DBOS: https://docs.dbos.dev/python/

Enqueued in the transaction of an SQLAlchemy connection, which it wants. The worker is tuned: 500
workflows at once, which it also claims together, on 32 threads, and a poll each 50 ms, since a
queue has no LISTEN. A no-op is a workflow without steps; its result is kept. No bulk enqueue.
"""

from __future__ import annotations

import asyncio
import os
import threading
from time import monotonic
from typing import Any

import sqlalchemy
from common import Work, main, paced, timed
from dbos import DBOS, DBOSClient
from dbos._sys_db import SystemDatabase

AT_ONCE, SLEEPERS, THREADS, POLL, PAUSE = 500, 100, 32, 0.05, 0.05
OPTIONS: Any = {"workflow_name": "noop", "queue_name": "default"}
URL = f"postgresql+psycopg:///{os.environ['PGDATABASE']}"

work = Work()


def noop(**payload: Any) -> None:
    work.handled(DBOS.workflow_id)


async def sleep(**payload: Any) -> None:
    work.handled(DBOS.workflow_id)
    await asyncio.sleep(PAUSE)


def _launched(task: str) -> None:
    config: Any = {"name": "bench", "system_database_url": URL, "max_executor_threads": THREADS}
    config |= {"application_version": "1", "executor_id": str(os.getpid()), "log_level": "ERROR"}
    DBOS(config=config)
    DBOS.workflow(name="noop")({"noop": noop, "sleep": sleep}[task])
    DBOS.launch()


def schema() -> None:
    _launched("noop")
    DBOS.destroy()


def _adder(connection: sqlalchemy.Connection) -> Any:
    client = DBOSClient(system_database_url=URL, application_name="bench")

    def add(payload: dict[str, Any]) -> str:
        handle = client.enqueue_in_transaction(connection, OPTIONS, **payload)
        return handle.get_workflow_id()

    return add


def _one(connection: sqlalchemy.Connection, insert: str, payload: dict[str, Any]) -> Any:
    add = _adder(connection)

    def enqueue() -> tuple[Any, Any]:
        with connection.begin():
            order = connection.exec_driver_sql(insert, ("both",)).scalar_one()
            return order, add({**payload, "number": order})

    return enqueue


def enqueue(count: int, warm_up: int, **how: Any) -> dict[str, Any]:
    return timed(count, warm_up, _one(sqlalchemy.create_engine(URL).connect(), **how))


def produce(count: int, every: float, **how: Any) -> dict[str, Any]:
    return paced(count, every, _one(sqlalchemy.create_engine(URL).connect(), **how))


def bulk(count: int, payload: dict[str, Any]) -> dict[str, Any]:
    connection = sqlalchemy.create_engine(URL).connect()
    add = _adder(connection)
    began = monotonic()
    with connection.begin():
        ids = [add({**payload, "number": number}) for number in range(count)]
    return {"seconds": monotonic() - began, "ids": ids}


def work_on(task: str = "noop") -> dict[str, Any]:
    started, stopped = threading.Event(), threading.Event()
    claim, settle = SystemDatabase.start_queued_workflows, SystemDatabase.update_workflow_outcome

    def claimed(*args: Any, **kwargs: Any) -> Any:
        started.wait()  # the queue may be known from an earlier run
        work.claiming()
        return claim(*args, **kwargs)

    def settled(*args: Any, **kwargs: Any) -> Any:
        done = settle(*args, **kwargs)
        work.settled()
        return done

    SystemDatabase.start_queued_workflows = claimed
    SystemDatabase.update_workflow_outcome = settled
    _launched(task)
    work.wait(stopped.set)
    started.set()
    limits: Any = {"worker_concurrency": SLEEPERS if task == "sleep" else AT_ONCE}
    limits |= {"polling_interval_sec": POLL, "on_conflict": "always_update"}
    DBOS.register_queue("default", **limits)
    stopped.wait()
    DBOS.destroy()
    return work.seen()


commands = {"schema": schema, "enqueue": enqueue, "produce": produce, "bulk": bulk}
main({**commands, "work": work_on})
