"""Runs the worker's own claim on its kind of connection, each from where the last one ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.app.handlers import QUEUE
from benchmarks.database import check
from django_mq.executor.connections import statement_cursor
from django_mq.executor.statements import Statements
from django_mq.store import claim

UNLIMITED = 1 << 40
BATCH = 100
LEASE = 3600.0


class Taken(NamedTuple):
    """The ids that a claim took, and the milliseconds that it did."""

    ids: list[int]
    milliseconds: float


class Explained(NamedTuple):
    """The server's figures of a claim: milliseconds without the commit, and 8 kB pages read."""

    milliseconds: float
    pages: int


class Claimer:
    """Claims from `queues`, all of priority 0. Each statement is a transaction of its own, unless
    in a block of `transaction()`."""

    def __init__(self, name: str, queues: Iterable[str] = (QUEUE,)) -> None:
        self._name = name
        self._statements = Statements("default")
        self._lanes = {(queue, 0): claim.Lane(queue, 0) for queue in queues}

    def __enter__(self) -> Claimer:
        self.cursor = self._statements.cursor()
        return self

    def __exit__(self, *_: object) -> None:
        self._statements.close()

    def take(self, limit: int = BATCH) -> Taken:
        """Claim up to `limit` messages."""
        began = perf_counter()
        found = self._claim(self.cursor, limit)
        milliseconds = (perf_counter() - began) * 1000
        for name, mark in found.marks.items():
            self._lanes[name] = claim.Lane(*name, *mark)
        return Taken([row.id for row in found.rows], milliseconds)

    def warm_up(self, times: int = 6) -> None:
        """Claim until the statement is prepared and its plan is settled."""
        for _ in range(times):
            self.take()

    def explain(self, limit: int = BATCH) -> Explained:
        """Explain a claim without taking messages."""
        with self.transaction(undo=True):
            explaining = _Explaining(statement_cursor(self.cursor.connection))
            self._claim(explaining, limit)
        plan = explaining.plan
        pages = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
        return Explained(plan["Execution Time"], pages)

    @contextmanager
    def transaction(self, *, undo: bool = False) -> Iterator[None]:
        """Run all claims of the block in one transaction."""
        import psycopg

        with suppress(psycopg.Rollback), self._statements.transaction():
            yield
            if undo:
                raise psycopg.Rollback

    def _claim(self, cursor: Any, limit: int) -> claim.Claim:
        return claim.claim(
            cursor,
            lanes=list(self._lanes.values()),
            claimer=f"{self._name}:1",
            lease=LEASE,
            limit=limit,
            max_bytes=UNLIMITED,
        )


class _Explaining:
    """A cursor that explains its statement, and returns no rows."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self.plan: dict[str, Any] = {}

    def execute(self, statement: Any, params: Any = None) -> Any:
        explain = "explain (analyze, buffers, timing off, format json) "
        self._cursor.execute(explain + statement, params, prepare=False)
        ((plans,),) = self._cursor.fetchall()
        self.plan = plans[0]

    def fetchall(self) -> list[Any]:
        return []


def each_once(taken: Iterable[Taken]) -> None:
    """Raise Wrong if a message was claimed twice."""
    ids = [id for each in taken for id in each.ids]
    check(len(ids) == len(set(ids)), "a message was claimed twice")
