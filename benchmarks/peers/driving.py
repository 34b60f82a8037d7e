"""Runs a peer's driver in the peer's environment, and verifies its report."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from time import monotonic
from typing import Any

import psycopg

from benchmarks.bare import PAYLOAD, PAYLOAD_TEXT
from benchmarks.database import Database, check
from benchmarks.footprints import Cost, backend_seconds, share
from benchmarks.peers.catalog import Peer
from benchmarks.workloads.broadcast import INSERT

#: The business row of each enqueuing transaction, and the payload; the same for all peers.
HOW = {"insert": INSERT, "payload": PAYLOAD}
#: Seconds that a driver may need to start, or to stop.
PATIENCE = 60.0
#: Names of libpq's environment variables, which every driver reads.
VARIABLES = {
    "host": "PGHOST",
    "port": "PGPORT",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "dbname": "PGDATABASE",
}
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PGSSLMODE", "PGPASSFILE")


class Driven:
    """One peer on one database."""

    def __init__(self, peer: Peer, command: list[str], database: Database) -> None:
        self.peer = peer
        self.database = database
        self._command = command

    @property
    def title(self) -> str:
        """How the table calls it."""
        return self.peer.title

    @property
    def slow(self) -> bool:
        """It gets fewer jobs."""
        return self.peer.slow

    def on(self, database: Database) -> Driven:
        """Return the same peer on another database."""
        return Driven(self.peer, self._command, database)

    def run(self, name: str, **arguments: Any) -> Any:
        """Run one command of the driver, and return its report; raise Wrong if it fails."""
        words = [*self._command, name, json.dumps(arguments)]
        done = subprocess.run(
            words, env=self._environment(), capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=10 * PATIENCE,
        )  # fmt: skip
        check(not done.returncode, f"{name}: {_last(done.stderr)}")
        return json.loads(done.stdout.splitlines()[-1])

    def clear(self) -> None:
        """Empty the peer's tables."""
        self.database.execute(f"truncate {self.peer.tables}, bench_order restart identity cascade")

    def settle(self) -> None:
        """As `Database.settle`, for the peer's tables."""
        self.database.execute(f"vacuum (analyze) {self.peer.tables}")
        with suppress(psycopg.errors.InsufficientPrivilege):
            self.database.execute("checkpoint")

    def crowd(self, count: int) -> None:
        """Store `count` delayed and `count` failed jobs."""
        params = {"count": count, "payload": PAYLOAD_TEXT}
        with self.database.connect() as connection, psycopg.ClientCursor(connection) as cursor:
            cursor.execute(self.peer.delayed, params)  # several statements in one
            cursor.execute(self.peer.failed, params)

    def purge(self) -> None:
        """Remove the jobs that are due."""
        self.database.execute(f"delete from {self.peer.table} where {self.peer.due}")

    def waiting(self) -> set[str]:
        """Return the ids of the jobs that are due and not done."""
        where = f"from {self.peer.table} where {self.peer.due}"
        return {id for (id,) in self.database.execute(f"select {self.peer.id}::text {where}")}

    def enqueue(self, count: int, warm_up: int) -> Cost:
        """Return what transactions cost, of one order and one job each."""
        self.clear()
        self.settle()
        said = self.run("enqueue", count=count, warm_up=warm_up, **HOW)
        orders = {str(order) for order, _ in said["pairs"]}
        stored = {id for (id,) in self.database.execute("select id::text from bench_order")}
        check(orders == stored and len(orders) == count + warm_up, "orders are missing")
        check({str(id) for _, id in said["pairs"]} == self.waiting(), "jobs are missing")
        check(len(self.waiting()) == count + warm_up, "jobs are doubled")
        return Cost(count / float(said["seconds"]), share(said.get("cpu"), count), None)

    def bulk(self, count: int) -> tuple[float, set[str]]:
        """Enqueue so many at once; return the rate and the ids."""
        said = self.run("bulk", count=count, payload=PAYLOAD)
        ids = {str(id) for id in said["ids"]}
        check(len(ids) == len(said["ids"]) == count, "jobs are missing")
        check(ids == self.waiting(), "what is stored is not what was enqueued")
        return count / float(said["seconds"]), ids

    def drain(self, due: set[str], processes: int, seconds: float, task: str = "noop") -> Cost:
        """Have so many processes work until all is done, or for so many seconds.

        Jobs are no-ops, or the driver's `task`: "orm" or "sleep".

        Raises Wrong unless each job was handled at most once, and exactly those that were are
        done; and all of them, unless the time was up.
        """
        with ExitStack() as stack:
            working = [stack.enter_context(Working(self, task)) for _ in range(processes)]
            for each in working:
                each.until_ready()
            ends_at = monotonic() + seconds
            for each in working:
                each.go()
            while sum(each.done for each in working) < len(due) and monotonic() < ends_at:
                working[0].listen(min(0.02, seconds))
                for each in working:
                    each.listen(0.0)
            timed_out = monotonic() >= ends_at
            postgres = backend_seconds(self.database)
            seen = [each.stop() for each in working]
        ids = [id for each in seen for id in each["ids"]]
        check(len(ids) == len(set(ids)), f"{len(ids) - len(set(ids))} jobs were handled twice")
        left = due - set(ids)
        check(self.waiting() == left, "what was handled is not what is done")
        check(timed_out or not left, f"{len(left)} jobs were not handled")
        check(ids, "nothing was handled")
        active = [each for each in seen if each["ids"]]
        begin = min(each["begin"] for each in active)
        cpu = [each["cpu"] for each in active if "cpu" in each]
        return Cost(
            len(ids) / float(max(each["end"] for each in active) - begin),
            share(sum(cpu) if len(cpu) == len(active) else None, len(ids)),
            share(postgres, len(ids)),
        )

    def waits(self, count: int, every: float, warm_up: int) -> list[float]:
        """Return the milliseconds from COMMIT to handler of `count` jobs, one each `every` s."""
        self.clear()
        with Working(self) as working:
            working.until_ready()
            working.go()
            said = self.run("produce", count=count + warm_up, every=every, **HOW)
            working.until_done(count + warm_up)
            seen = working.stop()
        starts = dict(zip(seen["ids"], seen["starts"], strict=True))
        commits = dict(said["commits"])
        check(starts.keys() == commits.keys(), "jobs were not handled")
        check(len(seen["ids"]) == count + warm_up, "jobs were handled twice")
        check(not self.waiting(), "jobs were handled but are not done")
        waits = [max(0.0, starts[id] - at) * 1000 for id, at in said["commits"]]
        return waits[warm_up:]

    def _environment(self) -> dict[str, str]:
        params = self.database.params()
        database = {name: str(params[key]) for key, name in VARIABLES.items() if params.get(key)}
        # Little else: Graphile Worker, for one, would read DATABASE_URL, which is another database.
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        return {**kept, "NODE_ENV": "production", **database}


class Working:
    """One working process of a peer, in a `with` block."""

    def __init__(self, driven: Driven, task: str = "noop") -> None:
        self._driven = driven
        self._task = task
        self._lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.done = 0

    def __enter__(self) -> Working:
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile("w+"))
            self._process = subprocess.Popen(
                [*self._driven._command, "work", json.dumps({"task": self._task})],
                env=self._driven._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
            threading.Thread(target=self._read, daemon=True).start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._stack.close()

    def until_ready(self) -> None:
        """Return when it is connected."""
        check(self._next(PATIENCE).get("ready"), "the driver did not start")

    def go(self) -> None:
        """Start the work."""
        self._tell()

    def listen(self, seconds: float) -> None:
        """Take in what it told, waiting so long for the first line."""
        try:
            while True:
                self.done = self._lines.get(timeout=seconds or 1e-6)["done"]
                seconds = 0.0
        except queue.Empty:
            return

    def until_done(self, count: int) -> None:
        """Return when `count` jobs are done; raise Wrong if that takes too long."""
        deadline = monotonic() + PATIENCE
        while self.done < count:
            check(monotonic() < deadline, f"{self.done} of {count} jobs are done")
            self.listen(0.1)

    def stop(self) -> dict[str, Any]:
        """Stop it, and return its report."""
        self._tell()
        deadline = monotonic() + PATIENCE
        while "ids" not in (said := self._next(deadline - monotonic())):
            pass
        return said

    def _tell(self) -> None:
        if self._process.stdin:
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                self._lines.put(json.loads(line))

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            return self._lines.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            self._log.seek(0)
            check(False, f"the driver says nothing: {_last(self._log.read())}")
            raise


def _last(text: str) -> str:
    """Return the end of what was written on stderr."""
    lines: Sequence[str] = text.strip().splitlines() or ["no reason given"]
    return lines[-1][:200]
