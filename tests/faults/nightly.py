"""Everything too slow to run on each change: one step after another, despite failures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

#: The number of orders that the model plays, and of messages that must leave nothing behind.
EXAMPLES, MESSAGES = 2000, 20_000
#: Tests that check a random third need three consecutive seeds to check everything.
THIRDS = 3


@dataclass(frozen=True, slots=True)
class Step:
    """A command and its environment variables."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def steps(*, jobs: int, seed: int) -> list[Step]:
    """Return the steps of a night; `seed` determines the random choices."""
    chance = ["--jobs", str(jobs), "--seed", str(seed)]
    return [
        Step("every request, every scenario, every kind", _faults("sweep", *chance)),
        Step("every broken package", _faults("bite", *chance)),
        Step(
            f"{EXAMPLES} orders against the model",
            _pytest("tests/faults/test_model.py"),
            {"FAULTS_EXAMPLES": str(EXAMPLES), "FAULTS_SEED": str(seed)},
        ),
        Step(
            f"leaks over {MESSAGES} messages",
            _pytest("tests/acceptance/test_leaks.py"),
            {"LEAKS_MESSAGES": str(MESSAGES)},
        ),
        *(
            Step(
                f"{path}, seed {each}",
                _pytest(f"tests/{path}"),
                {"FAULTS_SEED": str(each)},
            )
            for each in range(seed, seed + THIRDS)
            for path in ("acceptance", "benchmarks", "test_odd_rows.py")
        ),
    ]


def _faults(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.faults", *arguments]


def _pytest(path: str) -> list[str]:
    # A single test may take longer than any test does on a change; thorough tests are wanted, too.
    return [sys.executable, "-m", "pytest", "-q", "-m", "", "-o", "faulthandler_timeout=0", path]


def run(night: Sequence[Step], say: Callable[[str], object]) -> int:
    """Run all steps, even after one has failed; return the number of failures."""
    failed = 0
    for step in night:
        say(f"=== {step.name}")
        began = time.monotonic()
        code = subprocess.run(step.command, env={**os.environ, **step.environment}).returncode
        failed += bool(code)
        said = f"failed with code {code}" if code else "passed"
        say(f"=== {step.name}: {said} after {time.monotonic() - began:.0f} s")
    return failed
