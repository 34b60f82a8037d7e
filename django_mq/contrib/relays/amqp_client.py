"""The AMQP client: its options, what it raises while its broker is away, and what it logs."""

from __future__ import annotations

import asyncio
import logging

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

#: The errors of connecting are not AMQPErrors: the host is unknown, or the server says nonsense. A
#: socket that is reset as soon as it is connected is a ValueError.
LOST = (AMQPError, AMQPConnectorException, OSError, asyncio.TimeoutError, ValueError)
# It logs seven errors for each connection that fails, which relays and inboxes report themselves.
if logging.getLogger("pika").level == logging.NOTSET:
    logging.getLogger("pika").setLevel(logging.CRITICAL)


def parameters(url: str, timeout: float) -> pika.URLParameters:
    """Return the options for one attempt to connect. Raises ValueError for a wrong one in `url`."""
    found = pika.URLParameters(url)
    found.socket_timeout = found.stack_timeout = timeout
    found.connection_attempts = 1
    return found
