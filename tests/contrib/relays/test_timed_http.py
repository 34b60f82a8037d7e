"""The connections of webhooks."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.request import Request

import pytest

from django_mq.contrib.relays.timed_http import TimedHTTPSHandler


def test_connections_share_the_context_of_their_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """To load the certificates of the system takes longer than most requests."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    handler = TimedHTTPSHandler(context=context)
    opened: list[Any] = []
    monkeypatch.setattr(handler, "do_open", lambda *_, **options: opened.append(options))
    handler.https_open(Request("https://example.com/"))
    assert opened == [{"context": context}]
