"""The place in the code by which failed attempts are grouped."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
from django.db.models import Q

from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.error_place import error_place
from django_mq.policy.error_text import describe
from django_mq.policy.outcomes import TimedOut


def raised(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def parse() -> object:
    return json.loads("{")


def wait() -> object:
    return RetryPolicy(base=-1)


def query() -> object:
    return Q(total__gt=1) | 5


class Order:
    def save(self) -> None:
        raise KeyError("total")


def foreign(filename: str, module: str) -> Callable[[], object]:
    """Return a function that fails as if it were defined in another file and module."""
    names: dict[str, Any] = {"__name__": module}
    exec(compile("def fail(): raise ValueError('no')", filename, "exec"), names)  # noqa: S102
    return names["fail"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "place"),
    [(parse, "parse"), (wait, "wait"), (query, "query"), (Order().save, "Order.save")],
)
def test_frames_of_libraries_that_every_handler_uses_are_passed_over(
    function: Callable[[], object], place: str
) -> None:
    assert error_place(raised(function)) == f"{__name__}:{place}"


def test_an_app_may_be_named_as_a_module_of_the_library() -> None:
    function = foreign("/srv/shop/calendar/handlers.py", "calendar.handlers")
    assert error_place(raised(function)) == "calendar.handlers:fail"
    standard = foreign(json.__file__, "json")
    assert error_place(raised(standard)).startswith(f"{__name__}:raised")


@pytest.mark.parametrize("error", [ValueError("never raised"), TimedOut("ran past 5 s")])
def test_error_without_a_traceback_has_no_place(error: Exception) -> None:
    assert error_place(error) == describe(error).place == ""


def test_the_same_place_however_the_error_reads() -> None:
    def fail(number: int) -> None:
        raise ValueError(f"no order {number}")

    places = {describe(raised(lambda n=n: fail(n))).place for n in range(3)}  # type: ignore[misc]
    assert len(places) == 1


def test_a_hostile_name_is_cut_and_cleaned() -> None:
    code: CodeType = foreign("x.py", "shop").__code__
    function = type(parse)(
        code.replace(co_qualname="a\x1b[2J\n\x00" + "é" * 5000), {"__name__": ["not", "text"]}
    )
    place = describe(raised(function)).place
    assert len(place.encode()) <= 256
    assert place.startswith("?:a")
    assert not set(place) & set("\x1b\x00\n")
