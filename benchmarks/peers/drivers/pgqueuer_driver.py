"""PgQueuer: https://janbjorge.github.io/pgqueuer/

Enqueued on Django's connection. The worker is tuned: asyncpg and uvloop, a pool so that a batch is
settled while the next is claimed, and large batches, which also are the batches in which finished
jobs are written away.
"""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any

import asyncpg
import uvloop
from common import Work, main
from django_project import producers, real_work, setup
from pgqueuer import PgQueuer
from pgqueuer.db import SyncPsycopgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries, SyncQueries

setup()

from django.db import connection, transaction  # noqa: E402

BATCH = 1000
CONNECTIONS = 4
CHUNK = 10_000
#: A hundred coroutines at once; it wants twice as many as a batch has.
SLEEPERS = {"batch_size": 50, "max_concurrent_tasks": 100}
PAUSE = 0.05

work = Work()


act = real_work()


async def noop(job: Job) -> None:
    work.handled(job.id)


async def sleep(job: Job) -> None:
    work.handled(job.id)
    await asyncio.sleep(PAUSE)


async def orm(job: Job) -> None:
    """On a thread, as its manual requires for blocking code."""
    work.handled(job.id)
    await asyncio.to_thread(act, json.loads(job.payload)["number"])


HANDLERS = {"noop": noop, "sleep": sleep, "orm": orm}


async def schema() -> None:
    await Queries.from_asyncpg_connection(await asyncpg.connect()).install()


def _queries() -> SyncQueries:
    connection.ensure_connection()
    return SyncQueries(SyncPsycopgDriver(connection.connection))


def _adder() -> Any:
    queries = _queries()
    return lambda payload: queries.enqueue("noop", json.dumps(payload).encode())[0]


def bulk(count: int, payload: dict[str, Any]) -> dict[str, Any]:
    queries = _queries()
    ids: list[int] = []
    began = monotonic()
    with transaction.atomic():
        for at in range(0, count, CHUNK):
            numbers = range(at, min(at + CHUNK, count))
            texts = [json.dumps({**payload, "number": number}).encode() for number in numbers]
            ids += queries.enqueue(["noop"] * len(texts), texts, [0] * len(texts))
    return {"seconds": monotonic() - began, "ids": ids}


async def work_on(task: str = "noop") -> dict[str, Any]:
    async with asyncpg.create_pool(min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:
        peer = PgQueuer.from_asyncpg_pool(pool)
        queries = peer.qm.queries
        dequeue, log_jobs = queries.dequeue, queries.log_jobs

        async def claim(*args: Any, **kwargs: Any) -> Any:
            work.claiming()
            return await dequeue(*args, **kwargs)

        async def settle(statuses: list[Any]) -> None:
            await log_jobs(statuses)
            work.settled(len(statuses))

        queries.dequeue, queries.log_jobs = claim, settle

        peer.entrypoint("noop")(HANDLERS[task])
        loop = asyncio.get_running_loop()
        work.wait(lambda: loop.call_soon_threadsafe(peer.shutdown.set))
        await peer.run(**({"sleep": SLEEPERS}.get(task) or {"batch_size": BATCH}))
    return work.seen()


commands = {
    "schema": lambda: uvloop.run(schema()),
    "work": lambda **how: uvloop.run(work_on(**how)),
}
main({**commands, "bulk": bulk, **producers(_adder)})
