"""Chancy: https://tkte.ch/chancy/

Pushed on Django's connection. The worker is tuned: 1,000 async jobs side by side, which also is how
many it claims at once; a claim as soon as jobs end; ended jobs written away each 50 ms, and not
each second. Of its plugins those that recover and prune, and their leader; no metrics, no
workflows. Bulk says one INSERT a job.
"""

import asyncio
import logging
import sys
from time import monotonic
from typing import Any

from common import Work, main
from django_project import producers, setup
from psycopg.rows import dict_row

# A job is found by the name of its module.
sys.modules["chancy_driver"] = sys.modules[__name__]

setup()

from chancy import Chancy, Job, Queue, QueuedJob, Worker  # noqa: E402
from chancy.plugin import Plugin  # noqa: E402
from chancy.plugins.leadership import Leadership  # noqa: E402
from chancy.plugins.pruner import Pruner  # noqa: E402
from chancy.plugins.recovery import Recovery  # noqa: E402
from django.db import connection, transaction  # noqa: E402

CONCURRENCY = 1_000
SLEEPERS = 100
PAUSE = 0.05
CONNECTIONS = 3
CHUNK = 1_000
#: Seconds between two writings of ended jobs.
WRITE_EVERY = 0.05

work = Work()
logger = logging.getLogger("chancy_driver")
logger.setLevel(logging.ERROR)


class Told(Plugin):
    """Notes each job whose end is committed."""

    @staticmethod
    def get_identifier() -> str:
        return "bench.told"

    async def on_job_updated(self, **_: Any) -> None:
        work.settled()


def app() -> Chancy:
    return Chancy(
        "",
        plugins=[Leadership(), Recovery(), Pruner(), Told()],
        no_default_plugins=True,
        min_connection_pool_size=CONNECTIONS,
        log=logger,
    )


# An annotation that is text would not be seen: so no import from __future__.
async def noop(*, context: QueuedJob, **payload: Any) -> None:
    work.handled(context.id)


async def sleep(*, context: QueuedJob, **payload: Any) -> None:
    work.handled(context.id)
    await asyncio.sleep(PAUSE)


async def schema() -> None:
    async with app() as chancy:
        await chancy.migrate()
        await chancy.declare(_queue(CONCURRENCY), upsert=True)


def _queue(at_once: int) -> Queue:
    executor = Chancy.Executor.Async
    return Queue("default", concurrency=at_once, executor=executor, eager_polling=True)


def _job(payload: dict[str, Any]) -> Job:
    return Job(func="chancy_driver.noop", kwargs=payload)


def _adder() -> Any:
    chancy, jobs = app(), connection.connection.cursor(row_factory=dict_row)

    def add(payload: dict[str, Any]) -> str:
        return str(chancy.sync_push_many_ex(jobs, [_job(payload)])[0].identifier)

    return add


def bulk(count: int, payload: dict[str, Any]) -> dict[str, Any]:
    connection.ensure_connection()
    chancy, cursor = app(), connection.connection.cursor(row_factory=dict_row)
    ids: list[str] = []
    began = monotonic()
    with transaction.atomic():
        for at in range(0, count, CHUNK):
            jobs = [_job({**payload, "number": n}) for n in range(at, min(at + CHUNK, count))]
            ids += [str(ref.identifier) for ref in chancy.sync_push_many_ex(cursor, jobs)]
    return {"seconds": monotonic() - began, "ids": ids}


async def work_on(task: str = "noop") -> dict[str, Any]:
    async with app() as chancy:
        if task == "sleep":
            globals()["noop"] = sleep
            await chancy.declare(_queue(SLEEPERS), upsert=True)
        worker = Worker(chancy, register_signal_handlers=False)
        worker.send_outgoing_interval = WRITE_EVERY
        fetch_jobs, stopped = worker.fetch_jobs, asyncio.Event()

        async def fetch(*args: Any, **kwargs: Any) -> Any:
            work.claiming()
            return await fetch_jobs(*args, **kwargs)

        worker.fetch_jobs = fetch
        await chancy.pool.wait()
        loop = asyncio.get_running_loop()
        work.wait(lambda: loop.call_soon_threadsafe(stopped.set))
        async with worker:
            await stopped.wait()
    return work.seen()


if __name__ == "__main__":
    commands = {
        "schema": lambda: asyncio.run(schema()),
        "work": lambda **how: asyncio.run(work_on(**how)),
    }
    main({**commands, "bulk": bulk, **producers(_adder)})
