"""All nightly runs exist, and no failure hides another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.faults import nightly
from tests.nursery import BASE_DIR


def test_every_step_can_be_run() -> None:
    """Each command understands its arguments, and each path exists."""
    for step in nightly.steps(jobs=2, seed=7):
        if "pytest" in step.command:
            assert (BASE_DIR / step.command[-1]).exists(), step
        else:
            asked = subprocess.run([*step.command, "--help"], cwd=BASE_DIR, capture_output=True)
            assert asked.returncode == 0, step


def test_failed_step_is_reported_and_the_others_run(tmp_path: Path) -> None:
    made, said = tmp_path / "made", list[str]()
    night = [
        nightly.Step("first", [sys.executable, "-c", "raise SystemExit(3)"]),
        nightly.Step(
            "second",
            [sys.executable, "-c", "import os; open(os.environ['MADE'], 'w')"],
            {"MADE": str(made)},
        ),
    ]
    assert nightly.run(night, said.append) == 1
    assert made.exists()
    assert "first: failed with code 3" in said[1]
    assert "second: passed" in said[3]
