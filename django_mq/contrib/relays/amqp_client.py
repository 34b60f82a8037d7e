"""The AMQP client: its options, its errors while the broker is away, and its log level."""

from __future__ import annotations

import asyncio
import logging

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

#: The errors of connecting are not AMQPErrors: the host is unknown, or the server does not speak
#: AMQP. A socket that is reset as soon as it is connected is a ValueError.
LOST = (AMQPError, AMQPConnectorException, OSError, asyncio.TimeoutError, ValueError)
# Relays and inboxes report a failed connection; the client would log seven more errors for it.
if logging.getLogger("pika").level == logging.NOTSET:
    logging.getLogger("pika").setLevel(logging.CRITICAL)


def parameters(url: str, timeout: float) -> pika.URLParameters:
    """Return the options for one attempt to connect. Raises ValueError for a wrong one in `url`."""
    found = pika.URLParameters(url)
    found.socket_timeout = found.stack_timeout = timeout
    found.connection_attempts = 1
    return found
