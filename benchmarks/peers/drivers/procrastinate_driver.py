"""procrastinate: https://procrastinate.readthedocs.io

Enqueued by its Django app. The worker is tuned: async jobs side by side, connections that commit by
themselves and are not checked before each use, finished jobs deleted. It claims and finishes jobs
one by one; there is no batch.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import procrastinate
import psycopg
import psycopg_pool
from common import Work, main
from django_project import producers, real_work, setup

CONCURRENCY = 10
SLEEPERS = 100
PAUSE = 0.05
CHUNK = 5_000

setup("procrastinate.contrib.django")

from django.db import connection, transaction  # noqa: E402
from procrastinate.contrib.django import app as django_app  # noqa: E402

work = Work()
act = real_work()
app = procrastinate.App(connector=procrastinate.PsycopgConnector())
syncapp = procrastinate.App(connector=procrastinate.SyncPsycopgConnector())


async def noop(context: procrastinate.JobContext, **payload: Any) -> None:
    work.handled(context.job.id)


async def sleep(context: procrastinate.JobContext, **payload: Any) -> None:
    work.handled(context.job.id)
    await asyncio.sleep(PAUSE)


def schema() -> None:
    with syncapp.open():
        syncapp.schema_manager.apply_schema()


@django_app.task(name="noop", pass_context=True)
def orm(context: procrastinate.JobContext, **payload: Any) -> None:
    """As in a Django project: on a thread, with Django's handling of connections."""
    work.handled(context.job.id)
    act(payload["number"])


def _adder() -> Any:
    return lambda payload: orm.defer(**payload)


def bulk(count: int, payload: dict[str, Any]) -> dict[str, Any]:
    connection.ensure_connection()
    ids = []
    began = monotonic()
    with transaction.atomic():
        for at in range(0, count, CHUNK):
            numbers = range(at, min(at + CHUNK, count))
            ids += orm.batch_defer(*({**payload, "number": number} for number in numbers))
    return {"seconds": monotonic() - began, "ids": ids}


def work_on(task: str = "noop") -> dict[str, Any]:
    at_once = SLEEPERS if task == "sleep" else CONCURRENCY
    if task == "orm":
        worker = django_app.with_connector(django_app.connector.get_worker_connector())
    else:
        worker = app
        app.task(name="noop", pass_context=True)({"noop": noop, "sleep": sleep}[task])
    asyncio.run(_work(worker, at_once))
    return work.seen()


async def _work(app: procrastinate.App, at_once: int) -> None:
    manager = app.job_manager
    fetch_job, finish_job = manager.fetch_job, manager.finish_job

    async def fetch(*args: Any, **kwargs: Any) -> Any:
        work.claiming()
        return await fetch_job(*args, **kwargs)

    async def finish(*args: Any, **kwargs: Any) -> None:
        await finish_job(*args, **kwargs)
        work.settled()

    manager.fetch_job, manager.finish_job = fetch, finish
    pool = psycopg_pool.AsyncConnectionPool(
        min_size=CONCURRENCY + 1, max_size=CONCURRENCY + 1, configure=_autocommit, open=False
    )
    async with pool:
        await pool.wait()
        await app.open_async(pool)
        loop, running = asyncio.get_running_loop(), asyncio.current_task()
        work.wait(lambda: loop.call_soon_threadsafe(running.cancel))
        try:
            await app.run_worker_async(concurrency=at_once, delete_jobs="successful")
        except asyncio.CancelledError:
            running.uncancel()


async def _autocommit(connection: psycopg.AsyncConnection) -> None:
    await connection.set_autocommit(True)


main({"schema": schema, "bulk": bulk, "work": work_on, **producers(_adder)})
