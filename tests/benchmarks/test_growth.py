"""The figures for the model of docs/scaling.md are measured with the worker's own statements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.growth import SOURCES
from benchmarks.results import read, rows_of
from tests.samples import third

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    not third([True, False, False])[0], reason="takes 10 s of CPU: runs with every third seed"
)
@pytest.mark.usefixtures("alone")
def test_growth_is_measured_under_the_names_that_the_model_knows(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--rounds", "1"]
    command += ["--only", "growth", "--only", "breadth", "--json", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row.workload: row for row in rows_of(read([results]))}
    assert all(name.startswith("growth: ") for name in rows)
    assert {name for name, _ in SOURCES.values() if name.startswith("growth: ")} <= rows.keys()
    # Small differences of large figures may fall below zero by chance.
    differences = ("growth: passing", "growth: commit, the wait")
    assert all(row.figure > 0 for name, row in rows.items() if not name.startswith(differences)), (
        rows
    )
