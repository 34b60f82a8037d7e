"""The private PostgreSQL: one server for all processes, despite kills and forks."""

import os
import signal
import stat
import subprocess
from pathlib import Path

import psycopg
import pytest

from testproject.embedded import server
from tests.testproject.embedded.conftest import answers

pytestmark = pytest.mark.thorough

# The same with a forked child, which ends at once.
PARENT = """
import os, sys
from pathlib import Path
from testproject.embedded import server

server.ensure(Path(sys.argv[1]))
if os.fork():
    os.wait()
    for _ in sys.stdin:
        print(server.ensure(Path(sys.argv[1])), flush=True)
"""

# The same with a forked child, which outlives its parent.
CHILD = """
import os, sys
from pathlib import Path
from testproject.embedded import server

server.ensure(Path(sys.argv[1]))
parent, born = os.getpid(), os.pipe()
if os.fork():
    os.read(born[0], 1)
    sys.exit()
os.write(born[1], b".")
for _ in sys.stdin:
    print(server.ensure(Path(sys.argv[1])), flush=True)
"""


def postmaster(address: str) -> int:
    return int(Path(address, "postmaster.pid").read_text().split()[0])


def kill_postmaster(address: str) -> None:
    """Kill the server with SIGKILL, and return once nothing listens any more."""
    os.kill(postmaster(address), signal.SIGKILL)
    while answers(address):
        pass


class TestOneServerForAll:
    def test_three_first_starts_at_once_make_one_server_and_one_line(self, user, place):
        users = [user(data=place / "first") for _ in range(3)]
        for each in users:
            each.ask()
        addresses = {each.told() for each in users}
        assert len(addresses) == 1
        address = addresses.pop()
        said = [users[0].leave(), users[1].leave()]
        assert answers(address), "two of three have left"
        said.append(users[2].leave())
        assert not answers(address), "the last has left"
        *silent, line = sorted(said)
        assert silent == ["", ""]
        assert line.startswith(f"Started a private PostgreSQL {Path(address).name}.")
        assert address in line
        assert "DATABASE_URL=postgresql://" in line
        assert line.count("\n") == 1

    def test_data_survives_and_only_its_owner_may_enter(self, user):
        first = user()
        address = first.address()
        with psycopg.connect(host=address, user="postgres", dbname="postgres") as connection:
            connection.execute("create table kept (id int)")
            connection.execute("insert into kept values (7)")
        first.leave()
        assert stat.S_IMODE(Path(address).stat().st_mode) == 0o700
        second = user()
        assert second.address() == address
        with psycopg.connect(host=address, user="postgres", dbname="postgres") as connection:
            assert connection.execute("select id from kept").fetchone() == (7,)
            assert connection.execute("show fsync").fetchone() == ("on",)
            assert connection.execute("show listen_addresses").fetchone() == ("",)
        second.leave()


class TestDeaths:
    def test_after_a_killed_user_the_next_to_leave_stops_the_server(self, user):
        killed = user()
        address = killed.address()
        killed.kill()
        assert answers(address)
        clean = user()
        assert clean.address() == address
        assert clean.leave() == "", "it found the server running"
        assert not answers(address)

    def test_killed_server_is_restarted_for_its_users(self, user):
        first, second = user(), user()
        address = first.address()
        second.address()
        kill_postmaster(address)
        assert first.address() == address
        assert answers(address)
        assert second.address() == address
        first.leave()
        assert answers(address)
        second.leave()
        assert not answers(address)

    def test_pid_of_a_killed_server_may_be_reused(self, user):
        first = user()
        address = first.address()
        owner = Path(address).stat()
        kill_postmaster(address)
        # Of the same account: only then does PostgreSQL take it for a server.
        with subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, user=owner.st_uid, group=owner.st_gid
        ) as other:
            for name in ("postmaster.pid", f".s.PGSQL.{server.PORT}.lock"):
                file = Path(address, name)
                lines = file.read_text().splitlines(keepends=True)
                file.write_text("".join([f"{other.pid}\n", *lines[1:]]))
            assert first.address() == address
            assert answers(address)
            first.leave()
            assert not answers(address)
            assert other.poll() is None
            other.communicate()

    def test_a_server_that_does_not_start_is_an_error_with_its_log(self, user):
        first = user()
        address = first.address()
        first.leave()
        Path(address, "postgresql.conf").write_text("no_such_setting = 1\n")
        refused = user()
        refused.ask()
        said = refused.leave()
        assert "ImproperlyConfigured: PostgreSQL did not start" in said
        assert 'unrecognized configuration parameter "no_such_setting"' in said


class TestForks:
    def test_a_child_that_leaves_first_stops_nothing(self, user):
        parent = user(PARENT)
        address = parent.address()
        assert answers(address)
        assert parent.leave().count("Started") == 1, "it did not have to be started again"
        assert not answers(address)

    def test_a_child_that_stays_keeps_the_server(self, user):
        parent = user(CHILD)
        parent.process.wait()
        address = parent.address()
        assert answers(address)
        assert parent.leave().count("Started") == 1
        assert not answers(address)
