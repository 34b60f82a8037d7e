"""The rules for names, keys and patterns."""

from __future__ import annotations

import re

from django_mq.exceptions import InvalidName
from django_mq.policy.column_bounds import MAX_NAME

#: The rule for types, queues and handlers; the tables also CHECK it.
RULE = f"1 to {MAX_NAME} ASCII letters, digits and _ . : / -"
_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME}}}")
#: The rule for order keys and unique ids, which are an application's own names: any text. The
#: tables also CHECK it. Lone surrogates cannot be encoded.
_KEY = re.compile(rf"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{MAX_NAME}}}")
_WORD = re.compile(r"[A-Za-z0-9_:/-]*|[*#]")


def check_name(value: object, what: str) -> str:
    """Return `value` as a plain str if it is a name; raise InvalidName otherwise.

    `what` is the kind of name, for the error text.

    >>> check_name("shop.orders.placed", "type")
    'shop.orders.placed'
    """
    if isinstance(value, str) and _NAME.fullmatch(value):
        return str.__str__(value)  # a member of a str enum becomes its text
    raise InvalidName(f"{what} {_quoted(value)} is not a name: use {RULE}")


def check_key(value: object, what: str) -> str:
    """Return `value` as a plain str if it can be a key or unique id; raise InvalidName otherwise.

    `what` is key or unique id, for the error text. The length counts characters, not bytes.

    >>> check_key("user:ä+b@example.com", "key")
    'user:ä+b@example.com'
    """
    if isinstance(value, str) and _KEY.fullmatch(value):
        return str.__str__(value)
    if not isinstance(value, str):
        raise InvalidName(
            f"{what} {_quoted(value)} cannot be stored: it must be text; for a number or a UUID,"
            " use str(...)"
        )
    raise InvalidName(
        f"{what} {_quoted(value)} cannot be stored: use 1 to {MAX_NAME} characters, none of them a"
        " control character"
    )


def check_pattern(value: object, what: str = "pattern") -> str:
    """Return `value` as a plain str if it is a pattern; raise InvalidName otherwise.

    >>> check_pattern("shop.*.cancelled")
    'shop.*.cancelled'
    """
    if (
        isinstance(value, str)
        and 1 <= len(value) <= MAX_NAME
        and all(_WORD.fullmatch(word) for word in value.split("."))
    ):
        return str.__str__(value)
    raise InvalidName(
        f"{what} {_quoted(value)} is not a pattern: use {RULE},"
        " or * (one word) and # (any number of words) as whole words between dots"
    )


def _quoted(value: object) -> str:
    if not isinstance(value, str):
        return f"of type {type(value).__name__}"
    text = value if len(value) <= MAX_NAME else value[:MAX_NAME] + "..."
    return str.__repr__(text)  # a subclass may have another repr, which may raise
