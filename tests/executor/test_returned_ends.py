"""A handler that returns Retry, Reject or Snooze instead of raising it fails: nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_mq import Reject, Retry, Snooze, handler
from django_mq.models import FailedAttempt
from django_mq.testing import deliver
from tests.rows import add
from tests.slow import mostly_slow
from tests.worker.conftest import Running

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]
KINDS = ("atomic", "atomic=False", "async")


class TooBusy(Retry):
    """An exception of a project."""


RETURNED = {
    "Reject('no')": Reject("no"),
    "Snooze(5)": Snooze(5),
    "Retry()": Retry(),
    "TooBusy(7)": TooBusy(7),
    "Reject": Reject,
    "TooBusy": TooBusy,
}


def on(kind: str, value: Any, **options: Any) -> None:
    """Register a handler of this kind that returns `value`."""

    async def coroutine(argument: Any) -> Any:
        return value

    function: Any = coroutine if kind == "async" else lambda argument: value
    options["atomic"] = kind == "atomic"
    handler("#", queue="mail", name="h", **options)(function)


def errors() -> list[tuple[int, str, str]]:
    return list(
        FailedAttempt.objects.order_by("message_id").values_list(
            "message_id", "error_class", "error_text"
        )
    )


def failed(id: int, returned: str) -> tuple[int, str, str]:
    return id, "TypeError", f"the handler returned {returned}: raise it instead"


@pytest.mark.parametrize(("kind", "shown"), mostly_slow(KINDS, [*RETURNED]))
def test_returned_end_is_a_failure(start: Start, kind: str, shown: str) -> None:
    on(kind, RETURNED[shown])
    message = add(handler="h", max_attempts=1)
    assert start(until_empty=True).join()
    assert errors() == [failed(message.pk, shown)]
    with pytest.raises(TypeError, match="raise it instead"):
        deliver("h")


@pytest.mark.parametrize("kind", KINDS)
def test_as_the_result_of_a_request(start: Start, kind: str) -> None:
    on(kind, Reject("no"))
    message = add(handler="h", max_attempts=1, wants_result=True)
    assert start(until_empty=True).join()
    assert errors() == [failed(message.pk, "Reject('no')")]


@pytest.mark.parametrize(
    ("kind", "value"),
    mostly_slow(KINDS, [Reject("no"), [None, Reject("no")], (Reject("no"), None)]),
)
def test_as_the_result_of_a_batch_or_of_one_of_its_messages(
    start: Start, kind: str, value: Any
) -> None:
    on(kind, value, batch=True)
    messages = [add(handler="h", max_attempts=1) for _ in range(2)]
    assert start(until_empty=True, threads=1).join()
    assert errors() == [failed(each.pk, "Reject('no')") for each in messages]


@pytest.mark.parametrize(
    ("kind", "value"),
    mostly_slow(KINDS, [None, 0, [Reject("no")], ValueError("no"), ValueError]),
)
def test_other_values_are_results(start: Start, kind: str, value: Any) -> None:
    """A list is one value, unless it was returned for a list of messages."""
    on(kind, value)
    add(handler="h", max_attempts=1)
    assert start(until_empty=True).join()
    assert errors() == []
