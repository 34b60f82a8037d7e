"""Encode a value as JSON text that PostgreSQL stores as jsonb and a worker reads back unchanged.

Values that jsonb refuses or would silently change are refused here, before any SQL, so that the
caller's transaction stays usable. The error gives the path of the bad value.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
from functools import lru_cache
from json.encoder import c_make_encoder, encode_basestring  # type: ignore[attr-defined]
from typing import Any

from django_mq.exceptions import InvalidPayload, PayloadTooLarge
from django_mq.policy.bad_value import leaves, short, step, unencodable

#: Python's default limit on digits (sys.set_int_max_str_digits), which a reader may have, whatever
#: this process has set.
MAX_DIGITS = 4300
_TOO_LONG = 10**MAX_DIGITS
#: The `default()` of these modules' encoders returns only text, which needs no second check.
_TRUSTED = ("json.encoder", "django.core.serializers.json")
_PLAIN = frozenset((str, bool, float, type(None)))
_LEAVES = _PLAIN | {int}


def encode(
    value: object,
    *,
    what: str,
    max_bytes: int,
    max_depth: int,
    encoder: type[json.JSONEncoder] = json.JSONEncoder,
) -> str:
    """Return `value` as JSON text of at most `max_bytes` of UTF-8, nested at most `max_depth`.

    `what` names the value in errors ("payload"). The order of keys is not kept: jsonb has its own.
    Raises PayloadTooLarge, and InvalidPayload for values that cannot be encoded or read back: NaN,
    NUL, lone surrogates, keys that become the same text, cycles, integers above 4,300 digits.

    >>> encode({"to": "Zoë", "n": (1, 2)}, what="payload", max_bytes=64, max_depth=4)
    '{"n":[1,2],"to":"Zoë"}'
    """
    if type(value) is dict and not value:
        return "{}"
    try:
        if not (type(value) is dict and _LEAVES.issuperset(map(type, value.values()))):
            _refuse_endless(value, max_bytes, max_depth)
        text = _encode_plain(value, encoder, max_depth) if encoder.__module__ in _TRUSTED else None
        if text is None:
            _check(value, max_depth, ())
            text = _dumps(encoder)(value)  # type: ignore[arg-type]  # mypy: it is hashable, too
        size = len(text) if text.isascii() else len(text.encode())
        if "\\u0000" in text:  # a NUL, or a backslash before u0000: read it back to know
            _check_nul(_read_back(text))
        if encoder.__module__ not in _TRUSTED:
            _check(_read_back(text), max_depth, ())
    except _Refused as refused:
        raise refused.error_class(f"{what}{short(refused.path)} {refused}") from None
    except Exception as error:  # an encoder's default() is user code, and may raise anything
        dumps = _dumps(encoder)  # type: ignore[arg-type]
        raise unencodable(what, value, dumps, error) from error
    if size > max_bytes:
        raise PayloadTooLarge(
            f"{what} is {size:,} bytes of JSON, and at most {max_bytes:,} are allowed:"
            " store the data elsewhere and send its id"
        )
    return text


class _Refused(Exception):
    """Its text says what is wrong; each container that it passes through adds a key to `path`."""

    path = ""
    error_class: type[InvalidPayload] = InvalidPayload

    def within(self, key: object) -> _Refused:
        self.path = step(key) + self.path
        return self


class _Repetitive(_Refused):
    error_class = PayloadTooLarge


def _refuse_endless(value: object, max_bytes: int, max_depth: int) -> None:
    """Refuse a value whose JSON would be far larger than the value is in memory.

    A list that holds one list twice, which holds one list twice, and so on, takes a few lines to
    build, but each level doubles the time to encode it.
    """
    try:
        count = _count(value, max_depth, max_bytes, {})
    except Exception:  # too deep, or the value cannot be iterated
        _check(value, max_depth, ())
        return
    if count > max_bytes:  # each value takes at least a byte
        raise _Repetitive(f"would be more than {max_bytes:,} values in JSON: it repeats its parts")


def _count(value: object, room: int, limit: int, known: dict[int, int]) -> int:
    """Return how many values the JSON of `value` has; some number above `limit` if it has more.

    Looks at each container once: `known` has the counts of those found so far, by their ids. Raises
    RecursionError from a container below `room` others: what follows it is not counted.
    """
    if isinstance(value, dict):
        parts: Collection[object] = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return 1
    if room == 0:
        raise RecursionError
    if _LEAVES.issuperset(map(type, parts)):
        return 1 + len(parts)
    if (count := known.get(id(value))) is not None:
        return count
    known[id(value)] = 0  # a value that contains itself ends here
    count = 1
    for each in parts:
        count += 1 if type(each) in _LEAVES else _count(each, room - 1, limit, known)
        if count > limit:
            break
    known[id(value)] = count
    return count


def _encode_plain(value: object, encoder: type[json.JSONEncoder], max_depth: int) -> str | None:
    """Return the text of a value whose text proves it needs no `_check()`; None for others.

    Only keys of different types can become the same text, and those cannot be sorted. A text with
    at most `max_depth` brackets is not nested too deeply; a text of at most MAX_DIGITS characters
    has no integer that is too long.
    """
    if _begins_deep(value, max_depth):
        return None
    dumps = _dumps(encoder, sort_keys=True)  # type: ignore[arg-type]
    try:
        text = dumps(value)
    except Exception:  # `_check()`, or a second encoding, finds the cause
        return None
    plain = len(text) <= MAX_DIGITS and text.count("{") + text.count("[") <= max_depth
    return text if plain else None


def _begins_deep(value: object, maximum: int) -> bool:
    """Return whether more than `maximum` containers surround the first leaf of `value`.

    Encoding a cycle never ends.
    """
    for _ in range(maximum + 1):
        if isinstance(value, dict):
            value = next(iter(value.values()), None)
        elif isinstance(value, list | tuple) and value:
            value = value[0]
        else:
            return False
    return True


@lru_cache(maxsize=16)
def _dumps(encoder: type[json.JSONEncoder], *, sort_keys: bool = False) -> Callable[[Any], str]:
    made = encoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys)
    own = encoder.encode, encoder.iterencode
    if own != (json.JSONEncoder.encode, json.JSONEncoder.iterencode) or c_make_encoder is None:
        return made.encode
    # `encode` would create this for each call; creating it once saves 1.4 of 3.8 us for a small
    # payload.
    write = c_make_encoder(
        None, made.default, encode_basestring, None, ":", ",", sort_keys, False, False
    )
    return lambda value: "".join(write(value, 0))


def _check(value: object, room: int, inside: tuple[int, ...]) -> None:
    """Refuse values that encoding accepts: too deep, cyclic, with colliding keys or huge integers.

    `inside` are the ids of the containers around `value`; `room` is how many more may be nested.
    """
    if isinstance(value, int):
        if not -_TOO_LONG < value < _TOO_LONG:
            raise _Refused(f"is an integer of more than {MAX_DIGITS:,} digits")
        return
    if not isinstance(value, dict | list | tuple):
        return
    if id(value) in inside:
        raise _Refused("contains itself")
    if room == 0:
        raise _Refused(f"is nested too deeply: at most {len(inside)} levels (MAX_DEPTH)")
    inside = (*inside, id(value))
    key: object = None
    mixed = False
    try:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if type(each) not in _PLAIN:
                _check(each, room - 1, inside)
            if type(key) is not str:
                mixed = True
    except _Refused as refused:
        raise refused.within(key) from None
    if mixed and isinstance(value, dict):
        _check_keys(value)


def _check_keys(value: dict[Any, Any]) -> None:
    """Refuse keys that become the same text, such as 1 and "1": jsonb would keep only one."""
    written: Counter[str] = Counter()
    for key in value:
        if isinstance(key, str):
            written[key] += 1
        elif key is None or isinstance(key, int | float):
            if isinstance(key, int) and not -_TOO_LONG < key < _TOO_LONG:
                raise _Refused(f"has a key of more than {MAX_DIGITS:,} digits")
            written[next(iter(json.loads(json.dumps({key: 0}))))] += 1
        else:
            raise _Refused(f"has a key of type {type(key).__name__}; keys of JSON are text")
    text, count = written.most_common(1)[0]
    if count > 1:
        raise _Refused(f"has {count} keys that are all {text[:100]!r} in JSON")


def _check_nul(value: object) -> None:
    for path, leaf in leaves(value):
        if isinstance(leaf, str) and "\0" in leaf:
            refused = _Refused("contains a NUL character, which PostgreSQL cannot store")
            refused.path = path
            raise refused


def _read_back(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Refused("has an object with a key twice")
    return found
