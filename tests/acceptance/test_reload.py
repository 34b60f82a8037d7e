"""`--reload`: Django's autoreloader, for development."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker
from tests.slow import slow


@pytest.mark.slow
def test_it_starts_again_when_code_changes(
    start: Callable[..., Worker], queue: Queue, witness: Witness, tmp_path: Path
) -> None:
    """Running handlers end first; a signal ends the worker cleanly."""
    module = tmp_path / "watched_by_reload.py"
    module.write_text("")
    worker = start("--reload", PYTHONPATH=str(tmp_path), ACCEPTANCE_IMPORT="watched_by_reload")
    queue.send("gate", "during", gate="open")
    worker.until(lambda: witness.started("during"), "it runs")

    # Change the file repeatedly: the reloader misses changes before its first look.
    moments = itertools.count(1)
    worker.until(
        lambda: os.utime(module, (0, next(moments))) or "changed, reloading" in worker.said(),
        "the change is seen",
    )
    worker.says(r"waiting at most 30 s for message \d+")
    witness.open("open")
    worker.has_started(2)
    queue.send("write", "after")
    queue.wait_empty(worker)
    assert queue.done() == {"during": 1, "after": 1}
    assert {attempt for _, attempt, _ in queue.effects()} == {1}
    worker.tell_all(signal.SIGTERM)
    assert worker.ends() == 0
    worker.until(lambda: not worker.remaining(), "nothing is left")
    assert "Traceback" not in worker.said()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tell", "stop"),
    [
        (Worker.tell, signal.SIGTERM),
        *slow((Worker.tell_all, signal.SIGINT)),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in [
                (Worker.tell, signal.SIGINT),
                (Worker.tell_all, signal.SIGTERM),
                (Worker.tell_all, signal.SIGHUP),
            ]
        ),
    ],
)
def test_the_first_signal_drains(
    start: Callable[..., Worker],
    queue: Queue,
    witness: Witness,
    tell: Callable[[Worker, signal.Signals], None],
    stop: signal.Signals,
) -> None:
    """Ctrl-C reaches each process, a container's SIGTERM the first one."""
    worker = start("--reload")
    queue.send("gate", "runs", gate="open")
    worker.until(lambda: witness.started("runs"), "it runs")
    tell(worker, stop)
    worker.says(r"waiting at most 30 s for message \d+")
    witness.open("open")
    assert worker.ends() == 0
    assert queue.done() == {"runs": 1}
    worker.until(lambda: not worker.remaining(), "nothing is left")
    assert "Traceback" not in worker.said()


@pytest.mark.parametrize(
    "stop", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_the_second_signal_leaves_at_once(
    start: Callable[..., Worker], queue: Queue, witness: Witness, stop: signal.Signals
) -> None:
    worker = start("--reload", "--drain-seconds", 600)
    queue.send("gate", "runs", gate="open")
    worker.until(lambda: witness.started("runs"), "it runs")
    worker.tell_all(stop)
    worker.says(r"waiting at most 600 s for message \d+")
    worker.tell_all(stop)
    worker.ends()
    worker.until(lambda: not worker.remaining(), "nothing is left")
    assert not queue.done()
    assert "Traceback" not in worker.said()


@pytest.mark.slow
def test_the_second_signal_leaves_at_once_if_another_thread_receives_it(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """The kernel may choose any thread; Python's handlers would wait for the main one."""
    worker = start("--reload", "--drain-seconds", 600)
    queue.send("gate", "runs", gate="open")
    worker.until(lambda: witness.started("runs"), "it runs")
    worker.tell(signal.SIGTERM)
    worker.says(r"waiting at most 600 s for message \d+")
    [child] = worker.children()
    tasks = (int(task.name) for task in Path(f"/proc/{child}/task").iterdir())
    thread = min(task for task in tasks if task != child)
    assert ctypes.CDLL(None).tgkill(child, thread, signal.SIGINT) == 0
    worker.ends()
    worker.until(lambda: not worker.remaining(), "nothing is left")
    assert not queue.done()
    assert "Traceback" not in worker.said()


@pytest.mark.slow
def test_it_outlives_code_that_does_not_load(
    start: Callable[..., Worker], queue: Queue, tmp_path: Path
) -> None:
    """Like runserver, it shows the error, and starts with the next change."""
    module = tmp_path / "broken_by_reload.py"
    module.write_text("")
    worker = start("--reload", PYTHONPATH=str(tmp_path), ACCEPTANCE_IMPORT="broken_by_reload")
    worker.has_started(1)
    module.write_text("def broken(:\n")
    moments = itertools.count(1)
    worker.until(
        lambda: os.utime(module, (0, next(moments))) or "SyntaxError" in worker.said(),
        "the error is shown",
    )
    worker.says("it waits for a change of the code")
    module.write_text("")
    worker.has_started(2)
    queue.send("write", "mended")
    queue.wait_empty(worker)
    worker.tell_all(signal.SIGINT)
    assert worker.ends() == 0
