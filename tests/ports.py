"""Ports for servers that tests start."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

#: Below the ports that Linux gives to clients, and to servers that ask for any: such a one might
#: get the port before the server of the test listens. Each process of the tests has a range.
FIRST, PER_PROCESS, PROCESSES = 12_000, 1_000, 20

_numbers = itertools.count(os.getpid())


def free_port() -> int:
    """Return a port on which nothing listens, and that this process has not returned lately."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PROCESSES
    while True:
        port = FIRST + process * PER_PROCESS + next(_numbers) % PER_PROCESS
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
