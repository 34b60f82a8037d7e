"""Open the ports that a command answers on."""

from __future__ import annotations

from django.core.management.base import CommandError

from django_mq.supervisor.health import Endpoint


def endpoint(what: str, where: int | tuple[int, str] | None) -> Endpoint | None:
    """Listen on a port and an address; settings and `call_command()` may give only the port."""
    if not where:
        return None
    port, address = (where, "127.0.0.1") if isinstance(where, int) else where
    try:
        return Endpoint(port, address)
    except (OSError, OverflowError) as error:
        raise CommandError(f"{what} port {port} cannot be opened: {error}") from error
