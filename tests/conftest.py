"""Fixtures for all parts of the suite."""

import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connection
from django.test import TransactionTestCase
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from psycopg import sql

from tests.committing import CLEANER, empty_the_tables, left
from tests.database import second_connection

# An example may take long on a busy machine, which is not a failure.
hypothesis_settings.register_profile(
    "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("suite")

# Two hundred processes are started, and most container images set this: each of them would compile
# the package again, and each pytest process all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A test run in the background of a shell ignores SIGINT, and its child processes would inherit
# that; but some tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Each process of pytest keeps thousands of collected tests in memory. Scanning them in every
# garbage collection took 12 % of the CPU of a run (perf, six directories of tests).
gc.disable()


def pytest_collection_finish() -> None:
    """Exclude the present objects from all later garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _quick_clean_up() -> Iterator[None]:
    """Empty the tables after tests that commit, faster than Django does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", empty_the_tables)
        yield


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None) -> Iterator[None]:
    """Let commits to the test database return before they are on disk: no test needs durability."""
    with second_connection() as other:
        other.execute(
            sql.SQL("alter database {} set synchronous_commit = off").format(
                sql.Identifier(other.info.dbname)
            )
        )
    connection.close()  # it began with the old setting
    yield
    CLEANER.close()  # the database is about to be dropped


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fail the file whose tests left rows behind, rather than a later one that meets them."""
    yield
    if not connection.settings_dict["NAME"].startswith("test_"):
        return  # no test of the file needed the database
    if found := left():
        empty_the_tables()
        pytest.fail(f"rows are left: {found}")
    CLEANER.shrink()


@pytest.fixture(scope="module", autouse=True)
def _the_log_level_stays() -> Iterator[None]:
    """Fail the file that changes it: a later one would miss the lines it waits for."""
    logger = logging.getLogger("django_mq")
    before = logger.level
    yield
    after = logger.level
    logger.setLevel(before)
    assert after == before, "the level of the logger django_mq was changed"


#: The attributes of every log record.
RECORD = frozenset(vars(logging.makeLogRecord({})))


@pytest.fixture(scope="module", autouse=True)
def _log_records_have_plain_fields() -> Iterator[None]:
    """Fail the file that logs a field which `json.dumps()` refuses: a formatter loses the line."""
    found: set[str] = set()

    def look(record: logging.LogRecord) -> bool:
        for name in vars(record).keys() - RECORD:
            try:
                json.dumps(vars(record)[name])
            except (TypeError, ValueError):
                found.add(f"{vars(record).get('event')}: {name}")
        return True

    logger = logging.getLogger("django_mq")
    logger.addFilter(look)
    yield
    logger.removeFilter(look)
    assert not found, f"log records have fields that are not JSON: {found}"


def pytest_collection(session: pytest.Session) -> None:
    """Let each process of pytest-xdist compile another share of the test files first.

    All of them collect all files in one order, so in a fresh clone each would compile nearly every
    file, and the others' results would come too late.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return  # one process, or a few files
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in files[first:] + files[:first]:
        name = ".".join(file.relative_to(Path(__file__).parent.parent).with_suffix("").parts)
        # A module that fails or skips here does so again when pytest imports it and reports it.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)
