"""How much a claim takes of lines whose handlers are slow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_mq import handler, handlers
from django_mq.executor.pace import Paces
from django_mq.executor.slow_lines import SlowLines
from django_mq.messages import Delivery
from django_mq.policy.line_limits import UNLIMITED


@pytest.fixture
def paces() -> Paces:
    """Handlers that take 0.2 s a message, but for `quick`."""

    def run(delivery: Delivery) -> None: ...

    def run_list(deliveries: list[Delivery]) -> None: ...

    async def run_async(delivery: Delivery) -> None: ...

    for name in "slow", "quick":
        handler(name, name=name)(run)
    handler("list", name="list", batch=True)(run_list)
    handler("async", name="async")(run_async)
    paces = Paces()
    for name, seconds in {"slow": 0.2, "quick": 0.001, "list": 0.2, "async": 0.2}.items():
        found = handlers.get(name)
        assert found is not None
        paces.of(found).seconds = seconds
    return paces


def slow_lines(
    paces: Paces, *names: str, threads: int = 4, unused: Callable[[], int] = lambda: 0
) -> SlowLines:
    """Return the limits of lines in queues that have the handlers `names`."""
    found = [each for each in handlers.all_handlers() if each.name in names]
    return SlowLines(paces, threads=threads, unused=unused, handlers_of=lambda queue: found)


def test_only_slow_handlers_are_limited(paces: Paces) -> None:
    """A list takes as long with one message as with many; of the unknown, nothing is known."""
    lines = slow_lines(paces, threads=9, unused=lambda: 1)
    names = ["slow", "slow", "quick", "list", "async", "unknown"]
    assert lines.limits(names) == [1, 0, UNLIMITED, UNLIMITED, 1, UNLIMITED]


def test_no_claim_is_worth_it_until_a_thread_is_unused(paces: Paces) -> None:
    unused = 0
    lines = slow_lines(paces, threads=4, unused=lambda: unused)
    assert not lines.wait_for_thread()
    lines.limits(["slow", "quick"])
    assert lines.wait_for_thread()
    unused = 1
    assert not lines.wait_for_thread()
    unused = 0
    lines.limits(["quick"])
    assert not lines.wait_for_thread()


def test_slowest_handler_of_an_ordered_queue_decides(paces: Paces) -> None:
    lines = slow_lines(paces, "quick", "list")
    assert lines.ordered_limit("line") == UNLIMITED
    quick = handlers.get("quick")
    assert quick is not None
    paces.of(quick).seconds = 0.02
    assert lines.ordered_limit("line") == 3
    assert slow_lines(paces, "quick", "slow").ordered_limit("line") == 1


def test_of_many_lines_some_are_claimed_ahead(paces: Paces) -> None:
    """So a thread does not wait for a claim; the process leaves as many lines as it has threads."""
    lines = slow_lines(paces, threads=4, unused=lambda: 0)
    assert lines.limits(["slow"] * 6) == [1, 1, 0, 0, 0, 0]
    assert not lines.wait_for_thread()
