"""Askers and workers as processes: forks, poolers, kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from django_mq import RemoteError, RetryPolicy, gather, request
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue, database_url
from tests.acceptance.processes import SOON, Worker
from tests.acceptance.test_pooler import pooled  # noqa: F401  (a fixture)
from tests.slow import slow

Start = Callable[..., Worker]

PREAMBLE = """
import os, signal, threading
import django
django.setup()
from django.db import connections
from django_mq import ask, gather, request
"""

ASK = """
assert gather(*[request("acceptance.echo", n) for n in range(50)], timeout=40) == list(range(50))
assert ask("acceptance.echo", "alone", timeout=40) == "alone"
print("answered")
"""

FORK = """
assert ask("acceptance.echo", 1, timeout=40) == 1
late = request("acceptance.gate", {"name": "late", "gate": "open"})
threading.Thread(target=late.result, args=(40,)).start()
connections.close_all()
child = os.fork()
if child == 0:
    signal.alarm(30)  # whatever happens, it is not left behind
    assert not [each for each in threading.enumerate() if each.name == "mq-replies"]
    assert ask("acceptance.echo", 2, timeout=40) == 2
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert ask("acceptance.echo", 3, timeout=40) == 3
assert not late.done()
open(os.environ["ACCEPTANCE_DIR"] + "/open.gate", "w").close()
assert late.result(timeout=40) is None
print("answered")
"""


def asker(script: str, witness: Witness, *, url: str | None = None, **mq: Any) -> str:
    """Run `script` as an asking process; return its output."""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.acceptance.settings",
        "DATABASE_URL": url or database_url(),
        "ACCEPTANCE_MQ": json.dumps(mq),
        "ACCEPTANCE_DATABASE": json.dumps({"DISABLE_SERVER_SIDE_CURSORS": url is not None}),
        "ACCEPTANCE_DIR": str(witness.directory),
    }
    ran = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * SOON,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_process_asks(start: Start, queue: Queue, witness: Witness) -> None:
    """RMQ-20: the reply comes from another process, and is itself a row."""
    start("--processes", 2)
    assert asker(ASK, witness) == "answered\n"


def test_a_forked_process_waits_for_its_own(start: Start, queue: Queue, witness: Witness) -> None:
    """Neither process uses the other's connection or takes its replies."""
    start("--threads", 2)
    assert asker(FORK, witness) == "answered\n"


@pytest.mark.slow
def test_asking_behind_a_pooler(
    start: Start,
    queue: Queue,
    witness: Witness,
    pooled: str,  # noqa: F811
) -> None:
    """Guarantee 17: it only polls, in transactions without state of a session."""
    start("--threads", 2)
    assert asker(ASK, witness, url=pooled, WAKEUP="poll") == "answered\n"


@pytest.mark.parametrize("kind", ["die", *slow("hang")])
def test_a_process_that_died_has_answered(
    start: Start, queue: Queue, witness: Witness, kind: str
) -> None:
    """The failure of the last attempt, whose process died or whose time ran out, is the answer."""
    worker = start()
    pending = request(
        f"acceptance.{kind}",
        {"name": "last", "how": "kill", "until": 9},
        retry=RetryPolicy.never(),
    )
    again = request("acceptance.echo", "survives")
    with pytest.raises(RemoteError) as caught:
        pending.result(timeout=SOON)
    expected = {"die": "WorkerLost", "hang": "TimedOut"}[kind]
    assert caught.value.error_class.rpartition(".")[2] == expected, worker.said()
    assert gather(again, timeout=SOON) == ["survives"]
