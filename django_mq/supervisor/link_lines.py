"""The lines that a supervisor and its children send each other, over a socket pair."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from django_mq.messages import Fence
from django_mq.policy.stack import readable
from django_mq.worker.recovery import DeadWorker

#: The final line from a child: everything finished, or something still runs. The exit code is not
#: enough: a handler may cause the same one.
FINISHED, UNFINISHED = b".", b"!"
#: The first byte of the line in which a child names the error that ends it.
FAILED = b"?"
#: The first byte of a line with totals of a handler.
TOTALS = b"#"
#: The first byte of a line with a message that an operator stopped.
STOP = b"x"
#: The first byte of a line with an order of an operator that the child carried out.
ORDER = b"="
#: The line by which a child says that it drains because of a signal, whoever sent it.
SIGNALLED = b"t"
#: The line by which a child says that the schedules of its code are stored.
DECLARED = b"+"


def encode_dead(dead: DeadWorker) -> bytes:
    """Return `dead` as one line for a child."""
    return json.dumps(asdict(dead)).encode() + b"\n"


def decode_dead(line: bytes) -> DeadWorker:
    """Return the DeadWorker that `encode_dead()` turned into `line`."""
    data: dict[str, Any] = json.loads(line)
    del data["received_at"]  # the current process is told only now
    for name in ("timed_out", "lost"):
        data[name] = [Fence(*fence) for fence in data[name]]
    for name in ("stopped", "ran", "stacks"):  # JSON has no integer keys
        data[name] = {int(id): value for id, value in data[name].items()}
    data["stacks"] = {id: readable(stack) for id, stack in data["stacks"].items()}
    return DeadWorker(**data)
