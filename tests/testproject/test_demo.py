"""The demo: its figures add up, it can run again, and however it ends, no process is left."""

import contextlib
import doctest
import http.cookiejar
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import ProgrammingError, connection

from django_mq.models import Schedule
from testproject.shop import mailing
from testproject.shop.demo import customers, ledger
from testproject.shop.demo.ledger import Ledger
from testproject.shop.demo.processes import Processes, Trouble
from testproject.shop.management.commands import mq_demo
from tests.waiting import until

MARK = "MQ_DEMO_TEST"

# Three orders: two mailed, one dead.
FINE = Ledger(
    accepted=3,
    refused=1,
    orders=frozenset({1, 2, 3}),
    cancelled=1,
    invoices=frozenset({1, 2, 3}),
    mails=frozenset({1, 2}),
    dead=Counter({3: 1}),
    reasons=("no such mailbox",),
    strangers=0,
    units_ordered=7,
    units_counted=7,
    waiting=0,
    failed_attempts=2,
    reports=4,
    seconds=0.5,
    latencies=[0.001, 0.002, 0.009],
)


def test_a_ledger_adds_up() -> None:
    assert FINE.adds_up
    assert (FINE.lost, FINE.twice) == (0, 0)
    shown = {row.name: row for row in FINE.rows()}
    assert shown["mails + dead"].value == "3"
    assert "24 a second" in shown["messages handled"].note


@pytest.mark.parametrize(
    ("wrong", "lost", "twice"),
    [
        ({"accepted": 4}, 1, 0),
        ({"invoices": frozenset({1, 2})}, 1, 0),
        ({"mails": frozenset({1})}, 1, 0),
        ({"dead": Counter()}, 1, 0),
        ({"units_counted": 5}, 2, 0),
        ({"waiting": 1}, 1, 0),
        ({"units_counted": 9}, 0, 2),
        ({"strangers": 1}, 0, 1),
        ({"dead": Counter({3: 2})}, 0, 1),
        ({"dead": Counter({2: 1, 3: 1})}, 0, 1),
        ({"dead": Counter({2: 1})}, 1, 1),  # as many as there should be, but not the same
    ],
)
def test_a_ledger_that_does_not_add_up(wrong: dict[str, Any], lost: int, twice: int) -> None:
    wrong_one = replace(FINE, **wrong)
    assert (wrong_one.lost, wrong_one.twice) == (lost, twice)
    assert not wrong_one.adds_up


@pytest.mark.parametrize("module", [customers, ledger])
def test_examples(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.fixture
def mark() -> Iterator[str]:
    """Marks a test's processes, and their children, by an environment variable."""
    mark = uuid.uuid4().hex
    yield mark
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Return the processes that carry the mark."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
    return found


@pytest.fixture(scope="module")
def database(django_db_blocker: Any) -> Iterator[str]:
    """The URL of a database for one demo after another, even after a killed one."""
    name = f"mq_demo_{uuid.uuid4().hex[:12]}"
    with django_db_blocker.unblock():
        given = connection.get_connection_params()
    where = {key: given[key] for key in ("host", "port", "user", "password") if key in given}
    with psycopg.connect(**where, dbname="postgres", autocommit=True) as server:
        server.execute(f'CREATE DATABASE "{name}"')
        login = quote(where.get("user", ""), safe="")
        if "password" in where:
            login += ":" + quote(where["password"], safe="")
        place = urlencode({key: where[key] for key in ("host", "port") if key in where})
        yield f"postgresql://{login}@/{name}?{place}"
        with psycopg.connect(**where, dbname=name) as shop:
            for [run] in shop.execute("SELECT DISTINCT run FROM shop_order"):
                shutil.rmtree(mailing.directory(run), ignore_errors=True)
        server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def demo(database: str, mark: str, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(*options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-u", "manage.py", "mq_demo", "--orders", "50", *options],
            cwd=settings.BASE_DIR,
            env=os.environ | {"DATABASE_URL": database, MARK: mark, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Return all lines up to one that matches."""
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return "".join(lines)
    raise AssertionError(f"never said {pattern!r}:\n" + "".join(lines))


def log_in(address: str, user: str, password: str) -> str:
    """Log in like a browser, and return the page that follows."""
    jar = http.cookiejar.CookieJar()
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    with browser.open(address, timeout=30) as form:
        [token] = re.findall(r'csrfmiddlewaretoken" value="(\w+)"', form.read().decode())
    fields = {"username": user, "password": password, "csrfmiddlewaretoken": token}
    with browser.open(form.url, urlencode(fields).encode(), timeout=30) as page:
        return page.read().decode()


def test_a_process_that_ends_by_itself_is_trouble(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("wrong", "no_such_command")
        with pytest.raises(Trouble, match=r"status 1(?s:.*)no_such_command"):
            processes.wait_for(lambda: None, "nothing")


#: A demo that is still running when a busy machine gets round to ending it.
LONG = ("--orders", "5000")
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks in /proc")


@needs_proc
def test_it_adds_up_and_leaves_nothing(demo: Any, mark: str, tmp_path: Path) -> None:
    process = demo()
    said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    assert re.search(r"orders committed +50 .* ok", said)
    assert re.search(r"orders rolled back +2 .* ok", said)
    assert re.search(r"invoices +50 .* ok", said)
    assert re.search(r"dead letters +1 .*no such mailbox", said)
    assert re.search(r"mails \+ dead +50 .* ok", said)
    assert re.search(r"reports +[1-9]\d* .* ok", said)
    assert "nothing lost, nothing twice" in said
    assert "\x1b" not in said  # not a terminal
    assert not marked(mark)
    assert not list(tmp_path.iterdir())  # no logs


@pytest.mark.slow
@needs_proc
def test_killed_it_leaves_nothing_running(demo: Any, mark: str) -> None:
    process = demo(*LONG)
    read_until(process, "at once")
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not marked(mark))


@pytest.mark.slow
@needs_proc
def test_sigterm_ends_all_that_the_demo_started(demo: Any, mark: str, tmp_path: Path) -> None:
    process = demo(*LONG)
    read_until(process, "at once")
    assert len(marked(mark)) > 3
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert not marked(mark)
    assert not list(tmp_path.iterdir())


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("interrupted", [True, False])
def test_interrupted_in_a_commit_it_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Django then fails to leave the transaction, and reports that."""

    def demonstrate(*args: Any, **options: Any) -> None:
        try:
            if interrupted:
                raise KeyboardInterrupt
        finally:
            raise ProgrammingError("connection in transaction status INTRANS")

    monkeypatch.setattr(mq_demo.Command, "demonstrate", demonstrate)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit if interrupted else ProgrammingError):
        call_command("mq_demo")


@pytest.mark.django_db(transaction=True)
def test_interrupted_in_a_query_it_ends_all_the_same(tmp_path: Path) -> None:
    Schedule.objects.create(name=mq_demo.REPORTS, type="t", every=timedelta(days=1))

    def interrupted() -> None:
        with Processes(tmp_path) as processes, mq_demo.reporting(processes):
            connection.ensure_connection()
            connection.connection.pgconn.send_query(b"select")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not Schedule.objects.get().enabled


@pytest.mark.thorough
@needs_proc
def test_on_the_same_database_it_adds_up_again_and_can_be_kept(demo: Any, mark: str) -> None:
    process = demo("--keep")
    said = read_until(process, "password")
    assert "nothing lost, nothing twice" in said
    address, user, password = re.findall(r"admin +(\S+) +login (\S+) +password (\S+)", said)[0]
    assert "Log out" in log_in(address, user, password)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert not marked(mark)
