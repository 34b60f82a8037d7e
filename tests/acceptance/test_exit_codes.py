"""A command that cannot start ends with a sentence, not with a traceback."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings
from django.db import connection

from tests.acceptance.conftest import database_url
from tests.acceptance.processes import Worker
from tests.database import second_connection
from tests.slow import slow


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--queue", "no such queue"], "no such queue"),
        (["--reload", "--until-empty"], "--until-empty"),
        *slow(
            (["--queue", ""], "queue"),
            (["--queue", "work,mail"], "--queue work --queue mail"),
            (["--database", "nowhere"], "nowhere"),
            (["--processes", "5000"], "'5000' is not a whole number from 1 to 1,000"),
        ),
    ],
)
def test_wrong_values_are_two(start: Callable[..., Worker], options: list[Any], words: str) -> None:
    """As in every other command, and as arguments that cannot be parsed."""
    worker = start(*options)
    assert worker.ends() == 2
    assert words in worker.said()
    assert "Traceback" not in worker.said()


@pytest.mark.parametrize(
    "options",
    [
        ["--threads", "0"],
        ["--nonsense"],
        *slow(
            ["--processes", "many"],
            ["--max-seconds", "-1"],
            ["--drain-seconds", "nan"],
            ["--health-port", "70000"],
        ),
    ],
)
def test_wrong_arguments_are_two(start: Callable[..., Worker], options: list[Any]) -> None:
    worker = start(*options)
    assert worker.ends() == 2
    assert options[0] in worker.said()
    assert "Traceback" not in worker.said()
    assert "_positive" not in worker.said()


def test_a_wrong_setting_is_one(start: Callable[..., Worker]) -> None:
    worker = start(mq={"THREADS": "several"})
    assert worker.ends() == 1
    assert "THREADS" in worker.said()
    assert "Traceback" not in worker.said()


@pytest.fixture(scope="module")
def empty_database(django_db_setup: None) -> Iterator[str]:
    """Create a database: any existing one may belong to somebody, with tables and messages.

    It stays empty, and dropping one takes a checkpoint: one serves all tests.
    """
    name = f"mq_empty_{secrets.token_hex(4)}"
    with second_connection() as server:
        server.execute(f"create database {name} template template0")
        yield name
        server.execute(f"drop database {name} with (force)")


def test_missing_tables_are_one(start: Callable[..., Worker], empty_database: str) -> None:
    worker = start(url=database_url(dbname=empty_database))
    assert worker.ends() == 1
    assert "migrate" in worker.said()
    assert "Traceback" not in worker.said()


@pytest.mark.parametrize(
    "command",
    [
        "mq_status",
        *slow("mq_requeue --id 1"),
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in ("mq_why 1", "mq_peek", "mq_pause mail")
        ),
    ],
)
def test_commands_without_tables_suggest_migrate(empty_database: str, command: str) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", *command.split()],
        cwd=settings.BASE_DIR,
        env=os.environ | {"DATABASE_URL": database_url(dbname=empty_database)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "'default' are not up to date: run manage.py migrate" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code"), [("mq_status", 1), ("mq_worker --until-empty", 1), ("mq_doctor", 2)]
)
def test_commands_suggest_migrate_for_that_database(
    empty_database: str, command: str, code: int
) -> None:
    """`migrate` without an option goes on migrating the default one, which is up to date."""
    done = subprocess.run(
        [sys.executable, "manage.py", *command.split(), "--database", "elsewhere"],
        cwd=settings.BASE_DIR,
        env=os.environ
        | {
            "DJANGO_SETTINGS_MODULE": "tests.acceptance.settings",
            "DATABASE_URL": database_url(),
            "ACCEPTANCE_ALIASES": json.dumps({"elsewhere": {"NAME": empty_database}}),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert "un manage.py migrate --database elsewhere" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param(
            "postgresql://nobody@127.0.0.1:1/nothing", "refused. Is the server", id="away"
        ),
        pytest.param(
            "postgresql://nobody@127.0.0.1:1/nothing?pool=True",
            "port 1 failed",
            id="pooled",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "postgresql://nobody@127.0.0.1:1",
            "supply the NAME",
            id="nameless",
            marks=pytest.mark.thorough,
        ),
    ],
)
@pytest.mark.parametrize(("command", "code"), [("mq_status", 1), *slow(("mq_doctor", 2))])
def test_operators_without_a_database(url: str, words: str, command: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", command],
        cwd=settings.BASE_DIR,
        env=os.environ | {"DATABASE_URL": url},
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert (done.returncode, words in said) == (code, True), said
    assert "NAME" in words or "database 'default' cannot be" in said.lower()
    assert "Traceback" not in said


def test_an_unreachable_database_is_one(start: Callable[..., Worker]) -> None:
    """NSQ-35 as changed: at the start; a worker that runs waits for it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        worker = start(url=database_url(host="127.0.0.1", port=taken.getsockname()[1]))
        assert worker.ends() == 1
    (line,) = worker.said().strip().splitlines()
    assert line.startswith("CommandError: database 'default' cannot be used: ")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("default_transaction_read_only=on", "Transactions of this login are read only: default_"),
        ("array_nulls=off", "array_nulls of this login is off: "),
        ("DateStyle=German", "The DateStyle of this login is 'German, DMY': "),
    ],
)
def test_a_setting_with_which_no_worker_can_work_is_one(
    start: Callable[..., Worker], setting: str, words: str
) -> None:
    """As an unreachable server: the start fails, and a worker that runs waits for it."""
    place = {name: str(connection.get_connection_params()[name]) for name in ("host", "port")}
    worker = start(database={"OPTIONS": {**place, "options": f"-c {setting}"}})
    assert worker.ends() == 1
    (line,) = worker.said().strip().splitlines()
    assert line.startswith(f"CommandError: database 'default' cannot be used: {words}")
    assert " where it is set: for the role, the database or the server, or in OPTIONS" in line


@pytest.fixture
def stranger() -> Iterator[str]:
    """A login without rights on any table."""
    name = f"mq_stranger_{secrets.token_hex(4)}"
    with second_connection() as server:
        server.execute(f"create role {name} login password 'x'")
        yield name
        server.execute(f"drop role {name}")


def test_a_login_without_rights_is_one(start: Callable[..., Worker], stranger: str) -> None:
    worker = start(url=database_url(user=stranger, password="x"))
    assert worker.ends() == 1
    (line,) = worker.said().strip().splitlines()
    assert "permission denied" in line
    assert line.endswith(
        "The login needs the role mq_worker: see 'Database roles' in the documentation"
    )


@pytest.mark.slow
def test_role_without_access_to_migrations_gets_the_hint_to_migrate(
    empty_database: str, stranger: str
) -> None:
    with second_connection(dbname=empty_database) as server:
        server.execute("create table django_migrations ()")
        done = subprocess.run(
            [sys.executable, "manage.py", "mq_status"],
            cwd=settings.BASE_DIR,
            env=os.environ
            | {"DATABASE_URL": database_url(dbname=empty_database, user=stranger, password="x")},
            capture_output=True,
            text=True,
        )
        server.execute("drop table django_migrations")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.strip().splitlines()
    assert line.endswith(". Migrations may be missing: run manage.py migrate")


@pytest.mark.parametrize("by", ["option", "setting"])
def test_a_taken_health_port_is_one(start: Callable[..., Worker], by: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        option = by == "option"
        worker = start("--health-port", port) if option else start(mq={"HEALTH_PORT": port})
        assert worker.ends() == 1
    assert str(port) in worker.said()
    assert "Traceback" not in worker.said()
