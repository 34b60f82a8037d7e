"""Processes that use the private PostgreSQL of a directory: real ones, killed and forked."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from django.conf import settings

from testproject.embedded import server

ROOT = settings.BASE_DIR

# Asks for the server for each line of input and prints its address; ends at the end of input.
USER = """
import sys
from pathlib import Path
from testproject.embedded import server

for _ in sys.stdin:
    print(server.ensure(Path(sys.argv[1])), flush=True)
"""


class User:
    """A process that uses the server, and reports it."""

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
        """Wait for the end, and return its stderr."""
        return self.process.communicate()[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def clean_environment() -> dict[str, str]:
    """Return this environment without the variables that `testproject.settings` reads."""
    ours = ("DATABASE_URL", "DEBUG", "SECRET_KEY", "POSTGRES_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return environment | {"PYTHONPATH": str(ROOT)}


def answers(address: str) -> bool:
    try:
        psycopg.connect(host=address, port=server.PORT, user="postgres", dbname="postgres").close()
    except psycopg.OperationalError:
        return False
    return True


def enterable(directory: Path) -> Path:
    """Make a directory that every account can enter, regardless of the umask."""
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)
    return directory


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Provide a directory that every account can enter, unlike pytest's own `tmp_path`."""
    made = enterable(Path(tempfile.mkdtemp(prefix="django_mq-test-")))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def place() -> Iterator[Path]:
    with directory() as made:
        yield made


@pytest.fixture(scope="module")
def untouched() -> Iterator[Path]:
    """Data in the state that initdb leaves, which takes longer to make than to copy."""
    with directory() as made:
        server.Server(made).create()
        yield made


@pytest.fixture
def data(untouched: Path, place: Path) -> Path:
    """Data for this test alone, with no server yet."""
    subprocess.run(["cp", "-a", untouched, place / "data"], check=True)
    return place / "data"


@pytest.fixture
def user(data: Path) -> Iterator[Callable[..., User]]:
    """Starts processes that use the server of `data`; ends them after a failed test."""
    users: list[User] = []

    def start(program: str = USER, data: Path = data) -> User:
        users.append(User(data, program))
        return users[-1]

    yield start
    for each in users:
        if each.process.returncode is None:
            each.leave()
