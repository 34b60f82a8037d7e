"""The benchmarks still run; sizes are small, and rates are not checked.

In each run a third of the workloads is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.samples import third

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
# Their app is not in the test project, so they run in separate processes.
EXAMPLES = """
import doctest, importlib, os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
import django
django.setup()
results = [doctest.testmod(importlib.import_module(name)) for name in sys.argv[1:]]
assert all(result.attempted for result in results)
sys.exit(sum(result.failed for result in results))
"""
# Without django-tasks-db, which is installed when it is measured.
OUR_TASKS = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
import django
django.setup()
from benchmarks.database import databases
from benchmarks.workloads import tasks
with databases() as database:
    enqueued = tasks._enqueued(database, 20, 2)
    drained = tasks._drained(database, 50, 1)
assert min(enqueued.rate, enqueued.python, drained.rate, drained.python) > 0
"""
# Without the peers, which are installed when they are measured.
OUR_WORK = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
import django
django.setup()
from benchmarks.database import databases
from benchmarks.workers import cost_of
from benchmarks.workloads import Bench, real, recovery
real.BLOCK = 20
with databases() as database:
    [[handled]] = real.handled_with_orm(database, 20).values()
    [[seconds, _]] = real.waited_for(database, 20).values()
    assert handled.rate > 0 and handled.python > 0 and seconds > real.PAUSE
    one, five = real._broadcasts(Bench(database, rounds=1, quick=True))
    assert one.against == five.against > 0
    for figures in (True, False):
        real.drained_with(database, 20, figures=figures)
        assert bool(database.count(table="django_mq_minutefigures")) is figures
    database.clear()
    database.fill(20, "bench.list")
    database.fill(20, "bench.spread", queues=1000)
    assert cost_of(database, 40).rate > 0
    database.clear()
    assert recovery._child_killed(database) > 0
"""
#: All ways of measuring: one worker and two, bare loops, forked processes.
WORKLOADS = {
    "drain": {
        "drain",
        "drain, bare loop on a plain table",
        "drain, two processes",
        "drain, two bare loops",
    },
    "writing": {"writing"},
    "producers": {"producers, threads", "producers, processes"},
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )


def test_examples() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        if ">>> " in path.read_text(encoding="utf-8") and "peers" not in path.parts
    ]
    assert "benchmarks.report" in modules
    done = run("-c", EXAMPLES, *modules)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("alone")
def test_command_measures_every_verified_workload(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    workloads = third(list(WORKLOADS))
    only = [option for name in workloads for option in ("--only", name)]
    done = run("-m", "benchmarks", "--quick", "--rounds", "1", "--json", str(results), *only)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(results.read_text())
    assert written["quick"] is True
    rows = {row["workload"]: row for row in written["rows"]}
    assert rows.keys() == set().union(*(WORKLOADS[name] for name in workloads))
    assert all(row["figure"] > 0 and row["against"] > 0 for row in rows.values())


@pytest.mark.usefixtures("alone")
def test_real_work_is_done() -> None:
    done = run("-c", OUR_WORK)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("alone")
def test_tasks_are_enqueued_and_drained() -> None:
    done = run("-c", OUR_TASKS)
    assert done.returncode == 0, done.stdout + done.stderr
