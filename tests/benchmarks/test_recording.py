"""What a benchmark's handlers record costs as little as it says."""

from typing import Any

import pytest
from django.db import connection, transaction

from benchmarks.app.recording import Recorder


@pytest.mark.django_db(transaction=True)
def test_a_transaction_has_one_hook() -> None:
    """The worker takes the hooks of each message out of Django's list."""
    recorder = Recorder()
    for _ in range(2):
        with transaction.atomic():
            taken: list[Any] = []
            for id in range(3):
                recorder.called(id)
                taken += connection.run_on_commit
                connection.run_on_commit = []
            assert [hook for _, hook, _ in taken] == [recorder.committed]
