"""Plays points, several at once: each job is a process with its own database."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tests.faults.points import Played, Point, choose, pairs


class Runner:
    """A process that plays one point after another on the database with these parameters."""

    def __init__(self, params: dict[str, Any]) -> None:
        """`params` are Django's connection parameters of a database that is migrated."""
        database = {
            "NAME": params["dbname"],
            "USER": params.get("user") or "",
            "PASSWORD": params.get("password") or "",
            "HOST": str(params.get("host") or ""),
            "PORT": str(params.get("port") or ""),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.runner"],
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "tests.faults.settings",
                "FAULTS_DATABASE": json.dumps(database),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def play(self, point: Point) -> Played:
        """Play one point; raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(point)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that played {point} is gone")
        return Played(point=point, **json.loads(answer))

    def record(self, scenario: str) -> Sequence[str]:
        """Return the requests of a worker without faults.

        Errors without a fault are the finding of another point, of the kind `none`.
        """
        played = self.play(Point(scenario, "none", 0))
        return [text for _, text in played.requests]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextlib.contextmanager
def runners(jobs: int) -> Iterator[list[Runner]]:
    """Make databases for `jobs` processes, and remove them afterwards."""
    from django.db import connections

    from tests.faults.app.ledger import ALIAS

    connection = connections[ALIAS]
    given = connection.settings_dict["NAME"]
    # A separate one, since several sweeps may run at a time.
    connection.settings_dict["TEST"]["NAME"] = f"test_faults_{os.getpid()}"
    connection.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)
    own = dict(connection.get_connection_params())
    names = [own["dbname"]]
    connection.close()
    started: list[Runner] = []
    try:
        for number in range(1, jobs):
            connection.creation.clone_test_db(str(number), verbosity=0, autoclobber=True)
            names.append(f"{own['dbname']}_{number}")
        started += [Runner({**own, "dbname": name}) for name in names]
        yield started
    finally:
        for runner in started:
            runner.close()
        for number in range(1, len(names)):
            connection.creation.destroy_test_db(verbosity=0, suffix=str(number))
        connection.creation.destroy_test_db(given, verbosity=0)


def play_all(
    runners: Sequence[Runner], points: Iterable[Point], tell: Callable[[Played], None]
) -> None:
    """Play `points` on all `runners` at once; calls `tell` for each, in one thread at a time."""
    waiting: queue.SimpleQueue[Point] = queue.SimpleQueue()
    for point in points:
        waiting.put(point)
    lock, errors = threading.Lock(), []

    def work(runner: Runner) -> None:
        try:
            while True:
                played = runner.play(waiting.get_nowait())
                with lock:
                    tell(played)
        except queue.Empty:
            return
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(runner,)) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def plan(
    runner: Runner,
    scenarios: Sequence[str],
    kinds: Sequence[str],
    *,
    count: int | None,
    seed: int,
    at: int | None = None,
    patch: str = "",
) -> list[Point]:
    """Return the points to play: `count` per pair, all for None; with `at`, only those."""
    chosen = list(pairs(scenarios, kinds))
    if at is not None:
        return [Point(scenario, kind, at, patch) for scenario, kind in chosen]
    recorded = {name: runner.record(name) for name in dict.fromkeys(name for name, _ in chosen)}
    return [
        point
        for scenario, kind in chosen
        for point in choose(scenario, kind, recorded, count=count, seed=seed, patch=patch)
    ]
