"""Readers of the options of brokers, for relays and inboxes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, field
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from django_mq.conf import readers
from django_mq.conf.readers import (
    Reader,
    SecretValueError,
    SettingError,
    one_of,
    read_fields,
    setting_error,
)

#: The package that each kind of broker needs. The extra that installs it has the name of the kind.
PACKAGES = {"amqp": "pika", "kafka": "confluent_kafka", "nats": "nats", "redis": "redis"}


def missing_package(kind: str) -> str:
    """Return which command installs what this kind of broker needs; empty if nothing is missing."""
    package = PACKAGES.get(kind)
    if package is None or find_spec(package) is not None:
        return ""
    return f"it needs the package {package}: pip install 'django-mq[{kind}]'"


def secret_option(read: Reader, default: Any = MISSING, *, make: Any = MISSING) -> Any:
    """Return an option whose value may have a password: no repr and no error shows it."""

    def read_secret(value: object) -> Any:
        try:
            return read(value)
        except ValueError as error:
            raise SecretValueError(error) from None

    return field(default=default, default_factory=make, repr=False, metadata={"read": read_secret})


def url_of(*schemes: str, with_login: bool = True, several: bool = False) -> Reader:
    """Return a reader of URLs with one of these schemes; `several`: hosts, between commas."""

    def read(value: object) -> str:
        try:
            given = urlsplit(readers.text(value))
            has_place = given.netloc or given.path.strip("/")
            if not (several and "," in given.netloc):
                _ = given.port  # raises ValueError
        except ValueError:
            has_place = ""
        # The clients know schemes in lower case only.
        if not has_place or str(value).partition("://")[0] not in schemes:
            raise ValueError(f"must be a URL that begins with {' or '.join(schemes)}, and ://")
        if "@" in given.netloc and not with_login:
            raise ValueError("must have no user and password: other options have them")
        if "," in given.netloc.rpartition("@")[2] and not several:
            raise ValueError("must have one host: this kind of broker takes no list")
        return str(value)

    return read


def text_or_empty(value: object) -> str:
    """Read a text."""
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def texts(value: object) -> tuple[str, ...]:
    """Read one text, or several."""
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(found) or not _are_texts(found):
        raise ValueError("must be a text, or a list of texts, none of them empty")
    return tuple(found)


def signing_keys(value: object) -> tuple[str, ...]:
    """Read one secret of webhooks, or several; those that begin with `whsec_` are base64."""
    found = texts(value)
    for each in found:
        prefix, _, encoded = each.partition("_")
        try:
            if prefix == "whsec" and not base64.b64decode(encoded, validate=True):
                raise ValueError
        except ValueError:
            raise ValueError("must have base64 after whsec_") from None
    return found


def headers(value: object) -> Mapping[str, str]:
    """Read a dict of headers: texts without control characters."""
    found = readers.mapping(value)
    if not (_are_texts(found) and _are_texts(found.values())):
        raise ValueError("must be a dict of texts")
    if not all(text.isprintable() and text.isascii() for pair in found.items() for text in pair):
        raise ValueError("must have ASCII texts without line breaks and control characters")
    return MappingProxyType(dict(found))


def configuration(value: object) -> Mapping[str, Any]:
    """Read a dict whose keys are texts."""
    found = readers.mapping(value)
    if not _are_texts(found):
        raise ValueError("must be a dict whose keys are texts")
    return MappingProxyType(dict(found))


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(each, str) for each in values)


def read_all(
    setting: str,
    kinds: Mapping[str, type[Any]],
    required: Sequence[str],
    raw: Mapping[Any, Any],
    errors: list[SettingError],
) -> dict[str, Any]:
    """Return the options of the entries of a setting, by name, of those without errors."""
    found = {}
    for name, options in raw.items():
        where = f"DJANGO_MQ[{setting!r}][{name!r}]"
        before = len(errors)
        # An entry that is not a dict may be a URL with a password.
        given = readers.read_entry(name, options, where, errors, is_secret=True)
        kind = None if given is None else _kind(kinds, given, where, errors)
        if given is None or kind is None:
            continue
        values = read_fields(kind, given, str.lower, where, errors)
        missing = [each for each in required if each not in given]
        errors.extend(SettingError(where, f"has no {each!r}.") for each in missing)
        if len(errors) == before:
            found[name] = kind(**values)
    return found


def _kind(
    kinds: Mapping[str, type[Any]],
    given: Mapping[str, Any],
    where: str,
    errors: list[SettingError],
) -> type[Any] | None:
    read: Callable[[Any], Any] = one_of(*kinds)
    try:
        return kinds[read(given.get("kind"))]
    except ValueError as error:
        errors.append(setting_error(f"{where}['kind']", given.get("kind"), error))
        return None
