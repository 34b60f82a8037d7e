"""The brake between processes that die in one slot, orders to them, and how one is ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from threading import get_ident

import pytest

from django_mq.executor.scoreboard import MonitoredPart, Scoreboard
from django_mq.messages import Fence
from django_mq.supervisor import process_slot
from django_mq.supervisor.child import report_failure
from django_mq.supervisor.link_lines import DECLARED, ORDER
from django_mq.supervisor.process_slot import ProcessSlot
from django_mq.supervisor.readiness import Readiness
from django_mq.worker.orders import LEAVE, QUIET, RESUME


def test_the_brake_doubles_up_to_a_minute_and_stays_there() -> None:
    """For weeks, if necessary: 2,000 processes that died before they worked."""
    slot = ProcessSlot(Scoreboard(1))
    slot.prepare()
    brakes = [slot.restart_delay() for _ in range(2000)]
    assert brakes[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(brakes[8:]) == {60}


def test_no_brake_after_a_process_that_ran_anything() -> None:
    """Whether the handler had ended, or killed the process."""
    slot = ProcessSlot(Scoreboard(2))
    for over in (True, False):
        slot.prepare()
        assert slot.restart_delay() > 0
        slot.scoreboard.write(1, Fence(7, 1, "me:3"), 0.0, True)
        if over:
            slot.scoreboard.clear(1)
        assert slot.restart_delay() == 0


def test_the_orders_that_its_process_carried_out() -> None:
    """A leaving process is neither replaced for its memory nor reported as stalled."""
    slot = ProcessSlot(Scoreboard(1))
    slot.prepare()
    ours, theirs = socket.socketpair()
    with theirs:
        slot.assign(os.getpid(), ours)
        for order, expected in (
            (QUIET, (True, False)),
            (RESUME, (False, False)),
            (QUIET, (True, False)),
            (LEAVE, (False, True)),
        ):
            theirs.sendall(ORDER + order.encode() + b"\n")
            assert slot.read_link()
            assert (slot.quiet, slot.leaving) == expected
        slot.recycle_large(0)
        assert not slot.recycling
        slot.scoreboard.record_progress(MonitoredPart.LOOP, -1)
        assert slot.scoreboard.stalled()
        assert Readiness([slot]).not_live() == Readiness([slot]).not_ready() == []
        slot.close_link()


def test_a_slot_remembers_that_a_process_stored_the_schedules() -> None:
    """The next process, whose code is as old, does not store them over those of newer code."""
    slot = ProcessSlot(Scoreboard(1))
    slot.prepare()
    ours, theirs = socket.socketpair()
    with theirs:
        slot.assign(os.getpid(), ours)
        theirs.sendall(DECLARED + b"\n")
        assert not slot.declared
        assert slot.read_link()
        slot.close_link()
    slot.prepare()
    assert slot.declared


def test_a_stalled_loop_is_not_reported_as_a_database_that_does_not_answer() -> None:
    slot = ProcessSlot(Scoreboard(1))
    slot.prepare()
    slot.pid = 4711
    for part in (MonitoredPart.LOOP, MonitoredPart.DATABASE):
        slot.scoreboard.record_progress(part, -1)
    stalled = ["worker process 4711: the loop is stalled"]
    assert Readiness([slot]).not_live() == Readiness([slot]).not_ready() == stalled
    slot.scoreboard.record_progress(MonitoredPart.LOOP, 60)
    assert Readiness([slot]).not_ready() == [
        "worker process 4711: the database does not answer, or refuses statements"
    ]


def test_the_health_endpoint_names_the_class_of_an_error_without_its_text() -> None:
    """A text may name hosts and quote rows, and anybody may ask."""
    slot = ProcessSlot(Scoreboard(1))
    assert Readiness([slot]).not_live() == ["a worker process is gone (ended)"]
    ours, theirs = socket.socketpair()
    with theirs:
        slot.assign(os.getpid(), ours)
        report_failure(theirs, ValueError("host db.internal: no"))
        assert slot.read_link()
        slot.close_link()
    slot.pid = 0
    assert Readiness([slot]).not_live() == ["a worker process is gone (ValueError)"]


@pytest.mark.parametrize(
    ("dumps", "waits"),
    [
        (["", "", ""], [1.0, 0.9, 0.1]),
        (["Thread 0x{mine:x}", " (most", ""], [0.2, 0.2, 0.2]),
        (["", "Thread 0x0\n", "Thread 0x{mine:x}\n", ""], [1.0, 0.2, 0.2, 0.2]),
        (["Thread 0x0\n", "", "", ""], [0.5, 0.5, 0.9, 0.1]),
    ],
    ids=["frozen", "slow", "late", "gone"],
)
def test_a_process_is_ended_once_its_stacks_are_complete(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dumps: list[str],
    waits: list[float],
) -> None:
    """With the one of the late handler, and when no more of it comes; or after two seconds."""
    now = 1000.0
    monkeypatch.setattr(process_slot, "monotonic", lambda: now)
    slot = ProcessSlot(Scoreboard(1))
    slot.prepare()
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as frozen, ExitStack() as cleanup:
        cleanup.callback(frozen.kill)
        os.kill(frozen.pid, signal.SIGSTOP)
        os.waitpid(frozen.pid, os.WUNTRACED)  # else the next signal may end it
        slot.pid = frozen.pid
        slot.scoreboard.write(0, Fence(7, 1, f"{slot.worker}:1"), now, True, now - 300.0)
        slot.scoreboard.bind_thread(0)
        slot.kill_overrun()
        written = 0
        for dump, wait in zip(dumps, waits, strict=True):
            assert slot.overran
            assert not slot.killed_because
            written += os.pwrite(slot.stacks._fd, dump.format(mine=get_ident()).encode(), written)
            now += wait
            slot.kill_overrun()
        assert slot.killed_because == "message 7 ran past its timeout"
        [record] = caplog.records
        assert record.getMessage().startswith("message 7, attempt 1: the handler ran for 5 min")
        assert (vars(record)["attempt"], int(vars(record)["duration"] // 60)) == (1, 5)
        assert frozen.wait(30) == -signal.SIGKILL
