"""The log and the ports of commands that run until they are stopped."""

from __future__ import annotations

import logging

from django.core.management.base import CommandError

from django_mq.signals import message_started
from django_mq.supervisor.health import Endpoint


def configure_logging(verbosity: int) -> None:
    """Log to stderr unless LOGGING configures this logger: such a command should not be silent.

    `-v 2` logs a line for each message that ends, `-v 3` also one for its start, and `-v 0` only
    warnings, regardless of the level in LOGGING.
    """
    logger = logging.getLogger("django_mq")
    if verbosity == 0:
        logger.setLevel(max(logger.level, logging.WARNING))
    if verbosity == 2:
        logger.addFilter(_is_no_start)
    if verbosity >= 2:
        logger.setLevel(logging.DEBUG)
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def _is_no_start(record: logging.LogRecord) -> bool:
    return getattr(record, "event", "") != message_started.name


def endpoint(what: str, where: int | tuple[int, str] | None) -> Endpoint | None:
    """Listen on a port and an address; settings and `call_command()` may give only the port."""
    if not where:
        return None
    port, address = (where, "127.0.0.1") if isinstance(where, int) else where
    try:
        return Endpoint(port, address)
    except (OSError, OverflowError) as error:
        raise CommandError(f"{what} port {port} cannot be opened: {error}") from error
