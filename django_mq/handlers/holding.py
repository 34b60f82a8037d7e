"""Why a worker holds a message that it cannot route: the beginnings of the reasons it stores.

An explanation of the message compares them with its own.
"""

from __future__ import annotations


def unknown_handler(name: str) -> str:
    """Say that the worker does not have the handler that the message names."""
    return f"this worker has no handler named {name}"


def unknown_type(type: str, queue: str) -> str:
    """Say that the worker has no handler that takes messages of `type` from `queue`."""
    return f"this worker has no handler for {type} in queue {queue}"


def other_queue(handler: str, queue: str) -> str:
    """Say that the named handler takes no messages from `queue`."""
    return f"handler {handler} is not allowed in queue {queue}"
