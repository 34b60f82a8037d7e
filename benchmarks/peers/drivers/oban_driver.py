"""Oban for Python: https://github.com/oban-bg/oban-py

It is async alone, so what enqueues has an async connection of psycopg's, with psycopg's defaults,
instead of Django's. The worker is tuned: 1,000 jobs at once, which it also claims together; a claim
as soon as jobs end. Each job that ended is one UPDATE, those of a round in one transaction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic, process_time
from typing import Any

import psycopg
from common import Work, main
from oban import Oban, worker
from oban.schema import install_sql
from psycopg_pool import AsyncConnectionPool

AT_ONCE, SLEEPERS, CONNECTIONS, CHUNK = 1_000, 100, 4, 5_000
PAUSE = 0.05

work = Work()
logging.getLogger("oban").setLevel(logging.ERROR)


@worker(queue="default")
class Noop:
    pause = 0.0

    async def process(self, job: Any) -> None:
        work.handled(job.id)
        if self.pause:
            await asyncio.sleep(self.pause)


def schema() -> None:
    with psycopg.connect(autocommit=True) as connection:
        connection.execute(install_sql())


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[Oban]:
    """Yield an instance that has its pool, and is not started."""
    async with AsyncConnectionPool("", min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:
        await pool.wait()
        yield Oban(pool=pool, **options)


async def _one(oban: Oban, connection: Any, insert: str, payload: dict[str, Any]) -> Any:
    async with connection.transaction():
        (order,) = await (await connection.execute(insert, ["both"])).fetchone()
        [job] = await oban.enqueue_many([Noop.new({**payload, "number": order})], conn=connection)
    return order, job.id


async def enqueue(count: int, warm_up: int, **how: Any) -> dict[str, Any]:
    async with client() as oban, await psycopg.AsyncConnection.connect(autocommit=True) as its:
        pairs = [await _one(oban, its, **how) for _ in range(warm_up)]
        began, cpu = monotonic(), process_time()
        pairs += [await _one(oban, its, **how) for _ in range(count)]
        return {"seconds": monotonic() - began, "cpu": process_time() - cpu, "pairs": pairs}


async def produce(count: int, every: float, **how: Any) -> dict[str, Any]:
    commits = []
    async with client() as oban, await psycopg.AsyncConnection.connect(autocommit=True) as its:
        at = monotonic()
        for _ in range(count):
            at += every
            await asyncio.sleep(max(0.0, at - monotonic()))
            _, id = await _one(oban, its, **how)
            commits.append((str(id), monotonic()))
    return {"commits": commits}


async def bulk(count: int, payload: dict[str, Any]) -> dict[str, Any]:
    ids: list[int] = []
    async with client() as oban, await psycopg.AsyncConnection.connect(autocommit=True) as its:
        began = monotonic()
        async with its.transaction():
            for at in range(0, count, CHUNK):
                numbers = range(at, min(at + CHUNK, count))
                jobs = [Noop.new({**payload, "number": number}) for number in numbers]
                ids += [job.id for job in await oban.enqueue_many(jobs, conn=its)]
        return {"seconds": monotonic() - began, "ids": ids}


async def work_on(task: str = "noop") -> dict[str, Any]:
    Noop.pause = PAUSE if task == "sleep" else 0.0
    async with client(queues={"default": SLEEPERS if task == "sleep" else AT_ONCE}) as oban:
        query, stopped = oban._query, asyncio.Event()
        fetch_jobs, ack_jobs = query.fetch_jobs, query.ack_jobs

        async def fetch(*args: Any, **kwargs: Any) -> Any:
            work.claiming()
            return await fetch_jobs(*args, **kwargs)

        async def ack(acks: list[Any]) -> list[int]:
            acked = await ack_jobs(acks)
            work.settled(len(acked))
            return acked

        query.fetch_jobs, query.ack_jobs = fetch, ack
        loop = asyncio.get_running_loop()
        work.wait(lambda: loop.call_soon_threadsafe(stopped.set))
        async with oban:
            await stopped.wait()
    return work.seen()


commands = {"enqueue": enqueue, "produce": produce, "bulk": bulk, "work": work_on}
runs = {name: lambda f=f, **how: asyncio.run(f(**how)) for name, f in commands.items()}
main({"schema": schema, **runs})
