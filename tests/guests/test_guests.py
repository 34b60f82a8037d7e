"""Django's test runner runs the scenarios of each guest in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def installed(package: str) -> str:
    """Return the version of a package; skip if it is missing, or fail where all are required."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        text = f"{package} is not installed: `python -m tests.guests` installs it"
        if os.environ.get("GUESTS_REQUIRED"):
            pytest.fail(text)
        pytest.skip(text)


def django_command(*arguments: str, settings: str, path: Path | None = None) -> str:
    """Run a Django command in a separate process; return its output, and fail if it failed."""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": settings,
        "PYTHONPATH": os.pathsep.join(str(each) for each in (ROOT, path) if each),
    }
    done = subprocess.run(
        [sys.executable, "-m", "django", *arguments],
        cwd=path or ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def run_scenarios(guest: str, settings: str = "settings", path: Path | None = None) -> None:
    package = f"tests.guests.{guest}"
    found = django_command(
        "test", "--noinput", f"{package}.scenarios", settings=f"{package}.{settings}", path=path
    )
    assert "Ran 0 tests" not in found


def test_wagtail() -> None:
    installed("wagtail")
    run_scenarios("cms")


def test_django_oscar() -> None:
    installed("django-oscar")
    run_scenarios("store")


def test_django_oscar_with_its_order_app_forked(tmp_path: Path) -> None:
    """Follow the guide: fork the app, and put the snippet into its `utils.py`."""
    from tests.guests.recipes import snippets_under

    installed("django-oscar")
    (tmp_path / "forked").mkdir()
    (tmp_path / "forked/__init__.py").touch()
    settings = "tests.guests.store.settings"
    django_command("oscar_fork_app", "order", "forked", settings=settings, path=tmp_path)
    [utils] = [each for each in snippets_under("django-oscar") if "class OrderCreator" in each]
    utils = "from django.db import transaction\n" + utils  # the page imports it earlier
    (tmp_path / "forked/order/utils.py").write_text(utils)
    run_scenarios("store", "forked_settings", tmp_path)


def test_django_debug_toolbar() -> None:
    installed("django-debug-toolbar")
    run_scenarios("toolbar")
