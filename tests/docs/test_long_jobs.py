"""docs/guides/long-jobs.md: programs and computations in real workers."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from django_mq import RetryPolicy, broadcast, fixed
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.testing import drain
from django_mq.worker import Worker
from testproject.shop.models import Export
from tests.docs.pages import story
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import Running

pytestmark = pytest.mark.django_db(transaction=True)

STEPS = "for step in 1, 2, 3: print(step, flush=True)"
ONCE_AN_HOUR = RetryPolicy(max_attempts=3, backoff=fixed(3600))
#: Its only number is its process id, which `setpriv` keeps. It takes a moment to obey SIGTERM, and
#: then writes a file: `setpriv`, or asyncio when the loop is closed, kills it without one.
HANGS = """
import os, pathlib, signal, sys, time
def obey(*_):
    time.sleep(0.3)
    pathlib.Path("terminated").touch()
    sys.exit()
signal.signal(signal.SIGTERM, obey)
print(os.getpid(), flush=True)
time.sleep(3600)
"""


@pytest.fixture
def parts() -> list[int]:
    return []


@pytest.fixture
def page(parts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    with story("guides/long-jobs.md", compute=lambda export, part: parts.append(part)) as page:
        assert page.COMMAND.pop() == "convert-video"
        if shutil.which("setpriv") is None:
            page.COMMAND.clear()
        page.COMMAND += [sys.executable, "-c"]
        yield page


def start(page: Any, program: str, **options: Any) -> Export:
    page.COMMAND.append(program)
    export = Export.objects.create(parts=3, **options)
    with transaction.atomic():
        broadcast("shop.videos.uploaded", {"export": export.pk}, retry=ONCE_AN_HOUR)
    return export


def assert_terminated(export: Export) -> None:
    """Assert that the handler ended the program, which `export` names, and waited for its end."""
    export.refresh_from_db()
    assert export.done > 0
    assert Path("terminated").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(export.done, 0)


def test_the_program_reports_its_progress(page: Any) -> None:
    export = start(page, STEPS)
    assert Worker().run(until_empty=True)
    export.refresh_from_db()
    assert export.done == 3
    assert not QueuedMessage.objects.exists()
    assert not FailedAttempt.objects.exists()


def test_a_cancelled_job_ends_its_program(page: Any) -> None:
    export = start(page, HANGS, cancelled=True)
    assert Worker().run(until_empty=True)
    assert_terminated(export)
    assert not QueuedMessage.objects.exists()


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raise SystemExit(7)", "RuntimeError"),
        *slow(pytest.param(HANGS, "TimeoutError", id="hangs")),
    ],
)
def test_a_program_that_hangs_or_fails(page: Any, program: str, error: str) -> None:
    page.SILENCE = 5 if program == HANGS else 60
    export = start(page, program)
    assert Worker().run(until_empty=True)
    if program == HANGS:
        assert_terminated(export)
    assert QueuedMessage.objects.get().attempts == 1
    assert FailedAttempt.objects.get().error_class == error


@pytest.mark.slow
def test_a_drain_uses_no_attempt(page: Any) -> None:
    export = start(page, HANGS)
    running = Running(Worker(drain_seconds=8), until_empty=False)
    until(Export.objects.filter(pk=export.pk).exclude(done=0).exists, "the program reports")
    running.stop()
    assert_terminated(export)
    message = QueuedMessage.objects.get()
    assert (message.attempts, message.leased_until) == (0, None)


def test_a_computation_continues_where_the_last_attempt_ended(page: Any, parts: list[int]) -> None:
    export = Export.objects.create(parts=4, done=1)
    with transaction.atomic():
        broadcast("shop.forecasts.wanted", {"export": export.pk})
    assert Worker().run(until_empty=True)
    assert parts == [1, 2, 3]


def test_parts_come_in_order(page: Any, parts: list[int]) -> None:
    export = page.start_forecast(5)
    assert drain("forecasts") == 5
    export.refresh_from_db()
    assert (parts, export.done) == ([0, 1, 2, 3, 4], 5)
