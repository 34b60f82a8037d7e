"""The reason why a message does not run now says that it runs alone, if it is a suspect."""

from __future__ import annotations

import pytest

from tests.queues.explained import why
from tests.rows import add, beat, decide

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]

ALONE = (
    ". It is a suspect (its process died while it ran, or its lease lapsed), so it waits until"
    " nothing else runs in the process that claims it, and runs there alone."
)
LOST = {"attempts": 1, "last_error": "WorkerLost: process 7 was killed by SIGKILL"}
VANISHED = {"attempts": 1, "last_error": "WorkerVanished: the lease lapsed"}


@pytest.mark.parametrize(
    ("state", "columns"),
    [
        ("retrying", {"after": 60, **LOST}),
        ("processable", LOST),
        ("processable", VANISHED),
        ("processable", {"leased": -1, **VANISHED}),
        ("leased", {"leased": 60, **LOST}),
        ("held", {"held": -60, "after": 60, **LOST}),
    ],
)
def test_a_suspect_waits_to_run_alone(state, columns):
    beat()
    assert why(add(suspect=True, **columns), state).text.endswith(ALONE)
    assert "suspect" not in why(add(**columns), state).text


def test_a_paused_suspect():
    decide(paused=-60)
    assert why(add(suspect=True, **LOST), "paused").text.endswith(ALONE)


def test_a_message_that_was_taken_over_from_a_lost_host_runs_beside_others():
    """Its row is marked for the case that its lease lapses again."""
    beat()
    assert "suspect" not in why(add(suspect=True, leased=60, **VANISHED), "leased").text


def test_a_suspect_that_runs_or_is_dead_does_not_wait():
    running = add(suspect=True, leased=60, **LOST)
    beat(running=[running.pk])
    assert "suspect" not in why(running, "running").text
    assert "suspect" not in why(add(suspect=True, dead=-1, **VANISHED), "dead").text
