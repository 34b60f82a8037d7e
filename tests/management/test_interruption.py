"""Commands as processes that signals end, and questions at their terminal."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest
from django.conf import settings
from django.db import connection

from django_mq.models import QueuedMessage
from tests.acceptance.conftest import database_url
from tests.database import second_connection
from tests.rows import add, insert_all
from tests.slow import slow
from tests.waiting import SOON, until

pytestmark = pytest.mark.django_db(transaction=True)

STAND = 20_318  # the advisory lock at which the second chunk stands
# Behind this id the removal of a message stands until the lock is free. It does not wait in the
# lock's queue, in which it would have a second: a busy test would send the signal too late.
STANDING = """
create function stand() returns trigger language plpgsql as $$
begin
    while old.id > {id} and not pg_try_advisory_xact_lock_shared({lock}) loop
        perform pg_sleep(0.01);
    end loop;
    return old;
end $$;
create trigger stand before delete on django_mq_queuedmessage
   for each row execute function stand()
"""
STANDS = """
select 1 from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'
"""


@pytest.fixture(autouse=True)
def _hangups_matter() -> Iterator[None]:
    """A test run under `nohup` ignores SIGHUP, and its child processes would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def command(*arguments: str, **options: IO[str] | int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(settings.BASE_DIR / "manage.py"), *arguments],
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.acceptance.settings",
            "DATABASE_URL": database_url(),
        },
        text=True,
        **options,  # type: ignore[call-overload]
    )


@contextmanager
def standing_still() -> Iterator[None]:
    """Let the removal of the message number 1,200 and of all behind it stand still."""
    ids = insert_all({"dead": -1} for _ in range(1500))
    with connection.cursor() as cursor:
        cursor.execute(STANDING.format(id=ids[1200], lock=STAND))
    try:
        with second_connection() as other:
            other.execute("select pg_advisory_lock(%s)", [STAND])
            yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("drop trigger stand on django_mq_queuedmessage; drop function stand")


@pytest.mark.parametrize("number", [signal.SIGTERM, *slow(signal.SIGINT, signal.SIGHUP)])
def test_a_signal_in_a_long_purge_leaves_a_line_in_the_log(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Guarantee 14: chunks that are committed are logged; the process ends by the signal."""
    log = tmp_path / "log"
    with standing_still(), log.open("w") as output:
        purge = command("mq_purge", "--all", "--yes", stdout=output, stderr=output)
        try:
            with second_connection() as other:
                until(lambda: other.execute(STANDS).fetchall(), "the second chunk stands")
            purge.send_signal(number)
            assert purge.wait(SOON) == -number
        finally:
            purge.kill()
    assert QueuedMessage.objects.count() == 500
    said = log.read_text()
    assert "messages purged before it was interrupted: 1000, skipped 500" in said
    assert "Traceback" not in said


def reads(pid: int) -> bool:
    """Return whether a process that has asked waits for the answer.

    Python's `input()` notices no signal between its question and the read that follows.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks in /proc")
@pytest.mark.parametrize(
    ("key", "code"), [*slow(("\x04", 0)), ("\x03", -signal.SIGINT)], ids=["Ctrl-D", "Ctrl-C"]
)
def test_the_keys_that_leave_a_question_change_nothing(key: str, code: int, tmp_path: Path) -> None:
    """The question is at the terminal even if the answer goes to a file."""
    kept = add(dead=-1)
    ours, theirs = pty.openpty()
    with (tmp_path / "answer").open("w") as answer:
        purge = command("mq_purge", "--all", stdin=theirs, stderr=theirs, stdout=answer)
    os.close(theirs)
    said = bytearray()

    def heard(words: bytes) -> bool:
        said.extend(os.read(ours, 65536))
        return words in said

    try:
        until(lambda: heard(b"[y/N] "), "the question")
        until(lambda: reads(purge.pid), "it waits for the answer")
        if key == "\x03":  # the terminal is not the controlling one of the process
            purge.send_signal(signal.SIGINT)
        else:
            os.write(ours, key.encode())
        assert purge.wait(SOON) == code
        with suppress(OSError):  # nobody has the other end
            heard(b"")
    finally:
        purge.kill()
        os.close(ours)
    assert b"Traceback" not in said
    assert list(QueuedMessage.objects.all()) == [kept]


AT_EXIT = """
import atexit, os, sys
atexit.register(lambda: os.kill(os.getpid(), {number}))
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", "mq_types"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, *slow(signal.SIGHUP)])
def test_a_signal_while_the_interpreter_exits_ends_it_quietly(number: signal.Signals) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(number=int(number))],
        cwd=settings.BASE_DIR,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.acceptance.settings"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (-number, "")


@pytest.mark.parametrize("name", ["mq_worker", *slow("mq_status")])
def test_ctrl_c_while_the_server_does_not_answer_is_quiet(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"postgresql://ann@127.0.0.1:{silent.getsockname()[1]}/nothing"
        started = subprocess.Popen(
            [sys.executable, str(settings.BASE_DIR / "manage.py"), name],
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "tests.acceptance.settings",
                "DATABASE_URL": address,
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            silent.settimeout(SOON)
            client, _ = silent.accept()
            with client:
                client.recv(8)  # it has begun to talk, and now waits
                started.send_signal(signal.SIGINT)
                _, said = started.communicate(timeout=SOON)
        finally:
            started.kill()
    assert (started.returncode, said) == (-signal.SIGINT, "")
