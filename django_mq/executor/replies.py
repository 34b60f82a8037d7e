"""The results of handlers, encoded for their requesters as soon as a handler has run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

from django_mq.conf import get_settings
from django_mq.messages import Delivery


class EncodedResults(dict[int, str]):
    """The results of a handler as JSON text, by message id."""


def encoded(result: Any, argument: Delivery | list[Delivery]) -> Any:
    """Return `result` as `EncodedResults` if it was requested, else unchanged.

    `argument` is the handler's argument. A list or tuple returned for a batch has one value per
    message; any other value is the result of every message. Raises InvalidPayload for a result that
    cannot be stored, and ValueError for a list of another length: the attempt fails as if the
    handler had raised the error.
    """
    deliveries = argument if isinstance(argument, list) else [argument]
    asked = [each for each in deliveries if each._row.wants_result]
    if not asked or getattr(asked[0], "finished", False):  # `finish()` has stored the result
        return result
    values: Iterable[Any] = repeat(result)
    if isinstance(argument, list) and isinstance(result, list | tuple):
        if len(result) != len(argument):
            raise ValueError(
                f"the handler of a batch returned {len(result)} results for {len(argument)}"
                " messages: return a list with one per message, or one value that is not a list"
            )
        values = result
    return EncodedResults(
        (delivery.id, text(value))
        for delivery, value in zip(deliveries, values, strict=False)
        if delivery._row.wants_result
    )


def text(value: Any) -> str:
    """Return a handler's result as JSON text, within the limits of a payload."""
    return get_settings().encode_payload(value, "result")
