"""A process that plays points on the test database, and a sample of them for each test."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from django.db import connection

from tests.faults.kinds import KINDS
from tests.faults.points import choose
from tests.faults.sweep import Runner
from tests.samples import SEED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the test database created for these tests; none of them uses it in this process."""
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


class Requests:
    """The requests of each scenario's worker without faults, in files of this run of pytest.

    Each scenario is recorded once, by the process that needs it first.
    """

    def __init__(self, directory: Path, runner: Runner) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._runner = runner

    def __getitem__(self, scenario: str) -> Sequence[str]:
        file = self._directory / f"{scenario}.json"
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_text(json.dumps(self._runner.record(scenario)))
        requests: list[str] = json.loads(file.read_text())
        return requests


@pytest.fixture(scope="module")
def play(
    runner: Runner, tmp_path_factory: pytest.TempPathFactory, testrun_uid: str
) -> Callable[[str, str], None]:
    """Play one point of a scenario and kind, and assert that nothing broke."""
    directory = tmp_path_factory.getbasetemp().parent / f"faults-{testrun_uid}"
    requests = Requests(directory, runner)

    def play(scenario: str, kind: str) -> None:
        recorded = {scenario: requests[scenario] if KINDS[kind].swept else ()}
        for point in choose(scenario, kind, recorded, count=1, seed=SEED):
            played = runner.play(point)
            assert not played.broken, str(played)

    return play
