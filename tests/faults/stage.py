"""The stage for a point: the database, the proxy and the workers, and queries about them."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connections
from django.test.utils import override_settings

from tests.faults import invariants, patches
from tests.faults.app import ledger, trace
from tests.faults.driver import NO_WORKER, Nursery, Tree, until
from tests.faults.points import NOT_STARTED
from tests.faults.wire import Proxy

#: Identifies a worker's connections in pg_stat_activity.
WORKER = "faults-worker"
ARGUMENTS = ("--batch-size", "3", "--processes", "1", "--threads", "1")
#: A factor for all time limits.
PATIENCE = float(os.environ.get("FAULTS_PATIENCE", "1"))
#: Tables that a worker may write to, besides the ledger's.
TABLES = (
    "queuedmessage",
    "failedattempt",
    "handledmessage",
    "hourfigures",
    "minutefigures",
    "queuestate",
    "result",
    "schedule",
    "workerheartbeat",
    "uniquekey",
)

# In one statement, so that all counts are of the same moment.
DONE = """
select not exists (
    select from django_mq_queuedmessage q
      left join faults_sent s on s.name = q.payload ->> 'name'
     where starts_with(q.type, 'faults.') and q.dead_at is null and s.waits is not true)
"""
CONNECTED = """
select count(*) from pg_stat_activity
 where application_name = %s and datname = current_database()
"""
LEFT = """
select to_jsonb(m) - '{payload,metadata,retry}'::text[] || m.payload
  from django_mq_queuedmessage m
union all
select to_jsonb(f) - '{traceback}'::text[] from django_mq_failedattempt f
union all
select jsonb_build_object(
           'trace', string_agg(concat_ws(' ', event, name, attempt), ', ' order by id))
  from faults_trace
"""
# Move the leases of dead workers an hour back, and change nothing else.
PASS_TIME = """
update django_mq_queuedmessage set leased_until = leased_until - interval '1 hour'
 where leased_until is not null;
update django_mq_queuestate
   set owned_until = owned_until - interval '1 hour', probe_until = probe_until - interval '1 hour';
update django_mq_workerheartbeat set last_seen = last_seen - interval '1 hour'
"""
LOCK_FIRST = """
select from django_mq_queuedmessage
 where processable_after <= statement_timestamp() order by id limit 1 for update
"""
# The locked one is left; counted, since a message that backs off for a moment is neither due nor
# done.
OTHERS_DONE = """
select count(*) = 1
  from django_mq_queuedmessage q
    left join faults_sent s on s.name = q.payload ->> 'name'
 where starts_with(q.type, 'faults.') and q.dead_at is null and s.waits is not true
"""
UNTAKEN = """
select exists (
    select from django_mq_queuedmessage
     where leased_until <= statement_timestamp() for no key update skip locked)
"""


#: A worker's imports at its start: done once, in the process that forks them.
IMPORTED_BY_A_WORKER = ("django_mq.management.commands.mq_worker", "django.db.migrations.executor")


def run_worker(options: dict[str, Any]) -> int:
    """Run a worker in a process that the nursery has just forked."""
    os.environ[trace.DIRECTORY] = options["directory"]
    os.environ[trace.GATED] = "yes" if options["gated"] else ""
    database = connections[ledger.ALIAS].settings_dict
    database.update(options["database"])
    database["OPTIONS"] = {
        **database["OPTIONS"],
        "application_name": WORKER,
        "sslmode": "disable",  # encrypted frames could not be counted
        "gssencmode": "disable",
    }
    patches.apply(options["patch"])
    try:
        with override_settings(DJANGO_MQ={**settings.DJANGO_MQ, **options["mq"]}):
            call_command("mq_worker", *options["arguments"])
    except SystemExit as end:
        return int(end.code or 0)
    except CommandError as error:  # in the same form as manage.py
        print(error)  # noqa: T201
        return int(error.returncode)
    return 0


class Stage:
    """One for all points of a process; `play()` starts each of them from empty tables."""

    def __init__(self) -> None:
        for module in IMPORTED_BY_A_WORKER:
            importlib.import_module(module)
        self.nursery = Nursery(run_worker)  # before the first connection and the first thread
        self._scratch = tempfile.TemporaryDirectory(prefix="faults-")
        self.directory = Path(self._scratch.name)
        wrapper = connections[ledger.ALIAS]
        wrapper.ensure_connection()
        own = wrapper.get_connection_params()
        names = ("dbname", "user", "password", "host", "port")
        self._params = {name: own[name] for name in names if own.get(name)}
        self._connection = self.connect()
        host, port = str(own.get("host") or "localhost"), int(own.get("port") or 5432)
        path = f"{host}/.s.PGSQL.{port}"
        self.proxy = Proxy(path if host.startswith("/") else (host, port))
        self._direct = {"HOST": host, "PORT": str(port)}
        self._trees: list[Tree] = []
        self._checks: list[str] = []
        self.execute(ledger.DROP)
        self.execute(ledger.CREATE)

    def close(self) -> None:
        """Leave the database as it was."""
        self.nursery.close()
        self._empty()
        self.execute(ledger.DROP)
        self._connection.close()
        self._scratch.cleanup()

    @contextlib.contextmanager
    def play(self, send: Callable[[], None], patch: str = "") -> Iterator[None]:
        """Begin a point with empty tables; end all workers at its end.

        `send` sends its messages; `patch` breaks the package in each of its workers.
        """
        self.send, self.patch = send, patch
        self._empty()
        trace.clear(self.directory)
        self._trees, self._checks = [], []
        os.environ[trace.DIRECTORY] = str(self.directory)
        try:
            yield
        finally:
            for tree in self._trees:
                tree.destroy()
            self.proxy.begin()
            until(self.is_quiet, "the end of a killed worker's transactions")
            for tree in self._trees:
                tree.log.unlink(missing_ok=True)

    def _empty(self) -> None:
        names = [*(f"django_mq_{name}" for name in TABLES), *ledger.TABLES]
        self._run_all("; ".join(f"delete from {name}" for name in names))

    # ---- workers

    def start(self, *, direct: bool = False, gated: bool = False, **mq: Any) -> Tree:
        """Start a worker that goes through the proxy, or `direct`; `mq` overrides DJANGO_MQ.

        A `gated` one stops at the gate while that is shut.
        """
        proxy = {"HOST": "127.0.0.1", "PORT": str(self.proxy.port)}
        tree = self.nursery.start(
            {
                "arguments": ARGUMENTS,
                "gated": gated,
                "database": self._direct if direct else proxy,
                "directory": str(self.directory),
                "log": str(self.directory / f"worker-{len(self._trees)}.log"),
                "mq": mq,
                "patch": self.patch,
            }
        )
        self._trees.append(tree)
        return tree

    def said(self) -> str:
        """The output of all workers of this point."""
        return "\n".join(f"--- worker {n}\n{tree.said()}" for n, tree in enumerate(self._trees))

    def leave(self, *trees: Tree, told: bool = False, codes: tuple[int, ...] = (0,)) -> None:
        """Make these workers drain, unless they are `told` already; wait until they have ended."""
        for tree in trees:
            if tree.code() is None and not told:
                tree.tell(signal.SIGTERM)
        for tree in trees:
            until(tree.is_gone, "the end of a drain")
            # Before it has started, a worker leaves signals to the system.
            fine = codes if "started" in tree.said() else (*codes, -signal.SIGTERM)
            if tree.code() not in fine:
                self.find(f"exit code: a worker drained with code {tree.code()}")

    # ---- the database

    def connect(self) -> psycopg.Connection[Any]:
        """Open a connection of the suite, in autocommit mode."""
        return psycopg.connect(**self._params, autocommit=True)

    def execute(self, sql: str, *params: Any) -> Any:
        """Run a statement and return its cursor."""
        return self._connection.execute(sql, params or None)

    def is_done(self) -> bool:
        return bool(self.execute(DONE).fetchone()[0])

    def wait(self, look: Callable[[], Any], seconds: float) -> None:
        """Wait until `look` is true; if it never is, the invariants will find that."""
        with contextlib.suppress(TimeoutError):
            until(lambda: look() or self._not_started(), "", seconds * PATIENCE)

    def wait_done(self, seconds: float) -> None:
        """Wait until every message is handled."""
        self.wait(self.is_done, seconds)

    def is_quiet(self) -> bool:
        """Say whether no worker is connected: dead workers' work is committed or undone."""
        return not self.execute(CONNECTED, WORKER).fetchone()[0]

    def wait_lapsed(self, lease: float) -> None:
        """Wait until no lease of that many seconds can still be valid."""
        lapsed = time.monotonic() + lease
        until(lambda: time.monotonic() > lapsed, "a lease")

    def wait_taken(self, seconds: float) -> None:
        """Wait until every lapsed message that is not locked has been taken over."""
        self.wait(lambda: not self.execute(UNTAKEN).fetchone()[0], seconds)

    @contextlib.contextmanager
    def somebody_locks_first(self) -> Iterator[None]:
        """Make another session lock the first due message."""
        with self.connect() as other, other.transaction():
            other.execute(LOCK_FIRST)
            yield

    def are_others_done(self) -> bool:
        """Say whether every message that no other session has locked is handled."""
        return bool(self.execute(OTHERS_DONE).fetchone()[0])

    def pass_time(self) -> None:
        """Make the leases lapse, once all workers are dead."""
        self._run_all(PASS_TIME)

    def _run_all(self, statements: str) -> None:
        for statement in filter(str.strip, statements.split(";")):
            self.execute(statement)

    def left(self) -> str:
        """The messages and attempts in the tables, for people to read."""
        rows = self.execute(LEFT).fetchall()
        return "".join(f"left: {' '.join(map(str, row))}\n" for row in rows)

    # ---- invariants

    def find(self, what: str) -> None:
        """Record a violation."""
        self._checks.append(what)

    def _not_started(self) -> list[Tree]:
        return [tree for tree in self._trees if tree.code() == NO_WORKER]

    def check(self, *checks: dict[str, str], **allowed: int) -> list[str]:
        """Return the violations now, and those of earlier checks of the point."""
        with self._connection.cursor() as cursor:
            for tree in self._not_started():
                self.find(f"{NOT_STARTED}: {tree.said().strip().rpartition(chr(10))[2]}")
            invariants.load(cursor, trace.events(self.directory))
            for each in checks:
                self._checks += invariants.broken(cursor, each, **allowed)
        self._checks = list(dict.fromkeys(self._checks))
        return self._checks
