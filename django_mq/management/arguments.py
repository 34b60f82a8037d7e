"""Read the arguments of `mq_worker`."""

from __future__ import annotations

from argparse import ArgumentTypeError

from django_mq.policy.backoff import as_seconds


def positive(text: str) -> int:
    """Read a whole number above zero."""
    return _whole(text, 1, 2**31 - 1)


def port(text: str) -> int:
    """Read the number of a port."""
    return _whole(text, 1, 65535)


def port_and_address(text: str) -> tuple[int, str]:
    """Read a port, or an address and a port.

    >>> port_and_address("9100"), port_and_address("[::]:9100")
    ((9100, '127.0.0.1'), (9100, '::'))
    """
    address, _, number = text.rpartition(":")
    return port(number), address.strip("[]") or "127.0.0.1"


def _whole(text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return number


def seconds(text: str) -> float:
    """Read a duration in seconds."""
    try:
        found = as_seconds(float(text))
    except ValueError:
        found = None
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return found
