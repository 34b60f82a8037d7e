"""A process that plays points on the test database, and a sample of them for each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from django.db import connection

from tests.faults.points import choose
from tests.faults.sweep import Runner

#: Says which points are in the sample; `.ci/run` has another one for each commit.
SEED = int(os.environ.get("FAULTS_SEED", "1"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the test database made for these tests; none of them uses it in this process."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.django_db)


@pytest.fixture(scope="module")
def runner(django_db_setup: None, django_db_blocker: pytest.FixtureRequest) -> Iterator[Runner]:
    with django_db_blocker.unblock():  # type: ignore[attr-defined]
        params = connection.get_connection_params()
    runner = Runner(params)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def play(runner: Runner) -> Callable[[str, str], None]:
    """Play one point of a scenario and kind, and assert that nothing broke."""
    recorded: dict[str, Sequence[str]] = {}

    def play(scenario: str, kind: str) -> None:
        if scenario not in recorded:
            recorded[scenario] = runner.record(scenario)
        for point in choose(scenario, kind, recorded, count=1, seed=SEED):
            played = runner.play(point)
            assert not played.broken, str(played)

    return play
