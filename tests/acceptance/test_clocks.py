"""All times are the database's: a worker's own clock may be wrong by a day."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.db.models.functions import Now

from django_mq import queues
from django_mq.models import FailedAttempt, QueuedMessage, Schedule, WorkerHeartbeat
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker
from tests.rows import stored

DAY = 86_400

#: Shifts the wall clock for a process and its forks, and leaves the monotonic clock alone.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) { return atol(getenv("CLOCK_SHIFT")); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec spec;
    int failed = clock_gettime(CLOCK_REALTIME, &spec);
    now->tv_sec = spec.tv_sec;
    now->tv_usec = spec.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *where) {
    struct timespec spec;
    clock_gettime(CLOCK_REALTIME, &spec);
    if (where) *where = spec.tv_sec;
    return spec.tv_sec;
}
"""


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    """The library that shifts the wall clock of a process that preloads it."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a clock is shifted by a C library: needs Linux and a compiler")
    source, library = tmp_path / "shift.c", tmp_path / "shift.so"
    source.write_text(SHIM)
    options = ["-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run([compiler, *options], check=True)
    return library


@pytest.mark.thorough
@pytest.mark.parametrize("shift", [DAY, -DAY], ids=["ahead", "behind"])
def test_a_clock_that_is_a_day_wrong(
    start: Callable[..., Worker], queue: Queue, witness: Witness, shim: Path, shift: int
) -> None:
    """Due times, ages, leases, schedules and heartbeats follow the database's clock."""
    [later] = queue.send("write", "later")
    QueuedMessage.objects.update(processable_after=Now() + timedelta(hours=1))
    Schedule.objects.create(
        name="often", type="acceptance.nobody", every=timedelta(seconds=1), next_at=Now()
    )
    Schedule.objects.create(
        name="rare",
        type="acceptance.nobody",
        every=timedelta(hours=2),
        next_at=Now() + timedelta(hours=1),
    )
    queue.send("clock", "told")
    worker = start(
        "--queue", "work", "--queue", "calls",
        mq={"LEASE": 3},
        LD_PRELOAD=str(shim), CLOCK_SHIFT=str(shift), PYTHONHASHSEED="0",
    )  # fmt: skip
    worker.until(lambda: "told.now" in queue.done(), "it retries, and handles what it broadcast")
    [told] = [name for name, _, _ in witness.started() if name.startswith("clock-")]
    wrong = float(told.removeprefix("clock-")) - time.time()
    assert wrong == pytest.approx(shift, abs=3600), "the clock is wrong"

    [held] = queue.send("call", "held", gate="held")
    worker.until(lambda: witness.started("held"), "one runs")
    lease = stored(QueuedMessage.objects.get(pk=held)).leased_until
    sound = start("--queue", "work", "--queue", "calls", mq={"LEASE": 3})
    sound.has_started(1)
    worker.until(
        lambda: QueuedMessage.objects.get(pk=held).leased_until > lease + timedelta(seconds=3),
        "its lease is renewed beyond its first end",
    )
    assert all(
        abs((each.leased_until - each.now).total_seconds()) < 60
        for each in QueuedMessage.objects.filter(pk=held).annotate(now=Now())
    )
    assert [each.alive for each in queues.workers()] == [True, True]
    assert not WorkerHeartbeat.objects.filter(started_at__gt=Now() + timedelta(minutes=5)).exists()
    witness.open("held")
    worker.until(lambda: "held" in queue.done(), "it ends")
    assert [name for name, _, _ in witness.started("held")] == ["held"], "taken by nobody"

    waiting = {m.payload["name"]: m for m in QueuedMessage.objects.filter(queue="work")}
    assert waiting.keys() == {"later", "told.later"}
    assert waiting["later"].pk == later
    delay = waiting["told.later"].processable_after - waiting["told.later"].created_at
    assert delay == timedelta(hours=1)
    [age] = [name for name, _, _ in witness.started() if name.startswith("age-")]
    assert 0 <= int(age.removeprefix("age-")) < 60
    assert Schedule.objects.get(name="often").next_at < waiting["later"].processable_after
    assert not QueuedMessage.objects.filter(metadata__contains={"mq.schedule": "rare"}).exists()
    assert QueuedMessage.objects.filter(metadata__contains={"mq.schedule": "often"}).exists()
    assert not FailedAttempt.objects.exclude(ended_at__lt=Now() + timedelta(minutes=5)).exists()
    for each in (worker, sound):
        each.tell(signal.SIGTERM)
        assert each.ends() == 0
        assert "Traceback" not in each.said()
