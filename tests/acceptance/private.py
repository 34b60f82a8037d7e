"""A PostgreSQL server for one test, which may stop, restrict or replace it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from django.conf import settings

from testproject.embedded.server import PORT, Server
from tests.acceptance.app import effects


@contextmanager
def directory() -> Iterator[Path]:
    """A directory that the server's account can enter; removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="django_mq-acceptance-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@contextmanager
def running() -> Iterator[Server]:
    """A server on which the tables exist."""
    with directory() as path:
        server = Server(path)
        try:
            server.create()
            server.start()
            migrate(url_of(server))
            yield server
        finally:
            server.control("stop", "-m", "immediate")


@contextmanager
def standby_of(primary: Server) -> Iterator[Server]:
    """A standby that has every commit that the primary acknowledges from now on."""
    with directory() as path:
        server = Server(path)
        server.data.mkdir(mode=0o700)
        server.account.give(server.data)
        where = [f"--host={primary.sockets}", f"--port={PORT}", "--username=postgres"]
        options = [f"--pgdata={server.data}", "-R", "--checkpoint=fast", "--no-sync", *where]
        done = primary.run("pg_basebackup", *options)
        assert done.returncode == 0, done.stdout
        try:
            server.start()
            look(primary, "alter system set synchronous_standby_names = '*'", rows=False)
            look(primary, "select pg_reload_conf()")
            yield server
        finally:
            server.control("stop", "-m", "immediate")


def migrate(url: str) -> None:
    subprocess.run(
        [sys.executable, str(settings.BASE_DIR / "manage.py"), "migrate", "--verbosity", "0"],
        env=os.environ
        | {"DJANGO_SETTINGS_MODULE": "tests.acceptance.settings", "DATABASE_URL": url},
        check=True,
        timeout=60,
    )
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(effects.CREATE)


def url_of(server: Server) -> str:
    return f"postgresql://postgres@/postgres?host={server.sockets}&port={PORT}"


def look(server: Server, statement: str, *params: Any, rows: bool = True) -> list[Any]:
    """Run a statement and return its rows, if it has any."""
    with psycopg.connect(url_of(server), autocommit=True) as connection:
        cursor = connection.execute(statement, params)
        return cursor.fetchall() if rows else []


def send(server: Server, kind: str, *names: str, **payload: Any) -> None:
    """Broadcast like another program: by the SQL function, so that a worker routes the message."""
    with psycopg.connect(url_of(server), autocommit=True) as connection:
        for name in names:
            connection.execute(
                "select mq_broadcast('work', %s, %s)",
                (f"acceptance.{kind}", psycopg.types.json.Jsonb({**payload, "name": name})),
            )


def done(server: Server) -> list[str]:
    return [name for (name,) in look(server, "select name from acceptance_effect order by name")]
