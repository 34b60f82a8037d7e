"""A value in, JSON text out: what PostgreSQL stores as jsonb and a worker reads back the same.

What jsonb refuses, or would silently change, is refused here: before any SQL, so that the
caller's transaction lives on, and with the path of the culprit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from json.encoder import c_make_encoder, encode_basestring  # type: ignore[attr-defined]
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

from django_mq.exceptions import InvalidPayload, PayloadTooLarge

#: An interpreter refuses to read more digits (sys.set_int_max_str_digits), whatever ours allows.
MAX_DIGITS = 4300
_TOO_LONG = 10**MAX_DIGITS
#: Their default() gives text at most: what it returns needs no second look.
_TRUSTED = (DjangoJSONEncoder, json.JSONEncoder)
_PLAIN = frozenset((str, bool, float, type(None)))


def encode(
    value: object,
    *,
    what: str,
    max_bytes: int,
    max_depth: int,
    encoder: type[json.JSONEncoder] = DjangoJSONEncoder,
) -> str:
    """Return `value` as JSON text of at most `max_bytes` of UTF-8, nested at most `max_depth`.

    `what` names it in errors ("payload"). The order of keys is jsonb's affair, and not kept here.
    Raises PayloadTooLarge, and InvalidPayload for what cannot be encoded or would not come back:
    NaN, NUL, lone surrogates, keys that become the same text, cycles, integers of more than 4,300
    digits.

    >>> encode({"to": "Zoë", "n": (1, 2)}, what="payload", max_bytes=64, max_depth=4)
    '{"n":[1,2],"to":"Zoë"}'
    """
    if type(value) is dict and not value:
        return "{}"
    try:
        text = _encode_plain(value, encoder, max_depth) if encoder in _TRUSTED else None
        if text is None:
            _check(value, max_depth, ())
            text = _dumps(encoder)(value)  # type: ignore[arg-type]  # mypy: it is hashable, too
        size = len(text) if text.isascii() else len(text.encode())
        if "\\u0000" in text:  # NUL, or a backslash before u0000: reading it back tells
            _check_nul(_read_back(text))
        if encoder not in _TRUSTED:
            _check(_read_back(text), max_depth, ())
    except _Refused as refused:
        raise InvalidPayload(f"{what}{_short(refused.path)} {refused}") from None
    except Exception as error:  # an encoder's default() is the user's code: anything may come
        where = _short(_culprit(value, _dumps(encoder)))  # type: ignore[arg-type]
        raise InvalidPayload(f"{what}{where}: {_said(error)}") from error
    if size > max_bytes:
        raise PayloadTooLarge(
            f"{what} is {size:,} bytes of JSON, and at most {max_bytes:,} are allowed:"
            " store the data and send its id"
        )
    return text


class _Refused(Exception):
    """Says what is wrong; each container that it passes on its way out adds to `path`."""

    path = ""

    def within(self, key: object) -> _Refused:
        self.path = _step(key) + self.path
        return self


def _encode_plain(value: object, encoder: type[json.JSONEncoder], max_depth: int) -> str | None:
    """Return the text of what needs no `_check()`, as its text shows; None for anything else.

    Only keys of different types can become the same text, and those cannot be sorted. So few
    brackets are not nested too deeply, and so short a text has no endless integer in it.
    """
    if _begins_deep(value, max_depth):
        return None
    dumps = _dumps(encoder, sort_keys=True)  # type: ignore[arg-type]
    try:
        text = dumps(value)
    except Exception:  # `_check()`, or encoding it once more, finds out what it is
        return None
    plain = len(text) <= MAX_DIGITS and text.count("{") + text.count("[") <= max_depth
    return text if plain else None


def _begins_deep(value: object, most: int) -> bool:
    """Say whether there are more than `most` containers around the first leaf of `value`.

    A cycle is endless, and a list of twice the same list, a hundred times over, nearly so.
    """
    for _ in range(most + 1):
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
    # What `encode` makes anew for each call, made once: 1.4 us of 3.8 for a small payload.
    write = c_make_encoder(
        None, made.default, encode_basestring, None, ":", ",", sort_keys, False, False
    )
    return lambda value: "".join(write(value, 0))


def _check(value: object, room: int, inside: tuple[int, ...]) -> None:
    """Refuse what encoding would not: depth, cycles, colliding keys, endless integers.

    `inside` are the ids of the containers around `value`, `room` is how many more may come.
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
    """Refuse keys that become the same text, of which jsonb would keep only one: 1 and "1"."""
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
    for path, leaf in _leaves(value):
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


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield each value that is no container, and each key, with its path."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield path + _step(key), key
            yield from _leaves(each, path + _step(key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _leaves(each, path + _step(index))
    else:
        yield path, value


def _culprit(value: object, dumps: Callable[[Any], str]) -> str:
    """Return the path of the first value that cannot be encoded by itself, else nothing."""
    try:
        for path, leaf in _leaves(value):
            try:
                dumps(leaf).encode()
            except Exception:
                return path
    except Exception:  # cannot even be walked
        return ""
    return ""


def _step(key: object) -> str:
    """Show one step of a path; repr keeps control characters out of logs."""
    if isinstance(key, str) and key.isidentifier() and len(key) <= 100:
        return f".{key}"
    return f"[{key[:100]!r}]" if isinstance(key, str) else f"[{key!r}]"


def _short(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:100]}...{path[-100:]}"


def _said(error: Exception) -> str:
    """Of the encoder's own complaints show the text, of others the class alone."""
    if isinstance(error, TypeError | ValueError | OverflowError):
        return str(error)[:500]
    return f"the encoder raised {type(error).__name__}"
