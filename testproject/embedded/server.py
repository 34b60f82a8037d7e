"""One server for all the processes that use a data directory: first in starts, last out stops."""

import atexit
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured
from psycopg import pq
from psycopg.conninfo import make_conninfo

from . import binaries
from .places import Account, reachable, socket_directory
from .users import Users

PORT = 5432  # part of the socket's name; the server listens on no network
START_SECONDS = 60
MAX_CONNECTIONS = 300  # a test run on every core, each with workers of several threads

# A pid that no process has: beyond the largest that any kernel gives.
NOBODY = 2**31 - 1


def ensure(directory: Path) -> Path:
    """Return the directory of the socket of a running server that keeps its data in `directory`.

    Starts it if it does not answer, also when it was killed since the last call, and keeps it
    alive until this process and its forked children have ended. Safe in threads and over fork.

    Raises ImproperlyConfigured if there is no PostgreSQL or it does not start within 60 s.
    """
    with _turn:
        if directory not in _servers:
            _servers[directory] = Server(directory)
        server = _servers[directory]
        server.ensure()
    return server.sockets


class Server:
    """A server as this process sees it: where it is, and whether this process holds on to it."""

    def __init__(self, directory: Path) -> None:
        account = Account.choose()
        self.binaries = binaries.find(account)
        # Another major version cannot read the data, so each has its own.
        self.data = reachable(directory.absolute(), account) / str(self.binaries.major)
        owner = self.data.stat().st_uid if self.data.exists() else None
        self.account = Account.choose(owner)
        self.sockets = socket_directory(self.data, self.account)
        self.log = self.data / "server.log"
        self.users = Users(self.data)

    def ensure(self) -> None:
        if self.users.held is not None and self.ping() == pq.Ping.OK:
            return
        with self.users.alone():
            if self.users.held is None:
                self.users.join()
                atexit.register(self.leave)
            if not self.data.exists():
                self.create()
            self.start()

    def leave(self) -> None:
        """Let go of the server, and stop it if nobody else uses it."""
        with contextlib.suppress(FileNotFoundError), self.users.alone():
            if self.users.leave() and self.is_alive():
                self.control("stop", "-m", "fast")

    def create(self) -> None:
        """Make the data directory, all or nothing."""
        making = self.data.with_suffix(".new")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(mode=0o700)
        self.account.give(making)
        options = ["--auth=trust", "--no-sync", "--locale=C", "--encoding=UTF8"]
        done = self.run("initdb", "--pgdata", making, "--username=postgres", *options)
        if done.returncode:
            raise ImproperlyConfigured(f"PostgreSQL's initdb failed:\n{done.stdout}")
        making.rename(self.data)

    def start(self) -> None:
        """Return once the server answers, started here if need be."""
        deadline = time.monotonic() + START_SECONDS
        options = {
            "listen_addresses": "",
            "max_connections": MAX_CONNECTIONS,
            "port": PORT,
            "unix_socket_directories": self.sockets,
            "unix_socket_permissions": "0700",
        }
        settings = " ".join(f"-c {name}={shlex.quote(str(v))}" for name, v in options.items())
        while self.ping() != pq.Ping.OK:
            if not self.is_alive():
                self.forget_the_dead()
                with contextlib.suppress(FileNotFoundError):
                    self.log.replace(self.log.with_suffix(".old"))
                done = self.control("start", "-l", self.log, "-o", settings)
                if done.returncode == 0:
                    self.announce()
                    continue
                if "shared memory block" not in self.tail():
                    raise ImproperlyConfigured(
                        f"PostgreSQL did not start. {self.log} ends with:\n{self.tail()}"
                    )
            # On its way up or down, or processes of one that was killed are still about to notice.
            if time.monotonic() > deadline:
                raise ImproperlyConfigured(
                    f"PostgreSQL did not answer within {START_SECONDS} s. "
                    f"{self.log} ends with:\n{self.tail()}"
                )
            time.sleep(0.02)

    def ping(self) -> pq.Ping:
        """Ask by connecting: a pid may be a zombie's, or another process's after a reboot."""
        where = make_conninfo("", host=str(self.sockets), port=PORT, connect_timeout=5)
        return pq.Ping(pq.PGconn.ping(where.encode()))

    def is_alive(self) -> bool:
        """Return whether the process named in postmaster.pid is a server of this data."""
        try:
            pid = int((self.data / "postmaster.pid").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return False
        return str(self.data) in command(pid)

    def forget_the_dead(self) -> None:
        """Take the pid of a server that is gone out of its lock files.

        PostgreSQL does not start while any process has that pid, be it a zombie in a container
        without an init. The rest of postmaster.pid stays: by the shared memory named there it
        notices what the dead server left running.
        """
        Path(self.sockets, f".s.PGSQL.{PORT}.lock").unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError), (self.data / "postmaster.pid").open("r+") as f:
            f.readline()
            rest = f.read()
            f.seek(0)
            f.write(f"{NOBODY}\n{rest}")
            f.truncate()

    def announce(self) -> None:
        sys.stderr.write(
            f"Started a private PostgreSQL {self.binaries.version} in {self.data} "
            "(to use your own: DATABASE_URL=postgresql://user:password@host:5432/name)\n"
        )

    def tail(self) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        except OSError as error:
            return str(error)

    def control(self, verb: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run("pg_ctl", verb, "-w", "-t", str(START_SECONDS), "-D", self.data, *options)

    def run(self, program: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
        return self.account.run(self.binaries.directory / program, *options)


def command(pid: int) -> str:
    """Return the command line of process `pid`; empty for a zombie or if there is none."""
    if not Path("/proc/self/cmdline").exists():
        return Account(None).run("ps", "-o", "command=", "-p", str(pid)).stdout
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


_servers: dict[Path, Server] = {}
_turn = threading.Lock()


def _after_fork() -> None:
    global _turn
    _turn = threading.Lock()  # the thread that held the inherited one does not exist here
    for server in _servers.values():
        server.users.after_fork()


os.register_at_fork(after_in_child=_after_fork)
