"""A connection to NATS that is encrypted if its URL says so, and remembers why it failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoServersError, SecureConnWantedError

LOST = (NatsError, OSError, asyncio.TimeoutError)
#: Seconds in which a client whose connection failed may close it; links wait a second longer than
#: the `timeout` of a connection.
CLOSE_SECONDS = 0.5


class NoStream(LookupError):
    """No stream has the subject."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"no JetStream stream has the subject {subject}: create one")


class EncryptingClient(Client):
    """Sends its login, and all else, only through TLS: the URLs begin with `tls://`.

    The client itself encrypts if the server asks for it, whatever the URL says.
    """

    def _connect_command(self) -> bytes:
        if not self._server_info.get("tls_required"):
            raise SecureConnWantedError
        return super()._connect_command()


async def connect(
    url: str,
    timeout: float,
    *,
    on_error: Callable[[Exception], None] | None = None,
    on_closed: Callable[[], Awaitable[None]] | None = None,
) -> Client:
    """Return a connected client, which does not reconnect by itself.

    `on_error` gets the errors that the server sends outside an answer. Raises one of `LOST`.
    """
    parts = urlsplit(url)
    client = EncryptingClient() if parts.scheme == "tls" else Client()
    latest: list[Exception] = []

    async def note(error: Exception) -> None:
        latest[:] = [error]
        if on_error is not None:
            on_error(error)

    try:
        await client.connect(
            servers_of(parts),
            connect_timeout=max(int(timeout), 1),
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            error_cb=note,
            closed_cb=on_closed,
            **login_of(parts),
        )
    except BaseException as error:
        # The client keeps the socket of a server that it refuses, and close() hangs after a TLS
        # handshake that failed.
        with suppress(*LOST):
            await asyncio.wait_for(client.close(), CLOSE_SECONDS)
        if isinstance(error, NoServersError) and latest:
            raise latest[0] from None
        raise
    return client


def servers_of(parts: SplitResult) -> list[str]:
    """Return the URL of each server, without the login.

    >>> servers_of(urlsplit("nats://ana:secret@one,two:4333"))
    ['nats://one', 'nats://two:4333']
    """
    hosts = parts.netloc.rpartition("@")[2]
    return [f"{parts.scheme}://{host}" for host in hosts.split(",")]


def login_of(parts: SplitResult) -> dict[str, Any]:
    """Return the login in a URL, percent-decoded; a user without a password is a token.

    >>> login_of(urlsplit("nats://ana:p%40ss@one")), login_of(urlsplit("nats://t0ken@one"))
    ({'user': 'ana', 'password': 'p@ss'}, {'token': 't0ken'})
    """
    if not parts.username:
        return {}
    if parts.password is None:
        return {"token": unquote(parts.username)}
    return {"user": unquote(parts.username), "password": unquote(parts.password)}


def reason(error: Exception, timeout: float) -> str:
    """Return why the server is away; the client's own text of a timeout is empty.

    >>> reason(TimeoutError(), 10.0)
    'no answer within 10 s'
    """
    if isinstance(error, asyncio.TimeoutError):
        return f"no answer within {timeout:g} s"
    return repr(error)
