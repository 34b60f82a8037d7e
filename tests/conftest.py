"""What every part of the suite shares."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from django.db import connection
from django.test import TransactionTestCase

from tests.committing import empty_the_tables, left

# Two hundred processes are started, and most images of containers set this: each of them would
# compile the package anew, and each process of pytest all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Whoever runs the tests in the background of a shell has SIGINT ignored, and what they start
# would inherit that: Ctrl-C is one of the things they try.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _quick_clean_up() -> Iterator[None]:
    """Tests that commit empty the tables in a quicker way than Django's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", empty_the_tables)
        yield


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fail the file whose tests left rows behind, and not whichever meets them."""
    yield
    if connection.settings_dict["NAME"].startswith("test_") and (found := left()):
        empty_the_tables()
        pytest.fail(f"rows are left: {found}")
