"""What the AMQP client raises while its broker is away, and what it logs."""

from __future__ import annotations

import asyncio
import logging

from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

#: The errors of connecting are not AMQPErrors: the host is unknown, or the server says nonsense.
LOST = (AMQPError, AMQPConnectorException, OSError, asyncio.TimeoutError)
# It logs seven errors for each connection that fails, which relays and inboxes report themselves.
if logging.getLogger("pika").level == logging.NOTSET:
    logging.getLogger("pika").setLevel(logging.CRITICAL)
