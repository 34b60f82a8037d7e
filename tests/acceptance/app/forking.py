"""Handlers that fork, and go on in both processes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async

from django_mq import handler

from .witness import Witness

WAYS = {"return": lambda: None, "sys.exit": lambda: sys.exit(3), "raise": lambda: {}["missing"]}


def fork(delivery: Any) -> None:
    """Fork a process that ends the handler its own way; report its exit code."""
    name = delivery.payload["name"]
    if (pid := os.fork()) == 0:
        WAYS[name]()
        return
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    Witness(Path(os.environ["ACCEPTANCE_DIR"])).saw(f"{name}-{code}", delivery.attempt)


@handler("acceptance.fork", queue="forks")
def fork_atomic(delivery: Any) -> None:
    fork(delivery)


@handler("acceptance.fork", queue="calls", atomic=False)
def fork_outside(delivery: Any) -> None:
    fork(delivery)


@handler("acceptance.fork", queue="finishes", atomic=False)
def fork_in_finish(delivery: Any) -> None:
    with delivery.finish():
        fork(delivery)


@handler("acceptance.fork", queue="acalls")
async def fork_async(delivery: Any) -> None:
    fork(delivery)


@handler("acceptance.fork", queue="blocking")
async def fork_in_the_shared_thread(delivery: Any) -> None:
    await sync_to_async(fork)(delivery)


@handler("acceptance.fork", queue="threads")
async def fork_in_another_thread(delivery: Any) -> None:
    await asyncio.to_thread(fork, delivery)
