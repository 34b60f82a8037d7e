"""PgQueuer: https://janbjorge.github.io/pgqueuer/

Tuned: asyncpg and uvloop, a pool so that a batch is settled while the next is claimed, and large
batches, which also are the batches in which finished jobs are written away.
"""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any

import asyncpg
import uvloop
from common import Work, main
from pgqueuer import PgQueuer
from pgqueuer.models import Job
from pgqueuer.queries import Queries

BATCH = 1000
CONNECTIONS = 4
CHUNK = 10_000

work = Work()


async def schema() -> None:
    await Queries.from_asyncpg_connection(await asyncpg.connect()).install()


async def _one(insert: str, payload: dict[str, Any]) -> Any:
    connection = await asyncpg.connect()
    queries = Queries.from_asyncpg_connection(connection)
    insert = insert.replace("%s", "$1")

    async def enqueue() -> tuple[Any, Any]:
        async with connection.transaction():
            order = await connection.fetchval(insert, "both")
            text = json.dumps({**payload, "number": order}).encode()
            (id,) = await queries.enqueue("noop", text)
        return order, id

    return enqueue


async def enqueue(count: int, warm_up: int, **how: Any) -> dict[str, Any]:
    one = await _one(**how)
    pairs = [await one() for _ in range(warm_up)]
    began = monotonic()
    for _ in range(count):
        pairs.append(await one())
    return {"seconds": monotonic() - began, "pairs": pairs}


async def produce(count: int, every: float, **how: Any) -> dict[str, Any]:
    one = await _one(**how)
    commits = []
    at = monotonic()
    for _ in range(count):
        at += every
        await asyncio.sleep(max(0.0, at - monotonic()))
        _, id = await one()
        commits.append((str(id), monotonic()))
    return {"commits": commits}


async def bulk(count: int, payload: dict[str, Any]) -> dict[str, Any]:
    connection = await asyncpg.connect()
    queries = Queries.from_asyncpg_connection(connection)
    jobs = [{**payload, "number": number} for number in range(count)]
    ids: list[int] = []
    began = monotonic()
    async with connection.transaction():
        for at in range(0, count, CHUNK):
            texts = [json.dumps(job).encode() for job in jobs[at : at + CHUNK]]
            ids += await queries.enqueue(["noop"] * len(texts), texts, [0] * len(texts))
    return {"seconds": monotonic() - began, "ids": ids}


async def work_on() -> dict[str, Any]:
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

        @peer.entrypoint("noop")
        async def noop(job: Job) -> None:
            work.handled(job.id)

        loop = asyncio.get_running_loop()
        work.wait(lambda: loop.call_soon_threadsafe(peer.shutdown.set))
        await peer.run(batch_size=BATCH)
    return work.seen()


if __name__ == "__main__":
    commands = {"schema": schema, "enqueue": enqueue, "produce": produce, "bulk": bulk}
    commands["work"] = work_on
    main({name: lambda f=f, **kw: uvloop.run(f(**kw)) for name, f in commands.items()})
