"""Relay to an HTTP server: a POST for each message, signed by the Standard Webhooks rules.

Source of the signature: https://github.com/standard-webhooks/standard-webhooks, version 1.0.0.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import HTTPException
from time import time
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from django_mq.conf.relays import WebhookDestination
from django_mq.contrib.relays.envelope import Outgoing, percent_encoded
from django_mq.contrib.relays.links import BrokerAway, NotTaken
from django_mq.contrib.relays.timed_http import TimedHTTPHandler, TimedHTTPSHandler
from django_mq.exceptions import Snooze

#: The answers of a gateway whose server is away, or fails on this message.
AWAY = {
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
#: The server counts as away after MAX_IN_A_ROW messages in a row that it did not take. After
#: MAX_NOT_TAKEN in a batch, the rest waits, too: each may have lasted for the whole timeout.
MAX_IN_A_ROW, MAX_NOT_TAKEN = 2, 5
#: Seconds that a `Retry-After` may ask for, at least and at most.
MIN_RETRY_AFTER, MAX_RETRY_AFTER = 1.0, 24 * 3600.0


class WebhookRefused(Exception):
    """The server answered with an error status."""


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: another server would get what was signed for this one."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class WebhookLink:
    """Sends messages to an HTTP server, several at once."""

    def __init__(self, destination: WebhookDestination) -> None:
        self._to = destination
        self._opener: OpenerDirector = build_opener(
            _NoRedirect, TimedHTTPHandler, TimedHTTPSHandler
        )
        self._threads = ThreadPoolExecutor(destination.concurrency, "django_mq-webhook")

    def send(self, batch: Sequence[Outgoing]) -> Iterator[tuple[Outgoing, Exception | None]]:
        """Post the messages; yield each with its error, None if the server accepted it.

        A message on which the server fails would keep all others back if that counted as an outage.
        It is an error of the message if the server took a later one of the batch.
        """
        away: list[BrokerAway] = []
        in_a_row = 0

        def post(message: Outgoing) -> Exception | None:
            nonlocal in_a_row
            if in_a_row >= MAX_IN_A_ROW or len(away) >= MAX_NOT_TAKEN:
                return BrokerAway(str(away[-1]))  # the others would wait for their timeouts in turn
            answer = self._post(message)
            if isinstance(answer, BrokerAway):
                away.append(answer)
                in_a_row += 1 if isinstance(answer, NotTaken) else MAX_IN_A_ROW
            else:
                in_a_row = 0
            return answer

        answers = list(self._threads.map(post, batch))
        last_taken = max((n for n, error in enumerate(answers) if error is None), default=-1)
        for n, (message, error) in enumerate(zip(batch, answers, strict=True)):
            if isinstance(error, NotTaken) and n < last_taken:
                yield message, WebhookRefused(f"{error}; the server took later messages")
            else:
                yield message, error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _post(self, message: Outgoing) -> Exception | None:
        """Return the error of one message; None if the server accepted it."""
        headers = self._headers(message)
        try:
            request = Request(self._to.url, message.body, headers, method="POST")  # noqa: S310  (checked)
            # The status decides; the body is not read.
            self._opener.open(request, timeout=self._to.timeout).close()
        except HTTPError as error:
            with error:
                return _answer(error)
        except URLError as error:
            sent = isinstance(error.reason, BrokenPipeError | ConnectionResetError)
            return (NotTaken if sent else BrokerAway)(f"{type(error).__name__}: {error}")
        except (OSError, HTTPException) as error:  # timeouts are OSErrors
            return NotTaken(f"{type(error).__name__}: {error}")
        except Exception as error:  # of this message alone
            return error
        return None

    def _headers(self, message: Outgoing) -> dict[str, str]:
        found = {"User-Agent": "django_mq", **self._to.headers}
        found["Content-Type"] = message.content_type
        for name, value in message.headers("ce-").items():
            found[name] = percent_encoded(value)
        found["webhook-id"] = message.id
        if self._to.secret:
            found["webhook-timestamp"] = str(int(time()))
            found["webhook-signature"] = signature(
                self._to.secret, message.id, found["webhook-timestamp"], message.body
            )
        return found


def signature(secrets: Sequence[str], id: str, timestamp: str, body: bytes) -> str:
    """Return the header `webhook-signature`: a signature by each secret.

    >>> signature(["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"], "msg_p5jXN8AQM9LWM0D4loKWxJek",
    ...     "1614265330", b'{"test": 2432232314}')
    'v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE='
    """
    signed = f"{id}.{timestamp}.".encode() + body
    return " ".join(
        "v1," + base64.b64encode(hmac.digest(key_of(each), signed, "sha256")).decode()
        for each in secrets
    )


def key_of(secret: str) -> bytes:
    """Return the key of a secret: base64 after `whsec_`, else the text itself.

    >>> key_of("whsec_aGk="), key_of("plain")
    (b'hi', b'plain')
    """
    prefix, _, encoded = secret.partition("_")
    return base64.b64decode(encoded) if prefix == "whsec" else secret.encode()


def _answer(error: HTTPError) -> Exception:
    """Return the error of a message that the server refused; BrokerAway if it may refuse all."""
    if error.code == HTTPStatus.TOO_MANY_REQUESTS or error.code in AWAY:
        after = retry_after(error.headers, now=time())
        if after is None:
            busy = error.code == HTTPStatus.TOO_MANY_REQUESTS
            return (BrokerAway if busy else NotTaken)(f"it answered {error.code}")
        wait = min(max(after, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
        return Snooze(wait, backoff=True, reason=f"the server answered {error.code}")
    return WebhookRefused(f"the server answered {error.code} {error.reason}")


def retry_after(headers: Message | Mapping[str, str], *, now: float) -> float | None:
    """Return the seconds that `Retry-After` asks for; None without a valid one.

    >>> retry_after({"Retry-After": "120"}, now=0), retry_after({"Retry-After": "soon"}, now=0)
    (120.0, None)
    >>> retry_after({"Retry-After": "Thu, 01 Jan 1970 00:01:00 GMT"}, now=0)
    60.0
    """
    given = (headers.get("Retry-After") or "").strip()
    if given.isascii() and given.isdigit():
        return float(given[:9])
    try:
        return max(parsedate_to_datetime(given).timestamp() - now, 0.0)
    except (ValueError, OverflowError, TypeError):
        return None
