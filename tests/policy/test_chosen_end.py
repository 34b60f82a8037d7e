"""The end that a handler chose, found in the exception groups of its tasks."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq.exceptions import Reject, Retry, Snooze
from django_mq.policy.chosen_end import chosen_end


class Hostile(ExceptionGroup[Exception]):
    """Says nothing about itself."""

    @property
    def exceptions(self) -> Any:
        raise ZeroDivisionError

    @property
    def __class__(self) -> Any:
        raise ZeroDivisionError


class Later(Snooze):
    """A project's own."""


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("unhandled errors in a TaskGroup", errors)


@pytest.mark.parametrize("error", [Retry(), Snooze(5), Reject(), Later(5)], ids=repr)
def test_the_only_exception_of_a_group_is_the_end(error: Exception) -> None:
    assert chosen_end(group(error)) is error
    assert chosen_end(group(group(group(error)))) is error
    assert chosen_end(BaseExceptionGroup("g", [error])) is error
    assert chosen_end(Hostile("g", [error])) is error


@pytest.mark.parametrize(
    "error",
    [
        Reject(),
        ValueError(),
        group(ValueError()),
        group(Reject(), Reject()),
        group(Reject(), ValueError()),
        group(group(Reject()), group(ValueError())),
        BaseExceptionGroup("g", [KeyboardInterrupt()]),
    ],
    ids=repr,
)
def test_any_other_error_is_unchanged(error: BaseException) -> None:
    assert chosen_end(error) is error


def test_very_deep_groups() -> None:
    error: Exception = Reject()
    deep = error
    for _ in range(10_000):
        deep = group(deep)
    assert chosen_end(deep) is error
