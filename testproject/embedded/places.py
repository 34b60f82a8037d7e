"""Which account runs the server, and which directories that account can reach.

PostgreSQL refuses to run as root, so root lends the server to an account that exists already.
No mode outside the directories made here is ever changed: what the account cannot reach is replaced
by a private directory under the system's temporary one.
"""

import contextlib
import hashlib
import os
import pwd
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured


class Account:
    """The account for PostgreSQL's programs: this process's user, or, for root, a lesser one."""

    def __init__(self, entry: pwd.struct_passwd | None) -> None:
        self.entry = entry  # None: this process's own user

    @classmethod
    def choose(cls, owner: int | None = None) -> "Account":
        """Return the account for a new server, or for data that user id `owner` made.

        Raises ImproperlyConfigured if the data is somebody else's, or if root finds no account.
        """
        me = os.geteuid()
        if me != 0:
            if owner not in (None, me):
                raise ImproperlyConfigured(
                    f"The private PostgreSQL's data belongs to user id {owner}, this is {me}: "
                    "remove it, set POSTGRES_DIR to another directory, or set DATABASE_URL."
                )
            return cls(None)
        # A bare user id will not do: PostgreSQL looks itself up in the passwd database.
        if owner:
            with contextlib.suppress(KeyError):
                return cls(pwd.getpwuid(owner))
        for name in ("postgres", "nobody"):
            with contextlib.suppress(KeyError):
                return cls(pwd.getpwnam(name))
        raise ImproperlyConfigured(
            "PostgreSQL does not run as root, and there is neither a `postgres` nor a `nobody` "
            "account to lend it to: use a normal user, or set DATABASE_URL."
        )

    def run(self, *command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `command` as this account and return it completed, errors in its stdout.

        The environment is not passed on: PGPORT and its kin would change the server, and secrets
        have no business in it. Raises PermissionError if the account cannot reach the program.
        """
        if self.entry is not None:
            options |= {
                "user": self.entry.pw_uid,
                "group": self.entry.pw_gid,
                "extra_groups": [],
            }
        return subprocess.run(
            [str(part) for part in command],
            cwd="/",  # the account may not be allowed where we are
            env={"PATH": os.defpath, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def can_enter(self, directory: Path) -> bool:
        """Return whether the account can work in `directory`, given the modes above it."""
        return self.run("test", "-x", directory).returncode == 0

    def give(self, directory: Path) -> None:
        """Make the account the owner of `directory`, which was just made here."""
        if self.entry is not None:
            os.chown(directory, self.entry.pw_uid, self.entry.pw_gid)


def reachable(wanted: Path, account: Account) -> Path:
    """Return `wanted`, made if need be, or a private directory if `account` cannot get there."""
    existing = next(place for place in (wanted, *wanted.parents) if place.exists())
    if not account.can_enter(existing):
        return private("data", wanted)
    if existing != wanted:
        wanted.mkdir(parents=True, exist_ok=True)
        wanted.chmod(0o755)  # whatever the umask: the server's account has to get through
    return wanted


def socket_directory(data: Path, account: Account) -> Path:
    """Return where the server of `data` listens: in its data, which nobody else can enter.

    A socket's path has about 100 bytes, and a comma in it separates hosts: such data is given a
    short directory of its own.
    """
    if len(os.fsencode(data)) <= 80 and "," not in str(data):
        return data
    directory = private("socket", data) / "run"
    directory.mkdir(mode=0o700, exist_ok=True)
    account.give(directory)
    return directory


def private(purpose: str, source: Path) -> Path:
    """Return the one directory under the system's temporary one that stands in for `source`.

    Others can enter, only its owner can write. Raises ImproperlyConfigured if somebody put
    something else in its place, as anybody can in a temporary directory.
    """
    digest = hashlib.sha256(os.fsencode(source)).hexdigest()[:12]
    directory = Path(tempfile.gettempdir()) / f"django_mq-{os.geteuid()}-{purpose}-{digest}"
    directory.mkdir(mode=0o755, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ImproperlyConfigured(f"{directory} is not ours: remove it, or set DATABASE_URL.")
    directory.chmod(0o755)  # whatever the umask
    return directory
