"""Limits on stored JSON, checked before it is decoded, since other programs write rows, too.

The limits are those of `encode()`. jsonb is longer than the text of the producer: it has a space
after each comma and colon, and no exponents. So the size is that of the shortest text that a
producer can have written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import repeat
from operator import add

#: A number that a producer may have written with an exponent, in five characters or more.
_EXPANDED = re.compile(r'(?<![\w"\\.])-?(?:\d{17,}|0\.0000\d+)(?![\w".])')
#: jsonb writes 1e308 with 309 digits, which is the largest factor; without such numbers the factor
#: stays below eight.
MAX_EXPANSION = 64
_ZEROS = "0" * 20
#: Both kinds of brackets become one; all other bytes are left out.
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NON_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def excess(text: str, *, what: str, max_bytes: int, max_depth: int) -> str:
    """Return how JSON text of the database exceeds the limits; empty if it does not.

    Takes time in proportion to the text, and almost none for a short text.

    >>> excess('{"n": [1, 2]}', what="payload", max_bytes=12, max_depth=2)
    ''
    >>> excess('{"n": [1, 2]}', what="payload", max_bytes=10, max_depth=2)
    'its payload has more than 10 bytes of JSON (MAX_PAYLOAD_BYTES)'
    >>> excess('{"n": ["]"]}', what="payload", max_bytes=99, max_depth=1)
    'its payload is nested deeper than 1 levels (MAX_DEPTH)'
    """
    if 4 * len(text) > max_bytes and _min_written_bytes(text, max_bytes) > max_bytes:
        return f"its {what} has more than {max_bytes:,} bytes of JSON (MAX_{what.upper()}_BYTES)"
    if text.count("{") + text.count("[") > max_depth and _is_deeper(text.encode(), max_depth):
        return f"its {what} is nested deeper than {max_depth} levels (MAX_DEPTH)"
    return ""


def max_brackets(texts: Sequence[str]) -> int:
    """Return the largest number of opening brackets in one of `texts`: none is nested deeper.

    >>> max_brackets(['{"n": [1, 2]}', '[]'])
    2
    """
    of_objects, of_arrays = map(str.count, texts, repeat("{")), map(str.count, texts, repeat("["))
    return max(map(add, of_objects, of_arrays), default=0)


def _min_written_bytes(text: str, enough: int) -> int:
    """Return a lower bound of the bytes that a producer wrote; stops once it exceeds `enough`."""
    size = len(text) if text.isascii() else len(text.encode())
    maximum = MAX_EXPANSION if _ZEROS in text else 8
    if size <= enough or size > maximum * enough:
        return size
    size -= text.count(", ") + text.count('": ')
    if size <= enough:
        return size
    for number in _EXPANDED.finditer(text):
        size -= len(number[0]) - len("1e+16")
    return size


def _is_deeper(text: bytes, maximum: int) -> bool:
    """Return whether containers are nested deeper than `maximum`.

    Each round removes the innermost containers, so there are as many rounds as levels.
    """
    left = _outside_strings(text).translate(_ONE_KIND, _NON_BRACKETS)
    for _ in range(maximum):
        if not left:
            return False
        left = left.replace(b"[]", b"")
    return bool(left)


def _outside_strings(text: bytes) -> bytes:
    """Return JSON without its strings, whose brackets would hide or add levels.

    >>> _outside_strings(rb'{"a": ["\\\\", "]\\"", 7]}')
    b'{: [, , 7]}'
    """
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    return b"".join(text.split(b'"')[::2])
