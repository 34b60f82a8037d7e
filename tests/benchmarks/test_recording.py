"""Recording in the handlers of a benchmark leaves no work for the worker."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, transaction

from benchmarks.app.recording import Recorder, _noting_commits, recorder


@pytest.mark.django_db(transaction=True)
def test_a_call_registers_nothing_in_its_transaction() -> None:
    """A hook would be measured, and would bind the messages of a list."""
    with transaction.atomic():
        Recorder().called(7)
        assert connection.run_on_commit == []


def test_the_time_of_a_commit_is_noted_before_it_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "end", 0.0)
    seen: list[Any] = []
    _noting_commits(lambda ended: seen.append((ended, recorder.end)))(["settled"])
    assert seen == [(["settled"], recorder.end)]
    assert recorder.end > 0.0
