"""Commands whose output nobody reads, or that a full disk refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from django.conf import settings

from tests.acceptance.conftest import database_url
from tests.rows import add
from tests.slow import slow

pytestmark = pytest.mark.django_db(transaction=True)

MANAGE = [sys.executable, str(settings.BASE_DIR / "manage.py")]


def environment() -> dict[str, str]:
    return {**os.environ, "DATABASE_URL": database_url()}


@pytest.mark.parametrize("command", ["mq_doctor", *slow("mq_routes")])
def test_a_reader_that_leaves(command: str) -> None:
    """The doctor ends with an exit code of its own, before its output is written."""
    add("nobody-serves-it", after=-3600)
    reader, closed_pipe = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [*MANAGE, command],
        env={**environment(), "PYTHONUNBUFFERED": ""},
        stdout=closed_pipe,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(closed_pipe)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.parametrize("redirection", [">/dev/full", *slow("", ">&-")])
def test_worker_runs_with_a_closed_output(redirection: str) -> None:
    """A pipe without a reader, no descriptor, and a full disk."""
    reader, closed_pipe = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        ["sh", "-c", f"exec {' '.join(MANAGE)} mq_worker --until-empty {redirection}"],
        env={**environment(), "PYTHONUNBUFFERED": ""},
        stdout=closed_pipe,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(closed_pipe)
    assert "Traceback" not in ended.stderr
    assert " stopped" in ended.stderr
    assert ended.returncode == 0


FULL = "CommandError: the output cannot be written: No space left on device"


@pytest.mark.parametrize(
    ("redirection", "unbuffered"),
    [(">&-", ""), *slow((">&-", "1"), (">/dev/full", ""), (">/dev/full", "1"))],
)
def test_an_output_that_takes_nothing(redirection: str, unbuffered: str) -> None:
    """A daemon may have closed it; a full disk is told in one line."""
    code, said = (0, "") if redirection == ">&-" else (1, FULL)
    ended = subprocess.run(
        ["sh", "-c", f"exec {' '.join(MANAGE)} mq_routes {redirection}"],
        env={**environment(), "PYTHONUNBUFFERED": unbuffered},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (ended.returncode, ended.stderr.strip()) == (code, said)
