"""Refuse helpers that block, in an `async` test: Django would name only the statement."""

from __future__ import annotations

from django.utils.asyncio import async_unsafe


def refuse_on_loop(name: str) -> None:
    """Raise SynchronousOnlyOperation for the helper `name` if an event loop runs in this thread."""

    @async_unsafe(
        f"{name}() blocks, and an event loop runs in this thread: in an async test, call"
        f" `await sync_to_async({name})(...)`"
    )
    def check() -> None: ...

    check()
